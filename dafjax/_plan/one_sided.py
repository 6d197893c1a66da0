"""Finds values with many elements at or near one end of their range.

Examples are results of ReLUs, masks, and exponentials of scores less their maximum.
Stochastic rounding keeps the least value of a quantization group exact and has little
noise near it. Dithered rounding has the same noise everywhere. Where elements are
spread over the range, it has half the noise of stochastic rounding.
"""

import jax.numpy as jnp

from dafjax._trace.residuals import Program


def find_one_sided(program: Program) -> frozenset[int]:
    """Returns the numbers of these values."""
    found: set[int] = set()

    def is_at_an_end(value: int) -> bool:
        # Booleans and integers take few different values.
        dtype = program.avals[value].dtype
        return value in found or not jnp.issubdtype(dtype, jnp.inexact)

    for eqn in program.forward:
        # Scalars, such as constant factors, do not count.
        operands = [v for v in eqn.input_values if program.avals[v].size > 1]
        all_are = bool(operands) and all(map(is_at_an_end, operands))
        if eqn.rule.ends_given(all_are):
            found.update(eqn.outputs)
    return frozenset(found)
