"""The memory of a training step, and the largest batch that fits.

Both trace the step (plain, with `jax.checkpoint`, with dafjax) and run nothing. A model
answers, or the compiler on request.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias, final, get_args

import jax

from dafjax._contexts import standing_in
from dafjax._numbers import align, as_count, parse_nbytes, readable, shown
from dafjax._step_memory import (
    StepMemory as StepMemory,
    largest_that_fits,
    measure,
    nothing_is_wrapped,
    predict,
)


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
class Estimate:
    """Memory of one step, by method. Prints as a table.

    Attributes:
        plain: Memory with the original functions in place of the wrapped ones.
        checkpoint: Memory with `jax.checkpoint` of the original functions.
        dafjax: Memory of the step as it is.
        is_compiled: Whether these are the compiler's figures, and not a model's.
    """

    plain: StepMemory
    checkpoint: StepMemory
    dafjax: StepMemory
    is_compiled: bool

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
        table = align(rows, right=range(1, len(header)))
        return table if self.is_compiled else f"{table}\n{_PREDICTED}"


_PREDICTED = "predicted by a model of XLA:CPU; `compile=True` asks the compiler"


def estimate(
    step: Callable[..., Any],
    *args: Any,
    compile: bool = False,
    compiler_options: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> Estimate:
    """Returns the memory of a training step, by method. Runs nothing.

    A static model of XLA:CPU predicts it from the traced step, in seconds. With
    `compile=True` the step is compiled three times, and the figures are the compiler's,
    for the device on which the step would run. On GPUs ask the compiler: the model does
    not know how XLA:GPU places arrays.

    The three programs are the same step with different wrapped functions, at whatever
    depth the step calls them: the original functions, `jax.checkpoint` of them, and
    `remat_compress` as given. (For nested wrapped functions dafjax uses only the
    outermost wrapper; `jax.checkpoint` is put around all of them.) If a whole loss is
    wrapped, `jax.checkpoint` saves no memory: to see it at its best, wrap blocks.

    Figures are per device, and exclude the memory of the process outside of the step.

    Args:
        step: The whole step, differentiation included. A function made by `jax.jit` is
            taken as it is, with its donated and static arguments; any other function
            is passed to `jax.jit`.
        *args: Its arguments: arrays, or `jax.ShapeDtypeStruct`s in their place.
        compile: Whether to compile the step.
        compiler_options: Options for XLA, as in `jax.jit(compiler_options=...)`, where
            the step is compiled.
            `{"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}` is one.
        **kwargs: Its keyword arguments.

    Returns:
        The memory of the step by method.

    Raises:
        TypeError: `step` is not a function.
        ValueError: `step` calls no function wrapped by `remat_compress`, or there are
            `compiler_options` without `compile=True`.

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
    memory_of = _memory_of("estimate", step, compile, compiler_options)
    memories = {method: memory_of(method, args, kwargs) for method in METHODS}
    return Estimate(**memories, is_compiled=compile)


def _memory_of(
    caller: str,
    step: Callable[..., Any],
    compile: bool,
    compiler_options: Mapping[str, Any] | None,
) -> Callable[[Method, Sequence[Any], Mapping[str, Any]], StepMemory]:
    """Returns a function from a method and arguments to the memory of a step."""
    if compiler_options is not None and not compile:
        raise ValueError(
            f"`{caller}(compiler_options=...)` is for the compiler, but a model "
            "answers. Add `compile=True`."
        )

    def memory_of(
        method: Method, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> StepMemory:
        traced = trace(caller, method, step, args, kwargs)
        if compile:
            return measure(traced.lower(), compiler_options)
        return predict(traced, args, kwargs)

    return memory_of


def trace(
    caller: str,
    method: Method,
    step: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Any:
    """Traces a step under one method, as the method `trace` of `jax.jit` does.

    Raises:
        ValueError: The method replaces wrapped functions, but the step calls none.
    """
    jitted: Any = step if hasattr(step, "trace") else jax.jit(step)
    transform = _TRANSFORMS.get(method)
    if transform is None:
        return jitted.trace(*args, **kwargs)
    with standing_in(transform) as stand_in:
        traced = jitted.trace(*args, **kwargs)
    if stand_in.num_calls == 0:
        raise nothing_is_wrapped(caller, getattr(step, "__name__", step))
    return traced


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
        tried: All batch sizes that were tried, smallest first, with the bytes that each
            needs.
        is_compiled: Whether these are the compiler's figures, and not a model's.
    """

    batch: int
    memory: StepMemory
    limit_nbytes: int
    method: Method
    tried: tuple[tuple[int, int], ...]
    is_compiled: bool

    def __str__(self) -> str:
        return (
            f"{self.method}: a batch of {self.batch} needs "
            f"{readable(self.memory.total_nbytes)} of {readable(self.limit_nbytes)}"
            f"{'' if self.is_compiled else f', {_PREDICTED}'}"
        )


def fit_batch(
    step: Callable[..., Any],
    args_of_batch: Callable[[int], tuple[Any, ...]],
    limit: int | str,
    *,
    method: Method = "dafjax",
    multiple_of: int = 1,
    max_batch: int = 65536,
    compile: bool = False,
    compiler_options: Mapping[str, Any] | None = None,
) -> FittedBatch:
    """Finds the largest batch whose training step fits into memory. Runs nothing.

    The limit covers the memory that the step holds while it runs: arguments, temporary
    arrays, and results that do not reuse donated arguments (`StepMemory.total_nbytes`).
    Leave room for the rest of the process.

    A static model of XLA:CPU predicts the memory of a batch from the traced step; a
    trace takes about a second. With `compile=True` steps are compiled, and the figures
    are the compiler's, for the device on which the step would run. On GPUs ask the
    compiler.

    By the figures, the returned batch fits. The next multiple does not fit, unless it
    exceeds `max_batch`. Memory is nearly linear in the batch, so the search mostly
    tries four to seven batches, and never more than
    `6 * log2(max_batch / multiple_of) + 2`. If memory does not grow steadily, a larger
    batch may fit as well.

    Args:
        step: The whole step, differentiation included; as for `dafjax.estimate`.
        args_of_batch: Function from a batch size to the arguments of the step, as a
            tuple. `jax.ShapeDtypeStruct`s are best, since it is also called with sizes
            that do not fit.
        limit: The limit per device: bytes, or text such as `"512MiB"`, `"2GiB"` or
            `"1.5GB"`.
        method: How to take functions wrapped by `remat_compress`: `"dafjax"` as they
            are, `"plain"` without the wrapper, or `"checkpoint"` with `jax.checkpoint`
            in its place.
        multiple_of: Only multiples of this are tried.
        max_batch: No larger batch is tried; at most 2**31 - 1.
        compile: Whether to compile the step with each batch that is tried.
        compiler_options: Options for XLA, as in `jax.jit(compiler_options=...)`, where
            the step is compiled.

    Returns:
        The batch, and the memory of the step with it.

    Raises:
        TypeError: An argument has a wrong type.
        ValueError: An argument has a value outside its set, `step` calls no function
            wrapped by `remat_compress`, or the smallest batch does not fit. Or there
            are `compiler_options` without `compile=True`.

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
    memory_of = _memory_of("fit_batch", step, compile, compiler_options)
    # Raises an error if nothing is wrapped, also for `method="dafjax"`.
    trace("fit_batch", "plain", step, _arguments(args_of_batch, multiple_of), {})
    memories: dict[int, StepMemory] = {}

    def nbytes_of(count: int) -> int:
        batch = count * multiple_of
        memories[batch] = memory_of(method, _arguments(args_of_batch, batch), {})
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
        is_compiled=compile,
    )


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
