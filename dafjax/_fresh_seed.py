"""A seed that changes with the parameters, so that each step has different noise."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from dafjax._typing import Array


# Number of arrays to hash, the smallest ones: enough to tell one step from the next.
_MOST_ARRAYS = 8

_GOLDEN_RATIO = 0x9E3779B9
_FACTOR = 0x7FEB352D


def freshen(seed: Array, differentiated: Sequence[Any]) -> Array:
    """Mixes a hash of the differentiated arguments into a seed.

    Rounding noise depends on the seed and on the content of the rounded array. Below
    the first trained layer of a frozen network, an example has the same content in
    every epoch. The parameters differ, because the optimizer changes them in each step.
    Equal parameters give equal seeds, so a step can be repeated exactly.

    Args:
        seed: uint32 scalar.
        differentiated: The differentiated arguments.

    Returns:
        uint32 scalar. All examples of a `vmap` have the same seed.
    """
    arrays = [x for x in differentiated if _can_be_hashed(x)]
    chosen = sorted(arrays, key=jnp.size)[:_MOST_ARRAYS]
    return _mix(seed, *chosen) if chosen else seed


def _can_be_hashed(x: Any) -> bool:
    aval: Any = jax.typeof(x)
    # In `shard_map` devices that share an array must have the same seed.
    return aval.size > 0 and not getattr(aval, "vma", frozenset())


@functools.partial(jax.jit, inline=True)
def _mix(seed: Array, *arrays: Array) -> Array:
    for x in map(jnp.asarray, arrays):
        # Packing scrambles the seed once more.
        seed = (seed ^ _checksum(lax.stop_gradient(x))) * jnp.uint32(_FACTOR)
        seed += jnp.uint32(_GOLDEN_RATIO)
    return seed


@jax.custom_batching.custom_vmap
def _checksum(x: Array) -> Array:
    """Returns the sum of the bit patterns of an array, as uint32."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return _checksum(jnp.stack([x.real, x.imag]))
    width = jnp.finfo(x.dtype).bits
    bits = lax.bitcast_convert_type(x, jnp.dtype(f"uint{min(width, 32)}"))
    return jnp.sum(bits.astype(jnp.uint32), dtype=jnp.uint32)


@_checksum.def_vmap
def _checksum_of_all(
    axis_size: int, is_batched: Sequence[bool], x: Array
) -> tuple[Array, bool]:
    del axis_size, is_batched
    return _checksum(x), False
