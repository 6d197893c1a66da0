"""The order of the backward pass: what is unpacked, recomputed and tied when.

XLA is free to run anything whose operands are ready. Left alone it unpacks a residual
right after it was packed, broadcasts a small one long before it is needed, or keeps two
arrays alive to save a small reduction for later; each costs the memory that packing was
to save. An order can only be forced by a data dependency that it cannot see through: a
`tie`, a custom call that returns its operands and, for all XLA knows, needs them all.

So the backward pass is cut into stretches. A stretch begins before an expensive
equation, and before the first unpacking after one. There, one tie takes

- all cotangents computed in the stretch before that are still needed: whatever was read
  to compute them is dead from there on;
- what was saved as it is and is read in the stretch that begins;
- a token, on which every unpacking of the stretch depends.

What was unpacked is forgotten at the end of a stretch; a later use unpacks it again,
which costs less than keeping it.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import final

from dafjax._graph import Atom, Equation, values_of
from dafjax._plan import Plan
from dafjax._primitives import is_cheap


@final
@dataclasses.dataclass(frozen=True)
class Step:
    """One equation of the backward pass and what must be at hand for it.

    Attributes:
        equation: The equation; `None` stands for returning the gradients.
        begins: Whether a stretch begins before it.
        cotangents: If so, the values of the backward pass that go through the tie.
        given: If so, the saved values and small arguments that go through the tie.
        unpacked: The compressed residuals to unpack, in order.
        recomputed: The equations of the forward pass to run again, in order.
    """

    equation: Equation | None
    begins: bool
    cotangents: tuple[int, ...]
    given: tuple[int, ...]
    unpacked: tuple[int, ...]
    recomputed: tuple[Equation, ...]


# Larger arguments do not go through ties: XLA copies an argument that it must keep.
_SMALL_NBYTES = 16 * 1024


def schedule_backward(plan: Plan) -> tuple[Step, ...]:
    """Orders the backward pass of a plan.

    Args:
        plan: What is kept.

    Returns:
        One step for each equation, and one for the gradients.
    """
    builder = _Builder(plan)
    for now, equation in enumerate(plan.program.backward):
        builder.add(now, equation, equation.input_values)
    builder.add(len(plan.program.backward), None, values_of(plan.program.gradients))
    return builder.finish()


class _Builder:
    """Follows the backward pass without running it."""

    def __init__(self, plan: Plan) -> None:
        program = plan.program
        self._program = program
        self._compressed = {k.value for k in plan.kept if k.codec is not None}
        self._given = {k.value for k in plan.kept if k.codec is None}
        self._given.update(plan.arguments)
        self._recomputed = plan.recomputed
        self._last_use = last_uses(program.backward, program.gradients)
        self._made = set(program.cotangents)
        self._fresh = set(program.cotangents)
        # Unpacked or recomputed in this stretch.
        self._known: set[int] = set()
        self._expensive_since_begin = True
        self._steps: list[Step] = []
        self._given_of_step: list[set[int]] = []

    def add(self, now: int, equation: Equation | None, inputs: Iterable[int]) -> None:
        inputs = tuple(inputs)
        residuals = [v for v in inputs if v not in self._made]
        expensive = equation is not None and not is_cheap(equation.primitive)
        unpacks = any(v in self._compressed for v in self._missing(residuals))
        begins = expensive or (unpacks and self._expensive_since_begin)
        cotangents: tuple[int, ...] = ()
        if begins:
            self._known.clear()
            self._expensive_since_begin = False
            alive = {v for v in self._fresh if self._last_use.get(v, -1) >= now}
            alive.update(v for v in inputs if v in self._made)
            cotangents = tuple(sorted(alive))
            self._fresh.clear()
        missing = self._missing(residuals)
        unpacked = tuple(v for v in missing if v in self._compressed)
        recomputed = tuple(
            dict.fromkeys(
                self._recomputed[v]
                for v in missing
                if v not in self._compressed and v not in self._given
            )
        )
        given = {v for v in missing if v in self._given}
        self._known.update(v for v in missing if v not in self._given)
        self._steps.append(Step(equation, begins, cotangents, (), unpacked, recomputed))
        self._given_of_step.append(given)
        if equation is not None:
            self._made.update(equation.outputs)
            self._fresh.update(equation.outputs)
        self._expensive_since_begin |= expensive

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

    def _goes_through_ties(self, value: int) -> bool:
        if value >= self._program.num_arguments:
            return True
        aval = self._program.avals[value]
        return aval.size * getattr(aval.dtype, "itemsize", 0) <= _SMALL_NBYTES

    def _missing(self, wanted: Iterable[int]) -> list[int]:
        """Returns all values between what is at hand and `wanted`, in order."""
        missing: set[int] = set()
        stack = list(wanted)
        while stack:
            value = stack.pop()
            if value in missing or value in self._known:
                continue
            missing.add(value)
            if value not in self._compressed and value not in self._given:
                stack.extend(self._recomputed[value].input_values)
        return sorted(missing)


def last_uses(equations: Sequence[Equation], results: Sequence[Atom]) -> dict[int, int]:
    """Returns the number of the last equation that reads each value.

    Results are read after the last equation.
    """
    uses = {v: now for now, eqn in enumerate(equations) for v in eqn.input_values}
    uses.update((v, len(equations)) for v in values_of(results))
    return uses
