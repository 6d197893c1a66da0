"""A network of the zoo: a loss, parameters and a batch."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, final

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax


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


def normal(seed: int, *shape: int) -> jax.Array:
    """Draws numbers of mean 0 and variance 1."""
    return jax.random.normal(jax.random.key(seed), shape)


def weights(seed: int, *shape: int) -> jax.Array:
    """Draws a matrix that keeps the variance of its input, `[..., in, out]`."""
    return normal(seed, *shape) / shape[-2] ** 0.5


def classes(seed: int, num_classes: int, *shape: int) -> jax.Array:
    """Draws labels."""
    return jax.random.randint(jax.random.key(seed), shape, 0, num_classes)


def trained(
    module: nn.Module,
    objective: Callable[..., jax.Array],
    inputs: Sequence[Any],
    targets: Sequence[Any] = (),
) -> Network:
    """Makes a network of a Linen module and an objective of what it returns.

    A module with an attribute `remat` has blocks.

    Args:
        module: The module, with no argument but its inputs.
        objective: `objective(outputs, *targets)`, a scalar.
        inputs: The inputs.
        targets: What else the objective needs.
    """
    variables = jax.jit(module.init)(jax.random.key(0), *inputs)
    rest = {name: v for name, v in variables.items() if name != "params"}

    def loss_of(module: nn.Module) -> Callable[..., jax.Array]:
        def loss(params: ArrayTree, *batch: Any) -> jax.Array:
            inputs_, targets_ = batch[: len(inputs)], batch[len(inputs) :]
            variables = {"params": params, **rest}
            outputs, _ = module.apply(variables, *inputs_, mutable=list(rest))
            return objective(outputs, *targets_)

        return loss

    has_blocks = hasattr(module, "remat")
    return Network(
        loss_of(module),
        perturbed(variables["params"]),
        (*inputs, *targets),
        loss_of(module.clone(remat=True)) if has_blocks else None,
    )


def classifier(
    module: nn.Module, inputs: jax.Array, *, num_classes: int = 10, per_token: bool
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


def initial(module: nn.Module, *inputs: Any) -> ArrayTree:
    """Returns parameters of a Linen module, of which constants are moved."""
    return perturbed(jax.jit(module.init)(jax.random.key(0), *inputs)["params"])


def applied(module: nn.Module, params: ArrayTree, *inputs: Any, **options: Any) -> Any:
    """Applies a Linen module that has parameters alone."""
    return module.apply({"params": params}, *inputs, **options)


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Returns the mean over all labels."""
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return jnp.mean(losses)


def block(function: Callable[..., Any], remat: bool) -> Callable[..., Any]:
    """Wraps a block, a function of a module and arrays, if `remat` says so."""
    return nn.remat(function) if remat else function


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
