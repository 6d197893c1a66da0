"""Losses of language models and of heads on top of them."""

import functools

import jax
import jax.numpy as jnp
import optax


def tied_logits(hidden: jax.Array, embedding: jax.Array) -> jax.Array:
    """Returns `hidden @ embedding.T` in float32.

    Args:
        hidden: [..., width], in the dtype that is computed in.
        embedding: [vocabulary, width]; what tokens are embedded with.

    Returns:
        Logits, float32 [..., vocabulary]. bfloat16 factors are summed in float32: with
        8 bits of mantissa the logits of a large vocabulary would not tell tokens apart.
    """
    return jnp.dot(
        hidden,
        embedding.astype(hidden.dtype).T,
        preferred_element_type=jnp.float32,
    )


def chunked_cross_entropy(
    hidden: jax.Array,
    embedding: jax.Array,
    labels: jax.Array,
    weights: jax.Array | None = None,
    *,
    chunk: int = 128,
) -> jax.Array:
    """Returns the weighted mean cross-entropy of `tied_logits(hidden, embedding)`.

        sum_i w_i (log sum_v exp(h_i . e_v) - h_i . e_{label_i}) / sum_i w_i

    The logits of `chunk` positions exist at a time, never those of all: the forward pass
    throws them away, and the backward pass computes them again, chunk by chunk.

    Args:
        hidden: [..., width]; one vector for each position.
        embedding: [vocabulary, width].
        labels: Integers [...]; where the weight is zero anything may stand.
        weights: [...], not negative; all one if `None`. If all are zero so is the loss.
        chunk: Positions at a time. Temporary memory is about
            `3 * 4 * chunk * vocabulary` bytes, and the gradient of the embedding.

    Returns:
        A float32 scalar.

    Raises:
        ValueError: If `chunk` is less than 1, or the shapes do not fit together.

    Example:
        >>> h, e = jnp.zeros((2, 5, 8)), jnp.ones((10, 8))
        >>> float(chunked_cross_entropy(h, e, jnp.zeros((2, 5), int), chunk=4).round(4))
        2.3026
    """
    if chunk < 1:
        raise ValueError(f"`chunk` must be at least 1, but got {chunk}.")
    if weights is None:
        weights = jnp.ones(labels.shape, jnp.float32)
    if not hidden.shape[:-1] == labels.shape == weights.shape:
        raise ValueError(
            "`hidden` without its last axis, `labels` and `weights` must have one shape, "
            f"but got {hidden.shape}, {labels.shape} and {weights.shape}."
        )
    if hidden.shape[-1:] != embedding.shape[1:]:
        raise ValueError(
            "`hidden` [..., width] and `embedding` [vocabulary, width] must have one "
            f"width, but got {hidden.shape} and {embedding.shape}."
        )
    weights = weights.astype(jnp.float32)
    valid = weights > 0
    columns = (
        hidden.reshape(-1, hidden.shape[-1]),
        jnp.where(valid, labels, 0).reshape(-1),
        weights.reshape(-1),
    )
    chunks = jax.tree.map(functools.partial(_in_chunks, chunk=chunk), columns)

    # Not saved but computed again: else `scan` would stack what the backward pass needs,
    # which are all logits.
    @jax.checkpoint
    def loss_of_chunk(embedding, hidden, labels, weights):
        losses = optax.softmax_cross_entropy_with_integer_labels(
            tied_logits(hidden, embedding), labels
        )
        return jnp.sum(losses * weights)

    def add(total, chunk):
        return total + loss_of_chunk(embedding, *chunk), None

    total, _ = jax.lax.scan(add, jnp.float32(0), chunks)
    return total / jnp.maximum(jnp.sum(weights), jnp.finfo(jnp.float32).tiny)


def _in_chunks(x: jax.Array, *, chunk: int) -> jax.Array:
    """[n, ...] to [chunks, chunk, ...]; what is missing to a whole chunk is zero."""
    num_chunks = -(-len(x) // chunk)
    margins = [(0, num_chunks * chunk - len(x))] + [(0, 0)] * (x.ndim - 1)
    return jnp.pad(x, margins).reshape(num_chunks, chunk, *x.shape[1:])


def sequence_loss(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Returns the mean loss of one label for each sequence.

    Args:
        logits: [batch, num_labels].
        labels: Integers [batch], whose loss is the cross-entropy; or, where there is one
            logit, numbers [batch], whose loss is the squared error.

    Returns:
        A float32 scalar.

    Raises:
        ValueError: If labels of several logits are not integers.
    """
    logits = logits.astype(jnp.float32)
    if logits.shape[-1] == 1:
        return jnp.mean((logits[:, 0] - labels.astype(jnp.float32)) ** 2)
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        raise ValueError(
            f"`labels` of {logits.shape[-1]} classes must be integers, but got "
            f"{labels.dtype}. Only a model with `num_labels=1` is for regression."
        )
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, labels))
