"""The chunked cross-entropy is the plain one, in less memory."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dafjax
from models import losses
from tests.helpers import relative_error, temp_nbytes


pytestmark = pytest.mark.usefixtures("standard_promotion")


def problem(key, *, batch=3, length=7, width=16, vocabulary=50, dtype="float32"):
    keys = jax.random.split(key, 4)
    hidden = jax.random.normal(keys[0], (batch, length, width), dtype)
    embedding = jax.random.normal(keys[1], (vocabulary, width))
    labels = jax.random.randint(keys[2], (batch, length), 0, vocabulary)
    weights = jax.random.uniform(keys[3], (batch, length))
    return hidden, embedding, labels, weights.at[0, 2:].set(0)


def plain(hidden, embedding, labels, weights):
    logits = losses.tied_logits(hidden, embedding)
    each = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return jnp.sum(each * weights) / jnp.sum(weights)


@pytest.mark.parametrize("chunk", [1, 4, 21, 100])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_value_and_gradient_are_those_of_all_logits(key, chunk, dtype):
    arguments = problem(key, dtype=dtype)

    def chunked(*arguments):
        return losses.chunked_cross_entropy(*arguments, chunk=chunk)

    got, want = (
        jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(*arguments)
        for loss in (chunked, plain)
    )
    tolerance = 1e-5 if dtype == "float32" else 0.02
    np.testing.assert_allclose(got[0], want[0], rtol=tolerance)
    for x, exact in zip(got[1], want[1], strict=True):
        assert x.dtype == exact.dtype
        assert relative_error(x, exact) < tolerance


def test_weights_have_a_gradient_too(key):
    arguments = problem(key)
    got, want = (
        jax.grad(loss, argnums=3)(*arguments)
        for loss in (losses.chunked_cross_entropy, plain)
    )
    # Labels of no weight are not looked at.
    counted = arguments[3] > 0
    np.testing.assert_allclose(got[counted], want[counted], rtol=1e-4, atol=1e-6)


def test_a_frozen_embedding_has_no_gradient_that_is_summed_up(key):
    hidden, embedding, labels, weights = problem(key)

    def loss(hidden):
        return losses.chunked_cross_entropy(hidden, embedding, labels, weights, chunk=4)

    _, residuals = jax.eval_shape(lambda h: jax.vjp(loss, h), hidden)
    shapes = {leaf.shape for leaf in jax.tree.leaves(residuals)}
    assert shapes == {(), (6, 4, 16)}


def test_labels_of_no_weight_count_nothing(key):
    hidden, embedding, labels, weights = problem(key)
    bad = jnp.where(weights == 0, -100, labels)
    loss = losses.chunked_cross_entropy(hidden, embedding, bad, weights, chunk=4)
    np.testing.assert_allclose(
        loss, plain(hidden, embedding, labels, weights), rtol=1e-5
    )
    nothing = jnp.zeros_like(weights)
    assert losses.chunked_cross_entropy(hidden, embedding, labels, nothing) == 0


@pytest.mark.parametrize("wrap", [lambda loss: loss, dafjax.remat_compress])
def test_all_logits_never_exist(key, wrap):
    arguments = problem(key, batch=4, length=128, width=32, vocabulary=4000)
    all_logits = 4 * 128 * 4000 * 4

    def chunked(*arguments):
        return losses.chunked_cross_entropy(*arguments, chunk=32)

    def nbytes(loss):
        gradient = jax.jit(jax.value_and_grad(wrap(loss), argnums=(0, 1)))
        return temp_nbytes(gradient.lower(*arguments))

    assert nbytes(plain) > all_logits
    # Three arrays of a chunk's logits and two of the embedding: see the docstring.
    most = 3 * 4 * 32 * 4000 + 2 * 4 * 4000 * 32
    assert nbytes(chunked) < most < all_logits / 3


def test_compressed_the_gradient_is_that_of_the_plain_loss(key):
    arguments = problem(key, batch=4, length=64, width=32, vocabulary=200)
    wrapped = dafjax.remat_compress(
        lambda *args: losses.chunked_cross_entropy(*args, chunk=32)
    )
    got = jax.jit(jax.value_and_grad(wrapped, argnums=(0, 1)))(*arguments)
    want = jax.jit(jax.value_and_grad(plain, argnums=(0, 1)))(*arguments)
    np.testing.assert_allclose(got[0], want[0], rtol=1e-5)
    # Nothing of the loss itself is rounded.
    for x, exact in zip(got[1], want[1], strict=True):
        assert relative_error(x, exact) < 1e-4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"chunk": 0}, "`chunk` must be at least 1, but got 0"),
        (
            {"labels": jnp.zeros((3, 6), int)},
            r"must have one shape, but got .*\(3, 6\)",
        ),
        (
            {"embedding": jnp.zeros((50, 8))},
            r"must have one width, but got .*\(50, 8\)",
        ),
    ],
)
def test_a_bad_argument_is_an_error_that_names_it(key, change, message):
    names = ("hidden", "embedding", "labels", "weights")
    arguments = dict(zip(names, problem(key), strict=True)) | change
    with pytest.raises(ValueError, match=message):
        losses.chunked_cross_entropy(**arguments)


def test_one_logit_is_a_regression():
    logits = jnp.asarray([[1.0], [2.0]])
    assert losses.sequence_loss(logits, jnp.asarray([0.0, 4.0])) == 2.5


def test_several_logits_are_classes(key):
    logits = jax.random.normal(key, (5, 3))
    labels = jnp.asarray([0, 1, 2, 1, 0])
    want = -jnp.mean(jax.nn.log_softmax(logits)[jnp.arange(5), labels])
    np.testing.assert_allclose(losses.sequence_loss(logits, labels), want, rtol=1e-6)
    with pytest.raises(ValueError, match="`labels` of 3 classes must be integers"):
        losses.sequence_loss(logits, labels.astype(jnp.float32))
