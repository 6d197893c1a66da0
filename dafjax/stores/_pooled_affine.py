"""Affine codes in a page pool as a codec: what is packed is a handle."""

import dataclasses
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
    """Puts an array into a page pool, as `affine` would encode it but for the bits.

    Args:
        affine: The code; its bits are those of a pool with no others set or allocated.
        pool: Hash of the pool's name.
        site: Hash of the name of what is put.
        reads: How often a backward pass decodes it; 0 if that is unknown.
    """

    affine: Affine
    pool: int
    site: int
    reads: int = 0

    @property
    def is_exact(self) -> bool:
        return False

    def encode(self, x: Array, *, seed: int | Array = 0) -> Array:
        self.check(jax.ShapeDtypeStruct(x.shape, x.dtype))
        rows, columns = self.affine.rows_and_columns(x.shape)
        return pool_put(
            lax.reshape(to_rows(x, rows), _as_batch(rows)),
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
        unpacked = pool_get(
            packed,
            *after,
            pool=self.pool,
            rows=_as_batch(rows),
            dtype=jnp.dtype(like.dtype),
            block_size=self.affine.block_size,
            columns=columns,
            reads=self.reads,
        )
        return from_rows(lax.reshape(unpacked, rows), like)

    def packed_nbytes(self, like: Like) -> int:
        """Returns the bytes of the handle; those in the pool are known at run time."""
        self.check(like)
        return 16

    def check(self, like: Like) -> None:
        self.affine.check(like)


# Of what the pool may set or allocate.
_MAX_BITS = 8


def _as_batch(rows: tuple[int, ...]) -> tuple[int, int]:
    *count, size = rows
    return (count[0] if count else 1, size)
