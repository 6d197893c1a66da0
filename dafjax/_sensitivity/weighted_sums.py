"""Sums of earlier sums, each times a weight: many at once, as a few array operations.

XLA:CPU compiles only about a hundred scalar operations per second. Arrays take as long
to compile for many sums as for few.
"""

from collections.abc import Collection, Iterable
from typing import NamedTuple, final

import jax.numpy as jnp
import numpy as np
from jax import lax

from dafjax._numbers import Array


# The index of 1 among the numbers that weights are made of, and among the sums.
ONE = 0


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
