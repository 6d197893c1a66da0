"""The derivative of `tanh` is one factor of a cotangent, in every version of JAX."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dafjax
from dafjax.stores import PagePool
from tests.helpers import prepared


def program_of(function, *arguments):
    closed = jax.make_jaxpr(function)(*arguments)
    return prepared(closed, [True] * len(arguments))


def primitives(equations):
    return [eqn.primitive for eqn in equations]


X = jnp.linspace(-12.0, 12.0, 24).reshape(4, 6)


@pytest.mark.parametrize("function", [jnp.tanh, jax.nn.gelu])
def test_there_is_one_term(function):
    program = program_of(lambda x: function(x), X)
    assert "one_minus_square" in primitives(program.forward)
    assert "sub" not in primitives(program.forward)
    # A GELU adds what its factors and its cube are read for.
    sums = primitives(program.backward).count("add_any")
    assert sums == (0 if function is jnp.tanh else 2)


@pytest.mark.parametrize("function", [jnp.tanh, jax.nn.gelu])
def test_gradients_are_as_before(function):
    gradient = jax.grad(dafjax.remat_compress(lambda x: function(x).sum(), bits=None))
    want = jax.grad(lambda x: function(x).sum())(X)
    np.testing.assert_allclose(gradient(X), want, rtol=1e-6, atol=1e-12)


def test_a_term_that_is_read_elsewhere_stays():
    """Sums that look alike, but are not, or are needed in parts."""

    @jax.custom_vjp
    def function(x):
        return jnp.tanh(x)

    def forward(x):
        y = jnp.tanh(x)
        return y, (y, 1 - y)

    def backward_twice(residuals, c):
        y, rest = residuals
        first = c * rest
        return (jax.lax.add(first, first * y) * jnp.sin(first),)

    function.defvjp(forward, backward_twice)
    gradient = jax.grad(dafjax.remat_compress(lambda x: function(x).sum(), bits=None))
    want = jax.grad(lambda x: function(x).sum())(X)
    np.testing.assert_allclose(gradient(X), want, rtol=1e-6, atol=1e-12)


@pytest.mark.slow
def test_noise_of_saturated_values_is_not_told_as_more_than_it_is():
    """Where terms cancel, importances grew a hundredfold with every layer."""
    keys = jax.random.split(jax.random.key(0), 9)
    weights = [jax.random.normal(key, (256, 256)) / 16 for key in keys[1:]]
    x = jax.random.normal(keys[0], (512, 256))

    def loss(weights, x):
        for w in weights:
            x = x + jax.nn.gelu(x @ w)
        return jnp.mean(x**2)

    with PagePool(name="saturated") as pool:
        wrapped = dafjax.remat_compress(loss, bits=dafjax.AverageBits(4), store=pool)
        gradient = jax.jit(jax.grad(wrapped))
        for _ in range(2):
            found = jax.block_until_ready(gradient(weights, x))
        importances = [site.importance for site in pool.stats().sites.values()]
    squares = sum(float(jnp.vdot(g, g)) for g in jax.tree.leaves(found))
    assert len(importances) > 4
    assert max(importances) < squares
