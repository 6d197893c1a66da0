"""A network of the zoo: a loss, parameters and a batch."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import flax.linen as nn
import jax
import numpy as np

from benchmarks.zoo.draws import classes, normal
from benchmarks.zoo.parts import cross_entropy


ArrayTree = Any


@final
@dataclasses.dataclass(frozen=True)
class Network:
    """A loss to differentiate.

    Attributes:
        loss: `loss(params, *batch)`, a scalar.
        params: Its parameters.
        batch: Its data, arrays or keys.
        blocks: The same loss with `jax.checkpoint` round each block, or None.
    """

    loss: Callable[..., jax.Array]
    params: ArrayTree
    batch: tuple[Any, ...]
    blocks: Callable[..., jax.Array] | None = None


Networks = Mapping[str, Callable[[], Network]]


def trained(
    module: nn.Module,
    objective: Callable[..., jax.Array],
    inputs: Sequence[Any],
    targets: Sequence[Any] = (),
) -> Network:
    """Makes a network of a Linen module and an objective of its outputs.

    A module with an attribute `remat` has blocks.

    Args:
        module: The module, with no argument but its inputs.
        objective: `objective(outputs, *targets)`, a scalar.
        inputs: The inputs.
        targets: The other arguments of the objective.
    """
    variables = jax.jit(module.init)(jax.random.key(0), *inputs)
    rest = {name: v for name, v in variables.items() if name != "params"}

    def loss(module: nn.Module, params: ArrayTree, *batch: Any) -> jax.Array:
        inputs_, targets_ = batch[: len(inputs)], batch[len(inputs) :]
        variables = {"params": params, **rest}
        outputs, _ = module.apply(variables, *inputs_, mutable=list(rest))
        return objective(outputs, *targets_)

    return of_module(module, loss, perturbed(variables["params"]), *inputs, *targets)


def of_module(
    module: nn.Module,
    loss: Callable[..., jax.Array],
    params: ArrayTree,
    *batch: Any,
) -> Network:
    """Makes a network of `loss(module, params, *batch)`.

    A module with an attribute `remat` has blocks.
    """
    blocks = None
    if hasattr(module, "remat"):
        blocks = functools.partial(loss, module.clone(remat=True))
    return Network(functools.partial(loss, module), params, batch, blocks)


def classifier(
    module: nn.Module,
    inputs: jax.Array,
    *,
    num_classes: int = 10,
    per_token: bool = False,
) -> Network:
    """Makes a network of a Linen module that returns logits.

    Args:
        module: The module, with no argument but its input.
        inputs: The input.
        num_classes: The number of logits.
        per_token: Whether each token has a label, and not each example.
    """
    shape = inputs.shape[:2] if per_token else inputs.shape[:1]
    return trained(module, cross_entropy, [inputs], [classes(1, num_classes, *shape)])


def language_model(module: nn.Module, vocabulary: int, length: int = 64) -> Network:
    """Makes a network of a Linen module that returns logits for each token."""
    tokens = classes(2, vocabulary, 8, length)
    return classifier(module, tokens, num_classes=vocabulary, per_token=True)


def initial(module: nn.Module, *inputs: Any) -> ArrayTree:
    """Returns the parameters of a Linen module, with constants moved."""
    return perturbed(jax.jit(module.init)(jax.random.key(0), *inputs)["params"])


def applied(module: nn.Module, params: ArrayTree, *inputs: Any, **options: Any) -> Any:
    """Applies a Linen module that has parameters alone."""
    return module.apply({"params": params}, *inputs, **options)


def perturbed(params: ArrayTree) -> ArrayTree:
    """Moves constant parameters, such as biases of 0 and scales of 1, by 0.2 or so.

    With a bias of 0, the scale before it has no gradient if a later norm divides it
    out. Trained networks have other biases.
    """
    leaves, structure = jax.tree.flatten(params)
    constant = [bool(np.all(leaf == leaf.flat[0])) for leaf in map(np.asarray, leaves)]

    @jax.jit
    def move(leaves: Sequence[jax.Array]) -> list[jax.Array]:
        return [
            leaf + (0.2 * normal(n, *leaf.shape)).astype(leaf.dtype) if moves else leaf
            for n, (leaf, moves) in enumerate(zip(leaves, constant, strict=True))
        ]

    return structure.unflatten(move(leaves))
