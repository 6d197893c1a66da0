"""Passes the active bit allocation to functions while they are traced."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, final

import jax


@final
class BitsInForce:
    """Bits of the residuals of one traced program.

    Each instance is equal only to itself, and is part of the keys of JAX's caches. So a
    trace made with it is never reused without it: other bits mean another trace, even
    of inner functions that `jax.jit` wraps.

    Attributes:
        ledger: Hash of the name of the ledger that backward passes report to.
        bits: Bits by the hash of the residual's name. A missing residual has its
            planned bits.
    """

    def __init__(self, ledger: int, bits: Mapping[int, int]) -> None:
        self.ledger = ledger
        self.bits = bits


# For programs that are inspected and never run; this ledger does not exist.
AS_PLANNED = BitsInForce(0, {})


@contextlib.contextmanager
def putting_in_force(bits: BitsInForce) -> Iterator[None]:
    """Gives these bits to functions that are traced inside the context."""
    with _IN_FORCE(bits):
        yield


# Unlike a `contextvars.ContextVar`, it is part of the keys of JAX's caches.
_IN_FORCE: Any = jax.make_user_context(None)


def bits_in_force() -> BitsInForce | None:
    """Returns the bits allocated for the program being traced, if any."""
    return _IN_FORCE.value
