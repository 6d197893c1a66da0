"""Extends errors of JAX with their cause in dafjax and a remedy."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax


@contextlib.contextmanager
def explained_concretization(traced_for: str) -> Iterator[None]:
    """Adds a remedy to errors about traced arguments that Python needs as values.

    Args:
        traced_for: Purpose of the trace, as JAX's errors name it.
    """
    try:
        yield
    except (
        jax.errors.ConcretizationTypeError,
        jax.errors.TracerIntegerConversionError,
    ) as error:
        # Only for this function, not an inner or outer one; once if wraps are nested.
        if f" for {traced_for}." in str(error):
            _explain(
                error,
                "Name arguments that are not arrays in `static_argnums` or "
                "`static_argnames` of `dafjax.remat_compress`.",
            )
        raise


@contextlib.contextmanager
def explained_forward_mode(fun: Callable[..., Any]) -> Iterator[None]:
    """Adds the name of the function and a remedy to JAX's error about forward mode.

    It misses errors of compiled derivatives and of `jax.linearize`, which are raised
    elsewhere.
    """
    try:
        yield
    except TypeError as error:
        if "forward-mode autodiff" in str(error):
            _explain(
                error,
                f"`{getattr(fun, '__name__', fun)}` is wrapped in "
                "`dafjax.remat_compress`, which supports reverse mode only: "
                "`jax.grad`, `jax.vjp`, `jax.jacrev`. For forward mode use `bits=None` "
                "or `jax.checkpoint`.",
            )
        raise


def _explain(error: Exception, advice: str) -> None:
    if advice not in str(error):
        error.args = (f"{error}\n\n{advice}",)
