"""Samples of what the backward pass computes, and the importances that they tell of."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, final

import jax
import jax.numpy as jnp

from dafjax._plan.plan import ProgramPlan
from dafjax._schedule.importance import importances
from dafjax._schedule.moments import (
    Moments,
    RowMeans,
    moments_of_rows,
    sample_energy,
    sample_rows,
)
from dafjax._schedule.tape import Tape
from dafjax._typing import Array


@final
class Probe:
    """Takes samples of values as the backward pass computes them.

    What has been sampled waits to go through a tie: else XLA would keep the values
    until the end, where the samples are used.
    """

    def __init__(
        self, plan: ProgramPlan, rounding_noise: Mapping[int, jax.Array]
    ) -> None:
        self._rounding_noise = rounding_noise
        self._tape = Tape()
        noise = {value: self._tape.given() for value in rounding_noise}
        # In the order in which their moments come behind the noise.
        self._wanted: dict[int, Moments] = {}
        self._importances = importances(plan, self._ask, noise)
        # Of each value, of all its parts.
        self._samples: dict[int, Sequence[RowMeans]] = {}
        self._waiting: dict[int, RowMeans] = {}
        self._ranges: dict[int, jax.Array] = {}
        self._waiting_ranges: dict[int, jax.Array] = {}

    def _ask(self, value: int) -> Moments:
        self._wanted[value] = Moments(self._tape.given(), self._tape.given())
        return self._wanted[value]

    def see(self, values: Mapping[int, jax.Array]) -> None:
        """Samples those of the values that are wanted and new."""
        self._waiting.update((v, sample_rows(values[v])) for v in self.wanted(values))

    def wanted(self, values: Iterable[int]) -> tuple[int, ...]:
        """Returns those of the values that are wanted and new."""
        known = self._samples.keys() | self._waiting.keys()
        return tuple(v for v in values if v in self._wanted and v not in known)

    def see_parts(self, samples: Mapping[int, Sequence[RowMeans]]) -> None:
        """Takes samples of values of which there are only parts."""
        self._samples.update(samples)

    def see_range(self, value: int, mean_square: jax.Array | None) -> None:
        """Takes the mean of the squared ranges of a residual's blocks, if given."""
        if mean_square is not None and value not in self._ranges:
            self._ranges[value] = self._waiting_ranges[value] = mean_square

    def waiting(self) -> list[jax.Array]:
        """Returns samples that have not been tied; `settle` takes their ties."""
        return jax.tree.leaves((self._waiting, self._waiting_ranges))

    def settle(self, tied: Sequence[jax.Array]) -> None:
        """Takes what `waiting` returned, after a tie."""
        structure = jax.tree.structure((self._waiting, self._waiting_ranges))
        samples, ranges = jax.tree.unflatten(structure, tied)
        self._samples.update((v, (sample,)) for v, sample in samples.items())
        self._ranges.update(ranges)
        self._waiting.clear()
        self._waiting_ranges.clear()

    def sensitivities(self, gradients: Sequence[jax.Array]) -> jax.Array:
        """Returns what a store is told.

        Args:
            gradients: The gradients.

        Returns:
            float32 `[n + 1]`: `importances` of each residual, times the squared range
            if it was seen; then the gradients' squared norm.
        """
        self.settle(self.waiting())
        real = [
            g for g in gradients if jnp.issubdtype(g.dtype, jnp.inexact) and g.size > 0
        ]
        moments = moments_of_rows([self._samples[v] for v in self._wanted])
        noise = _stack(self._rounding_noise.values())
        given = jnp.concatenate([noise, jnp.stack(moments, axis=1).reshape(-1)])
        found = self._tape.evaluate(given, self._importances.values())
        ranges = _stack(self._ranges.get(v, 1.0) for v in self._importances)
        return jnp.concatenate([found * ranges, sample_energy(real)[None]])


def _stack(numbers: Iterable[Any]) -> Array:
    return jnp.stack([jnp.asarray(number, jnp.float32) for number in numbers])
