"""A normalizing flow and networks on graphs."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.zoo.draws import classes, normal
from benchmarks.zoo.network import Network, Networks, applied, initial, trained
from benchmarks.zoo.parts import cross_entropy


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


class GraphAttention(nn.Module):
    """Three layers of attention over edges (Velickovic et al., 2018)."""

    remat: bool = False

    @nn.compact
    def __call__(self, x: jax.Array, edges: jax.Array) -> jax.Array:
        make = nn.remat(EdgeAttention) if self.remat else EdgeAttention
        for n in range(3):
            x = nn.elu(make(name=f"layer_{n}")(x, edges))
        return nn.Dense(10)(x)


class EdgeAttention(nn.Module):
    """A softmax over the edges that end at a node."""

    num_heads: int = 4

    @nn.compact
    def __call__(self, x: jax.Array, edges: jax.Array) -> jax.Array:
        senders, receivers = edges
        y = nn.DenseGeneral((self.num_heads, 16), use_bias=False)(x)
        init = nn.initializers.lecun_normal()
        sent, received = self.param("scores", init, (2, *y.shape[1:]))
        scores = jnp.sum(y * sent, -1)[senders] + jnp.sum(y * received, -1)[receivers]
        scores = nn.leaky_relu(scores, 0.2)
        greatest = jax.ops.segment_max(scores, receivers, len(x))
        shares = jnp.exp(scores - lax.stop_gradient(greatest)[receivers])
        total = jax.ops.segment_sum(shares, receivers, len(x))
        shares = shares / (total[receivers] + 1e-9)
        y = jax.ops.segment_sum(shares[..., None] * y[senders], receivers, len(x))
        return y.reshape(len(x), -1)


def _flow() -> Network:
    module, x = Flow(), normal(2, 1024, 16)
    params = initial(module, x)

    def loss(params: Any, x: jax.Array) -> jax.Array:
        z, log_det = applied(module, params, x)
        return jnp.mean(0.5 * jnp.sum(z**2, -1) - log_det)

    return Network(loss, params, (x,))


def _on_graph(module: nn.Module, nodes: int, edges_per_node: int) -> Network:
    x, labels = normal(2, nodes, 16), classes(4, 10, nodes)
    edges = classes(3, nodes, 2, edges_per_node * nodes)
    return trained(module, cross_entropy, [x, edges], [labels])


NETWORKS: Networks = {
    "flow": _flow,
    "graph": lambda: _on_graph(GraphNet(), 256, 4),
    "graph_attention": lambda: _on_graph(GraphAttention(), 1024, 8),
}
