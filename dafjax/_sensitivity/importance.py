"""Measures how much the rounding of each residual disturbs the gradient.

The sensitivity of a residual is its contribution to the gradient's variance.

The backward pass is linear in cotangents and multiplies them with restored values. So
noise of either reaches the gradient, at each equation with a factor that follows from
mean squares. The factors count as independent: the noise of `M` products is

    E |B(n, c)|^2 = E[n^2] E[c^2] M,

which is exact in ActNN's case, a residual that is multiplied with a cotangent to give
the gradient of a weight (Chen et al. 2021, section 4.2). Starting at the gradients,
this module accumulates

- the *cost* of a cotangent's noise: the variance that it adds to the gradient, summed
  over all elements. The noise of a gradient costs itself. The noise of an operand of a
  sum, over few operands or many elements, costs as much as the noise of the sum,
  because noise is uncorrelated (signals may be correlated). Other elementwise
  operations keep the ratio of noise to signal;
- the cost of a restored value's noise, where the value is multiplied with cotangents.
  The cost passes to the residuals that the value is recomputed from: unchanged by sums,
  in proportion to the signal by other operations.

Statistics in the forward pass (values many times smaller than their operands) average
the noise of many elements and are left out.

The rank correlation with the variance measured with one compressed residual at a time
(GACT, Liu et al. 2022) is 0.95 for a ResNet-18 and 0.98 for a GPT-2
(`benchmarks/importance.py`).

Statistics hook: samples backward-pass values, and derives sensitivities.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np

from dafjax import config
from dafjax._numbers import Array
from dafjax._plan.plan import ProgramPlan
from dafjax._sensitivity.moments import (
    ONE,
    Moments,
    RowMeans,
    Signals,
    Weight,
    WeightedSums,
    moments_of_rows,
    sample_energy,
    sample_rows,
)
from dafjax._trace.equation import Equation, values_of


_SAME = Weight()


@final
class Sensitivities:
    """The gradient variance that the rounding of each residual causes.

    Attributes:
        measured: The values whose moments the sensitivities need.
    """

    def __init__(
        self, plan: ProgramPlan, residuals: Iterable[int], *, by_element: bool = False
    ) -> None:
        """Finds out what the sensitivities depend on.

        Args:
            plan: The program with its compressed residuals and recomputed values.
            residuals: The compressed residuals.
            by_element: Whether the variance of each element counts in units of the mean
                square of the gradient's array (`unit_of_variance`).
        """
        self._signals = Signals(plan)
        residuals = tuple(residuals)
        noisy = _noisy_values(plan, self._signals, residuals)
        costs = _Costs(plan, self._signals, by_element=by_element)
        _collect_costs(plan, self._signals, noisy, costs)
        for value in sorted(noisy, key=plan.order, reverse=True):
            _hand_on(plan, self._signals, costs, value, noisy[value])
        self._sums = costs.sums
        self._units = costs.units
        self._wanted = [costs.of_unit(value) for value in residuals]
        self.measured = self._signals.measured

    def __call__(self, moments: Moments, rounding_noise: Array) -> Array:
        """Returns the sensitivities.

        Args:
            moments: The moments of the `measured` values, each `[measured]`.
            rounding_noise: The `sample_rounding_noise` of each residual, `[residuals]`.

        Returns:
            float32 `[residuals]`: the variance at 1 bit, for quantization groups with a
            mean squared range of 1. The variance is proportional to that range.
        """
        signals = self._signals.compute(moments)
        if self._units:
            energies = signals[np.array([energy for energy, _ in self._units])]
            sizes = [size for _, size in self._units]
            signals = jnp.append(signals, units_of_variance(energies, sizes)[::-1])
        return self._sums.compute(signals, self._wanted) * rounding_noise


def units_of_variance(energies: Array, sizes: Sequence[int]) -> Array:
    """Returns for each array of a gradient the unit of the variance of its elements.

    It is the mean square of the array's elements, as in Adam, which divides an element
    by its root mean square over many steps. So arrays with small gradients count as
    much as others, unless they are smaller by far.

    Args:
        energies: The squared norm of each array, float32 `[arrays]`.
        sizes: The number of its elements.
    """
    of_all = jnp.sum(energies) / max(sum(sizes), 1)
    counts = np.maximum(np.array(sizes, np.float32), 1)
    return energies / counts + _LEAST_UNIT * of_all


# Of the mean square of all elements, at least. Arrays whose gradients should be 0, such
# as biases of keys in attention, hold rounding errors.
_LEAST_UNIT = 1e-4


def _noisy_values(
    plan: ProgramPlan, signals: Signals, sources: Iterable[int]
) -> dict[int, tuple[int, ...]]:
    """Returns the restored values that have noise, with the operands it comes from."""
    noisy: dict[int, tuple[int, ...]] = dict.fromkeys(sources, ())
    for value in sorted(plan.recomputed.keys() - noisy.keys(), key=plan.order):
        operands = tuple(
            v
            for v in dict.fromkeys(plan.recomputed[value].input_values)
            if v in noisy and signals.size(v) <= config.MANY_TERMS * signals.size(value)
        )
        if operands:
            noisy[value] = operands
    return noisy


@final
class _Costs:
    """The known costs of the values' noise: the gradient variance it causes.

    The signal of a cotangent is its energy, and that of a restored value its variance.
    """

    def __init__(
        self, plan: ProgramPlan, signals: Signals, *, by_element: bool
    ) -> None:
        self.sums = WeightedSums()
        self._signals = signals
        self.cotangents = set(plan.program.cotangents).union(
            *(eqn.outputs for eqn in plan.program.backward)
        )
        # Costs of noise of size 1, and of noise as large as the signal: sums.
        self._of_unit: dict[int, int] = {}
        self._of_share: dict[int, int] = {}
        # The energies and sizes of gradients whose elements have units of variance; and
        # for each gradient, or term of one, its place in this list.
        self.units: list[tuple[int, int]] = []
        self._unit_of: dict[int, int] = {}
        if by_element:
            for value, gradient in _gradients(plan).items():
                unit = signals.energy(gradient), signals.size(gradient)
                if unit not in self.units:
                    self.units.append(unit)
                self._unit_of[value] = self.units.index(unit)

    def __contains__(self, value: int) -> bool:
        return value in self._of_unit or value in self._of_share

    def add_of_gradient(self, value: int) -> None:
        """Adds the cost of a gradient's noise: itself, in its unit."""
        unit = self._unit_of.get(value)
        # Units lie behind all other numbers, the first one last.
        weight = _SAME if unit is None else Weight(divisor=-1 - unit)
        self._add(self._of_unit, value, ONE, weight)

    def add_of_unit(
        self, value: int, result: int, factor: float = 1.0, square: int = ONE
    ) -> None:
        """Adds `factor * square` times the cost of noise of size 1 in a result."""
        weight = Weight(factor, square)
        if result in self._of_unit:
            self._add(self._of_unit, value, self._of_unit[result], weight)
        if result in self._of_share:
            weight = weight._replace(divisor=self._signal(result))
            self._add(self._of_unit, value, self._of_share[result], weight)

    def add_of_share(self, value: int, result: int, weight: Weight = _SAME) -> None:
        """Adds `weight` times the cost of noise as large as a result's signal."""
        if result in self._of_unit:
            of_unit = weight._replace(second=self._signal(result))
            self._add(self._of_share, value, self._of_unit[result], of_unit)
        if result in self._of_share:
            self._add(self._of_share, value, self._of_share[result], weight)

    def add_of_copy(self, value: int, result: int, factor: float) -> None:
        """Adds the cost of a result whose noise is `factor` times that of the value."""
        if result in self._of_unit:
            weight = Weight(factor)
            self._add(self._of_unit, value, self._of_unit[result], weight)
        if result in self._of_share:
            self._add(self._of_share, value, self._of_share[result], _SAME)

    def of_unit(self, value: int) -> int:
        """Returns the cost of noise of size 1: a sum."""
        total = self.sums.new()
        if value in self._of_unit:
            self.sums.add(total, self._of_unit[value], _SAME)
        if value in self._of_share:
            weight = Weight(divisor=self._signal(value))
            self.sums.add(total, self._of_share[value], weight)
        return total

    def _add(self, sums: dict[int, int], value: int, of: int, weight: Weight) -> None:
        if value not in sums:
            sums[value] = self.sums.new()
        self.sums.add(sums[value], of, weight)

    def _signal(self, value: int) -> int:
        if value in self.cotangents:
            return self._signals.energy(value)
        return self._signals.variance(value)


def _hand_on(
    plan: ProgramPlan,
    signals: Signals,
    costs: _Costs,
    value: int,
    operands: Collection[int],
) -> None:
    """Adds the cost of a recomputed value's noise to the costs of its operands."""
    if not operands or value not in costs:
        return
    eqn = plan.recomputed[value]
    factor = signals.squared_factor(eqn)
    for operand in operands:
        if factor is not None:
            costs.add_of_copy(operand, value, factor)
        elif _is_sum_of_large(eqn, value, signals):
            costs.add_of_unit(operand, value)
        else:
            costs.add_of_share(operand, value)


def _is_sum_of_large(eqn: Equation, value: int, signals: Signals) -> bool:
    if not eqn.rule.adds or len(eqn.input_values) == 1:
        return False
    sizes = map(signals.size, eqn.input_values)
    return all(size * config.MANY_TERMS >= signals.size(value) for size in sizes)


def _collect_costs(
    plan: ProgramPlan, signals: Signals, noisy: Collection[int], costs: _Costs
) -> None:
    """Accumulates the cost of noise over the equations of the backward pass."""
    gradients = _gradients(plan)
    made = costs.cotangents
    heard = _made_of_noise(plan, made, noisy)
    for eqn in reversed(plan.program.backward):
        if not eqn.rule.adds_or_moves:
            for value in sorted(gradients.keys() & set(eqn.outputs)):
                costs.add_of_gradient(value)
        results = [v for v in eqn.outputs if v in costs]
        cotangents = [v for v in eqn.input_values if v in made]
        wanted = sorted(heard.intersection(cotangents))
        others = [v for v in eqn.input_values if v not in made]
        read = [] if eqn.selects else [v for v in others if v in noisy]
        if not results or not (wanted or read):
            continue
        if eqn.rule.is_product and others:
            # A product has two operands; the remaining inputs are row counts.
            cotangent, other, result = cotangents[0], others[0], results[0]
            count = float(eqn.num_products)
            if read:
                square = signals.mean_square(cotangent)
                costs.add_of_unit(other, result, count, square)
            if wanted:
                square = signals.mean_square(other)
                share = count / max(signals.size(cotangent), 1)
                costs.add_of_unit(cotangent, result, share, square)
            continue
        for value in wanted:
            _add_of_cotangent(value, eqn, cotangents, results, signals, costs)
        for value in read:
            varying = Weight(
                first=signals.variance(value), divisor=signals.mean_square(value)
            )
            for result in results:
                costs.add_of_share(value, result, varying)


def _add_of_cotangent(
    value: int,
    eqn: Equation,
    cotangents: Collection[int],
    results: Sequence[int],
    signals: Signals,
    costs: _Costs,
) -> None:
    """Adds the cost of a cotangent's noise that one equation passes on.

    Args:
        value: The cotangent.
        eqn: The equation that reads it.
        cotangents: All cotangents that the equation reads.
        results: The equation's results that have known costs.
        signals: The moments of all values.
        costs: The known costs.
    """
    if len(eqn.outputs) == 1:
        (result,) = results
        sizes = signals.size(value), signals.size(result)
        factor = signals.squared_factor(eqn)
        if factor is not None:
            costs.add_of_copy(value, result, factor * sizes[1] / max(sizes[0], 1))
            return
        adds = eqn.rule.adds and len(cotangents) > 1
        reduces = sizes[0] > sizes[1] and not eqn.rule.slices
        if adds or eqn.rule.joins or reduces:
            costs.add_of_unit(value, result)
            return
    for result in results:
        costs.add_of_share(value, result)


def _made_of_noise(
    plan: ProgramPlan, made: Collection[int], noisy: Collection[int]
) -> set[int]:
    """Returns the cotangents that the noise of restored values reaches."""
    found: set[int] = set()
    for eqn in plan.program.backward:
        reads_noise = not eqn.selects and any(
            v in noisy and v not in made for v in eqn.input_values
        )
        if reads_noise or not found.isdisjoint(eqn.input_values):
            found.update(eqn.outputs)
    return found


def _gradients(plan: ProgramPlan) -> dict[int, int]:
    """Returns the values that become gradients only by additions and moves, with these.

    Of several gradients it is the first.
    """
    gradients = {v: v for v in values_of(plan.program.gradients)}
    for eqn in reversed(plan.program.backward):
        if eqn.rule.adds_or_moves and eqn.outputs[0] in gradients:
            for value in eqn.input_values:
                gradients.setdefault(value, gradients[eqn.outputs[0]])
    return gradients


@final
class Probe:
    """Samples values as the backward pass computes them.

    New samples wait to pass through a barrier. Without it XLA would keep the values
    until the end, where the samples are used.
    """

    def __init__(
        self,
        plan: ProgramPlan,
        rounding_noise: Mapping[int, jax.Array],
        *,
        by_element: bool,
    ) -> None:
        self._rounding_noise = rounding_noise
        self._sensitivities = Sensitivities(plan, rounding_noise, by_element=by_element)
        self._wanted = dict.fromkeys(self._sensitivities.measured)
        # Per value, the samples of all of its chunks.
        self._samples: dict[int, Sequence[RowMeans]] = {}
        self._waiting: dict[int, RowMeans] = {}
        self._ranges: dict[int, jax.Array] = {}
        self._waiting_ranges: dict[int, jax.Array] = {}

    def see(self, values: Mapping[int, jax.Array]) -> None:
        """Samples the wanted values that have no sample yet."""
        self._waiting.update((v, sample_rows(values[v])) for v in self.wanted(values))

    def wanted(self, values: Iterable[int]) -> tuple[int, ...]:
        """Returns the wanted values that have no sample yet."""
        known = self._samples.keys() | self._waiting.keys()
        return tuple(v for v in values if v in self._wanted and v not in known)

    def see_parts(self, samples: Mapping[int, Sequence[RowMeans]]) -> None:
        """Adds samples of values that exist only in chunks."""
        self._samples.update(samples)

    def see_range(self, value: int, mean_square: jax.Array | None) -> None:
        """Adds the mean squared range of a residual's quantization groups, if given."""
        if mean_square is not None and value not in self._ranges:
            self._ranges[value] = self._waiting_ranges[value] = mean_square

    def waiting(self) -> list[jax.Array]:
        """Returns the samples that have to pass a barrier, and then `settle`."""
        return jax.tree.leaves((self._waiting, self._waiting_ranges))

    def settle(self, tied: Sequence[jax.Array]) -> None:
        """Takes the arrays that `waiting` returned, after a barrier."""
        structure = jax.tree.structure((self._waiting, self._waiting_ranges))
        samples, ranges = jax.tree.unflatten(structure, tied)
        self._samples.update((v, (sample,)) for v, sample in samples.items())
        self._ranges.update(ranges)
        self._waiting.clear()
        self._waiting_ranges.clear()

    def sensitivities(self, gradients: Sequence[jax.Array]) -> jax.Array:
        """Returns the sensitivities that `AbstractStore.note` records.

        Args:
            gradients: The gradients.

        Returns:
            float32 `[n + 1]`: the `Sensitivities` of each residual, times its mean
            squared group range if known; and the gradients' squared norm.
        """
        self.settle(self.waiting())
        real = [
            g for g in gradients if jnp.issubdtype(g.dtype, jnp.inexact) and g.size > 0
        ]
        moments = moments_of_rows([self._samples[v] for v in self._wanted])
        noise = _stack(self._rounding_noise.values())
        found = self._sensitivities(moments, noise)
        ranges = _stack(self._ranges.get(v, 1.0) for v in self._rounding_noise)
        return jnp.concatenate([found * ranges, sample_energy(real)[None]])


def _stack(numbers: Iterable[Any]) -> Array:
    return jnp.stack([jnp.asarray(number, jnp.float32) for number in numbers])
