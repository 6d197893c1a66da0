"""Lookups in tables that are converted."""

import jax
import jax.numpy as jnp
import pytest

import dafjax


pytestmark = pytest.mark.usefixtures("standard_promotion")

WORDS, WIDTH = 500, 64


@pytest.fixture
def table(key):
    return jax.random.normal(key, (WORDS, WIDTH))


@pytest.fixture
def words(key):
    return jax.random.randint(key, (4, 8), 0, WORDS)


def embed(table, words):
    return jnp.sin(jnp.take(table.astype(jnp.bfloat16), words, axis=0))


def test_a_gradient_of_embeddings_is_that_of_the_plain_function(table, words):
    def loss(table):
        hidden = embed(table, words)
        for _ in range(3):
            hidden = jnp.tanh(hidden * 1.1)
        return jnp.sum(hidden.astype(jnp.float32) ** 2)

    policy = dafjax.policies.CompressExpensive(min_nbytes=64)
    wrapped = dafjax.remat_compress(loss, bits=8, policy=policy)
    value, gradient = jax.value_and_grad(wrapped)(table)
    exact_value, exact = jax.value_and_grad(loss)(table)
    assert value == exact_value
    error = jnp.linalg.norm(gradient - exact) / jnp.linalg.norm(exact)
    assert error < 0.03
