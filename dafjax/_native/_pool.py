"""Page pools of the compiled library: how one is made, and its errors."""

from typing import Any

from dafjax._native import _library


class PoolExhausted(MemoryError):
    """The budget of a page pool cannot hold a residual, even at its block means."""


class StaleHandle(RuntimeError):
    """A handle names no residual of its page pool: it is gone, or never was there."""


def make_pool(
    name: str,
    *,
    budget: int | None,
    growth_share: float | None,
    growth_nbytes: int | None,
    executions_in_flight: int,
    backward_once: bool,
    packer: str,
) -> Any:
    """Makes a pool, which lives as long as what is returned.

    Args:
        name: What custom calls find it by; no two pools in use share one.
        budget: Bytes, or None for as many as the system has.
        growth_share: The share of recent demand that it grows by, or None.
        growth_nbytes: Bytes that it grows by, or None.
        executions_in_flight: How many newer executions there must be on its device for
            one to be over.
        backward_once: Whether what a backward pass has read is freed.
        packer: Who packs for programs on a GPU: "auto", "gpu" or "cpu".

    Raises:
        ValueError: Another pool in use has the name.
    """
    return _library.load().Pool(
        name,
        budget=budget,
        growth_share=growth_share,
        growth_nbytes=growth_nbytes,
        executions_in_flight=executions_in_flight,
        backward_once=backward_once,
        packer=packer,
    )


def pool_hash(name: str) -> int:
    """Returns what custom calls carry in place of a pool's name: 64 bits."""
    return _library.load().pool_hash(name)
