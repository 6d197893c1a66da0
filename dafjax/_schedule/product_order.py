"""Which of two products of the backward pass that do not need each other comes first.

JAX gives them in the order in which the forward pass reads their operands. Of the
product of attention probabilities and values it takes the cotangent of the
probabilities first, which is as large as they are, and which then waits while they are
unpacked for the cotangent of the values, which is small. The other way round neither
waits for the other.

And of the convolution in a shortcut that halves the image it takes the cotangent of the
image long before the other one that this is added to. What it is made of is half as
large, and waits in its place.
"""

import collections
from collections.abc import Sequence

from dafjax._plan.plan import ProgramPlan
from dafjax._trace.equation import Equation, values_of
from dafjax._trace.primitives import is_cheap
from dafjax._trace.residuals import Program


def order_products(plan: ProgramPlan) -> tuple[Equation, ...]:
    """Orders the backward pass so that less is there while its products run.

    Two expensive equations with nothing but cheap ones between them change places where
    both then need less memory: for what is unpacked to be read, and for their results.
    One whose results are larger than what it reads, and nothing else behind it, comes
    right before what reads them. Everything else stays in order.

    Args:
        plan: What is kept.

    Returns:
        The equations of `plan.program.backward`, each after those that it reads.
    """
    program = plan.program
    # What is unpacked, or recomputed from that. What is made of arguments alone counts
    # as nothing: weights that are turned round are read as they are.
    coded = {item.value for item in plan.kept if item.codec is not None}
    raw = {item.value for item in plan.kept if item.codec is None}
    for equation in program.forward:
        if not coded.isdisjoint(equation.input_values):
            coded.update(v for v in equation.outputs if v not in raw)

    def restored(eqn: Equation) -> int:
        return sum(program.nbytes(v) for v in coded.intersection(eqn.input_values))

    def made(eqn: Equation) -> int:
        return sum(map(program.nbytes, eqn.outputs))

    def peak(first: Equation, second: Equation) -> int:
        while_second_runs = made(first) + restored(second) + made(second)
        return max(restored(first) + made(first), while_second_runs)

    equations = list(program.backward)
    place = _next_product(equations, 0)
    while (behind := _next_product(equations, place + 1)) < len(equations):
        stretch = equations[place : behind + 1]
        first, second = stretch[0], stretch[-1]
        moved = _independent_of_first(stretch)
        if moved and peak(second, first) < peak(first, second):
            left = [eqn for eqn in stretch if eqn not in moved]
            equations[place : behind + 1] = [*moved, *left]
            place += len(moved)
        else:
            place = behind
    return tuple(_with_late_results(program, equations))


def _with_late_results(
    program: Program, equations: Sequence[Equation]
) -> list[Equation]:
    """Moves expensive equations to what reads their results, if less waits so."""
    ordered = list(equations)
    readers: dict[int, list[Equation]] = collections.defaultdict(list)
    for eqn in ordered:
        for value in dict.fromkeys(eqn.input_values):
            readers[value].append(eqn)
    kept = set(values_of(program.gradients))
    made = {v for eqn in ordered for v in eqn.outputs} - kept
    place = {eqn: number for number, eqn in enumerate(ordered)}
    products = [eqn for eqn in ordered if not is_cheap(eqn.primitive)]

    def waiting(eqn: Equation, end: int) -> int:
        """Returns the bytes that nothing else would read any longer at that place."""
        return sum(
            program.nbytes(v)
            for v in made.intersection(eqn.input_values)
            if all(other is eqn or place[other] < end for other in readers[v])
        )

    for eqn in products:
        reading = [place[reader] for v in eqn.outputs for reader in readers[v]]
        if eqn.has_effect or not reading or not kept.isdisjoint(eqn.outputs):
            continue
        start, end = place[eqn], min(reading)
        between = ordered[start + 1 : end]
        if all(is_cheap(other.primitive) for other in between):
            continue
        if sum(map(program.nbytes, eqn.outputs)) > waiting(eqn, end):
            ordered[start:end] = [*between, eqn]
            place.update((e, n) for n, e in enumerate(ordered[start:end], start))
    return ordered


def _next_product(equations: Sequence[Equation], start: int) -> int:
    """Returns the number of the first expensive equation, of the end if none is."""
    numbers = range(start, len(equations))
    products = (n for n in numbers if not is_cheap(equations[n].primitive))
    return next(products, len(equations))


def _independent_of_first(stretch: Sequence[Equation]) -> list[Equation]:
    """Returns the last of some equations, and what it needs of those before it.

    Nothing if it needs the first, or if any of them does more than compute.
    """
    first, *others = stretch
    if any(eqn.has_effect for eqn in stretch):
        return []
    needed = set(others[-1].outputs)
    moved = []
    for eqn in reversed(others):
        if not needed.isdisjoint(eqn.outputs):
            moved.append(eqn)
            needed.update(eqn.input_values)
    return moved[::-1] if needed.isdisjoint(first.outputs) else []
