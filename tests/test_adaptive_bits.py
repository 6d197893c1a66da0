"""Page pools allocate bits while a program runs: they keep to their target."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dafjax
from dafjax import allocation
from dafjax._native import _cpu
from dafjax.allocation import LADDER, Site, allocate, allocate_to_variance
from dafjax.stores import Arrays, PagePool
from tests.helpers import slow


def relu_loss(params, x):
    for w in params:
        x = jax.nn.relu(x @ w)
    return jnp.mean(x**2)


@pytest.fixture
def pool():
    with PagePool() as pool:
        yield pool


@pytest.fixture
def example():
    """Returns layers of very different widths, and their input."""
    widths = (64, 512, 64, 256, 32)
    keys = jax.random.split(jax.random.key(0), len(widths))
    params = [
        jax.random.normal(key, (a, b)) * (2 / a) ** 0.5
        for key, a, b in zip(keys, widths, widths[1:], strict=False)
    ]
    return params, jax.random.normal(keys[-1], (1024, widths[0]))


def error(got, want):
    difference = sum(
        jnp.sum((a - b) ** 2)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    )
    return float(difference / sum(jnp.sum(b**2) for b in jax.tree.leaves(want)))


def run(step, arguments, times=4):
    for _ in range(times):
        result = jax.block_until_ready(step(*arguments))
    return result


def average_bits(pool):
    return np.mean([site.bits_kept for site in pool.stats().sites.values()])


@pytest.mark.parametrize("bits", [1.5, 5.5])
def test_the_average_is_obeyed(pool, example, bits):
    loss = dafjax.remat_compress(relu_loss, bits=dafjax.AverageBits(bits), store=pool)
    run(jax.jit(jax.grad(loss)), example)
    stats = pool.stats()
    # The columns of 1024 rows. The third layer saves nothing: its ReLU is recomputed.
    sizes = {"dot_general": 512, "dot_general 2": 64, "dot_general 3": 32}
    kept = {name.split(" @")[0]: site.bits_kept for name, site in stats.sites.items()}
    assert kept.keys() == sizes.keys()
    assert set(kept.values()) <= set(LADDER)
    assert all(site.importance > 0 for site in stats.sites.values())
    average = sum(sizes[name] * kept[name] for name in sizes) / sum(sizes.values())
    # The rest is less than one step of the largest residual.
    assert bits - 4 * 512 / sum(sizes.values()) < average <= bits


def test_importance_beats_the_same_bits_for_all(pool):
    def loss(params, x):
        total = 0.0
        for number, w in enumerate(params):
            x = jax.nn.relu(x @ w)
            # The later a layer, the less it matters.
            total += 4.0**-number * jnp.mean(x**2)
        return total

    keys = jax.random.split(jax.random.key(0), 6)
    params = [jax.random.normal(key, (128, 128)) / 8 for key in keys[1:]]
    example = params, jax.random.normal(keys[0], (1024, 128))
    exact = jax.jit(jax.grad(loss))(*example)
    tight = dafjax.remat_compress(loss, bits="tight", store=Arrays())
    uniform = jax.jit(jax.grad(tight))
    adaptive = dafjax.remat_compress(loss, bits=dafjax.AverageBits(2), store=pool)
    got = run(jax.jit(jax.grad(adaptive)), example)
    assert error(got, exact) < 0.5 * error(uniform(*example), exact)


def test_arguments_of_nonlinear_functions_have_two_bits_if_they_fit(pool):
    def loss(w, x):
        # The first layer matters only because GELU is nonlinear.
        return 1e-3 * jnp.mean(jax.nn.gelu(x @ w[0])) + jnp.mean((x @ w[1]) ** 2)

    keys = jax.random.split(jax.random.key(0), 3)
    w = [jax.random.normal(key, (64, 256)) / 8 for key in keys[1:]]
    wrapped = dafjax.remat_compress(loss, bits=dafjax.AverageBits(3), store=pool)
    step = jax.jit(jax.grad(wrapped))
    kept = {}
    for average in (3, 1):
        pool.target = dafjax.AverageBits(average)
        run(step, (w, jax.random.normal(keys[0], (1024, 64))))
        sites = pool.stats().sites
        kept[average] = {n.split(" @")[0]: s.bits_kept for n, s in sites.items()}
    assert kept == {
        3: {"dot_general": 2, "dot_general 2": 4},
        1: {"dot_general": 1, "dot_general 2": 1},
    }


def test_the_argument_of_an_exponential_keeps_eight_bits(pool):
    def attention(w, x):
        q, k, v = jnp.split(x @ w[0], 3, axis=-1)
        scores = jnp.einsum("btd,bsd->bts", q, k) / 4
        return jnp.mean((jax.nn.softmax(scores) @ v @ w[1]) ** 2)

    keys = jax.random.split(jax.random.key(0), 3)
    w = [jax.random.normal(keys[0], (64, 192)) / 8]
    w.append(jax.random.normal(keys[1], (64, 256)) / 8)
    example = w, jax.random.normal(keys[2], (1, 1024, 64))
    exact = jax.jit(jax.grad(attention))(*example)
    wrapped = dafjax.remat_compress(attention, bits=dafjax.AverageBits(2), store=pool)
    step = jax.jit(jax.grad(wrapped))
    # With 4 bits the error is 0.5, with 2 it is 1e11.
    assert error(run(step, example), exact) < 0.05
    kept = [site.bits_kept for site in pool.stats().sites.values()]
    # More than 2 on average: the others have their fewest.
    assert sorted(kept) == [2, 8]


def test_targets_change_without_compiling(pool, example):
    exact = jax.grad(relu_loss)(*example)
    traces = []

    def loss(params, x):
        traces.append(None)
        return relu_loss(params, x)

    wrapped = dafjax.remat_compress(loss, bits=dafjax.AverageBits(1), store=pool)
    step = jax.jit(jax.grad(wrapped))
    errors = []
    for bits in (1, 2, 4, 8):
        pool.target = dafjax.AverageBits(bits)
        errors.append(error(run(step, example), exact))
    assert len(traces) == 1
    assert step._cache_size() == 1
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 1e-4 < errors[0]


def test_a_budget_in_bytes_is_met(pool, example):
    wrapped = dafjax.remat_compress(relu_loss, bits=dafjax.Budget("256KiB"), store=pool)
    step = jax.jit(jax.grad(wrapped))
    for nbytes in (200_000, 400_000, 800_000):
        pool.target = dafjax.Budget(nbytes)
        run(step, example)
        assert 0.5 * nbytes < pool.stats().live_nbytes <= nbytes


@pytest.mark.parametrize(
    "target",
    [dafjax.Budget("1MiB"), slow(dafjax.AverageBits(8)), dafjax.NoiseCeiling(1e-9)],
    ids=str,
)
def test_with_a_target_nothing_is_evicted(pool, key, target):
    """Bits are allocated for the pages of the pool's budget, whatever the target."""
    # Many residuals, each smaller than a page.
    keys = jax.random.split(key, 9)
    params = [jax.random.normal(k, (64, 64)) / 6 for k in keys[1:]]
    wrapped = dafjax.remat_compress(relu_loss, bits=target, store=pool)
    step = jax.jit(jax.grad(wrapped))
    arguments = params, jax.random.normal(keys[0], (512, 64))
    for pages, rest in itertools.product((2, 4, 3), (0, 60_000)):
        pool.budget = 65536 * pages + rest
        run(step, arguments, 8)
        before = pool.stats()
        run(step, arguments)
        assert pool.stats().evictions == before.evictions
        assert pool.stats().degraded_nbytes == before.degraded_nbytes
        assert pool.stats().live_nbytes > 65536 * (pages - 1)


def test_evicted_codes_do_not_count_as_room(pool, example):
    wrapped = dafjax.remat_compress(relu_loss, bits=dafjax.Budget("576KiB"), store=pool)
    step = jax.jit(jax.grad(wrapped))
    pool.budget = "576KiB"
    run(step, example)
    pool.set_bits("*", 8)
    run(step, example)
    before = pool.stats().evictions
    assert before > 0
    pool.set_bits("*", None)
    run(step, example)
    assert pool.stats().evictions == before


def test_a_budget_limits_live_bytes(example):
    params, x = example
    micro_batches = x.reshape(4, 256, 64)
    kept = {}
    for once in (False, True):
        with PagePool(backward_once=once) as pool:
            gradient = jax.grad(
                dafjax.remat_compress(
                    relu_loss, bits=dafjax.Budget("96KiB"), store=pool
                )
            )

            def step(params, micro_batches, gradient=gradient):
                def add(total, x):
                    return jax.tree.map(jnp.add, total, gradient(params, x)), None

                zeros = jax.tree.map(jnp.zeros_like, params)
                return jax.lax.scan(add, zeros, micro_batches)[0]

            run(jax.jit(step), (params, micro_batches))
            kept[once] = average_bits(pool)
    # 4 * 152 Ki elements are put; 152 Ki of them are live at a time.
    assert kept[False] < 1.5
    assert kept[True] >= 4


def test_a_ceiling_of_noise_raises_bits_until_it_is_met(pool, example):
    exact = jax.grad(relu_loss)(*example)
    wrapped = dafjax.remat_compress(
        relu_loss, bits=dafjax.NoiseCeiling(1.0), store=pool
    )
    step = jax.jit(jax.grad(wrapped))
    bits = []
    for ceiling in (1.0, 0.1, 0.01, 0.001):
        pool.target = dafjax.NoiseCeiling(ceiling)
        got = run(step, example, times=8)
        stats = pool.stats()
        assert 0 < stats.expected_variance <= ceiling * stats.gradient_energy
        # The expected error is exact up to the shape of distributions.
        assert error(got, exact) < 4 * ceiling
        bits.append(average_bits(pool))
    assert bits == sorted(bits)
    assert bits[-1] > bits[0]


def test_bits_that_are_set_stay(pool, example):
    wrapped = dafjax.remat_compress(relu_loss, bits=dafjax.AverageBits(2), store=pool)
    step = jax.jit(jax.grad(wrapped))
    run(step, example)
    before = pool.stats().live_nbytes
    for name in pool.sites:
        pool.set_bits("*", None)
        pool.set_bits(name, 4)
        run(step, example)
        stats = pool.stats()
        assert stats.sites[name].bits_kept == 4
        # The others make room for it, down to 1 bit.
        others = {s.bits_kept for n, s in stats.sites.items() if n != name}
        assert others == {1.0} or stats.live_nbytes <= 1.05 * before


def test_nan_never_enters(pool, example):
    params, x = example
    wrapped = dafjax.remat_compress(relu_loss, bits=dafjax.AverageBits(2), store=pool)
    step = jax.jit(jax.grad(wrapped))
    run(step, example)
    run(step, (params, x.at[:, 0].set(jnp.nan)))
    run(step, (params, x.at[:, 0].set(jnp.inf)))
    run(step, example)
    stats = pool.stats()
    assert stats.refused_importances > 0
    assert np.isfinite(stats.expected_variance)
    assert all(np.isfinite(site.importance) for site in stats.sites.values())


def test_in_the_body_of_a_scan_all_iterations_count(example):
    w = jax.random.normal(jax.random.key(1), (6, 64, 64)) / 6
    x = example[1]

    def scanned(w, x):
        step = lambda x, w: (jax.nn.relu(x @ w), None)
        return jnp.mean(jax.lax.scan(step, x, w)[0] ** 2)

    totals = []
    for length in (2, 6):
        with PagePool() as pool:
            wrapped = dafjax.remat_compress(
                scanned, bits=dafjax.AverageBits(2), store=pool
            )
            run(jax.jit(jax.grad(wrapped)), (w[:length], x))
            stats = pool.stats()
            assert stats.sites
            (body,) = [s for n, s in stats.sites.items() if n.startswith("argument")]
            totals.append(body)
    # One entry for each iteration of four executions.
    assert totals[1].puts - totals[0].puts == 4 * (6 - 2)
    assert all(total.importance > 0 for total in totals)


def test_vmapped_examples_are_measured(pool, example):
    params, x = example
    wrapped = dafjax.remat_compress(relu_loss, bits=dafjax.AverageBits(2), store=pool)
    step = jax.jit(jax.vmap(jax.grad(wrapped), in_axes=(None, 0)))
    run(step, (params, x.reshape(4, 256, 64)))
    assert all(site.importance > 0 for site in pool.stats().sites.values())


def test_wrapped_blocks_are_measured(pool, example):
    def loss(params, x):
        for w in params:
            block = dafjax.remat_compress(
                lambda x, w=w: jax.nn.relu(x @ w),
                bits=dafjax.AverageBits(2),
                store=pool,
                activation_argnums=0,
            )
            x = block(x)
        return jnp.mean(x**2)

    run(jax.jit(jax.grad(loss)), example)
    sites = pool.stats().sites.values()
    assert sum(site.importance is not None for site in sites) >= 3


@pytest.mark.parametrize("seed", range(8))
def test_the_pool_allocates_as_python_does(seed):
    rng = np.random.default_rng(seed)
    sites = []
    for _ in range(rng.integers(0, 40)):
        low, high = np.sort(rng.integers(0, 4, 2))
        sites.append(
            Site(
                int(rng.integers(0, 10_000)),
                float(np.exp(rng.normal(0, 5))) * int(rng.integers(0, 5) > 0),
                minimum=LADDER[low],
                maximum=LADDER[high],
            )
        )
    tuples = [(s.num_elements, s.importance, s.minimum, s.maximum) for s in sites]
    budget = int(rng.uniform(0, 9) * sum(s.num_elements for s in sites))
    assert tuple(_cpu.allocate(tuples, budget)) == allocate(sites, budget)
    ceiling = float(rng.uniform(0, 1) * sum(s.importance for s in sites))
    got = _cpu.allocate_to_variance(tuples, ceiling)
    assert tuple(got) == allocate_to_variance(sites, ceiling)


@pytest.mark.parametrize("asked", LADDER)
def test_the_pool_has_the_minima_of_python(asked):
    assert _cpu.minimum_bits(asked) == allocation._minimum(asked)


class TestRefusals:
    def test_a_target_without_a_pool_or_dafjax_jit_is_an_error(self, example):
        loss = dafjax.remat_compress(relu_loss, bits=dafjax.AverageBits(2))
        with pytest.raises(ValueError, match=r"AverageBits.*dafjax\.jit.*PagePool"):
            jax.jit(jax.grad(loss))(*example)

    def test_a_pool_has_one_target(self, pool):
        dafjax.remat_compress(relu_loss, bits=dafjax.AverageBits(2), store=pool)
        with pytest.raises(ValueError, match=r"AverageBits\(bits=2\).*already"):
            dafjax.remat_compress(relu_loss, bits=dafjax.Budget("1MiB"), store=pool)

    @pytest.mark.parametrize("target", [2, "2", float])
    def test_a_target_is_one_of_three(self, pool, target):
        with pytest.raises(TypeError, match="`target` must be"):
            pool.target = target

    @pytest.mark.parametrize(
        ("make", "kind", "message"),
        [
            (lambda: dafjax.AverageBits(0.5), ValueError, "from 1 to 8, but got 0.5"),
            (lambda: dafjax.AverageBits("2"), TypeError, "must be a number"),
            (lambda: dafjax.AverageBits(True), TypeError, "must be a number"),
            (lambda: dafjax.Budget("many"), ValueError, "cannot be read"),
            (lambda: dafjax.NoiseCeiling(0), ValueError, "from 1e-12"),
            (lambda: dafjax.NoiseCeiling(float("nan")), ValueError, "got nan"),
        ],
    )
    def test_targets_check_their_numbers(self, make, kind, message):
        with pytest.raises(kind, match=message):
            make()
