"""Sums of what is packed, taken where it is made.

What is packed goes on through a tie. A sum behind the tie is a kernel of its own, that
reads all of it again; in front of it XLA:GPU takes it in the kernel that makes the
value. So are mean and variance of a residual stream, for the norm that reads it next.
"""

import collections
from collections.abc import Container, Iterable, Sequence
from typing import NamedTuple

from dafjax._trace.equation import Equation
from dafjax._trace.primitives import adds_operands, is_elementwise, is_reduction
from dafjax._trace.residuals import Program


class Run(NamedTuple):
    """What runs next in a forward pass.

    Attributes:
        equation: The equation.
        made: The values that can be packed behind it.
        sums: Sums of the first of these, that go through its tie.
    """

    equation: Equation
    made: tuple[int, ...]
    sums: tuple[int, ...] = ()


def with_early_sums(
    program: Program, equations: Sequence[Equation], packed: Container[int]
) -> tuple[Run, ...]:
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

    def elements(value: int) -> int:
        return program.avals[value].size

    def sums(value: int) -> list[Equation]:
        """Returns what makes little of a value alone."""
        return [
            eqn
            for eqn in readers[value]
            if eqn.input_values == (value,)
            and not is_elementwise(eqn.primitive)
            and all(
                is_reduction(eqn.primitive, elements(v), elements(value))
                for v in eqn.outputs
            )
        ]

    def early(made_by: Equation) -> Iterable[Equation]:
        """Returns sums of what is packed, and of what is made of it for them alone."""
        value = made_by.outputs[0]
        if value not in packed or not program.is_large(value):
            return
        yield from sums(value)
        for eqn in readers[value]:
            if eqn.input_values == (value,) and is_elementwise(eqn.primitive):
                (terms,) = eqn.outputs
                if terms not in packed and readers[terms] == sums(terms) != []:
                    yield eqn
                    yield from sums(terms)

    runs: list[Run] = []
    done: set[Equation] = set()
    for eqn in equations:
        if eqn in done:
            continue
        first = list(early(eqn)) if adds_operands(eqn.primitive) else []
        if not first:
            runs.append(Run(eqn, eqn.outputs))
            continue
        done.update(first)
        (value,) = eqn.outputs
        made = tuple(v for e in first for v in e.outputs)
        small = tuple(v for v in made if elements(v) < elements(value))
        runs += [Run(e, ()) for e in (eqn, *first[:-1])]
        runs.append(Run(first[-1], (value, *made), small))
    return tuple(runs)
