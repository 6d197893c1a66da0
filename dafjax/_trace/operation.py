"""Operations as `jax.checkpoint` describes them to its policies, and their answers."""

import dataclasses
import enum
from collections.abc import Mapping
from typing import Any, final

from jax._src.ad_checkpoint import name_p
from jax._src.interpreters.partial_eval import (
    Offloadable,
    RecomputeType,
    SaveableType,
)
from jax.extend.core import Primitive

from dafjax._trace.equation import Equation


@final
@dataclasses.dataclass(frozen=True)
class Operation:
    """An operation as `jax.checkpoint` describes it to its policies.

    Attributes:
        primitive: The primitive.
        avals: Shapes and dtypes of its operands.
        params: Its parameters.
    """

    primitive: Primitive
    avals: tuple[Any, ...]
    params: Mapping[str, Any]


def operation_of(equation: Equation) -> Operation | None:
    """Returns the operation of an equation; `None` for a call of several operations.

    Only dafjax makes such calls, not JAX.
    """
    eqn = equation.written
    if eqn is None:
        return None
    return Operation(eqn.primitive, tuple(atom.aval for atom in eqn.invars), eqn.params)


def operations_of(equation: Equation | None) -> tuple[Operation, ...]:
    """Returns the operation of an equation, if there is one, as a tuple."""
    operation = None if equation is None else operation_of(equation)
    return () if operation is None else (operation,)


def naming(aval: Any, name: str) -> Operation:
    """Returns the operation of `checkpoint_name` that names a value."""
    return Operation(name_p, (aval,), {"name": name})


@final
class Answer(enum.Enum):
    """The answer of a policy of `jax.checkpoint` about the results of an operation."""

    SAVE = enum.auto()
    RECOMPUTE = enum.auto()
    OFFLOAD = enum.auto()


def read_answer(answer: Any) -> Answer | None:
    """Reads the result of a policy of `jax.checkpoint`; `None` if it is no answer."""
    if isinstance(answer, bool):
        return Answer.SAVE if answer else Answer.RECOMPUTE
    kinds = (
        (SaveableType, Answer.SAVE),
        (RecomputeType, Answer.RECOMPUTE),
        (Offloadable, Answer.OFFLOAD),
    )
    return next((found for kind, found in kinds if isinstance(answer, kind)), None)
