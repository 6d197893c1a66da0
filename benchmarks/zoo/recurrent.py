"""Networks with a loop over time."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.zoo.draws import normal
from benchmarks.zoo.network import Networks, classifier, language_model
from benchmarks.zoo.parts import block


class GRU(nn.Module):
    """Two layers of gated recurrent units."""

    @nn.compact
    def __call__(self, x: Any) -> jax.Array:
        for _ in range(2):
            x = nn.RNN(nn.GRUCell(64))(x)
        return nn.Dense(10)(x[:, -1])


class LSTM(nn.Module):
    """Two layers of LSTMs, in both directions, with all their outputs."""

    @nn.compact
    def __call__(self, x: Any) -> jax.Array:
        for _ in range(2):
            forward = nn.RNN(nn.OptimizedLSTMCell(64))
            backward = nn.RNN(nn.OptimizedLSTMCell(64))
            x = nn.Bidirectional(forward, backward)(x)
        return nn.Dense(10)(x)


class S5(nn.Module):
    """Layers of diagonal state spaces (Smith et al., 2023)."""

    remat: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Dense(64)(x)
        for _ in range(3):
            x = block(S5._block, self.remat)(self, x)
        return nn.Dense(10)(jnp.mean(x, 1))

    def _block(self, x: jax.Array) -> jax.Array:
        y = nn.gelu(DiagonalStates(32)(nn.LayerNorm()(x)))
        return x + y * nn.sigmoid(nn.Dense(x.shape[-1])(y))


def _states(factor: jax.Array, drive: jax.Array) -> jax.Array:
    """Returns `state[t] = factor[t] * state[t - 1] + drive[t]` for all times."""

    def combine(a: Any, b: Any) -> Any:
        return a[0] * b[0], b[0] * a[1] + b[1]

    return lax.associative_scan(combine, (factor, drive), axis=1)[1]


class DiagonalStates(nn.Module):
    """Complex states that decay and turn, as an associative scan."""

    states: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        n, width = self.states, x.shape[-1]
        init, constant = nn.initializers.lecun_normal(), nn.initializers.constant
        into = lax.complex(*self.param("into", init, (2, width, n)))
        out = lax.complex(*self.param("out", init, (2, n, width)))
        direct = self.param("direct", nn.initializers.normal(), (width,))
        decay = -jnp.exp(self.param("log_decay", constant(-1.0), (n,)))
        frequency = self.param("frequency", nn.initializers.normal(2.0), (n,))
        step = jnp.exp(self.param("log_step", constant(-2.0), (n,)))
        rate = lax.complex(decay, frequency)
        factor = jnp.exp(rate * step)
        drive = (x @ into) * ((factor - 1) / rate)
        state = _states(jnp.broadcast_to(factor, drive.shape), drive)
        return 2 * (state @ out).real + direct * x


class Mamba(nn.Module):
    """Selective state spaces (Gu and Dao, 2023), as an associative scan."""

    remat: bool = False

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = nn.Embed(64, 64)(tokens)
        for _ in range(2):
            x = block(Mamba._block, self.remat)(self, x)
        return nn.Dense(64)(nn.RMSNorm()(x))

    def _block(self, x: jax.Array) -> jax.Array:
        return x + self._mix(nn.RMSNorm()(x))

    def _mix(self, x: jax.Array) -> jax.Array:
        width, states = 2 * x.shape[-1], 8
        y, gate = jnp.split(nn.Dense(2 * width)(x), 2, -1)
        y = nn.silu(
            nn.Conv(width, (4,), feature_group_count=width, padding="CAUSAL")(y)
        )
        step = nn.softplus(nn.Dense(width)(nn.Dense(4)(y)))
        read, write = jnp.split(nn.Dense(2 * states)(y), 2, -1)
        rate = -jnp.exp(jnp.log(jnp.arange(1.0, states + 1)))
        decay = jnp.exp(step[..., None] * rate)
        drive = (step * y)[..., None] * write[:, :, None]
        y = jnp.einsum("btds,bts->btd", _states(decay, drive), read) + y
        return nn.Dense(x.shape[-1])(y * nn.silu(gate))


NETWORKS: Networks = {
    "gru": lambda: classifier(GRU(), normal(2, 32, 32, 16)),
    "lstm": lambda: classifier(LSTM(), normal(2, 16, 48, 32), per_token=True),
    "s5": lambda: classifier(S5(), normal(2, 8, 128, 16)),
    "mamba": lambda: language_model(Mamba(), 64),
}
