"""How others give bits to residuals, written anew from their papers: references.

All of them have the model of `dafjax.allocation`, the variance `sum C / (2^b - 1)^2`.
They differ in where `C` comes from, and in how the sum is made small.
"""

import heapq
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import scipy.optimize

from benchmarks.importance import Gradient
from dafjax._plan.plan import ProgramPlan
from dafjax._trace.equation import values_of
from dafjax.allocation import LADDER, distortion
from dafjax.codecs import Affine


def actnn_sensitivities(gradient: Gradient) -> dict[int, float]:
    """Returns ActNN's sensitivities, of the residuals that layers with weights read.

    Chen et al. 2021, section 4.2. For a layer that multiplies `x` with weights,

        C = K / 4  mean(R^2)  |dL/dy|^2,

    with `R` the ranges of the blocks of `x`, `dL/dy` the cotangent of the layer's
    result, and `K` the products in an element of that result: the area of a kernel
    times the channels that it reads. It is an upper bound of the variance of the
    gradient of these weights alone. Ranges are those of what the layer reads; it is
    restored from several residuals here, of which the last made has the sensitivity.

    Args:
        gradient: What is differentiated, and what is kept for it.

    Returns:
        Sensitivities by residual; none for those that no layer with weights reads.
    """
    plan = gradient.plan
    backward = plan.program.backward
    made = set(plan.program.cotangents).union(*(e.outputs for e in backward))
    weights = _gradients_of_weights(plan, made)
    sources = {site.value for site in gradient.sites}

    def measure(kept: Mapping[int, jax.Array]) -> dict[int, jax.Array]:
        env = gradient.values(kept)
        found: dict[int, jax.Array] = {}
        for eqn in backward:
            cotangents = [v for v in eqn.input_values if v in made]
            others = [v for v in eqn.input_values if v not in made]
            if not (eqn.rule.is_product and cotangents and others):
                continue
            site = _last_source(others[0], plan, sources)
            if eqn.outputs[0] not in weights or site is None:
                continue
            x, above = env[others[0]], env[cotangents[0]]
            per_result = eqn.num_products / above.size
            ranges = Affine(bits=1).encode(x).scale.astype(jnp.float32)
            energy = jnp.sum(above**2)
            value = per_result / 4 * jnp.mean(ranges**2) * energy
            found[site] = found.get(site, jnp.zeros(())) + value
        return found

    return {site: float(c) for site, c in jax.jit(measure)(gradient.kept).items()}


def _gradients_of_weights(plan: ProgramPlan, made: set[int]) -> set[int]:
    """Returns the results of products that become gradients as they are."""
    gradients = set(values_of(plan.program.gradients))
    for eqn in reversed(plan.program.backward):
        if eqn.outputs[0] in gradients and eqn.rule.adds_or_moves:
            gradients.update(v for v in eqn.input_values if v in made)
    return gradients


def _last_source(value: int, plan: ProgramPlan, sources: set[int]) -> int | None:
    """Returns the residual made last of those that a value is restored from."""
    found, seen, stack = [], {value}, [value]
    while stack:
        value = stack.pop()
        if value in sources:
            found.append(value)
        elif value in plan.recomputed:
            new = set(plan.recomputed[value].input_values) - seen
            seen |= new
            stack.extend(new)
    return max(found, default=None)


def gact_sensitivities(
    gradient: Callable[[Sequence[int]], Any],
    squared_distance: Callable[[Any, Any], float],
    num_sites: int,
) -> list[float]:
    """Returns GACT's sensitivities (Liu et al. 2022), from 2 n + 1 gradients.

    With one residual in 1 bit, two draws `g0` and `g1` of the gradient, and `g2` with
    all residuals in 8 bits,

        C = max(|g0 - g1|^2, 2 max(|g0 - g2|^2, |g1 - g2|^2)), at most 1e10.

    Args:
        gradient: Draws a gradient with the bits of each site.
        squared_distance: Of two gradients.
        num_sites: How many sites there are.
    """
    exact = gradient([8] * num_sites)
    sensitivities = []
    for site in range(num_sites):
        bits = [1 if number == site else 8 for number in range(num_sites)]
        first, second = gradient(bits), gradient(bits)
        found = max(
            squared_distance(first, second),
            2 * max(squared_distance(first, exact), squared_distance(second, exact)),
        )
        sensitivities.append(found if found <= _CAP else _CAP)
    return sensitivities


_CAP = 1e10


def descend(
    costs: Sequence[float], sizes: Sequence[int], budget: int
) -> tuple[int, ...]:
    """Takes bits away, those first that cost least for what they free.

    ActNN's and GACT's solver: a heap of steps down the ladder from 8 bits, until the
    budget is met.

    Args:
        costs: `C` of each site.
        sizes: Elements of each site.
        budget: Bits of all codes.
    """
    bits = [LADDER[-1]] * len(sizes)
    taken = sum(size * LADDER[-1] for size in sizes)

    def step(site: int) -> tuple[float, int]:
        lower = LADDER[LADDER.index(bits[site]) - 1]
        lost = costs[site] * (distortion(lower) - distortion(bits[site]))
        return lost / (sizes[site] * (bits[site] - lower)), site

    heap = [step(site) for site in range(len(sizes))]
    heapq.heapify(heap)
    while taken > budget and heap:
        _, site = heapq.heappop(heap)
        lower = LADDER[LADDER.index(bits[site]) - 1]
        taken -= sizes[site] * (bits[site] - lower)
        bits[site] = lower
        if lower > LADDER[0]:
            heapq.heappush(heap, step(site))
    return tuple(bits)


def as_layers_before(
    sensitivities: Sequence[float | None], sizes: Sequence[int], budget: int
) -> tuple[int, ...]:
    """Allocates as ActNN does where some residuals have no sensitivity.

    They get the bits of the residual before, as ActNN's batch norms those of the
    convolution before; those at the start get the bits of the first that has one.

    Args:
        sensitivities: `C` of each site, or None.
        sizes: Elements of each site.
        budget: Bits of all codes.
    """
    groups: list[int] = []
    for value in sensitivities:
        first = not groups
        groups.append(0 if first else groups[-1] + (value is not None))
    # A group at the start without any sensitivity belongs to the next one.
    if sensitivities and sensitivities[0] is None:
        groups = [max(0, group - 1) for group in groups]
    count = groups[-1] + 1 if groups else 0
    costs, elements = [0.0] * count, [0] * count
    for group, value, size in zip(groups, sensitivities, sizes, strict=True):
        costs[group] += value or 0.0
        elements[group] += size
    bits = descend(costs, elements, budget)
    return tuple(bits[group] for group in groups)


def uniform(sizes: Sequence[int], budget: int) -> tuple[int, ...]:
    """Gives all sites the same bits; what is left over goes to the first of them."""
    total = sum(sizes)
    floor = max((b for b in LADDER if b * total <= budget), default=LADDER[0])
    bits = [floor] * len(sizes)
    left = budget - floor * total
    higher = next((b for b in LADDER if b > floor), floor)
    for site, size in enumerate(sizes):
        cost = size * (higher - floor)
        if cost <= left:
            bits[site] = higher
            left -= cost
    return tuple(bits)


def optimum(
    costs: Sequence[float], sizes: Sequence[int], budget: int
) -> tuple[int, ...]:
    """Returns the bits with the least `sum C / (2^b - 1)^2`: an integer program.

    Args:
        costs: `C` of each site.
        sizes: Elements of each site.
        budget: Bits of all codes.

    Raises:
        RuntimeError: The program has no solution: not even 1 bit fits.
    """
    scale = max(max(costs, default=0.0), math.ulp(0.0))
    choices = list(itertools.product(range(len(costs)), LADDER))
    objective = [costs[site] / scale * distortion(b) for site, b in choices]
    one_each = np.zeros((len(costs), len(choices)))
    for number, (site, _) in enumerate(choices):
        one_each[site, number] = 1
    total = sum(sizes)
    taken = np.array([[sizes[site] * b / total for site, b in choices]])
    solution = scipy.optimize.milp(
        objective,
        integrality=np.ones(len(choices)),
        bounds=scipy.optimize.Bounds(0, 1),
        constraints=[
            scipy.optimize.LinearConstraint(one_each, 1, 1),
            scipy.optimize.LinearConstraint(taken, -np.inf, budget / total),
        ],
        options={"mip_rel_gap": 1e-9},
    )
    if solution.x is None:
        raise RuntimeError(f"`optimum(budget={budget})`: {solution.message}")
    bits = [0] * len(costs)
    for (site, b), chosen in zip(choices, solution.x, strict=True):
        if chosen > 0.5:
            bits[site] = b
    return tuple(bits)
