"""Under `jax.disable_jit`, everything works as without it."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

import dafjax
import dafjax.linen
import dafjax.nnx
from dafjax.codecs import Affine, Bitmask
from dafjax.policies import CompressExpensive
from dafjax.stores import Host, PagePool
from tests.helpers import like, relative_error


# Small arrays are compressed too, so that small tests show what large ones do.
compressed = functools.partial(
    dafjax.remat_compress, bits=8, policy=CompressExpensive(min_nbytes=256)
)


def layer_norm(h):
    mean = h.mean(-1, keepdims=True)
    return (h - mean) * lax.rsqrt(jnp.var(h, -1, keepdims=True) + 1e-5)


def dropout(h):
    return jnp.where(jax.random.bernoulli(jax.random.key(1), 0.7, h.shape), h, 0.0)


def max_pool(h):
    windows = (1, 2, 2)
    return lax.reduce_window(
        h.reshape(4, 8, 32), -jnp.inf, lax.max, windows, windows, "VALID"
    )


def scan(h):
    return lax.scan(lambda c, _: (jnp.sin(2 * c), c[0]), h, length=3)


def branch(h):
    h = lax.cond(h[0, 0] > 0, jnp.sin, jnp.cos, h)
    return lax.switch(jnp.int32(h[0, 1] > 0), [jnp.sin, jnp.cos, jnp.tanh], h)


def count(h):
    return jnp.sin(h) * lax.while_loop(lambda n: n < 3, lambda n: n + 1, 0)


@jax.custom_vjp
def ruled(h):
    return jnp.sin(h)


ruled.defvjp(lambda h: (jnp.sin(h), h), lambda h, ct: (ct * jnp.cos(h),))

FUNCTIONS = {
    "gelu": jax.nn.gelu,
    "softmax": jax.nn.softmax,
    "relu": jax.nn.relu,
    "layer norm": layer_norm,
    "dropout": dropout,
    "max pool": max_pool,
    "scan": scan,
    "branch": branch,
    "count": count,
    "custom_vjp": ruled,
    "jit": jax.jit(jnp.tanh),
    "checkpoint": jax.checkpoint(jnp.tanh),
    "wrapped": compressed(jnp.tanh),
    "vmap": jax.vmap(jax.nn.gelu),
}


def loss_of(f):
    def loss(w, x):
        leaves = jax.tree.leaves(f(x @ w))
        return sum(jnp.sum(jnp.cos(2 * leaf)) for leaf in leaves)

    return loss


@pytest.fixture
def operands(key):
    keys = jax.random.split(key)
    shapes = ((32, 32), (32, 32))
    return tuple(jax.random.normal(k, s) / 3 for k, s in zip(keys, shapes, strict=True))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_gradient_is_off_by_the_noise_of_codes(name, operands):
    loss = loss_of(FUNCTIONS[name])
    with jax.disable_jit():
        got = jax.grad(compressed(loss))(*operands)
    assert 1e-6 < relative_error(got, jax.jit(jax.grad(loss))(*operands)) < 0.05


OPTIONS = {
    "second forward pass": lambda: {"rematerialize": True},
    "host": lambda: {"store": Host()},
    "pool": lambda: {"store": PagePool()},
    "pool with a target": lambda: {"store": PagePool(), "bits": dafjax.AverageBits(4)},
    "parts": lambda: {"max_parts": 2},
    "activations": lambda: {"activation_argnums": 1},
    "policy of jax.checkpoint": lambda: {
        "policy": jax.checkpoint_policies.dots_saveable
    },
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options(name, operands):
    loss = loss_of(jax.nn.gelu)
    with jax.disable_jit():
        got = jax.grad(compressed(loss, **OPTIONS[name]()))(*operands)
    assert relative_error(got, jax.grad(loss)(*operands)) < 0.2


def test_the_noise_is_that_of_the_compiled_program(operands):
    f = compressed(loss_of(jax.nn.gelu))
    want = jax.grad(f)(*operands)
    with jax.disable_jit():
        got = jax.grad(f)(*operands)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_the_function_runs_as_python_and_has_a_trace_of_its_own(operands):
    """A loop in it runs in Python, as `jax.checkpoint` has it."""
    calls = []

    def f(w, x):
        def body(c, _):
            calls.append(1)
            return jnp.sin(c @ w), None

        return lax.scan(body, x, length=3)[0].sum()

    for wrapped in (compressed(f), jax.checkpoint(f)):
        calls.clear()
        jax.grad(wrapped)(*operands)
        once = len(calls)
        with jax.disable_jit():
            jax.grad(wrapped)(*operands)
        assert (once, len(calls)) == (1, 4)


def test_a_pullback_that_leaves_the_context(operands):
    loss = loss_of(jax.nn.silu)
    with jax.disable_jit():
        _, pullback = jax.vjp(compressed(loss), *operands)
    got, _ = pullback(jnp.float32(1))
    assert relative_error(got, jax.grad(loss)(*operands)) < 0.05


@pytest.mark.parametrize("codec", [Affine(bits=2), Bitmask()], ids=repr)
def test_codecs(codec, key):
    x = jax.random.normal(key, (100,))
    x = x > 0 if isinstance(codec, Bitmask) else x
    with jax.disable_jit():
        got = codec.decode(codec.encode(x), like(x))
    np.testing.assert_array_equal(got, codec.decode(codec.encode(x), like(x)))


def test_reductions(key):
    x = jax.random.normal(key, (3, 100))
    with jax.disable_jit():
        low, high = dafjax.reductions.minmax(x)
        energy = dafjax.reductions.sum_of_squares(x)
    np.testing.assert_array_equal(low, x.min(-1))
    np.testing.assert_array_equal(high, x.max(-1))
    np.testing.assert_allclose(energy, (x**2).sum(-1), rtol=1e-5)


def test_plans_are_the_same(operands):
    f = compressed(loss_of(jnp.sin))
    want = dafjax.saved_residuals(f, *operands)
    with jax.disable_jit():
        assert str(dafjax.saved_residuals(f, *operands)) == str(want)


def test_steps_with_measured_bits(operands):
    loss = loss_of(jax.nn.gelu)
    f = compressed(loss, bits=dafjax.AverageBits(4))
    step = dafjax.jit(jax.grad(f))
    with jax.disable_jit():
        # Before the second call, bits are allocated.
        for _ in range(2):
            got = step(*operands)
    assert relative_error(got, jax.grad(loss)(*operands)) < 0.2
    assert step.bits


class Block(nn.Module):
    """Dense, a norm, ReLU and dropout."""

    @nn.compact
    def __call__(self, x):
        y = nn.relu(nn.LayerNorm()(nn.Dense(x.shape[-1])(x)))
        return x + nn.Dropout(0.2, deterministic=False)(y)


def test_linen(operands):
    def gradient(wrap, **options):
        block = wrap(Block, **options)()
        rngs = {name: jax.random.key(n) for n, name in enumerate(("params", "dropout"))}
        variables = block.init(rngs, operands[1])
        f = lambda v: jnp.sum(block.apply(v, operands[1], rngs=rngs) ** 3)
        return jax.grad(f)(variables)["params"]["Dense_0"]["kernel"]

    want = gradient(nn.remat)
    with jax.disable_jit():
        got = gradient(
            dafjax.linen.remat_compress,
            bits=8,
            policy=CompressExpensive(min_nbytes=256),
        )
    assert 1e-6 < relative_error(got, want) < 0.05


def test_nnx(operands):
    class Layer(nnx.Module):
        def __init__(self, rngs):
            self.dense = nnx.Linear(32, 32, rngs=rngs)
            self.norm = nnx.BatchNorm(32, rngs=rngs)

    def gradient(wrap, **options):
        f = wrap(lambda layer, x: nnx.gelu(layer.norm(layer.dense(x))), **options)
        layer = Layer(nnx.Rngs(0))
        loss = lambda layer: jnp.sum(f(layer, operands[1]) ** 3)
        gradient = nnx.grad(loss)(layer)
        return gradient.dense.kernel.get_value(), layer.norm.mean.get_value()

    want, want_mean = gradient(nnx.remat)
    with jax.disable_jit():
        got, mean = gradient(
            dafjax.nnx.remat_compress, bits=8, policy=CompressExpensive(min_nbytes=256)
        )
    np.testing.assert_allclose(mean, want_mean, rtol=1e-5, atol=1e-6)
    assert 1e-6 < relative_error(got, want) < 0.05
