"""Values that are restored in parts of their rows: the same bits as whole."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dafjax
from dafjax._schedule import schedule
from dafjax._schedule.parts import restore_in_parts
from dafjax._trace.by_rows import evaluate_on_rows, rows_read
from dafjax._trace.equation import call_equation
from dafjax._trace.residuals import differentiate
from dafjax.codecs import Affine, Bitmask
from tests import networks
from tests.helpers import like


def equation_of(function, *arguments):
    """Returns the last equation of a traced function."""
    closed = jax.make_jaxpr(function)(*arguments)
    return differentiate(closed, [False] * len(arguments)).forward[-1]


@pytest.mark.parametrize(
    ("function", "rows"),
    [
        (lambda x, y: x * y, (True, True)),
        (lambda x, y: x + y[:1], (True, False)),
        (lambda x, y: jnp.where(x > 0, x, y), (True, True, True)),
        (lambda x, y: x > y, (True, True)),
        (lambda x, y: jnp.cumsum(x * y, axis=0), None),
        (lambda x, y: (x * y).T, None),
        (lambda x, y: jnp.sum(x * y, axis=1), None),
        (lambda x, y: x @ y.T, None),
    ],
)
def test_an_elementwise_equation_reads_rows(function, rows, key):
    x = jax.random.normal(key, (8, 4))
    assert rows_read(equation_of(function, x, x), 8) == rows


def test_an_equation_without_these_rows_reads_none_of_them(key):
    x = jax.random.normal(key, (8, 4))
    assert rows_read(equation_of(lambda x, y: x * y, x, x), 4) is None


def test_a_part_is_what_the_whole_has_there(key):
    x, y = jax.random.normal(key, (2, 8, 4))
    product = equation_of(lambda x, y: x * y, x, y)

    def larger(x, y):
        return jnp.where(x > y, x, jnp.zeros_like(x))

    call = call_equation(larger, [x.aval, y.aval], (0, 1), (2,), product)
    for eqn in (product, call):
        assert rows_read(eqn, 8) == (True, True)
        (whole,) = evaluate_on_rows(eqn, [x, y], 8, 8)
        (part,) = evaluate_on_rows(eqn, [x[2:5], y[2:5]], 8, 3)
        np.testing.assert_array_equal(part, whole[2:5])


@pytest.mark.parametrize(
    ("codec", "shape"),
    [
        (Affine(bits=2), (16, 32, 32)),
        (Affine(bits=3, blocks="columns"), (16, 64, 32)),
        (Bitmask(), (16, 1024)),
    ],
    ids=repr,
)
def test_rows_of_a_packed_are_the_packed_of_rows(codec, shape, key):
    x = jax.random.normal(key, shape)
    x = x > 0 if isinstance(codec, Bitmask) else x
    assert codec.packs_rows(like(x))
    assert codec.packs_rows(like(x[::4]))
    packed = jax.tree.map(lambda leaf: leaf[::4], codec.encode(x))
    got = codec.decode(packed, like(x[::4]))
    np.testing.assert_array_equal(got, codec.decode(codec.encode(x), like(x))[::4])


@pytest.mark.parametrize("codec", [Affine(), Bitmask()], ids=repr)
def test_rows_that_share_tiles_are_not_packed_by_themselves(codec):
    dtype = jnp.bool_ if isinstance(codec, Bitmask) else jnp.float32
    assert not codec.packs_rows(jax.ShapeDtypeStruct((64, 8), dtype))
    assert not codec.packs_rows(jax.ShapeDtypeStruct((4096,), dtype))


def gradient(loss, *arguments):
    return jax.jit(jax.grad(dafjax.remat_compress(loss)))(*arguments)


def counted_parts(monkeypatch):
    """Counts what is restored in parts."""
    counts = []

    def counting(*arguments):
        counts.append(arguments[-1])
        return restore_in_parts(*arguments)

    monkeypatch.setattr("dafjax._schedule.backward_pass.restore_in_parts", counting)
    return counts


def whole(monkeypatch):
    monkeypatch.setattr(schedule, "in_parts", lambda program, step, read: step.restored)


@pytest.mark.parametrize(("batch", "parts"), [(32, 8), (12, 6), (10, 5), (7, None)])
def test_gradients_are_the_same_bits_as_without_parts(batch, parts, key, monkeypatch):
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    params = networks.conv_params(key, 3, 32)
    x = jax.random.normal(key, (batch, 8, 8, 32))
    counts = counted_parts(monkeypatch)
    got = gradient(networks.conv_loss, params, x)
    assert set(counts) == ({parts} if parts else set())
    whole(monkeypatch)
    expected = gradient(networks.conv_loss, params, x)
    jax.tree.map(np.testing.assert_array_equal, got, expected)


def test_each_device_has_rows_of_every_part(key, monkeypatch):
    monkeypatch.setattr(jax, "device_count", lambda: 4)
    params = networks.conv_params(key, 3, 32)
    counts = counted_parts(monkeypatch)
    for batch, parts in ((32, {8}), (24, {6}), (8, {2}), (4, set())):
        counts.clear()
        x = jax.ShapeDtypeStruct((batch, 8, 8, 32), jnp.float32)
        jax.eval_shape(functools.partial(gradient, networks.conv_loss), params, x)
        assert set(counts) == parts
