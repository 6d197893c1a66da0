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

For programs that contain their bits, this module also chooses the first bits of a
program, before anything is measured, and decides when other bits are enough better to
recompile it.
"""

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import TypeAlias, final

from dafjax._bits import (
    LADDER as LADDER,
    AverageBits,
    BatchNoise,
    Budget,
    NoiseCeiling,
    Target,
)
from dafjax._numbers import as_count, as_real, readable


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


# Other bits must be better by this fraction, because measurements vary between steps.
HYSTERESIS = 0.1
# For a share of the noise of batches: it changes faster, and other bits cost another
# program.
BATCH_HYSTERESIS = 0.25

_ALL = LADDER[-1]


@final
@dataclasses.dataclass(frozen=True)
class Demand:
    """Size and limits of one residual (site) of a traced program.

    Attributes:
        num_elements: Elements of all its copies that are live at once.
        parameters_nbytes: Bytes of the scales and minima of their quantization groups.
        asked: Its bits without allocation.
        maximum: Its most bits.
    """

    num_elements: int
    parameters_nbytes: int
    asked: int
    maximum: int


@final
@dataclasses.dataclass(frozen=True)
class Measured:
    """Measurements of backward passes; both are sums over the same passes.

    Attributes:
        importances: By residual, the variance of the gradient if this residual alone
            has 1 bit; 0 if unknown.
        gradient_energy: The squared norm of the gradient.
        batch_variance: The variance of the gradient as that of a batch; 0 if unknown.
    """

    importances: Mapping[int, float]
    gradient_energy: float
    batch_variance: float = 0.0

    def ceiling(self, target: NoiseCeiling | BatchNoise) -> float:
        """Returns the most variance that a target allows; 0 if it is unknown."""
        if isinstance(target, BatchNoise):
            return target.share**2 * self.batch_variance
        return target.relative * self.gradient_energy


# Keyed by the hash of the residual's name, in program order.
Demands: TypeAlias = Mapping[int, Demand]
BitsBySite: TypeAlias = dict[int, int]


def nbytes(demands: Demands, bits: Mapping[int, int]) -> int:
    """Returns the bytes of codes, scales and minima."""
    return sum(
        demand.num_elements * bits[site] // 8 + demand.parameters_nbytes
        for site, demand in demands.items()
    )


def first_bits(target: Target, demands: Demands) -> BitsBySite:
    """Returns bits for residuals before any measurement: the same for all.

    They are as many as the target allows. Where some residuals must have more, the
    others get the rest. A noise ceiling must hold from the start, so with one all
    residuals begin with their most bits.

    Raises:
        ValueError: Not even the minimum bits fit into the target.
    """
    # Assumes that all elements are equally important.
    sites = _sites(demands, {s: float(d.num_elements) for s, d in demands.items()})
    if isinstance(target, (NoiseCeiling, BatchNoise)):
        return _by_site(demands, [site.maximum for site in sites])
    budget = _budget(target, demands)
    fewest = [_ALL if site.minimum == _ALL else LADDER[0] for site in sites]
    if num_bits(sites, fewest) > budget:
        raise ValueError(
            f"`remat_compress(bits={target!r})`: residuals in codes need at least "
            f"{_amount(target, demands, fewest)}. That is with 1 bit an element, and 8 "
            "where gradients depend on it by way of an exponential, which makes large "
            "errors of small ones, or where a policy asked for as many. Give more."
        )
    for floor in reversed(LADDER):
        bits = [min(max(floor, site.minimum), site.maximum) for site in sites]
        if num_bits(sites, bits) <= budget:
            return _by_site(demands, bits)
    return _by_site(demands, _allocate(sites, budget))


def better_bits(
    target: Target, demands: Demands, now: Mapping[int, int], measured: Measured
) -> BitsBySite | None:
    """Returns bits that are worth another compilation, or None.

    With a budget, they must lower the expected variance of the gradient by
    `HYSTERESIS`. With a noise ceiling, they must meet it where the present bits do not,
    or take less memory by `HYSTERESIS` (`BATCH_HYSTERESIS` for a share of the noise of
    batches). They aim below the ceiling by as much, so that they still meet it when
    measurements vary.

    Args:
        target: The target of the allocation.
        demands: Size and limits of each residual.
        now: Its present bits.
        measured: The measurements.
    """
    importances = _filled_in(demands, measured.importances)
    if importances is None:
        return None
    sites = _sites(demands, importances)
    before = [now[site] for site in demands]
    if isinstance(target, (NoiseCeiling, BatchNoise)):
        ceiling = measured.ceiling(target)
        if ceiling <= 0:
            return None
        is_batch = isinstance(target, BatchNoise)
        margin = 1 + (BATCH_HYSTERESIS if is_batch else HYSTERESIS)
        after = allocate_to_variance(sites, ceiling / margin)
        meets = expected_variance(sites, before) <= ceiling
        saves = num_bits(sites, before) > margin * num_bits(sites, after)
        changes = list(after) != before and (saves or not meets)
    else:
        after = _allocate(sites, _budget(target, demands))
        least = expected_variance(sites, after)
        changes = expected_variance(sites, before) > (1 + HYSTERESIS) * least
    return _by_site(demands, after) if changes else None


def added_variance(
    demands: Demands, bits: Mapping[int, int], measured: Measured
) -> float | None:
    """Returns the variance that rounding adds, or None if nothing is measured.

    Args:
        demands: Size and limits of each residual.
        bits: Its bits.
        measured: The measurements.
    """
    importances = _filled_in(demands, measured.importances)
    if importances is None:
        return None
    return sum(c * distortion(bits[site]) for site, c in importances.items())


def _budget(target: AverageBits | Budget, demands: Demands) -> int:
    """Returns the bits for all codes together, without scales and minima."""
    if isinstance(target, AverageBits):
        return int(target.bits * sum(d.num_elements for d in demands.values()))
    parameters = sum(demand.parameters_nbytes for demand in demands.values())
    return max(0, 8 * (int(target.nbytes) - parameters))


def _amount(target: Target, demands: Demands, bits: Sequence[int]) -> str:
    """Returns the total of an allocation as text, in the unit of the target."""
    by_site = _by_site(demands, bits)
    if isinstance(target, AverageBits):
        num_elements = sum(demand.num_elements for demand in demands.values())
        all_bits = sum(demands[site].num_elements * b for site, b in by_site.items())
        # Rounded up, so that a target of this value is enough.
        return f"{math.ceil(100 * all_bits / num_elements) / 100} bits on average"
    needed = nbytes(demands, by_site)
    return f"{needed} bytes ({readable(needed)})"


def _filled_in(
    demands: Demands, importances: Mapping[int, float]
) -> dict[int, float] | None:
    """Returns an importance for each residual; None if all are unknown.

    An unknown residual gets the mean importance per element.
    """
    known = {site: importances.get(site, 0.0) for site in demands}
    num_elements = sum(demands[site].num_elements for site, c in known.items() if c > 0)
    if num_elements == 0:
        return None
    mean = sum(c / num_elements for c in known.values())
    return {
        site: importance if importance > 0 else mean * demands[site].num_elements
        for site, importance in known.items()
    }


def _allocate(sites: Sequence[Site], budget: int) -> list[int]:
    """Returns the bits of `allocate`, and 8 bits wherever 8 is the minimum."""
    taken = sum(_ALL * site.num_elements for site in sites if site.minimum == _ALL)
    others = [site for site in sites if site.minimum < _ALL]
    bits = iter(allocate(others, budget - taken))
    return [_ALL if site.minimum == _ALL else next(bits) for site in sites]


def _sites(demands: Demands, importances: Mapping[int, float]) -> list[Site]:
    return [
        Site(
            demand.num_elements,
            importances[site],
            _minimum(demand.asked),
            demand.maximum,
        )
        for site, demand in demands.items()
    ]


def _minimum(asked: int) -> int:
    """Returns the minimum bits of a residual from its bits without allocation.

    The page pool has the same rule. A request for 8 bits is always met: with fewer, an
    argument of an exponential ruins the gradient. Other residuals get at least half of
    their request. Residuals that enter nonlinearly request more, and there importances,
    which are first-order, say too little.
    """
    return _ALL if asked == _ALL else max(LADDER[0], asked // 2)


def _by_site(demands: Demands, bits: Sequence[int]) -> BitsBySite:
    return dict(zip(demands, bits, strict=True))
