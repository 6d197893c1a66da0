"""Chooses a representative sample of an array's elements."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, auto_axes


def with_auto_axes(measure: Callable[[jax.Array], Any], x: jax.Array) -> Any:
    """Calls a function that samples an array, on any mesh.

    On explicit mesh axes JAX requires that a slice divides among devices as its array
    does. On automatic axes XLA has no such requirement, so `measure` runs on those.

    Args:
        measure: Takes samples and returns arrays, which every device gets whole.
        x: The array.
    """
    mesh = jax.typeof(x).sharding.mesh
    if not mesh.explicit_axes:
        return measure(x)
    whole = NamedSharding(mesh, PartitionSpec())
    return auto_axes(measure, axes=mesh.explicit_axes, out_sharding=whole)(x)


def sample_elements(x: jax.Array, most: int, longest_row: int) -> jax.Array:
    """Returns at most `most` elements of an array, evenly spread.

    It takes elements at one fixed distance in memory, chosen so that the samples hit
    all indices of each dimension about equally often. So they also hit a single token
    that a classification reads (no other token has a cotangent), and the lattice of
    nonzero cotangents before strided convolutions. Devices that share the array
    exchange few of its elements.

    Args:
        x: An array.
        most: The most samples, at least 1.
        longest_row: The most elements of the rows into which the caller divides the
            samples. They divide without remainder if a suitable distance exists.

    Returns:
        The elements, `[samples]`; the whole array if it has at most `most` elements.
    """
    elements = jnp.reshape(x, x.size)
    if x.size <= most:
        return elements
    distance = _distance(x.shape, most, longest_row)
    return elements[distance // 2 :: distance]


@functools.lru_cache(maxsize=1024)
def _distance(shape: tuple[int, ...], most: int, longest_row: int) -> int:
    """Returns a distance in memory that gives at most `most` samples of an array.

    It tries distances from the shortest up to a quarter longer. It returns the first
    that spreads the samples evenly and lets them divide into rows, or else the best.
    """
    size = math.prod(shape)
    shortest = -(-size // most)
    num_longer = max(3, shortest // 4)

    def cost(distance: int) -> float:
        places = np.arange(distance // 2, size, distance)
        rest = len(places) % num_rows(len(places), longest_row)
        uneven = _unevenness(places, shape) * (_REST if rest else 1)
        return uneven * distance / shortest

    if num_longer <= _NUM_DISTANCES:
        distances = range(shortest, shortest + num_longer + 1)
    else:
        # Use odd distances, which are not in step with a power of two.
        spread = (num_longer * n // _NUM_DISTANCES for n in range(_NUM_DISTANCES))
        distances = [shortest + longer | 1 for longer in spread]
    costs: dict[int, float] = {}
    for distance in distances:
        costs[distance] = cost(distance)
        if costs[distance] < _GOOD:
            break
    return min(costs, key=costs.__getitem__)


# The number of distances to try, and the cost below which a distance is good enough.
_NUM_DISTANCES = 36
_GOOD = 1.35

# Cost factor for samples that leave a remainder when divided into rows: they are worth
# as much as samples at a distance longer by this factor.
_REST = 1.5


def _unevenness(places: np.ndarray, shape: Sequence[int]) -> float:
    """Returns the worst factor by which samples hit something too often or too seldom.

    It counts hits of each index of a dimension. If a dimension has too many indices, it
    counts hits of ranges of indices, and of lattices (indices modulo a number). It also
    counts hits of the lattices of two neighboring dimensions.

    Args:
        places: Flat indices of the samples, in row-major order.
        shape: The shape of the array.
    """
    most = len(places) // _LEAST_SEEN
    worst = 1.0

    def count(numbers: np.ndarray, how_many: int) -> None:
        nonlocal worst
        if how_many <= most:
            seen = np.bincount(numbers, minlength=how_many)
            mean = len(numbers) / how_many
            worst = max(worst, seen.max() / mean, mean / max(seen.min(), 0.5))

    outer = None
    inner = math.prod(shape)
    for extent in shape:
        inner //= extent
        place = places // inner % extent
        count(place, extent)
        if extent > most > 0:
            count(place * _STRETCHES // extent, _STRETCHES)
            apart = 1 << most.bit_length() - 1
            count(place[place < extent // apart * apart] % apart, apart)
        lattice = place % _LATTICE if extent >= 2 * _LATTICE else None
        if lattice is not None and outer is not None:
            count(outer * _LATTICE + lattice, _LATTICE**2)
        outer = lattice
    return worst


# Fewer expected hits than this make a count meaningless.
_LEAST_SEEN = 8

_STRETCHES = 64
_LATTICE = 8


def num_rows(count: int, longest: int) -> int:
    """Returns the number of rows for `count` elements, without remainder if possible.

    Args:
        count: The number of elements, at least 1.
        longest: The most elements of a row.
    """
    least = -(-count // longest)
    return next((n for n in range(least, 4 * least) if count % n == 0), least)
