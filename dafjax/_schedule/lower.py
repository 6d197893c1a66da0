"""Lowers a schedule to instructions.

What a test leaves out of the barriers (`Ties`), and how GPUs differ from CPUs, is
decided here: the interpreter runs what is in the list.
"""

import dataclasses
import itertools
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, final

import jax
import jax.numpy as jnp

from dafjax._native import tie
from dafjax._numbers import ArrayTree
from dafjax._plan.plan import Kept, ProgramPlan
from dafjax._schedule.instructions import (
    Barrier,
    Chunked,
    Instruction,
    Join,
    Late,
    Lowered,
    Run,
    Unpack,
)
from dafjax._schedule.stages import stretches_of
from dafjax._schedule.steps import (
    Division,
    Loop,
    Step,
    Ties,
    Unpacking,
    not_before,
    written,
)
from dafjax._schedule.values import MeasuredHandle, codecs_in
from dafjax._trace.equation import Equation
from dafjax._trace.residuals import Program
from dafjax._trace.rules import Cost
from dafjax.codecs import AbstractCodec
from dafjax.stores import AbstractStore


def restore_arguments(
    plan: ProgramPlan,
    arguments: Mapping[int, jax.Array],
    stored: Sequence[ArrayTree],
    cotangents: Sequence[jax.Array],
    *,
    store: AbstractStore,
    ties: Ties,
) -> tuple[list[Any], list[Any], jax.Array]:
    """Restores the inputs of a recompute at the beginning of its backward pass.

    Args:
        plan: The plan; it saves only arguments.
        arguments: The arguments listed in `plan.arguments`.
        stored: The values that `run_forward` returned for `plan.kept`.
        cotangents: The cotangents of the differentiable results.
        store: Where packed values are saved.
        ties: Which barriers to insert.

    Returns:
        All arguments, with None for those that are not read; the cotangents after a
        barrier; and a token that depends on them.
    """
    program = plan.program
    token: jax.Array = jnp.zeros((), jnp.uint8)
    if ties.cotangent:
        *cotangents, token = tie(*cotangents, token)
    codecs = codecs_in(store, plan)
    env: dict[int, Any] = dict(arguments)
    for item, handle in zip(plan.kept, stored, strict=True):
        if item.codec is None:
            env[item.value] = handle
            continue
        with jax.named_scope("unpack"):
            codec = codecs[item.value]
            packed = store.get(
                handle.handle if isinstance(handle, MeasuredHandle) else handle
            )
            env[item.value] = codec.decode(packed, item.like, after=(token,))
    if ties.arguments:
        # Otherwise XLA computes values that depend only on these arguments in the
        # forward pass, and keeps them.
        late = _small_or_rearranged(program)
        late = late.intersection(env).difference(codecs)
        env.update((v, not_before(token, env[v])) for v in late)
    restored = [env.get(v) for v in range(program.num_arguments)]
    return restored, list(cotangents), token


def _small_or_rearranged(program: Program) -> set[int]:
    """Returns the arguments that are cheap to delay.

    These are small arguments, and those that are copied where they are read. If a
    product reads a large argument directly, the delay adds a copy.
    """
    found = {v for v in range(program.num_arguments) if not program.is_large(v)}
    for equation in program.forward:
        if equation.rule.is_cheap or equation.rule.is_copied_before:
            made = sum(program.nbytes(v) for v in equation.outputs)
            found.update(
                v
                for v in equation.input_values
                if v < program.num_arguments and program.nbytes(v) <= 2 * made
            )
    return found


def lower(
    plan: ProgramPlan,
    codecs: Mapping[int, AbstractCodec],
    schedule: Iterable[Step],
    ties: Ties,
    *,
    is_apart: bool = False,
    fills_late: bool = False,
) -> Lowered:
    """Returns the instructions of a backward pass.

    Args:
        plan: The program and its saved residuals.
        codecs: The codec of each value.
        schedule: The steps that `schedule_backward` returned for the plan.
        ties: Which barriers to insert.
        is_apart: Whether the schedule is for unrolled chunks. Then it runs on a GPU.
        fills_late: Whether to delay the creation of the zeros that lookup gradients
            are added to.
    """
    program = plan.program
    moving = [number for number, moves in enumerate(program.perturbed) if moves]
    pairs = zip(moving, program.gradients, strict=True)
    of_weights = {v for n, v in pairs if n in plan.whole_weights}
    lowering = _Lowering(
        {item.value: item for item in plan.kept},
        codecs,
        ties,
        is_apart,
        _filled_for_lookups(plan) if fills_late and ties.arguments else frozenset(),
        _read_in_rows(program) if is_apart and ties.layouts else frozenset(),
    )
    stages = map(lowering.stage, stretches_of(schedule))
    instructions = tuple(itertools.chain.from_iterable(stages))
    pinned = plan.weights_as_read | of_weights if ties.layouts else frozenset()
    return Lowered(plan, codecs, instructions, pinned, is_apart)


@final
@dataclasses.dataclass(frozen=True)
class _Lowering:
    """Lowers one stage after another.

    Attributes:
        kept: The saved residuals.
        codecs: The codec of each residual.
        ties: Which barriers to insert.
        is_apart: Whether the instructions are for a GPU.
        filled_late: Arrays of zeros that are filled after the last barrier.
        in_rows: Values that pass through barriers in row-major order.
        of_loops: Results of chunk loops so far: XLA cannot recompute them from their
            operands, so they are barrier inputs only.
    """

    kept: Mapping[int, Kept]
    codecs: Mapping[int, AbstractCodec]
    ties: Ties
    is_apart: bool
    filled_late: frozenset[int]
    in_rows: frozenset[int]
    of_loops: set[int] = dataclasses.field(default_factory=set)

    def stage(self, steps: Sequence[Step]) -> Iterator[Instruction]:
        """Yields the instructions of the next stage."""
        first = steps[0]
        if first.begins:
            yield self._begin(first)
        in_memory = written(
            piece for step in steps for piece in (*step.restored, step.equation)
        )
        if first.division is not None:
            yield from self._chunked_stage(steps, first.division, in_memory)
            return
        for step in steps:
            late = step.delayed if self.ties.arguments else ()
            if late:
                yield Late(late)
            yield from self._pieces(step.restored, in_memory, late)
            if step.joined and self.ties.operands and not self.is_apart:
                # XLA:GPU copies operands where it computes them.
                yield Join(step.joined)
            if step.equation is not None:
                yield self._run(step.equation, late)

    def _begin(self, step: Step) -> Barrier:
        cotangents = step.cotangents
        if not self.ties.outgoing and step.equation is not None:
            read = step.equation.input_values
            cotangents = tuple(v for v in cotangents if v in read)
        awaited = self.of_loops.union(step.awaited)
        waits = tuple(v for v in cotangents if v in awaited)
        through = tuple(v for v in cotangents if v not in awaited)
        if not self.ties.in_place:
            waits, through = (), waits + through
        if self.ties.cotangent:
            through += step.given
        late = step.settled if self.ties.outgoing else ()
        in_rows = tuple(v for v in (*waits, *through) if v in self.in_rows)
        return Barrier(through, waits, late, in_rows=in_rows, begins=True)

    def _run(self, equation: Equation, late: Iterable[int] = ()) -> Run:
        """Returns the instruction for an equation on whole arrays."""
        read = tuple(v for v in late if v in equation.input_values)
        when = "any"
        if not self.filled_late.isdisjoint(equation.outputs):
            when = "filled"
        elif equation.rule.cost is Cost.DRAW:
            # Otherwise XLA draws once, in the forward pass, and keeps the numbers.
            when = "drawn"
        return Run(equation, read, when)

    def _pieces(
        self,
        pieces: Iterable[Unpacking | Equation],
        in_memory: Container[int],
        late: Sequence[int] = (),
        division: Division | None = None,
        sources: Iterable[int] = (),
    ) -> Iterator[Barrier | Unpack | Run]:
        """Yields decodes and equations on whole arrays, or on chunks of `sources`."""
        of_chunk = set(sources)
        for piece in pieces:
            of_chunk.update(piece.outputs)
            if isinstance(piece, Equation):
                is_whole = division is None
                yield self._run(piece, late) if is_whole else Run(piece)
                continue
            value, like = piece.value, self.kept[piece.value].like
            fused = self.codecs[value].decodes_fused and value not in in_memory
            behind = piece.behind if self.ties.partial else ()
            waits = self.ties.cotangent
            codes_wait = self.is_apart and fused and waits
            if division is not None:
                # Other values are whole, or not computed in this loop.
                behind = tuple(v for v in piece.behind if v in of_chunk)
                shape = division.num_rows_of_part, *like.shape[1:]
                like = jax.ShapeDtypeStruct(shape, like.dtype)
                codes_wait = fused or not self.is_apart
                waits = not codes_wait
            if behind:
                yield Barrier(behind, only_on_cpus=fused)
            yield Unpack(value, like, fused, codes_wait, waits)

    def _chunked_stage(
        self, steps: Iterable[Step], division: Division, in_memory: Container[int]
    ) -> Iterator[Instruction]:
        if not self.is_apart:
            # Without the barrier XLA prepares codes for the loop earlier.
            yield Barrier(packed=division.unpacked)
        delayed = dict.fromkeys(v for step in steps for v in step.delayed)
        late = tuple(delayed) if self.ties.arguments else ()
        if late:
            yield Late(late)
        in_chunks = {v for loop in division.loops for v in loop.made}

        def on_wholes(
            pieces: Iterable[Unpacking | Equation],
        ) -> Iterator[Barrier | Unpack | Run]:
            for piece in pieces:
                if isinstance(piece, Unpacking):
                    behind = (v for v in piece.behind if v not in in_chunks)
                    piece = dataclasses.replace(piece, behind=tuple(behind))
                yield from self._pieces([piece], in_memory, late)

        for loop in division.loops:
            yield from on_wholes(loop.before)
            yield self._chunks(division, loop, late)
            if not self.is_apart:
                self.of_loops.update(loop.results)
        yield from on_wholes(division.rest)

    def _chunks(self, division: Division, loop: Loop, late: tuple[int, ...]) -> Chunked:
        in_memory = written((*loop.by_rows, *loop.sums))
        body = self._pieces(loop.by_rows, in_memory, (), division, loop.sources)
        if self.is_apart:
            return Chunked(division, loop, tuple(body), late)
        replaced = [v for v in loop.replaced if v is not None]
        sources = (*(v for v in loop.sources if v not in replaced), *replaced)
        # Without the barrier XLA copies the whole array before writing to it, in case a
        # value of the chunk is read afterwards. XLA:GPU does not if all operands lead
        # to a single result: then one kernel can do everything and write it.
        only_on_cpus = len(loop.results) == 1 and not (loop.sums or in_memory)
        barrier = Barrier(sources, only_on_cpus=only_on_cpus) if loop.results else None
        # Otherwise XLA:GPU rearranges the whole array to the layout in which a product
        # reads its chunks.
        pinned = tuple(v for v in sources if v in in_memory)
        return Chunked(division, loop, tuple(body), late, barrier, pinned)


def _read_in_rows(program: Program) -> frozenset[int]:
    """Returns the operands of products without batch dimensions.

    The gradient of a weight and the cotangent of the weight's other operand contract
    different dimensions of the incoming cotangent. In row-major order both can read it
    without a copy.
    """
    products = (eqn for eqn in program.backward if eqn.primitive == "dot_general")
    return frozenset(
        value
        for eqn in products
        if not any(eqn.params["dimension_numbers"][1])
        for value in eqn.input_values
    )


def _filled_for_lookups(plan: ProgramPlan) -> frozenset[int]:
    """Returns the arrays of zeros that lookup gradients are added to.

    XLA creates them at the start of the program, XLA:GPU those of all lookups in one
    kernel.
    """
    fills = {
        eqn.outputs[0] for eqn in plan.recomputed.values() if eqn.filling is not None
    }
    return frozenset(
        eqn.input_values[0]
        for eqn in plan.program.backward
        if eqn.primitive == "scatter-add" and eqn.input_values[0] in fills
    )
