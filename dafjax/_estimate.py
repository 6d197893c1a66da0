"""The memory of a training step, and the largest batch that fits.

Both compile the step (plain, with `jax.checkpoint`, with dafjax) and run nothing.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias, final, get_args

import jax

from dafjax._contexts import standing_in
from dafjax._numbers import align, as_count, parse_nbytes, readable, shown


Method: TypeAlias = Literal["plain", "checkpoint", "dafjax"]
METHODS: tuple[Method, ...] = get_args(Method)

# The transformation that replaces `remat_compress` under a method, if any.
_TRANSFORMS: Mapping[Method, Callable[..., Any]] = {
    "plain": lambda fun: fun,
    "checkpoint": jax.checkpoint,
}
_LABELS: Mapping[Method, str] = {
    "plain": "plain",
    "checkpoint": "jax.checkpoint",
    "dafjax": "dafjax",
}


@final
@dataclasses.dataclass(frozen=True)
class StepMemory:
    """Bytes that one compiled step needs per device.

    Attributes:
        temp_nbytes: Bytes of temporary arrays, including residuals.
        argument_nbytes: Bytes of arguments: parameters, optimizer state, data.
        output_nbytes: Bytes of results.
        donated_nbytes: Bytes of results that reuse donated arguments.
    """

    temp_nbytes: int
    argument_nbytes: int
    output_nbytes: int
    donated_nbytes: int

    @property
    def total_nbytes(self) -> int:
        """Bytes while the step runs; donated arguments count once."""
        new_nbytes = self.output_nbytes - self.donated_nbytes
        return self.argument_nbytes + new_nbytes + self.temp_nbytes


@final
@dataclasses.dataclass(frozen=True)
class Estimate:
    """Memory of one step, by method. Prints as a table.

    Attributes:
        plain: Memory with the original functions in place of the wrapped ones.
        checkpoint: Memory with `jax.checkpoint` of the original functions.
        dafjax: Memory of the step as it is.
    """

    plain: StepMemory
    checkpoint: StepMemory
    dafjax: StepMemory

    @property
    def checkpoint_ratio(self) -> float:
        """Temporary bytes under `jax.checkpoint`, over the plain step's."""
        return self._ratio(self.checkpoint)

    @property
    def dafjax_ratio(self) -> float:
        """Temporary bytes under dafjax, over the plain step's."""
        return self._ratio(self.dafjax)

    def _ratio(self, memory: StepMemory) -> float:
        return memory.temp_nbytes / max(self.plain.temp_nbytes, 1)

    def __str__(self) -> str:
        header = ("method", "temp", "of plain", "arguments", "results", "total")
        rows: list[tuple[str, ...]] = [header]
        for method in METHODS:
            memory: StepMemory = getattr(self, method)
            rows.append(
                (
                    _LABELS[method],
                    readable(memory.temp_nbytes),
                    f"{self._ratio(memory):.2f}",
                    readable(memory.argument_nbytes),
                    readable(memory.output_nbytes),
                    readable(memory.total_nbytes),
                )
            )
        return align(rows, right=range(1, len(header)))


def estimate(
    step: Callable[..., Any],
    *args: Any,
    compiler_options: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> Estimate:
    """Compiles a training step three ways and returns its memory. Runs nothing.

    The three programs are the same step with different wrapped functions, at whatever
    depth the step calls them: the original functions, `jax.checkpoint` of them, and
    `remat_compress` as given. (For nested wrapped functions dafjax uses only the
    outermost wrapper; `jax.checkpoint` is put around all of them.) If a whole loss is
    wrapped, `jax.checkpoint` saves no memory: to see it at its best, wrap blocks.

    Figures come from XLA, for the device on which the step would run. They exclude the
    memory of the process outside of the step.

    Args:
        step: The whole step, differentiation included. A function made by `jax.jit` is
            compiled as it is, with its donated and static arguments; any other function
            is passed to `jax.jit`.
        *args: Its arguments: arrays, or `jax.ShapeDtypeStruct`s in their place.
        compiler_options: Options for XLA, as in `jax.jit(compiler_options=...)`.
            `{"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}` is one.
        **kwargs: Its keyword arguments.

    Returns:
        The memory of the step by method.

    Raises:
        TypeError: `step` is not a function.
        ValueError: `step` calls no function wrapped by `remat_compress`.

    Example:
        >>> import dafjax, jax, jax.numpy as jnp
        >>> @dafjax.remat_compress
        ... def loss(w, x):
        ...     for _ in range(8):
        ...         x = jnp.tanh(x @ w)
        ...     return jnp.mean(x)
        >>> w = jax.ShapeDtypeStruct((256, 256), jnp.float32)
        >>> x = jax.ShapeDtypeStruct((1024, 256), jnp.float32)
        >>> estimate = dafjax.estimate(jax.grad(loss), w, x)
        >>> estimate.dafjax_ratio < 0.5
        True
    """
    check_step("estimate", step)
    memories: dict[Method, StepMemory] = {}
    for method in METHODS:
        lowered = lower("estimate", method, step, args, kwargs)
        memories[method] = measure(lowered, compiler_options)
    return Estimate(**memories)


def measure(lowered: Any, compiler_options: Mapping[str, Any] | None) -> StepMemory:
    """Compiles the result of `lower`, and returns the memory of the program."""
    options = None if compiler_options is None else dict(compiler_options)
    memory = lowered.compile(compiler_options=options).memory_analysis()
    return StepMemory(
        temp_nbytes=memory.temp_size_in_bytes,
        argument_nbytes=memory.argument_size_in_bytes,
        output_nbytes=memory.output_size_in_bytes,
        donated_nbytes=memory.alias_size_in_bytes,
    )


def lower(
    caller: str,
    method: Method,
    step: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Any:
    """Lowers a step under one method.

    Raises:
        ValueError: The method replaces wrapped functions, but the step calls none.
    """
    jitted: Any = step if hasattr(step, "lower") else jax.jit(step)
    transform = _TRANSFORMS.get(method)
    if transform is None:
        return jitted.lower(*args, **kwargs)
    with standing_in(transform) as stand_in:
        lowered = jitted.lower(*args, **kwargs)
    if stand_in.num_calls == 0:
        raise nothing_is_wrapped(caller, getattr(step, "__name__", step))
    return lowered


def nothing_is_wrapped(caller: str, name: object) -> ValueError:
    """Returns the error for a step that calls no wrapped function."""
    return ValueError(
        f"`{caller}(step, ...)`: `{name!s}` calls no function wrapped by "
        "`remat_compress` (or one with `bits=None`). Wrap the loss or its blocks "
        "first, and pass the step that differentiates it."
    )


def check_step(caller: str, step: Any) -> None:
    """Raises a `TypeError` if a step is not a function."""
    if not callable(step):
        raise TypeError(
            f"`{caller}(step, ...)` must be given a function, but got `{step!r}`. Pass "
            f"the step and its arguments apart: `{caller}(step, params, batch)`."
        )


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
