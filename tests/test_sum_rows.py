"""Sums over leading axes, which GPUs take in two steps."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dafjax
from dafjax._native import (
    _sums,
    sum_groups,
    sum_rows_p,
    sum_together,
    summing_rows,
    sums_of_groups,
)


def like(*shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, dtype)


@pytest.mark.parametrize(
    ("x", "num_axes", "groups"),
    [
        (like(256, 4, 4, 512), 3, (16, 1, 1)),
        # So few columns that a group is as small as it may be.
        (like(4096, 64), 1, (32,)),
        # Of a transformer's batch there are that many sequences.
        (like(8, 512, 768), 2, (8, 1)),
        (like(6, 512, 2048), 2, (3, 1)),
        # Of images there are fewer than groups: their rows are divided, too.
        (like(128, 32, 32, 64), 3, (128, 8, 1)),
        (like(100, 32, 32, 64), 3, (100, 8, 1)),
        (like(256, 16, 16, 128), 3, (256, 2, 1)),
        (like(2, 3, 32, 32, 8, 64), 5, (2, 3, 32, 2, 1)),
        (like(131072, 64), 1, (1024,)),
        # As many as XLA makes, where that is more.
        (like(262144, 4096), 1, (512,)),
        # What is small, and what cannot be divided.
        (like(255, 64), 1, (1,)),
        (like(4093, 64), 1, (1,)),
        (like(131071, 64), 1, (1,)),
        # A third of the groups that there should be; XLA pads rows for all of them.
        (like(9 * 1511, 64), 1, (1,)),
        (like(1, 4096, 64), 2, (1, 1)),
        (like(4096), 1, (1,)),
        (like(4096, 64, dtype="bfloat16"), 1, (1,)),
        (like(0, 64), 1, (1,)),
        (like(4096, 0), 1, (1,)),
    ],
)
def test_rows_are_divided_among_blocks_of_threads(x, num_axes, groups):
    assert _sums.num_groups(x, num_axes) == groups


@pytest.mark.parametrize(
    "shape", [(64, 5, 7, 3), (2048, 40), (3, 4), (6, 4, 1024, 5), (3, 8192, 7)]
)
def test_two_steps_make_the_sum(shape):
    x = jax.random.normal(jax.random.key(0), shape)
    axes = tuple(range(len(shape) - 1))
    got = jax.jit(functools.partial(_sums._sum_in_two_steps, num_axes=len(axes)))(x)
    want = np.sum(np.asarray(x, np.float64), axis=axes)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("shape", [(64, 5, 7, 3), (2048, 40), (6, 4, 1024, 5)])
def test_groups_add_up_to_the_sum(shape):
    x = jax.random.normal(jax.random.key(0), shape)
    num_axes = len(shape) - 1
    groups = sum_groups(x, num_axes)
    num_groups = np.prod(_sums.num_groups(x, num_axes))
    assert groups.shape == (num_groups, shape[-1])
    rows = np.asarray(x, np.float64)
    want = rows.reshape(num_groups, -1, shape[-1]).sum(1)
    np.testing.assert_allclose(groups, want, rtol=1e-5, atol=1e-4)
    doubled, total = sum_together([2 * groups, groups])
    np.testing.assert_allclose(total, want.sum(0), rtol=1e-5, atol=1e-4)
    np.testing.assert_array_equal(doubled, 2 * total)


def test_where_devices_share_rows_the_sum_is_that_of_one_group():
    x = jax.random.normal(jax.random.key(0), (4096, 64))
    groups = _sums._sum_as_one_group(x, num_axes=1)
    assert groups.shape == sum_groups(x, 1).shape
    np.testing.assert_allclose(groups[0], x.sum(0), rtol=1e-5)
    assert not np.any(groups[1:])


def sum_rows(x):
    return sum_rows_p.bind(x, num_axes=2)


def sum_in_groups(x):
    (total,) = sum_together([sum_groups(x, 2)])
    return total


_WEIGHTS = np.arange(4.0, dtype=np.float32)


@pytest.mark.parametrize("sums", [sum_rows, sum_in_groups])
@pytest.mark.parametrize(
    "transform",
    [
        lambda f: jax.grad(lambda x: jnp.vdot(f(x) ** 2, _WEIGHTS)),
        lambda f: jax.hessian(lambda x: jnp.vdot(f(x) ** 2, _WEIGHTS)),
        lambda f: lambda x: jax.jvp(f, (x,), (2 * x,)),
        lambda f: lambda x: jax.vmap(f, in_axes=2)(jnp.stack([x, -x], axis=2)),
    ],
    ids=["grad", "hessian", "jvp", "vmap"],
)
def test_derivatives_and_batches_are_those_of_a_sum(transform, sums):
    x = jax.random.normal(jax.random.key(0), (64, 5, 4))
    got = transform(sums)(x)
    want = transform(functools.partial(jnp.sum, axis=(0, 1)))(x)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4), got, want)


@pytest.mark.parametrize(
    ("axes", "dtype", "changed"),
    [
        ((0,), "float32", True),
        ((0, 1), "float32", True),
        ((1,), "float32", False),
        ((0, 2), "float32", False),
        ((0, 1, 2), "float32", False),
        ((0,), "int32", False),
    ],
)
def test_sums_over_leading_axes_are_sums_of_rows(axes, dtype, changed):
    x = jnp.ones((4, 3, 2), dtype)
    (eqn,) = jax.make_jaxpr(lambda x: jax.lax.reduce_sum(x, axes))(x).eqns
    assert (summing_rows(eqn, [x]).primitive is sum_rows_p) == changed
    # So few rows are one group.
    assert sums_of_groups(eqn, [x]) is None


@pytest.mark.parametrize(("axes", "are_grouped"), [((0,), True), ((1,), False)])
def test_sums_of_many_rows_are_sums_of_groups(axes, are_grouped):
    x = jnp.ones((4096, 64))
    (eqn,) = jax.make_jaxpr(lambda x: jax.lax.reduce_sum(x, axes))(x).eqns
    groups = sums_of_groups(eqn, [x])
    assert (groups is not None) == are_grouped
    if groups is not None:
        np.testing.assert_array_equal(groups.sum(0), np.full(64, 4096))


def test_gradients_are_sums_of_rows():
    keys = jax.random.split(jax.random.key(0))
    weight = jax.random.normal(keys[0], (64, 64)) / 8

    def loss(bias, x):
        for _ in range(3):
            x = jnp.sin(x @ weight + bias)
        return jnp.sum(x)

    gradient = jax.grad(dafjax.remat_compress(loss, bits=8))
    args = jnp.ones(64), jax.random.normal(keys[1], (512, 64))
    assert "dafjax_sum_rows" in str(jax.make_jaxpr(gradient)(*args))
    want = jax.grad(loss)(*args)
    np.testing.assert_allclose(gradient(*args), want, atol=0.01 * jnp.abs(want).max())
