"""Transformers and their parts."""

from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from benchmarks.zoo.draws import normal
from benchmarks.zoo.network import Network, Networks, classifier, language_model
from benchmarks.zoo.parts import block


class Attention(nn.Module):
    """Self-attention, causal or not, with queries and keys normalized or not."""

    num_heads: int
    normalizes: bool = False
    is_causal: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        width = x.shape[-1] // self.num_heads
        q, k, v = (
            nn.DenseGeneral((self.num_heads, width), use_bias=False, name=name)(x)
            for name in "qkv"
        )
        if self.normalizes:
            q, k = nn.RMSNorm(name="q_norm")(q), nn.RMSNorm(name="k_norm")(k)
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / width**0.5
        if self.is_causal:
            mask = jnp.tril(jnp.ones(scores.shape[-2:], bool))
            scores = jnp.where(mask, scores, -1e30)
        y = jnp.einsum("bhqk,bkhd->bqhd", nn.softmax(scores), v)
        return nn.DenseGeneral(x.shape[-1], (-2, -1), use_bias=False, name="o")(y)


class LinearAttention(nn.Module):
    """Causal attention without a softmax (Katharopoulos et al., 2020)."""

    num_heads: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        width = x.shape[-1] // self.num_heads
        q, k, v = (nn.DenseGeneral((self.num_heads, width), name=n)(x) for n in "qkv")
        q, k = nn.elu(q) + 1, nn.elu(k) + 1
        states = jnp.cumsum(jnp.einsum("bthd,bthe->bthde", k, v), 1)
        total = jnp.einsum("bthd,bthd->bth", q, jnp.cumsum(k, 1))
        y = jnp.einsum("bthd,bthde->bthe", q, states) / (total[..., None] + 1e-6)
        return nn.DenseGeneral(x.shape[-1], (-2, -1), name="o")(y)


class Transformer(nn.Module):
    """Blocks of attention and an MLP, with norms before both."""

    num_layers: int = 3
    num_heads: int = 4
    normalizes: bool = False
    is_causal: bool = False
    norm: Any = nn.LayerNorm
    is_gated: bool = False
    is_linear: bool = False
    remat: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for _ in range(self.num_layers):
            x = block(Transformer._block, self.remat)(self, x)
        return self.norm()(x)

    def _block(self, x: jax.Array) -> jax.Array:
        width = x.shape[-1]
        if self.is_linear:
            attention = LinearAttention(self.num_heads)
        else:
            attention = Attention(self.num_heads, self.normalizes, self.is_causal)
        x = x + attention(self.norm()(x))
        y = self.norm()(x)
        if self.is_gated:
            y = nn.silu(nn.Dense(3 * width)(y)) * nn.Dense(3 * width)(y)
        else:
            y = nn.gelu(nn.Dense(4 * width)(y))
        return x + nn.Dense(width)(y)


class ViT(nn.Module):
    """A vision transformer (Dosovitskiy et al., 2021)."""

    remat: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Conv(96, (4, 4), 4)(x)
        x = x.reshape(len(x), -1, 96)
        x = x + self.param("positions", nn.initializers.normal(0.02), x.shape[1:])
        return nn.Dense(10)(Transformer(num_heads=3, remat=self.remat)(x)[:, 0])


class Language(nn.Module):
    """A language model; rotary positions are left out."""

    width: int
    options: Mapping[str, Any]
    remat: bool = False

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = nn.Embed(64, self.width)(tokens)
        blocks = Transformer(**self.options, remat=self.remat, name="blocks")
        return nn.Dense(64)(blocks(x))


class Experts(nn.Module):
    """A mixture of experts, the best two of eight, with dense routing."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        scores = nn.softmax(nn.Dense(8)(x))
        best, _ = jax.lax.top_k(scores, 2)
        gates = jnp.where(scores >= best[..., -1:], scores, 0)
        gates = gates / jnp.sum(gates, -1, keepdims=True)
        width = x.shape[-1]
        into = self.param("into", nn.initializers.lecun_normal(), (8, width, 2 * width))
        out = self.param("out", nn.initializers.lecun_normal(), (8, 2 * width, width))
        y = nn.gelu(jnp.einsum("btd,edf->btef", x, into))
        return jnp.einsum("btef,efd,bte->btd", y, out, gates)


class MoE(nn.Module):
    """Blocks of attention and a mixture of experts."""

    remat: bool = False

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = nn.Embed(64, 64)(tokens)
        for _ in range(2):
            x = block(MoE._block, self.remat)(self, x)
        return nn.Dense(64)(nn.LayerNorm()(x))

    def _block(self, x: jax.Array) -> jax.Array:
        x = x + Attention(4, is_causal=True)(nn.LayerNorm()(x))
        return x + Experts()(nn.LayerNorm()(x))


class Norms(nn.Module):
    """Residual layers of one width with norms of one kind before them."""

    norm: Any
    width: int
    remat: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for _ in range(4):
            x = block(Norms._block, self.remat)(self, x)
        return nn.Dense(10)(self.norm()(x))

    def _block(self, x: jax.Array) -> jax.Array:
        y = nn.gelu(nn.Dense(self.width)(self.norm()(x)))
        return x + nn.Dense(self.width)(y)


def _language(width: int, **options: Any) -> Network:
    return language_model(Language(width, {"is_causal": True, **options}), 64)


def _norms(norm: Any, width: int) -> Network:
    return classifier(Norms(norm, width), normal(2, 512, width))


NETWORKS: Networks = {
    "vit": lambda: classifier(ViT(), normal(2, 16, 32, 32, 3)),
    "gpt": lambda: _language(128),
    "qk_norm": lambda: _language(128, normalizes=True),
    "llama": lambda: _language(96, norm=nn.RMSNorm, is_gated=True, normalizes=True),
    "linear_attention": lambda: _language(64, is_linear=True),
    "moe": lambda: language_model(MoE(), 64),
    "rms_norm_512": lambda: _norms(nn.RMSNorm, 512),
    "rms_norm_48": lambda: _norms(nn.RMSNorm, 48),
    "layer_norm_32": lambda: _norms(nn.LayerNorm, 32),
    "layer_norm_192": lambda: _norms(nn.LayerNorm, 192),
}
