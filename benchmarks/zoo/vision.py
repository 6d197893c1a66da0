"""Networks that see: windows, latents, video, weight norm, images beside text."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.zoo.draws import classes, normal
from benchmarks.zoo.network import Networks, classifier, trained
from benchmarks.zoo.parts import block, conv_norm, cross_entropy
from benchmarks.zoo.transformers import Transformer


def _windows(x: Any, size: int) -> Any:
    """Cuts `[batch, height, width, c]` into `[windows, size * size, c]`."""
    b, h, w, c = x.shape
    x = x.reshape(b, h // size, size, w // size, size, c)
    return x.transpose(0, 1, 3, 2, 4, 5).reshape(-1, size * size, c)


class WindowAttention(nn.Module):
    """Attention in shifted windows, with a trained bias for each relative position."""

    num_heads: int
    size: int
    shift: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        b, h, w, c = x.shape
        y = jnp.roll(x, (-self.shift, -self.shift), (1, 2))
        y = _windows(y, self.size)
        features = (3, self.num_heads, c // self.num_heads)
        q, k, v = jnp.moveaxis(nn.DenseGeneral(features)(y), 2, 0)
        scores = jnp.einsum("wqhd,wkhd->whqk", q, k) / features[2] ** 0.5
        scores = scores + self._bias()
        if self.shift:
            mask = jnp.asarray(self._mask(h, w))
            scores = scores.reshape(b, -1, *scores.shape[1:])
            scores = jnp.where(mask[:, None], scores, -1e9)
            scores = scores.reshape(-1, *scores.shape[2:])
        y = jnp.einsum("whqk,wkhd->wqhd", nn.softmax(scores), v).reshape(y.shape)
        y = nn.Dense(c)(y).reshape(
            b, h // self.size, w // self.size, *2 * [self.size], c
        )
        y = y.transpose(0, 1, 3, 2, 4, 5).reshape(b, h, w, c)
        return jnp.roll(y, (self.shift, self.shift), (1, 2))

    def _bias(self) -> jax.Array:
        side = 2 * self.size - 1
        table = self.param(
            "bias", nn.initializers.normal(0.02), (side * side, self.num_heads)
        )
        rows, columns = np.divmod(np.arange(self.size**2), self.size)
        index = (rows[:, None] - rows + self.size - 1) * side
        index += columns[:, None] - columns + self.size - 1
        return jnp.transpose(table[index], (2, 0, 1))

    def _mask(self, height: int, width: int) -> np.ndarray:
        """Returns which pairs were neighbors before the shift, `[windows, q, k]`."""
        rows, columns = (
            1 * (np.arange(n) >= n - self.size) + (np.arange(n) >= n - self.shift)
            for n in (height, width)
        )
        regions = _windows((3 * rows[:, None] + columns)[None, :, :, None], self.size)
        return regions == regions.transpose(0, 2, 1)


class Swin(nn.Module):
    """Two stages of shifted windows (Liu et al., 2021)."""

    remat: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.LayerNorm()(nn.Conv(48, (4, 4), 4)(x))
        for stage in range(2):
            if stage:
                b, h, w, c = x.shape
                x = x.reshape(b, h // 2, 2, w // 2, 2, c).transpose(0, 1, 3, 2, 4, 5)
                x = nn.LayerNorm()(x.reshape(b, h // 2, w // 2, 4 * c))
                x = nn.Dense(2 * c, use_bias=False)(x)
            for shift in (0, 2):
                attention = WindowAttention(3 * (stage + 1), 4, shift)
                x = block(Swin._block, self.remat)(self, x, attention)
        return nn.Dense(10)(jnp.mean(nn.LayerNorm()(x), (1, 2)))

    def _block(self, x: jax.Array, attention: nn.Module) -> jax.Array:
        x = x + attention(nn.LayerNorm()(x))
        y = nn.gelu(nn.Dense(4 * x.shape[-1])(nn.LayerNorm()(x)))
        return x + nn.Dense(x.shape[-1])(y)


class Perceiver(nn.Module):
    """Latents that attend to pixels, again and again (Jaegle et al., 2021)."""

    @nn.compact
    def __call__(self, pixels: jax.Array) -> jax.Array:
        shape = (32, 128)
        latents = self.param("latents", nn.initializers.normal(1.0), shape)
        latents = jnp.broadcast_to(latents, (len(pixels), *shape))
        positions = self.param(
            "positions", nn.initializers.normal(0.5), (pixels.shape[1], 32)
        )
        positions = jnp.broadcast_to(positions, (*pixels.shape[:2], 32))
        inputs = nn.Dense(64)(jnp.concatenate([pixels, positions], -1))
        # The same weights each time.
        attend, reflect = nn.MultiHeadDotProductAttention(4), Transformer(2)
        norm_latents, norm_inputs = nn.LayerNorm(), nn.LayerNorm()
        for _ in range(2):
            latents += attend(norm_latents(latents), norm_inputs(inputs))
            latents = reflect(latents)
        return nn.Dense(10)(jnp.mean(latents, 1))


class VideoNet(nn.Module):
    """Residual blocks of 3-D convolutions, `[batch, time, height, width, 3]`."""

    remat: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.relu(conv_norm(x, 16, (3, 5, 5), (1, 2, 2)))
        for _ in range(2):
            x = block(VideoNet._block, self.remat)(self, x)
            x = nn.Conv(2 * x.shape[-1], (1, 1, 1))(x)
            x = nn.max_pool(x, (2, 2, 2), (2, 2, 2))
        return nn.Dense(10)(jnp.mean(x, (1, 2, 3)))

    def _block(self, x: jax.Array) -> jax.Array:
        y = nn.relu(conv_norm(x, x.shape[-1], (3, 3, 3)))
        return nn.relu(x + conv_norm(y, x.shape[-1], (3, 3, 3)))


class WeightNormed(nn.Module):
    """Convolutions with a norm of their weights (Salimans and Kingma, 2016)."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for width in (32, 64, 128):
            for _ in range(2):
                x = nn.leaky_relu(nn.WeightNorm(nn.Conv(width, (3, 3)))(x), 0.1)
            x = nn.max_pool(x, (2, 2), (2, 2))
        return nn.WeightNorm(nn.Dense(10))(jnp.mean(x, (1, 2)))


class CLIP(nn.Module):
    """Images and texts in one space (Radford et al., 2021); returns logits."""

    remat: bool = False

    @nn.compact
    def __call__(self, images: jax.Array, tokens: jax.Array) -> jax.Array:
        x = nn.Conv(64, (4, 4), 4)(images).reshape(len(images), -1, 64)
        x = x + self.param("image_positions", nn.initializers.normal(), x.shape[1:])
        x = Transformer(2, remat=self.remat)(x)
        y = nn.Embed(64, 64)(tokens)
        y = y + self.param("text_positions", nn.initializers.normal(), y.shape[1:])
        y = Transformer(2, is_causal=True, remat=self.remat)(y)
        x, y = nn.Dense(64)(jnp.mean(x, 1)), nn.Dense(64)(y[:, -1])
        x /= jnp.linalg.norm(x, axis=-1, keepdims=True)
        y /= jnp.linalg.norm(y, axis=-1, keepdims=True)
        return x @ y.T * jnp.exp(self.param("scale", nn.initializers.ones, ()))


def _contrastive(logits: jax.Array) -> jax.Array:
    labels = jnp.arange(len(logits))
    return (cross_entropy(logits, labels) + cross_entropy(logits.T, labels)) / 2


NETWORKS: Networks = {
    "swin": lambda: classifier(Swin(), normal(2, 8, 64, 64, 3)),
    "perceiver": lambda: classifier(Perceiver(), normal(2, 8, 1024, 3)),
    "video": lambda: classifier(VideoNet(), normal(2, 8, 8, 32, 32, 3)),
    "weight_norm": lambda: classifier(WeightNormed(), normal(2, 16, 32, 32, 3)),
    "clip": lambda: trained(
        CLIP(), _contrastive, [normal(2, 16, 32, 32, 3), classes(3, 64, 16, 32)]
    ),
}
