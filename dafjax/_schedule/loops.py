"""Runs a stretch of the backward pass, or a part of it, in parts of its rows."""

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple, final

import jax
import jax.numpy as jnp
from jax import lax

from dafjax._native import pin, tie
from dafjax._plan.plan import ProgramPlan
from dafjax._schedule.moments import RowMeans, sample_rows
from dafjax._schedule.one_part import finish_sums, run_pieces, tie_waiting
from dafjax._schedule.steps import Division, Loop, Unpacking, written
from dafjax._typing import Array, ArrayTree
from dafjax.codecs import AbstractCodec


class Carry(NamedTuple):
    """What a loop makes.

    Attributes:
        sums: The sums over rows.
        wholes: The results, their rows divided.
        samples: What `sample_rows` returned of values of which there are only parts,
            stacked.
    """

    sums: dict[int, Array]
    wholes: tuple[Array, ...]
    samples: dict[int, RowMeans]


def run_loop(
    plan: ProgramPlan,
    division: Division,
    loop: Loop,
    packed: Mapping[int, ArrayTree],
    codecs: Mapping[int, AbstractCodec],
    env: MutableMapping[int, Any],
    token: Array,
    sampled: Sequence[int],
) -> tuple[dict[int, Array], dict[int, tuple[RowMeans, ...]]]:
    """Returns the sums and the results of a loop, and samples of what it made besides.

    Args:
        plan: What was kept.
        division: What the loop is one of.
        loop: The loop.
        packed: What is unpacked in it.
        codecs: How.
        env: What is at hand: everything else that is read.
        token: What it waits for, a scalar that is 0.
        sampled: Values that are made in it by rows.

    Returns:
        The sums and results by value; and of the values that are sampled what
        `sample_rows` returned, as if all parts were one.
    """
    running = _RunningLoop(plan, division, loop, packed, codecs, env, token, sampled)
    carry = running.start()
    carry = lax.fori_loop(0, division.num_parts, running.run_part, carry)
    return running.finish(carry), running.samples(carry)


@final
class _RunningLoop:
    """What the iterations of a loop have in common."""

    def __init__(
        self,
        plan: ProgramPlan,
        division: Division,
        loop: Loop,
        packed: Mapping[int, ArrayTree],
        codecs: Mapping[int, AbstractCodec],
        env: MutableMapping[int, Any],
        token: Array,
        sampled: Sequence[int],
    ) -> None:
        self._avals = plan.program.avals
        self._division = division
        self._loop = loop
        self._packed = packed
        self._codecs = codecs
        self._env = env
        self._token = token
        self._sampled = sampled
        self._rows = division.rows
        self._likes = division.likes_of_part(plan.kept)
        self._sources = {
            v: self._rows.divide(env[v]) for v in loop.sources if v not in loop.replaced
        }
        self._written = written((*loop.by_rows, *loop.sums))
        self._coded = jax.tree.map(
            lambda x: self._rows.divide(_as_bits(x)), dict(packed)
        )

    def start(self) -> Carry:
        """Returns what there is before the first part."""
        avals = self._avals
        return Carry(
            {
                v: self._zeros(avals[v].shape, _sum_dtype(avals[v].dtype))
                for eqn in self._loop.sums
                for v in eqn.outputs
            },
            tuple(map(self._start_of, self._loop.results, self._loop.replaced)),
            {v: self._no_samples(v) for v in self._sampled},
        )

    def run_part(self, number: Array, carry: Carry) -> Carry:
        """Returns what there is when that part has run, too."""
        part = self._compute(*self._read(number, carry), number)
        return Carry(
            {v: x + part[v].astype(x.dtype) for v, x in carry.sums.items()},
            tuple(
                self._rows.put(x, part[v], number)
                for v, x in zip(self._loop.results, carry.wholes, strict=True)
            ),
            {
                v: jax.tree.map(
                    lambda xs, x: xs.at[number].set(x),
                    samples,
                    sample_rows(part[v], self._rows.num_parts),
                )
                for v, samples in carry.samples.items()
            },
        )

    def finish(self, carry: Carry) -> dict[int, Array]:
        """Returns the sums and the results."""
        avals = self._avals
        made = {v: x.astype(avals[v].dtype) for v, x in carry.sums.items()}
        finish_sums(self._loop, made)
        for value, whole in zip(self._loop.results, carry.wholes, strict=True):
            made[value] = pin(whole.reshape(avals[value].shape))
        return made

    def _read(self, number: Array, carry: Carry) -> tuple[dict[int, Any], Array]:
        """Returns the parts of what is read, and what tells that they are there."""
        replaced = dict(zip(self._loop.replaced, carry.wholes, strict=True))
        sources = self._sources | {v: x for v, x in replaced.items() if v is not None}
        part = {v: self._rows.part(x, number) for v, x in sources.items()}
        # Else XLA:GPU rearranges the whole, as a product reads its parts.
        part.update((v, pin(part[v])) for v in self._written & part.keys())
        if not self._loop.results:
            return part, self._token
        # Else XLA copies the whole before it writes to it, as if something of the part
        # might be read behind that. Not so if all that is read leads to one result:
        # then XLA:GPU can do everything in the kernel that writes it.
        besides = self._loop.sums or self._sampled or self._written
        only_on_cpus = len(self._loop.results) == 1 and not besides
        *tied, after = tie(*part.values(), self._token, only_on_cpus=only_on_cpus)
        return dict(zip(part, tied, strict=True)), after

    def _compute(
        self, part: dict[int, Any], after: Array, number: Array
    ) -> dict[int, Any]:
        """Returns all that is made of a part, and it."""

        def unpack(item: Unpacking) -> None:
            nonlocal after
            after = self._unpack(item, part, after, number)

        pieces = *self._loop.by_rows, *self._loop.sums
        run_pieces(self._division, pieces, part, self._env, unpack)
        return part

    def _unpack(
        self, item: Unpacking, part: dict[int, Any], after: Array, number: Array
    ) -> Array:
        value = item.value
        codec = self._codecs[value]
        fused = codec.decodes_fused and value not in self._written
        after = tie_waiting(item, part, after, fused=fused)
        # What waits is the number, so that XLA can take a part of the codes in the
        # kernel that decodes it. For what is no such kernel XLA:GPU computes numbers
        # ahead, and fails where a barrier is in their way.
        if fused:
            number, after = tie(number, after)
        else:
            number = number + after.astype(number.dtype)
        bits = jax.tree.map(lambda x: self._rows.part(x, number), self._coded[value])
        codes = jax.tree.map(_from_bits, bits, self._packed[value])
        decode = codec.decode_fused if fused else codec.decode
        part[value] = decode(codes, self._likes[value])
        return after

    def samples(self, carry: Carry) -> dict[int, tuple[RowMeans, ...]]:
        """Returns the samples of all parts."""
        return {v: (RowMeans(*map(jnp.ravel, x)),) for v, x in carry.samples.items()}

    def _no_samples(self, value: int) -> RowMeans:
        count = self._rows.num_parts
        aval = self._avals[value]
        shape = (self._division.num_rows_of_part, *aval.shape[1:])
        like = jax.eval_shape(
            lambda x: sample_rows(x, count), jax.ShapeDtypeStruct(shape, aval.dtype)
        )
        return jax.tree.map(lambda x: self._zeros((count, *x.shape), x.dtype), like)

    def _zeros(self, shape: tuple[int, ...], dtype: Any) -> Array:
        # They cannot be there before the token is.
        return jnp.full(shape, self._token.astype(dtype))

    def _start_of(self, value: int, replaced: int | None) -> Array:
        if replaced is not None:
            return self._rows.divide(self._env[replaced])
        aval = self._avals[value]
        return self._rows.divide(self._zeros(aval.shape, aval.dtype))


def _sum_dtype(dtype: Any) -> Any:
    """Returns in what dtype parts of a sum are added."""
    is_short = jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32
    return jnp.float32 if is_short else dtype


def _as_bits(x: Array) -> Array:
    """Returns the bits of an array of which XLA:CPU has no operations.

    It would convert all of it to float32, to take a part.
    """
    if x.dtype != jnp.bfloat16:
        return x
    return lax.bitcast_convert_type(x, jnp.uint16)


def _from_bits(bits: Array, like: Array) -> Array:
    """Returns what `_as_bits` was given, of the dtype of another array."""
    if bits.dtype == like.dtype:
        return bits
    return lax.bitcast_convert_type(bits, like.dtype)
