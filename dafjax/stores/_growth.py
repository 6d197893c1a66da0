"""How a page pool grows when what it has is in use."""

import dataclasses
from typing import final

from dafjax._nbytes import parse_nbytes


@final
@dataclasses.dataclass(frozen=True)
class AdaptiveGrowth:
    """Grows by a share of recent demand, by 2 to 64 MiB at a time.

    What is committed and not used is then at most a small part of what is: a pool for a
    few residuals stays small, and one for many takes few steps.

    Attributes:
        share: Of the most bytes in use in this execution and the one before.
    """

    share: float = 1 / 32

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ValueError(
                f"`AdaptiveGrowth(share=...)` must be above 0 and at most 1, but got "
                f"{self.share!r}. For steps of one size use `FixedGrowth`."
            )


@final
@dataclasses.dataclass(frozen=True)
class FixedGrowth:
    """Grows by the same number of bytes each time, or by what one residual needs.

    Attributes:
        nbytes: As an integer, or as text: `"100MB"`, which is what DAF takes.
    """

    nbytes: int | str = "100MB"

    def __post_init__(self) -> None:
        parse_nbytes("nbytes", self.nbytes)


Growth = AdaptiveGrowth | FixedGrowth
