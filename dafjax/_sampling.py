"""Which elements of an array stand for all."""

import functools
import math
from collections.abc import Callable, Sequence
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

    Their distance in memory is one by which they see all places of each dimension about
    equally often: also the token that a classification reads alone, where no other has
    a cotangent, and the lattice that cotangents are on behind strided convolutions.
    Devices that share the array exchange few of its elements.

    Args:
        x: An array.
        most: The most samples, at least 1.
        longest_row: Into rows of how many at most the samples will be divided: without
            rest, if there is such a distance.

    Returns:
        The elements, `[samples]`: all of the array, if it has no more.
    """
    elements = jnp.reshape(x, x.size)
    if x.size <= most:
        return elements
    distance = _distance(x.shape, most, longest_row)
    return elements[distance // 2 :: distance]


@functools.lru_cache(maxsize=1024)
def _distance(shape: tuple[int, ...], most: int, longest_row: int) -> int:
    """Returns the distance of at most so many samples of an array.

    Of some distances, up to a quarter longer than the shortest, it is the first by
    which the samples are spread evenly and divide into rows, or the best.
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
        # Odd, in step with no power of two.
        spread = (num_longer * n // _NUM_DISTANCES for n in range(_NUM_DISTANCES))
        distances = [shortest + longer | 1 for longer in spread]
    costs: dict[int, float] = {}
    for distance in distances:
        costs[distance] = cost(distance)
        if costs[distance] < _GOOD:
            break
    return min(costs, key=costs.__getitem__)


# So many distances are tried, and the first is taken that costs less than that.
_NUM_DISTANCES = 36
_GOOD = 1.35

# Samples that leave a rest are worth as much as those of a distance so much longer.
_REST = 1.5


def _unevenness(places: np.ndarray, shape: Sequence[int]) -> float:
    """Returns how many times too often, or too seldom, something is seen.

    That is each place of a dimension, or where there are too many of them each stretch
    and each lattice of them; and each lattice of two neighboring dimensions.

    Args:
        places: What is seen, in row-major order.
        shape: Of the array.
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


# Of less than so many samples each, counts tell nothing.
_LEAST_SEEN = 8

_STRETCHES = 64
_LATTICE = 8


def num_rows(count: int, longest: int) -> int:
    """Returns into how many rows to divide so many elements, without rest if possible.

    Args:
        count: The number of elements, at least 1.
        longest: The most elements of a row.
    """
    least = -(-count // longest)
    return next((n for n in range(least, 4 * least) if count % n == 0), least)
