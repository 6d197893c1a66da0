"""The compiled gradient takes no more memory than without dafjax, on small programs.

Each stands for a kind: an operation that once kept a stage from running in chunks, or a
value that a barrier once made live as a whole.
"""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import dafjax
from dafjax.policies import CompressExpensive
from tests.helpers import temp_nbytes


def _normal(*shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(0), shape)


def gated(w: jax.Array, x: jax.Array) -> jax.Array:
    """Splits and concatenates; its rows are no whole tiles."""
    a, gate = jnp.split(x @ w, 2, -1)
    return jnp.mean((a * jax.nn.gelu(gate)) ** 2)


def vmapped_cond(w: jax.Array, x: jax.Array) -> jax.Array:
    """A `cond` on each example: outer products of both branches."""

    def one(x: jax.Array) -> jax.Array:
        return lax.cond(
            x[0] > 0,
            lambda: jnp.tanh(x @ w).sum(),
            lambda: jnp.sin(x @ w @ w).sum(),
        )

    return jnp.mean(jax.vmap(one)(x) ** 2)


class _WeightNormed(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for channels in (32, 64, 64):
            conv = nn.WeightNorm(nn.Conv(channels, (3, 3)))
            x = nn.avg_pool(nn.leaky_relu(conv(x)), (2, 2), (2, 2))
        return nn.Dense(10)(x.reshape(x.shape[0], -1))


def weight_norm(params: Any, images: jax.Array) -> jax.Array:
    """Average pooling pads the cotangent."""
    return -jax.nn.log_softmax(_WeightNormed().apply(params, images))[:, 0].mean()


def gaussian_process(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    """A Cholesky factor and a triangular solve."""
    z = x * jnp.exp(-params["length"])
    kernel = jnp.exp(-0.5 * ((z[:, None] - z[None]) ** 2).sum(-1))
    kernel += jnp.exp(params["noise"]) * jnp.eye(len(x))
    factor = jnp.linalg.cholesky(kernel)
    a = jax.scipy.linalg.solve_triangular(factor, y, lower=True)
    return 0.5 * (a**2).sum() + jnp.log(jnp.diag(factor)).sum()


def cholesky(w: jax.Array, x: jax.Array) -> jax.Array:
    """Masks of constants, which kernels compute as they read them."""
    gram = x @ w @ w.T @ x.T
    return jnp.linalg.cholesky(gram + jnp.eye(len(x))).sum()


def of_pixels(kernels: list[jax.Array], pixels: jax.Array) -> jax.Array:
    """Images of bytes, converted and copied for the gradient of the first kernel."""
    x = pixels.astype(jnp.float32) / 255
    for kernel in kernels:
        x = lax.conv_general_dilated(
            x, kernel, (4, 4), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        x = jax.nn.relu(x)
    return jnp.mean(x**2)


def cumulative(w: jax.Array, x: jax.Array) -> jax.Array:
    """Means over the past, and a reversed copy."""
    y = jnp.tanh(x @ w)
    y = jnp.cumsum(y, 1) / jnp.arange(1.0, y.shape[1] + 1)[:, None]
    return jnp.mean((jnp.flip(y, 1) @ w) ** 2)


def rectified(weights: list[jax.Array], x: jax.Array) -> jax.Array:
    """Bit masks of a matrix."""
    for w in weights:
        x = jax.nn.relu(x @ w)
    return jnp.mean(x**2)


def bilinear(w: jax.Array, x: jax.Array) -> jax.Array:
    """A matrix for each example."""
    y = jnp.einsum("bi,bij->bj", x, w)
    return jnp.sum(jnp.sin(jnp.einsum("bi,bij->bj", jnp.tanh(y), w)))


_IMAGES = jax.ShapeDtypeStruct((32, 32, 32, 3), jnp.float32)

# The program, its arguments, and the most that it takes of plain; below 1 where
# compression pays.
_PROGRAMS: dict[str, tuple[Callable[..., jax.Array], Callable[[], Any], float]] = {
    "gated": (gated, lambda: (_normal(160, 1280), _normal(2048, 160)), 0.9),
    "vmapped_cond": (vmapped_cond, lambda: (_normal(32, 32), _normal(256, 32)), 1.02),
    "weight_norm": (
        weight_norm,
        lambda: (
            jax.eval_shape(_WeightNormed().init, jax.random.key(0), _IMAGES),
            _IMAGES,
        ),
        1.0,
    ),
    "gaussian_process": (
        gaussian_process,
        lambda: (
            {"length": jnp.zeros(8), "noise": jnp.array(-1.0)},
            _normal(200, 8),
            _normal(200),
        ),
        1.02,
    ),
    "cholesky": (cholesky, lambda: (_normal(64, 64), _normal(384, 64)), 1.02),
    "of_pixels": (
        of_pixels,
        lambda: (
            [_normal(8, 8, 4, 32), _normal(4, 4, 32, 64)],
            jax.ShapeDtypeStruct((128, 48, 48, 4), jnp.uint8),
        ),
        0.7,
    ),
    "cumulative": (cumulative, lambda: (_normal(64, 64), _normal(64, 256, 64)), 0.8),
    "rectified": (
        rectified,
        lambda: ([_normal(256, 256)] * 4, _normal(4096, 256)),
        0.4,
    ),
    "bilinear": (bilinear, lambda: (_normal(64, 64, 64), _normal(64, 64)), 1.02),
}


def temp(function: Callable[..., jax.Array], arguments: Any) -> int:
    return temp_nbytes(jax.jit(jax.value_and_grad(function)).lower(*arguments))


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("name", _PROGRAMS)
def test_a_gradient_takes_no_more_memory_than_without_dafjax(name, monkeypatch):
    # Tests have two devices, which could share a batch.
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    loss, make, most = _PROGRAMS[name]
    arguments = make()
    # With a policy of its own, a small function is compressed at any rate.
    wrapped = dafjax.remat_compress(loss, policy=CompressExpensive())
    assert temp(wrapped, arguments) <= most * temp(loss, arguments)


def one_product(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.mean((x @ w) ** 2)


def two_products(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.mean(jnp.tanh(jnp.tanh(x @ w) @ w.T))


def with_weight_decay(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.mean((x @ w.T) ** 2) + 0.1 * jnp.sum(w**2)


@pytest.mark.parametrize("loss", [one_product, two_products, with_weight_decay])
def test_without_a_gain_it_is_the_plain_function(loss):
    arguments = _normal(128, 128), _normal(256, 128)
    wrapped = dafjax.remat_compress(loss)
    plain = temp(loss, arguments)
    assert temp(wrapped, arguments) <= 1.02 * plain
    exact = jax.grad(loss)(*arguments)
    np.testing.assert_array_equal(jax.grad(wrapped)(*arguments), exact)
    assert not any(k.codec for k in dafjax.saved_residuals(wrapped, *arguments).kept)
    at_any_rate = dafjax.remat_compress(loss, policy=CompressExpensive())
    assert temp(at_any_rate, arguments) > 1.02 * plain
