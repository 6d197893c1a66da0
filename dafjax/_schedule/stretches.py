"""Stages: where they end so that they can be chunked, and which are chunked."""

import dataclasses
from collections.abc import Iterable, Sequence

from dafjax import config
from dafjax._plan.plan import ProgramPlan
from dafjax._schedule.division import divide, read_in
from dafjax._schedule.parts import Parts
from dafjax._schedule.rows import Rows
from dafjax._schedule.steps import Division, Step
from dafjax._trace.equation import values_of


def stretches_of(steps: Iterable[Step]) -> list[list[Step]]:
    """Groups steps into stages."""
    stretches: list[list[Step]] = []
    for step in steps:
        if step.begins or not stretches:
            stretches.append([])
        stretches[-1].append(step)
    return stretches


def products_in_parts(
    plan: ProgramPlan, steps: Sequence[Step], parts: Parts
) -> frozenset[int]:
    """Returns the products that should join the stage before them.

    If a stage sums a weight gradient in chunks, the next product can compute the
    outgoing cotangent in the same chunks and overwrite the cotangent that both read.

    Args:
        plan: The program and its saved residuals.
        steps: The steps of its backward pass.
        parts: How residuals can be decoded in chunks.

    Returns:
        The step indices of these products.
    """
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
    """Returns the steps with a chunk plan on the first step of each stage.

    Args:
        plan: The program and its saved residuals.
        steps: The steps of its backward pass.
        parts: How residuals can be decoded in chunks.
    """
    stretches = stretches_of(steps)
    divisions, _ = _divisions(plan, stretches, parts)
    return _divided(stretches, divisions)


def with_lasting_parts(
    plan: ProgramPlan, steps: Sequence[Step], parts: Parts
) -> tuple[Step, ...] | None:
    """Returns the steps with chunk plans whose results stay chunked.

    Returns `None` if no results stay chunked, or if so many are concatenated that
    chunks and whole arrays together save nothing: see `config.LEAST_CHUNKED_RESULTS`.

    Args:
        plan: The program and its saved residuals.
        steps: The steps of its backward pass.
        parts: How residuals can be decoded in unrolled chunks.
    """
    stretches = stretches_of(steps)
    divisions, joined = _divisions(plan, stretches, parts)
    results, wholes = (
        sum(map(plan.program.nbytes, values))
        for values in (_results_in_parts(divisions), joined)
    )
    if results <= config.LEAST_CHUNKED_RESULTS * wholes:
        return None
    return _divided(stretches, divisions)


def _results_in_parts(divisions: Iterable[Division | None]) -> dict[int, Rows]:
    """Returns the values that stay chunked after their stages, with their chunks."""
    return {
        value: division.rows
        for division in divisions
        if division is not None and division.stays_in_parts
        for loop in division.loops
        for value in loop.results
    }


def _divisions(
    plan: ProgramPlan, stretches: Sequence[Sequence[Step]], parts: Parts
) -> tuple[list[Division | None], list[int]]:
    """Returns the chunk plan of each stage, and the results that are concatenated."""
    divisions: list[Division | None] = []
    joined: list[int] = []
    in_parts: dict[int, Rows] = {}
    for stretch, later in zip(stretches, _read_later(plan, stretches), strict=True):
        division = divide(plan, stretch, later, parts, in_parts)
        divisions.append(division)
        if division is None or not division.stays_in_parts:
            # Chunked values are concatenated where they are read whole.
            joined += sorted(in_parts.keys() & read_in(stretch))
            in_parts = {v: rows for v, rows in in_parts.items() if v not in joined}
        in_parts.update(_results_in_parts([division]))
    joined += sorted(in_parts.keys() & values_of(plan.program.gradients))
    return divisions, joined


def _divided(
    stretches: Sequence[Sequence[Step]], divisions: Iterable[Division | None]
) -> tuple[Step, ...]:
    divided: list[Step] = []
    for (first, *others), division in zip(stretches, divisions, strict=True):
        divided += [dataclasses.replace(first, division=division), *others]
    return tuple(divided)


def _read_later(
    plan: ProgramPlan, stretches: Sequence[Sequence[Step]]
) -> list[set[int]]:
    """Returns for each stage the values that are read after it."""
    read = set(values_of(plan.program.gradients))
    laters = []
    for stretch in reversed(stretches):
        laters.append(set(read))
        read |= read_in(stretch)
    return laters[::-1]


def _is_cheap(step: Step) -> bool:
    return step.equation is None or step.equation.rule.is_cheap
