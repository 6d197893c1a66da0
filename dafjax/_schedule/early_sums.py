"""Sums of what is packed, taken where it is made.

What is packed goes on through a tie. A sum behind the tie is a kernel of its own, that
reads all of it again; in front of it XLA:GPU takes it in the kernel that makes the
value. So are mean and variance of a residual stream, for the norm that reads it next.
"""

import collections
from collections.abc import Container, Iterable, Sequence
from typing import NamedTuple

from dafjax._trace.equation import Equation
from dafjax._trace.residuals import Program
from dafjax._trace.rules import Combines


class Stage(NamedTuple):
    """What runs next in a forward pass.

    Attributes:
        equation: The equation.
        made: The values that can be packed behind it, also those of the stages in front
            of it that wait for it.
        sums: What was summed over the first of them.
    """

    equation: Equation
    made: tuple[int, ...]
    sums: tuple[int, ...] = ()


def with_early_sums(
    program: Program, equations: Sequence[Equation], packed: Container[int]
) -> tuple[Stage, ...]:
    """Returns equations in an order in which sums of what is packed come first.

    Args:
        program: What they are of.
        equations: Those of the forward pass that run.
        packed: What is packed.
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
        """Returns what makes little of a value alone."""
        return [
            eqn
            for eqn in readers[value]
            if reads_alone(eqn, value)
            and not eqn.rule.is_elementwise
            and eqn.rule.is_reduction(elements(eqn.outputs), elements([value]))
        ]

    def are_summed(terms: Sequence[int]) -> bool:
        """Whether values are read by nothing but sums of them."""
        return all(
            v not in packed and readers[v] and readers[v] == sums_of(v) for v in terms
        )

    def early(eqn: Equation) -> tuple[list[Equation], list[Equation]]:
        """Returns what makes terms of what is packed, and sums of it and of them."""
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
