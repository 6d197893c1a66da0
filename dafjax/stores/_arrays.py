"""Ordinary arrays as a store."""

import dataclasses
from collections.abc import Sequence
from typing import final

from dafjax._targets import Target
from dafjax._typing import Array, ArrayTree
from dafjax.codecs import AbstractCodec
from dafjax.stores._abstract import AbstractStore


@final
@dataclasses.dataclass(frozen=True)
class Arrays(AbstractStore):
    """Keeps packed residuals in ordinary arrays, which XLA plans and frees.

    Pure, batchable and shardable; nothing can leak. The number of bits is part of the
    compiled program.
    """

    def codec(
        self, wanted: AbstractCodec, *, site: str, reads: int = 0
    ) -> AbstractCodec:
        return wanted

    def allocate_for(self, target: Target) -> None:
        raise NotImplementedError(
            f"`remat_compress(bits={target!r})` needs a store whose bits change while "
            f"a program runs, and `{self!r}` has them in the compiled program. Use "
            "`store=dafjax.stores.PagePool()`, or give `bits` as a number."
        )

    def measures(self, codec: AbstractCodec) -> bool:
        del codec
        return False

    def note(
        self, sensitivities: Array, codecs: Sequence[AbstractCodec], after: Array
    ) -> Array:
        raise NotImplementedError(
            f"`{self!r}` does not measure: its bits are part of the compiled program."
        )

    def put(self, packed: ArrayTree) -> ArrayTree:
        return packed

    def get(self, handle: ArrayTree) -> ArrayTree:
        return handle
