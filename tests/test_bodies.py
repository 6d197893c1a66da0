"""Loops and branches inside of a wrapped function: values, memory, what is kept."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dafjax
from dafjax.policies import CompressExpensive
from tests import networks
from tests.helpers import gradient_nbytes, relative_error


DEPTH, WIDTH, ROWS = 8, 64, 128
POLICY = CompressExpensive(min_nbytes=256)


def stacked_params(key, depth=DEPTH):
    layers = networks.mlp_params(key, (WIDTH,) * (depth + 1))
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)


def layer(p, x):
    return x + jnp.tanh(x @ p["w"] + p["b"])


def scan_loss(params, x):
    x, _ = jax.lax.scan(lambda x, p: (layer(p, x), None), x, params)
    return jnp.mean(x**2)


def loop_loss(params, x):
    for n in range(DEPTH):
        x = layer(jax.tree.map(lambda leaf, n=n: leaf[n], params), x)
    return jnp.mean(x**2)


def nested_loss(params, x):
    grouped = jax.tree.map(lambda p: p.reshape(2, DEPTH // 2, *p.shape[1:]), params)

    def group(x, ps):
        return jax.lax.scan(lambda x, p: (layer(p, x), None), x, ps)

    x, _ = jax.lax.scan(group, x, grouped)
    return jnp.mean(x**2)


def inputs_loss(params, x):
    """A recurrent net: the stacked operands are activations."""
    inputs = jnp.tanh(x @ params["w"][0])

    def step(h, u):
        h = jnp.tanh(h @ params["w"][1] + u)
        return h, jnp.sum(h**2)

    _, losses = jax.lax.scan(step, jnp.zeros(WIDTH), inputs)
    return jnp.mean(losses)


def branch_loss(params, x):
    first, second = (jax.tree.map(lambda p, n=n: p[n], params) for n in (0, 1))
    x = jnp.sin(x)
    x = jax.lax.cond(
        jnp.sum(x) > -1e9,
        lambda x: layer(second, layer(first, x)),
        lambda x: layer(first, x),
        x,
    )
    return jnp.mean(x**2)


def jitted_loss(params, x):
    return jax.jit(scan_loss)(params, x)


def remat_loss(params, x):
    return jax.checkpoint(scan_loss)(params, x)


LOSSES = [
    *(scan_loss, nested_loss, inputs_loss, branch_loss, jitted_loss, remat_loss),
]
every_loss = pytest.mark.parametrize("loss", LOSSES, ids=lambda f: f.__name__)


@pytest.fixture
def example(key):
    return stacked_params(key), jax.random.normal(key, (ROWS, WIDTH))


def compressed(loss, bits=8, **options):
    return dafjax.remat_compress(loss, bits=bits, policy=POLICY, **options)


def flat(tree):
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])


@functools.cache
def exact_of(loss):
    """An example; the loss, and its gradients, with nothing wrapped."""
    key = jax.random.key(0)
    example = stacked_params(key), jax.random.normal(key, (ROWS, WIDTH))
    return example, jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(*example)


@pytest.mark.parametrize(
    ("bits", "most", "transform"),
    [(8, 0.02, jax.jit), (4, 0.3, lambda f: f)],
    ids=["jit", "eager"],
)
@every_loss
def test_values_are_exact_and_gradients_close(loss, bits, most, transform):
    example, (want, exact) = exact_of(loss)
    step = jax.value_and_grad(compressed(loss, bits), argnums=(0, 1))
    value, got = transform(step)(*example)
    np.testing.assert_allclose(value, want, rtol=1e-5)
    assert 1e-5 < relative_error(flat(got), flat(exact)) < most


@every_loss
def test_the_mean_gradient_is_the_exact_one(loss):
    """Another seed gives other noise, and the same one the same."""
    example, (_, (exact, _)) = exact_of(loss)
    exact = flat(exact)

    @jax.jit
    def gradient(seed):
        return jax.grad(compressed(loss, 4, seed=seed))(*example)

    draws = np.array([flat(gradient(jnp.uint32(seed))) for seed in range(32)])
    assert np.any(draws[0] != draws[1])
    np.testing.assert_array_equal(draws[1], flat(gradient(jnp.uint32(1))))
    spread = np.linalg.norm(draws.std(axis=0)) / np.sqrt(len(draws))
    assert np.linalg.norm(draws.mean(axis=0) - exact) < 2.5 * spread


def large_example():
    params = jax.eval_shape(lambda: stacked_params(jax.random.key(0)))
    return params, jax.ShapeDtypeStruct((8192, WIDTH), jnp.float32)


@pytest.mark.parametrize("loss", [scan_loss, nested_loss, inputs_loss, branch_loss])
def test_a_loop_in_a_wrapped_function_needs_less_memory(loss):
    example = large_example()
    plain = gradient_nbytes(loss, *example)
    # A row of 64 values fills an eighth of a tile: little is gained.
    most = {inputs_loss: 1.0, branch_loss: 0.8}.get(loss, 0.4)
    assert gradient_nbytes(dafjax.remat_compress(loss), *example) < most * plain


@pytest.mark.parametrize("level", ["function", "body", "both"])
def test_raw_residuals_are_never_stacked_whatever_is_wrapped(level):
    wrap = functools.partial(dafjax.remat_compress, activation_argnums=1)
    body = layer if level == "function" else wrap(layer)

    def loss(params, x):
        x, _ = jax.lax.scan(lambda x, p: (body(p, x), None), x, params)
        return jnp.mean(x**2)

    wrapped = loss if level == "body" else dafjax.remat_compress(loss)
    text = jax.jit(jax.grad(wrapped)).lower(*large_example()).compile().as_text()
    assert not re.search(rf"f32\[{DEPTH},8192,{WIDTH}\]", text)
    assert re.search(rf"u16\[{DEPTH}(,\d+)+\]", text)


def test_a_loop_in_a_wrapped_function_in_a_wrapped_function_is_compressed():
    wrapped = dafjax.remat_compress(
        lambda params, x: 2 * dafjax.remat_compress(scan_loss)(params, x)
    )
    text = jax.jit(jax.grad(wrapped)).lower(*large_example()).compile().as_text()
    assert not re.search(rf"f32\[{DEPTH},8192,{WIDTH}\]", text)


def test_plain_loops_do_stack_raw_residuals():
    text = jax.jit(jax.grad(scan_loss)).lower(*large_example()).compile().as_text()
    assert re.search(rf"f32\[{DEPTH},8192,{WIDTH}\]", text)


@pytest.mark.parametrize("loss", [scan_loss, nested_loss])
def test_what_a_loop_keeps_is_listed_once_for_each_iteration(loss):
    saved = dafjax.saved_residuals(dafjax.remat_compress(loss), *large_example())
    compressed = [k for k in saved.kept if k.codec is not None]
    in_loop = sum(k.stored_nbytes for k in compressed if k.shape == (8192, WIDTH))
    assert in_loop > 0
    # x at 2.125 bits and the input of tanh at 4.125 of each layer, and the last x; and
    # a seed for a row of 512.
    bits = DEPTH * (2.125 + 4.125 + 2 / 16) + 2.125 + 1 / 16
    assert saved.stored_nbytes == pytest.approx(8192 * WIDTH * bits / 8, rel=0.05)


def test_a_loop_without_residuals_worth_a_code_is_left_alone(example):
    params, x = example
    got = jax.grad(dafjax.remat_compress(scan_loss))(params, x[:1, :])
    want = jax.grad(scan_loss)(params, x[:1, :])
    np.testing.assert_allclose(flat(got), flat(want), rtol=1e-5, atol=1e-6)


def test_small_residuals_of_many_iterations_are_compressed():
    params = jax.eval_shape(lambda: stacked_params(jax.random.key(0), 512))
    x = jax.ShapeDtypeStruct((16, WIDTH), jnp.float32)  # 4 KiB
    saved = dafjax.saved_residuals(dafjax.remat_compress(scan_loss), params, x)
    assert any(k.codec is not None for k in saved.kept)


def test_vmap_of_a_loop(example):
    params, x = example
    xs = jnp.stack([x, 2 * x])
    gradient = jax.grad(compressed(scan_loss, 8))
    got = jax.vmap(gradient, in_axes=(None, 0))(params, xs)
    want = jax.vmap(jax.grad(scan_loss), in_axes=(None, 0))(params, xs)
    assert 1e-5 < relative_error(flat(got), flat(want)) < 0.02


def test_second_order_through_a_loop_is_refused(example):
    params, x = example
    loss = compressed(scan_loss)
    with pytest.raises(NotImplementedError, match="bits=None"):
        jax.hessian(lambda x: loss(params, jnp.tile(x, (16, 1))))(x[0])


def test_weights_stacked_inside_are_never_kept(key):
    layers = networks.mlp_params(key, (WIDTH,) * (DEPTH + 1))

    def loss(layers, x):
        return scan_loss(jax.tree.map(lambda *w: jnp.stack(w), *layers), x)

    args = layers, jax.random.normal(key, (4 * ROWS, WIDTH))
    kept = dafjax.saved_residuals(compressed(loss), *args).kept
    assert any(item.shape == (4 * ROWS, WIDTH) for item in kept)
    assert all(item.shape != (WIDTH, WIDTH) for item in kept)
