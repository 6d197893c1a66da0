"""Equations that are run on some of the rows of their operands.

A row is an index of the first dimension, mostly an example. An elementwise equation
makes each row of its result of the same row of its operands, so that it can be run on a
part of the rows, and of what is read for it no more than that part need be there.
"""

from collections.abc import Sequence
from typing import Any

import jax.extend.core as jex_core

from dafjax._trace.equation import Equation
from dafjax._trace.primitives import is_elementwise


def rows_read(equation: Equation, num_rows: int) -> tuple[bool, ...] | None:
    """Returns of which of its inputs an equation reads rows.

    The others are the same for all rows. `None` if results have not `num_rows` rows, or
    a row of them depends on more than that row.
    """
    jaxpr = equation.jaxpr
    made = _made_of_rows(jaxpr, num_rows)
    if made is None or any(var not in made for var in jaxpr.outvars):
        return None
    return tuple(var in made for var in jaxpr.invars)


def evaluate_on_rows(
    equation: Equation, operands: Sequence[Any], num_rows: int, num_there: int
) -> list[Any]:
    """Runs an equation of which `rows_read` is not `None` on a part of the rows.

    Args:
        equation: The equation.
        operands: One for each of its inputs; of those of which rows are read, a part.
        num_rows: As in `rows_read`.
        num_there: The rows of the part.
    """
    return _evaluate(equation.jaxpr, operands, num_rows, num_there)


def _made_of_rows(jaxpr: jex_core.Jaxpr, num_rows: int) -> set[Any] | None:
    """Returns the variables that have the rows, among them those that are read."""
    made: set[Any] = set()
    for eqn in jaxpr.eqns:
        (result,) = eqn.outvars if len(eqn.outvars) == 1 else (None,)
        if result is None or _shape(result)[:1] != (num_rows,):
            return None
        read = _operands_with_rows(eqn, num_rows)
        if read is None:
            return None
        made.update(v for v in read if not isinstance(v, jex_core.Literal))
        made.add(result)
    return made


def _operands_with_rows(eqn: jex_core.JaxprEqn, num_rows: int) -> list[Any] | None:
    body = _body(eqn)
    if body is not None:
        made = _made_of_rows(body, num_rows)
        if made is None or any(var not in made for var in body.outvars):
            return None
        pairs = zip(eqn.invars, body.invars, strict=True)
        return [outer for outer, inner in pairs if inner in made]
    shape = _shape(eqn.outvars[0])
    if eqn.primitive.name == "broadcast_in_dim":
        return [] if not _shape(eqn.invars[0]) else None
    if not is_elementwise(eqn.primitive.name):
        return None
    read = []
    for operand in eqn.invars:
        of_operand = _shape(operand)
        if of_operand and len(of_operand) != len(shape):
            return None
        if of_operand[:1] == (num_rows,):
            read.append(operand)
    return read


def _evaluate(
    jaxpr: jex_core.Jaxpr, operands: Sequence[Any], num_rows: int, num_there: int
) -> list[Any]:
    env: dict[Any, Any] = dict(zip(jaxpr.invars, operands, strict=True))
    for eqn in jaxpr.eqns:
        read = [
            a.val if isinstance(a, jex_core.Literal) else env[a] for a in eqn.invars
        ]
        body = _body(eqn)
        params = dict(eqn.params)
        if body is not None:
            results = _evaluate(body, read, num_rows, num_there)
        else:
            if "shape" in params:
                params["shape"] = (num_there, *params["shape"][1:])
            results = [eqn.primitive.bind(*read, **params)]
        env.update(zip(eqn.outvars, results, strict=True))
    return [env[var] for var in jaxpr.outvars]


def _body(eqn: jex_core.JaxprEqn) -> jex_core.Jaxpr | None:
    """Returns the program that an equation calls, if it has no constants."""
    if eqn.primitive.name not in ("jit", "pjit"):
        return None
    closed = eqn.params["jaxpr"]
    return None if closed.consts else closed.jaxpr


def _shape(atom: Any) -> tuple[int, ...]:
    return tuple(getattr(atom.aval, "shape", ()))
