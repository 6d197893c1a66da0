"""Page pools of the compiled library: constructor and errors."""

from typing import Any

from dafjax._native import _library


class PoolExhausted(MemoryError):
    """The budget of a page pool cannot hold a residual, not even its group means."""


class StaleHandle(RuntimeError):
    """A handle matches no residual of its page pool: freed already, or never stored."""


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
    """Makes a pool, which lives as long as the returned object.

    Args:
        name: The name that custom calls use to find it, unique among pools in use.
        budget: The most bytes that it takes, or None for no limit.
        growth_share: It grows by this share of recent peak use, or None.
        growth_nbytes: It grows by this number of bytes, or None.
        executions_in_flight: An execution is over when this many newer executions have
            started on its device.
        backward_once: Whether to free residuals once the backward pass has read them.
        packer: Which processor packs for GPU programs: "auto", "gpu" or "cpu".

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
    """Returns the 64-bit hash that custom calls carry in place of a pool's name."""
    return _library.load().pool_hash(name)
