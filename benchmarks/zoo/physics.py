"""Networks of fields, rays and differential equations."""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.zoo.draws import normal, weights
from benchmarks.zoo.network import Network, Networks, applied, initial, trained
from benchmarks.zoo.parts import block, mean_square


class FNO(nn.Module):
    """A Fourier neural operator (Li et al., 2021), `[batch, x, y, channels]`."""

    width: int = 32
    modes: int = 8
    remat: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Dense(self.width)(x)
        for _ in range(4):
            x = block(FNO._block, self.remat)(self, x)
        return nn.Dense(1)(nn.gelu(nn.Dense(64)(x)))

    def _block(self, x: jax.Array) -> jax.Array:
        return nn.gelu(Spectral(self.modes)(x) + nn.Dense(self.width)(x))


class Spectral(nn.Module):
    """Products with complex matrices, one for each of the lowest frequencies."""

    modes: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        m, width = self.modes, x.shape[-1]
        shape = (2, 2, m, m, width, width)
        real, imag = self.param("kernel", nn.initializers.normal(1 / width), shape)
        low, high = lax.complex(real, imag)
        waves = jnp.fft.rfft2(x, axes=(1, 2))
        out = jnp.zeros_like(waves)
        multiply = functools.partial(jnp.einsum, "bxyi,xyio->bxyo")
        out = out.at[:, :m, :m].set(multiply(waves[:, :m, :m], low))
        out = out.at[:, -m:, :m].set(multiply(waves[:, -m:, :m], high))
        return jnp.fft.irfft2(out, s=x.shape[1:3], axes=(1, 2))


def _symmetric(scale: float) -> nn.initializers.Initializer:
    """Returns an initializer: uniform in `±scale`."""

    def init(key: Any, shape: Any, dtype: Any = jnp.float32) -> jax.Array:
        return jax.random.uniform(key, shape, dtype, -scale, scale)

    return init


class Siren(nn.Module):
    """Sines of dense layers (Sitzmann et al., 2020), from coordinates to colors."""

    width: int = 128

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for _ in range(4):
            scale = 1 / 2 if x.shape[-1] == 2 else (6 / self.width) ** 0.5 / 30
            x = jnp.sin(30 * nn.Dense(self.width, kernel_init=_symmetric(scale))(x))
        return nn.Dense(3)(x)


class Radiance(nn.Module):
    """Color and density at points (Mildenhall et al., 2020), `[rays, samples, 3]`."""

    @nn.compact
    def __call__(self, points: jax.Array, directions: jax.Array) -> jax.Array:
        encoded = _positions(points, 8)
        x = encoded
        for n in range(5):
            x = jnp.concatenate([x, encoded], -1) if n == 3 else x
            x = nn.relu(nn.Dense(128)(x))
        density = nn.softplus(nn.Dense(1)(x))
        view = _positions(directions, 4)[:, None]
        view = jnp.broadcast_to(view, (*x.shape[:2], view.shape[-1]))
        y = jnp.concatenate([nn.Dense(128)(x), view], -1)
        color = nn.sigmoid(nn.Dense(3)(nn.relu(nn.Dense(64)(y))))
        return jnp.concatenate([color, density], -1)


def _positions(x: jax.Array, octaves: int) -> jax.Array:
    angles = x[..., None] * 2.0 ** jnp.arange(octaves)
    angles = angles.reshape(*x.shape[:-1], -1)
    return jnp.concatenate([x, jnp.sin(angles), jnp.cos(angles)], -1)


def _nerf() -> Network:
    module = Radiance()
    origins, directions = 0.1 * normal(2, 128, 3), normal(3, 128, 3)
    directions /= jnp.linalg.norm(directions, axis=-1, keepdims=True)
    colors = jax.nn.sigmoid(normal(4, 128, 3))
    depths = jnp.linspace(0.5, 3, 48)

    def points_of(origins: jax.Array, directions: jax.Array) -> jax.Array:
        return origins[:, None] + depths[:, None] * directions[:, None]

    def loss(params: Any, origins: Any, directions: Any, colors: Any) -> jax.Array:
        points = points_of(origins, directions)
        field = applied(module, params, points, directions)
        opaque = 1 - jnp.exp(-field[..., 3] * (depths[1] - depths[0]))
        clear = jnp.cumprod(1 - opaque + 1e-10, -1)
        clear = jnp.concatenate([jnp.ones_like(clear[:, :1]), clear[:, :-1]], -1)
        pixels = jnp.sum((clear * opaque)[..., None] * field[..., :3], 1)
        return mean_square(pixels, colors)

    params = initial(module, points_of(origins, directions), directions)
    return Network(loss, params, (origins, directions, colors))


def _neural_ode() -> Network:
    """Runge-Kutta steps in a scan (Chen et al., 2018)."""
    params = {
        "in": weights(10, 17, 64),
        "bias": 0.2 * normal(11, 64),
        "out": weights(12, 64, 16),
    }

    def speed(params: Any, time: jax.Array, x: jax.Array) -> jax.Array:
        x = jnp.concatenate([x, jnp.full((len(x), 1), time)], -1)
        return jnp.tanh(x @ params["in"] + params["bias"]) @ params["out"]

    def step(params: Any, x: jax.Array, time: jax.Array, size: float) -> jax.Array:
        k1 = speed(params, time, x)
        k2 = speed(params, time + size / 2, x + size / 2 * k1)
        k3 = speed(params, time + size / 2, x + size / 2 * k2)
        k4 = speed(params, time + size, x + size * k3)
        return x + size / 6 * (k1 + 2 * k2 + 2 * k3 + k4)

    def loss(
        step: Callable[..., jax.Array], params: Any, x: jax.Array, target: jax.Array
    ) -> jax.Array:
        times = jnp.arange(20) / 20
        end, _ = lax.scan(lambda x, t: (step(params, x, t, 1 / 20), None), x, times)
        return mean_square(end, target)

    batch = normal(2, 512, 16), normal(3, 512, 16)
    remat = jax.checkpoint(step, static_argnums=3)
    return Network(
        functools.partial(loss, step), params, batch, functools.partial(loss, remat)
    )


def _layer(params: Any, x: jax.Array, z: jax.Array) -> jax.Array:
    return jnp.tanh(0.5 * z @ params["inner"] + x @ params["outer"] + params["bias"])


@jax.custom_vjp
def _fixed_point(params: Any, x: jax.Array) -> jax.Array:
    """Returns `z = layer(params, x, z)`; its derivative solves a linear equation."""
    return lax.fori_loop(0, 30, lambda _, z: _layer(params, x, z), jnp.zeros_like(x))


def _forward(params: Any, x: jax.Array) -> tuple[jax.Array, Any]:
    z = _fixed_point(params, x)
    return z, (params, x, z)


def _backward(kept: Any, cotangent: jax.Array) -> Any:
    params, x, z = kept
    _, of_z = jax.vjp(lambda z: _layer(params, x, z), z)
    solved = lax.fori_loop(0, 30, lambda _, u: cotangent + of_z(u)[0], cotangent)
    _, of_rest = jax.vjp(lambda params, x: _layer(params, x, z), params, x)
    return of_rest(solved)


_fixed_point.defvjp(_forward, _backward)


def _deq() -> Network:
    """A deep equilibrium model (Bai et al., 2019)."""
    params = {
        "into": weights(10, 32, 128),
        "layer": {
            "inner": weights(11, 128, 128),
            "outer": weights(12, 128, 128),
            "bias": 0.2 * normal(13, 128),
        },
        "out": weights(14, 128, 10),
    }

    def loss(params: Any, x: jax.Array, target: jax.Array) -> jax.Array:
        z = _fixed_point(params["layer"], jax.nn.gelu(x @ params["into"]))
        return mean_square(jax.nn.gelu(z) @ params["out"], target)

    return Network(loss, params, (normal(2, 2048, 32), normal(3, 2048, 10)))


def _gaussian_process() -> Network:
    """The negative log marginal likelihood, with a length for each dimension."""
    params = {"length": 0.3 * normal(10, 4), "scale": jnp.zeros(()), "noise": -1.0}

    def loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        z = x * jnp.exp(-params["length"])
        distances = jnp.sum((z[:, None] - z[None]) ** 2, -1)
        kernel = jnp.exp(params["scale"] - 0.5 * distances)
        kernel += jnp.exp(params["noise"]) * jnp.eye(len(x))
        factor = jnp.linalg.cholesky(kernel)
        whitened = jax.scipy.linalg.solve_triangular(factor, y, lower=True)
        log_det = jnp.sum(jnp.log(jnp.diag(factor)))
        return (0.5 * jnp.sum(whitened**2) + log_det) / len(x)

    params = jax.tree.map(jnp.asarray, params)
    x = normal(2, 384, 4)
    return Network(loss, params, (x, jnp.sin(jnp.sum(x, -1))))


def _pinn() -> Network:
    """The residual of the heat equation (Raissi et al., 2019)."""
    sizes = (2, 64, 64, 64, 1)
    params = [
        {"w": weights(10 + n, *shape), "b": 0.2 * normal(20 + n, shape[1])}
        for n, shape in enumerate(itertools.pairwise(sizes))
    ]

    def field(params: Any, time: jax.Array, x: jax.Array) -> jax.Array:
        y = jnp.stack([time, x])
        for layer in params[:-1]:
            y = jnp.tanh(y @ layer["w"] + layer["b"])
        return (y @ params[-1]["w"] + params[-1]["b"])[0]

    def residual(params: Any, time: jax.Array, x: jax.Array) -> jax.Array:
        rate = jax.grad(field, 1)(params, time, x)
        return rate - jax.grad(jax.grad(field, 2), 2)(params, time, x)

    def loss(params: Any, times: jax.Array, xs: jax.Array) -> jax.Array:
        inside = jax.vmap(residual, (None, 0, 0))(params, times, xs)
        start = jax.vmap(field, (None, None, 0))(params, jnp.zeros(()), xs)
        return jnp.mean(inside**2) + mean_square(start, jnp.sin(jnp.pi * xs))

    times = jax.random.uniform(jax.random.key(2), (1024,))
    return Network(loss, params, (times, jnp.linspace(-1, 1, 1024)))


NETWORKS: Networks = {
    "fno": lambda: trained(
        FNO(), mean_square, [normal(2, 8, 32, 32, 3)], [normal(3, 8, 32, 32, 1)]
    ),
    "siren": lambda: trained(
        Siren(),
        mean_square,
        [jax.random.uniform(jax.random.key(2), (4096, 2), minval=-1)],
        [jax.nn.sigmoid(normal(3, 4096, 3))],
    ),
    "nerf": _nerf,
    "neural_ode": _neural_ode,
    "deq": _deq,
    "gaussian_process": _gaussian_process,
    "pinn": _pinn,
}
