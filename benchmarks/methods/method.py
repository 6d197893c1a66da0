"""What a competitor is."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, final

import jax

from models.methods import same_loss
from models.step import WrapLoss
from models.wrapping import WrapBlock, no_wrapping


@final
@dataclasses.dataclass(frozen=True)
class Method:
    """One way to run the same training step.

    Attributes:
        label: As in tables.
        wrap_block: Applied to the class of the model's blocks.
        wrap_loss: Applied to the whole loss.
        jit: What compiles the step, used as `jax.jit`.
        compiler_options: What the step is compiled with.
        gradient_tolerance: The largest relative error of the gradient against that of
            the unwrapped step. Zero memory would be easy with a wrong one.
        projection_tolerance: The same of its component along the exact gradient, which
            noise of many dimensions hardly changes and a wrong gradient does.
    """

    label: str
    wrap_block: WrapBlock = no_wrapping
    wrap_loss: WrapLoss = same_loss
    jit: Callable[..., Any] = jax.jit
    compiler_options: Mapping[str, str] = dataclasses.field(default_factory=dict)
    gradient_tolerance: float = 1e-3
    projection_tolerance: float = 1e-3
