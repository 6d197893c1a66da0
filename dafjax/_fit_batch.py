"""Finds the largest batch whose training step stays under a memory limit."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, final

from dafjax._estimate import (
    METHODS,
    Method,
    StepMemory,
    check_step,
    lower,
    measure,
)
from dafjax._nbytes import parse_nbytes, readable
from dafjax._numbers import as_count, shown


@final
@dataclasses.dataclass(frozen=True)
class FittedBatch:
    """The largest batch found to fit.

    Attributes:
        batch: Its size.
        memory: Memory of the step with this batch.
        limit_nbytes: The limit in bytes.
        method: How wrapped functions are compiled, see `fit_batch`.
        tried: All compiled batch sizes, smallest first, with the bytes that each needs.
    """

    batch: int
    memory: StepMemory
    limit_nbytes: int
    method: Method
    tried: tuple[tuple[int, int], ...]

    def __str__(self) -> str:
        return (
            f"{self.method}: a batch of {self.batch} needs "
            f"{readable(self.memory.total_nbytes)} of {readable(self.limit_nbytes)}"
        )


def fit_batch(
    step: Callable[..., Any],
    args_of_batch: Callable[[int], tuple[Any, ...]],
    limit: int | str,
    *,
    method: Method = "dafjax",
    multiple_of: int = 1,
    max_batch: int = 65536,
    compiler_options: Mapping[str, Any] | None = None,
) -> FittedBatch:
    """Finds the largest batch whose training step fits into memory. Runs nothing.

    The limit covers the memory that the step holds while it runs: arguments, temporary
    arrays, and results that do not reuse donated arguments (`StepMemory.total_nbytes`).
    Leave room for the rest of the process.

    The returned batch has been compiled and fits. The next multiple has been compiled
    and does not fit, unless it exceeds `max_batch`. Memory is nearly linear in the
    batch, so the search mostly compiles four to seven programs, and never more than
    `6 * log2(max_batch / multiple_of) + 2`. If memory does not grow steadily, a larger
    batch may fit as well.

    Args:
        step: The whole step, differentiation included; as for `dafjax.estimate`.
        args_of_batch: Function from a batch size to the arguments of the step, as a
            tuple. `jax.ShapeDtypeStruct`s are best, since it is also called with sizes
            that do not fit.
        limit: The limit per device: bytes, or text such as `"512MiB"`, `"2GiB"` or
            `"1.5GB"`.
        method: How to compile functions wrapped by `remat_compress`: `"dafjax"` as they
            are, `"plain"` without the wrapper, or `"checkpoint"` with `jax.checkpoint`
            in its place.
        multiple_of: Only multiples of this are tried.
        max_batch: No larger batch is tried; at most 2**31 - 1.
        compiler_options: Options for XLA, as in `jax.jit(compiler_options=...)`.

    Returns:
        The batch, and the memory of the step with it.

    Raises:
        TypeError: An argument has a wrong type.
        ValueError: An argument has a value outside its set, `step` calls no function
            wrapped by `remat_compress`, or the smallest batch does not fit.

    Example:
        >>> import dafjax, jax, jax.numpy as jnp
        >>> @dafjax.remat_compress
        ... def loss(w, x):
        ...     for _ in range(8):
        ...         x = jnp.tanh(x @ w)
        ...     return jnp.mean(x)
        >>> def args_of_batch(n):
        ...     shapes = (256, 256), (n, 256)
        ...     return tuple(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes)
        >>> fitted = dafjax.fit_batch(
        ...     jax.grad(loss), args_of_batch, "16MiB", multiple_of=64
        ... )
        >>> fitted.batch % 64, fitted.memory.total_nbytes <= 16 * 2**20
        (0, True)
    """
    check_step("fit_batch", step)
    _check_method(method)
    multiple_of = _checked_batch("multiple_of", multiple_of, 1)
    max_batch = _checked_batch("max_batch", max_batch, multiple_of)
    limit_nbytes = parse_nbytes("fit_batch(limit=...)", limit)
    # Raises an error if nothing is wrapped, also for `method="dafjax"`.
    lower("fit_batch", "plain", step, _arguments(args_of_batch, multiple_of), {})
    memories: dict[int, StepMemory] = {}

    def nbytes_of(count: int) -> int:
        batch = count * multiple_of
        arguments = _arguments(args_of_batch, batch)
        lowered = lower("fit_batch", method, step, arguments, {})
        memories[batch] = measure(lowered, compiler_options)
        return memories[batch].total_nbytes

    batch = multiple_of * largest_that_fits(
        nbytes_of, limit_nbytes, max_batch // multiple_of
    )
    if batch == 0:
        raise _too_little(limit_nbytes, method, multiple_of, memories[multiple_of])
    return FittedBatch(
        batch=batch,
        memory=memories[batch],
        limit_nbytes=limit_nbytes,
        method=method,
        tried=tuple((n, memories[n].total_nbytes) for n in sorted(memories)),
    )


def largest_that_fits(
    nbytes_of: Callable[[int], int], limit_nbytes: int, most: int
) -> int:
    """Returns a count that fits, while the next does not or is more than `most`.

    Args:
        nbytes_of: Function from a count to its bytes; costly, and nearly linear.
        limit_nbytes: The limit in bytes.
        most: The largest count.

    Returns:
        The count; 0 if 1 does not fit.
    """
    # Invariant: `low` fits; `high` does not, or is out of range.
    low, high = 0, most + 1
    known: dict[int, int] = {}
    guess = 1
    while True:
        known[guess] = nbytes_of(guess)
        if known[guess] <= limit_nbytes:
            low = guess
        else:
            high = guess
        if high - low <= 1:
            return low
        guess = _next_guess(known, low, high, limit_nbytes)


# The second count is this many times the first: far enough apart to separate the bytes
# of the batch from the bytes of the parameters.
_SECOND = 8
# A line through two points is extrapolated at most to this multiple of the last count.
_FARTHEST = 32


def _next_guess(
    known: Mapping[int, int], low: int, high: int, limit_nbytes: int
) -> int:
    if len(known) == 1:
        guess = _SECOND * low
    elif len(known) > 2 and len(known) % 3 == 2:
        # Every third guess halves the range, or doubles the count if no upper bound is
        # known. So the search ends, however the bytes grow.
        guess = (low + high) // 2 if high in known else 2 * low
    else:
        other = high if high in known else max(n for n in known if n < low)
        slope = (known[other] - known[low]) / (other - low)
        room = limit_nbytes - known[low]
        guess = _FARTHEST * low
        if room < slope * (guess - low):
            guess = low + int(room / slope)
    return min(max(guess, low + 1), high - 1)


def _arguments(args_of_batch: Any, batch: int) -> tuple[Any, ...]:
    if not callable(args_of_batch):
        raise TypeError(
            "`fit_batch(args_of_batch=...)` must be a function from a batch size to "
            f"the arguments of the step, but got `{args_of_batch!r}`."
        )
    arguments = args_of_batch(batch)
    if not isinstance(arguments, tuple):
        raise TypeError(
            f"`fit_batch(args_of_batch=...)` must return a tuple of arguments, but "
            f"`args_of_batch({batch})` returned a `{type(arguments).__name__}`. Of one "
            "argument make a tuple: `return (batch,)`."
        )
    return arguments


def _check_method(method: Any) -> None:
    if not isinstance(method, str) or method not in METHODS:
        raise ValueError(
            f"`fit_batch(method=...)` must be one of "
            f"{', '.join(map(repr, METHODS))}, but got `{shown(method)}`."
        )


def _checked_batch(name: str, batch: Any, least: int) -> int:
    checked = as_count(f"fit_batch({name}=...)", batch, least=least)
    if checked > _MOST_BATCH:
        raise ValueError(
            f"`fit_batch({name}=...)` must be at most {_MOST_BATCH}, but got "
            f"{shown(batch)}."
        )
    return checked


# XLA's indices do not hold larger array sizes.
_MOST_BATCH = 2**31 - 1


def _too_little(
    limit_nbytes: int, method: Method, batch: int, memory: StepMemory
) -> ValueError:
    remedy = "Raise the limit, or take a smaller model"
    if batch > 1:
        remedy += f", or a smaller `multiple_of` than {batch}"
    if method != "dafjax":
        remedy += ', or `method="dafjax"`'
    return ValueError(
        f"`fit_batch(limit=...)`: {readable(limit_nbytes)} do not hold the step with a "
        f"batch of {batch}, which needs {readable(memory.total_nbytes)} under "
        f'"{method}": arguments {readable(memory.argument_nbytes)}, temporary arrays '
        f"{readable(memory.temp_nbytes)}. {remedy}."
    )
