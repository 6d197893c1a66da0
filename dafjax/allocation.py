"""Allocates bits to residuals from their sensitivities and sizes, within a budget.

Rounding to `b` bits moves a value by about the range of its quantization group over
`2^b - 1`. To first order, the effects of different residuals on the gradient are
independent. So

    variance of the gradient = sum over sites s of  C_s / (2^{b_s} - 1)^2

where the sensitivity `C_s` (`importance` in the code) is the variance if site `s` alone
has 1 bit (ActNN, Chen et al. 2021, section 4.2). A site is a place in the model that
residuals come from; its name is the residual id.

The task is to minimize the variance within a budget of bits. At the optimum all sites
pay the same price for a bit, the Lagrange multiplier: a site takes a step to more bits
if the variance saved per bit is above the price. Each further step of a site saves less
per bit than the one before. So the steps of all sites, sorted by variance saved per
bit, keep the order of steps within a site. They are taken in this order until the
budget ends, which sets the price. The rest of the budget goes to later steps that fit.
With few and large sites this can be worse than equal bits for all. So the search runs
from every number of bits that all sites can have, and the best result counts.
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import final

from dafjax._numbers import as_count, as_real


# The bit widths whose codes are prefixes of each other.
LADDER = (1, 2, 4, 8)


@final
@dataclasses.dataclass(frozen=True)
class Site:
    """The residuals of one place in the model, as bit allocation sees them.

    Attributes:
        num_elements: Number of elements of all residuals of the site.
        importance: The sensitivity of the site: the variance of the gradient if only
            this site has 1 bit. For `allocate` only ratios between sites matter.
        minimum: The fewest bits that the site may get.
        maximum: The most bits that the site may get.

    Raises:
        TypeError: An attribute has a wrong type.
        ValueError: `num_elements` is negative, `importance` is negative or not finite,
            or a bound is not 1, 2, 4 or 8.
    """

    num_elements: int
    importance: float
    minimum: int = 1
    maximum: int = 8

    def __post_init__(self) -> None:
        num_elements = as_count("Site(num_elements=...)", self.num_elements, least=0)
        object.__setattr__(self, "num_elements", num_elements)
        importance = as_real("Site(importance=...)", self.importance, lowest=0)
        object.__setattr__(self, "importance", importance)
        for name in ("minimum", "maximum"):
            bits = as_count(f"Site({name}=...)", getattr(self, name), least=1, most=8)
            if bits not in LADDER:
                raise ValueError(
                    f"`Site({name}=...)` must be one of {LADDER}, but got {bits}."
                )
            object.__setattr__(self, name, bits)
        if self.minimum > self.maximum:
            raise ValueError(
                f"`Site(minimum={self.minimum}, maximum={self.maximum})`: `minimum` "
                "must not be above `maximum`."
            )


def distortion(bits: int) -> float:
    """Returns `1 / (2^bits - 1)^2`, the variance relative to the variance at 1 bit."""
    return 1.0 / (2**bits - 1) ** 2


def expected_variance(sites: Sequence[Site], bits: Sequence[int]) -> float:
    """Returns the variance of the gradient, in the unit of the sensitivities.

    Args:
        sites: The sites.
        bits: Bits of each site.
    """
    # Sum in order, so that the compiled library computes exactly the same sum.
    total = 0.0
    for site, b in zip(sites, bits, strict=True):
        total += site.importance * distortion(b)
    return total


def num_bits(sites: Sequence[Site], bits: Sequence[int]) -> int:
    """Returns the total bits of all codes, without scales and minima."""
    return sum(s.num_elements * b for s, b in zip(sites, bits, strict=True))


def allocate(sites: Sequence[Site], budget: int) -> tuple[int, ...]:
    """Returns bits with the least expected variance within a budget.

    Args:
        sites: The sites.
        budget: The most bits of all codes together, without scales and minima.

    Returns:
        The bits of each site: 1, 2, 4 or 8. If not all minima fit, the sites that save
        the most variance per bit get their minimum first. Each site has at least 1 bit,
        even if the budget is smaller.

    Example:
        >>> from dafjax.allocation import Site, allocate
        >>> allocate([Site(1000, 1.0), Site(1000, 500.0)], budget=5000)
        (1, 4)
    """
    as_real("allocate(budget=...)", budget, lowest=-math.inf, highest=math.inf)
    best = _raised(sites, _lowest(sites, budget), budget)
    for floor in LADDER[1:]:
        bits = [min(max(floor, site.minimum), site.maximum) for site in sites]
        if num_bits(sites, bits) <= budget:
            raised = _raised(sites, bits, budget)
            best = min(best, raised, key=lambda bits: expected_variance(sites, bits))
    return best


def _raised(sites: Sequence[Site], bits: list[int], budget: int) -> tuple[int, ...]:
    """Takes steps to more bits while they fit, the largest saving per bit first."""
    left = budget - num_bits(sites, bits)
    for step in _steps(sites, bits):
        cost = sites[step.site].num_elements * (step.after - step.before)
        # A step that did not fit excludes the later steps of the same site.
        if bits[step.site] == step.before and cost <= left:
            bits[step.site] = step.after
            left -= cost
    return tuple(bits)


def allocate_to_variance(sites: Sequence[Site], ceiling: float) -> tuple[int, ...]:
    """Returns few bits whose expected variance is not above a ceiling.

    This is an error bound in place of a budget, as in AC-GC (Evans and Aamodt 2021).

    Args:
        sites: The sites.
        ceiling: The most variance, in the unit of the sensitivities.

    Returns:
        The bits of each site; the maxima if even these do not meet the ceiling.

    Example:
        >>> from dafjax.allocation import Site, allocate_to_variance
        >>> allocate_to_variance([Site(1000, 1.0), Site(1000, 500.0)], ceiling=3.5)
        (1, 4)
    """
    as_real(
        "allocate_to_variance(ceiling=...)", ceiling, lowest=-math.inf, highest=math.inf
    )
    bits = [site.minimum for site in sites]
    variance = expected_variance(sites, bits)
    for step in _steps(sites, bits):
        if variance <= ceiling:
            break
        bits[step.site] = step.after
        variance = expected_variance(sites, bits)
    return tuple(bits)


@final
@dataclasses.dataclass(frozen=True)
class _Step:
    """A step of one site from one number of bits to the next.

    Attributes:
        site: The index of the site.
        before: Bits before the step.
        after: Bits after the step.
        saved: Variance that the step saves per bit of budget.
    """

    site: int
    before: int
    after: int
    saved: float


def _steps(sites: Sequence[Site], bits: Sequence[int]) -> list[_Step]:
    """Returns the steps to more bits from `bits`, the largest saving per bit first."""
    steps = []
    for number, (site, lowest) in enumerate(zip(sites, bits, strict=True)):
        for before, after in itertools.pairwise(LADDER):
            if lowest <= before and after <= site.maximum and site.num_elements > 0:
                less = distortion(before) - distortion(after)
                cost = site.num_elements * (after - before)
                steps.append(
                    _Step(number, before, after, site.importance * less / cost)
                )
    # The sort is stable: steps of a site, and steps of equal saving, stay in order.
    return sorted(steps, key=lambda step: -step.saved)


def _lowest(sites: Sequence[Site], budget: int) -> list[int]:
    """Returns the minima of the sites; if not all fit, the most useful of them."""
    bits = [site.minimum for site in sites]
    if num_bits(sites, bits) <= budget:
        return bits
    up_to_minima = [dataclasses.replace(s, maximum=s.minimum) for s in sites]
    return list(_raised(up_to_minima, [LADDER[0]] * len(sites), budget))
