"""Networks in other libraries than Flax Linen: Equinox and Flax NNX."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from benchmarks.zoo.draws import classes, normal
from benchmarks.zoo.network import Network, Networks, perturbed
from benchmarks.zoo.parts import cross_entropy


def _equinox_mixer() -> Network:
    """MLPs over patches and over channels (Tolstikhin et al., 2021)."""
    import equinox as eqx

    class Block(eqx.Module):
        over_patches: eqx.nn.MLP
        over_channels: eqx.nn.MLP
        norms: list[eqx.nn.LayerNorm]

        def __init__(self, key: jax.Array):
            keys = jax.random.split(key)
            self.over_patches = eqx.nn.MLP(64, 64, 128, 1, jax.nn.gelu, key=keys[0])
            self.over_channels = eqx.nn.MLP(96, 96, 384, 1, jax.nn.gelu, key=keys[1])
            self.norms = [eqx.nn.LayerNorm(96), eqx.nn.LayerNorm(96)]

        def __call__(self, x: jax.Array) -> jax.Array:
            y = jax.vmap(self.norms[0])(x)
            x = x + jax.vmap(self.over_patches, 1, 1)(y)
            return x + jax.vmap(self.over_channels)(jax.vmap(self.norms[1])(x))

    class Mixer(eqx.Module):
        patches: eqx.nn.Conv2d
        blocks: list[Block]
        head: eqx.nn.Linear

        def __init__(self, key: jax.Array):
            first, last, *keys = jax.random.split(key, 5)
            self.patches = eqx.nn.Conv2d(3, 96, 4, 4, key=first)
            self.blocks = [Block(key) for key in keys]
            self.head = eqx.nn.Linear(96, 10, key=last)

        def __call__(self, image: jax.Array, remat: bool) -> jax.Array:
            x = self.patches(image).reshape(96, -1).T
            for block in self.blocks:
                x = (eqx.filter_checkpoint(block) if remat else block)(x)
            return self.head(jnp.mean(x, 0))

    params, static = eqx.partition(Mixer(jax.random.key(0)), eqx.is_inexact_array)

    def loss_of(remat: bool) -> Callable[..., jax.Array]:
        def loss(params: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
            model = eqx.combine(params, static)
            logits = jax.vmap(lambda image: model(image, remat))(images)
            return cross_entropy(logits, labels)

        return loss

    batch = normal(2, 16, 3, 32, 32), classes(1, 10, 16)
    return Network(loss_of(False), perturbed(params), batch, loss_of(True))


class _Block(nnx.Module):
    """Attention and an MLP, with norms before both."""

    def __init__(self, width: int, rngs: nnx.Rngs):
        self.attention = nnx.MultiHeadAttention(4, width, decode=False, rngs=rngs)
        self.norms = nnx.List([nnx.LayerNorm(width, rngs=rngs) for _ in range(2)])
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        mask = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))
        x = x + self.attention(self.norms[0](x), mask=mask)
        return x + self.down(nnx.gelu(self.up(self.norms[1](x))))


class _Decoder(nnx.Module):
    """A small language model."""

    def __init__(self, width: int, rngs: nnx.Rngs):
        self.embed = nnx.Embed(64, width, rngs=rngs)
        self.blocks = nnx.List([_Block(width, rngs) for _ in range(3)])
        self.norm = nnx.LayerNorm(width, rngs=rngs)

    def __call__(self, tokens: jax.Array, remat: bool) -> jax.Array:
        x = self.embed(tokens)
        for block in self.blocks:
            x = nnx.remat(_Block.__call__)(block, x) if remat else block(x)
        return self.embed.attend(self.norm(x))


def _nnx_decoder() -> Network:
    graph, params, rest = nnx.split(_Decoder(96, nnx.Rngs(0)), nnx.Param, ...)

    def loss_of(remat: bool) -> Callable[..., jax.Array]:
        def loss(params: Any, tokens: jax.Array, labels: jax.Array) -> jax.Array:
            model = nnx.merge(graph, params, rest)
            return cross_entropy(model(tokens, remat), labels)

        return loss

    batch = classes(2, 64, 8, 64), classes(3, 64, 8, 64)
    return Network(loss_of(False), perturbed(params), batch, loss_of(True))


NETWORKS: Networks = {
    "equinox_mixer": _equinox_mixer,
    "nnx_decoder": _nnx_decoder,
}
# The package, where it is one that dafjax itself does not need.
NEEDS: Mapping[str, str] = {"equinox_mixer": "equinox"}
