"""Quantization groups do not mix what a later norm keeps apart."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import dafjax
from dafjax._plan import extents, planner
from dafjax._plan.extents import Extent, find_extents
from dafjax._plan.normalized import mixes
from dafjax._trace.tracing import trace
from dafjax.codecs import Affine
from tests.helpers import prepared, relative_error


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


def layer_norm(h):
    centered = h - jnp.mean(h, -1, keepdims=True)
    return centered * lax.rsqrt(jnp.mean(centered**2, -1, keepdims=True) + 1e-6)


def fast_layer_norm(h):
    mean, square = jnp.mean(h, -1, keepdims=True), jnp.mean(h * h, -1, keepdims=True)
    return (h - mean) * lax.rsqrt(jnp.maximum(square - mean**2, 0) + 1e-6)


def rms_norm(h):
    return h * lax.rsqrt(jnp.mean(h * h, -1, keepdims=True) + 1e-6)


def l2_norm(h):
    return h / (jnp.linalg.norm(h, axis=-1, keepdims=True) + 1e-6)


def einsum_norm(h):
    return h * lax.rsqrt(jnp.einsum("...d,...d->...", h, h)[..., None] + 1e-6)


def head_norm(h):
    return rms_norm(h.reshape(*h.shape[:-1], 4, -1)).reshape(h.shape)


def fused_head_norm(h):
    """Of a fused product each half is normalized by heads."""
    first, second = jnp.split(h, 2, -1)
    return jnp.concatenate([head_norm(first), head_norm(second)], -1)


def norm_of_groups(h):
    """Of 48 channels a group has 12. `jnp.var` subtracts a mean of its own."""
    grouped = h.reshape(*h.shape[:-1], 4, -1)
    centered = grouped - jnp.mean(grouped, -1, keepdims=True)
    variance = jnp.var(grouped, -1, keepdims=True)
    return (centered * lax.rsqrt(variance + 1e-6)).reshape(h.shape)


def transposed_norm(h):
    return jnp.swapaxes(layer_norm(jnp.swapaxes(jnp.swapaxes(h, 0, 1), 0, 1)), 0, 0)


NORMS = {
    f.__name__: f
    for f in (
        *(layer_norm, fast_layer_norm, rms_norm, l2_norm, einsum_norm, head_norm),
        *(fused_head_norm, norm_of_groups, transposed_norm),
    )
}


def extents_of(function, *shape):
    """Returns the extent of the argument of a function."""
    aval = jax.ShapeDtypeStruct(shape, jnp.float32)
    closed, _, _ = trace(lambda x: jnp.sum(function(x * 2) ** 3), [aval])
    program = prepared(closed, (True,))
    return find_extents(program).get(0)


@pytest.mark.parametrize("norm", NORMS)
def test_the_extent_of_a_norm_is_found(norm):
    of_heads = {"head_norm": 16, "fused_head_norm": 16, "norm_of_groups": 16}
    width = of_heads.get(norm, 64)
    extent = extents_of(NORMS[norm], 8, 32, 128 if norm == "fused_head_norm" else 64)
    assert extent is not None
    assert extent.size == width if norm != "fused_head_norm" else 16


def test_group_and_batch_norms_have_their_extents():
    def group_norm(h):
        grouped = h.reshape(*h.shape[:-1], 4, -1)
        mean = jnp.mean(grouped, (1, 2, 4), keepdims=True)
        square = jnp.mean(grouped**2, (1, 2, 4), keepdims=True)
        normed = (grouped - mean) * lax.rsqrt(square - mean**2 + 1e-6)
        return normed.reshape(h.shape)

    def batch_norm(h):
        return (h - jnp.mean(h, (0, 1, 2))) / jnp.sqrt(jnp.var(h, (0, 1, 2)) + 1e-6)

    of_groups = extents_of(group_norm, 8, 4, 4, 64)
    assert of_groups.size == 4 * 4 * 16
    of_channels = extents_of(batch_norm, 8, 4, 4, 64)
    assert of_channels.size == 8 * 4 * 4
    assert of_channels.is_centered


def test_what_a_norm_scales_has_the_extent_of_its_statistic():
    """The statistic is of another value: of `y`, for `x`."""

    def scaled(x):
        y = lax.stop_gradient(jnp.sin(x))
        return x * lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + 1e-6)

    assert extents_of(scaled, 8, 32, 64).size == 64


@pytest.mark.parametrize(
    "function",
    [jax.nn.softmax, jnp.tanh, lambda h: h / 3, lambda h: h / jnp.max(jnp.abs(h))],
    ids=["softmax", "tanh", "a number", "all"],
)
def test_what_keeps_nothing_apart_has_no_extent(function):
    extent = extents_of(function, 8, 32, 64)
    assert extent is None or extent.size == 8 * 32 * 64


@pytest.mark.parametrize(
    ("shape", "reduced", "blocks", "expected"),
    [
        ((1024, 64), (1,), "rows", True),
        ((1024, 256), (1,), "rows", False),
        ((1024, 160), (1,), "rows", True),
        ((8, 128, 64), (2,), "columns", True),
        # A column of a block is one channel of one example.
        ((8, 16, 16, 64), (0, 1, 2), "columns", False),
        ((8, 16, 16, 64), (1, 2), "columns", False),
        ((16, 4, 4, 512), (0, 1, 2), "rows", True),
    ],
)
def test_groups_that_mix(shape, reduced, blocks, expected):
    extent = Extent(tuple(((n, axis in reduced),) for axis, n in enumerate(shape)))
    assert mixes(extent, shape, Affine(blocks=blocks)) is expected


def scaled_loss(norm, scales):
    def loss(params, x):
        # The sum is stored, as large as the scales make it.
        h = norm((x @ params[0]) * scales + (x @ params[2]) * scales)
        return jnp.mean((jax.nn.relu(h) @ params[1]) ** 2)

    return loss


def example(width, rows=256):
    params = [normal(i, width, width) / width**0.5 for i in (1, 2, 6)]
    return params, normal(3, rows, width)


@pytest.mark.parametrize(
    ("norm", "per", "width"),
    [
        ("layer_norm", "row", 48),
        ("layer_norm", "channel", 160),
        ("rms_norm", "head", 48),
        ("rms_norm", "row", 160),
        ("norm_of_groups", "head", 160),
        ("norm_of_groups", "channel", 48),
    ],
)
def test_activations_of_different_scale_at_8_bits(norm, per, width):
    """By groups of consecutive elements errors are 10 to 10^6 times the gradient."""
    params, x = example(width)
    shape = {"row": (256, 1), "head": (256, 4), "channel": (1, width)}[per]
    scales = jnp.repeat(jnp.exp(2 * normal(5, *shape)), width // shape[1], 1)
    loss = scaled_loss(NORMS[norm], scales)
    got = jax.jit(jax.grad(dafjax.remat_compress(loss, bits=8)))(params, x)
    for g, e in zip(got, jax.jit(jax.grad(loss))(params, x), strict=True):
        assert relative_error(g, e) < 0.1


def test_without_normalized_copies_small_rows_drown(monkeypatch):
    params, x = example(48)
    loss = scaled_loss(layer_norm, jnp.exp(2 * normal(5, 256, 1)))
    monkeypatch.setattr(planner, "_find_forms", lambda *_: {})
    got = jax.jit(jax.grad(dafjax.remat_compress(loss, bits=8)))(params, x)
    assert relative_error(got[0], jax.jit(jax.grad(loss))(params, x)[0]) > 1


def test_heads_of_different_scale_in_attention_with_normalized_queries_and_keys():
    width, heads = 128, 4
    scale = jnp.repeat(jnp.array([0.1, 1.0, 3.0, 10.0]), width // heads)
    p = [normal(i, width, width) / width**0.5 for i in range(4)]
    p[0], p[1] = p[0] * scale, p[1] * scale

    def loss(p, x):
        split = lambda t: t.reshape(len(x), heads, -1)
        q, k, v = (split(x @ w) for w in p[:3])
        scores = jnp.einsum("qhd,khd->hqk", rms_norm(q), rms_norm(k))
        y = jnp.einsum("hqk,khd->qhd", jax.nn.softmax(scores / 8), v)
        return jnp.mean((y.reshape(len(x), -1) @ p[3]) ** 2)

    x = normal(9, 256, width)
    exact = jax.jit(jax.grad(loss))(p, x)
    for bits, most in ((8, 0.05), (2, 1.5)):
        got = jax.jit(jax.grad(dafjax.remat_compress(loss, bits=bits)))(p, x)
        for g, e in zip(got, exact, strict=True):
            assert relative_error(g, e) < most


def test_an_outlier_among_the_operands_of_tanh():
    """It is cut off where tanh is 1 anyway."""
    x, w = normal(3, 512, 64).at[3, 5].set(1e4), normal(4, 64, 64) * 0.1

    def loss(w, x):
        return jnp.mean(jnp.tanh(jax.nn.relu(x @ w) @ w) ** 2)

    wrapped = dafjax.remat_compress(loss, bits=8)
    value, got = jax.jit(jax.value_and_grad(wrapped))(w, x)
    exact_value, exact = jax.jit(jax.value_and_grad(loss))(w, x)
    assert value == exact_value
    assert relative_error(got, exact) < 0.05


@pytest.mark.parametrize(
    ("dtype", "largest"), [(jnp.float32, 1.0), (jnp.bfloat16, 6e4), (jnp.float16, 6e4)]
)
def test_what_is_scaled_back_stays_finite(dtype, largest):
    _, x = example(64)
    x = (x / jnp.max(jnp.abs(x)) * largest).astype(dtype)

    def loss(w, x):
        return jnp.mean(layer_norm((x @ w).astype(jnp.float32)) ** 3)

    w = jnp.eye(64, dtype=dtype)
    got = jax.jit(jax.grad(dafjax.remat_compress(loss)))(w, x)
    assert np.all(np.isfinite(np.float32(got)))


def readout_noise():
    """Returns the noise of the weights that read the output of a state space model."""
    scales = jnp.exp(1.5 * normal(3, 4, 64, 1))
    targets = normal(4, 4, 64, 16)

    def loss(w, x):
        states = jnp.tanh(x @ w["states"]).reshape(4, 64, 32, 8)
        read = (x @ w["read"]) * scales
        y = jnp.einsum("btds,bts->btd", states, read) + jnp.tanh(x)
        return jnp.mean((y @ w["out"]) * targets)

    shapes = {"states": (32, 256), "read": (32, 8), "out": (32, 16)}
    w = {name: normal(n, *shape) / 6 for n, (name, shape) in enumerate(shapes.items())}
    x = normal(7, 4, 64, 32)
    exact = jax.jit(jax.grad(loss))(w, x)["out"]

    @jax.jit
    def gradient(seed):
        return jax.grad(dafjax.remat_compress(loss, seed=seed))(w, x)["out"]

    return np.mean(
        [relative_error(gradient(jnp.uint32(seed)), exact) for seed in range(4)]
    )


def test_a_batched_product_scales_each_of_its_indices(monkeypatch):
    noise = readout_noise()
    monkeypatch.setattr(extents, "_of_batched_products", lambda program: ())
    assert noise < 0.6 * readout_noise()
