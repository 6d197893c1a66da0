"""Codec for boolean arrays: one bit per element, exact."""

import dataclasses
import math
from typing import final

import jax
import jax.numpy as jnp

from dafjax._native import (
    pack_bitmask,
    pack_bitmask_fused,
    unpack_bitmask,
    unpack_bitmask_fused,
)
from dafjax._native._format import num_words
from dafjax._numbers import Array, Like
from dafjax.codecs._abstract import (
    AbstractCodec,
    from_rows,
    is_divided_by_type,
    rows_of,
    splits,
    to_rows,
)


@final
@dataclasses.dataclass(frozen=True)
class Bitmask(AbstractCodec):
    """Stores boolean arrays, such as the masks of relu and dropout, in one bit each.

    Element `e` of a tile of 512 is bit `e // 32` of word `e % 32`
    (`xla_ffi/README.md`, section 1). The packed array is uint16
    `[m, ceil(n / 512) * 32]` for rows `[m, n]`. Decoding is exact; `seed` is not used.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from dafjax.codecs import Bitmask
        >>> mask = jnp.arange(1024) % 3 == 0
        >>> like = jax.ShapeDtypeStruct(mask.shape, mask.dtype)
        >>> packed = Bitmask().encode(mask)
        >>> packed.nbytes
        128
        >>> bool(jnp.all(Bitmask().decode(packed, like) == mask))
        True
    """

    def __str__(self) -> str:
        return "1 bit, exact"

    @property
    def is_exact(self) -> bool:
        return True

    def encode(self, x: Array, *, seed: int | Array = 0) -> Array:
        self.check(jax.ShapeDtypeStruct(x.shape, x.dtype))
        rows = to_rows(x, rows_of(x.shape))
        if is_divided_by_type(jax.typeof(x), jax.typeof(rows)):
            return pack_bitmask(rows)
        return pack_bitmask_fused(rows)

    def decode(
        self, packed: Array, like: Like, *, after: tuple[Array, ...] = ()
    ) -> Array:
        self.check(like)
        rows = unpack_bitmask(packed, *after, size=rows_of(like.shape)[-1])
        return from_rows(rows, like)

    def decode_fused(
        self, packed: Array, like: Like, *, after: tuple[Array, ...] = ()
    ) -> Array:
        if is_divided_by_type(like, jax.typeof(packed)):
            return self.decode(packed, like, after=after)
        self.check(like)
        shape = tuple(like.shape)
        return unpack_bitmask_fused(
            packed, *after, shape=shape, size=rows_of(shape)[-1]
        )

    def packs_rows(self, like: Like) -> bool:
        rows = rows_of(like.shape)
        return len(rows) > 1 and rows[0] == like.shape[0]

    def packs_parts(self, like: Like, count: int) -> bool:
        return splits(lambda shape: (rows_of(shape), None), tuple(like.shape), count)

    def packed_nbytes(self, like: Like) -> int:
        self.check(like)
        *rows, size = rows_of(like.shape)
        return math.prod(rows) * 2 * num_words(size, 1)

    def check(self, like: Like) -> None:
        if like.dtype != jnp.bool_:
            raise TypeError(
                "`Bitmask` packs boolean arrays, but got "
                f"`{like.dtype.name}`. Use `dafjax.codecs.Affine` for "
                "floating-point arrays, or keep the residual exact with `Save()`."
            )
