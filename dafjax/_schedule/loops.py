"""Runs a stage of the backward pass, or a part of it, in a chunk loop."""

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
    """The carry of a chunk loop.

    Attributes:
        sums: The sums over rows.
        wholes: The results, with their rows divided into chunks.
        samples: The stacked `sample_rows` of values that exist only in chunks.
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
    """Returns the sums and results of a chunk loop, and samples of other values.

    Args:
        plan: The program and its saved residuals.
        division: The chunk plan that the loop belongs to.
        loop: The loop.
        packed: The packed residuals that are decoded in the loop.
        codecs: The codecs of the residuals.
        env: The live values: all other operands.
        token: A scalar 0 that the loop waits for.
        sampled: Values to sample that the loop computes in chunks.

    Returns:
        The sums and results by value; and for each sampled value the `sample_rows` of
        all chunks as one.
    """
    running = _RunningLoop(plan, division, loop, packed, codecs, env, token, sampled)
    carry = running.start()
    carry = lax.fori_loop(0, division.num_parts, running.run_part, carry)
    return running.finish(carry), running.samples(carry)


@final
class _RunningLoop:
    """The loop invariants."""

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
        """Returns the carry before the first chunk."""
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
        """Returns the carry after one more chunk."""
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
        """Returns the chunks of the operands, and a token that waits for them."""
        replaced = dict(zip(self._loop.replaced, carry.wholes, strict=True))
        sources = self._sources | {v: x for v, x in replaced.items() if v is not None}
        part = {v: self._rows.part(x, number) for v, x in sources.items()}
        # Otherwise XLA:GPU rearranges the whole array to the layout in which a product
        # reads its chunks.
        part.update((v, pin(part[v])) for v in self._written & part.keys())
        if not self._loop.results:
            return part, self._token
        # Without the barrier XLA copies the whole array before writing to it, in case a
        # value of the chunk is read afterwards. XLA:GPU does not if all operands lead
        # to a single result: then one kernel can do everything and write it.
        besides = self._loop.sums or self._sampled or self._written
        only_on_cpus = len(self._loop.results) == 1 and not besides
        *tied, after = tie(*part.values(), self._token, only_on_cpus=only_on_cpus)
        return dict(zip(part, tied, strict=True)), after

    def _compute(
        self, part: dict[int, Any], after: Array, number: Array
    ) -> dict[int, Any]:
        """Returns the chunk with all values computed from it."""

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
        # The chunk index waits for the token, so that XLA can slice the codes in the
        # kernel that decodes them. Without a fused decode XLA:GPU computes the indices
        # ahead, and fails if a barrier is in the way.
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
        """Returns the samples of all chunks."""
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
        # Filled with the token, the array cannot exist before the token does.
        return jnp.full(shape, self._token.astype(dtype))

    def _start_of(self, value: int, replaced: int | None) -> Array:
        if replaced is not None:
            return self._rows.divide(self._env[replaced])
        aval = self._avals[value]
        return self._rows.divide(self._zeros(aval.shape, aval.dtype))


def _sum_dtype(dtype: Any) -> Any:
    """Returns the dtype in which the chunks of a sum are added."""
    is_short = jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32
    return jnp.float32 if is_short else dtype


def _as_bits(x: Array) -> Array:
    """Returns the bits of an array if XLA:CPU has no operations on its dtype.

    XLA:CPU would convert the whole array to float32 to slice a chunk.
    """
    if x.dtype != jnp.bfloat16:
        return x
    return lax.bitcast_convert_type(x, jnp.uint16)


def _from_bits(bits: Array, like: Array) -> Array:
    """Undoes `_as_bits`; `like` has the original dtype."""
    if bits.dtype == like.dtype:
        return bits
    return lax.bitcast_convert_type(bits, like.dtype)
