"""What a training step will need of memory: plain, `jax.checkpoint`, dafjax."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias, final, get_args

import jax

from dafjax._nbytes import readable
from dafjax._stand_in import standing_in
from dafjax._table import align


Method: TypeAlias = Literal["plain", "checkpoint", "dafjax"]
METHODS: tuple[Method, ...] = get_args(Method)

# What a wrapped function is under each method, if not what `remat_compress` made of it.
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
    """Bytes that one compiled step needs, on each device that it runs on.

    Attributes:
        temp_nbytes: Of its temporary arrays, residuals among them.
        argument_nbytes: Of its arguments: parameters, optimizer state, data.
        output_nbytes: Of its results.
        donated_nbytes: Of the results that take the place of donated arguments.
    """

    temp_nbytes: int
    argument_nbytes: int
    output_nbytes: int
    donated_nbytes: int

    @property
    def total_nbytes(self) -> int:
        """Bytes while the step runs; what is donated counts once."""
        new_nbytes = self.output_nbytes - self.donated_nbytes
        return self.argument_nbytes + new_nbytes + self.temp_nbytes


@final
@dataclasses.dataclass(frozen=True)
class Estimate:
    """What one step needs of memory, by method. Prints as a table.

    Attributes:
        plain: With the functions themselves in place of the wrapped ones.
        checkpoint: With `jax.checkpoint` of the functions in their place.
        dafjax: As it is.
    """

    plain: StepMemory
    checkpoint: StepMemory
    dafjax: StepMemory

    @property
    def checkpoint_ratio(self) -> float:
        """Temporary bytes under `jax.checkpoint` over the plain ones."""
        return self._ratio(self.checkpoint)

    @property
    def dafjax_ratio(self) -> float:
        """Temporary bytes under dafjax over the plain ones."""
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
    """Compiles a training step three ways and tells the memory of each. Runs nothing.

    The three are the same step, except that each function that `remat_compress` made
    and the step calls, at whatever depth, is replaced by the function that was wrapped,
    by `jax.checkpoint` of that, or by nothing. (Of wrapped functions inside wrapped
    ones dafjax heeds the outermost; `jax.checkpoint` is put round all of them.) Where a
    whole loss is wrapped, `jax.checkpoint` saves nothing: to see it at its best, wrap
    blocks.

    Figures are XLA's, for the device that the step would run on. What the process has
    beside the step, XLA cannot know.

    Args:
        step: The whole step, differentiation included. A function made by `jax.jit` is
            compiled as it is, with its donated and its static arguments; another is
            given to `jax.jit`.
        *args: Its arguments: arrays, or `jax.ShapeDtypeStruct`s in their place.
        compiler_options: Options for XLA, as in `jax.jit(compiler_options=...)`.
            `{"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}` is one.
        **kwargs: Its keyword arguments.

    Returns:
        The bytes of each.

    Raises:
        TypeError: `step` is not a function.
        ValueError: `step` calls no function that `remat_compress` made.

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
    """Compiles what `lower` returned; tells what the compiled program needs."""
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
    """Traces a step under one method.

    Raises:
        ValueError: The method replaces wrapped functions, and the step calls none.
    """
    jitted: Any = step if hasattr(step, "lower") else jax.jit(step)
    transform = _TRANSFORMS.get(method)
    if transform is None:
        return jitted.lower(*args, **kwargs)
    with standing_in(transform) as stand_in:
        lowered = jitted.lower(*args, **kwargs)
    if stand_in.num_calls == 0:
        raise ValueError(
            f"`{caller}(step, ...)`: `{getattr(step, '__name__', step)!s}` calls no "
            "function wrapped by `remat_compress` (or one with `bits=None`). Wrap the "
            "loss or its blocks first, and pass the step that differentiates it."
        )
    return lowered


def check_step(caller: str, step: Any) -> None:
    """Raises a `TypeError` if a step is no function."""
    if not callable(step):
        raise TypeError(
            f"`{caller}(step, ...)` must be given a function, but got `{step!r}`. Pass "
            f"the step and its arguments apart: `{caller}(step, params, batch)`."
        )
