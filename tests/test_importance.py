"""Importance ranks residuals by the variance that their noise adds to the gradient."""

import functools
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dafjax
from benchmarks import importance
from benchmarks.importance import Gradient
from benchmarks.transformers import Shape
from dafjax._sampling import _distance, num_rows, sample_elements
from dafjax._sensitivity.importance import Sensitivities
from dafjax._sensitivity.moments import (
    Moments,
    Signals,
    moments_of_rows,
    sample_rows,
)
from dafjax._trace.equation import Equation
from dafjax.codecs import Affine
from tests.helpers import slow, temp_nbytes


pytestmark = pytest.mark.usefixtures("standard_promotion")


def sample_moments(x: jax.Array) -> Moments:
    """Returns the moments of a value, estimated from a sample."""
    return Moments(*(xs[0] for xs in moments_of_rows([[sample_rows(x)]])))


@pytest.mark.parametrize("model", [slow("resnet18"), "gpt2"])
def test_ranks_are_those_of_the_measured_variance(model, tmp_path):
    out = tmp_path / "importance.json"
    small = ["--resnet-width", "8", "--resnet-batch", "16", "--gpt2-width", "64"]
    small += ["--gpt2-layers", "2", "--seeds", "2"]
    importance.main(["--models", model, *small, "--out", str(out)])
    record = json.loads(out.read_text())["models"][model]
    assert len(record["sites"]) >= 10
    assert record["rank_correlation"] > 0.8


def test_of_a_product_with_independent_factors_the_variance_is_exact():
    """ActNN's case: the gradient of the weights is linear in the residual."""

    def loss(w, x, target):
        return jnp.sum(jnp.sin(x @ w["in"]) @ w["out"] * target)

    keys = jax.random.split(jax.random.key(0), 4)
    w = {
        "in": jax.random.normal(keys[0], (128, 256)) / 11,
        "out": jax.random.normal(keys[1], (256, 64)),
    }
    x = jax.random.normal(keys[2], (512, 128))
    target = jax.random.normal(keys[3], (512, 64))
    gradient = Gradient.of(loss, w, x, target)
    (site,) = gradient.sites
    estimated = gradient.estimated_variances()[site.value]
    measured = gradient.measured_variance(site, seeds=4)
    # The estimate assumes uniform values; near the middle of a group noise is larger.
    assert 0.3 * measured < estimated < 1.2 * measured


def test_the_gradient_of_a_scale_counts():
    """As in a norm, it is a sum over rows; nothing else reads the codes."""

    def loss(w, x, target):
        return jnp.sum((x @ w["in"]) * w["scale"] * target)

    keys = jax.random.split(jax.random.key(0), 4)
    w = {
        "in": jax.random.normal(keys[0], (128, 256)) / 11,
        "scale": 1e-2 * jax.random.normal(keys[1], (256,)),
    }
    x = jax.random.normal(keys[2], (512, 128))
    target = jax.random.normal(keys[3], (512, 256))
    gradient = Gradient.of(loss, w, x, target)
    (site,) = gradient.sites
    estimated = gradient.estimated_variances()[site.value]
    measured = gradient.measured_variance(site, seeds=4)
    assert 0.6 * measured < estimated < 1.2 * measured


def test_a_product_in_between_adds_up_signal_that_agrees_but_not_noise():
    """The second product sums positive values, as with keys that have a mean."""

    def loss(w, x, between, target):
        return jnp.sum(jnp.square(x @ w @ between + 3) * target)

    keys = jax.random.split(jax.random.key(0), 4)
    w = jax.random.normal(keys[0], (128, 256)) / 60
    between = jax.random.uniform(keys[1], (256, 256)) / 8
    x = jax.random.normal(keys[2], (512, 128))
    target = jax.random.uniform(keys[3], (512, 256))
    gradient = Gradient.of(loss, w, x, between, target)
    (site,) = gradient.sites
    estimated = gradient.estimated_variances()[site.value]
    measured = gradient.measured_variance(site, seeds=4)
    assert 0.3 * measured < estimated < 3 * measured


@pytest.mark.parametrize(
    "options",
    [
        {"window_strides": (1, 1), "padding": "SAME"},
        {"window_strides": (2, 3), "padding": ((1, 0), (5, 7))},
        {"window_strides": (1, 1), "padding": "VALID", "rhs_dilation": (2, 1)},
        {
            "window_strides": (1, 2),
            "padding": ((2, 1), (-1, 3)),
            "lhs_dilation": (3, 2),
        },
        {"window_strides": (1, 1), "padding": "SAME", "feature_group_count": 2},
        {"window_strides": (1, 1), "padding": "SAME", "batch_group_count": 2},
    ],
)
def test_a_convolution_multiplies_no_padding(options):
    groups = options.get("feature_group_count", 1)

    def convolve(images, kernel):
        return jax.lax.conv_general_dilated(
            images, kernel, dimension_numbers=("NHWC", "HWIO", "NHWC"), **options
        )

    images, kernel = jnp.ones((4, 9, 7, 6)), jnp.ones((3, 5, 6 // groups, 8))
    program = jax.make_jaxpr(convolve)(images, kernel).jaxpr
    eqn = Equation(program, inputs=(0, 1), outputs=(2,))
    assert eqn.num_products == int(jnp.sum(convolve(images, kernel)))


@pytest.mark.parametrize("shape", [(256, 1024), (1 << 18,), (64, 1, 4096)])
@pytest.mark.parametrize("seed", range(3))
def test_moments_of_a_sample_are_those_of_the_whole(seed, shape):
    x = 3 + 2 * np.random.default_rng(seed).standard_normal(shape, np.float32)
    moments = sample_moments(jnp.asarray(x))
    np.testing.assert_allclose(moments.mean_square, np.mean(x**2), rtol=0.1)
    np.testing.assert_allclose(moments.variance, np.var(x), rtol=0.1)


@pytest.mark.parametrize("dimension", range(4))
def test_samples_spread_over_each_dimension(dimension):
    # One in 8 is large: a stride of a power of two would sample all of these, or none.
    x = np.zeros((64, 32, 32, 64), np.float32)
    np.moveaxis(x, dimension, 0)[::8] = 8.0
    assert float(sample_moments(jnp.asarray(x)).mean_square) == pytest.approx(
        8, rel=0.5
    )


@pytest.mark.parametrize("token", [0, 1, 37, -1])
@pytest.mark.parametrize("shape", [(32, 64, 128), (32, 64, 4, 32), (32, 64, 4, 64)])
def test_samples_see_the_one_token_that_has_a_cotangent(token, shape):
    """As in classification. The third shape has an axis for heads."""
    x = np.zeros(shape, np.float32)
    x[:, token] = 8.0
    assert float(sample_moments(jnp.asarray(x)).mean_square) == pytest.approx(
        1, rel=0.1
    )


@pytest.mark.parametrize(
    ("shape", "dimension"),
    [
        ((1, 8192, 768), 1),
        ((8, 2048, 768), 1),
        ((256, 197, 192), 1),
        ((8, 2048, 12, 64), 1),
        ((32, 12, 197, 197), 2),
    ],
)
def test_samples_see_one_token_of_many(shape, dimension):
    """The number of samples does not divide into the rows or examples of these."""
    x = np.zeros(shape, np.float32)
    of_token = np.moveaxis(x, dimension, 0)
    for token in (0, 1, 100, -1):
        of_token[token] = np.sqrt(shape[dimension])
        assert 0.4 < float(sample_moments(jnp.array(x)).mean_square) < 2.5
        of_token[token] = 0


@pytest.mark.parametrize("shape", [(64, 32, 32, 64), (256, 4, 4, 512), (4, 256, 768)])
def test_samples_divide_into_rows(shape):
    """A remainder would cost kernels and memory on XLA:GPU."""
    count = sample_elements(jnp.zeros(shape), 1 << 15, 1 << 10).size
    assert count % num_rows(count, 1 << 10) == 0


@pytest.mark.parametrize(
    ("shape", "parts"),
    [
        ((8, 1024, 128256), 1),
        ((4, 2048, 256000), 1),
        ((1, 1024, 8192), 8),
        ((1, 1024, 768), 64),
        ((1 << 24,), 1),
        ((131072, 64), 1),
        ((65536, 512), 1),
        ((64, 28, 28, 96), 1),
        ((1, 3, 224, 224, 64), 1),
    ],
)
def test_samples_of_large_arrays_are_spread_along_each_dimension(shape, parts):
    size = math.prod(shape)
    distance = _distance(shape, (1 << 15) // parts, 1 << 10)
    places = np.arange(distance // 2, size, distance)
    assert 0.7 * (1 << 15) < parts * len(places) <= 1 << 15
    for dimension, extent in zip(np.unravel_index(places, shape), shape, strict=True):
        few = min(8, extent)
        for numbers, how_many in (
            (dimension, extent),
            (dimension * few // extent, few),
            (dimension % few, few),
        ):
            seen = np.bincount(numbers, minlength=how_many)
            mean = len(places) / how_many
            assert seen.max() < 2 * max(mean, 4)
            assert seen.min() > 0.5 * mean or mean < 8


@pytest.mark.parametrize(
    "shape",
    [(8, 128, 128, 32), (32, 64, 64, 32)],
)
@pytest.mark.parametrize("apart", [2, 4, 8])
def test_samples_see_each_lattice_of_two_dimensions(shape, apart):
    x = np.zeros(shape, np.float32)
    x[:, ::apart, ::apart] = apart
    moments = sample_moments(jnp.asarray(x))
    assert float(moments.mean_square) == pytest.approx(1, rel=0.3)


def test_samples_see_the_lattice_behind_strided_convolutions():
    x = np.zeros((32, 32, 32, 8), np.float32)
    x[:, ::8, ::8] = 8.0
    assert 0.4 < float(sample_moments(jnp.asarray(x)).mean_square) < 2.5


def test_of_small_arrays_all_elements_count():
    assert float(sample_moments(jnp.arange(3.0)).mean_square) == pytest.approx(5 / 3)


@pytest.mark.parametrize("shape", [(0,), (0, 5), (5, 0, 3)])
def test_of_arrays_without_elements_there_are_no_samples(shape):
    assert sample_elements(jnp.zeros(shape), 8, 4).size == 0


def test_large_values_do_not_cancel_in_their_variance(key):
    x = 1e4 + jax.random.normal(key, (64, 4096))
    assert float(sample_moments(x).variance) == pytest.approx(1, rel=0.05)


@pytest.mark.parametrize("outlier", [1e2, 1e4])
@pytest.mark.parametrize("shape", [(1 << 15,), (1, 256, 128), (4, 1001, 9)])
def test_a_large_value_in_front_of_all_others_counts_as_it_is(shape, outlier, key):
    """As the first token of a language model has them."""
    x = jax.random.normal(key, shape)
    sample = sample_elements(x, 1 << 15, 1 << 10)
    x = jnp.where(x == sample.ravel()[0], outlier, x)
    moments = sample_moments(x)
    sample = np.asarray(sample_elements(x, 1 << 15, 1 << 10), np.float64)
    assert float(moments.mean_square) == pytest.approx(np.mean(sample**2), rel=0.02)
    assert float(moments.variance) == pytest.approx(np.var(sample), rel=0.02)


def asked(loss, w, *rest):
    """Returns the shapes of the values that are sampled."""
    plan = Gradient.of(loss, w, *rest).plan
    sites = [kept.value for kept in plan.kept if isinstance(kept.codec, Affine)]
    assert sites
    measured = Sensitivities(plan, sites).measured
    return [plan.program.avals[value].shape for value in measured]


def test_moved_scaled_and_padded_values_are_not_sampled_again():
    """Their moments follow from their operand; sampling would write them once more."""

    def loss(w, x, *, moves):
        y = jnp.sin(x @ w["in"])
        if moves:
            y = -2.0 * y.reshape(8, 64, 128).transpose(1, 0, 2).reshape(512, 128)
            y = jax.lax.pad(y / 4.0, 0.0, [(0, 3, 0), (5, 0, 0)])
        return jnp.sum((y.T @ y) ** 2)

    keys = jax.random.split(jax.random.key(0), 2)
    w = {"in": jax.random.normal(keys[0], (128, 128))}
    x = jax.random.normal(keys[1], (512, 128))
    plain = asked(functools.partial(loss, moves=False), w, x)
    moved = asked(functools.partial(loss, moves=True), w, x)
    # The transpose of padding, a slice, is sampled.
    assert len(moved) <= len(plain) + 1
    assert (515, 133) not in moved


def test_nothing_is_sampled_before_the_first_noise():
    """A loss of logits reads no residual, so its values need no samples."""

    def loss(w, x, labels):
        logits = jnp.sin(x @ w["in"]) @ w["out"]
        chosen = jnp.take_along_axis(logits, labels[:, None], axis=1)
        return jnp.mean(jnp.abs(jnp.abs(chosen) + 1))

    keys = jax.random.split(jax.random.key(0), 3)
    w = {
        "in": jax.random.normal(keys[0], (128, 128)),
        "out": jax.random.normal(keys[1], (128, 500)),
    }
    x = jax.random.normal(keys[2], (512, 128))
    shapes = asked(loss, w, x, jnp.arange(512) % 500)
    # Only the cotangent that the products read.
    assert shapes.count((512, 500)) == 1
    assert not any(math.prod(shape) in (512, 1) for shape in shapes)


@pytest.mark.parametrize("number", [-3.0, 0.25])
def test_moments_of_moved_scaled_and_padded_values_are_exact(number):
    """They are computed from the moments of the operand."""

    def loss(w, x):
        y = jax.lax.pad(jnp.tanh(x @ w) * number, 0.0, [(1, 2, 1), (0, 5, 0)])
        return jnp.sum((y.T @ y) ** 2)

    keys = jax.random.split(jax.random.key(0), 2)
    w, x = (jax.random.normal(key, (32, 32)) for key in keys)
    gradient = Gradient.of(loss, w, 1 + x)
    values = gradient.values(gradient.kept)

    signals = Signals(gradient.plan)
    made = {v for eqn in gradient.plan.program.backward for v in eqn.outputs}
    found = {
        value: (signals.mean_square(value), signals.variance(value))
        for value in made | gradient.plan.recomputed.keys()
    }
    measured = [values[value] for value in signals.measured]
    numbers = signals.compute(
        Moments(
            jnp.stack([jnp.mean(x**2) for x in measured]),
            jnp.stack([jnp.var(x) for x in measured]),
        )
    )
    assert len(measured) < len(found)
    checked = set()
    for value, (mean_square, variance) in found.items():
        x = values[value]
        expected = float(jnp.mean(x**2))
        assert float(numbers[mean_square]) == pytest.approx(expected, rel=1e-4)
        assert float(numbers[variance]) == pytest.approx(
            float(jnp.var(x)), rel=1e-3, abs=1e-5 * expected
        )
        checked.add(x.shape)
    assert (66, 37) in checked


@pytest.mark.slow
def test_measured_bits_take_no_more_memory_than_fixed_ones():
    """Else sampled values would stay live, and be written once more."""

    def temp(method):
        small = Shape(layers=1, width=128, heads=4, vocabulary=2000, length=128)
        workload = small.workload(method, batch=8, scan=False)
        step = jax.grad(workload.loss)
        compiled = dafjax.jit(step) if method != "compress" else jax.jit(step)
        arguments = jax.eval_shape(workload.draw)
        return temp_nbytes(compiled.lower(*arguments))

    assert temp("compress_measured") < 1.05 * temp("compress")


def test_products_of_groups_of_rows_count(key):
    """The third operand, the number of rows in each group, is no factor."""

    def loss(w, x, sizes):
        y = jnp.sin(jax.lax.ragged_dot(x, w["in"], sizes))
        return jnp.sum(jax.lax.ragged_dot(y, w["out"], sizes) ** 2)

    keys = jax.random.split(key, 3)
    w = {
        name: jax.random.normal(k, (4, 128, 128)) / 11
        for name, k in zip(("in", "out"), keys[:2], strict=True)
    }
    x = jax.random.normal(keys[2], (512, 128))
    gradient = Gradient.of(loss, w, x, jnp.full(4, 128, jnp.int32))
    assert gradient.sites
    assert min(gradient.estimated_variances().values()) > 0
