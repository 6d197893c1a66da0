"""What a training step keeps in memory: residuals, compiled bytes, the process."""

import math
import pathlib
from collections.abc import Callable
from typing import Any

import jax

from models.step import LossFunction


def saved_residual_nbytes(
    loss: LossFunction, *args: Any, jit: Callable[..., Any] = jax.jit
) -> int:
    """Returns the bytes that the forward pass keeps for the backward pass.

    `jax.vjp` returns a pytree whose leaves are the residuals. Nothing is computed: the
    function is traced. Arguments of the loss count nothing, since they live anyway.

    Args:
        loss: Differentiated with respect to its first argument; returns (value, aux).
        *args: Arrays, or their shapes and dtypes.
        jit: What compiles the step. Bits that it adapts are those that are planned.
    """

    def residuals(*args: Any) -> list[jax.Array]:
        params, *rest = args
        arguments = {id(leaf) for leaf in jax.tree.leaves(args)}
        _, vjp, _ = jax.vjp(lambda p: loss(p, *rest), params, has_aux=True)
        kept = {id(leaf): leaf for leaf in jax.tree.leaves(vjp)}
        return [leaf for key, leaf in kept.items() if key not in arguments]

    kept = jit(residuals).eval_shape(*args)
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in kept)


def temp_nbytes(compiled: jax.stages.Compiled) -> int:
    """Returns the temporary bytes of a compiled program, as planned by XLA."""
    analysis = compiled.memory_analysis()
    return analysis.temp_size_in_bytes


def resident_nbytes() -> int | None:
    """Returns the resident memory of this process, or `None` where unknown."""
    return _process_status("VmRSS")


def peak_resident_nbytes() -> int | None:
    """Returns the most resident memory this process has had, or `None`."""
    return _process_status("VmHWM")


def _process_status(key: str) -> int | None:
    # Only Linux has this file; elsewhere the figure is reported as unknown.
    status = pathlib.Path("/proc/self/status")
    if not status.exists():
        return None
    for line in status.read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024  # the file counts in KiB
    return None
