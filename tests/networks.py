"""Small functions to differentiate, that between them use what real models use."""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name


ArrayTree = Any


def mlp_params(
    key: jax.Array, widths: tuple[int, ...] = (64, 256, 256, 16)
) -> ArrayTree:
    """Weights and biases, `[{"w": [in, out], "b": [out]}, ...]`."""
    layers = []
    for n, (rows, columns) in enumerate(itertools.pairwise(widths)):
        w = jax.random.normal(jax.random.fold_in(key, n), (rows, columns))
        layers.append({"w": w / jnp.sqrt(float(rows)), "b": jnp.zeros(columns)})
    return layers


def mlp(params: ArrayTree, x: jax.Array) -> jax.Array:
    """Dense layers with tanh between them: `[batch, in] -> [batch, out]`."""
    *hidden, last = params
    for layer in hidden:
        x = jnp.tanh(x @ layer["w"] + layer["b"])
    return x @ last["w"] + last["b"]


def mlp_loss(params: ArrayTree, x: jax.Array) -> jax.Array:
    """Mean square of the MLP's output."""
    return jnp.mean(mlp(params, x) ** 2)


def conv_params(key: jax.Array, depth: int = 2, channels: int = 16) -> ArrayTree:
    """Kernels, scales and biases of residual conv-norm-ReLU blocks."""
    blocks = []
    for n in range(depth):
        kernel = jax.random.normal(
            jax.random.fold_in(key, n), (3, 3, channels, channels)
        )
        blocks.append(
            {
                "kernel": kernel / jnp.sqrt(9.0 * channels),
                "scale": jnp.ones(channels),
                "bias": jnp.zeros(channels),
            }
        )
    return blocks


def conv_block(p: ArrayTree, x: jax.Array) -> jax.Array:
    """`x + relu(norm(conv(x)))`, `[batch, height, width, channels]`."""
    y = jax.lax.conv_general_dilated(
        x, p["kernel"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    mean = y.mean((0, 1, 2), keepdims=True)
    variance = jnp.square(y - mean).mean((0, 1, 2), keepdims=True)
    y = (y - mean) * jax.lax.rsqrt(variance + 1e-5)
    scale, bias = (p[name][None, None, None] for name in ("scale", "bias"))
    return x + jax.nn.relu(y * scale + bias)


def named_loss(w: jax.Array, x: jax.Array) -> jax.Array:
    """Two norms over examples, of products `"y"` of a square weight."""
    for _ in range(2):
        y = checkpoint_name(jnp.tanh(x) @ w, "y")
        mean = y.mean((0, 1))
        variance = jnp.square(y - mean).mean((0, 1))
        normed = (y - mean) * jax.lax.rsqrt(variance + 1e-3)
        x = jax.nn.relu(normed) * jnp.tanh(jnp.sin(w[0])) + x
    return jnp.mean(jnp.square(x))


def conv_loss(
    params: ArrayTree,
    x: jax.Array,
    *,
    wrap_block: Callable[[Callable], Callable] = lambda block: block,
) -> jax.Array:
    """Mean square after all blocks; `wrap_block` wraps the function of a block."""
    block = wrap_block(conv_block)
    for p in params:
        x = block(p, x)
    return jnp.mean(jnp.square(x))


def conv_example(
    key: jax.Array, batch: int = 4, **kwargs: int
) -> tuple[Any, jax.Array]:
    """Parameters and an input for `conv_loss`."""
    params = conv_params(key, **kwargs)
    channels = params[0]["bias"].size
    x = jax.random.normal(jax.random.fold_in(key, 99), (batch, 16, 16, channels))
    return params, x
