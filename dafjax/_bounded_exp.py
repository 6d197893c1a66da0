"""Exponentials that make no large error of a small one.

An error of one in an exponent is a factor of 2.7, which is why most exponentials read
exact values. That of a negated square, as in the derivative of `erf` and so of a GELU,
is at most 1, whatever the error of what was squared, and changes by less than that.
"""

from collections.abc import Sequence

import jax
import jax.core
import jax.numpy as jnp

from dafjax._equation import Equation, call_equation


def name_bounded(
    equations: Sequence[Equation], avals: Sequence[jax.core.ShapedArray]
) -> tuple[Equation, ...]:
    """Returns the equations, the exponentials of negated squares as `bounded_exp`.

    Args:
        equations: The equations.
        avals: Shape and dtype of every value.
    """
    producers = {value: eqn for eqn in equations for value in eqn.outputs}

    def is_bounded(eqn: Equation) -> bool:
        operand = eqn
        for primitive in ("exp", "neg"):
            if operand.primitive != primitive or not operand.input_values:
                return False
            (value,) = operand.input_values
            if value not in producers:
                return False
            operand = producers[value]
        return _is_square(operand)

    return tuple(_bounded(eqn, avals) if is_bounded(eqn) else eqn for eqn in equations)


def bounded_exp(x: jax.Array) -> jax.Array:
    """Returns the exponential of a number that is not positive."""
    return jnp.exp(x)


def _is_square(eqn: Equation) -> bool:
    if eqn.primitive == "integer_pow":
        return eqn.params["y"] == 2
    first, *others = eqn.operand_atoms
    of_itself = isinstance(first, int) and others == [first]
    return eqn.primitive == "square" or (eqn.primitive == "mul" and of_itself)


def _bounded(eqn: Equation, avals: Sequence[jax.core.ShapedArray]) -> Equation:
    operands = [avals[value] for value in eqn.input_values]
    return call_equation(bounded_exp, operands, eqn.inputs, eqn.outputs, eqn)
