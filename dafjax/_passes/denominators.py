"""Recomputes a softmax denominator from its dequantized numerators.

A softmax is `exp(x) / sum(exp(x))`. If its backward pass reads the exponentials from
codes but the exact sum, the shares of a row do not add up to 1. The part that all
cotangents of the row have in common cancels in exact arithmetic; here it is multiplied
by the difference from 1. If the sum is taken over the dequantized exponentials, the
shares add up to 1. (Fine-tuned RoBERTa, 2 bits: this halves the noise that the
exponentials bring into the cotangents of queries.) And the exact sum need not be
stored.
"""

import dataclasses
from collections.abc import Container, Iterable

import jax
import jax.numpy as jnp
import numpy as np

from dafjax import config
from dafjax._trace.equation import Constant, Equation, call_equation
from dafjax._trace.graph import live_equations
from dafjax._trace.residuals import Program, Recipe


def note_denominators(program: Program) -> Program:
    """Returns the program with a recipe for each softmax denominator.

    Such is a sum of many exponentials that the backward pass only divides by.
    """
    exponentials = {
        value for e in program.forward if e.primitive == "exp" for value in e.outputs
    }
    residuals = program.residuals()
    equations = (*live_equations(program.forward, residuals), *program.backward)
    recipes = dict(program.recipes)
    for eqn in program.forward:
        if eqn.primitive != "reduce_sum" or not exponentials.issuperset(eqn.inputs):
            continue
        (operand,), (total,) = eqn.input_values, eqn.outputs
        is_sum_of_many = (
            program.avals[operand].size >= config.MANY_TERMS * program.avals[total].size
        )
        if is_sum_of_many and _only_divides(total, equations):
            codes = _sum_of_codes(program, eqn)
            recipes[total] = Recipe(codes, needs=operand, needs_codes=True)
    return dataclasses.replace(program, recipes=recipes)


def sum_of_shares(exponentials: jax.Array, *, axes: tuple[int, ...]) -> jax.Array:
    """Returns softmax denominators: the sums, but 1 where all codes decode to 0."""
    total = jnp.sum(exponentials, axes)
    return jnp.where(total == 0, 1, total)


def _sum_of_codes(program: Program, eqn: Equation) -> Equation:
    """Returns an equation that sums the dequantized exponentials."""
    axes = tuple(eqn.params["axes"])

    def sum_of_codes(exponentials: jax.Array) -> jax.Array:
        return sum_of_shares(exponentials, axes=axes)

    operands = [program.avals[value] for value in eqn.input_values]
    return call_equation(sum_of_codes, operands, eqn.inputs, eqn.outputs, eqn)


def _only_divides(value: int, equations: Iterable[Equation]) -> bool:
    """Returns whether all readers of a sum, broadcast or not, divide by it.

    A reader may also ask for its sign: all sums of exponentials have the same sign.
    """
    same = {value}
    for eqn in equations:
        if same.isdisjoint(eqn.input_values):
            continue
        if eqn.rule.keeps_magnitudes or eqn.primitive == "abs":
            same.update(eqn.outputs)
        elif not (_divides_by(eqn, same) or _compares_with_zero(eqn)):
            return False
    return True


def _divides_by(eqn: Equation, values: Container[int]) -> bool:
    numerator, *others = eqn.operand_atoms
    is_numerator = isinstance(numerator, int) and numerator in values and bool(others)
    return eqn.divisor is not None and eqn.divisor in values and not is_numerator


def _compares_with_zero(eqn: Equation) -> bool:
    _, *others = eqn.operand_atoms
    return eqn.primitive in ("ge", "gt", "sign") and all(
        isinstance(other, Constant) and np.ndim(other.value) == 0 and other.value == 0
        for other in others
    )
