"""Chooses bits that meet a target, for programs that contain their bits.

`dafjax.allocation` says which bits are best. This module chooses the first bits of a
program, before anything is measured, and decides when other bits are enough better to
recompile it.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import TypeAlias, final

from dafjax._nbytes import readable
from dafjax._targets import AverageBits, Budget, NoiseCeiling, Target
from dafjax.allocation import (
    LADDER,
    Site,
    allocate,
    allocate_to_variance,
    expected_variance,
    num_bits,
)


# Other bits must be better by this fraction, because measurements vary between steps.
HYSTERESIS = 0.1

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
    """

    importances: Mapping[int, float]
    gradient_energy: float


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
    if isinstance(target, NoiseCeiling):
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
    or take less memory by `HYSTERESIS`. They aim below the ceiling by as much, so that
    they still meet it when measurements vary.

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
    if isinstance(target, NoiseCeiling):
        ceiling = target.relative * measured.gradient_energy
        if ceiling <= 0:
            return None
        after = allocate_to_variance(sites, ceiling / (1 + HYSTERESIS))
        meets = expected_variance(sites, before) <= ceiling
        saves = num_bits(sites, before) > (1 + HYSTERESIS) * num_bits(sites, after)
        changes = list(after) != before and (saves or not meets)
    else:
        after = _allocate(sites, _budget(target, demands))
        least = expected_variance(sites, after)
        changes = expected_variance(sites, before) > (1 + HYSTERESIS) * least
    return _by_site(demands, after) if changes else None


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
