"""How tensors of a file and variables of a model belong together."""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np


LINEAR = (1, 0)
"""Axes of PyTorch's [out, in] in the order of Flax's [in, out]."""

CONVOLUTION = (2, 3, 1, 0)
"""Axes of PyTorch's [out, in, height, width] in the order of Flax's."""


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One tensor of a file, and the variable that it becomes.

    Attributes:
        name: In the file.
        path: Of the variable, such as `"params/head/out/kernel"`.
        layer: Which row of the variable it is, where `nn.scan` stacks all layers.
        axes: Its axes in the order of the variable's; `None`: as they are.
    """

    name: str
    path: str
    layer: int | None = None
    axes: tuple[int, ...] | None = None

    def shape_in_file(self, variable: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the tensor's shape, given that of the variable."""
        shape = variable if self.layer is None else variable[1:]
        if self.axes is None:
            return shape
        return tuple(shape[axis] for axis in np.argsort(self.axes))

    def to_model(self, x: np.ndarray) -> np.ndarray:
        """Returns the variable, or its row, for what is in the file."""
        return x if self.axes is None else np.transpose(x, self.axes)

    def to_file(self, variable: np.ndarray) -> np.ndarray:
        """Returns what is in the file, for the variable."""
        x = variable if self.layer is None else variable[self.layer]
        return x if self.axes is None else np.transpose(x, np.argsort(self.axes))


@dataclasses.dataclass(frozen=True)
class Family:
    """What a model's files hold.

    Attributes:
        origin: Where such files come from, for messages.
        prefix: What names in files begin with, or not: files of the model without its
            head leave it out.
        tensors: All of them, named with the prefix. Those of the adapters are apart.
        adapted: The tensors that adapters are added to.
        heads: Patterns of names of heads, of this task and of others, as `fnmatch` has
            them and without the prefix.
        ignored: Patterns of names that are no weights of the model.
        tied: Other names of tensors. A file has one of the two, or both and equal.
        adapter_options: Entries of PEFT's `adapter_config.json`.
    """

    origin: str
    prefix: str
    tensors: tuple[Tensor, ...]
    adapted: tuple[Tensor, ...] = ()
    heads: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    tied: Mapping[str, str] = dataclasses.field(default_factory=dict)
    adapter_options: Mapping[str, object] = dataclasses.field(default_factory=dict)

    @property
    def adapters(self) -> tuple[Tensor, ...]:
        """The tensors of adapters, as PEFT names them and lays them out.

        Beside a weight `x.weight` are `base_model.model.x.lora_A.weight` [rank, in] and
        `base_model.model.x.lora_B.weight` [out, rank].
        """
        return tuple(
            dataclasses.replace(
                tensor,
                name=peft_name(tensor.name.removesuffix("weight") + f"lora_{x}.weight"),
                path=f"lora/{layer}_lora/{x.lower()}",
                axes=LINEAR,
            )
            for tensor in self.adapted
            for layer in [tensor.path.split("/", 1)[1].removesuffix("/kernel")]
            for x in "AB"
        )


def peft_name(name: str) -> str:
    """Returns the name in a file of PEFT of what it trains beside the adapters."""
    return f"base_model.model.{name}"


def layer_norm(name: str, path: str, layer: int | None = None) -> Sequence[Tensor]:
    """Returns scale and bias of a normalization; paths are below `params`."""
    return (
        Tensor(f"{name}.weight", f"params/{path}/scale", layer),
        Tensor(f"{name}.bias", f"params/{path}/bias", layer),
    )


def dense(
    name: str,
    path: str,
    layer: int | None = None,
    axes: tuple[int, ...] | None = LINEAR,
) -> Sequence[Tensor]:
    """Returns kernel and bias of a layer; paths are below `params`."""
    return (
        Tensor(f"{name}.weight", f"params/{path}/kernel", layer, axes),
        Tensor(f"{name}.bias", f"params/{path}/bias", layer),
    )
