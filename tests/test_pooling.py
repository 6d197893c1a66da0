"""Max-pooling keeps the places of maxima, in bits, and JAX's gradient."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax import lax

import dafjax
from dafjax._bits import Bits
from dafjax._passes.pipeline import Context, run_passes
from dafjax._passes.pooling import Windows, find_poolings
from dafjax._plan.planner import make_plan
from dafjax._trace.residuals import differentiate
from dafjax.codecs import Affine, Bitmask
from dafjax.policies import AbstractPolicy, Compress, CompressExpensive, Save, SaveAll
from tests.helpers import gradient_nbytes


# Of each: shape, lengths of a window, strides, padding.
WINDOWS = {
    "2x2": ((2, 8, 8, 3), (1, 2, 2, 1), (1, 2, 2, 1), "VALID"),
    "3x3 padded": (
        (2, 9, 9, 3),
        (1, 3, 3, 1),
        (1, 2, 2, 1),
        [(0, 0), (1, 1), (1, 1), (0, 0)],
    ),
    "overlapping": ((2, 9, 8, 3), (1, 3, 2, 1), (1, 1, 1, 1), "SAME"),
    "gaps": ((2, 11), (1, 2), (1, 5), "VALID"),
    "whole image": ((2, 3, 7, 7), (1, 1, 7, 7), (1, 1, 1, 1), "VALID"),
    "8x8": ((1, 16, 17, 2), (1, 8, 8, 1), (1, 4, 8, 1), "VALID"),
}

VALUES = {
    "normal": lambda rng, shape: rng.standard_normal(shape),
    "ties": lambda rng, shape: rng.integers(-2, 2, shape),
    "NaN": lambda rng, shape: np.where(
        rng.random(shape) < 0.2, np.nan, rng.integers(-2, 2, shape)
    ),
    "infinite": lambda rng, shape: rng.choice(
        [-np.inf, np.inf, 0.0, 1.0], shape, p=[0.5, 0.1, 0.2, 0.2]
    ),
}

POOLINGS = {
    "reduce_window_max": (lax.max, -np.inf),
    "reduce_window_min": (lax.min, np.inf),
}


@pytest.mark.parametrize(
    ("name", "pooling"),
    [
        *((name, "reduce_window_max") for name in WINDOWS),
        ("3x3 padded", "reduce_window_min"),
        ("gaps", "reduce_window_min"),
    ],
)
def test_places_give_the_values_and_the_gradient_of_jax(name, pooling, rng):
    shape, lengths, strides, padding = WINDOWS[name]
    function, initial = POOLINGS[pooling]

    @jax.jit
    def expected(x, cotangent):
        pooled, pullback = jax.vjp(
            lambda x: lax.reduce_window(
                x, np.float32(initial), function, lengths, strides, padding
            ),
            x,
        )
        return pooled, *pullback(cotangent)

    edges = padding
    if isinstance(padding, str):
        edges = lax.padtype_to_pads(shape, lengths, strides, padding)
    windows = Windows(shape, lengths, strides, tuple(edges), pooling)

    @jax.jit
    def got(x, cotangent):
        places = windows.find_places(x)
        assert places.shape == (windows.num_bits, *cotangent.shape)
        gradient = windows.scatter_to_places(places, cotangent)
        rows = windows.find_rows(expected(x, cotangent)[0])
        return windows.pick_places(places, rows, x), gradient

    pooled = jax.eval_shape(windows.find_places, jnp.zeros(shape)).shape[1:]
    for values, make in VALUES.items():
        x = jnp.asarray(make(rng, shape), jnp.float32)
        cotangent = jnp.asarray(rng.standard_normal(pooled), jnp.float32)
        for a, b in zip(got(x, cotangent), expected(x, cotangent), strict=True):
            np.testing.assert_array_equal(a, b, err_msg=values)


@pytest.mark.parametrize(
    ("lengths", "bits"),
    [((1, 2), 1), ((2, 2), 2), ((3, 3), 4), ((1, 1), 0), ((16, 16), 8)],
)
def test_a_place_has_as_few_bits_as_it_needs(lengths, bits):
    windows = Windows((64, 64), lengths, (1, 1), ((0, 0),) * 2, "reduce_window_max")
    assert windows.num_bits == bits


def layers(params, x, *, window=3, pool=nn.max_pool, activation=jax.nn.relu):
    for kernel, bias in params:
        y = lax.conv_general_dilated(
            x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        x = pool(activation(y + bias), (window, window), (2, 2), "SAME")
    return jnp.mean(jnp.square(x))


def example(key, depth=2, batch=8, size=32, channels=16):
    keys = jax.random.split(key, depth + 1)
    params = [
        (jax.random.normal(k, (3, 3, channels, channels)) / 12, jnp.zeros(channels))
        for k in keys[1:]
    ]
    return params, jax.random.normal(keys[0], (batch, size, size, channels))


def program_of(function, *arguments):
    leaves, structure = jax.tree.flatten(arguments)
    closed = jax.make_jaxpr(lambda *x: function(*structure.unflatten(x)))(*leaves)
    return differentiate(closed, [True] * len(leaves))


def plan_of(function, *arguments, policy=None):
    policy = policy or CompressExpensive(min_nbytes=256)
    program = run_passes(program_of(function, *arguments), Context(policy))
    return make_plan(program, policy=policy, bits=Bits(2))


def test_of_what_is_pooled_only_codes_and_places_are_kept(key):
    params, x = example(key)
    plan = plan_of(lambda p: layers(p, x), params)
    shapes = {k.shape: k.codec for k in plan.kept if k.primitive == "find_places"}
    assert shapes == {(4, 8, 8, 8, 16): Bitmask(), (4, 8, 16, 16, 16): Bitmask()}
    assert all(k.codec is not None or k.like.size < 1000 for k in plan.kept)
    rows = str(dafjax.saved_residuals(dafjax.remat_compress(layers), params, x))
    assert any("find_places" in row and "pooling.py" in row for row in rows.split("\n"))


@dataclasses.dataclass(frozen=True)
class CompressBits(AbstractPolicy):
    """Compresses what is exact in codes, and saves the rest."""

    def __call__(self, residual):
        return Compress(Bitmask()) if residual.dtype == jnp.bool_ else Save()


def min_pool(x, lengths, strides, padding):
    return lax.reduce_window(
        x, jnp.inf, lax.min, (1, *lengths, 1), (1, *strides, 1), padding
    )


@pytest.mark.parametrize(("window", "pool"), [(3, nn.max_pool), (2, min_pool)])
def test_the_gradient_is_that_of_jax_where_only_bits_are_codes(window, pool, key):
    params, x = example(key)
    loss = functools.partial(layers, window=window, pool=pool)
    plan = plan_of(lambda p: loss(p, x), params, policy=CompressBits())
    assert sum(k.primitive == "find_places" for k in plan.kept) == 2
    wrapped = dafjax.remat_compress(loss, policy=CompressBits())
    got = jax.jit(jax.grad(wrapped))(params, x)
    expected = jax.jit(jax.grad(loss))(params, x)
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6),
        got,
        expected,
    )


def test_the_gradient_at_two_bits_has_noise_and_no_bias(key):
    """What is pooled is recomputed from codes, its maxima from the places."""
    params, x = example(key, batch=4, size=16)
    gradient = jax.jit(
        lambda seed: jax.grad(
            dafjax.remat_compress(
                layers, seed=seed, policy=CompressExpensive(min_nbytes=256)
            )
        )(params, x)
    )
    exact = jax.jit(jax.grad(layers))(params, x)[1][0]
    num_draws = 32
    draws = [np.asarray(gradient(jnp.uint32(n))[1][0]) for n in range(num_draws)]
    noise = np.mean([np.linalg.norm(draw - exact) for draw in draws])
    bias = np.linalg.norm(np.mean(draws, axis=0) - exact)
    assert 0.01 < noise / np.linalg.norm(exact) < 0.5
    assert 0.7 < bias / (noise / num_draws**0.5) < 1.4


def test_places_need_less_memory_than_what_is_pooled(key):
    arguments = jax.eval_shape(lambda: example(key, depth=3, batch=32, size=64))

    def nbytes(**options):
        wrapped = dafjax.remat_compress(layers, **options)
        return gradient_nbytes(wrapped, *arguments)

    assert nbytes() < 0.5 * nbytes(without_passes=["argmax_pooling"])


def test_a_policy_that_saves_everything_saves_what_jax_does(key):
    params, x = example(key)
    plan = plan_of(lambda p: layers(p, x), params, policy=SaveAll())
    assert all(k.primitive != "find_places" for k in plan.kept)
    wrapped = dafjax.remat_compress(layers, policy=SaveAll())
    got = jax.jit(jax.grad(wrapped))(params, x)
    expected = jax.jit(jax.grad(layers))(params, x)
    assert jax.tree.all(jax.tree.map(jnp.array_equal, got, expected))


def test_windows_of_more_than_64_elements_are_searched_again(key):
    x = jax.random.normal(key, (1, 64, 64, 4))

    def pool(window, x):
        return jnp.sum(nn.max_pool(jnp.sin(x), (window, window), (8, 8)))

    assert find_poolings(program_of(functools.partial(pool, 8), x), ())
    assert not find_poolings(program_of(functools.partial(pool, 9), x), ())


def test_an_argument_is_searched_again_unless_nothing_else_keeps_it(key):
    x = jax.random.normal(key, (1, 64, 64, 4))
    program = program_of(lambda x: jnp.sum(nn.max_pool(x, (2, 2), (2, 2))), x)
    assert not find_poolings(program, ())
    assert find_poolings(program, (0,))


def test_in_a_scan_and_under_vmap_places_are_found_too(key):
    params, x = example(key, size=16)
    kernels = jnp.stack([kernel for kernel, _ in params])

    def loss(kernels, x):
        def body(x, kernel):
            y = lax.conv_general_dilated(
                x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
            )
            return x + nn.max_pool(jnp.sin(y), (3, 3), (1, 1), "SAME"), None

        return jnp.mean(jnp.square(lax.scan(body, x, kernels)[0]))

    wrapped = dafjax.remat_compress(loss, bits=8)
    assert "find_places" in str(jax.make_jaxpr(jax.grad(wrapped))(kernels, x))
    per_image, expected = (
        jax.jit(jax.vmap(jax.grad(f), (None, 0)))(kernels, x[:, None])
        for f in (wrapped, loss)
    )
    error = np.linalg.norm(per_image - expected) / np.linalg.norm(expected)
    assert 1e-6 < error < 0.05


def test_a_nan_in_what_is_pooled_reaches_the_gradient(key):
    params, x = example(key)
    x = x.at[0, 0, 0, 0].set(jnp.nan)
    loss = functools.partial(layers, activation=jnp.sin)
    got = jax.jit(jax.grad(dafjax.remat_compress(loss)))(params, x)
    expected = jax.jit(jax.grad(loss))(params, x)
    jax.tree.map(
        lambda a, b: np.testing.assert_array_equal(jnp.isnan(a), jnp.isnan(b)),
        got,
        expected,
    )


# Of each: bits, dtype, function, window, strides, activation.
NONFINITE = {
    "minima": (1, jnp.float32, "reduce_window_min", (3, 3), (2, 2), None),
    "overlapping": (8, jnp.float32, "reduce_window_max", (3, 2), (1, 1), None),
    "ReLU before": (3, jnp.float32, "reduce_window_max", (2, 2), (2, 2), jax.nn.relu),
    "bfloat16": (4, jnp.bfloat16, "reduce_window_max", (2, 2), (2, 2), jnp.tanh),
    "float16": (2, jnp.float16, "reduce_window_max", (3, 3), (2, 2), None),
}


@pytest.mark.parametrize("name", NONFINITE)
def test_what_is_not_finite_is_not_finite_in_the_same_gradients(name, key, rng):
    """In 4 x 4 and in 16 x 16 places: jaxlib 0.10.2 pools many float32 without NaN."""
    bits, dtype, pooling, lengths, strides, activation = NONFINITE[name]
    function, initial = POOLINGS[pooling]

    def loss(kernels, x):
        h = x @ kernels[0]
        h = h if activation is None else activation(h)
        windows = (1, *lengths, 1), (1, *strides, 1)
        pooled = lax.reduce_window(
            h, np.asarray(initial, h.dtype), function, *windows, "SAME"
        )
        return jnp.mean((pooled @ kernels[1]).astype(jnp.float32))

    policy = CompressExpensive(Affine(bits=bits), min_nbytes=0)
    wrapped = dafjax.remat_compress(loss, policy=policy)
    gradients = [jax.jit(jax.grad(f, (0, 1))) for f in (wrapped, loss)]
    kernels = (jax.random.normal(key, (2, 16, 16)) / 4).astype(dtype)
    # Of the first channel of `x` all channels of the product take the sign.
    kernels = kernels.at[0, 0].set(1)
    for size in (4, 16):
        spread = rng.random((size, size))
        corner = np.arange(size) < 4
        for mask in (spread < 0.02, spread < 0.3, corner[:, np.newaxis] & corner):
            for value in (np.nan, np.inf, -np.inf):
                x = rng.standard_normal((1, size, size, 16))
                x[0, mask, 0] = value
                got, want = (
                    np.concatenate([np.ravel(g).astype(np.float32) for g in gradient])
                    for gradient in (
                        f(kernels, jnp.asarray(x, dtype)) for f in gradients
                    )
                )
                np.testing.assert_array_equal(np.isfinite(got), np.isfinite(want))
                # Codes of few bits have NaN for infinities.
                if not np.isinf(want).any():
                    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
