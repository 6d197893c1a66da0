"""Statistics hook: samples backward-pass values, and derives sensitivities."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, final

import jax
import jax.numpy as jnp

from dafjax._plan.plan import ProgramPlan
from dafjax._schedule.importance import Sensitivities
from dafjax._schedule.moments import (
    RowMeans,
    moments_of_rows,
    sample_energy,
    sample_rows,
)
from dafjax._typing import Array


@final
class Probe:
    """Samples values as the backward pass computes them.

    New samples wait to pass through a barrier. Without it XLA would keep the values
    until the end, where the samples are used.
    """

    def __init__(
        self, plan: ProgramPlan, rounding_noise: Mapping[int, jax.Array]
    ) -> None:
        self._rounding_noise = rounding_noise
        self._sensitivities = Sensitivities(plan, rounding_noise)
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
