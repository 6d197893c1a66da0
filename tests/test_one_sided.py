"""Dithered rounding is for what is spread over its range and read smoothly."""

import jax
import jax.numpy as jnp
import pytest

import dafjax
from dafjax.codecs import Affine
from dafjax.policies import CompressExpensive


W = jnp.eye(64)
X = jax.random.normal(jax.random.key(0), (256, 64))


def rounding_of(f):
    """Returns the rounding of each residual in codes, by its primitive."""

    def loss(w):
        return jnp.mean(f(X @ w) @ w)

    kept = dafjax.saved_residuals(
        dafjax.remat_compress(loss, policy=CompressExpensive()), W
    ).kept
    items = [item for item in kept if isinstance(item.codec, Affine)]
    return {item.primitive: item.codec.rounding for item in items}


@pytest.mark.parametrize(
    "f",
    [
        lambda y: y * 2,
        jnp.sin,
        jax.nn.gelu,
        jax.nn.silu,
        lambda y: y**3,
        lambda y: y * y,
    ],
    ids=["product", "sine", "gelu", "silu", "cube", "square"],
)
def test_what_is_spread_is_dithered(f):
    assert set(rounding_of(f).values()) <= {"dithered"}


@pytest.mark.parametrize(
    "f", [jnp.cbrt, lambda y: jnp.sqrt(jnp.abs(y))], ids=["cube root", "square root"]
)
def test_what_is_read_by_a_function_with_a_pole_is_not(f):
    """It must not leave the range that its values have."""
    assert rounding_of(f)["dot_general"] == "stochastic"


def test_what_is_at_an_end_of_its_range_is_not():
    """Cubes of an inverse root reach from 1 to 10^9, and most are near 1."""
    rounding = rounding_of(lambda y: jax.lax.rsqrt(jnp.square(y) + 1e-6))
    assert rounding["div"] == "stochastic"


def test_exponentials_of_a_softmax_are_not():
    rounding = rounding_of(lambda y: jax.nn.softmax(y) @ W)
    assert rounding == {"exp": "stochastic", "dot_general": "dithered"}
