"""The bytes that ActNN counts as activations: the inputs of a model's layers.

ActNN (https://arxiv.org/abs/2104.14129) and DAF (https://arxiv.org/abs/2507.07149)
state their compression against the float32 inputs of all convolutions, dense layers and
norms, each layer's own.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, final

import flax.linen as nn
import jax


_LAYERS = (
    nn.Conv,
    nn.ConvTranspose,
    nn.Dense,
    nn.DenseGeneral,
    nn.BatchNorm,
    nn.GroupNorm,
    nn.LayerNorm,
    nn.RMSNorm,
)
_FLOAT32_NBYTES = 4


@final
@dataclasses.dataclass(frozen=True)
class LayerInputs:
    """The inputs of a model's layers.

    Attributes:
        num_layers: How many layers were called.
        nbytes: Their inputs in float32, each layer's own.
        unique_nbytes: The same, but an input that several layers share counts once.
    """

    num_layers: int
    nbytes: int
    unique_nbytes: int


def layer_inputs(fun: Callable[..., Any], *args: Any) -> LayerInputs:
    """Counts the inputs of the layers that a function calls; computes nothing.

    Args:
        fun: Calls Flax modules; pass one that is not wrapped.
        *args: Its arguments: arrays, or their shapes and dtypes.
    """
    inputs: list[jax.Array] = []

    def record(
        next_function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        context: nn.module.InterceptorContext,
    ) -> Any:
        if isinstance(context.module, _LAYERS) and context.method_name == "__call__":
            inputs.append(args[0])
        return next_function(*args, **kwargs)

    with nn.intercept_methods(record):
        jax.eval_shape(fun, *args)
    # The list keeps all of them alive, so that an id belongs to one value.
    unique = {id(x): x for x in inputs}
    return LayerInputs(
        num_layers=len(inputs),
        nbytes=sum(x.size for x in inputs) * _FLOAT32_NBYTES,
        unique_nbytes=sum(x.size for x in unique.values()) * _FLOAT32_NBYTES,
    )
