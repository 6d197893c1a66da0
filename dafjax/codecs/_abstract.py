"""The interface of codecs, and the rows in which an array is packed."""

import abc
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec, reshard

from dafjax import config
from dafjax._native._format import TILE, folded_width, num_tiles
from dafjax._numbers import Array, ArrayTree, Like


# The most rows that are joined: enough to fill tiles well. A longer search costs time.
_MOST_TOGETHER = 16 * TILE


@functools.lru_cache(maxsize=1024)
def rows_of(shape: tuple[int, ...]) -> tuple[int, ...]:
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
    layout: Callable[[tuple[int, ...]], tuple[tuple[int, ...], Any]],
    shape: tuple[int, ...],
    count: int,
) -> bool:
    """Returns whether rows of an array are rows of its `count` equal chunks, too.

    Args:
        layout: Given a shape, the shape as rows, and the format of a row.
        shape: The shape of the array.
        count: Number of chunks of its first dimension.
    """
    if not shape or shape[0] % count:
        return False
    rows, format = layout(shape)
    of_chunk, format_of_chunk = layout((shape[0] // count, *shape[1:]))
    # A chunk may be a single row.
    return len(rows) == 2 and (rows[1], format) == (of_chunk[-1], format_of_chunk)


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


class AbstractCodec(abc.ABC):
    """A pair of functions: `encode` packs an array, `decode` unpacks it.

    A codec is a hashable value. `encode` returns the *packed* array, a pytree of arrays
    whose shapes depend only on the shape and dtype of the array, which arguments `like`
    tell.
    """

    @property
    @abc.abstractmethod
    def is_exact(self) -> bool:
        """Whether `decode` restores every bit."""

    @abc.abstractmethod
    def encode(self, x: Array, *, seed: int | Array = 0) -> ArrayTree:
        """Packs an array of any shape.

        Args:
            x: The array, of a dtype that `check` accepts.
            seed: Integer from 0 to 2^32 - 1, or a uint32 scalar. It selects the
                rounding noise, if the codec uses noise.

        Returns:
            A pytree of arrays of `packed_nbytes` bytes in all.

        Raises:
            TypeError: The dtype of `x` or `seed` is not supported.
            ValueError: `seed` is out of range or not a scalar.
        """

    def encode_salted(self, x: Array, *, seed: int | Array, salt: int) -> ArrayTree:
        """Packs as `encode` does with the seed `seed + salt`, which wraps around.

        By default it calls `encode`.
        """
        if self.is_exact:
            return self.encode(x)
        return self.encode(x, seed=jnp.asarray(seed, jnp.uint32) + jnp.uint32(salt))

    def sums_columns(self, like: Like) -> bool:
        """Returns whether `encode_and_sum` reads the array only once on GPUs."""
        del like
        return False

    def encode_and_sum(
        self, x: Array, *, seed: int | Array = 0, salt: int = 0
    ) -> tuple[ArrayTree, Array, Array]:
        """Packs as `encode_salted` does, and sums float32 over all axes but the last.

        Returns:
            The packed array; the sum; the sum of the squares.
        """
        axes = tuple(range(x.ndim - 1))
        packed = self.encode_salted(x, seed=seed, salt=salt)
        return packed, jnp.sum(x, axes), jnp.sum(x * x, axes)

    @abc.abstractmethod
    def decode(
        self, packed: ArrayTree, like: Like, *, after: tuple[Array, ...] = ()
    ) -> Array:
        """Unpacks the result of `encode`.

        Args:
            packed: The result of `encode`.
            like: Shape and dtype of the array that was packed.
            after: Arrays that are computed before unpacking. They are not read; they
                keep XLA from unpacking earlier.

        Returns:
            An array of `like.shape` and `like.dtype`.

        Raises:
            TypeError: `like.dtype` is not supported.
            ValueError: The shapes of `packed` do not fit `like`.
        """

    def decode_fused(
        self, packed: ArrayTree, like: Like, *, after: tuple[Array, ...] = ()
    ) -> Array:
        """Unpacks as `decode` does, for arrays that no matrix product reads.

        On a GPU, XLA can then fuse unpacking into the kernels that read the array, and
        never writes the array to memory. By default it calls `decode`.
        """
        return self.decode(packed, like, after=after)

    @property
    def decodes_fused(self) -> bool:
        """Whether the codec has its own `decode_fused`."""
        return type(self).decode_fused is not AbstractCodec.decode_fused

    def packs_rows(self, like: Like) -> bool:
        """Returns whether each row of the array is packed separately.

        A row is an index of the first dimension, the batch axis. If so, the first
        dimension of each packed array is the batch axis too, and any subset of its rows
        decodes to the same rows of the array. The backward pass may then unpack the
        array in chunks.
        """
        del like
        return False

    def packs_parts(self, like: Like, count: int) -> bool:
        """Returns whether each of `count` equal chunks can be unpacked separately.

        A chunk is a range of rows. If so, the first dimension of each packed array
        splits into the same number of chunks, and the chunk of all packed arrays
        decodes to the chunk of the array.
        """
        if not like.shape:
            return False
        there, rest = divmod(like.shape[0], count)
        part = jax.ShapeDtypeStruct((there, *like.shape[1:]), like.dtype)
        return rest == 0 and self.packs_rows(like) and self.packs_rows(part)

    @abc.abstractmethod
    def packed_nbytes(self, like: Like) -> int:
        """Returns the packed size in bytes of an array of this shape and dtype."""

    @abc.abstractmethod
    def check(self, like: Like) -> None:
        """Raises TypeError if arrays of this shape and dtype cannot be packed."""
