"""Runs the epilogue of each gradient right after the equation that computes it.

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
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax import lax

from dafjax._trace.equation import Equation, in_dtype, values_of
from dafjax._trace.residuals import Program


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
            made = _in_float32(made, unrounded)
            for value in unrounded:
                avals[value] = avals[value].update(dtype=np.dtype(np.float32))
        ordered += made
    return dataclasses.replace(program, avals=tuple(avals), backward=tuple(ordered))


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
