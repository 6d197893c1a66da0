"""Second moments of forward values and adjoints.

They are estimated from some elements, and measured on as few values as possible.

On a GPU one kernel per sampled value computes sums over the rows of the sample. The
rest is a few numbers per row, computed for all values together.

Importances are sums of such moments, each times a weight. They are computed as a few
array operations for all of them: XLA:CPU compiles only about a hundred scalar
operations per second, and arrays take as long to compile for many sums as for few.
"""

import collections
import functools
import math
from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple, final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dafjax import config
from dafjax._numbers import Array
from dafjax._passes.algebra import finishing_equations
from dafjax._plan.plan import ProgramPlan
from dafjax._sampling import num_rows, sample_elements, with_auto_axes
from dafjax._trace.equation import Constant, Equation


# The index of 1 among the numbers that weights are made of, and among the sums.
ONE = 0


class Moments(NamedTuple):
    """The second moments of a value's elements.

    Attributes:
        mean_square: The mean of the squares.
        variance: The mean of the squares minus the square of the mean.
    """

    mean_square: Any
    variance: Any


class RowMeans(NamedTuple):
    """Means over each row of a sample, float32 `[rows]`.

    Attributes:
        value: Mean of the elements.
        difference: Mean of the differences from the row's first element. Unlike the
            squares of large values, the squares of differences do not cancel, as long
            as rows are short.
        squared: Mean of the squared differences.
    """

    value: Array
    difference: Array
    squared: Array


def sample_rows(x: Array, num_parts: int = 1) -> RowMeans:
    """Samples a value, or one of its chunks.

    Args:
        x: The value or chunk, of any shape and a numeric dtype. For complex numbers the
            absolute values are sampled.
        num_parts: Number of chunks that share the sample equally.
    """
    if x.size == 0:
        return RowMeans(*jnp.zeros((3, 1), jnp.float32))
    most = max(1, config.SAMPLED_ELEMENTS // num_parts)
    return with_auto_axes(lambda x: _means_of_rows(x, most), x)


# Traced once for all values of one shape.
@functools.partial(jax.jit, static_argnames="most")
def _means_of_rows(x: Array, most: int) -> RowMeans:
    sample = _real(sample_elements(x, most, config.LONGEST_ROW))
    (count,) = sample.shape
    rows = num_rows(count, config.LONGEST_ROW)
    length = -(-count // rows)
    # Dividing after the sums would need another kernel.
    share: Any = 1 / length
    # The last row lacks fewer elements than there are rows, so all rows get the same
    # weight.
    missing = rows * length - count
    if missing:
        sample = lax.pad(sample, jnp.float32(0), [(0, missing, 0)])
        place = lax.iota(jnp.int32, rows * length)
        of_last = jnp.where(place < count, 1 / (length - missing), 0)
        share = jnp.where(place < (rows - 1) * length, share, of_last)
        share = share.reshape(rows, length).astype(jnp.float32)
    sample = sample.reshape(rows, length)
    differences = sample - sample[:, :1]
    weighted = share * differences
    terms = (share * sample, weighted, weighted * differences)
    zeros = 3 * (jnp.float32(0),)
    return RowMeans(*lax.reduce(terms, zeros, _add, (1,)))


def _add(xs: Sequence[Array], ys: Sequence[Array]) -> list[Array]:
    return list(map(jnp.add, xs, ys))


def moments_of_rows(samples: Sequence[Sequence[RowMeans]]) -> Moments:
    """Returns the moments of values, float32 `[values]`.

    Args:
        samples: The `sample_rows` of each chunk of each value.
    """
    if not samples:
        return Moments(*jnp.zeros((2, 0), jnp.float32))
    alike: dict[int, list[int]] = collections.defaultdict(list)
    for number, parts in enumerate(samples):
        alike[sum(part.value.size for part in parts)].append(number)
    found = [
        _moments_of_parts(
            [part for number in numbers for part in samples[number]], len(numbers)
        )
        for numbers in alike.values()
    ]
    order = np.argsort(np.concatenate(list(alike.values())))
    moments = Moments(*(jnp.concatenate(xs)[order] for xs in zip(*found, strict=True)))
    # Without the barrier XLA:GPU spends minutes choosing kernels to recompute them in.
    return lax.optimization_barrier(moments)


def _moments_of_parts(parts: Sequence[RowMeans], num_values: int) -> Moments:
    """Returns moments, `[values]`, of values with equal row counts, chunk by chunk."""
    value, difference, squared = (
        _joined(xs, num_values) for xs in zip(*parts, strict=True)
    )
    variance = jnp.maximum(squared - difference**2, 0)
    mean = jnp.mean(value, axis=1, keepdims=True)
    return Moments(
        jnp.mean(variance + value**2, axis=1),
        jnp.mean(variance + (value - mean) ** 2, axis=1),
    )


def _joined(parts: Sequence[Array], num_values: int) -> Array:
    if len(parts) == 1:
        return parts[0][None]
    return jnp.concatenate(parts).reshape(num_values, -1)


def sample_energy(arrays: Sequence[Array]) -> Array:
    """Returns the sum of the squares of all elements, estimated from samples.

    Args:
        arrays: Nonempty arrays of any shapes. For complex numbers the absolute values
            count.
    """
    if not arrays:
        return jnp.float32(0)
    measure = functools.partial(_energies_of_rows, most=config.SAMPLED_ELEMENTS)
    rows = [with_auto_axes(measure, x) for x in arrays]
    return jnp.sum(jnp.concatenate(rows))


@functools.partial(jax.jit, static_argnames="most")
def _energies_of_rows(x: Array, most: int) -> Array:
    """Returns partial sums of the squares of all elements, estimated from a sample."""
    sample = _real(sample_elements(x, most, config.LONGEST_ROW))
    (count,) = sample.shape
    rows = num_rows(count, config.LONGEST_ROW)
    squares = x.size / count * sample * sample
    missing = -count % rows
    if missing:
        squares = lax.pad(squares, jnp.float32(0), [(0, missing, 0)])
    return jnp.sum(squares.reshape(rows, -1), axis=1)


def _real(sample: Array) -> Array:
    """Returns a float32 array, for complex numbers their absolute values."""
    if jnp.iscomplexobj(sample):
        sample = jnp.abs(sample)
    return sample.astype(jnp.float32)


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


class Weight(NamedTuple):
    """A product, of which all factors but one are known later.

    Attributes:
        factor: The known factor.
        first: The index of another factor among the numbers known later.
        second: The index of another factor.
        divisor: The index of what the product is divided by. A product of 0 may be
            divided by 0, which gives 0.
    """

    factor: float = 1.0
    first: int = ONE
    second: int = ONE
    divisor: int = ONE

    @staticmethod
    def compute(weights: "Iterable[Weight]", numbers: Array) -> Array:
        """Returns weights, float32 `[weights]`."""
        factor, first, second, divisor = map(np.array, zip(*weights, strict=True))
        product = as_float32(factor) * numbers[first] * numbers[second]
        return product / (numbers[divisor] + _TINY)


class _Term(NamedTuple):
    # A sum, and the weights that it is multiplied with, one after another.
    of: int
    weights: tuple[Weight, ...]


@final
class WeightedSums:
    """Sums of earlier sums, each times a weight. The first sum is 1.

    Example:
        >>> sums = WeightedSums()
        >>> double, both = sums.new(), sums.new()
        >>> sums.add(double, ONE, Weight(2.0))
        >>> sums.add(both, double, Weight(1.0, first=1))
        >>> sums.add(both, ONE, Weight(5.0, divisor=1))
        >>> print(sums.compute(jnp.asarray([1.0, 10.0]), [double, both]))
        [ 2.  20.5]
    """

    def __init__(self) -> None:
        self._terms: list[list[_Term]] = [[]]
        # How many steps after the first sum each sum is known.
        self._steps = [0]

    def new(self) -> int:
        """Returns a new sum, without terms."""
        self._terms.append([])
        self._steps.append(0)
        return len(self._terms) - 1

    def add(self, to: int, of: int, weight: Weight) -> None:
        """Adds a term to a sum: `weight` times the sum `of`, which must be complete."""
        terms = self._terms[of]
        short = all(len(term.weights) < _MOST_WEIGHTS for term in terms)
        if not (short and 0 < len(terms) <= _FEW_TERMS):
            terms = [_Term(of, ())]
        # A sum of few terms needs no step of its own: its terms become terms of others.
        for term in terms:
            self._append(to, _Term(term.of, (*term.weights, weight)))

    def _append(self, to: int, term: _Term) -> None:
        if len(self._terms[to]) == _MOST_TERMS:
            part = self.new()
            self._terms[part], self._steps[part] = self._terms[to], self._steps[to]
            self._terms[to] = []
            self._append(to, _Term(part, ()))
        self._terms[to].append(term)
        self._steps[to] = max(self._steps[to], self._steps[term.of] + 1)

    def compute(self, numbers: Array, wanted: Iterable[int]) -> Array:
        """Computes sums.

        Args:
            numbers: float32 `[numbers]`: what weights are made of, the first 1.
            wanted: The sums to compute.

        Returns:
            float32 `[wanted]`.
        """
        wanted = tuple(wanted)
        steps = self._needed_by_step({ONE, *wanted})
        # All steps have as many rows as the one that needs most.
        width = max(map(len, steps))
        rows = {
            number: step * width + row
            for step, of_step in enumerate(steps)
            for row, number in enumerate(of_step)
        }
        # Padding: a first term of weight 0, and weights of 1.
        terms = [_Term(ONE, (Weight(0.0),))]
        of_row = np.zeros((len(steps) * width, _MOST_TERMS), np.int32)
        for number, row in rows.items():
            count = len(self._terms[number])
            of_row[row, :count] = np.arange(len(terms), len(terms) + count)
            terms += self._terms[number]
        indices = {Weight(): 0}
        length = max(len(term.weights) for term in terms)
        paths = np.zeros((len(terms), 1 << (length - 1).bit_length()), np.int32)
        for path, term in zip(paths, terms, strict=True):
            for place, weight in enumerate(term.weights):
                path[place] = indices.setdefault(weight, len(indices))
        of_row = of_row.reshape(len(steps), width, _MOST_TERMS)
        sources = np.array([rows[term.of] for term in terms], np.int32)[of_row]
        weights = Weight.compute(indices, numbers)[paths]
        # Neighbors first: other products of weights may be too large or too small.
        while weights.shape[1] > 1:
            weights = weights[:, ::2] * weights[:, 1::2]
        weights = weights[:, 0][of_row]

        def add_up(step: Array, sums: Array) -> Array:
            terms = weights[step] * sums.reshape(-1)[jnp.asarray(sources)[step]]
            return lax.dynamic_update_index_in_dim(sums, jnp.sum(terms, 1), step, 0)

        start = jnp.zeros_like(weights[:, :, 0]).at[0, 0].set(1)
        sums = lax.fori_loop(1, len(steps), add_up, start).reshape(-1)
        return sums[np.array([rows[number] for number in wanted], np.int32)]

    def _needed_by_step(self, wanted: Collection[int]) -> list[list[int]]:
        """Returns what some sums are made of, by the step that computes it."""
        needed = set(wanted)
        for number in sorted(range(len(self._terms)), key=lambda v: -self._steps[v]):
            if number in needed:
                needed.update(term.of for term in self._terms[number])
        by_step: list[list[int]] = [[]]
        for number in sorted(needed, key=lambda number: (self._steps[number], number)):
            if self._steps[number] == len(by_step):
                by_step.append([])
            by_step[-1].append(number)
        return by_step


def as_float32(numbers: np.ndarray) -> Array:
    """Converts numbers; too large ones become infinite."""
    with np.errstate(over="ignore"):
        return jnp.asarray(numbers.astype(np.float32))


# With this in the divisor, 0 / 0 gives 0.
_TINY = 1e-30

# A sum of as many terms takes no step. With more, there would be more terms in all.
_FEW_TERMS = 3

# All sums get as much room in arrays, so those of more terms have parts, and products
# of more weights take more steps.
_MOST_TERMS = 6
_MOST_WEIGHTS = 16
