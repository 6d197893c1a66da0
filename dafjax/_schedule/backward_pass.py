"""Runs the backward pass, equation by equation, as scheduled."""

import collections
import itertools
from collections.abc import (
    Container,
    Iterable,
    Mapping,
    MutableMapping,
    Sequence,
)
from typing import Any, final

import jax
import jax.numpy as jnp

from dafjax._native import hold, pin, row_major, tie, tie_tree
from dafjax._plan.plan import ProgramPlan
from dafjax._schedule.apart import run_apart
from dafjax._schedule.loops import run_loop
from dafjax._schedule.moments import RowMeans
from dafjax._schedule.not_before import can_be_tied, fill_not_before, not_before
from dafjax._schedule.probe import Probe
from dafjax._schedule.steps import Division, Loop, Step, Unpacking, written
from dafjax._schedule.stored import MeasuredHandle
from dafjax._schedule.stretches import stretches_of
from dafjax._schedule.ties import Ties
from dafjax._schedule.values import Values
from dafjax._trace.equation import Equation, evaluate, look_up
from dafjax._trace.residuals import Program
from dafjax._trace.rules import Cost
from dafjax._typing import ArrayTree
from dafjax.codecs import AbstractCodec
from dafjax.stores import AbstractStore


def run_backward(
    plan: ProgramPlan,
    codecs: Mapping[int, AbstractCodec],
    schedule: Sequence[Step],
    arguments: Mapping[int, jax.Array],
    stored: Sequence[ArrayTree],
    cotangents: Sequence[jax.Array],
    *,
    store: AbstractStore,
    ties: Ties,
    is_apart: bool = False,
    fills_late: bool = False,
) -> list[Any]:
    """Computes the cotangents of the perturbed arguments.

    Args:
        plan: The program and its saved residuals.
        codecs: The codec of each value, the same as for `run_forward`.
        schedule: The steps that `schedule_backward` returned for the plan.
        arguments: The arguments listed in `plan.arguments`.
        stored: The values that `run_forward` returned for `plan.kept`.
        cotangents: The cotangents of the differentiable results.
        store: Where packed values are saved.
        ties: Which barriers to insert.
        is_apart: Whether the schedule is for unrolled chunks (`apart.py`). Then it runs
            on a GPU.
        fills_late: Whether to delay the creation of the zeros that lookup gradients
            are added to.

    Returns:
        One cotangent for each perturbed argument.
    """
    backward = _RunningBackward(
        plan,
        codecs,
        arguments,
        stored,
        cotangents,
        store,
        ties,
        is_apart,
        _filled_for_lookups(plan) if fills_late and ties.arguments else frozenset(),
    )
    for stretch in stretches_of(schedule):
        backward.run(stretch)
    return backward.finish()


@final
class _RunningBackward:
    """The live values while the backward pass runs."""

    def __init__(
        self,
        plan: ProgramPlan,
        codecs: Mapping[int, AbstractCodec],
        arguments: Mapping[int, jax.Array],
        stored: Sequence[ArrayTree],
        cotangents: Sequence[jax.Array],
        store: AbstractStore,
        ties: Ties,
        is_apart: bool,
        filled_late: frozenset[int],
    ) -> None:
        program = plan.program
        self._plan = plan
        self._store = store
        self._ties = ties
        self._kept = {item.value: item for item in plan.kept}
        waiting = dict(zip(self._kept, stored, strict=True))
        self._measured = {
            v: item for v, item in waiting.items() if isinstance(item, MeasuredHandle)
        }
        waiting.update((v, item.handle) for v, item in self._measured.items())
        self._waiting = waiting
        # Packed values that a barrier has delayed, for decoding in a chunk loop.
        self._taken: dict[int, ArrayTree] = {}
        self._codecs = codecs
        self._is_apart = is_apart
        self._filled_late = filled_late
        # Values of the current stage that must be in memory (see `written`).
        self._written: set[int] = set()
        self._env = Values()
        # Results of chunk loops: XLA cannot recompute them from their operands, so they
        # are barrier inputs only.
        self._of_loops: set[int] = set()
        # Carries the dependency on the backward pass to the decodes. Its value is
        # unused.
        self._token: jax.Array = jnp.zeros((), jnp.uint8)
        noise = {v: item.rounding_noise for v, item in self._measured.items()}
        self._probe = Probe(plan, noise) if self._measured else None
        moving = [number for number, moves in enumerate(program.perturbed) if moves]
        pairs = zip(moving, program.gradients, strict=True)
        of_weights = {v for n, v in pairs if n in plan.whole_weights}
        self._pinned = (
            plan.weights_as_read | of_weights if ties.layouts else frozenset()
        )
        self._in_rows = (
            _read_in_rows(program) if is_apart and ties.layouts else frozenset()
        )
        self._learn(dict(zip(program.cotangents, cotangents, strict=True)))
        self._learn(arguments)
        self._learn({v: waiting[v] for v, k in self._kept.items() if k.codec is None})

    def run(self, stretch: Sequence[Step]) -> None:
        """Runs a stage, in chunks if it has a chunk plan."""
        if stretch[0].begins:
            self._begin(stretch[0])
        self._written = written(
            piece for step in stretch for piece in (*step.restored, step.equation)
        )
        division = stretch[0].division
        if division is not None:
            if not division.is_apart:
                self._take(division)
            at_hand = self._at_hand(v for step in stretch for v in step.delayed)
            run_loop = self._run_apart if division.is_apart else self._run_loop
            for loop in division.loops:
                self._run_whole(loop.before, at_hand)
                run_loop(division, loop, at_hand)
            self._run_whole(division.rest, at_hand)
            return
        for step in stretch:
            self._run_step(step)

    def finish(self) -> list[Any]:
        """Returns the gradients."""
        gradients = look_up(self._plan.program.gradients, self._env)
        if self._probe is None:
            return _behind(self._token, gradients) if self._is_apart else gradients
        found = self._probe.sensitivities(gradients)
        done = self._store.note(
            found,
            [self._codecs[value] for value in self._measured],
            [self._kept[value].like for value in self._measured],
            self._token,
        )
        return _tied_to(gradients, done)

    def _learn(self, values: Mapping[int, Any]) -> None:
        self._env.update(values)
        if self._probe is not None:
            self._probe.see(values)

    def _begin(self, step: Step) -> None:
        awaited = self._of_loops.union(step.awaited)
        tied = _tied_values(step, self._ties, awaited)
        samples = [] if self._probe is None else self._probe.waiting()
        if not self._ties.in_place:
            awaited.clear()
        settled = step.settled if self._ties.outgoing else ()
        arrays = [
            list(map(row_major, xs)) if v in self._in_rows else xs
            for v, xs in zip(tied, self._env.arrays(tied), strict=True)
        ]
        pairs = zip(tied, arrays, strict=True)
        num_tied = sum(map(len, arrays))
        values = tie(
            *itertools.chain.from_iterable(arrays),
            *samples,
            self._token,
            *(self._env[v] for v in settled),
            num_awaited=sum(len(xs) for v, xs in pairs if v in awaited),
            num_settled=len(settled),
        )
        self._env.replace(tied, values[:num_tied])
        behind = num_tied + len(samples)
        if self._probe is not None:
            self._probe.settle(values[num_tied:behind])
        self._token = values[behind]
        self._env.update(zip(settled, values[behind + 1 :], strict=True))

    def _at_hand(self, delayed: Iterable[int]) -> MutableMapping[int, Any]:
        """Returns the live values. Reads of the `delayed` ones wait for the token."""
        if not self._ties.arguments:
            return self._env
        late = {v: not_before(self._token, self._env[v]) for v in delayed}
        return collections.ChainMap(self._in_order(late), self._env)

    def _run_step(self, step: Step) -> None:
        at_hand = self._at_hand(step.delayed)
        self._run_whole(step.restored, at_hand)
        if step.joined and self._ties.operands and not self._is_apart:
            # XLA:GPU copies operands where it computes them, so the barrier is only for
            # CPUs.
            values = tie(*(self._env[v] for v in step.joined), only_on_cpus=True)
            self._env.update(zip(step.joined, values, strict=True))
        if step.equation is not None:
            self._compute(step.equation, at_hand)

    def _take(self, division: Division) -> None:
        """Delays the packed values that chunk loops decode.

        Without the barrier XLA prepares them earlier.
        """
        packed = {v: self._packed(v) for v in division.unpacked}
        packed, self._token = tie_tree(packed, self._token)
        self._taken.update(packed)

    def _packed(self, value: int) -> ArrayTree:
        if value in self._taken:
            return self._taken[value]
        waiting = self._waiting[value]
        return waiting if value in self._plan.brief else self._store.get(waiting)

    def _run_whole(
        self, pieces: Iterable[Unpacking | Equation], at_hand: Mapping[int, Any]
    ) -> None:
        for piece in pieces:
            if isinstance(piece, Unpacking):
                self._unpack(piece)
            else:
                self._compute(piece, at_hand)

    def _run_loop(
        self, division: Division, loop: Loop, at_hand: MutableMapping[int, Any]
    ) -> None:
        packed = {v: self._packed(v) for v in loop.unpacked}
        sampled = self._sampled_in(loop)
        with jax.named_scope("in_parts"):
            made, samples = run_loop(
                self._plan,
                division,
                loop,
                packed,
                self._codecs,
                at_hand,
                self._token,
                sampled,
            )
        self._see_in_parts(samples, packed)
        self._of_loops.update(loop.results)
        self._learn(self._in_order(made))

    def _run_apart(
        self, division: Division, loop: Loop, at_hand: MutableMapping[int, Any]
    ) -> None:
        packed = {v: self._packed(v) for v in loop.unpacked}
        sampled = self._sampled_in(loop)
        with jax.named_scope("in_parts"):
            made = run_apart(
                self._plan,
                division,
                loop,
                packed,
                self._codecs,
                self._env,
                at_hand,
                self._token,
                sampled,
            )
        self._token = made.token
        self._see_in_parts(made.samples, packed)
        self._learn(self._in_order(made.sums))
        if division.stays_in_parts:
            self._env.put_parts(made.results, division.rows)
        else:
            self._learn({v: x for v, (x,) in made.results.items()})

    def _sampled_in(self, loop: Loop) -> tuple[int, ...]:
        return () if self._probe is None else self._probe.wanted(loop.made)

    def _see_in_parts(
        self,
        samples: Mapping[int, Sequence[RowMeans]],
        packed: Mapping[int, ArrayTree],
    ) -> None:
        if self._probe is not None:
            self._probe.see_parts(samples)
        for value, codes in packed.items():
            self._see_range(value, codes)

    def _unpack(self, item: Unpacking) -> None:
        codec = self._codecs[item.value]
        fused = codec.decodes_fused and item.value not in self._written
        if item.behind and self._ties.partial:
            *values, self._token = tie(
                *(self._env[v] for v in item.behind), self._token, only_on_cpus=fused
            )
            self._env.update(zip(item.behind, values, strict=True))
        after = (self._token,) if self._ties.cotangent else ()
        decode = codec.decode_fused if fused else codec.decode
        like = self._kept[item.value].like
        with jax.named_scope("unpack"):
            packed = self._packed(item.value)
            if self._is_apart and fused and after:
                packed, self._token = tie_tree(packed, self._token)
            unpacked = decode(packed, like, after=after)
        self._learn({item.value: unpacked})
        self._see_range(item.value, packed)

    def _see_range(self, value: int, packed: ArrayTree) -> None:
        if self._probe is not None and value in self._measured:
            squared = self._store.squared_range(self._codecs[value], packed)
            self._probe.see_range(value, squared)

    def _compute(self, equation: Equation, at_hand: Mapping[int, Any]) -> None:
        if self._filled_late.isdisjoint(equation.outputs):
            operands = look_up(equation.inputs, at_hand)
            if equation.rule.cost is Cost.DRAW:
                # Otherwise XLA draws once, in the forward pass, and keeps the random
                # numbers.
                operands = [not_before(self._token, x) for x in operands]
            outputs = evaluate(equation, operands)
        else:
            outputs = fill_not_before(self._token, equation)
        # A saved value comes from the store, never from a recomputation.
        made = zip(equation.outputs, outputs, strict=True)
        self._learn(self._in_order({v: x for v, x in made if v not in self._kept}))

    def _in_order(self, made: Mapping[int, Any]) -> dict[int, Any]:
        return {v: pin(x) if v in self._pinned else x for v, x in made.items()}


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


def _tied_values(step: Step, ties: Ties, awaited: Container[int]) -> tuple[int, ...]:
    cotangents = step.cotangents
    if not ties.outgoing and step.equation is not None:
        read = step.equation.input_values
        cotangents = tuple(v for v in cotangents if v in read)
    # Barrier inputs only come first, as `num_awaited` of `tie` requires.
    cotangents = tuple(sorted(cotangents, key=lambda v: v not in awaited))
    return cotangents + (step.given if ties.cotangent else ())


def _behind(token: jax.Array, gradients: Sequence[Any]) -> list[Any]:
    """Makes the smallest gradient depend on the last token.

    Without it nothing reads the token, and XLA drops the barrier that returns it.
    """
    behind = list(gradients)
    waiting = [n for n, x in enumerate(behind) if _can_wait(x)]
    if waiting:
        least = min(waiting, key=lambda n: behind[n].size)
        behind[least] = not_before(token, behind[least])
    return behind


def _can_wait(gradient: Any) -> bool:
    """Returns whether XLA keeps a gradient, and so the operations it depends on."""
    is_number = can_be_tied(gradient) and gradient.dtype != jax.dtypes.float0
    return is_number and gradient.size > 0


def _tied_to(gradients: list[Any], done: jax.Array) -> list[Any]:
    """Makes one gradient depend on a call that is made for its side effect."""
    for number, gradient in enumerate(gradients):
        if _can_wait(gradient):
            (tied,) = hold(gradient, after=[done])
            return [*gradients[:number], tied, *gradients[number + 1 :]]
    return gradients
