"""Convolutional networks, with each of the norms."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from benchmarks.zoo.draws import normal
from benchmarks.zoo.network import Network, Networks, applied, classifier
from benchmarks.zoo.parts import batch_norm, block, conv_norm, mean_square


def _depthwise(x: jax.Array, stride: int) -> jax.Array:
    """A convolution of each channel by itself, then a batch norm."""
    channels = x.shape[-1]
    return conv_norm(x, channels, (3, 3), stride, feature_group_count=channels)


class MobileNet(nn.Module):
    """MobileNetV1 (Howard et al., 2017), `[batch, height, width, 3]`."""

    width: float = 1.0

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        layers = [(64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2)]
        layers += [(512, 1)] * 5 + [(1024, 2), (1024, 1)]
        x = nn.relu(conv_norm(x, int(32 * self.width), (3, 3), 2))
        for channels, stride in layers:
            x = nn.relu(_depthwise(x, stride))
            x = nn.relu(conv_norm(x, int(channels * self.width), (1, 1)))
        return nn.Dense(10)(jnp.mean(x, (1, 2)))


class EfficientNet(nn.Module):
    """Inverted bottlenecks with squeeze-and-excitation (Tan and Le, 2019)."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.silu(conv_norm(x, 16, (3, 3)))
        for channels, stride in [(16, 1), (24, 2), (24, 1), (40, 2), (40, 1)]:
            x = self._block(x, channels, stride)
        return nn.Dense(10)(jnp.mean(x, (1, 2)))

    def _block(self, x: jax.Array, channels: int, stride: int) -> jax.Array:
        width = 4 * x.shape[-1]
        y = nn.silu(_depthwise(nn.silu(conv_norm(x, width, (1, 1))), stride))
        squeezed = jnp.mean(y, (1, 2), keepdims=True)
        squeezed = nn.silu(nn.Conv(x.shape[-1] // 4, (1, 1))(squeezed))
        y = y * nn.sigmoid(nn.Conv(width, (1, 1))(squeezed))
        y = conv_norm(y, channels, (1, 1))
        return x + y if x.shape == y.shape else y


class ConvNeXt(nn.Module):
    """Depthwise 7 x 7, layer norm, MLP (Liu et al., 2022)."""

    remat: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.LayerNorm()(nn.Conv(48, (4, 4), 4)(x))
        for n in range(3):
            scale = self.param(f"scale_{n}", nn.initializers.constant(0.5), (48,))
            x = block(ConvNeXt._block, self.remat)(self, x, scale)
        return nn.Dense(10)(nn.LayerNorm()(jnp.mean(x, (1, 2))))

    def _block(self, x: jax.Array, scale: jax.Array) -> jax.Array:
        y = nn.Conv(48, (7, 7), feature_group_count=48)(x)
        y = nn.gelu(nn.Dense(192)(nn.LayerNorm()(y)))
        return x + scale * nn.Dense(48)(y)


class ResidualNet(nn.Module):
    """Residual blocks of two convolutions with norms of one kind."""

    norm: Callable[[], Any]
    channels: int = 32
    remat: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.relu(self.norm()(nn.Conv(self.channels, (3, 3))(x)))
        for _ in range(3):
            x = block(ResidualNet._block, self.remat)(self, x)
        return nn.Dense(10)(jnp.mean(x, (1, 2)))

    def _block(self, x: jax.Array) -> jax.Array:
        y = nn.relu(self.norm()(nn.Conv(self.channels, (3, 3))(x)))
        y = self.norm()(nn.Conv(self.channels, (3, 3))(y))
        return nn.relu(x + y)


class UNet(nn.Module):
    """An encoder and a decoder with skips and group norms, for diffusion."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        skips = []
        for width in (16, 32, 64):
            x = nn.silu(nn.GroupNorm(8)(nn.Conv(width, (3, 3))(x)))
            skips.append(x)
            x = nn.avg_pool(x, (2, 2), (2, 2))
        x = nn.silu(nn.GroupNorm(8)(nn.Conv(64, (3, 3))(x)))
        for width, skip in zip((64, 32, 16), reversed(skips), strict=True):
            x = jax.image.resize(x, skip.shape[:3] + x.shape[3:], "nearest")
            x = jnp.concatenate([x, skip], -1)
            x = nn.silu(nn.GroupNorm(8)(nn.Conv(width, (3, 3))(x)))
        return nn.Conv(3, (3, 3))(x)


def _unet() -> Network:
    module = UNet()
    x = normal(2, 8, 32, 32, 3)
    params = jax.jit(module.init)(jax.random.key(0), x)["params"]

    def loss(params: Any, x: jax.Array, noise: jax.Array) -> jax.Array:
        return mean_square(applied(module, params, x), noise)

    return Network(loss, params, (x, normal(3, *x.shape)))


def _images(size: int, batch: int = 16) -> jax.Array:
    return normal(2, batch, size, size, 3)


NETWORKS: Networks = {
    "mobilenet": lambda: classifier(MobileNet(), _images(64)),
    "efficientnet": lambda: classifier(EfficientNet(), _images(32)),
    "convnext": lambda: classifier(ConvNeXt(), _images(64)),
    "batch_norm_32": lambda: classifier(ResidualNet(batch_norm), _images(16)),
    "batch_norm_few": lambda: classifier(ResidualNet(batch_norm), _images(16, batch=2)),
    "group_norm_64": lambda: classifier(
        ResidualNet(lambda: nn.GroupNorm(8), channels=64), _images(16)
    ),
    "instance_norm_32": lambda: classifier(ResidualNet(nn.InstanceNorm), _images(16)),
    "unet": _unet,
}
