"""Stores whose residuals XLA holds, on the device or in host memory.

Their bits are part of the compiled program; `dafjax.jit` may change them from one
trace to the next.
"""

import dataclasses
from collections.abc import Sequence
from typing import final

import jax
import jax.numpy as jnp

from dafjax._bits import LADDER, BatchNoise, Target
from dafjax._contexts import (
    BitsInForce,
    batch_measurement,
    bits_in_force,
    current_choice,
)
from dafjax._native import ledger_note, pool_hash
from dafjax._numbers import Array, ArrayTree, Like
from dafjax.codecs import AbstractCodec, Affine, PackedAffine
from dafjax.stores._abstract import AbstractStore


class AbstractStaticStore(AbstractStore):
    """A store that keeps packed residuals unchanged, with the planned bits."""

    @property
    def keeps_bits(self) -> bool:
        return True

    def codec(
        self, wanted: AbstractCodec, *, site: str, reads: int = 0, num_parts: int = 1
    ) -> AbstractCodec:
        return wanted

    def allocate_for(self, target: Target) -> "Adaptive":
        return Adaptive(self, target)

    def note(
        self,
        sensitivities: Array,
        codecs: Sequence[AbstractCodec],
        likes: Sequence[Like],
        after: Array,
    ) -> Array:
        raise NotImplementedError(
            f"`{self!r}` does not measure: its bits are part of the compiled program."
        )


@final
@dataclasses.dataclass(frozen=True)
class Arrays(AbstractStaticStore):
    """Keeps packed residuals in ordinary arrays, which XLA allocates and frees.

    The store is pure, batchable and shardable, and cannot leak. The number of bits is
    part of the compiled program.
    """


@final
@dataclasses.dataclass(frozen=True)
class Host(AbstractStaticStore):
    """Offloads packed residuals to host memory.

    `jax.checkpoint_policies.save_and_offload_only_these_names` moves residuals
    uncompressed. This store moves their codes: at 2 bits, 15 times fewer bytes each
    way. On CPUs the same program runs without a gain, because host memory is device
    memory.

    Example:
        >>> import dafjax, jax, jax.numpy as jnp
        >>> def loss(w, x):
        ...     return jnp.sum(jnp.sin(x @ w))
        >>> w, x = jnp.ones((256, 256)), jnp.ones((256, 256))
        >>> offloaded = dafjax.remat_compress(loss, store=dafjax.stores.Host())
        >>> jax.jit(jax.grad(offloaded))(w, x).shape
        (256, 256)
    """

    def put(self, packed: ArrayTree) -> ArrayTree:
        return jax.device_put(packed, jax.memory.Space.Host)

    def get(self, handle: ArrayTree) -> ArrayTree:
        return jax.device_put(handle, jax.memory.Space.Device)


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
class Adaptive(AbstractStore):
    """Wraps a store so that `dafjax.jit` allocates the bits of its codes.

    Bits are part of the compiled program. Tracing reads them from the active bit
    allocation of `dafjax.jit`; backward passes report to its ledger, the statistics
    accumulator.

    Args:
        store: The store that keeps packed residuals.
        target: The target of the bit allocation.
    """

    store: AbstractStore
    target: Target

    @property
    def takes_brief(self) -> bool:
        return self.store.takes_brief

    @property
    def measures_by_element(self) -> bool:
        return isinstance(self.target, BatchNoise)

    def allocate_for(self, target: Target) -> "Adaptive":
        return dataclasses.replace(self, target=target)

    def codec(
        self, wanted: AbstractCodec, *, site: str, reads: int = 0, num_parts: int = 1
    ) -> AbstractCodec:
        codec = self.store.codec(wanted, site=site, reads=reads, num_parts=num_parts)
        if not isinstance(codec, Affine) or codec.bits not in LADDER:
            return codec
        in_force = self._in_force()
        allocated = in_force.bits.get(site_number(site, self.target))
        affine = codec
        if allocated is not None:
            affine = dataclasses.replace(codec, bits=allocated)
        if isinstance(self.target, BatchNoise) and not _measures():
            in_force.needs_batches = True
            return affine
        return AdaptiveAffine(affine, site=site, asked=codec.bits)

    def measured_code(self, codec: AbstractCodec) -> Affine | None:
        return codec.affine if isinstance(codec, AdaptiveAffine) else None

    def squared_range(self, codec: AbstractCodec, packed: ArrayTree) -> Array | None:
        assert isinstance(codec, AdaptiveAffine)
        return codec.squared_range(packed)

    def note(
        self,
        sensitivities: Array,
        codecs: Sequence[AbstractCodec],
        likes: Sequence[Like],
        after: Array,
    ) -> Array:
        facts = tuple(
            codec.facts(like, self.target)
            for codec, like in zip(codecs, likes, strict=True)
            if isinstance(codec, AdaptiveAffine)
        )
        return ledger_note(
            sensitivities,
            after,
            ledger=self._in_force().ledger,
            sites=tuple(site_number(fact.name, self.target) for fact in facts),
            facts=facts,
        )

    def put(self, packed: ArrayTree) -> ArrayTree:
        return self.store.put(packed)

    def get(self, handle: ArrayTree) -> ArrayTree:
        return self.store.get(handle)

    def _in_force(self) -> BitsInForce:
        bits = bits_in_force()
        if bits is None:
            raise ValueError(
                f"`remat_compress(bits={self.target!r}, store={self.store!r})`: the "
                "bits are part of the compiled program, so that only a program that "
                "`dafjax.jit` compiles can adapt them. Write "
                "`step = dafjax.jit(step)` in place of `jax.jit(step)`, round "
                "the whole step, differentiation included; or use "
                "`store=dafjax.stores.PagePool()`, or give `bits` as a number."
            )
        return bits


def _measures() -> bool:
    """Returns whether a program measures residuals with the target `BatchNoise`.

    Few calls do, in a program of their own. Within a limit of memory, bits follow
    measurements of each call.
    """
    return batch_measurement() is not None or current_choice() is not None


def site_number(name: str, target: Target) -> int:
    """Returns the 64-bit hash that custom calls carry in place of a residual id.

    It includes the target, because a function may be wrapped twice with two targets.
    """
    return pool_hash(f"{name} for {target!r}")
