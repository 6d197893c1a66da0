"""Which elements of an array stand for all."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, auto_axes


def with_auto_axes(measure: Callable[[jax.Array], Any], x: jax.Array) -> Any:
    """Calls a function that takes samples of an array, on any mesh.

    On explicit axes, what is cut out of an array must divide among devices as it does.
    XLA knows no such bound.

    Args:
        measure: Returns arrays, of which each device gets the whole.
        x: The array.
    """
    mesh = jax.typeof(x).sharding.mesh
    if not mesh.explicit_axes:
        return measure(x)
    whole = NamedSharding(mesh, PartitionSpec())
    return auto_axes(measure, axes=mesh.explicit_axes, out_sharding=whole)(x)


def sample_elements(x: jax.Array, most: int, longest_row: int) -> jax.Array:
    """Returns at most so many elements of an array.

    Their distance in memory is such that they see every place of each dimension about
    equally often: also the token that a classification reads alone, where no other has
    a cotangent, and the lattice that cotangents are on behind strided convolutions.

    Args:
        x: An array.
        most: The most samples, at least 1.
        longest_row: How many at most will be summed in a row; `num_rows` of a group's
            samples divides them without rest, if it can be.

    Returns:
        The elements, `[groups, samples]`: of groups of examples, the first dimension,
        so that devices that share it need not exchange elements.
    """
    shape = (1, *x.shape) if x.ndim < 2 else x.shape
    groups = math.gcd(shape[0], _MOST_GROUPS)
    # A token is seen by several samples.
    while groups > 1 and 2 * max(shape[1:]) * groups > most:
        groups //= 2
    rows = jnp.reshape(x, (groups, x.size // groups))
    if x.size <= most:
        return rows
    shape = (shape[0] // groups, *shape[1:])
    distance = _distance(shape, most // groups, longest_row)
    return rows[:, distance // 2 :: distance]


# More devices would exchange some samples.
_MOST_GROUPS = 16


@functools.lru_cache(maxsize=1024)
def _distance(shape: tuple[int, ...], most: int, longest_row: int) -> int:
    """Returns a distance of at most so many samples of an array.

    It is the first by which samples are spread evenly and divide into rows; if there is
    none among those a quarter longer than needed, the best of them.
    """
    size = math.prod(shape)
    least = -(-size // most)

    def unevenness(distance: int) -> float:
        """Returns how many times too often or too seldom a place is seen."""
        places = np.arange(distance // 2, size, distance)
        worst, inner = 1.0, size // shape[0]
        for extent in shape[1:]:
            inner //= extent
            if extent <= len(places):
                seen = np.bincount(places // inner % extent, minlength=extent)
                mean = len(places) / extent
                worst = max(worst, seen.max() / mean, mean / max(seen.min(), 0.5))
        divide = len(places) % num_rows(len(places), longest_row) == 0
        return worst if divide else 2 * worst

    distances = range(least, least + min(64, max(4, least // 4)))
    even = (d for d in distances if unevenness(d) < _UNEVEN)
    return next(even, None) or min(distances, key=unevenness)


# Three samples where four should be.
_UNEVEN = 1.34


def num_rows(count: int, longest: int) -> int:
    """Returns into how many rows to divide so many elements, without rest if possible.

    Args:
        count: The number of elements, at least 1.
        longest: The most elements of a row.
    """
    least = -(-count // longest)
    return next((n for n in range(least, 4 * least) if count % n == 0), least)


@functools.lru_cache(maxsize=1024)
def sampling_strides(shape: tuple[int, ...], most: int) -> tuple[int, ...]:
    """Returns how far apart at most so many samples are, dimension by dimension.

    Odd numbers, in step with no power of two: behind strided convolutions cotangents
    are on a lattice, of which 8 samples in a row see every place. Along all dimensions
    alike: where they differ is not known.

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
