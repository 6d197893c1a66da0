"""Sums of earlier sums, as arrays."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from dafjax._sensitivity.moments import ONE, Weight, WeightedSums


pytestmark = pytest.mark.usefixtures("standard_promotion")


def random_sums(rng, num_sums, num_numbers):
    """Returns sums of few earlier ones, and a function that adds them up one by one.

    Also returns the number of each sum.
    """
    sums, numbers_of, terms = WeightedSums(), [ONE], []

    def index():
        return int(rng.integers(num_numbers))

    for place in range(1, num_sums):
        numbers_of.append(sums.new())
        for _ in range(rng.integers(4)):
            of = int(rng.integers(max(0, place - 8), place))
            weight = Weight(float(rng.uniform(0.1, 1)), index(), index(), index())
            sums.add(numbers_of[place], numbers_of[of], weight)
            terms.append((place, of, weight))

    def one_by_one(numbers):
        values = np.eye(1, num_sums)[0]
        for place, of, (factor, first, second, divisor) in terms:
            weight = factor * numbers[first] * numbers[second] / numbers[divisor]
            values[place] += weight * values[of]
        return values

    return sums, numbers_of, one_by_one


@pytest.mark.parametrize("num_sums", [1, 2, 5, 300])
def test_sums_are_those_of_one_after_another(rng, num_sums):
    sums, wanted, one_by_one = random_sums(rng, num_sums, 9)
    numbers = np.array([1, *rng.uniform(0.5, 2, 8)], np.float32)
    got = jax.jit(lambda x: sums.compute(x, wanted))(numbers)
    np.testing.assert_allclose(got, one_by_one(numbers), rtol=1e-5)
    some = jax.jit(lambda x: sums.compute(x, [ONE, *wanted[::-7]]))(numbers)
    np.testing.assert_allclose(some, [1, *got[::-7]], rtol=1e-6)


def test_examples_may_be_mapped_and_shared_by_devices(rng):
    sums, wanted, one_by_one = random_sums(rng, 50, 9)
    numbers = rng.uniform(0.5, 2, (4, 9)).astype(np.float32)
    numbers[:, 0] = 1

    def compute(x):
        return sums.compute(x, wanted)

    expected = np.stack(list(map(one_by_one, numbers)))
    mapped = jax.jit(jax.vmap(compute))
    np.testing.assert_allclose(mapped(numbers), expected, rtol=1e-5)
    spec = PartitionSpec("data")
    for kind in (AxisType.Auto, AxisType.Explicit):
        mesh = jax.make_mesh((2,), ("data",), axis_types=(kind,))
        with jax.set_mesh(mesh):
            shared = jax.device_put(numbers, jax.NamedSharding(mesh, spec))
            np.testing.assert_allclose(mapped(shared), expected, rtol=1e-5)
            if kind is AxisType.Auto:
                in_shards = jax.shard_map(mapped, in_specs=spec, out_specs=spec)
                np.testing.assert_allclose(in_shards(shared), expected, rtol=1e-5)


@pytest.mark.parametrize(("num_sums", "num_steps"), [(16, 1), (17, 2), (100, 7)])
def test_a_chain_takes_few_steps(num_sums, num_steps):
    sums, number = WeightedSums(), ONE
    for _ in range(num_sums):
        before, number = number, sums.new()
        sums.add(number, before, Weight(1.5))
    text = str(jax.make_jaxpr(lambda x: sums.compute(x, [number]))(jnp.ones(1)))
    assert f"length={num_steps}\n" in text
    (got,) = sums.compute(jnp.ones(1), [number])
    assert float(got) == pytest.approx(1.5**num_sums)


def test_a_sum_may_have_many_terms():
    sums = WeightedSums()
    total, after = sums.new(), sums.new()
    for number in range(30):
        sums.add(total, ONE, Weight(float(number)))
    sums.add(after, total, Weight(2.0))
    assert list(sums.compute(jnp.ones(1), [total, after])) == [435, 870]


def test_products_in_a_chain_are_neither_too_large_nor_too_small():
    """Small weights alone would underflow, large ones alone overflow."""
    sums, number = WeightedSums(), ONE
    for _ in range(8):
        for weight in (Weight(1.0, 1, 1), Weight(1.0, divisor=1), Weight(2.0, 2)):
            before, number = number, sums.new()
            sums.add(number, before, weight)
    got = sums.compute(jnp.asarray([1.0, 1e-12, 1e12]), [number])
    assert float(got[0]) == pytest.approx(2.0**8, rel=1e-5)


def test_nothing_of_nothing_is_nothing():
    sums = WeightedSums()
    share, empty = sums.new(), sums.new()
    sums.add(share, ONE, Weight(1.0, first=1, divisor=1))
    assert list(sums.compute(jnp.asarray([1.0, 0.0]), [share, empty])) == [0, 0]


def test_factors_may_be_too_large():
    sums = WeightedSums()
    large = sums.new()
    sums.add(large, ONE, Weight(1e300))
    assert list(sums.compute(jnp.ones(1), [large])) == [np.inf]
