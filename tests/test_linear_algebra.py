"""Factors of matrices are read exactly: what solves with them divides by them."""

import jax
import jax.numpy as jnp
import pytest

import dafjax
from tests.helpers import relative_error


SIZE, BATCH = 16, 64
SCALES = jnp.diag(10.0 ** jnp.linspace(0, 5, SIZE))


def matrix(w, x):
    """Its rows differ by a factor of 10^5."""
    return x @ w + SCALES


LOSSES = {
    "solve": lambda w, x: jnp.sum(jnp.sin(jnp.linalg.solve(matrix(w, x), x))),
    "slogdet": lambda w, x: jnp.sum(jnp.linalg.slogdet(matrix(w, x))[1]),
    "inverse": lambda w, x: jnp.sum(x * jnp.linalg.inv(matrix(w, x))),
    "triangular": lambda w, x: jnp.sum(
        x * jax.lax.linalg.triangular_solve(matrix(w, x), x, left_side=True, lower=True)
    ),
}


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("name", LOSSES)
def test_gradients_through_badly_scaled_factors(name, key):
    w_key, x_key = jax.random.split(key)
    w = 0.02 * jax.random.normal(w_key, (SIZE, SIZE))
    x = jax.random.normal(x_key, (BATCH, SIZE, SIZE))
    loss = LOSSES[name]
    wrapped = dafjax.remat_compress(loss, bits=8)
    got, exact = (jax.jit(jax.grad(f))(w, x) for f in (wrapped, loss))
    assert relative_error(got, exact) < 0.05
