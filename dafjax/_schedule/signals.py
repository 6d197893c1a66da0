"""Second moments of a program's values, measured on as few of them as possible."""

import math
from collections.abc import Callable
from typing import Any, final

import jax.numpy as jnp
import numpy as np

from dafjax._passes.finishing import finishing_equations
from dafjax._plan.plan import ProgramPlan
from dafjax._schedule.moments import Moments
from dafjax._trace.equation import Constant, Equation


@final
class Signals:
    """The second moments of a program's values.

    If a value has the elements of another one, moved, repeated, negated, multiplied by
    a number or padded with zeros, its moments follow from the other's.
    """

    def __init__(self, plan: ProgramPlan, moments: Callable[[int], Moments]) -> None:
        """Prepares the moments of the values of a program.

        Args:
            plan: The plan of the program.
            moments: Returns the measured moments of a value. It is called at most once
                per value.
        """
        program = plan.program
        self._program = program
        self._moments = moments
        self._known: dict[int, Moments] = {}
        finishing = finishing_equations(program)
        # Before its epilogue, a gradient may exist only in chunks.
        self._finished = {eqn.input_values[0]: eqn.outputs[0] for eqn in finishing}
        restored = {kept.value for kept in plan.kept}
        equations = [e for v, e in plan.recomputed.items() if v not in restored]
        equations += [eqn for eqn in program.backward if eqn not in finishing]
        self._copies = {
            eqn.outputs[0]: (eqn.input_values[0], factor)
            for eqn in equations
            if (factor := self.squared_factor(eqn)) is not None
        }
        self._padded = {
            eqn.outputs[0]: eqn.input_values[0]
            for eqn in equations
            if _only_adds_zeros(eqn)
        }
        self._factors = {
            eqn.outputs[0]: eqn.input_values
            for eqn in program.backward
            if eqn.primitive == "mul"
            and [self.size(v) for v in eqn.input_values]
            == 2 * [self.size(eqn.outputs[0])]
        }

    def size(self, value: int) -> int:
        """Returns the number of elements."""
        return math.prod(self._program.avals[value].shape)

    def moments(self, value: int) -> Moments:
        """Returns the mean square and the variance of a value."""
        if value not in self._known:
            self._known[value] = self._moments_of(value)
        return self._known[value]

    def _moments_of(self, value: int) -> Moments:
        if value in self._padded:
            operand = self._padded[value]
            return _among_zeros(
                self.moments(operand), self.size(operand) / max(self.size(value), 1)
            )
        if value not in self._copies:
            return self._moments(value)
        operand, factor = self._copies[value]
        found = self.moments(operand)
        if factor == 1:
            return found
        return Moments(factor * found.mean_square, factor * found.variance)

    def energy(self, value: int) -> Any:
        """Returns the sum of the squares of the elements.

        For an elementwise product the factors count as independent, because the noise
        of one is independent of the other.
        """
        while value in self._finished:
            value = self._finished[value]
        factors = self._factors.get(value, (value,))
        squares = (self.moments(v).mean_square for v in factors)
        return math.prod(squares, start=float(self.size(value)))

    def squared_factor(self, equation: Equation) -> float | None:
        """Returns the factor from the squares of the only operand to the result's.

        Returns `None` if the result's elements are not the operand's, moved, repeated,
        negated or multiplied by a number.
        """
        values = (*equation.input_values, *equation.outputs)
        dtypes = (self._program.avals[v].dtype for v in values)
        if len(values) != 2 or not all(jnp.issubdtype(d, jnp.floating) for d in dtypes):
            return None
        if equation.rule.keeps_magnitudes:
            return 1.0
        if equation.primitive not in ("mul", "div"):
            return None
        first, second = equation.operand_atoms
        if equation.primitive == "mul" and isinstance(first, Constant):
            first, second = second, first
        if not isinstance(second, Constant) or np.ndim(second.value) > 0:
            return None
        factor = float(second.value) ** 2
        if factor == 0 or not math.isfinite(factor):
            return None
        return factor if equation.primitive == "mul" else 1 / factor


def _only_adds_zeros(eqn: Equation) -> bool:
    """Returns whether an equation adds zeros around a value or between its elements."""
    if eqn.primitive != "pad" or len(eqn.input_values) != 1:
        return False
    _, padding = eqn.operand_atoms
    if not isinstance(padding, Constant) or padding.value != 0:
        return False
    return all(min(of_axis) >= 0 for of_axis in eqn.params["padding_config"])


def _among_zeros(moments: Moments, share: float) -> Moments:
    """Returns the moments of values of which a fraction `share` has the given moments.

    The remaining values are zeros.
    """
    mean_square = share * moments.mean_square
    squared_mean = moments.mean_square + -1.0 * moments.variance
    return Moments(mean_square, mean_square + -(share**2) * squared_mean)
