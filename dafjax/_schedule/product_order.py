"""Which of two products of the backward pass that do not need each other comes first.

JAX gives them in the order in which the forward pass reads their operands. Of the
product of attention probabilities and values it takes the cotangent of the
probabilities first, which is as large as they are, and which then waits while they are
unpacked for the cotangent of the values, which is small. The other way round neither
waits for the other.

And of the convolution in a shortcut that halves the image it takes the cotangent of the
image long before the other one, which is added to it. What it is made of is half as
large, and waits in its place. Then the gradient of that convolution's kernel can wait
as well, and read the image with the other one, which is unpacked once for both.
"""

import collections
from collections.abc import Sequence
from typing import final

from dafjax._plan.plan import ProgramPlan
from dafjax._trace.equation import Equation, values_of
from dafjax._trace.residuals import Program


def order_products(
    plan: ProgramPlan, *, are_apart: bool = False
) -> tuple[Equation, ...]:
    """Orders the backward pass so that less is there while its products run.

    Two expensive equations with nothing but cheap ones between them change places where
    both then need less memory: for what is unpacked to be read, and for their results.
    And for GPUs, one whose results are larger than what it reads, and nothing else
    behind it, comes right before what reads them; and one of which all that it reads
    waits anyway comes right behind one that unpacks the same. (In loops over parts what
    goes on is written in the place of what was read: there a ResNet-18 would need an
    eighth more.) Everything else stays in order.

    Args:
        plan: What is kept.
        are_apart: Whether it is for GPUs, as in `Parts`.

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
    if not are_apart:
        return tuple(equations)
    order = _Order(program, equations)
    order.delay_results()
    order.join_readers(coded)
    return tuple(order.equations)


@final
class _Order:
    """Equations of a backward pass, and where they are.

    Attributes:
        equations: The equations in their order.
    """

    def __init__(self, program: Program, equations: Sequence[Equation]) -> None:
        self.equations = list(equations)
        self._nbytes = program.nbytes
        self._place = {eqn: n for n, eqn in enumerate(equations)}
        self._products = [eqn for eqn in equations if not eqn.rule.is_cheap]
        self._gradients = frozenset(values_of(program.gradients))
        self._made = {v for eqn in equations for v in eqn.outputs} - self._gradients
        self._readers: dict[int, list[Equation]] = collections.defaultdict(list)
        for eqn in equations:
            for value in dict.fromkeys(eqn.input_values):
                self._readers[value].append(eqn)

    def delay_results(self) -> None:
        """Moves products to what reads their results, if less waits so."""
        for eqn in self._products:
            end = self._first_read(eqn)
            is_gradient = not self._gradients.isdisjoint(eqn.outputs)
            if is_gradient or not self._products_before(eqn, end):
                continue
            if sum(map(self._nbytes, eqn.outputs)) > self._waiting(eqn, end):
                self._move(eqn, end)

    def join_readers(self, coded: set[int]) -> None:
        """Moves products behind others that unpack the same, if nothing waits for that.

        Args:
            coded: What is unpacked, or recomputed from that.
        """
        for eqn in self._products:
            unpacked = coded.intersection(eqn.input_values)
            between = self._products_before(eqn, self._first_read(eqn))
            alike = [
                other
                for other in between
                if unpacked and unpacked == coded.intersection(other.input_values)
            ]
            # Two that are next to each other stay.
            if alike and alike[0] is not between[0]:
                end = self._place[alike[0]] + 1
                if self._waiting(eqn, end) == 0:
                    self._move(eqn, end)

    def _first_read(self, eqn: Equation) -> int:
        """Returns where results are read first, the end if they are not."""
        readers = (r for v in eqn.outputs for r in self._readers[v])
        return min(map(self._place.__getitem__, readers), default=len(self.equations))

    def _products_before(self, eqn: Equation, end: int) -> list[Equation]:
        """Returns the products from an equation to a place; none if it must stay."""
        if eqn.has_effect:
            return []
        between = self.equations[self._place[eqn] + 1 : end]
        return [other for other in between if not other.rule.is_cheap]

    def _waiting(self, eqn: Equation, end: int) -> int:
        """Returns the bytes that nothing but the equation would read at a place."""
        return sum(
            self._nbytes(v)
            for v in self._made.intersection(eqn.input_values)
            if all(r is eqn or self._place[r] < end for r in self._readers[v])
        )

    def _move(self, eqn: Equation, end: int) -> None:
        start = self._place[eqn]
        moved = [*self.equations[start + 1 : end], eqn]
        self.equations[start:end] = moved
        self._place.update((e, n) for n, e in enumerate(moved, start))


def _next_product(equations: Sequence[Equation], start: int) -> int:
    """Returns the number of the first expensive equation, of the end if none is."""
    numbers = range(start, len(equations))
    products = (n for n in numbers if not equations[n].rule.is_cheap)
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
