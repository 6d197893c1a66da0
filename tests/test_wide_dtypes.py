"""float64 and complex numbers are stored in codes as float32 is."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dafjax
from dafjax.policies import CompressExpensive
from tests.helpers import gradient_nbytes, relative_error


DTYPES = ["float64", "complex64", "complex128"]


@pytest.fixture(autouse=True)
def x64():
    with jax.enable_x64(True):
        yield


def loss(ws, x):
    """Has no poles, which tanh of complex numbers has."""
    for w in ws:
        x = x @ w
        x = x / (1 + jnp.abs(x)).astype(x.dtype)
    return jnp.mean(jnp.abs(x) ** 2)


def poles(ws, x):
    for w in ws:
        x = jnp.tanh(x @ w)
    return jnp.mean(jnp.abs(x) ** 2)


def test_near_poles_of_a_complex_function_its_result_is_stored():
    """Recomputed from codes of its argument it is off by many times its size."""
    ws, x = example("complex64")
    got = jax.jit(jax.grad(dafjax.remat_compress(poles, bits=8)))(ws, x)
    for g, e in zip(got, jax.jit(jax.grad(poles))(ws, x), strict=True):
        assert relative_error(g, e) < 0.2


def example(dtype, rows=1024, width=128):
    keys = jax.random.split(jax.random.key(0), 7)
    ws = [jax.random.normal(k, (width, width), dtype) / 12 for k in keys[:6]]
    return ws, jax.random.normal(keys[6], (rows, width), dtype)


@pytest.mark.parametrize("dtype", ["float64", "complex64"])
def test_memory_falls(dtype):
    arguments = example(dtype, rows=2048)
    wrapped = gradient_nbytes(dafjax.remat_compress(poles), *arguments)
    assert wrapped < 0.6 * gradient_nbytes(poles, *arguments)


@functools.cache
def error_of_gradient(dtype):
    ws, x = example(dtype)
    wrapped = dafjax.remat_compress(loss, bits=8)
    value, got = jax.jit(jax.value_and_grad(wrapped))(ws, x)
    exact_value, exact = jax.jit(jax.value_and_grad(loss))(ws, x)
    assert value == exact_value
    assert all(g.dtype == dtype for g in got)
    return max(relative_error(g, e) for g, e in zip(got, exact, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_are_exact_and_gradients_as_accurate_as_in_float32(dtype):
    assert error_of_gradient(dtype) < 1.5 * error_of_gradient("float32")


def test_numbers_beyond_float32():
    w, x = jnp.eye(64) * 1e200, jax.random.normal(jax.random.key(1), (256, 64))

    def wide(w, x):
        h = x @ w
        return jnp.mean((h * 1e-200) ** 2)

    got = jax.jit(
        jax.grad(dafjax.remat_compress(wide, bits=8, policy=CompressExpensive()))
    )(w, x)
    assert np.all(np.isfinite(got))
    assert relative_error(got * 1e200, jax.grad(wide)(w, x) * 1e200) < 0.02


def test_of_a_fourier_transform_the_modes_that_are_read_are_stored():
    w = 0.1 * jax.random.normal(jax.random.key(0), (2, 12, 16, 16), jnp.float32)
    x = jax.random.normal(jax.random.key(1), (64, 256, 16), jnp.float32)

    def spectral(w, x):
        for _ in range(2):
            modes = jnp.fft.rfft(x, axis=1)[:, :12]
            kernel = jax.lax.complex(w[0], w[1])
            modes = jnp.einsum("bki,kio->bko", modes, kernel)
            x = jax.nn.gelu(jnp.fft.irfft(modes, 256, axis=1) + x)
        return jnp.mean(x**2)

    wrapped = dafjax.remat_compress(spectral, bits=8)
    kept = dafjax.saved_residuals(lambda w: wrapped(w, x), w).kept
    raw = [item for item in kept if item.codec is None]
    assert not any("complex" in str(item.dtype) for item in raw)
    assert not any(item.shape[1:2] == (129,) for item in kept)
    assert any(item.shape == (64, 12, 16) for item in kept)
    got = jax.jit(jax.grad(wrapped))(w, x)
    assert relative_error(got, jax.jit(jax.grad(spectral))(w, x)) < 0.05


@pytest.mark.parametrize("seed", [3, 17])
def test_a_policy_of_ones_own_with_a_codec_that_loses_nothing(seed):
    """Equality masks are saved: recomputed values can round otherwise."""
    import dataclasses
    import zlib

    from dafjax import policies

    @dataclasses.dataclass(frozen=True)
    class Raw(dafjax.codecs.AbstractCodec):
        @property
        def is_exact(self):
            return False

        def encode(self, x, *, seed=0):
            return (x,)

        def decode(self, packed, like, *, after=()):
            return packed[0]

        def packed_nbytes(self, like):
            return like.size * like.dtype.itemsize // 16

        def check(self, like):
            pass

    @dataclasses.dataclass(frozen=True)
    class AtRandom(policies.AbstractPolicy):
        def __call__(self, r):
            text = f"{seed} {r.number} {r.shape} {r.primitive}"
            choice = zlib.crc32(text.encode()) % 3
            if choice == 0:
                return policies.Save()
            if choice == 1 or r.known:
                return policies.Recompute()
            if r.is_floating:
                return policies.Compress(Raw())
            is_mask = r.dtype == jnp.bool_
            codec = dafjax.codecs.Bitmask()
            return policies.Compress(codec) if is_mask else policies.Save()

    x = jax.random.normal(jax.random.key(1), (2, 43, 15), jnp.float32)

    def celus(x):
        step = lambda _, c: jax.nn.celu(jnp.arcsinh(jax.nn.sigmoid(c) - 0.5))
        return jnp.sum(jax.lax.fori_loop(0, 2, step, x) ** 2)

    exact = jax.jit(jax.grad(celus))(x)
    wrapped = dafjax.remat_compress(celus, policy=AtRandom())
    assert relative_error(jax.jit(jax.grad(wrapped))(x), exact) < 1e-4
