"""What a page pool tells of itself."""

import dataclasses
from collections.abc import Mapping
from typing import Any, final


@final
@dataclasses.dataclass(frozen=True)
class SiteStats:
    """What is known of one site: one residual of a program, over its executions.

    Attributes:
        puts: How often it was put.
        evictions: Planes that it lost to others after it was put.
        max_bits: The most bits of a code that its last put asked for.
        bits_put: Bits of a code in its last execution, as encoded: a mean.
        bits_kept: Bits of a code that are left of that: a mean.
        importance: How much the gradient suffers from its noise, or None if unknown.
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

    Residuals are *live* until the execution that put them is over, then *reclaimable*.

    Attributes:
        budget: Bytes that may be committed, or None if all that the system has.
        nbytes: Bytes of codes and metadata that are held.
        peak_nbytes: The most that were held at once.
        total_nbytes: All that were ever put.
        live_nbytes: Those of `nbytes` that are live.
        entries: Residuals that are held.
        peak_entries: The most that were held at once.
        total_entries: All that were ever put.
        live_entries: Those of `entries` that are live; also those being written.
        reclaimable_entries: Those whose pages the next puts reuse.
        committed_nbytes: Memory taken from the system.
        peak_committed_nbytes: The most that was taken at once.
        pages_used: Pages that hold anything.
        pages_free: Pages that are committed and hold nothing.
        page_nbytes: Bytes of a page.
        growths: How often more was committed.
        evictions: Planes that residuals lost after they were put.
        reclaims: Residuals whose pages were reused or given back.
        degraded_nbytes: Bytes of planes that were asked for and lost, or never written.
        exhausted: Puts that failed.
        refused_importances: Importances that were not finite, or negative.
        refused_handles: Handles that named nothing in the pool.
        executions: Executions that put anything.
        expected_variance: The variance of the gradient that importances tell of for the
            bits that hold; 0 as long as they are unknown.
        gradient_energy: The squared norm of the gradient, averaged over executions; 0
            if nothing measures it.
        packer: Who packs for programs on a GPU, `"gpu"` or `"cpu"`; None where the pool
            serves none.
        sites: What is known of each site, by its name.
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
        """Bytes that are held / bytes of the pages that hold them; 1 if none are."""
        if self.pages_used == 0:
            return 1.0
        return self.nbytes / (self.pages_used * self.page_nbytes)


def pool_stats(raw: Mapping[str, Any], names: Mapping[int, str]) -> PoolStats:
    """Returns the compiled library's statistics in their public form.

    Args:
        raw: The statistics.
        names: Names of sites, by their hashes.
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
            # A program that was exported by another process is not traced in this one.
            names.get(number, f"site {number:016x}"): SiteStats(**facts)
            for number, facts in raw["sites"].items()
        },
        **{name: raw[name] for name in same},
    )


# What the compiled library has for no budget.
UNLIMITED = 2**63 - 1
