"""What hooks for saved tensors do: every one in the same few bits, none recomputed."""

import dataclasses
from typing import final

import jax.numpy as jnp

from dafjax.codecs import Affine, Bitmask
from dafjax.policies import (
    AbstractPolicy,
    Compress,
    Decision,
    Recompute,
    Residual,
    Save,
)


# Smaller arrays are kept as they are: ranges would take as much.
_MIN_NBYTES = 16 * 1024
# As are statistics: what is this many times smaller than what it was reduced from.
_REDUCTION = 16


@final
@dataclasses.dataclass(frozen=True)
class UniformBits(AbstractPolicy):
    """Packs whatever the backward pass reads, in blocks of 256 consecutive values.

    Not so what follows from the arguments alone, small arrays, statistics and whole
    numbers. Truth values are kept as bits.

    Attributes:
        bits: Bits of a code.
    """

    bits: int

    def __call__(self, residual: Residual) -> Decision:
        """Decides without regard to what a residual is used for."""
        if residual.known:
            return Recompute()
        is_small = residual.nbytes * residual.copies <= _MIN_NBYTES
        if is_small or residual.num_elements * _REDUCTION <= residual.reduced_from:
            return Save()
        if residual.is_floating:
            return Compress(Affine(self.bits))
        return Compress(Bitmask()) if residual.dtype == jnp.bool_ else Save()
