"""Sums over the rows of all parts, which end in one kernel for all that are alike.

On GPUs a sum over rows takes two steps, and the second as long as a launch does
(`_native/_sum_rows.py`). A norm has two sums in its gradient, in every part: all have
one second step, and parts are added there.
"""

import collections
from collections.abc import Mapping
from typing import Any, final

from dafjax._native import sum_together
from dafjax._schedule.one_part import finish_sums
from dafjax._schedule.steps import Division, Loop
from dafjax._trace.by_rows import evaluate_on_rows
from dafjax._trace.equation import look_up
from dafjax._trace.sums import sums_of_groups
from dafjax._typing import Array, ArrayTree


@final
class JointSums:
    """What a loop sums over the rows of the parts that ran."""

    def __init__(self, division: Division, loop: Loop) -> None:
        self._division = division
        self._loop = loop
        self._whole: dict[int, Array] = {}
        # Of each part, sums of groups of rows.
        self._of_groups: dict[int, tuple[Array, ...]] = {}

    def add(self, at_hand: Mapping[int, Any]) -> None:
        """Sums over the rows of a part.

        Args:
            at_hand: What is there of the part, and as a whole.
        """
        for eqn in self._loop.sums:
            operands = look_up(eqn.inputs, at_hand)
            (of_arrays,) = eqn.jaxpr.eqns
            groups = sums_of_groups(of_arrays, operands)
            if groups is not None:
                (value,) = eqn.outputs
                self._of_groups[value] = (*self._of_groups.get(value, ()), groups)
                continue
            rows = self._division.num_rows, self._division.num_rows_of_part
            outputs = evaluate_on_rows(eqn, operands, *rows)
            for value, x in zip(eqn.outputs, outputs, strict=True):
                known = self._whole.get(value)
                self._whole[value] = x if known is None else known + x

    def finish_whole(self) -> None:
        """Finishes sums that are not of groups: all parts ran."""
        finish_sums(self._loop, self._whole)

    @property
    def arrays(self) -> ArrayTree:
        """What is there, to be replaced by what waits for more."""
        return self._whole, self._of_groups

    @arrays.setter
    def arrays(self, tied: ArrayTree) -> None:
        self._whole, self._of_groups = tied

    def finish(self) -> dict[int, Array]:
        """Returns the sums, or what is made of them."""
        alike: collections.defaultdict[Any, list[int]] = collections.defaultdict(list)
        for value, parts in self._of_groups.items():
            alike[tuple(x.shape for x in parts)].append(value)
        totals: dict[int, Array] = {}
        for values in alike.values():
            arrays = [x for v in values for x in self._of_groups[v]]
            sums = iter(sum_together(arrays))
            for value in values:
                first, *others = (next(sums) for _ in self._of_groups[value])
                totals[value] = sum(others, first)
        finish_sums(self._loop, totals)
        return self._whole | totals
