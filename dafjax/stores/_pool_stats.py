"""Statistics of a page pool, and how much it grows when its pages are all in use."""

import dataclasses
from collections.abc import Mapping
from typing import Any, final

from dafjax._numbers import as_real, parse_nbytes


@final
@dataclasses.dataclass(frozen=True)
class AdaptiveGrowth:
    """Grows by a share of recent peak use, in steps of 2 to 64 MiB.

    A step is larger if one residual needs more. The unused memory stays a small part
    of the used memory: a pool for a few residuals stays small, and a pool for many
    needs few steps.

    Attributes:
        share: Share of the peak number of bytes in use, over this execution and the
            previous one; above 0 and at most 1.

    Raises:
        TypeError: `share` is no number.
        ValueError: `share` is out of range.
    """

    share: float = 1 / 32

    def __post_init__(self) -> None:
        share = as_real(
            "AdaptiveGrowth(share=...)",
            self.share,
            lowest=0,
            highest=1,
            includes_lowest=False,
            remedy="For steps of one size use `FixedGrowth`.",
        )
        object.__setattr__(self, "share", share)


@final
@dataclasses.dataclass(frozen=True)
class FixedGrowth:
    """Grows by a fixed number of bytes, or by more if one residual needs more.

    Attributes:
        nbytes: Bytes, as an integer or as text. The default, `"100MB"`, is DAF's.

    Raises:
        TypeError: `nbytes` is neither an integer nor text.
        ValueError: `nbytes` cannot be read, or is not from 1 byte to 1 TiB.
    """

    nbytes: int | str = "100MB"

    def __post_init__(self) -> None:
        parse_nbytes("FixedGrowth(nbytes=...)", self.nbytes, most=_MOST_GROWTH)


# The pool lists committed memory page by page. A longer list would end the process.
_MOST_GROWTH = 2**40

Growth = AdaptiveGrowth | FixedGrowth


@final
@dataclasses.dataclass(frozen=True)
class SiteStats:
    """Statistics of one residual id: one residual of a program, over its executions.

    Attributes:
        puts: How often it was stored.
        evictions: Bit planes that it lost to other residuals after it was stored.
        max_bits: The most bits per code that its last put asked for.
        bits_put: Mean bits per code, as encoded in its last execution.
        bits_kept: Mean bits per code that are left of `bits_put`.
        importance: Its sensitivity: the variance of the gradient that its rounding to
            1 bit causes. None if unknown.
    """

    puts: int
    evictions: int
    max_bits: int
    bits_put: float
    bits_kept: float
    importance: float | None


@final
@dataclasses.dataclass(frozen=True)
class PoolStats:
    """A consistent snapshot of a page pool.

    Residuals are *live* until the execution that stored them is over, then
    *reclaimable*.

    Attributes:
        budget: The most bytes that the pool may commit, or None for no limit.
        nbytes: Bytes of codes and metadata in the pool.
        peak_nbytes: Peak of `nbytes`.
        total_nbytes: Bytes of all residuals ever stored.
        live_nbytes: The live bytes among `nbytes`.
        entries: Residuals in the pool.
        peak_entries: Peak of `entries`.
        total_entries: Number of all residuals ever stored.
        live_entries: The live residuals among `entries`, and those being written.
        reclaimable_entries: Residuals whose pages the next puts reuse.
        committed_nbytes: Bytes of memory taken from the system.
        peak_committed_nbytes: Peak of `committed_nbytes`.
        pages_used: Pages that hold data.
        pages_free: Committed pages that hold no data.
        page_nbytes: Bytes of a page.
        growths: How often the pool committed more memory.
        evictions: Bit planes that residuals lost after they were stored.
        reclaims: Residuals whose pages were reused or given back.
        degraded_nbytes: Bytes of requested planes that were lost or never written.
        exhausted: Puts that failed.
        refused_importances: Sensitivities that were negative or not finite.
        refused_handles: Handles that matched no residual in the pool.
        executions: Executions that stored at least one residual.
        expected_variance: The variance of the gradient that the sensitivities predict
            for the active bit allocation; 0 while the sensitivities are unknown.
        gradient_energy: The squared norm of the gradient, averaged over executions; 0
            if nothing measures it.
        packer: Which processor packs residuals of GPU programs, `"gpu"` or `"cpu"`;
            None if the pool serves no GPU program.
        sites: Statistics of each residual, by residual id.
    """

    budget: int | None
    nbytes: int
    peak_nbytes: int
    total_nbytes: int
    live_nbytes: int
    entries: int
    peak_entries: int
    total_entries: int
    live_entries: int
    reclaimable_entries: int
    committed_nbytes: int
    peak_committed_nbytes: int
    pages_used: int
    pages_free: int
    page_nbytes: int
    growths: int
    evictions: int
    reclaims: int
    degraded_nbytes: int
    exhausted: int
    refused_importances: int
    refused_handles: int
    executions: int
    expected_variance: float
    gradient_energy: float
    packer: str | None
    sites: Mapping[str, SiteStats]

    @property
    def utilization(self) -> float:
        """`nbytes` over the bytes of the used pages; 1 if no page is used."""
        if self.pages_used == 0:
            return 1.0
        return self.nbytes / (self.pages_used * self.page_nbytes)


def pool_stats(raw: Mapping[str, Any], names: Mapping[int, str]) -> PoolStats:
    """Converts the compiled library's statistics to their public form.

    Args:
        raw: The statistics.
        names: Residual ids, by their hashes.
    """
    same = (
        "pages_used", "pages_free", "page_nbytes", "growths", "evictions", "reclaims",
        "degraded_nbytes", "exhausted", "refused_importances", "refused_handles",
        "executions", "expected_variance", "gradient_energy", "packer",
    )  # fmt: skip
    unlimited = raw["budget"] == UNLIMITED
    return PoolStats(
        budget=None if unlimited else raw["budget"],
        nbytes=raw["bytes"]["current"],
        peak_nbytes=raw["bytes"]["peak"],
        total_nbytes=raw["bytes"]["total"],
        live_nbytes=raw["bytes_live"],
        entries=raw["entries"]["current"],
        peak_entries=raw["entries"]["peak"],
        total_entries=raw["entries"]["total"],
        live_entries=raw["entries_live"] + raw["entries_writing"],
        reclaimable_entries=raw["entries_reclaimable"],
        committed_nbytes=raw["committed"]["current"],
        peak_committed_nbytes=raw["committed"]["peak"],
        sites={
            # A program that another process exported is not traced in this process,
            # so its residual ids are unknown here.
            names.get(number, f"site {number:016x}"): SiteStats(**facts)
            for number, facts in raw["sites"].items()
        },
        **{name: raw[name] for name in same},
    )


# The compiled library's value for "no budget".
UNLIMITED = 2**63 - 1
