"""Language models as they are trained today."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.zoo.draws import classes, normal, weights
from benchmarks.zoo.network import Network, Networks, classifier, language_model
from benchmarks.zoo.parts import block, cross_entropy


_VOCABULARY = 128


def rotated(x: jax.Array) -> jax.Array:
    """Turns pairs of channels by an angle that grows with time, `[b, t, h, d]`."""
    rates = 10000.0 ** -jnp.linspace(0, 1, x.shape[-1] // 2, endpoint=False)
    angles = jnp.arange(x.shape[1])[:, None, None] * rates
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    a, b = jnp.split(x.astype(jnp.float32), 2, -1)
    out = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)
    return out.astype(x.dtype)


def grouped_attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Causal attention with fewer keys than queries, `[batch, time, heads, width]`."""
    groups = q.shape[2] // k.shape[2]
    q = q.reshape(*q.shape[:2], k.shape[2], groups, q.shape[3])
    scores = jnp.einsum("bqhgd,bkhd->bhgqk", q, k) / q.shape[-1] ** 0.5
    mask = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    scores = jnp.where(mask, scores.astype(jnp.float32), -jnp.inf)
    y = jnp.einsum("bhgqk,bkhd->bqhgd", nn.softmax(scores).astype(v.dtype), v)
    return y.reshape(*y.shape[:2], -1)


class QwenBlock(nn.Module):
    """RMS norms, also of queries and keys; rotary positions; SwiGLU."""

    dtype: Any
    num_heads: int = 8
    num_kv_heads: int = 2

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        def norm(name: str) -> nn.Module:
            return nn.RMSNorm(dtype=self.dtype, name=name)

        def dense(features: int, name: str) -> nn.Module:
            return nn.Dense(features, use_bias=False, dtype=self.dtype, name=name)

        size = x.shape[-1] // self.num_heads
        y: Any = norm("attention_norm")(x)
        q, k, v = (
            dense(heads * size, name)(y).reshape(*y.shape[:2], heads, size)
            for name, heads in [
                ("q", self.num_heads),
                ("k", self.num_kv_heads),
                ("v", self.num_kv_heads),
            ]
        )
        q, k = rotated(norm("q_norm")(q)), rotated(norm("k_norm")(k))
        x = x + dense(x.shape[-1], "o")(grouped_attention(q, k, v))
        y = norm("mlp_norm")(x)
        y = nn.silu(dense(3 * x.shape[-1], "gate")(y)) * dense(3 * x.shape[-1], "up")(y)
        return x + dense(x.shape[-1], "down")(y)


class Qwen(nn.Module):
    """Blocks in a loop or in a scan, in bfloat16 or not (Yang et al., 2025)."""

    dtype: Any = jnp.bfloat16
    scans: bool = False
    num_layers: int = 3
    remat: bool = False

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        embed = nn.Embed(_VOCABULARY, 128, dtype=self.dtype)
        x = embed(tokens)
        make = nn.remat(QwenBlock) if self.remat else QwenBlock
        if self.scans:
            layers = nn.scan(
                lambda module, x, _: (module(x), None),
                variable_axes={"params": 0},
                split_rngs={"params": True},
                length=self.num_layers,
            )
            x, _ = layers(make(self.dtype, name="layers"), x, None)
        else:
            for n in range(self.num_layers):
                x = make(self.dtype, name=f"layer_{n}")(x)
        x = nn.RMSNorm(dtype=self.dtype)(x)
        return embed.attend(x).astype(jnp.float32)


class GEGLU(nn.Module):
    """Gated feed-forward layers (Shazeer, 2020): one product, cut in halves."""

    remat: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for _ in range(4):
            x = block(GEGLU._block, self.remat)(self, x)
        return nn.Dense(10)(x)

    def _block(self, x: jax.Array) -> jax.Array:
        y, gate = jnp.split(nn.Dense(512)(nn.LayerNorm()(x)), 2, -1)
        return x + nn.Dense(x.shape[-1])(y * nn.gelu(gate))


def _llama_lora() -> Network:
    """Adapters of rank 4 on queries and values; stacked layers in a `lax.scan`."""
    layers, width, rank, heads = 4, 128, 4, 4
    shapes = {name: (width, width) for name in "qkvo"}
    shapes |= {"gate": (width, 384), "up": (width, 384), "down": (384, width)}
    base = {
        "embed": normal(9, _VOCABULARY, width),
        "head": weights(8, width, _VOCABULARY),
        "layers": {
            name: weights(10 + n, layers, *shape)
            for n, (name, shape) in enumerate(shapes.items())
        }
        | {name: jnp.ones((layers, width)) for name in ("norm_1", "norm_2")},
    }
    adapters = {
        name: {
            "a": weights(20 + n, layers, width, rank),
            "b": 0.1 * weights(30 + n, layers, rank, width),
        }
        for n, name in enumerate("qv")
    }

    def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
        return scale * x * lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)

    def layer(x: jax.Array, stacked: Any) -> tuple[jax.Array, None]:
        p, adapter = stacked
        y = norm(x, p["norm_1"])
        q = y @ p["q"] + 2 * (y @ adapter["q"]["a"]) @ adapter["q"]["b"]
        v = y @ p["v"] + 2 * (y @ adapter["v"]["a"]) @ adapter["v"]["b"]
        q, k, v = (z.reshape(*y.shape[:2], heads, -1) for z in (q, y @ p["k"], v))
        x = x + grouped_attention(rotated(q), rotated(k), v) @ p["o"]
        y = norm(x, p["norm_2"])
        return x + (jax.nn.silu(y @ p["gate"]) * (y @ p["up"])) @ p["down"], None

    def loss_of(layer: Callable[..., Any]) -> Callable[..., jax.Array]:
        def loss(adapters: Any, base: Any, tokens: jax.Array) -> jax.Array:
            x = base["embed"][tokens[:, :-1]]
            x, _ = lax.scan(layer, x, (base["layers"], adapters))
            return cross_entropy(x @ base["head"], tokens[:, 1:])

        return loss

    batch = (base, classes(2, _VOCABULARY, 8, 65))
    return Network(loss_of(layer), adapters, batch, loss_of(jax.checkpoint(layer)))


NETWORKS: Networks = {
    "qwen": lambda: language_model(Qwen(), _VOCABULARY),
    "qwen_float32": lambda: language_model(Qwen(dtype=jnp.float32), _VOCABULARY),
    "qwen_scan": lambda: language_model(Qwen(scans=True), _VOCABULARY),
    "llama_lora": _llama_lora,
    "geglu": lambda: classifier(GEGLU(), normal(2, 1024, 128)),
}
