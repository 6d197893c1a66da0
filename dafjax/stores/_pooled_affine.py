"""Affine codes in a page pool, as a codec whose packed form is a handle."""

import dataclasses
import math
from typing import final

import jax
import jax.numpy as jnp
from jax import lax

from dafjax._native import pool_get, pool_put
from dafjax._typing import Array, Like
from dafjax.codecs import AbstractCodec, Affine
from dafjax.codecs._affine import as_seed
from dafjax.codecs._rows import from_rows, to_rows


@final
@dataclasses.dataclass(frozen=True)
class PooledAffine(AbstractCodec):
    """Encodes an array as `affine` does, but into a page pool that chooses the bits.

    Args:
        affine: The code. Its bits apply unless others are set or allocated in the pool.
        pool: Hash of the pool's name.
        site: Hash of the residual id.
        reads: How often one backward pass decodes the array; 0 if unknown.
        num_parts: The most chunks of the batch axis. Each chunk is a separate pool
            entry, provided that every row is packed separately and the planes of a
            chunk fill pages.
    """

    affine: Affine
    pool: int
    site: int
    reads: int = 0
    num_parts: int = 1

    @property
    def is_exact(self) -> bool:
        return False

    def encode(self, x: Array, *, seed: int | Array = 0) -> Array:
        like = jax.ShapeDtypeStruct(x.shape, x.dtype)
        self.check(like)
        rows, columns = self.affine.rows_and_columns(x.shape)
        count, size = _as_matrix(rows)
        parts = self._parts_of(like)
        return pool_put(
            lax.reshape(to_rows(x, rows), (parts, count // parts, size)),
            as_seed(seed),
            pool=self.pool,
            site=self.site,
            bits=self.affine.bits,
            max_bits=_MAX_BITS,
            block_size=self.affine.block_size,
            stochastic=self.affine.rounding == "stochastic",
            columns=columns,
        )

    def decode(
        self, packed: Array, like: Like, *, after: tuple[Array, ...] = ()
    ) -> Array:
        self.check(like)
        rows, columns = self.affine.rows_and_columns(like.shape)
        count, size = _as_matrix(rows)
        unpacked = pool_get(
            packed,
            *after,
            pool=self.pool,
            rows=(count // packed.shape[0], size),
            dtype=jnp.dtype(like.dtype),
            block_size=self.affine.block_size,
            columns=columns,
            reads=self.reads,
        )
        return from_rows(lax.reshape(unpacked, rows), like)

    def packed_nbytes(self, like: Like) -> int:
        """Returns the bytes of the handles; bytes in the pool depend on the run."""
        self.check(like)
        return 16 * self._parts_of(like)

    def packs_parts(self, like: Like, count: int) -> bool:
        return self._parts_of(like) % count == 0

    def check(self, like: Like) -> None:
        self.affine.check(like)

    def _parts_of(self, like: Like) -> int:
        counts = range(self.num_parts, 1, -1)
        for count in (c for c in counts if self.num_parts % c == 0):
            fills_pages = math.prod(like.shape) >= count * _NUM_ELEMENTS_OF_PAGE
            if fills_pages and self.affine.packs_parts(like, count):
                return count
        return 1


# The most bits that the pool may set or allocate.
_MAX_BITS = 8
# A page of 64 KiB holds one bit of this many elements.
_NUM_ELEMENTS_OF_PAGE = 8 * 65536


def _as_matrix(rows: tuple[int, ...]) -> tuple[int, int]:
    *count, size = rows
    return (count[0] if count else 1, size)
