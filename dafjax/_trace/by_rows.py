"""Runs equations on a chunk of an axis.

Mostly this is the batch axis, the first one. An elementwise equation computes each row
of its result, an index of that axis, from the same row of its operands. So it can run
on a chunk of the rows, and only this chunk of its operands has to be live. A
convolution computes rows from rows of its images, too. The gradient of its kernel is a
sum over rows, which can be computed chunk by chunk.

An axis may lie elsewhere in the operands. A matrix product for each attention head
reads heads of the queries, where they are the third axis, and writes heads of the
logits, where they are the second.
"""

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.extend.core as jex_core
from jax import lax

from dafjax._native import summing_rows
from dafjax._trace.axis_rules import LENGTHS, shape_of
from dafjax._trace.equation import Equation
from dafjax._trace.rules import rule_of


# For each of several arrays, the axis along which chunks divide it; `None` if they read
# the whole.
Axes: TypeAlias = tuple[int | None, ...]


def axes_read(equation: Equation, axes: Sequence[int]) -> Axes | None:
    """Returns the axes along which chunks of the results read chunks of the inputs.

    `None` if a chunk depends on more than the same chunk of these inputs and on the
    whole of the others.

    Args:
        equation: The equation.
        axes: The axis along which each result is divided.
    """
    jaxpr = equation.jaxpr
    known = _axes_in(jaxpr, axes)
    return None if known is None else tuple(map(known.get, jaxpr.invars))


def axes_summed(equation: Equation) -> Iterator[tuple[int, ...]]:
    """Yields axes of the inputs over which the equation sums.

    The results for disjoint chunks of the inputs along these axes add up to the result
    for the whole inputs.
    """
    (eqn,) = equation.jaxpr.eqns
    sums = rule_of(eqn.primitive.name).sums
    if sums is None or any(isinstance(x, jex_core.Literal) for x in eqn.invars):
        return
    for axes in sums(eqn.params):
        known = dict(zip(eqn.invars, axes, strict=True))
        # An operand that is read along two axes cannot be divided.
        if all(known[x] == axis for x, axis in zip(eqn.invars, axes, strict=True)):
            yield tuple(known[x] for x in equation.jaxpr.invars)


def evaluate_on_chunk(
    equation: Equation, operands: Sequence[Any], axes: Sequence[int], num_there: int
) -> list[Any]:
    """Runs an equation on a chunk.

    Args:
        equation: The equation.
        operands: One for each of its inputs: a chunk, or the whole, as `axes_read` or
            `axes_summed` says.
        axes: The axis along which each result is divided; empty if it is a sum.
        num_there: The length of a chunk.
    """
    return _evaluate(equation.jaxpr, operands, axes, num_there)


def _axes_in(
    jaxpr: jex_core.Jaxpr, axes: Sequence[int]
) -> dict[Any, int | None] | None:
    """Returns the axes along which variables are divided, given those of the results.

    `None` if they cannot be, or if a variable is read along two axes.
    """
    known: dict[Any, int | None] = {}

    def learn(atoms: Sequence[Any], axes: Sequence[int | None]) -> bool:
        pairs = zip(atoms, axes, strict=True)
        return all(
            known.setdefault(atom, axis) == axis
            for atom, axis in pairs
            if not isinstance(atom, jex_core.Literal)
        )

    if not learn(jaxpr.outvars, axes):
        return None
    for eqn in reversed(jaxpr.eqns):
        made = {known[var] for var in eqn.outvars if var in known}
        read: Sequence[int | None] | None = [None] * len(eqn.invars)
        if made not in (set(), {None}):
            (axis, *others) = made
            read = None if others or axis is None else _axes_of_operands(eqn, axis)
        if read is None or not learn(eqn.invars, read):
            return None
    return known


def _axes_of_operands(eqn: jex_core.JaxprEqn, axis: int) -> Sequence[int | None] | None:
    """Returns the axes of the operands that lie at an axis of all results."""
    lengths = {shape_of(result)[axis : axis + 1] for result in eqn.outvars}
    if len(lengths) > 1:
        return None
    body = _body(eqn)
    if body is not None:
        known = _axes_in(body, [axis] * len(body.outvars))
        return None if known is None else list(map(known.get, body.invars))
    rule = rule_of(eqn.primitive.name)
    if not (rule.runs_in_chunks or rule.is_elementwise):
        return None
    read: list[int | None] = []
    for number, operand in enumerate(eqn.invars):
        shape = shape_of(operand)
        axes = (a for a in range(len(shape)) if {shape[a : a + 1]} == lengths)
        read.append(
            next((a for a in axes if rule.axis_after(eqn, number, a) == axis), None)
        )
    # A broadcast makes rows of none.
    is_divided = any(a is not None for a in read)
    return read if is_divided or eqn.primitive.name == "broadcast_in_dim" else None


def _evaluate(
    jaxpr: jex_core.Jaxpr, operands: Sequence[Any], axes: Sequence[int], num_there: int
) -> list[Any]:
    known = (_axes_in(jaxpr, axes) if axes else None) or {}
    env: dict[Any, Any] = dict(zip(jaxpr.invars, operands, strict=True))
    for eqn in jaxpr.eqns:
        read = [
            a.val if isinstance(a, jex_core.Literal) else env[a] for a in eqn.invars
        ]
        axis = next((known[v] for v in eqn.outvars if v in known), None)
        body = _body(eqn)
        params = dict(eqn.params)
        if body is not None:
            inside = () if axis is None else [axis] * len(body.outvars)
            results = _evaluate(body, read, inside, num_there)
        elif eqn.primitive.name == "conv_general_dilated":
            results = [convolve_in_loop(read, params)]
        else:
            for name in LENGTHS:
                if axis is not None and params.get(name) is not None:
                    lengths = list(params[name])
                    lengths[axis] = num_there
                    params[name] = tuple(lengths)
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
