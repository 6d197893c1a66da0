"""Mean squares and variances of values, estimated from some of their elements.

On a GPU one kernel per sampled value computes sums over the rows of the sample. The
rest is a few numbers per row, computed for all values together.
"""

import collections
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dafjax import config
from dafjax._sampling import num_rows, sample_elements, with_auto_axes
from dafjax._typing import Array


class Moments(NamedTuple):
    """The second moments of a value's elements.

    Attributes:
        mean_square: The mean of the squares.
        variance: The mean of the squares minus the square of the mean.
    """

    mean_square: Any
    variance: Any


class RowMeans(NamedTuple):
    """Means over each row of a sample, float32 `[rows]`.

    Attributes:
        value: Mean of the elements.
        difference: Mean of the differences from the row's first element. Unlike the
            squares of large values, the squares of differences do not cancel, as long
            as rows are short.
        squared: Mean of the squared differences.
    """

    value: Array
    difference: Array
    squared: Array


def sample_rows(x: Array, num_parts: int = 1) -> RowMeans:
    """Samples a value, or one of its chunks.

    Args:
        x: The value or chunk, of any shape and a numeric dtype. For complex numbers the
            absolute values are sampled.
        num_parts: Number of chunks that share the sample equally.
    """
    if x.size == 0:
        return RowMeans(*jnp.zeros((3, 1), jnp.float32))
    most = max(1, config.SAMPLED_ELEMENTS // num_parts)
    return with_auto_axes(lambda x: _means_of_rows(x, most), x)


# Traced once for all values of one shape.
@functools.partial(jax.jit, static_argnames="most")
def _means_of_rows(x: Array, most: int) -> RowMeans:
    sample = _real(sample_elements(x, most, config.LONGEST_ROW))
    (count,) = sample.shape
    rows = num_rows(count, config.LONGEST_ROW)
    length = -(-count // rows)
    # Dividing after the sums would need another kernel.
    share: Any = 1 / length
    # The last row lacks fewer elements than there are rows, so all rows get the same
    # weight.
    missing = rows * length - count
    if missing:
        sample = lax.pad(sample, jnp.float32(0), [(0, missing, 0)])
        place = lax.iota(jnp.int32, rows * length)
        of_last = jnp.where(place < count, 1 / (length - missing), 0)
        share = jnp.where(place < (rows - 1) * length, share, of_last)
        share = share.reshape(rows, length).astype(jnp.float32)
    sample = sample.reshape(rows, length)
    differences = sample - sample[:, :1]
    weighted = share * differences
    terms = (share * sample, weighted, weighted * differences)
    zeros = 3 * (jnp.float32(0),)
    return RowMeans(*lax.reduce(terms, zeros, _add, (1,)))


def _add(xs: Sequence[Array], ys: Sequence[Array]) -> list[Array]:
    return list(map(jnp.add, xs, ys))


def moments_of_rows(samples: Sequence[Sequence[RowMeans]]) -> Moments:
    """Returns the moments of values, float32 `[values]`.

    Args:
        samples: The `sample_rows` of each chunk of each value.
    """
    if not samples:
        return Moments(*jnp.zeros((2, 0), jnp.float32))
    alike: dict[int, list[int]] = collections.defaultdict(list)
    for number, parts in enumerate(samples):
        alike[sum(part.value.size for part in parts)].append(number)
    found = [
        _moments_of_parts(
            [part for number in numbers for part in samples[number]], len(numbers)
        )
        for numbers in alike.values()
    ]
    order = np.argsort(np.concatenate(list(alike.values())))
    moments = Moments(*(jnp.concatenate(xs)[order] for xs in zip(*found, strict=True)))
    # Without the barrier XLA:GPU spends minutes choosing kernels to recompute them in.
    return lax.optimization_barrier(moments)


def _moments_of_parts(parts: Sequence[RowMeans], num_values: int) -> Moments:
    """Returns moments, `[values]`, of values with equal row counts, chunk by chunk."""
    value, difference, squared = (
        _joined(xs, num_values) for xs in zip(*parts, strict=True)
    )
    variance = jnp.maximum(squared - difference**2, 0)
    mean = jnp.mean(value, axis=1, keepdims=True)
    return Moments(
        jnp.mean(variance + value**2, axis=1),
        jnp.mean(variance + (value - mean) ** 2, axis=1),
    )


def _joined(parts: Sequence[Array], num_values: int) -> Array:
    if len(parts) == 1:
        return parts[0][None]
    return jnp.concatenate(parts).reshape(num_values, -1)


def sample_moments(x: Array) -> Moments:
    """Returns the moments of a value, estimated from a sample."""
    return Moments(*(xs[0] for xs in moments_of_rows([[sample_rows(x)]])))


def sample_energy(arrays: Sequence[Array]) -> Array:
    """Returns the sum of the squares of all elements, estimated from samples.

    Args:
        arrays: Nonempty arrays of any shapes. For complex numbers the absolute values
            count.
    """
    if not arrays:
        return jnp.float32(0)
    measure = functools.partial(_energies_of_rows, most=config.SAMPLED_ELEMENTS)
    rows = [with_auto_axes(measure, x) for x in arrays]
    return jnp.sum(jnp.concatenate(rows))


@functools.partial(jax.jit, static_argnames="most")
def _energies_of_rows(x: Array, most: int) -> Array:
    """Returns partial sums of the squares of all elements, estimated from a sample."""
    sample = _real(sample_elements(x, most, config.LONGEST_ROW))
    (count,) = sample.shape
    rows = num_rows(count, config.LONGEST_ROW)
    squares = x.size / count * sample * sample
    missing = -count % rows
    if missing:
        squares = lax.pad(squares, jnp.float32(0), [(0, missing, 0)])
    return jnp.sum(squares.reshape(rows, -1), axis=1)


def _real(sample: Array) -> Array:
    """Returns a float32 array, for complex numbers their absolute values."""
    if jnp.iscomplexobj(sample):
        sample = jnp.abs(sample)
    return sample.astype(jnp.float32)
