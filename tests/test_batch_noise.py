"""`bits="auto"`: rounding adds a small share to the noise that a batch has anyway."""

import contextlib
import functools
import operator

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dafjax
from dafjax._contexts import (
    AS_PLANNED,
    BatchMeasurement,
    measuring_batches,
    putting_in_force,
)
from dafjax._native import make_ledger, pool_hash
from dafjax._sensitivity.importance import units_of_variance
from tests.helpers import gradient_nbytes


WIDTH, ROWS = 64, 128


def model(params, x):
    *hidden, last = params
    for w in hidden:
        x = jax.nn.relu(x @ w)
    return x @ last


def mean_loss(params, x):
    return jnp.mean((model(params, x) - 1) ** 2)


def sum_loss(params, x):
    return jnp.sum((model(params, x) - 1) ** 2)


def normalized_loss(params, x):
    """As batch normalization does, it computes an example from others."""
    for w in params:
        x = x @ w
        x = jax.nn.relu((x - x.mean(0)) / (x.std(0) + 1e-3))
    return jnp.mean((x[:, 0] - 1) ** 2)


@pytest.fixture(scope="module")
def params():
    keys = jax.random.split(jax.random.key(0), 3)
    return [jax.random.normal(key, (WIDTH, WIDTH)) / 6 for key in keys]


def batch(number, rows=ROWS):
    return jax.random.normal(jax.random.fold_in(jax.random.key(1), number), (rows, 64))


def in_units(offs, gradients):
    """Returns the sum of squares, in units of the mean square of each array."""
    energies = jnp.stack([jnp.sum(g**2) for g in jax.tree.leaves(gradients)])
    sizes = [g.size for g in jax.tree.leaves(gradients)]
    squares = jnp.stack([jnp.sum(x**2) for x in jax.tree.leaves(offs)])
    return float(jnp.sum(squares / units_of_variance(energies, sizes)))


def true_variance(gradient, params, count=200):
    gradients = [gradient(params, batch(number)) for number in range(count)]
    total = functools.reduce(functools.partial(jax.tree.map, operator.add), gradients)
    mean = jax.tree.map(lambda x: x / count, total)
    offs = (jax.tree.map(operator.sub, g, mean) for g in gradients)
    return sum(map(in_units, offs, gradients)) / (count - 1)


def norm_squared(tree):
    return sum(float(jnp.sum(x**2)) for x in jax.tree.leaves(tree))


@contextlib.contextmanager
def measuring(ledger=0):
    """Makes functions that are called measure the noise of their batches."""
    measurement = BatchMeasurement(ledger)
    with putting_in_force(AS_PLANNED), measuring_batches(measurement):
        yield


def measured_variance(gradient, params, count=200, rows=ROWS):
    ledger = make_ledger("test", [])
    with measuring(pool_hash("test")):
        step = jax.jit(gradient)
        results = [step(params, batch(100 + n, rows)) for n in range(count)]
    jax.block_until_ready(results)
    taken = ledger.take()
    assert taken["refused"] == 0
    return taken["gradient_energy"] / count


AUTO = functools.partial(dafjax.remat_compress, bits="auto")


def of_model(params, x, model=model):
    return jnp.mean((model(params, x) - 1) ** 2)


def in_scan(params, x):
    """Two microbatches, whose gradients add up."""
    loss = AUTO(mean_loss)

    def step(total, part):
        return total + loss(params, part) / 2, None

    return jax.lax.scan(step, 0.0, x.reshape(2, -1, WIDTH))[0]


def with_closure(params, x, wrap=lambda f: f):
    return wrap(lambda scale, x: scale * mean_loss(params, x))(1.0, x)


VARIANTS = {
    "mean": (mean_loss, AUTO(mean_loss)),
    "sum": (sum_loss, AUTO(sum_loss)),
    "model": (of_model, functools.partial(of_model, model=AUTO(model))),
    "closure": (with_closure, functools.partial(with_closure, wrap=AUTO)),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_halves_tell_the_variance_of_a_gradient(name, params):
    plain, wrapped = VARIANTS[name]
    expected = true_variance(jax.jit(jax.grad(plain)), params)
    found = measured_variance(jax.grad(wrapped), params)
    assert 0.8 < found / expected < 1.25


def test_each_microbatch_counts(params):
    of_both = measured_variance(jax.grad(in_scan), params)
    of_each = measured_variance(jax.grad(AUTO(mean_loss)), params, rows=ROWS // 2)
    assert 1.8 < of_both / of_each < 2.2


def test_batch_normalization_is_measured_with_statistics_of_halves(params):
    expected = true_variance(jax.jit(jax.grad(normalized_loss)), params)
    found = measured_variance(jax.grad(AUTO(normalized_loss)), params)
    assert 0.6 < found / expected < 1.6


def test_dropout_has_part_in_the_noise(params):
    """Halves with the same mask would not tell that masks differ from step to step."""

    def loss(params, x, key):
        h = x @ params[0]
        kept = jax.random.bernoulli(key, 0.5, (1, WIDTH))
        return jnp.mean((jnp.where(kept, h, 0) @ params[1] - 1) ** 2)

    def gradient(params, x, loss=loss):
        key = jax.random.key(jnp.sum(jax.lax.bitcast_convert_type(x, jnp.uint32)))
        return jax.grad(loss)(params, x, key)

    target = dafjax.BatchNoise(in_axes=(None, 0, None))
    wrapped = dafjax.remat_compress(loss, bits=target)
    expected = true_variance(jax.jit(gradient), params)
    found = measured_variance(functools.partial(gradient, loss=wrapped), params)
    # The mask is common to all examples of a batch; halves with masks of their own
    # have half of its variance.
    assert 0.4 < found / expected < 0.85


def test_calls_that_measure_are_steps_like_others(params):
    step = dafjax.jit(jax.value_and_grad(AUTO(mean_loss)))
    exact = jax.jit(jax.value_and_grad(mean_loss))
    for number in range(1, 9):
        found, expected = (f(params, batch(number)) for f in (step, exact))
        np.testing.assert_allclose(found[0], expected[0], rtol=1e-6)
        off = jax.tree.map(operator.sub, found[1], expected[1])
        # Calls 6 and 7 measure; all have 8 bits until call 8.
        if number < 8:
            assert norm_squared(off) < 1e-4 * norm_squared(expected[1])


def test_no_other_call_pays_for_measurements(params):
    step = dafjax.jit(jax.grad(AUTO(mean_loss)))
    for number in range(9):
        step(params, batch(number))
        assert "dafjax_ledger_note" not in str(step.trace(params, batch(0)).jaxpr)


@pytest.mark.parametrize("share", [0.2, 0.7])
def test_rounding_adds_the_share(share, params):
    target = dafjax.BatchNoise(share)
    step = dafjax.jit(jax.grad(dafjax.remat_compress(mean_loss, bits=target)))
    for number in range(40):
        step(params, batch(number))
        if number < 7:
            assert set(step.bits.values()) == {8}
    exact = jax.jit(jax.grad(mean_loss))
    added = []
    for number in range(40, 60):
        x = batch(number)
        expected = exact(params, x)
        off = jax.tree.map(operator.sub, step(params, x), expected)
        added.append(in_units(off, expected))
    ratio = np.mean(added) / true_variance(exact, params)
    # Bits are 1, 2, 4 or 8, so that the noise may be well below the share.
    assert share**2 / 20 < ratio < 1.3 * share**2
    assert share**2 / 5 < step.noise_share**2 < share**2
    assert step.num_compiles <= 3


def test_a_batch_that_decides_nothing_keeps_8_bits(params):
    target = dafjax.BatchNoise(1e-4)
    step = dafjax.jit(jax.grad(dafjax.remat_compress(mean_loss, bits=target)))
    for number in range(10):
        step(params, batch(number))
    assert set(step.bits.values()) == {8}
    assert step.num_compiles == 1


def test_measuring_takes_no_more_memory_than_recomputation(params):
    many = [params[0]] * 12
    x = batch(0, 4096)
    plain = gradient_nbytes(mean_loss, many, x)
    with measuring():
        assert gradient_nbytes(AUTO(mean_loss), many, x) < 0.5 * plain


def test_a_limit_of_memory_comes_first(params):
    """Then all calls measure, and bits take no more bytes than those chosen."""
    many, x = [params[0]] * 12, batch(0, 4096)
    step = dafjax.jit(jax.grad(AUTO(mean_loss)), memory="8MiB")
    for _ in range(9):
        step(many, x)
    assert step.report().memory.total_nbytes <= 8 * 2**20
    assert step.bits
    assert step.noise_share is None


def test_modules_of_flax_are_measured():
    module = nn.Dense(WIDTH)
    x = batch(0)
    variables = module.init(jax.random.key(0), x)

    @AUTO
    def loss(variables, x):
        return jnp.mean(jnp.tanh(module.apply(variables, x)) ** 2)

    assert measured_variance(jax.grad(loss), variables, count=2) > 0


class TestErrors:
    def test_a_single_example_has_no_halves(self, params):
        with (
            measuring(),
            pytest.raises(ValueError, match="is called with one example"),
        ):
            jax.jit(jax.grad(AUTO(mean_loss)))(params, batch(0, 1))

    def test_a_function_that_does_not_run_on_half_of_the_examples(self, params):
        def loss(params, x):
            return jnp.mean(x.reshape(ROWS // 2, 2, WIDTH) @ params[0])

        with (
            measuring(),
            pytest.raises(ValueError, match="does not run on half of the examples"),
        ):
            jax.jit(jax.grad(AUTO(loss)))(params, batch(0))

    def test_axes_that_are_not_there(self, params):
        target = dafjax.BatchNoise(in_axes=(None, 3))
        wrapped = dafjax.remat_compress(mean_loss, bits=target)
        with (
            measuring(),
            pytest.raises(ValueError, match=r"`BatchNoise\(in_axes=...\)` names"),
        ):
            jax.jit(jax.grad(wrapped))(params, batch(0))

    def test_only_dafjax_jit_measures(self, params):
        with pytest.raises(ValueError, match=r"BatchNoise.*dafjax.jit"):
            jax.jit(jax.grad(AUTO(mean_loss)))(params, batch(0))

    def test_a_page_pool_cannot(self):
        with (
            dafjax.stores.PagePool() as pool,
            pytest.raises(NotImplementedError, match="noise of a batch"),
        ):
            AUTO(mean_loss, store=pool)
