"""Which bits a program that is being traced has, where they are allocated for it."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, final

import jax


@final
class BitsInForce:
    """Bits of the residuals of one traced program.

    Each is a value of its own, equal to no other. It is part of the keys of JAX's
    caches, so that what is traced with it is never found without it: other bits mean
    another trace, also of functions that `jax.jit` wraps inside.

    Attributes:
        ledger: Hash of the name of the ledger that backward passes report to.
        bits: By the hash of the site's name; a site that is not there has as many as
            were planned.
    """

    def __init__(self, ledger: int, bits: Mapping[int, int]) -> None:
        self.ledger = ledger
        self.bits = bits


# For programs that are looked at and never run: there is no such ledger.
AS_PLANNED = BitsInForce(0, {})


@contextlib.contextmanager
def putting_in_force(bits: BitsInForce) -> Iterator[None]:
    """Lets functions that are traced meanwhile have these bits."""
    with _IN_FORCE(bits):
        yield


# Unlike a `contextvars.ContextVar`, JAX's caches know of it.
_IN_FORCE: Any = jax.make_user_context(None)


def bits_in_force() -> BitsInForce | None:
    """Returns the bits of the program that is being traced, if any are allocated."""
    return _IN_FORCE.value
