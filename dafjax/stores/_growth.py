"""How much a page pool grows when its pages are all in use."""

import dataclasses
from typing import final

from dafjax._nbytes import parse_nbytes
from dafjax._numbers import as_real


@final
@dataclasses.dataclass(frozen=True)
class AdaptiveGrowth:
    """Grows by a share of recent peak use, in steps of 2 to 64 MiB.

    A step is larger if one residual needs more. The unused memory stays a small part
    of the used memory: a pool for a few residuals stays small, and a pool for many
    needs few steps.

    Attributes:
        share: Share of the peak number of bytes in use, over this execution and the
            previous one; above 0 and at most 1.

    Raises:
        TypeError: `share` is no number.
        ValueError: `share` is out of range.
    """

    share: float = 1 / 32

    def __post_init__(self) -> None:
        share = as_real(
            "AdaptiveGrowth(share=...)",
            self.share,
            lowest=0,
            highest=1,
            includes_lowest=False,
            remedy="For steps of one size use `FixedGrowth`.",
        )
        object.__setattr__(self, "share", share)


@final
@dataclasses.dataclass(frozen=True)
class FixedGrowth:
    """Grows by a fixed number of bytes, or by more if one residual needs more.

    Attributes:
        nbytes: Bytes, as an integer or as text. The default, `"100MB"`, is DAF's.

    Raises:
        TypeError: `nbytes` is neither an integer nor text.
        ValueError: `nbytes` cannot be read, or is not from 1 byte to 1 TiB.
    """

    nbytes: int | str = "100MB"

    def __post_init__(self) -> None:
        parse_nbytes("FixedGrowth(nbytes=...)", self.nbytes, most=_MOST_GROWTH)


# The pool lists committed memory page by page. A longer list would end the process.
_MOST_GROWTH = 2**40

Growth = AdaptiveGrowth | FixedGrowth
