"""`dafjax.reductions`: values, dtypes, transformations, errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from dafjax import reductions
from dafjax._native import _cuda, _reduce
from tests.helpers import assert_same_bits


every_strategy = pytest.mark.parametrize(
    "strategy", ["parallel", "atomic", "hybrid", "auto"]
)


def _rows(shape, dtype, seed=0):
    return jax.random.normal(jax.random.key(seed), shape).astype(dtype)


@every_strategy
@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        ("float32", (1,)),
        ("bfloat16", (5, 63)),
        ("float16", (5, 63)),
        ("float32", (2, 3, 9000)),
        ("bfloat16", (600_001,)),
    ],
)
def test_values_are_those_of_numpy(strategy, dtype, shape):
    x = _rows(shape, dtype)
    wide = np.asarray(x, np.float64)
    minimum, maximum = reductions.minmax(x, strategy=strategy)
    assert minimum.dtype == maximum.dtype == x.dtype
    np.testing.assert_array_equal(np.asarray(minimum, np.float64), wide.min(axis=-1))
    np.testing.assert_array_equal(np.asarray(maximum, np.float64), wide.max(axis=-1))
    total = reductions.sum_of_squares(x, strategy=strategy)
    assert total.dtype == jnp.float32
    np.testing.assert_allclose(total, np.sum(wide**2, axis=-1), rtol=2e-6)


@every_strategy
def test_what_is_not_finite(strategy):
    rows = [[1.0, np.nan, 2.0], [np.inf, 1.0, -np.inf], [1e-45, -0.0, -1e-45]]
    x = jnp.asarray(rows, jnp.float32)
    minimum, maximum = reductions.minmax(x, strategy=strategy)
    assert_same_bits(minimum, np.asarray([np.nan, -np.inf, 0.0], np.float32))
    assert_same_bits(maximum, np.asarray([np.nan, np.inf, 0.0], np.float32))
    total = reductions.sum_of_squares(x, strategy=strategy)
    assert np.isnan(total[0])
    assert list(total[1:]) == [np.inf, 0.0]


@every_strategy
def test_empty_rows(strategy):
    minimum, maximum = reductions.minmax(jnp.zeros((2, 0)), strategy=strategy)
    assert list(minimum) == [np.inf, np.inf]
    assert list(maximum) == [-np.inf, -np.inf]
    assert list(reductions.sum_of_squares(jnp.zeros((2, 0)), strategy=strategy)) == [
        0.0,
        0.0,
    ]


@pytest.mark.parametrize("shape", [(7,), (3, 700), (2, 0)])
def test_the_reference_gives_the_same(shape):
    x = _rows(shape, "float32")
    if x.size > 700:
        x = x.at[1, 5].set(jnp.nan).at[2].set(-0.0)
    for actual, wanted in zip(
        _reduce.minmax_reference(x, strategy="auto"),
        _reduce.minmax_p.bind(x, strategy="auto"),
        strict=True,
    ):
        if actual.dtype == jnp.float32:
            assert_same_bits(actual, wanted)
    total, _ = _reduce._sum_of_squares_reference(x, strategy="auto")
    np.testing.assert_allclose(total, reductions.sum_of_squares(x), rtol=1e-6)


def test_a_mapped_axis_becomes_one_of_the_batch():
    x = _rows((4, 3, 50), "float32")
    mapped = jax.vmap(reductions.minmax, in_axes=1)(x)
    for actual, wanted in zip(
        mapped, reductions.minmax(jnp.moveaxis(x, 1, 0)), strict=True
    ):
        assert_same_bits(actual, wanted)


def test_rows_are_shared_out_among_devices():
    mesh = jax.make_mesh((2,), ("rows",))
    x = jax.device_put(
        _rows((4, 700), "float32"), NamedSharding(mesh, PartitionSpec("rows", None))
    )
    compiled = jax.jit(reductions.minmax).lower(x).compile()
    assert "all-gather" not in compiled.as_text()
    for actual, wanted in zip(
        compiled(x), reductions.minmax(np.asarray(x)), strict=True
    ):
        assert_same_bits(actual, wanted)


def test_programs_for_cuda_have_custom_calls_if_the_library_is_built(monkeypatch):
    monkeypatch.setattr(_cuda, "register", lambda: True)
    x = jax.ShapeDtypeStruct((3, 703), jnp.float32)

    def both(x):
        return reductions.minmax(x), reductions.sum_of_squares(x)

    text = jax.jit(both).trace(x).lower(lowering_platforms=("cuda",)).as_text()
    assert "custom_call @dafjax_minmax(" in text
    assert "custom_call @dafjax_sum_of_squares(" in text


@pytest.mark.parametrize("function", [reductions.minmax, reductions.sum_of_squares])
class TestErrors:
    def test_a_strategy_that_is_not_there(self, function):
        with pytest.raises(ValueError, match=r"`strategy` must be one of .*'fast'"):
            function(jnp.ones(3), strategy="fast")

    def test_another_dtype(self, function):
        with pytest.raises(TypeError, match=r"`x` must be float32 or .*, not int32"):
            function(jnp.ones(3, jnp.int32))

    def test_a_scalar(self, function):
        with pytest.raises(ValueError, match="must have rows, but it is a scalar"):
            function(jnp.float32(3))

    def test_a_derivative(self, function):
        with pytest.raises(NotImplementedError, match="stop_gradient"):
            jax.grad(lambda x: jnp.sum(jnp.stack(jax.tree.leaves(function(x)))))(
                jnp.ones(3)
            )
