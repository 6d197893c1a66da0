"""Primitive that makes every result depend on every operand.

XLA undoes rematerialization where nothing forces an order (on CPUs jaxlib up to 0.10.2
drops `optimization_barrier` before it schedules). A custom call is opaque to it.
"""

from collections.abc import Sequence
from typing import Any

from jax.extend.core import Primitive
from jax.interpreters import ad, batching

from dafjax._native import _reference
from dafjax._native._primitive import can_pass_through, make_primitive
from dafjax._native._sharding import DivisionRule, independent
from dafjax._typing import Array, Static


def tie(*arrays: Array) -> tuple[Array, ...]:
    """Returns its arguments unchanged, none of them before all are computed.

    Results take the buffers of the operands, so that nothing is copied. Derivatives are
    those of the identity. Arrays of extended dtypes (PRNG keys) are returned as they
    are, outside the tie.

    Args:
        *arrays: Arrays of any shape and dtype.

    Returns:
        The same arrays, tied.
    """
    tied = iter(_bind(tuple(filter(can_pass_through, arrays))))
    return tuple(next(tied) if can_pass_through(x) else x for x in arrays)


def _bind(arrays: tuple[Array, ...]) -> Sequence[Array]:
    return tie_p.bind(*arrays) if arrays else ()


def _abstract_eval(*avals: Any) -> tuple[Any, ...]:
    return avals


def _division(*avals: Any) -> DivisionRule:
    return DivisionRule(operands=independent(avals), results=independent(avals))


def _no_attributes(**_: Static) -> dict[str, Any]:
    return {}


def _jvp(
    primals: Sequence[Array], tangents: Sequence[Any]
) -> tuple[Sequence[Array], Sequence[Any]]:
    return tie_p.bind(*primals), list(tangents)


def _transpose(cotangents: Sequence[Any], *operands: Any) -> list[Any]:
    return [
        cotangent if ad.is_undefined_primal(operand) else None
        for cotangent, operand in zip(cotangents, operands, strict=True)
    ]


def _batch(
    operands: Sequence[Array], axes: Sequence[int | None]
) -> tuple[Sequence[Array], Sequence[int | None]]:
    return tie_p.bind(*operands), axes


tie_p: Primitive = make_primitive(
    "dafjax_tie",
    abstract_eval=_abstract_eval,
    reference=_reference.tie,
    multiple_results=True,
    attributes=_no_attributes,
    division=_division,
    aliased=True,
)
ad.primitive_jvps[tie_p] = _jvp
ad.primitive_transposes[tie_p] = _transpose
batching.primitive_batchers[tie_p] = _batch
