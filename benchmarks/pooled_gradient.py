"""The gradient of a loss with residuals in a page pool, compiled once for all bits."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np

import dafjax
from dafjax._bits import Use
from dafjax._plan.analysis import find_uses
from dafjax._plan.plan import ProgramPlan, record_plans, site_names
from dafjax.codecs import Affine
from dafjax.stores import PagePool


ArrayTree = Any


@final
@dataclasses.dataclass(frozen=True)
class PooledSite:
    """A residual of the loss that waits in the pool.

    Attributes:
        name: As the pool knows it.
        num_elements: How many elements it has.
        use: How the gradient depends on it.
    """

    name: str
    num_elements: int
    use: Use


@final
@dataclasses.dataclass(frozen=True)
class Deviation:
    """How gradients with noise deviate from the exact one, relative to its norm.

    Attributes:
        squared_error: `|g - g0|^2 / |g0|^2`, the mean of the draws.
        standard_error: Of that.
        squared_bias: `|E[g] - g0|^2 / |g0|^2`, free of the noise's own contribution, so
            that it may be negative where there is none.
    """

    squared_error: float
    standard_error: float
    squared_bias: float


@final
class PooledGradient:
    """`gradient(*arguments) -> ((loss, aux), gradient)`, residuals in a pool.

    The target for bits, bits that are set and the budget are the pool's, at any time.
    """

    def __init__(
        self,
        loss: Callable[..., Any],
        pool: PagePool,
        *,
        bits: Any = dafjax.AverageBits(2),  # noqa: B008  (frozen)
    ) -> None:
        """Wraps a loss with an auxiliary output; it is compiled by the first call.

        Args:
            loss: The function.
            pool: Where residuals wait.
            bits: Of `remat_compress`; with a target the program measures importances.
        """
        self._pool = pool
        self._seed = 0
        self.num_traces = 0
        self._plans: Mapping[str, ProgramPlan] = {}

        def gradient(seed: jax.Array, params: ArrayTree, *rest: ArrayTree) -> Any:
            self.num_traces += 1
            wrapped = dafjax.remat_compress(loss, bits=bits, store=pool, seed=seed)
            return jax.value_and_grad(wrapped, has_aux=True)(params, *rest)

        self._gradient = jax.jit(gradient)

    def __call__(self, *arguments: ArrayTree) -> Any:
        """Computes the gradient, with noise of its own in every call."""
        self._seed += 1
        if self._plans:
            return self._gradient(np.uint32(self._seed), *arguments)
        with record_plans() as recorder:
            output = self._gradient(np.uint32(self._seed), *arguments)
        self._plans = recorder.plans
        return output

    @property
    def sites(self) -> list[PooledSite]:
        """What waits in the pool; known after the first call."""
        (plan,) = {plan.fingerprint: plan for plan in self._plans.values()}.values()
        inexact = [k.value for k in plan.kept if isinstance(k.codec, Affine)]
        uses = find_uses(plan.program, plan.recomputed, inexact)
        return [
            PooledSite(name, kept.like.size, uses[kept.value])
            for kept, name in zip(plan.kept, site_names(plan), strict=True)
            if isinstance(kept.codec, Affine)
        ]

    def set_bits(self, bits: Sequence[int]) -> None:
        """Sets the bits of all sites, in order, from the next call on."""
        for site, number in zip(self.sites, bits, strict=True):
            self._pool.set_bits(site.name, number)

    def measured_importances(self, arguments: Sequence[Any], calls: int) -> list[float]:
        """Returns what backward passes tell of the sites, in order.

        Args:
            arguments: Of the loss.
            calls: How many, with all codes in 8 bits; the pool averages them.
        """
        self.set_bits([8] * len(self.sites))
        # What an execution measured is known when the next one starts.
        for _ in range(calls + 1):
            jax.block_until_ready(self(*arguments))
        known = self._pool.stats().sites
        found = [known[site.name].importance for site in self.sites]
        assert all(importance is not None for importance in found)
        return [float(importance or 0.0) for importance in found]

    def deviation(
        self, arguments: Sequence[Any], exact: ArrayTree, draws: int
    ) -> Deviation:
        """Compares gradients with the bits that hold now to the exact one.

        Args:
            arguments: Of the loss.
            exact: Its exact gradient.
            draws: Gradients; at least 2.
        """
        total, squares = None, []
        for _ in range(draws):
            _, gradient = self(*arguments)
            total, square = _add(total, gradient, exact)
            squares.append(float(square))
        norm = float(squared_norm(exact))
        # |sum d|^2 has, besides n^2 of the bias, each draw's own square once.
        crossed = float(squared_norm(total)) - sum(squares)
        relative = np.array(squares) / norm
        return Deviation(
            float(np.mean(relative)),
            float(np.std(relative, ddof=1)) / draws**0.5,
            crossed / (draws * (draws - 1)) / norm,
        )


@jax.jit
def squared_norm(tree: ArrayTree) -> jax.Array:
    """Returns the sum of the squares of all leaves."""
    return sum((jnp.sum(x**2) for x in jax.tree.leaves(tree)), jnp.zeros(()))


@jax.jit
def squared_error(gradient: ArrayTree, exact: ArrayTree) -> jax.Array:
    """Returns `|g - g0|^2 / |g0|^2`."""
    difference = jax.tree.map(jnp.subtract, gradient, exact)
    return squared_norm(difference) / squared_norm(exact)


@jax.jit
def _add(total: ArrayTree | None, gradient: ArrayTree, exact: ArrayTree) -> Any:
    difference = jax.tree.map(jnp.subtract, gradient, exact)
    if total is None:
        return difference, squared_norm(difference)
    return jax.tree.map(jnp.add, total, difference), squared_norm(difference)
