"""Rounding noise is fresh in each step, and the same where a step is repeated."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dafjax
from dafjax import _derivative
from dafjax.policies import CompressExpensive


WIDTH = 128
X = jax.random.normal(jax.random.key(0), (256, WIDTH))
FROZEN = jax.random.normal(jax.random.key(1), (WIDTH, WIDTH)) / WIDTH**0.5


def adapted_loss(p, x):
    """Below the adapter nothing is trained: its input is the same in every epoch."""
    h = jnp.tanh(x @ FROZEN)
    return jnp.mean(((h @ p["a"]) @ p["b"]) * X)


def adapters(seed):
    a, b = jax.random.normal(jax.random.key(seed), (2, WIDTH, 8)) * 0.1
    return {"a": a, "b": b.T}


def errors(steps):
    """Returns the error of the adapter's gradient in each step."""
    wrapped = dafjax.remat_compress(adapted_loss, policy=CompressExpensive())
    gradient = jax.jit(jax.grad(wrapped))
    exact = jax.jit(jax.grad(adapted_loss))
    found = []
    for step in steps:
        p = jax.tree.map(lambda x, step=step: x * (1 + 1e-3 * step), adapters(2))
        error = gradient(p, X)["a"] - exact(p, X)["a"]
        found.append(np.ravel(error) / np.linalg.norm(error))
    return np.stack(found)


def cosines(found):
    products = found @ found.T
    return np.abs(products[np.triu_indices(len(found), 1)])


def test_noise_of_two_epochs_has_nothing_in_common():
    assert np.mean(cosines(errors(range(6)))) < 0.1


def test_without_a_fresh_seed_it_is_the_same(monkeypatch):
    monkeypatch.setattr(_derivative, "freshen", lambda seed, _: seed)
    assert np.mean(cosines(errors(range(3)))) > 0.5


def test_a_step_repeats_exactly():
    first, second = errors([1, 1])
    np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_an_eager_step_has_the_noise_of_a_compiled_one(dtype):
    p = jax.tree.map(lambda x: x.astype(dtype), adapters(2))

    def loss(p, x):
        return adapted_loss(jax.tree.map(lambda x: x.astype(jnp.float32), p), x)

    gradient = jax.grad(dafjax.remat_compress(loss))
    eager, compiled = gradient(p, X)["a"], jax.jit(gradient)(p, X)["a"]
    error = np.linalg.norm(np.float32(eager - compiled))
    assert error < 0.02 * np.linalg.norm(np.float32(compiled))


def test_vmapped_models_share_a_seed():
    """Rows with seeds of their own would be packed one by one."""
    models = jax.tree.map(lambda x: jnp.stack([x, 2 * x]), adapters(2))
    gradient = jax.vmap(jax.grad(dafjax.remat_compress(adapted_loss)), (0, None))
    assert "while" not in str(jax.make_jaxpr(gradient)(models, X))
