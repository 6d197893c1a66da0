"""Runs the backward pass: one interpreter of its list of instructions."""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, final

import jax
import jax.numpy as jnp

from dafjax._native import hold, pin, row_major, tie, tie_tree
from dafjax._numbers import Array, ArrayTree
from dafjax._schedule.chunks import Chunks
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
from dafjax._schedule.steps import can_be_tied, fill_not_before, not_before
from dafjax._schedule.values import Frame, MeasuredHandle, Values
from dafjax._sensitivity.importance import Probe
from dafjax._trace.equation import look_up
from dafjax.stores import AbstractStore


def run_backward(
    lowered: Lowered,
    arguments: Mapping[int, jax.Array],
    stored: Sequence[ArrayTree],
    cotangents: Sequence[jax.Array],
    *,
    store: AbstractStore,
) -> list[Any]:
    """Computes the cotangents of the perturbed arguments.

    Args:
        lowered: The instructions.
        arguments: The arguments listed in `plan.arguments`.
        stored: The values that `run_forward` returned for `plan.kept`.
        cotangents: The cotangents of the differentiable results.
        store: Where packed values are saved.

    Returns:
        One cotangent for each perturbed argument.
    """
    program = lowered.plan.program
    given = dict(zip(program.cotangents, cotangents, strict=True))
    return _Interpreter(lowered, stored, store).gradients(given, arguments)


@final
class _Interpreter:
    """The state of the backward pass beside its live values."""

    def __init__(
        self, lowered: Lowered, stored: Sequence[ArrayTree], store: AbstractStore
    ) -> None:
        self._lowered = lowered
        self._plan = plan = lowered.plan
        self._codecs = lowered.codecs
        self._store = store
        self._kept = {item.value: item for item in plan.kept}
        # The handles of packed residuals, and residuals that are saved as they are.
        self._stored = dict(zip(self._kept, stored, strict=True))
        noise: dict[int, jax.Array] = {}
        for value, handle in self._stored.items():
            if isinstance(handle, MeasuredHandle):
                self._stored[value], noise[value] = handle
        self._measured = noise.keys()
        by_element = store.measures_by_element
        self._probe = Probe(plan, noise, by_element=by_element) if noise else None
        # Codes that have passed through a barrier.
        self._passed: dict[int, ArrayTree] = {}

    def gradients(self, *given: Mapping[int, Any]) -> list[Any]:
        """Runs all instructions on some given values, and returns the gradients."""
        frame = Frame(Values(), jnp.zeros((), jnp.uint8), self._codes)
        kept = self._kept.items()
        saved = {v: self._stored[v] for v, item in kept if item.codec is None}
        for values in (*given, saved):
            self._learn(values, frame)
        self._run(self._lowered.instructions, frame)
        return self._finish(frame)

    def _run(self, instructions: Iterable[Instruction], frame: Frame) -> None:
        for item in instructions:
            match item:
                case Barrier():
                    self._wait(item, frame)
                case Join(values):
                    joined = tie(*(frame.values[v] for v in values), only_on_cpus=True)
                    frame.values.update(zip(values, joined, strict=True))
                case Late(values):
                    late = {v: not_before(frame.token, frame.values[v]) for v in values}
                    frame.late = self._pinned(late)
                case Unpack():
                    self._unpack(item, frame)
                case Run():
                    self._compute(item, frame)
                case Chunked():
                    self._run_chunks(item, frame)

    def _learn(self, values: Mapping[int, Any], frame: Frame) -> None:
        frame.values.update(values)
        if self._probe is not None and frame.division is None:
            self._probe.see(values)

    def _wait(self, item: Barrier, frame: Frame) -> None:
        probe = self._probe if item.begins else None
        values = (*item.waits, *item.through)
        arrays = [frame.values.raw(v) for v in values]
        arrays = [
            jax.tree.map(row_major, x) if v in item.in_rows else x
            for v, x in zip(values, arrays, strict=True)
        ]
        samples = [] if probe is None else probe.waiting()
        packed = {v: self._packed(v) for v in item.packed}
        late = [frame.values[v] for v in item.late]
        leaves, structure = jax.tree.flatten(
            (arrays, samples, packed, frame.token, late)
        )
        tied = tie(
            *leaves,
            num_awaited=len(jax.tree.leaves(arrays[: len(item.waits)])),
            num_settled=len(late),
            only_on_cpus=item.only_on_cpus,
        )
        arrays, samples, packed, token, late = jax.tree.unflatten(structure, tied)
        frame.token = token
        frame.values.update(zip(values, arrays, strict=True))
        frame.values.update(zip(item.late, late, strict=True))
        self._passed.update(packed)
        if probe is not None:
            probe.settle(samples)

    def _packed(self, value: int) -> ArrayTree:
        if value in self._passed:
            return self._passed[value]
        handle = self._stored[value]
        return handle if value in self._plan.brief else self._store.get(handle)

    def _unpack(self, item: Unpack, frame: Frame) -> None:
        codec = self._codecs[item.value]
        decode = codec.decode_fused if item.fused else codec.decode
        with jax.named_scope("unpack"):
            after = (frame.token,) if item.waits else ()
            codes, frame.token = frame.codes(item, frame.token)
            unpacked = decode(codes, item.like, after=after)
        self._learn({item.value: unpacked}, frame)
        if frame.division is None:
            self._see_range(item.value, codes)

    def _codes(self, item: Unpack, token: Array) -> tuple[ArrayTree, Array]:
        packed = self._packed(item.value)
        return tie_tree(packed, token) if item.codes_wait else (packed, token)

    def _see_range(self, value: int, packed: ArrayTree) -> None:
        if self._probe is not None and value in self._measured:
            squared = self._store.squared_range(self._codecs[value], packed)
            self._probe.see_range(value, squared)

    def _compute(self, item: Run, frame: Frame) -> None:
        if item.when == "filled":
            outputs = fill_not_before(frame.token, item.equation)
        else:
            operands = frame.operands(item.equation, item.late)
            if item.when == "drawn":
                operands = [not_before(frame.token, x) for x in operands]
            outputs = frame.evaluate(item.equation, operands)
        made = dict(zip(item.equation.outputs, outputs, strict=True))
        if frame.division is None:
            # A saved value comes from the store, never from a recomputation.
            made = {v: x for v, x in made.items() if v not in self._kept}
            made = self._pinned(made)
        self._learn(made, frame)

    def _run_chunks(self, item: Chunked, frame: Frame) -> None:
        packed = {v: self._packed(v) for v in item.loop.unpacked}
        probe, program = self._probe, self._plan.program
        sampled = () if probe is None else probe.wanted(item.loop.made)
        with jax.named_scope("in_parts"):
            made = Chunks(item, frame, packed, sampled, program, self._run).run()
        if probe is not None:
            probe.see_parts(made.samples)
        for value, codes in packed.items():
            self._see_range(value, codes)
        whole = made.sums
        if item.division.stays_in_parts:
            frame.values.put_parts(made.results, item.division.rows)
        else:
            whole |= made.results
        self._learn(self._pinned(whole), frame)

    def _pinned(self, values: Mapping[int, Any]) -> dict[int, Any]:
        pinned = self._lowered.pinned
        return {v: pin(x) if v in pinned else x for v, x in values.items()}

    def _finish(self, frame: Frame) -> list[Any]:
        gradients = look_up(self._plan.program.gradients, frame.values)
        if self._probe is not None:
            done = self._store.note(
                self._probe.sensitivities(gradients),
                [self._codecs[value] for value in self._measured],
                [self._kept[value].like for value in self._measured],
                frame.token,
            )
            return _one_behind(gradients, lambda x: hold(x, after=[done])[0])
        if self._lowered.is_apart:
            # Otherwise nothing reads the last token, and XLA drops its barrier.
            wait = functools.partial(not_before, frame.token)
            return _one_behind(gradients, wait, key=lambda x: x.size)
        return gradients


def _one_behind(
    gradients: Sequence[Any],
    wait: Callable[[Any], Any],
    key: Callable[[Any], int] = lambda x: 0,
) -> list[Any]:
    """Makes the gradient with the least key wait, so that XLA keeps what it waits for.

    Among gradients of the same key it is the first.
    """
    able = [n for n, x in enumerate(gradients) if _can_wait(x)]
    least = min(able, key=lambda n: key(gradients[n]), default=None)
    return [wait(x) if n == least else x for n, x in enumerate(gradients)]


def _can_wait(gradient: Any) -> bool:
    """Returns whether XLA keeps a gradient, and so the operations it depends on."""
    is_number = can_be_tied(gradient) and gradient.dtype != jax.dtypes.float0
    return is_number and gradient.size > 0
