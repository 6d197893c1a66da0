"""How many bits each residual gets: from importances, sizes and a budget.

Rounding to `b` bits moves a value by about its block's range over `2^b - 1`. What that
does to the gradient is, to first order, independent between residuals, so that

    variance of the gradient = sum over sites s of  C_s / (2^{b_s} - 1)^2

where the importance `C_s` is the variance if site `s` alone has 1 bit (ActNN, Chen et
al. 2021, section 4.2). A site is a place in the model that residuals come from.

The least variance within a budget of bits has, at the optimum, one price of a bit for
all sites, the Lagrange multiplier: a site takes a step to more bits if the variance
that this saves, over the bits that it costs, is above the price. Steps of a site save
less and less for a bit, so that steps sorted by what they save are taken in an order
that is possible; the price is where the budget ends. What is left then goes to later
steps that fit. Where sites are few and large this can be worse than the same bits for
all; so it is done from each number of bits that all can have, and the best one counts.
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import final

from dafjax._numbers import as_count, as_real


# Codes of so many bits are prefixes of each other.
LADDER = (1, 2, 4, 8)


@final
@dataclasses.dataclass(frozen=True)
class Site:
    """What is known of the residuals of one place in the model.

    Attributes:
        num_elements: Elements of all residuals that come from it.
        importance: The variance of the gradient if these alone have 1 bit. Only ratios
            between sites matter for `allocate`.
        minimum: The fewest bits that it may get.
        maximum: The most.

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
    """Returns `1 / (2^bits - 1)^2`: the variance against that of 1 bit."""
    return 1.0 / (2**bits - 1) ** 2


def expected_variance(sites: Sequence[Site], bits: Sequence[int]) -> float:
    """Returns the variance of the gradient, in the unit of the importances.

    Args:
        sites: The sites.
        bits: Bits of each.
    """
    # In order, so that the compiled library has the same sum.
    total = 0.0
    for site, b in zip(sites, bits, strict=True):
        total += site.importance * distortion(b)
    return total


def num_bits(sites: Sequence[Site], bits: Sequence[int]) -> int:
    """Returns the bits of all codes, without what blocks need besides."""
    return sum(s.num_elements * b for s, b in zip(sites, bits, strict=True))


def allocate(sites: Sequence[Site], budget: int) -> tuple[int, ...]:
    """Returns bits with the least expected variance within a budget.

    Args:
        sites: The sites.
        budget: The most bits that all codes may have, without what blocks need besides.

    Returns:
        The bits of each site: 1, 2, 4 or 8. If not all their minima fit, those are met
        that save most for a bit; 1 bit each is the least.

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
    """Takes steps upwards, those that save most for a bit first, while they fit."""
    left = budget - num_bits(sites, bits)
    for step in _steps(sites, bits):
        cost = sites[step.site].num_elements * (step.after - step.before)
        # A step that did not fit bars those after it.
        if bits[step.site] == step.before and cost <= left:
            bits[step.site] = step.after
            left -= cost
    return tuple(bits)


def allocate_to_variance(sites: Sequence[Site], ceiling: float) -> tuple[int, ...]:
    """Returns few bits whose expected variance is not above a ceiling.

    An error bound in place of a budget, as AC-GC has it (Evans and Aamodt 2021).

    Args:
        sites: The sites.
        ceiling: The most variance, in the unit of the importances.

    Returns:
        The bits of each site; the maxima where these do not suffice.

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
    """From one number of bits of a site to the next.

    Attributes:
        site: Its number.
        before: Bits.
        after: Bits.
        saved: Variance that the step saves for each bit that it costs.
    """

    site: int
    before: int
    after: int
    saved: float


def _steps(sites: Sequence[Site], bits: Sequence[int]) -> list[_Step]:
    """Returns the steps upwards from `bits`, those that save most for a bit first."""
    steps = []
    for number, (site, lowest) in enumerate(zip(sites, bits, strict=True)):
        for before, after in itertools.pairwise(LADDER):
            if lowest <= before and after <= site.maximum and site.num_elements > 0:
                less = distortion(before) - distortion(after)
                cost = site.num_elements * (after - before)
                steps.append(
                    _Step(number, before, after, site.importance * less / cost)
                )
    # Stable: the steps of a site, and equal ones, stay in order.
    return sorted(steps, key=lambda step: -step.saved)


def _lowest(sites: Sequence[Site], budget: int) -> list[int]:
    """Returns the minima of the sites; the most useful of them if not all fit."""
    bits = [site.minimum for site in sites]
    if num_bits(sites, bits) <= budget:
        return bits
    up_to_minima = [dataclasses.replace(s, maximum=s.minimum) for s in sites]
    return list(_raised(up_to_minima, [LADDER[0]] * len(sites), budget))
