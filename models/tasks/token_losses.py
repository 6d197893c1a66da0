"""Losses of the tokens of each example, and their mean over a split."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from models.losses import chunked_cross_entropy


def losses_of_examples(
    hidden: jax.Array, embedding: jax.Array, labels: jax.Array, weights: jax.Array
) -> dict[str, jax.Array]:
    """Returns the mean loss of each example, and the weight that it has among others.

    Args:
        hidden: [batch, length, width].
        embedding: [vocabulary, width].
        labels: [batch, length].
        weights: [batch, length].
    """

    def of_one(example: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        hidden, labels, weights = example
        return chunked_cross_entropy(hidden, embedding, labels, weights)

    loss = jax.lax.map(of_one, (hidden, labels, weights))
    return {"loss": loss, "weight": jnp.sum(weights, axis=-1)}


def mean_loss(predictions: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Returns the mean loss of all tokens that count, and its exponential."""
    loss = float(
        np.average(
            predictions["loss"].astype(np.float64), weights=predictions["weight"]
        )
    )
    return {"loss": loss, "perplexity": float(np.exp(loss))}
