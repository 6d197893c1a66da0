"""Transformers with an encoder: T5 and BERT."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.zoo.draws import classes
from benchmarks.zoo.network import (
    Network,
    Networks,
    applied,
    initial,
    of_module,
    trained,
)
from benchmarks.zoo.parts import block, cross_entropy


_VOCABULARY = 128


class RelativeBias(nn.Module):
    """A trained bias for each head and distance, `[heads, queries, keys]`."""

    num_heads: int
    is_causal: bool
    num_buckets: int = 16

    @nn.compact
    def __call__(self, queries: int, keys: int) -> jax.Array:
        distances = np.arange(keys) - np.arange(queries)[:, None]
        half = self.num_buckets // 2
        buckets = np.minimum(np.log2(1 + np.abs(distances)) * 1.5, half - 1).astype(int)
        buckets += half * (distances > 0)
        bias = nn.Embed(self.num_buckets, self.num_heads)(buckets)
        bias = jnp.transpose(bias, (2, 0, 1))
        return jnp.where(distances > 0, -1e9, bias) if self.is_causal else bias


class BiasedAttention(nn.Module):
    """Attention with a bias and without a division by the width, as in T5."""

    num_heads: int

    @nn.compact
    def __call__(self, x: jax.Array, memory: jax.Array, bias: Any) -> jax.Array:
        features = (self.num_heads, x.shape[-1] // self.num_heads)
        q = nn.DenseGeneral(features, use_bias=False)(x) / features[1] ** 0.5
        k = nn.DenseGeneral(features, use_bias=False)(memory)
        v = nn.DenseGeneral(features, use_bias=False)(memory)
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) + bias
        y = jnp.einsum("bhqk,bkhd->bqhd", nn.softmax(scores), v)
        return nn.DenseGeneral(x.shape[-1], (-2, -1), use_bias=False)(y)


class T5(nn.Module):
    """An encoder and a decoder with relative positions (Raffel et al., 2020)."""

    num_heads: int = 4
    remat: bool = False

    @nn.compact
    def __call__(self, source: jax.Array, target: jax.Array) -> jax.Array:
        embed = nn.Embed(_VOCABULARY, 96)
        layer = block(T5._layer, self.remat)
        x, y = embed(source), embed(target)
        bias = RelativeBias(self.num_heads, is_causal=False)(x.shape[1], x.shape[1])
        for _ in range(2):
            x = layer(self, x, None, bias)
        x = nn.RMSNorm()(x)
        bias = RelativeBias(self.num_heads, is_causal=True)(y.shape[1], y.shape[1])
        for _ in range(2):
            y = layer(self, y, x, bias)
        return nn.Dense(_VOCABULARY, use_bias=False)(nn.RMSNorm()(y))

    def _layer(self, x: jax.Array, memory: jax.Array | None, bias: Any) -> jax.Array:
        y = nn.RMSNorm()(x)
        x = x + BiasedAttention(self.num_heads)(y, y, bias)
        if memory is not None:
            x = x + BiasedAttention(self.num_heads)(nn.RMSNorm()(x), memory, 0)
        y = nn.RMSNorm()(x)
        y = nn.gelu(nn.Dense(256, use_bias=False)(y)) * nn.Dense(256, use_bias=False)(y)
        return x + nn.Dense(96, use_bias=False)(y)


class Bert(nn.Module):
    """Norms after the sums, dropout and padding (Devlin et al., 2019)."""

    remat: bool = False

    @nn.compact
    def __call__(self, tokens: jax.Array, is_real: jax.Array) -> jax.Array:
        x = nn.Embed(_VOCABULARY, 96)(tokens)
        x += nn.Embed(tokens.shape[1], 96)(jnp.arange(tokens.shape[1]))
        x = nn.Dropout(0.1, deterministic=False)(nn.LayerNorm()(x))
        mask = nn.make_attention_mask(is_real, is_real)
        for _ in range(3):
            x = block(Bert._layer, self.remat)(self, x, mask)
        x = nn.LayerNorm()(nn.gelu(nn.Dense(96)(x)))
        return nn.Dense(_VOCABULARY)(x)

    def _layer(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        attention = nn.MultiHeadDotProductAttention(
            4, dropout_rate=0.1, deterministic=False
        )
        dropout = nn.Dropout(0.1, deterministic=False)
        x = nn.LayerNorm()(x + dropout(attention(x, mask=mask)))
        y = nn.Dense(96)(nn.gelu(nn.Dense(384)(x)))
        return nn.LayerNorm()(x + dropout(y))


def _bert() -> Network:
    tokens, labels = classes(2, _VOCABULARY, 8, 64), classes(3, _VOCABULARY, 8, 64)
    is_real = jnp.arange(64) < classes(4, 64, 8, 1) + 16
    is_masked = jax.random.bernoulli(jax.random.key(5), 0.15, tokens.shape) & is_real
    key = jax.random.key(6)

    def loss(
        module: nn.Module,
        params: Any,
        tokens: Any,
        labels: Any,
        is_real: Any,
        is_masked: Any,
        key: Any,
    ) -> jax.Array:
        logits = applied(module, params, tokens, is_real, rngs={"dropout": key})
        chosen = jnp.take_along_axis(nn.log_softmax(logits), labels[..., None], -1)
        return -jnp.sum(chosen[..., 0] * is_masked) / jnp.sum(is_masked)

    params = initial(Bert(), tokens, is_real)
    return of_module(Bert(), loss, params, tokens, labels, is_real, is_masked, key)


NETWORKS: Networks = {
    "t5": lambda: trained(
        T5(),
        cross_entropy,
        [classes(2, _VOCABULARY, 8, 64), classes(3, _VOCABULARY, 8, 64)],
        [classes(4, _VOCABULARY, 8, 64)],
    ),
    "bert": _bert,
}
