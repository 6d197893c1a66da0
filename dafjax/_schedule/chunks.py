"""Runs the body of a stage on each chunk of the batch: in a loop, or unrolled.

In a loop every chunk overwrites the buffers of the one before. On GPUs a `fori_loop`
launches every kernel once per chunk, slices the operands of products out of whole
arrays, and copies their results into whole arrays. So there chunks are unrolled (at
most four), and their results stay separate arrays for the following stages.

With a single unrolled chunk the reduction depths still matter: the sums over rows come
first, and equations that depend on them decode their residuals again. Codes take little
memory, and decoding is fused into its consumers. Otherwise XLA:GPU would write to
memory for the second loop what it decoded for the first.
"""

import collections
import dataclasses
import functools
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple, final

import jax
import jax.numpy as jnp
from jax import lax

from dafjax._native import pin, sum_together, sums_of_groups, tie, tie_tree
from dafjax._numbers import Array, ArrayTree, sum_dtype
from dafjax._schedule.instructions import Chunked, Instruction, Unpack
from dafjax._schedule.steps import Loop
from dafjax._schedule.values import Codes, Frame, Values
from dafjax._sensitivity.moments import RowMeans, sample_rows
from dafjax._trace.equation import evaluate, look_up
from dafjax._trace.residuals import Program


class Made(NamedTuple):
    """The results of chunks; in a loop, also its carry.

    Attributes:
        sums: The sums over rows, or the gradients that their epilogues compute.
        results: The results: their chunks if they stay chunked after the stage.
        samples: The `sample_rows` of the chunks of each sampled value.
    """

    sums: dict[int, Array]
    results: dict[int, Any]
    samples: dict[int, Any]


@final
@dataclasses.dataclass(frozen=True)
class Chunks:
    """Runs the chunks of a stage.

    Attributes:
        item: The instruction.
        frame: The state of the interpreter outside of the chunks.
        packed: The codes of the residuals that chunks decode.
        sampled: Values to sample that exist only in chunks.
        program: The program whose values they compute.
        interpret: Runs instructions on a frame.
    """

    item: Chunked
    frame: Frame
    packed: Mapping[int, ArrayTree]
    sampled: Sequence[int]
    program: Program
    interpret: Callable[[Sequence[Instruction], Frame], None]

    def run(self) -> Made:
        """Returns the results of all chunks."""
        return self._unroll() if self.item.mode == "unroll" else self._run_loop()

    def _run_loop(self) -> Made:
        division, loop = self.item.division, self.item.loop
        rows, axes = division.rows, division.axes
        wholes = self.frame.at_hand(self.item.late)
        sources = {
            v: rows.divide(wholes[v], axes[v])
            for v in loop.sources
            if v not in loop.replaced
        }
        coded = jax.tree.map(lambda x: rows.divide(_as_bits(x)), dict(self.packed))

        def codes(number: Array, item: Unpack, token: Array) -> tuple[ArrayTree, Array]:
            # The chunk index waits for the token, so that XLA can slice the codes in
            # the kernel that decodes them. Without a fused decode XLA:GPU computes the
            # indices ahead, and fails if a barrier is in the way.
            if item.fused:
                number, token = tie(number, token)
            else:
                number = number + token.astype(number.dtype)
            bits = jax.tree.map(lambda x: rows.part(x, number), coded[item.value])
            return jax.tree.map(_from_bits, bits, self.packed[item.value]), token

        def run_part(number: Array, carry: Made) -> Made:
            pairs = zip(loop.replaced, loop.results, strict=True)
            results = {v: carry.results[into] for v, into in pairs if v is not None}
            wholes = (sources | results).items()
            part = Values({v: rows.part(x, number, axes[v]) for v, x in wholes})
            part.update({v: pin(part[v]) for v in self.item.in_memory})
            frame = self._inside(part, functools.partial(codes, number))
            self._wait_for_sources(frame)
            self.interpret(self.item.body, frame)
            for eqn in loop.sums:
                outputs = frame.evaluate(eqn, frame.operands(eqn))
                part.update(zip(eqn.outputs, outputs, strict=True))
            return self._carry(number, carry, part)

        carry = lax.fori_loop(0, rows.num_parts, run_part, self._start())
        return self._whole(carry)

    def _inside(self, part: Values, codes: Codes) -> Frame:
        wholes = self.frame.at_hand(self.item.late)
        return Frame(part, self.frame.token, codes, wholes, self.item.division)

    def _wait_for_sources(self, frame: Frame) -> None:
        barrier = self.item.barrier
        if barrier is not None:
            # Samples are written besides the result.
            only_on_cpus = barrier.only_on_cpus and not self.sampled
            barrier = dataclasses.replace(barrier, only_on_cpus=only_on_cpus)
            self.interpret([barrier], frame)

    def _start(self) -> Made:
        """Returns the carry before the first chunk of a loop."""
        division, loop = self.item.division, self.item.loop
        rows, axes = division.rows, division.axes
        avals, count = self.program.avals, rows.num_parts
        at_hand = self.frame.at_hand(self.item.late)

        # Filled with the token, an array cannot exist before the token does.
        def zeros(shape: tuple[int, ...], dtype: Any) -> Array:
            return jnp.full(shape, self.frame.token.astype(dtype))

        def no_samples(value: int) -> RowMeans:
            x = jax.ShapeDtypeStruct(avals[value].shape, avals[value].dtype)
            like = jax.eval_shape(
                lambda x: sample_rows(rows.split(x, axes[value])[0], count), x
            )
            return jax.tree.map(lambda x: zeros((count, *x.shape), x.dtype), like)

        sums = [v for eqn in loop.sums for v in eqn.outputs]
        zero_sums = {v: zeros(avals[v].shape, sum_dtype(avals[v].dtype)) for v in sums}
        wholes = [
            rows.divide(
                zeros(avals[v].shape, avals[v].dtype)
                if into is None
                else at_hand[into],
                axes[v],
            )
            for v, into in zip(loop.results, loop.replaced, strict=True)
        ]
        return Made(
            zero_sums,
            dict(zip(loop.results, wholes, strict=True)),
            {v: no_samples(v) for v in self.sampled},
        )

    def _carry(self, number: Array, carry: Made, part: Mapping[int, Any]) -> Made:
        """Returns the carry after one more chunk of a loop."""
        rows, axes = self.item.division.rows, self.item.division.axes

        def put(value: int, samples: RowMeans) -> RowMeans:
            new = sample_rows(part[value], rows.num_parts)
            return jax.tree.map(lambda xs, x: xs.at[number].set(x), samples, new)

        return Made(
            {v: x + part[v].astype(x.dtype) for v, x in carry.sums.items()},
            {
                v: rows.put(x, part[v], number, axes[v])
                for v, x in carry.results.items()
            },
            {v: put(v, samples) for v, samples in carry.samples.items()},
        )

    def _whole(self, carry: Made) -> Made:
        """Returns the results of a loop."""
        avals = self.program.avals
        sums = {v: x.astype(avals[v].dtype) for v, x in carry.sums.items()}
        _finish_sums(self.item.loop, sums)
        return Made(
            sums,
            {v: pin(x.reshape(avals[v].shape)) for v, x in carry.results.items()},
            {v: (RowMeans(*map(jnp.ravel, xs)),) for v, xs in carry.samples.items()},
        )

    def _unroll(self) -> Made:
        division, loop = self.item.division, self.item.loop
        wholes = self.frame.at_hand(self.item.late)
        sources = {
            v: self.frame.values.parts(v, division.rows, wholes) for v in loop.sources
        }

        def codes(number: int, item: Unpack, token: Array) -> tuple[ArrayTree, Array]:
            packed = self.packed[item.value]
            if item.codes_wait:
                # The whole packed arrays are in memory; chunks would be copied for the
                # barrier.
                packed, token = tie_tree(packed, token)
            codes = jax.tree.map(lambda x: division.rows.split(x)[number], packed)
            return codes, token

        sums = _Sums({}, {})
        results: dict[int, Any] = {v: () for v in loop.results}
        samples: dict[int, Any] = {v: () for v in self.sampled}
        for number in range(division.num_parts):
            part = Values({v: xs[number] for v, xs in sources.items()})
            frame = self._inside(part, functools.partial(codes, number))
            self.interpret(self.item.body, frame)
            sums.add(loop, frame)
            if number == division.num_parts - 1:
                _finish_sums(loop, sums.whole)
            of_chunk = {v: sample_rows(part[v], division.num_parts) for v in samples}
            made = sums, {v: part[v] for v in results}, of_chunk
            made, self.frame.token = _after_chunk(made, frame.token)
            sums, new, of_chunk = made
            results = {v: (*xs, new[v]) for v, xs in results.items()}
            samples = {v: (*xs, of_chunk[v]) for v, xs in samples.items()}
        if not division.stays_in_parts:
            results = {v: x for v, (x,) in results.items()}
        return Made(sums.finish(loop), results, samples)


def _after_chunk(made: ArrayTree, token: Array) -> tuple[ArrayTree, Array]:
    """Puts a barrier after the results of an unrolled chunk, and returns them.

    Otherwise XLA:GPU delays sums that are read later into another kernel, and writes
    their operands to memory for it.
    """
    return tie_tree(made, token)


class _Sums(NamedTuple):
    """The sums over the rows of those unrolled chunks that ran.

    On GPUs a sum over rows takes two steps, and the second is as long as a launch
    (`_native/_sums.py`). The gradient of a norm has two sums in every chunk. All
    sums of the same shape share one second step, and then the chunks are added.

    Attributes:
        whole: Sums over all rows.
        of_groups: Per value, the sums over groups of rows of each chunk.
    """

    whole: dict[int, Array]
    of_groups: dict[int, tuple[Array, ...]]

    def add(self, loop: Loop, frame: Frame) -> None:
        """Adds the sums over the rows of one chunk."""
        for eqn in loop.sums:
            operands = frame.operands(eqn)
            (of_arrays,) = eqn.jaxpr.eqns
            groups = sums_of_groups(of_arrays, operands)
            if groups is not None:
                (value,) = eqn.outputs
                self.of_groups[value] = (*self.of_groups.get(value, ()), groups)
                continue
            outputs = frame.evaluate(eqn, operands)
            for value, x in zip(eqn.outputs, outputs, strict=True):
                known = self.whole.get(value)
                self.whole[value] = x if known is None else known + x

    def finish(self, loop: Loop) -> dict[int, Array]:
        """Returns the sums, or the gradients that their epilogues compute."""
        alike: collections.defaultdict[Any, list[int]] = collections.defaultdict(list)
        for value, parts in self.of_groups.items():
            alike[tuple(x.shape for x in parts)].append(value)
        totals: dict[int, Array] = {}
        for values in alike.values():
            arrays = [x for v in values for x in self.of_groups[v]]
            sums = iter(sum_together(arrays))
            for value in values:
                first, *others = (next(sums) for _ in self.of_groups[value])
                totals[value] = sum(others, first)
        _finish_sums(loop, totals)
        return self.whole | totals


def _finish_sums(loop: Loop, sums: MutableMapping[int, Any]) -> None:
    """Replaces complete sums by the gradients that their epilogues compute."""
    for eqn in loop.finishing:
        if sums.keys().isdisjoint(eqn.input_values):
            continue
        outputs = evaluate(eqn, look_up(eqn.inputs, sums))
        for value in eqn.input_values:
            del sums[value]
        sums.update(zip(eqn.outputs, outputs, strict=True))


def _as_bits(x: Array) -> Array:
    """Returns the bits of an array if XLA:CPU has no operations on its dtype.

    XLA:CPU would convert the whole array to float32 to slice a chunk.
    """
    return lax.bitcast_convert_type(x, jnp.uint16) if x.dtype == jnp.bfloat16 else x


def _from_bits(bits: Array, like: Array) -> Array:
    """Undoes `_as_bits`; `like` has the original dtype."""
    same = bits.dtype == like.dtype
    return bits if same else lax.bitcast_convert_type(bits, like.dtype)
