"""What a competitor is."""

import dataclasses
from collections.abc import Mapping
from typing import final

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
        compiler_options: What the step is compiled with.
        gradient_tolerance: The largest relative error of the gradient against that of
            the unwrapped step. Zero memory would be easy with a wrong one.
        projection_tolerance: The same of its component along the exact gradient, which
            noise of many dimensions hardly changes and a wrong gradient does.
    """

    label: str
    wrap_block: WrapBlock = no_wrapping
    wrap_loss: WrapLoss = same_loss
    compiler_options: Mapping[str, str] = dataclasses.field(default_factory=dict)
    gradient_tolerance: float = 1e-3
    projection_tolerance: float = 1e-3
