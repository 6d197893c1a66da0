"""Rectifiers, recomputed from their exact masks.

The gradient of `relu(x) = max(x, 0)` needs the mask `x > 0`, which is kept as exact
bits; the layer above needs `relu(x)`. Recomputed as `max(y, 0)` from `y`, an unpacked
`x` with rounding noise, that has a bias even though `y` has none, for noise is cut off
at 0. As `where(x > 0, y, 0)` it has none, and is 0 exactly where it was. (ResNet-18 of
width 16, 2 bits, random data: bias of the gradient 0.25 of its norm, and 0.00.)
"""

import jax
from jax.core import ShapedArray

from dafjax._graph import Equation
from dafjax._residuals import Program


def find_masks(program: Program) -> dict[int, int]:
    """Returns the value of the mask `x > 0` for the value of every `max(x, 0)`."""
    masks = {
        eqn.input_values[0]: eqn.outputs[0]
        for eqn in program.forward
        if (eqn.primitive, eqn.zero_operand) in (("gt", 1), ("lt", 0))
    }
    return {
        eqn.outputs[0]: masks[eqn.input_values[0]]
        for eqn in program.forward
        if eqn.primitive == "max"
        and eqn.zero_operand is not None
        and eqn.input_values[0] in masks
    }


def selection(program: Program, rectifier: Equation, mask: int) -> Equation:
    """Returns an equation that computes `max(x, 0)` as `where(mask, x, 0)`."""
    (x,) = rectifier.input_values
    closed = jax.make_jaxpr(
        lambda mask, x: jax.lax.select(mask, x, jax.lax.full_like(x, 0))
    )(*(_like(program.avals[value]) for value in (mask, x)))
    return Equation(jaxpr=closed.jaxpr, inputs=(mask, x), outputs=rectifier.outputs)


def _like(aval: ShapedArray) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)
