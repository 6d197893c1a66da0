"""Second moments of a program's values, measured on as few of them as possible."""

import math
from typing import final

import jax.numpy as jnp
import numpy as np
from jax import lax

from dafjax._passes.finishing import finishing_equations
from dafjax._plan.plan import ProgramPlan
from dafjax._schedule.moments import Moments
from dafjax._schedule.weighted_sums import ONE, as_float32
from dafjax._trace.equation import Constant, Equation
from dafjax._typing import Array


@final
class Signals:
    """The second moments of a program's values, as indices of an array.

    If a value has the elements of another one, moved, repeated, negated, multiplied by
    a number or padded with zeros, its moments follow from the other's.
    """

    def __init__(self, plan: ProgramPlan) -> None:
        program = plan.program
        self._program = program
        # The index of each measured value.
        self._measured: dict[int, int] = {}
        # Of an array that begins with 1: `first * x[i] * x[j] + second * x[k]`.
        self._moments: dict[tuple[float, int, int, float, int], int] = {}
        self._index(1.0, ONE)
        finishing = finishing_equations(program)
        # Before its epilogue, a gradient may exist only in chunks.
        self._finished = {eqn.input_values[0]: eqn.outputs[0] for eqn in finishing}
        restored = {kept.value for kept in plan.kept}
        equations = [e for v, e in plan.recomputed.items() if v not in restored]
        equations += [eqn for eqn in program.backward if eqn not in finishing]
        # Operand, the factor of squares, and the fraction of elements that are not 0.
        self._made_of: dict[int, tuple[int, float, float]] = {}
        for eqn in equations:
            factor = self.squared_factor(eqn)
            if factor is not None:
                self._made_of[eqn.outputs[0]] = eqn.input_values[0], factor, 1.0
            elif _only_adds_zeros(eqn):
                (operand,), (result,) = eqn.input_values, eqn.outputs
                share = self.size(operand) / max(self.size(result), 1)
                self._made_of[result] = operand, 1.0, share
        self._factors = {
            eqn.outputs[0]: eqn.input_values
            for eqn in program.backward
            if eqn.primitive == "mul"
            and [self.size(v) for v in eqn.input_values]
            == 2 * [self.size(eqn.outputs[0])]
        }

    @property
    def measured(self) -> tuple[int, ...]:
        """The values whose moments must be measured for what was asked so far."""
        return tuple(self._measured)

    def size(self, value: int) -> int:
        """Returns the number of elements."""
        return math.prod(self._program.avals[value].shape)

    def mean_square(self, value: int) -> int:
        """Returns the index of the mean square of a value."""
        measured, factor, _, _ = self._origin(value)
        return self._index(factor, measured)

    def variance(self, value: int) -> int:
        """Returns the index of the variance of a value."""
        measured, _, of_variance, of_mean_square = self._origin(value)
        return self._index(of_variance, measured + 1, ONE, of_mean_square, measured)

    def energy(self, value: int) -> int:
        """Returns the index of the sum of the squares of the elements.

        For an elementwise product the factors count as independent, because the noise
        of one is independent of the other.
        """
        while value in self._finished:
            value = self._finished[value]
        origins = [self._origin(v) for v in self._factors.get(value, (value,))]
        factor = math.prod((of[1] for of in origins), start=float(self.size(value)))
        return self._index(factor, *(of[0] for of in origins))

    def compute(self, moments: Moments) -> Array:
        """Returns the array, float32.

        Args:
            moments: The moments of the `measured` values, each `[measured]`.
        """
        numbers = jnp.stack(moments, axis=1).reshape(-1)
        # Pads instead of concatenating: if devices share the mapped examples by type,
        # JAX cannot concatenate arrays of which only some are mapped.
        numbers = lax.pad(numbers, jnp.float32(1), [(1, 0, 0)])
        first, i, j, second, k = map(np.array, zip(*self._moments, strict=True))
        product = as_float32(first) * numbers[i] * numbers[j]
        return product + as_float32(second) * numbers[k]

    def _index(
        self, first: float, i: int, j: int = ONE, second: float = 0.0, k: int = ONE
    ) -> int:
        return self._moments.setdefault((first, i, j, second, k), len(self._moments))

    def _origin(self, value: int) -> tuple[int, float, float, float]:
        """Returns the measured value that a value is made of, and how.

        Returns:
            The index of its measured mean square (its variance follows); the factor
            from it to the mean square of the value; and the factors of the measured
            variance and mean square in the variance of the value.
        """
        mean_square, variance, of_mean_square = 1.0, 1.0, 0.0
        while value in self._made_of:
            value, factor, share = self._made_of[value]
            # The variance of the value is that of the operand among zeros.
            of_mean_square += variance * (1 - share)
            variance *= factor * share**2
            of_mean_square *= factor * share
            mean_square *= factor * share
        number = self._measured.setdefault(value, len(self._measured))
        return 1 + 2 * number, mean_square, variance, of_mean_square

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
