"""Networks of sound: WaveNet, Whisper and connectionist temporal classification."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from benchmarks.zoo.draws import classes, normal
from benchmarks.zoo.network import Network, Networks, language_model, trained
from benchmarks.zoo.parts import block, cross_entropy, sinusoids


class DilatedBlock(nn.Module):
    """A gated convolution; returns the sum with its input, and a skip."""

    width: int
    dilation: int

    @nn.compact
    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        y = nn.Conv(
            2 * self.width, (2,), kernel_dilation=self.dilation, padding="CAUSAL"
        )(x)
        y, gate = jnp.split(y, 2, -1)
        y = jnp.tanh(y) * nn.sigmoid(gate)
        return x + nn.Dense(self.width)(y), nn.Dense(64)(y)


class WaveNet(nn.Module):
    """Dilated causal convolutions with gates (van den Oord et al., 2016)."""

    width: int = 32
    remat: bool = False

    @nn.compact
    def __call__(self, samples: jax.Array) -> jax.Array:
        make = nn.remat(DilatedBlock) if self.remat else DilatedBlock
        x = nn.Embed(64, self.width)(samples)
        total = jnp.zeros((), x.dtype)
        for n in range(8):
            x, skip = make(self.width, 2 ** (n % 6), name=f"layer_{n}")(x)
            total = total + skip
        return nn.Dense(64)(nn.relu(nn.Dense(64)(nn.relu(total))))


class Whisper(nn.Module):
    """Convolutions, an encoder and a decoder (Radford et al., 2023)."""

    width: int = 96
    remat: bool = False

    @nn.compact
    def __call__(self, sound: jax.Array, tokens: jax.Array) -> jax.Array:
        layer = block(Whisper._layer, self.remat)
        x = nn.gelu(nn.Conv(self.width, (3,))(sound))
        x = nn.gelu(nn.Conv(self.width, (3,), 2)(x))
        rates = 10000.0 ** -jnp.linspace(0, 1, self.width // 2)
        x = x + sinusoids(jnp.arange(x.shape[1]), rates)
        for _ in range(2):
            x = layer(self, x, None, None)
        x = nn.LayerNorm()(x)
        embed = nn.Embed(64, self.width)
        positions = self.param(
            "positions", nn.initializers.normal(0.02), (tokens.shape[1], self.width)
        )
        y, mask = embed(tokens) + positions, nn.make_causal_mask(tokens)
        for _ in range(2):
            y = layer(self, y, mask, x)
        return embed.attend(nn.LayerNorm()(y))

    def _layer(
        self, x: jax.Array, mask: jax.Array | None, memory: jax.Array | None
    ) -> jax.Array:
        x = x + nn.MultiHeadDotProductAttention(4)(nn.LayerNorm()(x), mask=mask)
        if memory is not None:
            attention = nn.MultiHeadDotProductAttention(4)
            x = x + attention(nn.LayerNorm()(x), memory)
        y = nn.gelu(nn.Dense(4 * self.width)(nn.LayerNorm()(x)))
        return x + nn.Dense(self.width)(y)


class Recognizer(nn.Module):
    """Convolutions over time and frequency, then a recurrent layer."""

    @nn.compact
    def __call__(self, sound: jax.Array) -> jax.Array:
        x = nn.relu(nn.LayerNorm()(nn.Conv(16, (5, 5), 2)(sound[..., None])))
        x = nn.relu(nn.LayerNorm()(nn.Conv(16, (3, 3), (1, 2))(x)))
        x = nn.Dense(96)(x.reshape(*x.shape[:2], -1))
        x = x + jnp.asarray(nn.RNN(nn.GRUCell(96))(nn.LayerNorm()(x)))
        return nn.Dense(32)(x)


def _ctc() -> Network:
    lengths = classes(4, 12, 16, 1) + 4
    labels = 1 + classes(3, 31, 16, 16)
    paddings = (jnp.arange(16) >= lengths).astype(jnp.float32)

    def objective(logits: jax.Array, labels: Any, paddings: Any) -> jax.Array:
        none = jnp.zeros(logits.shape[:2])
        return jnp.mean(optax.ctc_loss(logits, none, labels, paddings))

    sound = normal(2, 16, 128, 40)
    return trained(Recognizer(), objective, [sound], [labels, paddings])


NETWORKS: Networks = {
    "wavenet": lambda: language_model(WaveNet(), 64, length=512),
    "whisper": lambda: trained(
        Whisper(),
        cross_entropy,
        [normal(2, 8, 192, 40), classes(3, 64, 8, 48)],
        [classes(4, 64, 8, 48)],
    ),
    "ctc": _ctc,
}
