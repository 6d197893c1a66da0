"""Which strategy a reduction takes on a device, as times of it say."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import final

import numpy as np

from dafjax._native._reduction_shapes import STRATEGIES, num_parts
from dafjax._native._reduction_timing import REDUCTIONS, ReductionCase


# Seconds [num_rounds, number of cases] of cases and a number of rounds.
Timer = Callable[[Sequence[ReductionCase], int], np.ndarray]

# (rows, elements of a row) of several parts; up to 16 MiB, beyond which all strategies
# take what reading takes.
GRID = tuple(
    (num_rows, 1 << log2_elements)
    for num_rows in (1, 16, 256)
    for log2_elements in range(14, 23, 2)
    if num_rows << log2_elements <= 1 << 22
)
# Sums of these strategies have the same bits from call to call.
_CANDIDATES = {"minmax": STRATEGIES, "sum_of_squares": ("parallel", "hybrid")}
# What is not faster by more than this is not preferred: no state, no atomics.
_NOTICEABLE = 1.03
_NUM_ROUNDS = 7
# Elements of the launches that are timed at once: some 0.1 ms, so that waiting for the
# device and reading the clock are little of it.
_ELEMENTS_AT_ONCE = 1 << 20
_MOST_LAUNCHES = 32


@final
@dataclasses.dataclass(frozen=True)
class Profile:
    """How long the strategies of reductions take on a device.

    Attributes:
        times: By (reduction, rows, elements of a row), seconds by strategy.
    """

    times: Mapping[tuple[str, int, int], Mapping[str, float]]

    def choose(self, reduction: str, num_rows: int, row_elements: int) -> str:
        """Returns the strategy that takes the least time.

        That of the nearest point that was timed: as a factor, whose logarithms in both
        directions are added. A row of one part needs no second step.
        """
        if num_parts(row_elements) == 1 or num_rows == 0:
            return "parallel"
        nearest = min(
            (key for key in self.times if key[0] == reduction),
            key=lambda key: (
                abs(math.log(key[1] / num_rows)) + abs(math.log(key[2] / row_elements))
            ),
        )
        return fastest(self.times[nearest])


def fastest(seconds: Mapping[str, float]) -> str:
    """Returns the strategy of the least time, `"parallel"` if that is hardly more."""
    best = min(seconds, key=lambda strategy: seconds[strategy])
    return "parallel" if seconds["parallel"] <= _NOTICEABLE * seconds[best] else best


def measure(timer: Timer) -> Profile:
    """Times all candidates on `GRID`, in some 0.3 s."""
    cases = [
        ReductionCase(reduction, strategy, *shape, _num_launches(*shape))
        for reduction in REDUCTIONS
        for shape in GRID
        for strategy in _CANDIDATES[reduction]
    ]
    # Of what disturbs a round, nothing makes it shorter.
    seconds = np.min(timer(cases, _NUM_ROUNDS), axis=0)
    times: dict[tuple[str, int, int], dict[str, float]] = {}
    for case, least in zip(cases, seconds, strict=True):
        key = (case.reduction, case.num_rows, case.row_elements)
        times.setdefault(key, {})[case.strategy] = float(least)
    return Profile(times)


def _num_launches(num_rows: int, row_elements: int) -> int:
    wanted = _ELEMENTS_AT_ONCE // (num_rows * row_elements)
    return min(max(wanted, 4), _MOST_LAUNCHES)
