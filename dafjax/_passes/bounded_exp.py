"""Finds exponentials that do not amplify errors.

An error of 1 in an exponent is a factor of 2.7 in the result. So most exponentials read
exact values. But the exponential of a negated square, as in the derivative of `erf` and
so of a GELU, is at most 1, whatever the error of the squared value, and its error is
less than 1.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.core
import jax.numpy as jnp

from dafjax._trace.equation import Equation, call_equation
from dafjax._trace.residuals import Program


def name_bounded(program: Program) -> Program:
    """Returns the program with exponentials of negated squares named `bounded_exp`."""
    avals = program.avals
    producers: dict[int | None, Equation] = {
        value: eqn for eqn in program.forward for value in eqn.outputs
    }

    def operand_of(eqn: Equation | None, primitive: str) -> Equation | None:
        """Returns the producer of the operand; None if the primitive is another."""
        if eqn is None or eqn.primitive != primitive:
            return None
        (value,) = eqn.input_values or (None,)
        return producers.get(value)

    def is_bounded(eqn: Equation) -> bool:
        made = operand_of(operand_of(eqn, "exp"), "neg")
        # The square of a complex number can be anything.
        return (
            made is not None
            and made.is_square
            and jnp.issubdtype(avals[made.outputs[0]].dtype, jnp.floating)
        )

    forward = tuple(
        _bounded(eqn, avals) if is_bounded(eqn) else eqn for eqn in program.forward
    )
    return dataclasses.replace(program, forward=forward)


def bounded_exp(x: jax.Array) -> jax.Array:
    """Returns the exponential of a number that is not positive."""
    return jnp.exp(x)


def _bounded(eqn: Equation, avals: Sequence[jax.core.ShapedArray]) -> Equation:
    operands = [avals[value] for value in eqn.input_values]
    return call_equation(bounded_exp, operands, eqn.inputs, eqn.outputs, eqn)
