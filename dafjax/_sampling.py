"""Which elements of an array stand for all."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
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


def sample_elements(x: jax.Array, most: int) -> jax.Array:
    """Returns at most so many elements of an array.

    They are as far apart as possible in a row that all dimensions but the first make
    together, and see every place of each of these equally often: also the token that a
    classification reads alone, where no other has a cotangent.

    Args:
        x: An array. Its first dimension, that of examples, is as it is where devices
            share it.
        most: The most samples, at least 1.
    """
    shape = (1, *x.shape) if x.ndim < 2 else x.shape
    x = jnp.reshape(x, (shape[0], math.prod(shape[1:])))
    of_examples, of_elements = sampling_strides(x.shape, most)
    while any(math.gcd(of_elements, size) > 1 for size in shape[1:]):
        of_elements += 1
    return x[of_examples // 2 :: of_examples, of_elements // 2 :: of_elements]


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
