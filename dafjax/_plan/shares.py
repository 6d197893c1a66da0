"""Shares of a sum of exponentials, which add up to one also with rounding noise.

A softmax is `exp(x) / sum(exp(x))`. If its backward pass reads the exponentials from
codes and the exact sum, shares add up to something else than 1, and what the cotangents
of a row have in common, which cancels in exact arithmetic, is multiplied with the
difference. Divided by the sum of what the codes stand for they add up to 1. (Fine-tuned
RoBERTa, 2 bits: half of the noise in the cotangents of queries that comes of the
exponentials.) And the exact sum need not be kept.
"""

import dataclasses
from collections.abc import Container, Iterable
from typing import final

import jax
import jax.numpy as jnp
import numpy as np

from dafjax._trace.equation import Constant, Equation, call_equation
from dafjax._trace.graph import live_equations
from dafjax._trace.residuals import Program


# A sum of as many as this has hardly the noise of one of them.
_MANY = 16


@final
@dataclasses.dataclass(frozen=True)
class Total:
    """An equation `sum(e)` with exponentials `e`, by which they are divided."""

    equation: Equation
    operand: int


def find_totals(program: Program) -> dict[int, Total]:
    """Returns every sum of many exponentials that the backward pass only divides by."""
    exponentials = {
        value for e in program.forward if e.primitive == "exp" for value in e.outputs
    }
    found = {
        eqn.outputs[0]: Total(eqn, operand)
        for eqn in program.forward
        if eqn.primitive == "reduce_sum"
        for operand in eqn.input_values
        if operand in exponentials
        and program.avals[operand].size >= _MANY * program.avals[eqn.outputs[0]].size
    }
    residuals = program.residuals()
    equations = (*live_equations(program.forward, residuals), *program.backward)
    return {v: total for v, total in found.items() if _only_divides(v, equations)}


def sum_of_shares(exponentials: jax.Array, *, axes: tuple[int, ...]) -> jax.Array:
    """Returns sums to divide by: 1 where all codes stand for 0."""
    total = jnp.sum(exponentials, axes)
    return jnp.where(total == 0, 1, total)


def total_of_codes(program: Program, total: Total) -> Equation:
    """Returns an equation that sums what codes stand for."""
    axes = tuple(total.equation.params["axes"])

    def sum_of_codes(exponentials: jax.Array) -> jax.Array:
        return sum_of_shares(exponentials, axes=axes)

    return call_equation(
        sum_of_codes,
        [program.avals[total.operand]],
        (total.operand,),
        total.equation.outputs,
        total.equation,
    )


def _only_divides(value: int, equations: Iterable[Equation]) -> bool:
    """Returns whether all that reads a sum, broadcast or not, divides by it.

    Or asks for its sign, which is that of any sum of exponentials.
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
