"""Runs equations on a chunk of the batch axis.

A row is one index of the first axis, the batch axis; mostly it is one example. An
elementwise equation computes each row of its result from the same row of its operands.
So it can run on a chunk of the rows, and only this chunk of its operands has to be
live. A convolution computes rows from rows of its images, too. The gradient of its
kernel is a sum over rows, which can be computed chunk by chunk.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.extend.core as jex_core
from jax import lax

from dafjax._native import summing_rows
from dafjax._trace.axis_rules import LENGTHS, shape_of
from dafjax._trace.equation import Equation
from dafjax._trace.rules import rule_of


def rows_read(equation: Equation, num_rows: int) -> tuple[bool, ...] | None:
    """Returns, for each input, whether each row of the results reads one row of it.

    That is the row with the same index. All rows read the whole of the other inputs.
    `None` if a result does not have `num_rows` rows, or if one of its rows depends on
    several rows.
    """
    jaxpr = equation.jaxpr
    made = _made_of_rows(jaxpr, num_rows)
    if made is None or any(var not in made for var in jaxpr.outvars):
        return None
    return tuple(var in made for var in jaxpr.invars)


def rows_summed(equation: Equation, num_rows: int) -> tuple[bool, ...] | None:
    """Returns, for each input, whether the equation sums over its rows.

    The results for disjoint chunks of rows add up to the result for all rows. `None` if
    the equation is no such sum.
    """
    (eqn,) = equation.jaxpr.eqns
    sums = rule_of(eqn.primitive.name).sums_rows
    if sums is None or not sums(eqn.params):
        return None
    if any(shape_of(operand)[:1] != (num_rows,) for operand in eqn.invars):
        return None
    return (True,) * len(equation.inputs)


def evaluate_on_rows(
    equation: Equation, operands: Sequence[Any], num_rows: int, num_there: int
) -> list[Any]:
    """Runs an equation on a chunk of the rows.

    Args:
        equation: The equation. `rows_read` or `rows_summed` is not `None` for it.
        operands: One for each of its inputs: a chunk of an input that is read by rows,
            and the whole of any other.
        num_rows: The number of all rows, as in `rows_read`.
        num_there: The number of rows in the chunk.
    """
    return _evaluate(equation.jaxpr, operands, num_rows, num_there)


def _made_of_rows(jaxpr: jex_core.Jaxpr, num_rows: int) -> set[Any] | None:
    """Returns the variables that have rows, including inputs that are read by rows.

    `None` if an equation mixes rows or has several results, or if a variable is read
    both by rows and whole.
    """
    whole: set[Any] = set()
    # A result can be an unchanged operand.
    made = {
        v for v in jaxpr.outvars if v in jaxpr.invars and shape_of(v)[:1] == (num_rows,)
    }
    for eqn in jaxpr.eqns:
        operands = {v for v in eqn.invars if not isinstance(v, jex_core.Literal)}
        have_rows = [shape_of(result)[:1] == (num_rows,) for result in eqn.outvars]
        if not any(have_rows):
            # A value that all rows read whole, such as a prepared statistic.
            if not operands.isdisjoint(made):
                return None
            whole.update((*eqn.outvars, *operands))
            continue
        if not all(have_rows):
            return None
        by_rows = _reads_rows(eqn, num_rows)
        if by_rows is None:
            return None
        for operand, reads_rows in zip(eqn.invars, by_rows, strict=True):
            if not isinstance(operand, jex_core.Literal):
                (made if reads_rows else whole).add(operand)
        made.update(eqn.outvars)
    return made if made.isdisjoint(whole) else None


def _reads_rows(eqn: jex_core.JaxprEqn, num_rows: int) -> Sequence[bool] | None:
    """Returns, for each operand, whether each row of the result reads one row."""
    body = _body(eqn)
    if body is not None:
        made = _made_of_rows(body, num_rows)
        if made is None or any(var not in made for var in body.outvars):
            return None
        return [var in made for var in body.invars]
    rule = rule_of(eqn.primitive.name)
    if not (rule.runs_in_chunks or rule.is_elementwise):
        return None
    read = []
    for number, operand in enumerate(eqn.invars):
        shape = shape_of(operand)
        axes = [a for a in range(len(shape)) if rule.axis_after(eqn, number, a) == 0]
        if axes and 0 not in axes:
            # The rows of the result are no rows of the operand.
            return None
        read.append(0 in axes and shape[0] == num_rows)
    # A broadcast makes rows of none.
    return read if any(read) or eqn.primitive.name == "broadcast_in_dim" else None


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
        elif eqn.primitive.name == "conv_general_dilated":
            results = [convolve_in_loop(read, params)]
        else:
            for name in LENGTHS:
                if params.get(name, ())[:1] == (num_rows,):
                    params[name] = (num_there, *params[name][1:])
            eqn = summing_rows(eqn.replace(params=params), read)
            results = eqn.primitive.bind(*read, **eqn.params)
            if not eqn.primitive.multiple_results:
                results = [results]
        env.update(zip(eqn.outvars, results, strict=True))
    return [env[var] for var in jaxpr.outvars]


def convolve_in_loop(
    operands: Sequence[jax.Array], params: Mapping[str, Any]
) -> jax.Array:
    """Runs `conv_general_dilated` in a loop body as fast as outside of loops.

    XLA:CPU transposes the operands of a convolution to the axis order of its library,
    but only outside of loops. Inside, a convolution with another axis order takes 30
    times as long (jaxlib 0.10). Gradients of kernels have another order, because they
    sum over the images, not over the features.
    """
    as_it_is = functools.partial(lax.conv_general_dilated_p.bind, **params)
    in_order = functools.partial(_convolve_in_order, params=params)
    return lax.platform_dependent(*operands, cpu=in_order, default=as_it_is)


def _convolve_in_order(
    images: jax.Array, kernel: jax.Array, *, params: Mapping[str, Any]
) -> jax.Array:
    numbers = params["dimension_numbers"]
    batch, features, *places = numbers.lhs_spec
    features_out, features_in, *taps = numbers.rhs_spec
    images = lax.transpose(images, (batch, *places, features))
    kernel = lax.transpose(kernel, (*taps, features_in, features_out))
    last = images.ndim - 1
    between = tuple(range(1, last))
    in_order = lax.ConvDimensionNumbers(
        lhs_spec=(0, last, *between),
        rhs_spec=(last, last - 1, *range(last - 1)),
        out_spec=(0, last, *between),
    )
    result = lax.conv_general_dilated_p.bind(
        images, kernel, **{**params, "dimension_numbers": in_order}
    )
    batch, features, *places = numbers.out_spec
    order = {axis: n for n, axis in enumerate((batch, *places, features))}
    return lax.transpose(result, tuple(order[axis] for axis in range(last + 1)))


def _body(eqn: jex_core.JaxprEqn) -> jex_core.Jaxpr | None:
    """Returns the program that an equation calls, if it has no constants."""
    if eqn.primitive.name not in ("jit", "pjit"):
        return None
    closed = eqn.params["jaxpr"]
    return None if closed.consts else closed.jaxpr
