"""The codecs that stores return: affine codes whose bits are not those of the plan."""

import dataclasses
import math
from typing import final

import jax
import jax.numpy as jnp
from jax import lax

from dafjax._bits import Target
from dafjax._native import pool_get, pool_put
from dafjax._numbers import Array, Like
from dafjax.codecs import AbstractCodec, Affine, PackedAffine
from dafjax.codecs._abstract import from_rows, to_rows
from dafjax.codecs._affine import as_seed


# The bit widths that can be allocated, as in the page pool and `dafjax.allocation`.
LADDER = (1, 2, 4, 8)


@final
@dataclasses.dataclass(frozen=True)
class SiteFacts:
    """The facts that bit allocation needs about one residual id.

    Attributes:
        name: The residual id.
        target: The target of the bit allocation.
        bits: Bits of its codes in the traced program.
        num_elements: Elements that one forward pass packs, padding included.
        parameters_nbytes: Bytes of the scales and minima of its quantization groups.
        asked: Bits of its codes without allocation.
        maximum: The most bits at which it is smaller packed than unpacked.
    """

    name: str
    target: Target
    bits: int
    num_elements: int
    parameters_nbytes: int
    asked: int
    maximum: int


@final
@dataclasses.dataclass(frozen=True)
class AdaptiveAffine(AbstractCodec):
    """An affine code with the bits of the active bit allocation.

    Args:
        affine: The code.
        site: The id of the residual that it packs.
        asked: Bits of its codes without allocation.
    """

    affine: Affine
    site: str
    asked: int

    @property
    def is_exact(self) -> bool:
        return False

    def encode(self, x: Array, *, seed: int | Array = 0) -> PackedAffine:
        return self.affine.encode(x, seed=seed)

    def encode_salted(self, x: Array, *, seed: int | Array, salt: int) -> PackedAffine:
        return self.affine.encode_salted(x, seed=seed, salt=salt)

    def decode(
        self, packed: PackedAffine, like: Like, *, after: tuple[Array, ...] = ()
    ) -> Array:
        return self.affine.decode(packed, like, after=after)

    def decode_fused(
        self, packed: PackedAffine, like: Like, *, after: tuple[Array, ...] = ()
    ) -> Array:
        return self.affine.decode_fused(packed, like, after=after)

    def packs_rows(self, like: Like) -> bool:
        return self.affine.packs_rows(like)

    def packed_nbytes(self, like: Like) -> int:
        return self.affine.packed_nbytes(like)

    def check(self, like: Like) -> None:
        self.affine.check(like)

    def squared_range(self, packed: PackedAffine) -> Array:
        """Returns the mean over groups of (greatest - least value) squared, float32.

        A group's range is `|scale| * (2^bits - 1)`.
        """
        # The sign bit of `scale` flags groups with values that are not finite.
        ranges = jnp.abs(packed.scale.astype(jnp.float32)) * (2**self.affine.bits - 1)
        return jnp.mean(ranges * ranges)

    def facts(self, like: Like, target: Target) -> SiteFacts:
        """Returns the facts that bit allocation needs about this residual id."""
        self.check(like)
        nbytes = {
            bits: dataclasses.replace(self.affine, bits=bits).packed_nbytes(like)
            for bits in LADDER
        }
        # Bytes are linear in bits: bytes of the codes, plus a constant for the groups.
        of_a_bit = nbytes[2] - nbytes[1]
        fitting = [b for b in LADDER if nbytes[b] < like.size * like.dtype.itemsize]
        return SiteFacts(
            name=self.site,
            target=target,
            bits=self.affine.bits,
            num_elements=8 * of_a_bit,
            parameters_nbytes=nbytes[1] - of_a_bit,
            asked=self.asked,
            maximum=max(fitting, default=self.asked),
        )


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
        rows, format = self.affine.rows_and_format(x.shape)
        count, size = _as_matrix(rows)
        parts = self._parts_of(like)
        return pool_put(
            lax.reshape(to_rows(x, rows), (parts, count // parts, size)),
            as_seed(seed),
            pool=self.pool,
            site=self.site,
            format=format,
            max_bits=_MAX_BITS,
        )

    def decode(
        self, packed: Array, like: Like, *, after: tuple[Array, ...] = ()
    ) -> Array:
        self.check(like)
        rows, format = self.affine.rows_and_format(like.shape)
        count, size = _as_matrix(rows)
        unpacked = pool_get(
            packed,
            *after,
            pool=self.pool,
            rows=(count // packed.shape[0], size),
            dtype=jnp.dtype(like.dtype),
            format=format,
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
