"""Gradients of scales that a later norm divides out, and the noise in them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dafjax
from dafjax._passes.scales import hold_scales
from dafjax._trace.residuals import differentiate
from dafjax.policies import CompressExpensive
from tests.helpers import relative_error


CHANNELS = 16
DEPTHWISE = {
    "window_strides": (1, 1),
    "padding": "SAME",
    "dimension_numbers": ("NHWC", "HWIO", "NHWC"),
    "feature_group_count": CHANNELS,
}


def norm(params, x, epsilon=1e-5, axes=(0, 1, 2), stop=lambda x: x):
    mean = x.mean(axes, keepdims=True)
    variance = stop(jnp.square(x - mean).mean(axes, keepdims=True))
    y = (x - mean) * jax.lax.rsqrt(variance + epsilon)
    return y * params["scale"] + params["bias"]


def depthwise(params, x):
    return jax.lax.conv_general_dilated(x, params["kernel"], **DEPTHWISE)


def max_pool(params, x):
    del params
    window = (1, 2, 2, 1)
    return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, window, window, "VALID")


def leaky(x):
    return jnp.where(x > 0, x, 0.1 * x)


@jax.custom_jvp
def spike(x):
    return jnp.maximum(x, 0)


spike.defjvp(lambda x, t: (spike(*x), t[0] * jax.nn.sigmoid(x[0])))


def block(params, x, *, act=jax.nn.relu, middle=depthwise, **options):
    """Two norms, and what `middle` does between them."""
    first, second = params["norms"]
    y = middle(params, act(norm(first, x @ params["weights"])))
    return norm(second, y + params["added"], **options)


def loss(params, x, **options):
    return jnp.sum(jnp.sin(block(params, x, **options)))


def with_decay(params, x):
    decay = sum(jnp.sum(jnp.square(p["scale"])) for p in params["norms"])
    return loss(params, x, epsilon=0.3) + decay


def with_statistics(params, x):
    """It also reads a mean that is not divided out."""
    y = depthwise(params, jax.nn.relu(norm(params["norms"][0], x)))
    return jnp.sum(jnp.sin(norm(params["norms"][1], y))) + jnp.sin(y.mean((0, 1, 2)))[0]


def with_two_scales(params, x):
    """Both scales are divided out, and both end at the same mean of squares."""
    first, second = params["norms"]
    y = x * first["scale"] * second["scale"]
    bare = {"scale": 1.0, "bias": 0.0}
    return jnp.sum(jnp.sin(norm(bare, y))) + jnp.sum(jnp.sin((y**2).mean((0, 1, 2))))


def with_subtracted_numbers(params, x):
    p = params["norms"][0]
    y = x * p["scale"] + p["bias"]
    variance = jnp.square(y).mean((0, 1, 2))
    return jnp.sum(jnp.sin(y * jax.lax.rsqrt(variance - 0.01))) + jnp.sum(
        jnp.cos(y / jnp.sqrt(9 - (-variance)))
    )


def separate(params, x):
    """As NNX and Haiku have it: the scale joins the factor first, in `[1, 1, 1, n]`."""
    (first, second), w = params["norms"], params["kernel"]
    factor = jax.lax.rsqrt(x.var((0, 1, 2)) + 1e-5) * first["scale"]
    y = jnp.maximum(0, (x - x.mean((0, 1, 2))) * factor + first["bias"][None, None])
    return jnp.sum(jnp.sin(norm(second, depthwise({"kernel": w}, y))))


def stacked(params, x):
    """There are as many rows as channels, and `stack` moves the channels."""
    p, rows = params["norms"][0], x[0, :2].reshape(CHANNELS, CHANNELS)
    y = jnp.stack([rows * p["scale"] + p["bias"], rows.T * p["scale"] + p["bias"]])
    return jnp.sum(jnp.sin(norm({"scale": 1.0, "bias": 0.0}, y, axes=2)))


def unstacked(params, x):
    p, rows = params["norms"][0], x[0, :4].reshape(2, CHANNELS, CHANNELS)
    y, _ = jnp.unstack(rows * p["scale"][:, None] + p["bias"][:, None])
    return jnp.sum(jnp.sin(norm({"scale": 1.0, "bias": 0.0}, y, axes=0)))


def rounded(params, x):
    """The bias has no derivative."""
    first, second = params["norms"]
    bias = (9 * first["bias"]).astype(jnp.int32).astype(x.dtype)
    y = norm({"scale": first["scale"], "bias": bias}, x)
    return jnp.sum(jnp.sin(norm(second, y)))


@jax.custom_jvp
def turned(x):
    return jnp.maximum(x, 0)


turned.defjvp(lambda x, t: (turned(*x), jnp.where(jnp.zeros(()) > x[0], t[0], 0)))


@jax.custom_jvp
def same(x):
    return jax.lax.max(x, x)


same.defjvp(lambda x, t: (same(*x), jnp.where(x[0] > 0, t[0], 0)))


def arguments(dtype=jnp.float32, batch=8):
    keys = iter(jax.random.split(jax.random.key(0), 9))
    draw = functools.partial(jax.random.normal, dtype=dtype)
    norms = [
        {
            "scale": 1 + 0.2 * draw(next(keys), (CHANNELS,)),
            "bias": 0.2 * draw(next(keys), (CHANNELS,)),
        }
        for _ in range(2)
    ]
    params = {
        "norms": norms,
        "weights": draw(next(keys), (CHANNELS, CHANNELS)) / 4,
        "kernel": draw(next(keys), (3, 3, 1, CHANNELS)) / 3,
        "added": 0.1 * draw(next(keys), (CHANNELS,)),
    }
    return params, draw(next(keys), (batch, 8, 8, CHANNELS))


def held(function, *args):
    """Returns the program of a gradient before and after the pass."""
    leaves, tree = jax.tree.flatten(args)
    closed = jax.make_jaxpr(
        lambda *leaves: jax.tree.leaves(function(*jax.tree.unflatten(tree, leaves)))
    )(*leaves)
    program = differentiate(closed, (True,) * len(leaves))
    return program, hold_scales(program)


HOMOGENEOUS = {
    "relu": loss,
    "max": functools.partial(loss, act=lambda x: jnp.maximum(x, 0)),
    "leaky": functools.partial(loss, act=leaky),
    "pooled": functools.partial(loss, middle=max_pool),
    "instances": functools.partial(loss, axes=(1, 2)),
    "large epsilon": functools.partial(loss, epsilon=3.0),
    "decay": with_decay,
    "statistics": with_statistics,
    "separate": separate,
    "two scales": with_two_scales,
    "subtracted": with_subtracted_numbers,
    "silu": functools.partial(loss, act=jax.nn.silu),
    "gelu": functools.partial(loss, act=jax.nn.gelu),
    "hard swish": functools.partial(loss, act=jax.nn.hard_swish),
}


@pytest.mark.parametrize("name", HOMOGENEOUS)
def test_the_gradient_is_the_same(name):
    """In float64, to rounding: whatever the program does with the values."""
    with jax.enable_x64(True):
        args = arguments(jnp.float64, batch=2)
        function = HOMOGENEOUS[name]
        program, changed = held(function, *args)
        assert changed is not program
        plain = jax.jit(jax.grad(function))(*args)
        wrapped = dafjax.remat_compress(function, policy=SaveEverything())
        found = jax.jit(jax.grad(wrapped))(*args)
        largest = max(float(jnp.abs(x).max()) for x in jax.tree.leaves(plain))
        for exact, got in zip(*map(jax.tree.leaves, (plain, found)), strict=True):
            assert float(jnp.abs(exact - got).max()) < 1e-11 * largest


class SaveEverything(dafjax.policies.AbstractPolicy):
    """It saves all values as they are."""

    is_binding = True

    def __call__(self, residual):
        return dafjax.policies.Save()


@pytest.mark.parametrize(
    "function",
    [
        functools.partial(loss, act=jax.nn.relu6),
        functools.partial(loss, act=jax.nn.sigmoid),
        functools.partial(loss, act=spike),
        functools.partial(loss, middle=lambda params, x: x @ params["weights"]),
        functools.partial(loss, stop=jax.lax.stop_gradient),
        functools.partial(loss, axes=3),
        functools.partial(loss, middle=lambda params, x: depthwise(params, x) + x**2),
        functools.partial(loss, act=turned),
        functools.partial(loss, act=same),
        stacked,
        unstacked,
        rounded,
    ],
)
def test_other_programs_stay_as_they_are(function):
    program, changed = held(function, *arguments())
    assert changed is program


def noise(function, args, *, seeds=8, **options):
    """Returns the noise of the gradient of the first norm's scale, over its norm."""

    @jax.jit
    def of_scale(seed, *args):
        wrapped = dafjax.remat_compress(
            function, policy=CompressExpensive(), seed=seed, **options
        )
        return jax.grad(wrapped)(*args)["norms"][0]["scale"]

    exact = jax.grad(function)(*args)["norms"][0]["scale"]
    found = [of_scale(jnp.uint32(seed), *args) for seed in range(seeds)]
    errors = [relative_error(x, exact) for x in found]
    return np.mean(errors), relative_error(np.mean(found, 0), exact)


@pytest.mark.parametrize("act", ["relu", "silu"])
def test_a_scale_that_is_divided_out_has_little_noise(act):
    args = arguments()
    function = functools.partial(loss, act=getattr(jax.nn, act))
    each, of_mean = noise(function, args)
    assert each < 1.2
    assert of_mean < 0.6
    without, _ = noise(function, args, without_passes=["held_scales"])
    assert without > 2 * each


def test_depthwise_results_that_a_norm_divides_get_twice_the_bits():
    """Not those of a full convolution, nor where a norm puts channels together."""

    def bits(**options):
        wrapped = dafjax.remat_compress(
            functools.partial(loss, **options), policy=CompressExpensive()
        )
        saved = dafjax.saved_residuals(wrapped, *arguments())
        return [
            kept.codec.bits
            for kept in saved.kept
            if kept.primitive == "conv_general_dilated"
        ]

    assert bits() == [4]
    assert bits(axes=(1, 2, 3)) == [2]

    def full(params, x):
        kernel = jnp.tile(params["kernel"], (1, 1, CHANNELS, 1))
        options = DEPTHWISE | {"feature_group_count": 1}
        return jax.lax.conv_general_dilated(x, kernel, **options)

    assert bits(middle=full) == [2]
