"""What stores have in common whose bits are part of the compiled program."""

from collections.abc import Sequence

from dafjax._targets import Target
from dafjax._typing import Array
from dafjax.codecs import AbstractCodec
from dafjax.stores._abstract import AbstractStore


class AbstractStaticStore(AbstractStore):
    """A store that keeps what codecs make, and leaves bits as they were planned."""

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
