"""Numbers that are drawn from a key inside of a function are drawn again, exactly."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import dafjax
from dafjax.policies import CompressExpensive
from tests.helpers import relative_error


X = jax.random.normal(jax.random.key(1), (256, 256))
W = jax.random.normal(jax.random.key(2), (256, 256)) / 16


def layers_drawn(x, key, draw):
    for _ in range(3):
        key, k = jax.random.split(key)
        x = jax.nn.relu(draw(k, (256, 256)).astype(x.dtype) @ x + 1)
    return jnp.log(x.sum())


@pytest.mark.parametrize(
    "draw",
    [
        jax.random.normal,
        jax.random.uniform,
        jax.random.rademacher,
        lambda key, shape: jax.random.normal(key, shape, jnp.bfloat16),
    ],
    ids=["normal", "uniform", "signs", "bfloat16"],
)
@pytest.mark.parametrize("make", [jax.random.key, jax.random.PRNGKey])
def test_matrices_are_exact(draw, make):
    def loss(x):
        return layers_drawn(x, make(0), draw)

    wrapped = dafjax.remat_compress(loss)
    got = jax.jit(jax.grad(wrapped))(X)
    assert relative_error(got, jax.jit(jax.grad(loss))(X)) < 1e-3
    kept = dafjax.saved_residuals(wrapped, X).kept
    assert {item.dtype for item in kept if item.raw_nbytes > 64} == {jnp.dtype(bool)}


def test_keys_that_are_arguments():
    wrapped = dafjax.remat_compress(lambda x, k: layers_drawn(x, k, jax.random.normal))
    for key in (
        jax.random.key(3),
        jax.random.PRNGKey(3),
        jax.random.key(3, impl="rbg"),
    ):
        exact = jax.grad(lambda x, k: layers_drawn(x, k, jax.random.normal))(X, key)
        assert relative_error(jax.jit(jax.grad(wrapped))(X, key), exact) < 1e-3


def test_in_a_scan():
    def loss(x, keys):
        def step(x, key):
            return jax.nn.relu(jax.random.normal(key, (256, 256)) @ x / 16), None

        return jnp.log(jnp.sum(lax.scan(step, x, keys)[0]))

    keys = jax.random.split(jax.random.key(0), 3)
    wrapped = dafjax.remat_compress(loss)
    exact = jax.grad(loss)(X, keys)
    assert relative_error(jax.jit(jax.grad(wrapped))(X, keys), exact) < 1e-3


def test_they_take_no_memory_between_the_passes():
    """Drawn in the forward pass alone they would be kept as they are."""

    def loss(w, key):
        x = X
        for k in jax.random.split(key, 8):
            x = jnp.tanh(x @ w + jax.random.normal(k, (256, 256)) * (x @ w))
        return jnp.mean(x**2)

    wrapped = jax.jit(jax.grad(dafjax.remat_compress(loss)))
    compiled = wrapped.lower(W, jax.random.key(0)).compile()
    temp = compiled.memory_analysis().temp_size_in_bytes
    assert temp < 8 * X.nbytes


def test_a_mask_that_is_drawn_is_kept_as_bits():
    def loss(w, key):
        keep = jax.random.bernoulli(key, 0.5, (256, 256))
        return jnp.sum(jnp.where(keep, X @ w, 0) ** 2)

    kept = dafjax.saved_residuals(
        dafjax.remat_compress(loss, policy=CompressExpensive()), W, jax.random.key(0)
    ).kept
    (mask,) = [item for item in kept if item.dtype == jnp.bool_]
    assert mask.stored_nbytes == mask.raw_nbytes // 8


def test_what_takes_longer_to_draw_than_a_product_is_not_drawn_again():
    def loss(w, key):
        return jnp.sum(jnp.sin(w[0] * jax.random.normal(key, (256, 256))))

    kept = dafjax.saved_residuals(
        dafjax.remat_compress(loss), W, jax.random.key(0)
    ).kept
    assert any(item.shape == (256, 256) for item in kept)
