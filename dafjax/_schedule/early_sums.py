"""Moves sums over packed values before their barrier.

A packed value passes through a barrier. A sum after the barrier is a kernel of its own
that reads the whole value again; before the barrier XLA:GPU fuses the sum into the
kernel that computes the value. Examples are the mean and variance of a residual stream
for the next norm.
"""

import collections
from collections.abc import Container, Iterable, Sequence
from typing import NamedTuple

from dafjax._trace.equation import Equation
from dafjax._trace.residuals import Program
from dafjax._trace.rules import Combines


class Stage(NamedTuple):
    """One step of the forward pass.

    Attributes:
        equation: The equation.
        made: Values that can be packed after it: its own results and those of earlier
            steps that wait for it.
        sums: Sums over the first of these values.
    """

    equation: Equation
    made: tuple[int, ...]
    sums: tuple[int, ...] = ()


def with_early_sums(
    program: Program, equations: Sequence[Equation], packed: Container[int]
) -> tuple[Stage, ...]:
    """Reorders equations so that sums over packed values run before the barrier.

    Args:
        program: The program of the equations.
        equations: The equations of the forward pass that run.
        packed: The values that are packed.
    """
    readers: dict[int, list[Equation]] = collections.defaultdict(list)
    for eqn in equations:
        for value in dict.fromkeys(eqn.input_values):
            readers[value].append(eqn)

    def elements(values: Iterable[int]) -> int:
        return sum(program.avals[v].size for v in values)

    def reads_alone(eqn: Equation, value: int) -> bool:
        return eqn.input_values == (value,) and not eqn.has_effect

    def sums_of(value: int) -> list[Equation]:
        """Returns the reductions that read only this value."""
        return [
            eqn
            for eqn in readers[value]
            if reads_alone(eqn, value)
            and not eqn.rule.is_elementwise
            and eqn.rule.is_reduction(elements(eqn.outputs), elements([value]))
        ]

    def are_summed(terms: Sequence[int]) -> bool:
        """Returns whether the only readers of some values are sums over them."""
        return all(
            v not in packed and readers[v] and readers[v] == sums_of(v) for v in terms
        )

    def early(eqn: Equation) -> tuple[list[Equation], list[Equation]]:
        """Returns equations for terms of a packed result, and for sums of both."""
        if eqn.rule.combines is not Combines.ADD:
            return [], []
        (value,) = eqn.outputs
        if value not in packed or not program.is_large(value):
            return [], []
        terms = [
            e
            for e in readers[value]
            if reads_alone(e, value) and e.rule.is_elementwise and are_summed(e.outputs)
        ]
        summed = [value, *(v for e in terms for v in e.outputs)]
        return terms, [e for v in summed for e in sums_of(v)]

    stages: list[Stage] = []
    done: set[Equation] = set()
    for eqn in equations:
        if eqn in done:
            continue
        terms, sums = early(eqn)
        *waiting, last = (eqn, *terms, *sums)
        done.update((*terms, *sums))
        made = tuple(v for e in (*waiting, last) for v in e.outputs)
        stages += [Stage(e, ()) for e in waiting]
        stages.append(Stage(last, made, tuple(v for e in sums for v in e.outputs)))
    return tuple(stages)
