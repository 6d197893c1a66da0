"""Primitive that makes every result depend on every operand.

XLA undoes rematerialization where nothing forces an order (on CPUs jaxlib up to 0.10.2
drops `optimization_barrier` before it schedules). A custom call is opaque to it.

XLA:GPU keeps barriers until the order is settled and then removes them, so that there a
tie is a barrier. A custom call would take memory: its results take the buffers of its
operands, and XLA computes nothing in place in a buffer that several values share. Of a
barrier, however, what nobody reads is dropped.

On CPUs there is no other way than a custom call; but what is only waited for need not
come out of it.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import jax
from jax.extend.core import JaxprEqn, Primitive
from jax.interpreters import ad, batching, mlir, partial_eval as pe

from dafjax._native import _reference
from dafjax._native._primitive import can_pass_through, make_primitive
from dafjax._typing import Array, ArrayTree, Static


def tie(
    *arrays: Array,
    num_awaited: int = 0,
    num_settled: int = 0,
    num_droppable: int = 0,
    only_on_cpus: bool = False,
) -> tuple[Array, ...]:
    """Returns its arguments unchanged, none of them before all are computed.

    Results take the buffers of the operands, so that nothing is copied. Derivatives are
    those of the identity. Arrays of extended dtypes (PRNG keys) are returned as they
    are, outside the tie. On a GPU a result that nobody reads does not hold the others
    up: see `hold`.

    Args:
        *arrays: Arrays of any shape and dtype.
        num_awaited: How many of the arrays, the first ones, the others wait for. On a
            CPU they themselves wait for nothing, and XLA can compute in their place.
        num_settled: How many of the arrays, the last ones, wait for the others, which
            do not wait for them. On a GPU they wait for nothing: XLA:GPU puts off what
            reads results of a barrier.
        num_droppable: How many of the arrays, the first ones, need not be computed for
            the others: JAX drops them from the tie where nobody reads their results.
        only_on_cpus: Whether they are tied on CPUs alone, and where devices share them.
            On one GPU what XLA makes in the kernel that reads it need not wait, and
            copies of operands are made where the operands are.

    Returns:
        The same arrays, tied.
    """
    operands = tuple(filter(can_pass_through, arrays))
    awaited = sum(map(can_pass_through, arrays[:num_awaited]))
    settled = sum(map(can_pass_through, arrays[len(arrays) - num_settled :]))
    droppable = sum(map(can_pass_through, arrays[:num_droppable]))
    tied = iter(
        _bind(
            operands,
            num_awaited=awaited,
            num_settled=settled,
            num_droppable=droppable,
            only_on_cpus=only_on_cpus,
        )
    )
    return tuple(next(tied) if can_pass_through(x) else x for x in arrays)


def hold(*arrays: Array, after: Sequence[Array]) -> tuple[Array, ...]:
    """Returns its arguments unchanged, none of them before all are computed.

    Unlike a tie it is a custom call on GPUs, too, that waits for what nobody reads.
    Results take the buffers of the operands. Derivatives are those of the identity.

    Args:
        *arrays: Arrays of any shape and dtype.
        after: More arrays, which are waited for. They have buffers of their own.
    """
    awaited = tuple(filter(can_pass_through, after))
    operands = tuple(filter(can_pass_through, arrays))
    held = iter(
        hold_p.bind(*awaited, *operands, num_awaited=len(awaited)) if operands else ()
    )
    return tuple(next(held) if can_pass_through(x) else x for x in arrays)


def tie_tree(tree: ArrayTree, token: Array) -> tuple[ArrayTree, Array]:
    """Ties all leaves of a pytree with a token, and returns both."""
    leaves, structure = jax.tree.flatten(tree)
    *tied, token = tie(*leaves, token)
    return jax.tree.unflatten(structure, tied), token


def _bind(arrays: tuple[Array, ...], **params: Static) -> Sequence[Array]:
    return tie_p.bind(*arrays, **params) if arrays else ()


def _abstract_eval(*avals: Any, **_: Static) -> tuple[Any, ...]:
    return avals


def _tied_where_divided(**params: Static) -> dict[str, Static]:
    # There nothing is decoded in the kernels that read it (`_fused.py`).
    return {**params, "only_on_cpus": False}


def _run_on_cpu(*arrays: Array, num_awaited: int, **_: Static) -> list[Array]:
    held = hold_p.bind(*arrays, num_awaited=num_awaited)
    return [*arrays[:num_awaited], *held]


def _held(*avals: Any, num_awaited: int) -> tuple[Any, ...]:
    return avals[num_awaited:]


def _jvp_of_held(
    primals: Sequence[Array], tangents: Sequence[Any], *, num_awaited: int
) -> tuple[Sequence[Array], Sequence[Any]]:
    held = hold_p.bind(*primals, num_awaited=num_awaited)
    return held, list(tangents[num_awaited:])


def _batch_held(
    operands: Sequence[Array], axes: Sequence[int | None], *, num_awaited: int
) -> tuple[Sequence[Array], Sequence[int | None]]:
    return hold_p.bind(*operands, num_awaited=num_awaited), axes[num_awaited:]


def _jvp(
    primals: Sequence[Array], tangents: Sequence[Any], **params: Static
) -> tuple[Sequence[Array], Sequence[Any]]:
    return tie_p.bind(*primals, **params), list(tangents)


def _transpose(cotangents: Sequence[Any], *operands: Any, **_: Static) -> list[Any]:
    return [
        cotangent if ad.is_undefined_primal(operand) else None
        for cotangent, operand in zip(cotangents, operands, strict=True)
    ]


def _batch(
    operands: Sequence[Array], axes: Sequence[int | None], **params: Static
) -> tuple[Sequence[Array], Sequence[int | None]]:
    return tie_p.bind(*operands, **params), axes


def _without_unused(used: list[bool], equation: JaxprEqn) -> tuple[list[bool], Any]:
    """Drops what can be dropped and comes out of a tie for nobody."""
    if not any(used):
        return [False] * len(used), None
    droppable = equation.params["num_droppable"]
    keeps = [is_used or n >= droppable for n, is_used in enumerate(used)]
    params = {**equation.params, "num_droppable": sum(keeps[:droppable])}
    kept = equation.replace(
        invars=list(itertools.compress(equation.invars, keeps)),
        outvars=list(itertools.compress(equation.outvars, keeps)),
        params=params,
    )
    return keeps, kept


# It returns its operands but for the first ones. On CPUs ties are made of it.
hold_p: Primitive = make_primitive(
    "dafjax_hold",
    target="dafjax_tie",
    abstract_eval=_held,
    reference=_reference.hold,
    multiple_results=True,
    aliased=True,
)
ad.primitive_jvps[hold_p] = _jvp_of_held
batching.primitive_batchers[hold_p] = _batch_held
tie_p: Primitive = make_primitive(
    "dafjax_tie",
    abstract_eval=_abstract_eval,
    reference=_reference.tie,
    multiple_results=True,
    aliased=True,
    is_call_on_cpu=False,
    is_call_on_cuda=False,
    where_divided=_tied_where_divided,
)
mlir.register_lowering(
    tie_p, mlir.lower_fun(_run_on_cpu, multiple_results=True), platform="cpu"
)
ad.primitive_jvps[tie_p] = _jvp
pe.dce_rules[tie_p] = _without_unused
ad.primitive_transposes[tie_p] = _transpose
batching.primitive_batchers[tie_p] = _batch
