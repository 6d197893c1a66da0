"""The order of the backward pass: what is unpacked, recomputed and tied when.

XLA is free to run anything whose operands are ready. Left alone it unpacks a residual
right after it was packed, broadcasts a small one long before it is needed, or keeps two
arrays alive to save a small reduction for later; each costs the memory that packing was
to save. An order can only be forced by a data dependency that it cannot see through: a
`tie`, a custom call that returns its operands and, for all XLA knows, needs them all.

So the backward pass, with its products in the order of `product_order.py`, is cut into
stretches. A stretch begins before an expensive equation, and before the first unpacking
after one, or where far less is alive on the way to that. It also begins after an
expensive equation for which something was recomputed from a large residual that is read
again: else both wait while it runs, as attention probabilities and the exponentials
that they are made of. There, one tie takes

- all cotangents computed in the stretch before that are still needed: whatever was read
  to compute them is dead from there on;
- what was saved as it is and is read in the stretch that begins;
- a token, on which every unpacking of the stretch depends.

The tie only waits for cotangents that a product gave: in a buffer that goes through a
custom call XLA:CPU computes nothing in place, and that is one array at the peak. What
was made element by element goes through it. XLA would make it again, from what it was
made of, for all that reads it after the tie.

What was unpacked is forgotten at the end of a stretch; a later use unpacks it again,
which costs less than keeping it.

A stretch in which everything is made row by row, or summed over rows, runs in parts of
the rows, one after another (`division.py`, `loops.py`): so nothing is there as a whole
but what enters it and what leaves it. The product that makes the cotangent that goes on
then runs in parts too, with the gradient of the weight. On GPUs there is one part, or
a few, and no loop (`apart.py`, `parts.py`); for what a program is, is known when it is
lowered.

Within a stretch that runs as a whole three more orders are forced, each worth about one
array at the peak:

- Where a value is recomputed from several compressed ones, the next is unpacked when
  what came of the last is there. (Not where XLA unpacks in the kernels that read it:
  `dafjax/_native/_fused.py`.)
- An expensive equation reads its cotangents through a tie with what was restored for
  it: XLA:CPU copies operands into the layout that it multiplies in, those that are
  there first, first. (XLA:GPU makes such copies where it makes the operands.)
- Large arguments (weights) that are copied before they are read are copied no earlier
  than the stretch begins: XLA would turn all of them round at the start of the program,
  and take the slices of all weights at the start of an iteration.
"""

import dataclasses
import itertools
from collections.abc import Container, Iterable, Sequence

from dafjax._plan.plan import ProgramPlan
from dafjax._schedule.gradients import behind_last_reads
from dafjax._schedule.parts import Parts
from dafjax._schedule.product_order import order_products
from dafjax._schedule.steps import Step, Unpacking
from dafjax._schedule.stretches import (
    products_in_parts,
    with_divisions,
    with_lasting_parts,
)
from dafjax._trace.equation import Atom, Equation, values_of
from dafjax._trace.finishing import finishing_equations
from dafjax._trace.residuals import Program


# A stretch that begins early keeps equations out of the one before, where they would be
# done by then.
_FAR_LESS = 1.5

# A sum is less than its terms, by so much.
_TERMS_OF_SUM = 2


def schedule_backward(plan: ProgramPlan, parts: Parts) -> tuple[Step, ...]:
    """Orders the backward pass of a plan.

    Args:
        plan: What is kept.
        parts: In which parts residuals can be unpacked.

    Returns:
        One step for each equation, and one for the gradients.
    """
    ordered = order_products(plan, are_apart=parts.are_apart)
    program = dataclasses.replace(plan.program, backward=ordered)
    plan = dataclasses.replace(plan, program=program)
    if parts.are_apart:
        steps = behind_last_reads(program, _build(plan, are_apart=True))
        in_parts = with_lasting_parts(plan, steps, parts) if parts.most > 1 else None
        if in_parts is not None:
            return in_parts
        return with_divisions(plan, steps, dataclasses.replace(parts, most=1))
    steps = _build(plan, products_in_parts(plan, _build(plan), parts))
    return with_divisions(plan, behind_last_reads(program, steps), parts)


def _build(
    plan: ProgramPlan, inside: Container[int] = (), *, are_apart: bool = False
) -> tuple[Step, ...]:
    program = plan.program
    builder = _Builder(plan, inside, are_apart)
    for now, equation in enumerate(program.backward):
        builder.add(now, equation, equation.input_values)
    builder.add(len(program.backward), None, values_of(program.gradients))
    return builder.finish()


class _Builder:
    """Follows the backward pass without running it.

    Args:
        plan: What is kept.
        inside: Expensive equations before which no stretch begins.
        are_apart: Whether it is for GPUs. Then a stretch begins before a sum rather
            than behind it, and none begins at a product that reads what was unpacked
            for the one before.
    """

    def __init__(
        self, plan: ProgramPlan, inside: Container[int], are_apart: bool
    ) -> None:
        program = plan.program
        self._inside = inside
        self._are_apart = are_apart
        self._program = program
        self._finishing = finishing_equations(program)
        self._compressed = {k.value for k in plan.kept if k.codec is not None}
        self._given = {k.value for k in plan.kept if k.codec is None}
        self._given.update(plan.arguments)
        self._recomputed = plan.recomputed
        self._slices = plan.slices
        self._residuals = frozenset(program.residuals())
        self._depths = _depths(program, self._compressed | self._given)
        self._last_use = last_uses(program.backward, program.gradients)
        self._made = set(program.cotangents)
        self._fresh = set(program.cotangents)
        self._made_by_expensive: set[int] = set()
        # Unpacked or recomputed in this stretch.
        self._known: set[int] = set()
        self._expensive_since_begin = True
        self._steps: list[Step] = []
        self._given_of_step: list[set[int]] = []

    def add(self, now: int, equation: Equation | None, inputs: Iterable[int]) -> None:
        inputs = tuple(inputs)
        residuals = [v for v in inputs if v not in self._made]
        expensive = equation is not None and not equation.rule.is_cheap
        begins = self._can_begin(now, equation) and (
            (expensive and not self._reads_known(residuals))
            or (self._expensive_since_begin and self._next_unpacking(now) == now)
            or self._sources_waited(now)
        )
        cotangents: tuple[int, ...] = ()
        if begins:
            self._known.clear()
            self._expensive_since_begin = False
            alive = {v for v in self._fresh if self._last_use.get(v, -1) >= now}
            alive.update(v for v in inputs if v in self._made)
            cotangents = tuple(sorted(alive))
            self._fresh.clear()
        missing = self._missing(residuals)
        given = {v for v in missing if v in self._given}
        restored = [v for v in missing if v not in given]
        self._known.update(restored)
        step = Step(
            equation=equation,
            begins=begins,
            cotangents=cotangents,
            awaited=tuple(v for v in cotangents if v in self._made_by_expensive),
            given=(),
            restored=self._in_order(restored, residuals),
            delayed=(),
            joined=self._joined(inputs, restored) if expensive else (),
            finishes=equation in self._finishing,
        )
        delayed = self._large_arguments(step)
        self._steps.append(dataclasses.replace(step, delayed=delayed))
        self._given_of_step.append(given)
        if equation is not None:
            self._made.update(equation.outputs)
            self._fresh.update(equation.outputs)
            if expensive:
                self._made_by_expensive.update(equation.outputs)
        self._expensive_since_begin |= expensive

    def _reads_known(self, residuals: Sequence[int]) -> bool:
        """Returns whether all that is read was unpacked in this stretch already.

        Something large, that is. Else it would be unpacked again for the next product.
        """
        known = self._known.intersection(residuals)
        is_any_large = self._are_apart and any(map(self._program.is_large, known))
        return is_any_large and self._given.issuperset(self._missing(residuals))

    def _can_begin(self, now: int, equation: Equation | None) -> bool:
        return now not in self._inside and equation not in self._finishing

    def finish(self) -> tuple[Step, ...]:
        """Gives every stretch what its steps read of what was saved as it is."""
        steps: list[Step] = []
        read: set[int] = set()
        for step, given in zip(
            reversed(self._steps), reversed(self._given_of_step), strict=True
        ):
            read |= given
            if step.begins:
                tied = tuple(sorted(v for v in read if self._goes_through_ties(v)))
                step = dataclasses.replace(step, given=tied)
                read = set()
            steps.append(step)
        return tuple(reversed(steps))

    def _in_order(
        self, restored: Sequence[int], wanted: Iterable[int]
    ) -> tuple[Unpacking | Equation, ...]:
        """Returns how to restore values, given in the order in which they were made."""
        last_use = dict.fromkeys(wanted, len(restored))
        for now, value in reversed(list(enumerate(restored))):
            if value not in self._compressed:
                for operand in self._recomputed[value].input_values:
                    last_use.setdefault(operand, now)
        order: dict[Unpacking | Equation, None] = {}
        partial: list[int] = []
        for now, value in enumerate(restored):
            if value not in self._compressed:
                order[self._recomputed[value]] = None
                if self._program.is_large(value):
                    partial.append(value)
                continue
            behind = tuple(v for v in partial if last_use.get(v, -1) >= now)
            if not behind or self._nbytes(value) < max(map(self._nbytes, behind)):
                order[Unpacking(value)] = None
            else:
                order[Unpacking(value, behind)] = None
                partial.clear()
        return tuple(order)

    def _joined(
        self, inputs: Sequence[int], restored: Sequence[int]
    ) -> tuple[int, ...]:
        large = [v for v in inputs if self._program.is_large(v)]
        new = [v for v in large if v in restored]
        cotangents = [v for v in large if v in self._made]
        return (*cotangents, *new) if cotangents and new else ()

    def _next_unpacking(self, now: int) -> int | None:
        """Returns where the stretch begins in which something is unpacked next.

        Before the equation that reads it, or before one of the cheap ones in front of
        it, if far less goes through the tie there: a cotangent need not wait beside
        what was made of it. Where parts stay apart it is before a sum of cotangents,
        so that the sum and what is made of it are one kernel. None if nothing is
        unpacked before the next expensive one.
        """
        backward = self._program.backward
        fresh = {v for v in self._fresh if self._program.is_large(v)}
        nbytes: list[int] = []
        for place in range(now, len(backward) + 1):
            eqn = backward[place] if place < len(backward) else None
            if eqn is not None and not eqn.rule.is_cheap:
                break
            alive = (v for v in fresh if self._last_use.get(v, -1) >= place)
            nbytes.append(sum(map(self._nbytes, alive)))
            results = self._program.gradients
            read = values_of(results) if eqn is None else eqn.input_values
            missing = self._missing(v for v in read if v in self._residuals)
            if not self._compressed.isdisjoint(missing):
                least = min(nbytes)
                if self._are_apart:
                    few = (n <= _TERMS_OF_SUM * least for n in nbytes)
                    return now + list(few).index(True)
                far_less = _FAR_LESS * least < nbytes[-1]
                return now + nbytes.index(least) if far_less else place
            if eqn is not None:
                fresh.update(v for v in eqn.outputs if self._program.is_large(v))
        return None

    def _sources_waited(self, now: int) -> bool:
        """Returns whether unpacking again spares an expensive equation just run memory.

        That is, if a large residual was unpacked for it, that it does not read itself,
        and the equations up to the next expensive one read it.
        """
        large = {v for v in self._known & self._compressed if self._program.is_large(v)}
        if not large or not self._expensive_since_begin:
            return False
        before = self._program.backward[now - 1]
        waited = large.difference(before.input_values)
        if not waited or before.rule.is_cheap:
            return False
        stretch = itertools.takewhile(
            lambda eqn: eqn.rule.is_cheap,
            itertools.islice(self._program.backward, now, None),
        )
        read = {v for eqn in stretch for v in eqn.input_values}
        return not waited.isdisjoint(self._missing(read & self._residuals, known=()))

    def _large_arguments(self, step: Step) -> tuple[int, ...]:
        readers = list(step.recomputed)
        if step.equation is not None and step.equation.rule.is_copied_before:
            readers.append(step.equation)
        read = {v for eqn in readers for v in eqn.whole_input_values}
        if step.equation is not None:
            read |= self._slices.intersection(step.equation.input_values)
        return tuple(
            v
            for v in sorted(read)
            if v < self._program.num_arguments
            and v not in self._compressed
            and v not in self._recomputed
            and self._program.is_large(v)
        )

    def _effort(self, value: int) -> tuple[int, int]:
        return self._nbytes(value), self._depths.get(value, 0)

    def _goes_through_ties(self, value: int) -> bool:
        # XLA copies an argument that it must keep.
        return value >= self._program.num_arguments or not self._program.is_large(value)

    def _nbytes(self, value: int) -> int:
        return self._program.nbytes(value)

    def _missing(
        self, wanted: Iterable[int], known: Container[int] | None = None
    ) -> list[int]:
        """Returns all values between what is `known`, or at hand, and `wanted`.

        In an order in which they can be restored: one operand with all that it takes,
        then the next. Large ones that take long come first, so that what is at hand
        already waits for little.
        """
        known = self._known if known is None else known
        missing: dict[int, None] = {}
        begun: set[int] = set()
        stack = sorted(wanted, key=self._effort)
        while stack:
            value = stack[-1]
            if value in begun or value in known:
                stack.pop()
                if value not in known:
                    missing[value] = None
                continue
            begun.add(value)
            if value not in self._compressed and value not in self._given:
                operands = self._recomputed[value].input_values
                stack.extend(
                    sorted((v for v in operands if v not in begun), key=self._effort)
                )
        return list(missing)


def _depths(program: Program, at_hand: set[int]) -> dict[int, int]:
    """Returns how many equations run one after another to restore each value."""
    depths: dict[int, int] = {}
    for eqn in program.forward:
        depth = 1 + max((depths.get(v, 0) for v in eqn.input_values), default=0)
        depths.update((v, depth) for v in eqn.outputs if v not in at_hand)
    return depths


def last_uses(equations: Sequence[Equation], results: Sequence[Atom]) -> dict[int, int]:
    """Returns the number of the last equation that reads each value.

    Results are read after the last equation.
    """
    uses = {v: now for now, eqn in enumerate(equations) for v in eqn.input_values}
    uses.update((v, len(equations)) for v in values_of(results))
    return uses
