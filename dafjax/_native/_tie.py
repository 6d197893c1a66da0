"""Primitive that makes every result depend on every operand.

XLA undoes rematerialization where nothing forces an order (on CPUs jaxlib up to 0.10.2
drops `optimization_barrier` before it schedules). A custom call is opaque to it.

XLA:GPU keeps barriers until the order is settled and then removes them, so that there a
tie is a barrier. A custom call would take memory: its results take the buffers of its
operands, and XLA computes nothing in place in a buffer that several values share. Of a
barrier, however, what nobody reads is dropped.
"""

from collections.abc import Sequence
from typing import Any

from jax.extend.core import Primitive
from jax.interpreters import ad, batching

from dafjax._native import _reference
from dafjax._native._primitive import can_pass_through, make_primitive
from dafjax._native._sharding import DivisionRule, independent
from dafjax._typing import Array, Static


def tie(*arrays: Array, all_are_read: bool = True) -> tuple[Array, ...]:
    """Returns its arguments unchanged, none of them before all are computed.

    Results take the buffers of the operands, so that nothing is copied. Derivatives are
    those of the identity. Arrays of extended dtypes (PRNG keys) are returned as they
    are, outside the tie.

    Args:
        *arrays: Arrays of any shape and dtype.
        all_are_read: Whether something reads every result. On a GPU a result that
            nobody reads would not hold the others up, so that False makes a custom
            call of the tie there too.

    Returns:
        The same arrays, tied.
    """
    operands = tuple(filter(can_pass_through, arrays))
    tied = iter(_bind(operands, all_are_read=all_are_read))
    return tuple(next(tied) if can_pass_through(x) else x for x in arrays)


def _bind(arrays: tuple[Array, ...], **params: Static) -> Sequence[Array]:
    return tie_p.bind(*arrays, **params) if arrays else ()


def _abstract_eval(*avals: Any, **_: Static) -> tuple[Any, ...]:
    return avals


def _division(*avals: Any) -> DivisionRule:
    return DivisionRule(operands=independent(avals), results=independent(avals))


def _no_attributes(**_: Static) -> dict[str, Any]:
    return {}


def _is_call_on_cuda(*, all_are_read: Static) -> bool:
    return not all_are_read


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


tie_p: Primitive = make_primitive(
    "dafjax_tie",
    abstract_eval=_abstract_eval,
    reference=_reference.tie,
    multiple_results=True,
    attributes=_no_attributes,
    division=_division,
    aliased=True,
    is_call_on_cuda=_is_call_on_cuda,
)
ad.primitive_jvps[tie_p] = _jvp
ad.primitive_transposes[tie_p] = _transpose
batching.primitive_batchers[tie_p] = _batch
