"""How a page pool grows when what it has is in use."""

import dataclasses
from typing import final

from dafjax._nbytes import parse_nbytes
from dafjax._numbers import as_real


@final
@dataclasses.dataclass(frozen=True)
class AdaptiveGrowth:
    """Grows by a share of recent demand, by 2 to 64 MiB at a time.

    What is committed and not used is then at most a small part of what is: a pool for a
    few residuals stays small, and one for many takes few steps.

    Attributes:
        share: Of the most bytes in use in this execution and the one before; above 0
            and at most 1.

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
    """Grows by the same number of bytes each time, or by what one residual needs.

    Attributes:
        nbytes: As an integer, or as text: `"100MB"`, which is what DAF takes.

    Raises:
        TypeError: `nbytes` is neither an integer nor text.
        ValueError: `nbytes` cannot be read, or is not from 1 byte to 1 TiB.
    """

    nbytes: int | str = "100MB"

    def __post_init__(self) -> None:
        parse_nbytes("FixedGrowth(nbytes=...)", self.nbytes, most=_MOST_GROWTH)


# What is committed is listed, page by page: a list for more ends the process.
_MOST_GROWTH = 2**40

Growth = AdaptiveGrowth | FixedGrowth
