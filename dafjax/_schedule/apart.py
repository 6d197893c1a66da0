"""Runs a stretch of the backward pass in parts that stay arrays of their own.

In a loop XLA:GPU launches each kernel anew for each part, and copies what a product
reads out of the whole, and what it makes into it. So on GPUs the parts, if there are
any and four at most, run one after another in the program, and what goes on stays in
parts, for the stretches that follow.

Where there is but one part it is the levels that count: the sums over rows come first,
and what depends on them decodes again. Codes are few, and decoding is done in the
kernels that read values: else XLA:GPU would write for the second what it decoded for
the first.
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
    """What was made in parts.

    Attributes:
        sums: The sums over rows.
        results: The parts of each result.
        samples: What `sample_rows` returned for the parts of each value.
        token: What tells that they are there.
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
    """Runs one loop of a division, part after part.

    Args:
        plan: What was kept.
        division: What the loop is one of.
        loop: The loop.
        packed: What is unpacked in it.
        codecs: How.
        values: What is there of its sources, whole or in parts.
        env: What is at hand: everything else that is read.
        token: What it waits for, a scalar that is 0.
        sampled: Values that are made in it by rows.
    """
    running = _Running(
        plan, division, loop, packed, codecs, values, env, token, sampled
    )
    for number in range(division.num_parts):
        running.run_part(number)
    return running.finish()


@final
class _Running:
    """What the parts have in common, and what was made of those that ran."""

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
        """Runs a part, behind those before it."""
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
        """Returns what was made."""
        return Made(self._sums.finish(), self._results, self._samples, self._token)

    def _wait_for(self, made: ArrayTree) -> ArrayTree:
        """Makes what follows wait for what was made, and returns it.

        Else XLA:GPU puts sums off that are read later, to take them in another kernel,
        and writes for that what they are of.
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
            # As a whole they are in memory; a part would be copied for the tie.
            packed, self._token = tie_tree(packed, self._token)
        codes = jax.tree.map(lambda x: self._division.rows.split(x)[number], packed)
        like = self._likes[value]
        if fused:
            part[value] = codec.decode_fused(codes, like)
        else:
            part[value] = codec.decode(codes, like, after=(self._token,))
