"""Estimates the memory of a training step: plain, `jax.checkpoint`, dafjax."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias, final, get_args

import jax

from dafjax._nbytes import readable
from dafjax._stand_in import standing_in
from dafjax._table import align


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
        raise ValueError(
            f"`{caller}(step, ...)`: `{getattr(step, '__name__', step)!s}` calls no "
            "function wrapped by `remat_compress` (or one with `bits=None`). Wrap the "
            "loss or its blocks first, and pass the step that differentiates it."
        )
    return lowered


def check_step(caller: str, step: Any) -> None:
    """Raises a `TypeError` if a step is not a function."""
    if not callable(step):
        raise TypeError(
            f"`{caller}(step, ...)` must be given a function, but got `{step!r}`. Pass "
            f"the step and its arguments apart: `{caller}(step, params, batch)`."
        )
