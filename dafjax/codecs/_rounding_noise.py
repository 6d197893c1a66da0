"""How much an array suffers from rounding, as its blocks are filled."""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax

from dafjax._sampling import with_auto_axes
from dafjax._typing import Array
from dafjax.codecs._affine import Affine
from dafjax.codecs._rows import to_rows


# So many blocks, evenly spread, stand for all.
_NUM_BLOCKS = 32


def sample_rounding_noise(affine: Affine, x: Array) -> Array:
    """Returns the variance of rounding to 1 bit over the squared range of blocks.

    An element `v` of a block from `low` to `high` is rounded to one of these two, at
    random, so that its mean is `v`; the variance is then `(v - low) * (high - v)`. Over
    `(high - low)^2` that is 1/6 for elements that are spread evenly in their block, up
    to 1/4 where most lie in its middle, and 0 where all lie at its ends: masks, and
    probabilities that are 0 or 1, are not rounded. Where noise is subtracted from codes
    it is 1/12 for all elements.

    Args:
        affine: How blocks are formed; its bits do not matter.
        x: A floating-point array of any shape.

    Returns:
        A float32 scalar: the mean variance over the mean squared range of some blocks;
        0 if none has a range, NaN if they hold values that are not finite.
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
    """Returns the elements of some blocks, `[blocks, elements]`; all of them full."""
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
    """Returns how far apart at most so many samples are, dimension by dimension.

    Odd numbers, in step with no power of two; along all dimensions alike, for where
    they differ is not known.

    Args:
        shape: Of the array.
        most: The most samples, at least 1.
    """
    strides = [1] * len(shape)

    def num_samples(dimension: int) -> int:
        return -(-shape[dimension] // strides[dimension])

    dimensions = range(len(shape))
    while math.prod(map(num_samples, dimensions)) > most:
        strides[max(dimensions, key=num_samples)] += 2
    return tuple(strides)
