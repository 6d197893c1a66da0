"""Reshapes an array to the rows in which it is packed, and back."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec, reshard

from dafjax import config
from dafjax._native._layout import TILE, folded_width, num_tiles
from dafjax._typing import Array, Like


# The most rows that are joined: enough to fill tiles well. A longer search costs time.
_MOST_TOGETHER = 16 * TILE


def rows_of(shape: Sequence[int]) -> tuple[int, ...]:
    """Returns the shape `[m, n]` of an array as rows, or `[n]` as one row.

    The first dimension of an array is mostly the batch axis, which devices divide among
    them. A row is one example, so that each device packs its own examples. If examples
    are too small to fill tiles, a row is several examples; in the smallest arrays, all.
    """
    if len(shape) > 1 and math.prod(shape) > 0:
        count, size = shape[0], math.prod(shape[1:])
        for together in range(1, min(count, _MOST_TOGETHER + 1)):
            length = together * size
            padded = num_tiles(length) * TILE
            if count % together == 0 and padded <= length * (1 + config.MOST_PADDING):
                return count // together, length
    return (math.prod(shape),)


def rows_of_groups(shape: Sequence[int], block_size: int) -> tuple[int, ...]:
    """Returns the shape `[m, n]` of an array as rows made of whole channel groups.

    A row is as many indices of the first dimension as one group of each channel has, so
    that the backward pass can unpack some of the rows. It is the whole array, `[n]`, if
    groups do not divide the first dimension.
    """
    width = folded_width(shape[-1])
    count, size = shape[0], math.prod(shape[1:])
    length = math.lcm(width * block_size, size) if size else 0
    together = length // size if size else 0
    if 0 < together < count and count % together == 0:
        return count // together, length
    return (math.prod(shape),)


def splits(
    layout: Callable[[tuple[int, ...]], tuple[tuple[int, ...], int]],
    shape: tuple[int, ...],
    count: int,
) -> bool:
    """Returns whether rows of an array, and rows of each of its chunks, are the same.

    Args:
        layout: Given a shape, the shape as rows, and the columns of a row.
        shape: The shape of the array.
        count: Number of equal chunks of its first dimension.
    """
    if not shape or shape[0] % count:
        return False
    rows, columns = layout(shape)
    rows_of_chunk, columns_of_chunk = layout((shape[0] // count, *shape[1:]))
    are_many = len(rows) == len(rows_of_chunk) == 2
    return are_many and (rows[1], columns) == (rows_of_chunk[1], columns_of_chunk)


def to_rows(x: Array, rows: tuple[int, ...]) -> Array:
    """Reshapes an array to rows `[m, n]` or `[n]`, with every row on one device."""
    sharding: Any = jax.typeof(x).sharding
    if not _is_explicit(sharding):
        return lax.reshape(x, rows)
    first = sharding.spec[0] if x.ndim > 1 else None
    whole = PartitionSpec(first, *[None] * (x.ndim - 1)) if x.ndim else PartitionSpec()
    x = reshard(x, NamedSharding(sharding.mesh, whole))
    if len(rows) == 1 or rows[0] % _num_parts(sharding, first):
        first = None
    spec = (first, None)[-len(rows) :]
    divided = NamedSharding(sharding.mesh, PartitionSpec(*spec))
    return lax.reshape(x, rows, out_sharding=divided)


def from_rows(rows: Array, like: Like) -> Array:
    """Inverts `to_rows`: restores the shape, and the division among devices."""
    if not is_divided_by_type(like):
        return lax.reshape(rows, like.shape)
    return lax.reshape(rows, like.shape, out_sharding=like.sharding)


def is_divided_by_type(*likes: Like) -> bool:
    """Returns whether the type of any array has a sharding with explicit mesh axes."""
    shardings: list[Any] = [like.sharding for like in likes]
    return any(s is not None and _is_explicit(s) for s in shardings)


def _is_explicit(sharding: Any) -> bool:
    return AxisType.Explicit in sharding.mesh.axis_types


def _num_parts(sharding: Any, axes: Any) -> int:
    names = axes if isinstance(axes, tuple) else () if axes is None else (axes,)
    return math.prod(sharding.mesh.shape[name] for name in names)
