"""Estimates the rounding noise of an array from the values in its groups."""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax

from dafjax._sampling import with_auto_axes
from dafjax._typing import Array
from dafjax.codecs._affine import Affine
from dafjax.codecs._rows import to_rows


# Number of sampled quantization groups, evenly spread over the array.
_NUM_BLOCKS = 32


def sample_rounding_noise(affine: Affine, x: Array) -> Array:
    """Returns the variance of rounding to 1 bit over the squared range of groups.

    Stochastic rounding maps an element `v` of a group from `low` to `high` to one of
    these two, with mean `v` and variance `(v - low) * (high - v)`. Divided by
    `(high - low)^2`, the variance is 1/6 if the elements are spread evenly over the
    range, up to 1/4 if most are in its middle, and 0 if all are at its ends: masks, and
    probabilities of 0 or 1, suffer no rounding. With dithered rounding it is 1/12 for
    all elements.

    Args:
        affine: Defines the groups; its bits do not matter.
        x: A floating-point array of any shape.

    Returns:
        A float32 scalar: the mean variance over the mean squared range of the sampled
        groups; 0 if no group has a range, NaN if a group has values that are not
        finite.
    """
    if x.size == 0:
        return jnp.zeros((), jnp.float32)
    return with_auto_axes(functools.partial(_mean_noise, affine), x)


def _mean_noise(affine: Affine, x: Array) -> jax.Array:
    blocks = _some_blocks(affine, x).astype(jnp.float32)
    low = jnp.min(blocks, axis=-1, keepdims=True)
    high = jnp.max(blocks, axis=-1, keepdims=True)
    variance = jnp.mean((blocks - low) * (high - blocks))
    if affine.is_dithered:
        variance = jnp.mean((high - low) ** 2) / 12
    squared_range = jnp.mean((high - low) ** 2)
    return variance / jnp.where(squared_range == 0, 1, squared_range)


def _some_blocks(affine: Affine, x: Array) -> jax.Array:
    """Returns the elements of sampled full groups, `[groups, elements]`."""
    rows, columns = affine.rows_and_columns(x.shape)
    channels = max(1, columns)
    count, size = math.prod(rows[:-1]), rows[-1] // channels
    length = min(affine.block_size, size)
    x = lax.reshape(to_rows(x, rows), (count, size, channels))
    x = x[:, : size // length * length]
    x = lax.reshape(x, (count, size // length, length, channels))
    number = (count, size // length, channels)
    of_rows, of_blocks, of_channels = _strides(number, _NUM_BLOCKS)
    x = x[::of_rows, ::of_blocks, :, ::of_channels]
    return jnp.moveaxis(x, 2, -1).reshape(-1, length)


@functools.lru_cache(maxsize=1024)
def _strides(shape: tuple[int, ...], most: int) -> tuple[int, ...]:
    """Returns the stride of each dimension that gives at most `most` samples.

    Strides are odd, so that they are not in step with a power of two. All dimensions
    get similar numbers of samples, because it is unknown along which one groups differ.

    Args:
        shape: The shape of the array.
        most: The most samples, at least 1.
    """
    strides = [1] * len(shape)

    def num_samples(dimension: int) -> int:
        return -(-shape[dimension] // strides[dimension])

    dimensions = range(len(shape))
    while math.prod(map(num_samples, dimensions)) > most:
        strides[max(dimensions, key=num_samples)] += 2
    return tuple(strides)
