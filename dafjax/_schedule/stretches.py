"""Stretches: where they end so that they run in parts, and which of them do."""

import dataclasses
from collections.abc import Iterable, Sequence

from dafjax._plan.plan import ProgramPlan
from dafjax._schedule.division import divide, read_in
from dafjax._schedule.parts import Parts
from dafjax._schedule.rows import Rows
from dafjax._schedule.steps import Step
from dafjax._trace.equation import values_of
from dafjax._trace.primitives import is_cheap


def stretches_of(steps: Iterable[Step]) -> list[list[Step]]:
    """Returns the stretches that steps are of."""
    stretches: list[list[Step]] = []
    for step in steps:
        if step.begins or not stretches:
            stretches.append([])
        stretches[-1].append(step)
    return stretches


def products_in_parts(
    plan: ProgramPlan, steps: Sequence[Step], parts: Parts
) -> frozenset[int]:
    """Returns the products that are better part of the stretch in front of them.

    Where the gradient of a weight is summed in parts, so can the cotangent be made that
    goes on, in the place of the one that both are made of. (Where parts stay apart it
    is made of them anyway.)

    Args:
        plan: What is kept.
        steps: Those of the backward pass.
        parts: In which parts residuals can be unpacked.

    Returns:
        The numbers of their steps.
    """
    if parts.are_apart:
        return frozenset()
    stretches = stretches_of(steps)
    laters = _read_later(plan, stretches)
    found = set()
    joined: list[Step] = []
    end = 0
    for stretch, later in zip(stretches, laters, strict=True):
        can_join = (
            joined
            and not _is_cheap(joined[0])
            and not _is_cheap(stretch[0])
            and not stretch[0].unpacked
            and divide(plan, [*joined, *stretch], later, parts, {}) is not None
        )
        if can_join:
            found.add(end)
        joined = [*joined, *stretch] if can_join else stretch
        end += len(stretch)
    return frozenset(found)


def with_divisions(
    plan: ProgramPlan, steps: Sequence[Step], parts: Parts
) -> tuple[Step, ...]:
    """Returns the steps, the first of every stretch with how it runs in parts.

    Args:
        plan: What is kept.
        steps: Those of the backward pass.
        parts: In which parts residuals can be unpacked.
    """
    stretches = stretches_of(steps)
    divided: list[Step] = []
    in_parts: dict[int, Rows] = {}
    for stretch, later in zip(stretches, _read_later(plan, stretches), strict=True):
        first, *others = stretch
        division = divide(plan, stretch, later, parts, in_parts)
        divided += [dataclasses.replace(first, division=division), *others]
        if division is not None and division.stays_in_parts:
            made = (v for loop in division.loops for v in loop.results)
            in_parts.update(dict.fromkeys(made, division.rows))
        else:
            # It is joined where it is read as a whole.
            read = read_in(stretch)
            in_parts = {v: rows for v, rows in in_parts.items() if v not in read}
    return tuple(divided)


def _read_later(
    plan: ProgramPlan, stretches: Sequence[Sequence[Step]]
) -> list[set[int]]:
    """Returns what is read behind each stretch."""
    read = set(values_of(plan.program.gradients))
    laters = []
    for stretch in reversed(stretches):
        laters.append(set(read))
        read |= read_in(stretch)
    return laters[::-1]


def _is_cheap(step: Step) -> bool:
    return step.equation is None or is_cheap(step.equation.primitive)
