"""Errors of JAX that tell whose they are here, and what to do."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax


@contextlib.contextmanager
def explained_concretization(traced_for: str) -> Iterator[None]:
    """Lets errors about traced arguments that Python needs tell what to do.

    Args:
        traced_for: What the function is traced for, as errors call it.
    """
    try:
        yield
    except (
        jax.errors.ConcretizationTypeError,
        jax.errors.TracerIntegerConversionError,
    ) as error:
        # Not of a function inside or outside, and once where wraps are nested.
        if f" for {traced_for}." in str(error):
            _explain(
                error,
                "Name arguments that are not arrays in `static_argnums` or "
                "`static_argnames` of `dafjax.remat_compress`.",
            )
        raise


@contextlib.contextmanager
def explained_forward_mode(fun: Callable[..., Any]) -> Iterator[None]:
    """Lets JAX's error about forward mode name the function and tell what to do.

    Where the derivative is compiled, and of `jax.linearize`, it is raised elsewhere.
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
