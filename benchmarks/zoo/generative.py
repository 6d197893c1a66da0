"""Networks that make images: a VAE, a denoiser for diffusion and a GAN's critic."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from benchmarks.zoo.draws import normal
from benchmarks.zoo.network import Network, Networks, applied, initial, of_module
from benchmarks.zoo.parts import block, mean_square, sinusoids


class VAE(nn.Module):
    """Convolutions to a normal distribution and back (Kingma and Welling, 2014)."""

    @nn.compact
    def __call__(self, x: jax.Array, key: jax.Array) -> tuple[jax.Array, ...]:
        for width in (32, 64):
            x = nn.relu(nn.Conv(width, (4, 4), 2)(x))
        shape = x.shape
        mean, log_variance = jnp.split(nn.Dense(64)(x.reshape(len(x), -1)), 2, -1)
        noise = jax.random.normal(key, mean.shape)
        z = mean + jnp.exp(0.5 * log_variance) * noise
        x = nn.relu(nn.Dense(shape[1] * shape[2] * shape[3])(z)).reshape(shape)
        x = nn.relu(nn.ConvTranspose(32, (4, 4), (2, 2))(x))
        return nn.ConvTranspose(3, (4, 4), (2, 2))(x), mean, log_variance


def _vae() -> Network:
    module = VAE()
    x, key = nn.sigmoid(normal(2, 32, 32, 32, 3)), jax.random.key(3)

    def loss(params: Any, x: jax.Array, key: jax.Array) -> jax.Array:
        logits, mean, log_variance = applied(module, params, x, key)
        reconstruction = optax.sigmoid_binary_cross_entropy(logits, x)
        divergence = 0.5 * (mean**2 + jnp.exp(log_variance) - 1 - log_variance)
        return (jnp.sum(reconstruction) + jnp.sum(divergence)) / len(x)

    return Network(loss, initial(module, x, key), (x, key))


class Denoiser(nn.Module):
    """A U-Net with a time embedding and attention (Ho et al., 2020)."""

    width: int = 32
    remat: bool = False

    @nn.compact
    def __call__(self, x: jax.Array, time: jax.Array) -> jax.Array:
        residual = block(Denoiser._residual, self.remat)
        attend = block(Denoiser._attend, self.remat)
        rates = 1000 ** jnp.linspace(0, 1, self.width // 2)
        t = nn.Dense(4 * self.width)(sinusoids(time, rates))
        t = nn.silu(nn.Dense(4 * self.width)(nn.silu(t)))
        x = nn.Conv(self.width, (3, 3))(x)
        skips = []
        for factor in (1, 2):
            skips.append(self._kept(x, t, factor, residual))
            x = nn.Conv(factor * self.width, (3, 3), 2)(skips[-1])
        x = self._kept(x, t, 2, residual)
        x = self._kept(attend(self, x), t, 2, residual)
        for factor in (2, 1):
            skip = skips.pop()
            x = jax.image.resize(x, (*skip.shape[:3], x.shape[3]), "nearest")
            x = self._kept(jnp.concatenate([x, skip], -1), t, factor, residual)
        return nn.Conv(3, (3, 3))(nn.silu(nn.GroupNorm(8)(x)))

    def _kept(
        self, x: jax.Array, t: jax.Array, factor: int, residual: Callable[..., Any]
    ) -> jax.Array:
        """Applies a residual block, after a projection to its width if it needs one."""
        channels = factor * self.width
        if x.shape[-1] != channels:
            x = nn.Conv(channels, (1, 1))(x)
        return residual(self, x, t)

    def _residual(self, x: jax.Array, t: jax.Array) -> jax.Array:
        channels = x.shape[-1]
        y = nn.Conv(channels, (3, 3))(nn.silu(nn.GroupNorm(8)(x)))
        scale, shift = jnp.split(nn.Dense(2 * channels)(t)[:, None, None], 2, -1)
        y = nn.GroupNorm(8)(y) * (1 + scale) + shift
        return x + nn.Conv(channels, (3, 3))(nn.silu(y))

    def _attend(self, x: jax.Array) -> jax.Array:
        tokens = nn.GroupNorm(8)(x).reshape(len(x), -1, x.shape[-1])
        y = nn.MultiHeadDotProductAttention(4)(tokens)
        return x + y.reshape(x.shape)


def _diffusion() -> Network:
    x, key = normal(2, 8, 32, 32, 3), jax.random.key(3)
    params = initial(Denoiser(), x, jnp.zeros(len(x)))

    def loss(module: nn.Module, params: Any, x: jax.Array, key: Any) -> jax.Array:
        for_time, for_noise = jax.random.split(key)
        time = jax.random.uniform(for_time, (len(x),))
        noise = jax.random.normal(for_noise, x.shape)
        angle = (0.5 * jnp.pi * time)[:, None, None, None]
        noisy = jnp.cos(angle) * x + jnp.sin(angle) * noise
        return mean_square(applied(module, params, noisy, time), noise)

    return of_module(Denoiser(), loss, params, x, key)


class Critic(nn.Module):
    """Strided convolutions with leaky ReLUs to one number."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for width in (32, 64, 128):
            x = nn.leaky_relu(nn.Conv(width, (4, 4), 2)(x), 0.2)
        return nn.Dense(1)(x.reshape(len(x), -1))[:, 0]


def _gradient_penalty() -> Network:
    """A Wasserstein GAN's critic, with a penalty (Gulrajani et al., 2017)."""
    module = Critic()
    real, fake = normal(2, 32, 32, 32, 3), normal(3, 32, 32, 32, 3)
    key = jax.random.key(4)

    def loss(params: Any, real: jax.Array, fake: jax.Array, key: Any) -> jax.Array:
        weight = jax.random.uniform(key, (len(real), 1, 1, 1))
        between = weight * real + (1 - weight) * fake
        slope = jax.grad(lambda x: jnp.sum(applied(module, params, x)))(between)
        norm = jnp.sqrt(jnp.sum(slope**2, (1, 2, 3)) + 1e-12)
        distance = applied(module, params, real) - applied(module, params, fake)
        return -jnp.mean(distance) + 10 * jnp.mean((norm - 1) ** 2)

    return Network(loss, initial(module, real), (real, fake, key))


NETWORKS: Networks = {
    "vae": _vae,
    "diffusion": _diffusion,
    "gradient_penalty": _gradient_penalty,
}
