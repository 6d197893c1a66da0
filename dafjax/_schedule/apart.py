"""Runs a stage of the backward pass in unrolled chunks, on GPUs.

In a `fori_loop` XLA:GPU launches every kernel once per chunk, slices the operands of
products out of whole arrays, and copies their results into whole arrays. So on GPUs
chunks are unrolled (at most four), and their results stay separate arrays for the
following stages.

With a single chunk the reduction depths still matter: the sums over rows come first,
and equations that depend on them decode their residuals again. Codes take little
memory, and decoding is fused into its consumers. Otherwise XLA:GPU would write to
memory for the second loop what it decoded for the first.
"""

import collections
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple, final

import jax

from dafjax._native import tie_tree
from dafjax._plan.plan import ProgramPlan
from dafjax._schedule.joint_sums import JointSums
from dafjax._schedule.moments import RowMeans, sample_rows
from dafjax._schedule.one_part import run_pieces, tie_waiting
from dafjax._schedule.steps import Division, Loop, Unpacking, written
from dafjax._schedule.values import Values
from dafjax._typing import Array, ArrayTree
from dafjax.codecs import AbstractCodec


class Made(NamedTuple):
    """The results of unrolled chunks.

    Attributes:
        sums: The sums over rows.
        results: The chunks of each result.
        samples: The `sample_rows` of each chunk of each sampled value.
        token: A token that waits for all of them.
    """

    sums: dict[int, Array]
    results: dict[int, tuple[Array, ...]]
    samples: dict[int, tuple[RowMeans, ...]]
    token: Array


def run_apart(
    plan: ProgramPlan,
    division: Division,
    loop: Loop,
    packed: Mapping[int, ArrayTree],
    codecs: Mapping[int, AbstractCodec],
    values: Values,
    env: MutableMapping[int, Any],
    token: Array,
    sampled: Sequence[int],
) -> Made:
    """Runs one loop of a chunk plan, chunk after chunk.

    Args:
        plan: The program and its saved residuals.
        division: The chunk plan that the loop belongs to.
        loop: The loop.
        packed: The packed residuals that are decoded in the loop.
        codecs: The codecs of the residuals.
        values: The live values, whole or chunked, among them the loop's sources.
        env: The live values: all other operands.
        token: A scalar 0 that the loop waits for.
        sampled: Values to sample that the loop computes in chunks.
    """
    running = _Running(
        plan, division, loop, packed, codecs, values, env, token, sampled
    )
    for number in range(division.num_parts):
        running.run_part(number)
    return running.finish()


@final
class _Running:
    """What the chunks share, and the results of those that ran."""

    def __init__(
        self,
        plan: ProgramPlan,
        division: Division,
        loop: Loop,
        packed: Mapping[int, ArrayTree],
        codecs: Mapping[int, AbstractCodec],
        values: Values,
        env: MutableMapping[int, Any],
        token: Array,
        sampled: Sequence[int],
    ) -> None:
        self._division = division
        self._loop = loop
        self._packed = packed
        self._codecs = codecs
        self._env = env
        self._token = token
        self._likes = division.likes_of_part(plan.kept)
        self._sources = {v: values.parts(v, division.rows, env) for v in loop.sources}
        self._written = written((*loop.by_rows, *loop.sums))
        self._sums = JointSums(division, loop)
        self._results: dict[int, tuple[Array, ...]] = {v: () for v in loop.results}
        self._samples: dict[int, tuple[RowMeans, ...]] = {v: () for v in sampled}

    def run_part(self, number: int) -> None:
        """Runs a chunk after those before it."""
        part: dict[int, Any] = {v: xs[number] for v, xs in self._sources.items()}
        run_pieces(
            self._division,
            self._loop.by_rows,
            part,
            self._env,
            lambda item: self._unpack(item, part, number),
        )
        self._sums.add(collections.ChainMap(part, self._env))
        results = {v: part[v] for v in self._results}
        count = self._division.num_parts
        if number == count - 1:
            self._sums.finish_whole()
        samples = {v: sample_rows(part[v], count) for v in self._samples}
        made = self._sums.arrays, results, samples
        self._sums.arrays, results, samples = self._wait_for(made)
        for value, x in results.items():
            self._results[value] += (x,)
        for value, sample in samples.items():
            self._samples[value] += (sample,)

    def finish(self) -> Made:
        """Returns the results of all chunks."""
        return Made(self._sums.finish(), self._results, self._samples, self._token)

    def _wait_for(self, made: ArrayTree) -> ArrayTree:
        """Puts a barrier after the results of a chunk, and returns them.

        Otherwise XLA:GPU delays sums that are read later into another kernel, and
        writes their operands to memory for it.
        """
        made, self._token = tie_tree(made, self._token)
        return made

    def _unpack(self, item: Unpacking, part: dict[int, Any], number: int) -> None:
        value = item.value
        codec = self._codecs[value]
        fused = codec.decodes_fused and value not in self._written
        self._token = tie_waiting(item, part, self._token, fused=fused)
        packed = self._packed[value]
        if fused:
            # The whole packed arrays are in memory; chunks would be copied for the
            # barrier.
            packed, self._token = tie_tree(packed, self._token)
        codes = jax.tree.map(lambda x: self._division.rows.split(x)[number], packed)
        like = self._likes[value]
        if fused:
            part[value] = codec.decode_fused(codes, like)
        else:
            part[value] = codec.decode(codes, like, after=(self._token,))
