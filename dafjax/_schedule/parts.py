"""Values that the backward pass restores in parts of their rows.

What is recomputed from several residuals is there beside what each of them is unpacked
to, and beside partial results. In a loop over parts all of these are there in part
only, and the value alone is there whole. Every element is computed as it is otherwise.

A part is every eighth row, say: where devices share the rows, each has some of it.
"""

import collections
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType

from dafjax._native import tie
from dafjax._plan.plan import ProgramPlan
from dafjax._schedule.steps import InParts, Unpacking
from dafjax._trace.by_rows import evaluate_on_rows
from dafjax._trace.equation import Equation, look_up
from dafjax._typing import Array, ArrayTree
from dafjax.codecs import AbstractCodec


_MOST_PARTS = 8


def num_parts(
    plan: ProgramPlan,
    item: InParts,
    packed: Mapping[int, ArrayTree],
    codecs: Mapping[int, AbstractCodec],
    env: Mapping[int, Any],
) -> int:
    """Returns in how many parts a value can be restored; 1 if only whole.

    On meshes with explicit axes, and in `shard_map`, values are restored whole.

    Args:
        plan: What was kept.
        item: The value.
        packed: What is unpacked for it.
        codecs: How.
        env: What is at hand: everything else that is read.
    """
    num_rows = plan.program.avals[item.value].shape[0]
    likes = {kept.value: kept.like for kept in plan.kept}
    equations = (step for step in item.restored if isinstance(step, Equation))
    read = {v for eqn in equations for v in eqn.input_values}
    others = [env[v] for v in read if v in env]
    if any(map(_is_divided, jax.tree.leaves((packed, others)))):
        return 1
    for parts in range(min(_MOST_PARTS, num_rows // 2), 1, -1):
        there, rest = divmod(num_rows, parts)
        if not rest and there % jax.device_count() == 0:
            pairs = ((codecs[v], likes[v]) for v in packed)
            if all(
                codec.packs_rows(like) and codec.packs_rows(_rows_of(like, there))
                for codec, like in pairs
            ):
                return parts
    return 1


def restore_in_parts(
    plan: ProgramPlan,
    item: InParts,
    packed: Mapping[int, ArrayTree],
    codecs: Mapping[int, AbstractCodec],
    env: Mapping[int, Any],
    token: Array,
    count: int,
) -> Array:
    """Restores a value.

    Args:
        plan: What was kept.
        item: The value, and how it is restored.
        packed: What is unpacked for it.
        codecs: How.
        env: What is at hand: everything else that is read.
        token: What unpacking waits for, a scalar that is 0.
        count: The parts, as many as `num_parts` returned.
    """
    aval = plan.program.avals[item.value]
    num_rows = aval.shape[0]
    there = num_rows // count
    likes = {k.value: _rows_of(k.like, there) for k in plan.kept if k.value in packed}
    sources = {v: packed[v] if v in packed else env[v] for v in item.sources}
    divided = jax.tree.map(
        lambda x: lax.reshape(x, (there, count, *x.shape[1:])), sources
    )

    def restore(number: Array, whole: Array) -> Array:
        part: dict[int, Any] = jax.tree.map(
            lambda x: lax.dynamic_index_in_dim(x, number, axis=1, keepdims=False),
            divided,
        )
        at_hand = collections.ChainMap(part, dict(env))
        after = token
        for step in item.restored:
            if isinstance(step, Unpacking):
                if step.behind:
                    *values, after = tie(*(part[v] for v in step.behind), after)
                    part.update(zip(step.behind, values, strict=True))
                codec, value = codecs[step.value], step.value
                part[value] = codec.decode(part[value], likes[value], after=(after,))
                continue
            operands = look_up(step.inputs, at_hand)
            outputs = evaluate_on_rows(step, operands, num_rows, there)
            part.update(zip(step.outputs, outputs, strict=True))
        return lax.dynamic_update_index_in_dim(whole, part[item.value], number, axis=1)

    # It cannot be there before the token is.
    empty = jnp.full((there, count, *aval.shape[1:]), token.astype(aval.dtype))
    return lax.fori_loop(0, count, restore, empty).reshape(aval.shape)


def _rows_of(like: jax.ShapeDtypeStruct, num_rows: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((num_rows, *like.shape[1:]), like.dtype)


def _is_divided(x: Array) -> bool:
    """Returns whether the type of an array says how devices share it."""
    aval: Any = jax.typeof(x)
    axes = aval.sharding.mesh.axis_types
    return AxisType.Explicit in axes or bool(getattr(aval, "vma", None))
