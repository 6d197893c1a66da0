"""Branches chosen in loops: JAX differentiates their bodies several times."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import dafjax
from dafjax.policies import CompressExpensive
from tests.helpers import relative_error


W = jax.random.normal(jax.random.key(1), (32, 32)) * 0.2
X = jax.random.normal(jax.random.key(2), (64, 32))
INDICES = jnp.array([0, 1, 2, 0])


def layer(w, c, i):
    """One of three layers, of which one needs no weight and one no activation."""
    kinds = [lambda c: jnp.tanh(c @ w), lambda c: c, lambda c: jax.nn.relu(c @ w)]
    return lax.switch(i, kinds, c)


def in_scan(w, x):
    return lax.scan(lambda c, i: (layer(w, c, i), None), x, INDICES)[0]


def in_scan_with_slices(w, x):
    """The weights of each layer are slices, and a carried value is never perturbed."""
    ws = jnp.stack([w, 2 * w, w, w])

    def step(carry, inputs):
        w, i = inputs
        count, c = carry
        return (count + 1.0, layer(w, c, i)), count

    (_, y), counts = lax.scan(step, (0.0, x), (ws, INDICES))
    return y * jnp.sum(counts)


def in_nested_scans(w, x):
    def inner(c, i):
        return lax.scan(lambda c, j: (layer(w, c, (i + j) % 3), None), c, INDICES)

    return lax.scan(lambda c, i: (inner(c, i)[0], None), x, INDICES)[0]


def in_map(w, x):
    return lax.map(lambda i: layer(w, x, i) @ w, INDICES).sum(0)


def vmapped(w, x):
    return jax.vmap(lambda i: layer(w, x, i) @ w)(INDICES).sum(0)


def in_cond_in_scan(w, x):
    def step(c, i):
        return lax.cond(i > 1, lambda c: in_scan(w, c), lambda c: c, c), None

    return lax.scan(step, x, INDICES)[0]


def with_unused_gradient(w, x):
    """A part of the carried value does not depend on what is differentiated."""

    def step(carry, i):
        still, c = carry
        return (jnp.sin(still), layer(w, c, i) + still), None

    return lax.scan(step, (x, x), INDICES)[0][1]


def assert_gradients(program, argnums, **options):
    def loss(w, x):
        return jnp.sum(program(w, x) ** 2)

    policy = CompressExpensive(min_nbytes=0)
    wrapped = dafjax.remat_compress(loss, bits=8, policy=policy, **options)
    exact = jax.tree.leaves(jax.jit(jax.grad(loss, argnums))(W, X))
    got = jax.tree.leaves(jax.jit(jax.grad(wrapped, argnums))(W, X))
    for g, e in zip(got, exact, strict=True):
        assert relative_error(g, e) < 0.05


@pytest.mark.parametrize(
    "program",
    [
        in_scan,
        in_scan_with_slices,
        in_nested_scans,
        in_map,
        vmapped,
        in_cond_in_scan,
        with_unused_gradient,
    ],
)
def test_gradients(program):
    """The carried value is perturbed from the second iteration on."""
    assert_gradients(program, 0)


@pytest.mark.parametrize("rematerialize", [False, True])
def test_gradients_of_both_arguments(rematerialize):
    assert_gradients(in_scan, (0, 1), rematerialize=rematerialize)


def test_a_frozen_weight_causes_no_residual_in_a_loop():
    """Only what depends on what is differentiated is perturbed."""

    def loss(w, frozen, x):
        y = lax.scan(lambda c, i: (layer(frozen, c, i), None), x, INDICES)[0]
        return jnp.sum((y @ w) ** 2)

    wrapped = dafjax.remat_compress(loss)
    plan = dafjax.saved_residuals(lambda w: wrapped(w, W, X), W)
    assert [item.shape for item in plan.kept] == [X.shape, X.shape]
