"""Runs a part of the backward pass in parts of its rows.

A part is every eighth row, say: where devices share the rows, each has some of it.
"""

import collections
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType

from dafjax._native import pin, tie
from dafjax._plan.plan import ProgramPlan
from dafjax._schedule.steps import Division, Loop
from dafjax._trace.by_rows import evaluate_on_rows
from dafjax._trace.equation import Equation, look_up
from dafjax._typing import Array, ArrayTree
from dafjax.codecs import AbstractCodec


def run_loop(
    plan: ProgramPlan,
    division: Division,
    loop: Loop,
    packed: Mapping[int, ArrayTree],
    codecs: Mapping[int, AbstractCodec],
    env: Mapping[int, Any],
    token: Array,
) -> dict[int, Array]:
    """Returns the sums and the results of a loop.

    Args:
        plan: What was kept.
        division: What the loop is one of.
        loop: The loop.
        packed: What is unpacked in it.
        codecs: How.
        env: What is at hand: everything else that is read.
        token: What it waits for, a scalar that is 0.
    """
    avals = plan.program.avals
    num_rows, count = division.num_rows, division.num_parts
    there = num_rows // count
    likes = {
        item.value: jax.ShapeDtypeStruct((there, *item.shape[1:]), item.dtype)
        for item in plan.kept
        if item.value in packed
    }

    def divided(x: Array) -> Array:
        return lax.reshape(x, (there, count, *x.shape[1:]))

    read = {v: divided(env[v]) for v in loop.sources if v not in loop.replaced}
    coded = jax.tree.map(lambda x: divided(_as_bits(x)), dict(packed))

    def run(number: Array, carry: tuple[Any, Any]) -> tuple[Any, Any]:
        def part_of(x: Array) -> Array:
            return lax.dynamic_index_in_dim(x, number, axis=1, keepdims=False)

        sums, wholes = carry
        replaced = dict(zip(loop.replaced, wholes, strict=True))
        sources = read | {v: x for v, x in replaced.items() if v is not None}
        # Pinned: else XLA:GPU rearranges the whole, as a product reads its parts.
        part: dict[int, Any] = {v: pin(part_of(x)) for v, x in sources.items()}
        after = token
        if loop.results:
            # Else XLA copies the whole before it writes to it, as if something of the
            # part might be read behind that.
            *tied, after = tie(*part.values(), token)
            part = dict(zip(part, tied, strict=True))
        at_hand = collections.ChainMap(part, dict(env))
        for piece in (*loop.by_rows, *loop.sums):
            if isinstance(piece, Equation):
                operands = look_up(piece.inputs, at_hand)
                outputs = evaluate_on_rows(piece, operands, num_rows, there)
                part.update(zip(piece.outputs, outputs, strict=True))
                continue
            value = piece.value
            # Not what the loop leaves out, and what is there as a whole.
            waiting = [v for v in piece.behind if v in part]
            if waiting:
                *tied, after = tie(*(part[v] for v in waiting), after)
                part.update(zip(waiting, tied, strict=True))
            bits = jax.tree.map(part_of, coded[value])
            codes = jax.tree.map(_from_bits, bits, packed[value])
            part[value] = codecs[value].decode(codes, likes[value], after=(after,))
        sums = {v: x + part[v].astype(x.dtype) for v, x in sums.items()}
        wholes = tuple(
            lax.dynamic_update_index_in_dim(x, part[v], number, axis=1)
            for v, x in zip(loop.results, wholes, strict=True)
        )
        return sums, wholes

    def zeros(shape: tuple[int, ...], dtype: Any) -> Array:
        # They cannot be there before the token is.
        return jnp.full(shape, token.astype(dtype))

    def start_of(value: int, replaced: int | None) -> Array:
        if replaced is not None:
            return divided(env[replaced])
        aval = avals[value]
        return zeros((there, count, *aval.shape[1:]), aval.dtype)

    sums = {
        v: zeros(avals[v].shape, _sum_dtype(avals[v].dtype))
        for eqn in loop.sums
        for v in eqn.outputs
    }
    wholes = tuple(map(start_of, loop.results, loop.replaced))
    sums, wholes = lax.fori_loop(0, count, run, (sums, wholes))
    made = {v: x.astype(avals[v].dtype) for v, x in sums.items()}
    for value, whole in zip(loop.results, wholes, strict=True):
        made[value] = pin(whole.reshape(avals[value].shape))
    return made


def can_be_divided(arrays: Iterable[Array]) -> bool:
    """Returns whether parts of arrays can be taken, which devices may share.

    Not on meshes with explicit axes, and not in `shard_map`.
    """
    return not any(map(_is_divided, arrays))


def _is_divided(x: Array) -> bool:
    """Returns whether the type of an array says how devices share it."""
    aval: Any = jax.typeof(x)
    axes = aval.sharding.mesh.axis_types
    return AxisType.Explicit in axes or bool(getattr(aval, "vma", None))


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
