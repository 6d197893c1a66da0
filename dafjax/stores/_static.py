"""Base class of the stores whose bits are part of the compiled program."""

from collections.abc import Sequence

from dafjax._targets import Target
from dafjax._typing import Array, ArrayTree, Like
from dafjax.codecs import AbstractCodec
from dafjax.stores._abstract import AbstractStore
from dafjax.stores._adaptive import Adaptive


class AbstractStaticStore(AbstractStore):
    """A store that keeps packed residuals unchanged, with the planned bits."""

    @property
    def keeps_bits(self) -> bool:
        return True

    def codec(
        self, wanted: AbstractCodec, *, site: str, reads: int = 0, num_parts: int = 1
    ) -> AbstractCodec:
        return wanted

    def allocate_for(self, target: Target) -> Adaptive:
        return Adaptive(self, target)

    def measured_code(self, codec: AbstractCodec) -> None:
        del codec

    def squared_range(self, codec: AbstractCodec, packed: ArrayTree) -> None:
        del codec, packed

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
