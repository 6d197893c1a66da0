"""A network of the zoo: a loss, parameters and a batch."""

import dataclasses
from collections.abc import Callable
from typing import Any, final

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax


ArrayTree = Any


@final
@dataclasses.dataclass(frozen=True)
class Network:
    """A loss to differentiate.

    Attributes:
        loss: `loss(params, *batch)`, a scalar.
        params: Its parameters.
        batch: Its data.
    """

    loss: Callable[..., jax.Array]
    params: ArrayTree
    batch: tuple[jax.Array, ...]


def normal(seed: int, *shape: int) -> jax.Array:
    """Draws numbers of mean 0 and variance 1."""
    return jax.random.normal(jax.random.key(seed), shape)


def weights(seed: int, *shape: int) -> jax.Array:
    """Draws a matrix that keeps the variance of its input, `[..., in, out]`."""
    return normal(seed, *shape) / shape[-2] ** 0.5


def classes(seed: int, num_classes: int, *shape: int) -> jax.Array:
    """Draws labels."""
    return jax.random.randint(jax.random.key(seed), shape, 0, num_classes)


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
    variables = module.init(jax.random.key(0), inputs)
    params = variables["params"]
    rest = {name: v for name, v in variables.items() if name != "params"}
    shape = inputs.shape[:2] if per_token else inputs.shape[:1]
    labels = classes(1, num_classes, *shape)

    def loss(params: ArrayTree, inputs: jax.Array, labels: jax.Array) -> jax.Array:
        logits, _ = module.apply({"params": params, **rest}, inputs, mutable=list(rest))
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return jnp.mean(losses)

    return Network(loss, perturbed(params), (inputs, labels))


def perturbed(params: ArrayTree) -> ArrayTree:
    """Moves constant parameters, such as biases of 0 and scales of 1, by 0.2 or so.

    With a bias of 0, the scale before it has no gradient if a later norm divides it
    out. Trained networks have other biases.
    """
    leaves, structure = jax.tree.flatten(params)
    return structure.unflatten(
        leaf + 0.2 * normal(n, *leaf.shape) if jnp.std(leaf) == 0 else leaf
        for n, leaf in enumerate(leaves)
    )
