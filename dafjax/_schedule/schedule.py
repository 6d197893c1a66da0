"""Schedules the backward pass: when to decode, recompute and place barriers.

XLA may run an operation as soon as its operands are ready. Without barriers it decodes
a residual right after packing it, broadcasts a small residual long before its use, or
keeps two arrays alive to delay a small reduction. Each of these costs the memory that
packing saves. Only a data dependency that XLA cannot see through forces an order: a
barrier (`tie`), a custom call that returns its operands and, as far as XLA knows, needs
all of them.

So the backward pass, with its products in the order of `stages.py`, is cut into
stages. A stage begins

- before an expensive equation;
- before the first decode after an expensive equation, or at an earlier equation where
  far fewer bytes are live;
- after an expensive equation if something was recomputed for it from a large residual
  that is read again. Otherwise both arrays stay live while it runs: for example
  attention probabilities and the exponentials that they are computed from.

One barrier at the beginning of a stage takes

- all cotangents of the previous stage that are still needed: the values read to compute
  them are dead from there on;
- the uncompressed saved values that the new stage reads;
- a token that every decode of the stage depends on.

Cotangents that an expensive equation computed are barrier inputs only. XLA:CPU does not
compute in place in a buffer that a custom call returns, which costs one array at the
peak. Elementwise results pass through the barrier: XLA would otherwise recompute them
from their operands for every consumer after the barrier.

At the end of a stage the decoded values are dropped. A later use decodes them again,
which costs less than keeping them.

A stage in which every equation works row by row, or sums over rows, runs in chunks of
the rows, one after another (`chunking.py`, `chunks.py`). Then only its inputs and
outputs exist as whole arrays. The product that computes the outgoing cotangent also
runs in chunks, together with the weight gradient. On GPUs there are one or a few
chunks, without a loop (`chunking.py`). Lowering chooses between the two,
because the platform is known only then.

A stage that is not chunked has three more forced orders, each worth about one array at
the peak:

- If a value is recomputed from several compressed residuals, the next one is decoded
  after the results of the previous one exist. (Not where XLA decodes inside the
  consuming kernels: `dafjax/_native/_codes.py`.)
- An expensive equation reads its cotangents through a barrier together with its
  restored operands. XLA:CPU copies operands into the layout that it multiplies in, as
  soon as they are ready, so copied cotangents would be live while the other operands
  are restored. (XLA:GPU makes such copies where it computes the operands.)
- Large arguments (weights) that are copied before use are copied no earlier than the
  stage begins. XLA would transpose all of them at the start of the program, and slice
  all weights at the start of an iteration.
"""

import dataclasses
import itertools
from collections.abc import Container, Iterable, Mapping, Sequence

from dafjax import config
from dafjax._passes.algebra import finishing_equations
from dafjax._plan.plan import ProgramPlan
from dafjax._schedule.chunking import Parts, multiplies_again
from dafjax._schedule.stages import (
    joined_stages,
    order_products,
    with_divisions,
    with_lasting_parts,
)
from dafjax._schedule.steps import Step, Unpacking, behind_last_reads
from dafjax._trace.equation import Atom, Equation, values_of
from dafjax._trace.residuals import Program


def schedule_backward(plan: ProgramPlan, parts: Parts) -> tuple[Step, ...]:
    """Schedules the backward pass of a plan.

    Args:
        plan: The program and its saved residuals.
        parts: How residuals can be decoded in chunks.

    Returns:
        One step per equation, and a last one for the gradients.
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
    parts = dataclasses.replace(parts, divides_made=multiplies_again(plan, parts))
    steps = _build(plan, joined_stages(plan, _build(plan), parts))
    return with_divisions(plan, behind_last_reads(program, steps), parts)


def _build(
    plan: ProgramPlan,
    begins: Mapping[int, bool] | None = None,
    *,
    are_apart: bool = False,
) -> tuple[Step, ...]:
    program = plan.program
    builder = _Builder(plan, begins or {}, are_apart)
    for now, equation in enumerate(program.backward):
        builder.add(now, equation, equation.input_values)
    builder.add(len(program.backward), None, values_of(program.gradients))
    return builder.finish()


class _Builder:
    """Builds the steps by following the backward pass without running it.

    Args:
        plan: The program and its saved residuals.
        begins: For some steps, whether a stage begins there.
        are_apart: Whether the schedule is for GPUs. Then a stage begins before a sum of
            cotangents instead of after it, and no stage begins at a product that reads
            values decoded for the previous product.
    """

    def __init__(
        self, plan: ProgramPlan, begins: Mapping[int, bool], are_apart: bool
    ) -> None:
        program = plan.program
        self._begins = begins
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
        # Values decoded or recomputed in this stage.
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
            or self._begins.get(now, False)
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
        """Returns whether this stage has already decoded all compressed inputs.

        Only on GPUs, and only if one of the decoded inputs is large. A new stage would
        decode it again for the next product. Uncompressed saved inputs may be new.
        """
        known = self._known.intersection(residuals)
        is_any_large = self._are_apart and any(map(self._program.is_large, known))
        return is_any_large and self._given.issuperset(self._missing(residuals))

    def _can_begin(self, now: int, equation: Equation | None) -> bool:
        return self._begins.get(now, True) and equation not in self._finishing

    def finish(self) -> tuple[Step, ...]:
        """Adds to each stage's first step the saved inputs that the stage reads."""
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
        """Returns the decodes and recomputations that restore values.

        Args:
            restored: The values, each after those that it is recomputed from.
            wanted: The residuals that the step's equation reads.
        """
        last_use = dict.fromkeys(wanted, len(restored))
        for now, value in reversed(list(enumerate(restored))):
            if value not in self._compressed:
                for operand in self._recomputed[value].input_values:
                    last_use.setdefault(operand, now)
        order: dict[Unpacking | Equation, None] = {}
        partial: list[int] = []
        # Values of constants alone, such as zeros and masks: a kernel that reads them
        # computes them, unless they pass through a barrier.
        constant: set[int] = set()
        for now, value in enumerate(restored):
            if value not in self._compressed:
                equation = self._recomputed[value]
                order[equation] = None
                if constant.issuperset(equation.input_values):
                    constant.add(value)
                elif self._program.is_large(value):
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
        # A value that is computed of arguments alone is delayed as they are. Without a
        # barrier XLA computes it where it copies it for the product.
        decoded: set[int] = set()
        for value in restored:
            equation = self._recomputed.get(value)
            if equation is None or not decoded.isdisjoint(equation.input_values):
                decoded.add(value)
        new = [v for v in large if v in decoded]
        cotangents = [v for v in large if v in self._made]
        return (*cotangents, *new) if cotangents and new else ()

    def _next_unpacking(self, now: int) -> int | None:
        """Returns where to begin the stage that decodes the next residual.

        This is before the equation that reads the residual, or before an earlier cheap
        equation if far fewer bytes pass through the barrier there: then a cotangent
        does not live next to the values computed from it. With unrolled chunks
        (`are_apart`) the stage begins before a sum of cotangents, so that the sum and
        its consumer are one kernel. Returns `None` if nothing is decoded before the
        next expensive equation.
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
                    few = (n <= config.TERMS_OF_SUM * least for n in nbytes)
                    return now + list(few).index(True)
                far_less = config.FAR_FEWER_BYTES * least < nbytes[-1]
                return now + nbytes.index(least) if far_less else place
            if eqn is not None:
                fresh.update(v for v in eqn.outputs if self._program.is_large(v))
        return None

    def _sources_waited(self, now: int) -> bool:
        """Returns whether a new stage would lower the memory of the last product.

        That is so if a large residual was decoded for the product, the product does not
        read it itself, and an equation before the next product does. The new stage
        decodes it again.
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
        # XLA copies an argument that passes through a barrier, because it must keep it.
        return value >= self._program.num_arguments or not self._program.is_large(value)

    def _nbytes(self, value: int) -> int:
        return self._program.nbytes(value)

    def _missing(
        self, wanted: Iterable[int], known: Container[int] | None = None
    ) -> list[int]:
        """Returns the values to restore for `wanted` that are not in `known`.

        The order is depth-first: one operand with all of its inputs, then the next one.
        Large and deep operands come first, so that few bytes are live while they are
        restored.

        Args:
            wanted: Values that the caller reads.
            known: Values that need no restoring. Default: those restored in this stage.
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
    """Returns the length of the chain of equations that restores each value."""
    depths: dict[int, int] = {}
    for eqn in program.forward:
        depth = 1 + max((depths.get(v, 0) for v in eqn.input_values), default=0)
        depths.update((v, depth) for v in eqn.outputs if v not in at_hand)
    return depths


def last_uses(equations: Sequence[Equation], results: Sequence[Atom]) -> dict[int, int]:
    """Returns the index of the last equation that reads each value.

    Results count as read after the last equation.
    """
    uses = {v: now for now, eqn in enumerate(equations) for v in eqn.input_values}
    uses.update((v, len(equations)) for v in values_of(results))
    return uses
