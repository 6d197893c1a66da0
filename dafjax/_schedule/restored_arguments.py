"""Restores the inputs of a recompute, right before its backward pass."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from dafjax._native import tie
from dafjax._plan.plan import ProgramPlan
from dafjax._schedule.not_before import not_before
from dafjax._schedule.stored import MeasuredHandle, codecs_in
from dafjax._schedule.ties import Ties
from dafjax._trace.residuals import Program
from dafjax._typing import ArrayTree
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
