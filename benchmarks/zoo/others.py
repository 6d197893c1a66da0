"""A normalizing flow and a network on graphs."""

from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from benchmarks.zoo.network import Network, applied, classes, initial, normal


class Flow(nn.Module):
    """Affine couplings (Dinh et al., 2017); returns a normal array, and log det."""

    @nn.compact
    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        log_det = jnp.zeros(len(x))
        for _ in range(6):
            fixed, moved = jnp.split(x, 2, -1)
            y = nn.relu(nn.Dense(64)(nn.relu(nn.Dense(64)(fixed))))
            shift, log_scale = jnp.split(nn.Dense(2 * moved.shape[-1])(y), 2, -1)
            log_scale = jnp.tanh(log_scale)
            moved = moved * jnp.exp(log_scale) + shift
            log_det += jnp.sum(log_scale, -1)
            x = jnp.concatenate([moved, fixed], -1)
        return x, log_det


class GraphNet(nn.Module):
    """Messages along edges, added up at nodes, with layer norms."""

    @nn.compact
    def __call__(self, x: jax.Array, edges: jax.Array) -> jax.Array:
        senders, receivers = edges
        x = nn.Dense(64)(x)
        for _ in range(3):
            pairs = jnp.concatenate([x[senders], x[receivers]], -1)
            messages = nn.relu(nn.Dense(64)(pairs))
            total = jax.ops.segment_sum(messages, receivers, len(x))
            x = nn.LayerNorm()(x + nn.Dense(64)(total))
        return nn.Dense(10)(x)


def _flow() -> Network:
    module, x = Flow(), normal(2, 1024, 16)
    params = initial(module, x)

    def loss(params: Any, x: jax.Array) -> jax.Array:
        z, log_det = applied(module, params, x)
        return jnp.mean(0.5 * jnp.sum(z**2, -1) - log_det)

    return Network(loss, params, (x,))


def _graph() -> Network:
    module, x = GraphNet(), normal(2, 256, 16)
    edges, labels = classes(3, 256, 2, 1024), classes(4, 10, 256)
    params = initial(module, x, edges)

    def loss(params: Any, x: jax.Array, edges: Any, labels: Any) -> jax.Array:
        logits = applied(module, params, x, edges)
        chosen = jnp.take_along_axis(nn.log_softmax(logits), labels[:, None], -1)
        return -jnp.mean(chosen)

    return Network(loss, params, (x, edges, labels))


NETWORKS: Mapping[str, Callable[[], Network]] = {"flow": _flow, "graph": _graph}
