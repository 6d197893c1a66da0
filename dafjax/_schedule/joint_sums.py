"""Batches the second reduction stages of sums over rows.

On GPUs a sum over rows takes two steps, and the second is as long as a launch
(`_native/_sum_rows.py`). The gradient of a norm has two sums in every chunk. All sums
of the same shape share one second step, and then the chunks are added.
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
    """The sums of a chunk loop over the rows of the chunks that ran."""

    def __init__(self, division: Division, loop: Loop) -> None:
        self._division = division
        self._loop = loop
        self._whole: dict[int, Array] = {}
        # Per value, the sums over groups of rows of each chunk.
        self._of_groups: dict[int, tuple[Array, ...]] = {}

    def add(self, at_hand: Mapping[int, Any]) -> None:
        """Adds the sums over the rows of one chunk.

        Args:
            at_hand: The live values: the chunk's and the whole ones.
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
        """Runs the epilogues of sums without groups, after the last chunk."""
        finish_sums(self._loop, self._whole)

    @property
    def arrays(self) -> ArrayTree:
        """The arrays so far, which a barrier's results replace."""
        return self._whole, self._of_groups

    @arrays.setter
    def arrays(self, tied: ArrayTree) -> None:
        self._whole, self._of_groups = tied

    def finish(self) -> dict[int, Array]:
        """Returns the sums, or the gradients that their epilogues compute."""
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
