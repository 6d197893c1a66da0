"""A layer before a norm, with activations of very different scale."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.zoo.draws import normal, weights
from benchmarks.zoo.network import Network, Networks


_NUM_ROWS = 512
_NUM_GROUPS = 4


def _layer(h: jax.Array) -> jax.Array:
    centered = h - jnp.mean(h, -1, keepdims=True)
    return centered * lax.rsqrt(jnp.var(h, -1, keepdims=True) + 1e-6)


def _rms(h: jax.Array) -> jax.Array:
    return h * lax.rsqrt(jnp.mean(h * h, -1, keepdims=True) + 1e-6)


def _group(h: jax.Array) -> jax.Array:
    return _layer(h.reshape(len(h), _NUM_GROUPS, -1)).reshape(h.shape)


def _l2(h: jax.Array) -> jax.Array:
    return h / (jnp.sqrt(jnp.sum(h * h, -1, keepdims=True)) + 1e-6)


_NORMS = {"layer": _layer, "rms": _rms, "group": _group, "l2": _l2}


def _scales(per: str, width: int) -> jax.Array:
    """Returns `exp(N(0, 2^2))` for each row, head or channel, `[rows, width]`."""
    shape = {
        "row": (_NUM_ROWS, 1),
        "head": (_NUM_ROWS, _NUM_GROUPS),
        "channel": (1, width),
    }[per]
    scales = jnp.exp(2 * normal(5, *shape))
    return jnp.repeat(scales, width // shape[1], 1)


def _network(norm: Callable[[jax.Array], jax.Array], per: str, width: int) -> Network:
    def loss(
        params: Any, x: jax.Array, other: jax.Array, scales: jax.Array
    ) -> jax.Array:
        # The sum is stored, as large as the scales make it.
        h = norm((x @ params["first"]) * scales + (x @ other) * scales)
        y = jax.nn.relu(h) @ params["second"]
        return jnp.mean(y**2)

    params = {"first": weights(10, width, width), "second": weights(11, width, width)}
    other = weights(12, width, width)
    x = normal(3, _NUM_ROWS, width)
    return Network(loss, params, (x, other, _scales(per, width)))


SCALED: Networks = {
    f"{name}_{per}_{width}": functools.partial(_network, norm, per, width)
    for name, norm in _NORMS.items()
    for per in ("row", "head", "channel")
    for width in (48, 64, 160, 320)
}
