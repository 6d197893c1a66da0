"""Layers and losses that several networks have."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Returns the mean over all labels."""
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return jnp.mean(losses)


def mean_square(predicted: jax.Array, target: jax.Array) -> jax.Array:
    """Returns the mean of squared differences."""
    return jnp.mean((predicted - target) ** 2)


def sinusoids(positions: jax.Array, rates: jax.Array) -> jax.Array:
    """Returns sines and cosines of all products, `[positions, 2 * rates]`."""
    angles = positions[:, None] * rates
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1)


def block(function: Callable[..., Any], remat: bool) -> Callable[..., Any]:
    """Wraps a block, a function of a module and arrays, if `remat` says so."""
    return nn.remat(function) if remat else function


def batch_norm() -> nn.Module:
    """Normalizes by the mean and the variance of the batch."""
    return nn.BatchNorm(use_running_average=False)


def conv_norm(
    x: jax.Array,
    channels: int,
    window: tuple[int, ...],
    stride: Any = 1,
    **options: Any,
) -> jax.Array:
    """A convolution without a bias, then a batch norm."""
    x = nn.Conv(channels, window, stride, use_bias=False, **options)(x)
    return batch_norm()(x)
