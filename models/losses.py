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

    The logits of `chunk` positions exist at a time, never those of all: the gradient of
    a chunk's losses is made with them, in the forward pass already, if one is asked
    for. That takes three products of a chunk with the embedding; computing logits again
    in the backward pass would take a fourth.

    Args:
        hidden: [..., width]; one vector for each position.
        embedding: [vocabulary, width].
        labels: Integers [...]; where the weight is zero anything may stand.
        weights: [...], not negative; all one if `None`. If all are zero so is the loss.
        chunk: Positions at a time. Temporary memory is about
            `3 * 4 * chunk * vocabulary` bytes, and the gradient of the embedding.

    Returns:
        A float32 scalar. It has first derivatives, in reverse mode.

    Raises:
        ValueError: If `chunk` is less than 1, or the shapes do not fit together.

    Example:
        >>> h, e = jnp.zeros((2, 5, 8)), jnp.ones((10, 8))
        >>> f"{chunked_cross_entropy(h, e, jnp.zeros((2, 5), int), chunk=4):.4f}"
        '2.3026'
    """
    if chunk < 1:
        raise ValueError(f"`chunk` must be at least 1, but got {chunk}.")
    if weights is None:
        weights = jnp.ones(labels.shape, jnp.float32)
    if not hidden.shape[:-1] == labels.shape == weights.shape:
        raise ValueError(
            "`hidden` without its last axis, `labels` and `weights` must have one "
            f"shape, but got {hidden.shape}, {labels.shape} and {weights.shape}."
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

    total = _sum_of_losses(chunks[0], embedding, *chunks[1:])
    return total / jnp.maximum(jnp.sum(weights), jnp.finfo(jnp.float32).tiny)


def _losses_of_chunk(
    hidden: jax.Array, embedding: jax.Array, labels: jax.Array, weights: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns the weighted sum of a chunk's losses, and the losses."""
    losses = optax.softmax_cross_entropy_with_integer_labels(
        tied_logits(hidden, embedding), labels
    )
    return jnp.sum(losses * weights), losses


@jax.custom_vjp
def _sum_of_losses(
    hidden: jax.Array, embedding: jax.Array, labels: jax.Array, weights: jax.Array
) -> jax.Array:
    """Sums over chunks.

    Args:
        hidden: [chunks, chunk, width].
        embedding: [vocabulary, width].
        labels: [chunks, chunk].
        weights: [chunks, chunk].
    """

    def add(total, chunk):
        hidden, labels, weights = chunk
        return total + _losses_of_chunk(hidden, embedding, labels, weights)[0], None

    return jax.lax.scan(add, jnp.float32(0), (hidden, labels, weights))[0]


def _forward(hidden, embedding, labels, weights):
    # What is differentiated, among them: a frozen embedding has no gradient to sum up.
    wanted = (hidden.perturbed, embedding.perturbed, weights.perturbed)

    def add(carry, chunk):
        total, of_embedding = carry
        hidden, labels, weights = chunk
        argnums = (0, 1) if embedding.perturbed else (0,)
        (value, losses), (of_hidden, *rest) = jax.value_and_grad(
            _losses_of_chunk, argnums, has_aux=True
        )(hidden, embedding.value, labels, weights)
        of_embedding = [
            _to_bits(_from_bits(bits) + x)
            for bits, x in zip(of_embedding, rest, strict=True)
        ]
        return (total + value, of_embedding), (_to_bits(of_hidden), _to_bits(losses))

    start = [_to_bits(jnp.zeros_like(embedding.value))] if embedding.perturbed else []
    (total, of_embedding), (of_hidden, losses) = jax.lax.scan(
        add,
        (jnp.float32(0), start),
        (hidden.value, labels.value, weights.value),
    )
    gradients = (of_hidden, of_embedding[0] if of_embedding else None, losses)
    return total, [
        x if is_wanted else None for x, is_wanted in zip(gradients, wanted, strict=True)
    ]


def _backward(residuals, cotangent):
    if isinstance(cotangent, jax.custom_derivatives.SymbolicZero):
        return None, None, None, None
    # Without this tie the numbers could be made from their patterns in the forward
    # pass, and be what waits.
    residuals, cotangent = jax.lax.optimization_barrier((residuals, cotangent))
    of_hidden, of_embedding, of_weights = (
        None if bits is None else _scale(cotangent, _from_bits(bits))
        for bits in residuals
    )
    return of_hidden, of_embedding, None, of_weights


_sum_of_losses.defvjp(_forward, _backward, symbolic_zeros=True)


def _scale(factor: jax.Array, x: jax.Array) -> jax.Array:
    return (factor * x.astype(factor.dtype)).astype(x.dtype)


# Gradients wait as bit patterns. They are small beside logits, and the gradients of all
# layers are multiples of them: what rounds floating-point residuals must not round
# these. They are patterns within the loop already: its results may be what is rounded.
_PATTERNS = {"bfloat16": "uint16", "float16": "int16", "float32": "uint32"}
_NUMBERS = {pattern: number for number, pattern in _PATTERNS.items()}


def _to_bits(x: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(x, _PATTERNS[x.dtype.name])


def _from_bits(bits: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(bits, _NUMBERS[bits.dtype.name])


def _in_chunks(x: jax.Array, *, chunk: int) -> jax.Array:
    """[n, ...] to [chunks, chunk, ...]; what is missing to a whole chunk is zero."""
    num_chunks = -(-len(x) // chunk)
    margins = [(0, num_chunks * chunk - len(x))] + [(0, 0)] * (x.ndim - 1)
    return jnp.pad(x, margins).reshape(num_chunks, chunk, *x.shape[1:])


def sequence_loss(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Returns the mean loss of one label for each sequence.

    Args:
        logits: [batch, num_labels].
        labels: Integers [batch], whose loss is the cross-entropy; or, where there is
            one logit, numbers [batch], whose loss is the squared error.

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
