"""Residual networks for image classification, in plain Flax Linen.

He, Zhang, Ren, Sun: Deep Residual Learning for Image Recognition,
https://arxiv.org/abs/1512.03385. `wrap_block` is injected, so that every method of
saving memory runs on the very same model.
"""

import dataclasses
import functools
from typing import Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from models.checks import check_sizes
from models.wrapping import WrapBlock, no_wrapping


@dataclasses.dataclass(frozen=True)
class ResNetConfig:
    """The shape of a residual network.

    Attributes:
        stage_sizes: The number of blocks in each stage; each stage after the first
            halves the image and doubles the filters.
        num_classes: The number of logits.
        num_filters: Filters of the first stage. 64 is the width of the paper.
        stem: `"cifar"` is one 3x3 convolution that keeps the image size (section 4.2
            of the paper), `"imagenet"` a strided 7x7 convolution and a max-pool.
        block: `"basic"` is two 3x3 convolutions, `"bottleneck"` one between two 1x1
            that make it four times narrower than what passes between blocks (figure 5).
        dtype: What is computed in: float32 or bfloat16. Weights, statistics of norms,
            and logits are float32 in any case.
    """

    stage_sizes: tuple[int, ...]
    num_classes: int = 10
    num_filters: int = 64
    stem: Literal["cifar", "imagenet"] = "cifar"
    block: Literal["basic", "bottleneck"] = "basic"
    dtype: DTypeLike = jnp.float32

    def __post_init__(self) -> None:
        if not self.stage_sizes or min(self.stage_sizes) < 1:
            raise ValueError(
                "`stage_sizes` must hold at least one block for each stage, but got "
                f"{self.stage_sizes}."
            )
        check_sizes(self, "num_filters", "num_classes")
        if self.stem not in ("cifar", "imagenet"):
            raise ValueError(
                f"`stem` must be 'cifar' or 'imagenet', but got {self.stem!r}."
            )
        if self.block not in ("basic", "bottleneck"):
            raise ValueError(
                f"`block` must be 'basic' or 'bottleneck', but got {self.block!r}."
            )

    @property
    def trained(self) -> tuple[str, ...]:
        """Paths of the variables that are trained, for `lora.split`."""
        return ("params",)


def _batch_norm(
    train: bool, dtype: DTypeLike, name: str, **options: object
) -> nn.BatchNorm:
    # Momentum 0.9 lets the running statistics settle within some thirty steps, so
    # that short runs evaluate on them sensibly.
    return nn.BatchNorm(
        use_running_average=not train,
        momentum=0.9,
        epsilon=1e-5,
        dtype=dtype,
        name=name,
        **options,
    )


def _conv(
    num_filters: int, size: int, strides: int, dtype: DTypeLike, name: str
) -> nn.Conv:
    margin = size // 2
    return nn.Conv(
        num_filters,
        (size, size),
        strides=(strides, strides),
        padding=[(margin, margin), (margin, margin)],
        use_bias=False,
        dtype=dtype,
        kernel_init=nn.initializers.he_normal(),
        name=name,
    )


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut (the paper's figure 2).

    `train` is a field, not an argument of the call, so that a wrapper sees a function
    of arrays only.
    """

    num_filters: int
    strides: int
    train: bool
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        # x: [batch, height, width, channels]
        y = _conv(self.num_filters, 3, self.strides, self.dtype, "conv1")(x)
        y = nn.relu(_batch_norm(self.train, self.dtype, "norm1")(y))
        y = _conv(self.num_filters, 3, 1, self.dtype, "conv2")(y)
        # A zero scale makes each block an identity at the start, which trains faster:
        # Goyal et al., https://arxiv.org/abs/1706.02677, section 5.1.
        y = _batch_norm(
            self.train, self.dtype, "norm2", scale_init=nn.initializers.zeros
        )(y)
        if x.shape != y.shape:
            x = _conv(self.num_filters, 1, self.strides, self.dtype, "shortcut")(x)
            x = _batch_norm(self.train, self.dtype, "shortcut_norm")(x)
        return nn.relu(x + y)


class BottleneckBlock(nn.Module):
    """A 3x3 convolution between two 1x1, and a shortcut (the paper's figure 5).

    The 3x3 convolution has the stride, not the first 1x1 as in the paper: so it reads
    every pixel, and so are the weights that are published.
    """

    num_filters: int
    strides: int
    train: bool
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        # x: [batch, height, width, channels]
        y = _conv(self.num_filters, 1, 1, self.dtype, "conv1")(x)
        y = nn.relu(_batch_norm(self.train, self.dtype, "norm1")(y))
        y = _conv(self.num_filters, 3, self.strides, self.dtype, "conv2")(y)
        y = nn.relu(_batch_norm(self.train, self.dtype, "norm2")(y))
        y = _conv(4 * self.num_filters, 1, 1, self.dtype, "conv3")(y)
        y = _batch_norm(
            self.train, self.dtype, "norm3", scale_init=nn.initializers.zeros
        )(y)
        if x.shape != y.shape:
            x = _conv(4 * self.num_filters, 1, self.strides, self.dtype, "shortcut")(x)
            x = _batch_norm(self.train, self.dtype, "shortcut_norm")(x)
        return nn.relu(x + y)


class ResNet(nn.Module):
    """A residual network; its blocks are of class `wrap_block(ResidualBlock)`.

    With `block="bottleneck"` they are of class `wrap_block(BottleneckBlock)`.
    """

    config: ResNetConfig
    wrap_block: WrapBlock = no_wrapping

    @nn.compact
    def __call__(self, images: jax.Array, *, train: bool) -> jax.Array:
        """Maps images [batch, height, width, channels] to logits [batch, classes]."""
        bottleneck = self.config.block == "bottleneck"
        block_class = self.wrap_block(BottleneckBlock if bottleneck else ResidualBlock)
        x = self._stem(images, train)
        for stage, num_blocks in enumerate(self.config.stage_sizes):
            for index in range(num_blocks):
                # Blocks carry explicit names: initial weights depend on the names, and
                # a wrapper may change those that Flax would choose.
                x = block_class(
                    num_filters=self.config.num_filters * 2**stage,
                    strides=2 if stage > 0 and index == 0 else 1,
                    train=train,
                    dtype=self.config.dtype,
                    name=f"stage{stage + 1}_block{index + 1}",
                )(x)
        if x.dtype == jnp.bfloat16:
            x = x.astype(jnp.float32)
        x = jnp.mean(x, axis=(1, 2))  # [batch, channels]
        return nn.Dense(self.config.num_classes, name="head")(x)

    def _stem(self, images: jax.Array, train: bool) -> jax.Array:
        if self.config.stem == "cifar":
            x = _conv(self.config.num_filters, 3, 1, self.config.dtype, "stem")(images)
            return nn.relu(_batch_norm(train, self.config.dtype, "stem_norm")(x))
        x = _conv(self.config.num_filters, 7, 2, self.config.dtype, "stem")(images)
        x = nn.relu(_batch_norm(train, self.config.dtype, "stem_norm")(x))
        return nn.max_pool(x, (3, 3), strides=(2, 2), padding=[(1, 1), (1, 1)])


resnet18 = functools.partial(ResNetConfig, stage_sizes=(2, 2, 2, 2))
resnet34 = functools.partial(ResNetConfig, stage_sizes=(3, 4, 6, 3))
resnet50 = functools.partial(ResNetConfig, stage_sizes=(3, 4, 6, 3), block="bottleneck")
