"""Choice of a reduction's strategy on a device, from measured times."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import final

import numpy as np

from dafjax._native._reduction_shapes import STRATEGIES, num_parts
from dafjax._native._reduction_timing import REDUCTIONS, ReductionCase


# Maps cases and a number of rounds to seconds, `[num_rounds, number of cases]`.
Timer = Callable[[Sequence[ReductionCase], int], np.ndarray]

# (rows, elements per row); every row has several parts. The arrays have at most 16 MiB:
# above that, all strategies take as long as reading the array.
GRID = tuple(
    (num_rows, 1 << log2_elements)
    for num_rows in (1, 16, 256)
    for log2_elements in range(14, 23, 2)
    if num_rows << log2_elements <= 1 << 22
)
# "atomic" is no candidate for sums, because its last bits may differ between calls.
_CANDIDATES = {"minmax": STRATEGIES, "sum_of_squares": ("parallel", "hybrid")}
# Another strategy must be faster than "parallel" by more than this factor, because
# "parallel" needs neither state nor atomics.
_NOTICEABLE = 1.03
_NUM_ROUNDS = 7
# Elements of all launches that are timed together. They take about 0.1 ms, far more
# than waiting for the device and reading the clock.
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
        """Returns the fastest strategy at the nearest measured point.

        The distance is the sum of the absolute logarithms of the ratios of `num_rows`
        and `row_elements`. A row of one part needs no second step, so `"parallel"`.
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
    """Returns the fastest strategy; `"parallel"` if it is at most 3 % slower."""
    best = min(seconds, key=lambda strategy: seconds[strategy])
    return "parallel" if seconds["parallel"] <= _NOTICEABLE * seconds[best] else best


def measure(timer: Timer) -> Profile:
    """Times all candidates on `GRID`, in about 0.3 s."""
    cases = [
        ReductionCase(reduction, strategy, *shape, _num_launches(*shape))
        for reduction in REDUCTIONS
        for shape in GRID
        for strategy in _CANDIDATES[reduction]
    ]
    # Disturbances only make a round longer, so take the minimum.
    seconds = np.min(timer(cases, _NUM_ROUNDS), axis=0)
    times: dict[tuple[str, int, int], dict[str, float]] = {}
    for case, least in zip(cases, seconds, strict=True):
        key = (case.reduction, case.num_rows, case.row_elements)
        times.setdefault(key, {})[case.strategy] = float(least)
    return Profile(times)


def _num_launches(num_rows: int, row_elements: int) -> int:
    wanted = _ELEMENTS_AT_ONCE // (num_rows * row_elements)
    return min(max(wanted, 4), _MOST_LAUNCHES)
