"""Passes that compute the same with fewer or smaller arrays.

Replaces sums whose terms have a common factor: the factor times an existing sum.

The gradient of a batch norm sums a cotangent for the bias. For the mean, it sums the
cotangent times a number per channel. XLA does not see that the second sum is the first
one times that number, and reads the whole array for it.

Runs the epilogue of each gradient right after the equation that computes it.

The epilogue is often a conversion: the gradient of a float32 weight in a model that
computes in bfloat16. JAX converts the gradients at the end of a layer. A barrier may
come before the conversion, and the gradient is then written in both dtypes. So all
equations that only move or convert a gradient run right after the one that computes it.

Even there, XLA:GPU converts in a separate kernel. But a matrix product sums in float32
anyway. So it returns float32, unrounded, as XLA may choose to do itself
(`xla_allow_excess_precision`). (GPT-2 on an H200: 28 MB and eight kernels less for each
layer.)
"""

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, final

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax import lax

from dafjax._trace.equation import (
    Atom,
    Constant,
    Equation,
    in_dtype,
    in_place_of,
    renumber,
    values_of,
)
from dafjax._trace.graph import flatten
from dafjax._trace.residuals import Program


def factor_sums(program: Program) -> Program:
    """Returns the program with such sums of its backward pass as products."""
    avals = list(program.avals)
    made = (*program.forward, *program.backward)
    makers = {value: eqn for eqn in made for value in eqn.outputs}
    totals: dict[_Summed, int] = {}
    equations: list[Equation] = []
    for eqn in program.backward:
        summed = _summed(eqn, avals)
        if summed is None:
            equations.append(eqn)
            continue
        factored = _factored(summed, totals, makers, avals)
        if factored is None:
            totals.setdefault(summed, eqn.outputs[0])
            equations.append(eqn)
        else:
            equations += _product(eqn, *factored, avals)
    return program.with_backward(equations, avals)


@final
@dataclasses.dataclass(frozen=True)
class _Summed:
    """A value and the axes that it is summed over."""

    value: int
    axes: tuple[int, ...]


@final
@dataclasses.dataclass(frozen=True)
class _Factor:
    """A factor that all terms of a sum have in common.

    Attributes:
        value: A value, or a number; None stands for -1.
        axes: For each axis of the value, the axis of the terms that it matches.
    """

    value: Atom | None
    axes: tuple[int, ...] = ()


def _summed(eqn: Equation, avals: Sequence[jax.core.ShapedArray]) -> _Summed | None:
    if eqn.primitive != "reduce_sum":
        return None
    (value,) = eqn.operand_atoms
    if not isinstance(value, int) or not _can_be_factored(avals[value]):
        return None
    return _Summed(value, tuple(eqn.params["axes"]))


def _can_be_factored(aval: Any) -> bool:
    return (
        jnp.issubdtype(aval.dtype, jnp.floating)
        and not aval.sharding.mesh.explicit_axes
    )


def _factored(
    summed: _Summed,
    totals: Mapping[_Summed, int],
    makers: Mapping[int, Equation],
    avals: Sequence[jax.core.ShapedArray],
) -> tuple[int, list[_Factor]] | None:
    """Returns an existing sum, and the factors whose product with it sums `summed`."""
    factors: list[_Factor] = []
    while not factors or summed not in totals:
        eqn = makers.get(summed.value)
        split = None if eqn is None else _split(eqn, summed.axes, makers, avals)
        if split is None:
            return None
        term, factor = split
        factors.append(factor)
        summed = _Summed(term, summed.axes)
    return totals[summed], factors


def _split(
    eqn: Equation,
    axes: Sequence[int],
    makers: Mapping[int, Equation],
    avals: Sequence[jax.core.ShapedArray],
) -> tuple[int, _Factor] | None:
    """Returns the rest of a term, and a factor of it that is constant along `axes`."""
    shape = avals[eqn.outputs[0]].shape

    atoms = eqn.operand_atoms
    if eqn.primitive == "neg":
        pairs = [(atoms[0], _Factor(None))]
    elif eqn.primitive == "mul":
        others = [_constant_along(atom, axes, makers, avals) for atom in atoms[::-1]]
        pairs = zip(atoms, others, strict=True)
    else:
        return None
    for term, factor in pairs:
        if isinstance(term, int) and avals[term].shape == shape and factor is not None:
            return term, factor
    return None


def _constant_along(
    atom: Atom,
    axes: Sequence[int],
    makers: Mapping[int, Equation],
    avals: Sequence[jax.core.ShapedArray],
) -> _Factor | None:
    if isinstance(atom, Constant):
        return _Factor(atom) if jnp.ndim(atom.value) == 0 else None
    shape = avals[atom].shape
    if not shape or all(shape[axis] == 1 for axis in axes):
        return _Factor(atom, tuple(range(len(shape))))
    made = makers.get(atom)
    if made is None or made.primitive != "broadcast_in_dim":
        return None
    (operand,) = made.operand_atoms
    if isinstance(operand, Constant):
        return _constant_along(operand, axes, makers, avals)
    places = tuple(int(d) for d in made.params["broadcast_dimensions"])
    sizes = avals[operand].shape
    if any(p in axes and n != 1 for p, n in zip(places, sizes, strict=True)):
        return None
    return _Factor(operand, places)


def _product(
    eqn: Equation,
    total: int,
    factors: Sequence[_Factor],
    avals: list[jax.core.ShapedArray],
) -> list[Equation]:
    """Returns equations that compute the result of a sum from another sum."""
    axes = eqn.params["axes"]
    left = [d for d in range(len(axes) + avals[total].ndim) if d not in axes]

    def multiply(result: jax.Array, *values: jax.Array) -> jax.Array:
        remaining = iter(values)
        for factor in factors:
            if factor.value is None:
                result = -result
                continue
            if isinstance(factor.value, Constant):
                result = result * jnp.asarray(factor.value.value, result.dtype)
                continue
            value = next(remaining)
            summed = [i for i, place in enumerate(factor.axes) if place in axes]
            places = [left.index(p) for p in factor.axes if p not in axes]
            result = result * lax.broadcast_in_dim(
                lax.squeeze(value, summed), result.shape, places
            )
        return result

    inputs = (total, *(f.value for f in factors if isinstance(f.value, int)))
    graph = flatten(jax.make_jaxpr(multiply)(*(avals[v] for v in inputs)))
    numbers: dict[int, Atom] = dict(enumerate(inputs))
    made = []
    for equation in graph.equations:
        (value,) = equation.outputs
        if (value,) == graph.outputs:
            numbers[value] = eqn.outputs[0]
        else:
            numbers[value] = len(avals)
            avals.append(graph.avals[value])
        made.append(
            dataclasses.replace(
                in_place_of(equation, eqn),
                inputs=renumber(equation.inputs, numbers),
                outputs=values_of([numbers[value]]),
            )
        )
    return made


def finishing_equations(program: Program) -> frozenset[Equation]:
    """Returns the equations that only convert, move or negate one gradient."""
    num_readers = collections.Counter(values_of(program.gradients))
    num_readers.update(v for eqn in program.backward for v in eqn.input_values)
    unfinished = set(values_of(program.gradients))
    found = set()
    for eqn in reversed(program.backward):
        values = (*eqn.outputs, *eqn.input_values)
        if not unfinished.issuperset(eqn.outputs) or eqn.has_effect:
            continue
        if any(num_readers[v] > 1 or v in program.cotangents for v in values):
            continue
        if eqn.rule.keeps_magnitudes and len(values) == 2:
            result, operand = (program.avals[v] for v in values)
            if result.size == operand.size:
                unfinished.update(eqn.input_values)
                found.add(eqn)
    return frozenset(found)


def finish_early(program: Program) -> Program:
    """Returns the program with each gradient epilogue right after its gradient.

    If a matrix product is in bfloat16 or float16 and its result is converted to
    float32, the product returns float32 instead.
    """
    finishing = finishing_equations(program)
    behind = {eqn.input_values[0]: eqn for eqn in finishing}
    avals = list(program.avals)
    ordered: list[Equation] = []
    for eqn in program.backward:
        if eqn in finishing:
            continue
        made = [eqn]
        for value in eqn.outputs:
            while value in behind:
                made.append(behind[value])
                (value,) = made[-1].outputs
        unrounded = _unrounded(program, made)
        if unrounded:
            made = _in_float32(_turned(made), unrounded)
            for value in unrounded:
                avals[value] = avals[value].update(dtype=np.dtype(np.float32))
        ordered += made
    return dataclasses.replace(program, avals=tuple(avals), backward=tuple(ordered))


def _turned(made: Sequence[Equation]) -> list[Equation]:
    """Swaps the operands of a product, in place of the transpose that comes after it.

    XLA:CPU cannot run the transpose of a product that reads bfloat16 matrices and
    returns float32.
    """
    product, first, *others = made
    if not _swaps_axes(first):
        return list(made)
    (eqn,), turned = product.jaxpr.eqns, first.jaxpr
    outvars: Any = turned.outvars
    contracted, _ = eqn.params["dimension_numbers"]
    swapped = eqn.replace(
        invars=eqn.invars[::-1],
        outvars=outvars,
        params={**eqn.params, "dimension_numbers": (contracted[::-1], ((), ()))},
    )
    jaxpr = product.jaxpr.replace(eqns=[swapped], outvars=outvars)
    return [dataclasses.replace(product, jaxpr=jaxpr, outputs=first.outputs), *others]


def _swaps_axes(eqn: Equation) -> bool:
    """Returns whether it transposes a matrix."""
    return eqn.primitive == "transpose" and eqn.params["permutation"] == (1, 0)


def _unrounded(program: Program, made: Sequence[Equation]) -> tuple[int, ...]:
    """Returns the values of a product and its epilogue before they become float32.

    Empty if the product cannot return float32, or if no epilogue converts it to
    float32.
    """
    product, *others = made
    if product.primitive != "dot_general" or _says_how(product):
        return ()
    values = list(product.outputs)
    for eqn in others:
        if program.avals[eqn.outputs[0]].dtype == jnp.float32:
            break
        values += eqn.outputs
    else:
        return ()
    dtypes = {program.avals[v].dtype for v in values}
    return tuple(values) if dtypes <= _SUMMED_IN_FLOAT32 else ()


_SUMMED_IN_FLOAT32 = {jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16)}


def _says_how(product: Equation) -> bool:
    """Returns whether the user chose the dtype that a product sums in."""
    algorithms = (lax.DotAlgorithm, lax.DotAlgorithmPreset)
    return isinstance(product.params["precision"], algorithms)


def _in_float32(made: Sequence[Equation], values: Sequence[int]) -> list[Equation]:
    """Returns a matrix product and its epilogue with values in float32."""
    product, *others = made
    params = {"preferred_element_type": np.dtype(np.float32)}
    return [
        in_dtype(product, product.outputs, jnp.float32, **params),
        *(in_dtype(eqn, values, jnp.float32) for eqn in others),
    ]
