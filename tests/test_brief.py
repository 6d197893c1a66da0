"""Residuals that wait only while little memory is live, and pools without them."""

import functools
import itertools

import jax
import jax.numpy as jnp
import pytest

import dafjax
from dafjax._plan.plan import record_plans
from dafjax.codecs import PackedAffine
from dafjax.policies import CompressExpensive
from dafjax.stores import Arrays, PagePool
from tests import networks
from tests.helpers import relative_error, temp_nbytes


BATCH, WIDE, NARROW = 256, 256, 128


def narrowing(p, x):
    """The last layers are half as wide as the first."""
    for w in p:
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2)


def weights(key, *widths):
    shapes = itertools.pairwise(widths)
    return [
        jax.random.normal(k, shape) / 16
        for k, shape in zip(jax.random.split(key, len(widths) - 1), shapes, strict=True)
    ]


def lasting_only(name):
    return PagePool(name=name, lasting_only=True)


def gradient(store, loss=narrowing, **options):
    # With a policy of its own, a small function is compressed at any rate.
    options = {"policy": CompressExpensive(), **options}
    return jax.jit(jax.grad(dafjax.remat_compress(loss, store=store, **options)))


def kept_of(loss, p, x, **options):
    """Returns width and briefness of residuals, in the order of their computation."""
    with lasting_only("kept of a loss") as pool, record_plans() as recorder:
        gradient(pool, loss, **options).lower(p, x)
    found = []
    for plan in recorder.plans.values():
        kept = {k.value: k.shape[-1] for k in plan.kept if k.codec is not None}
        assert plan.brief <= set(kept)
        found += [(width, v in plan.brief) for v, width in sorted(kept.items())]
    return found


def widths_of_brief(loss, p, x, **options):
    """Returns the widths of brief residuals, in the order of their computation."""
    kept = kept_of(loss, p, x, **options)
    assert kept
    return [width for width, is_brief in kept if is_brief]


@pytest.fixture
def x(key):
    return jax.random.normal(jax.random.fold_in(key, 1), (BATCH, WIDE))


def test_late_small_residuals_are_brief(key, x):
    p = weights(key, WIDE, WIDE, WIDE, NARROW, NARROW)
    assert widths_of_brief(narrowing, p, x) == [NARROW, NARROW]


def test_early_small_residuals_wait_for_the_large_ones(key, x):
    p = weights(key, WIDE, NARROW, NARROW, WIDE, WIDE)
    assert widths_of_brief(narrowing, p, x) == []


def test_of_residuals_of_one_size_none_are_brief(key, x):
    p = weights(key, WIDE, WIDE, WIDE, WIDE)
    assert widths_of_brief(narrowing, p, x) == []


def test_together_they_take_no_more_than_half_of_the_largest_value(key, x):
    p = weights(key, WIDE, WIDE, *[NARROW] * 12)
    # A code of 8 bits takes a quarter of the value, and its block scales some more: of
    # values half as large as the largest three, not four, fit.
    assert widths_of_brief(narrowing, p, x, bits=8) == [NARROW] * 3
    assert len(widths_of_brief(narrowing, p, x, bits=1)) == 12


def test_what_is_read_after_a_large_cotangent_was_made_is_not_brief(key, x):
    def two_branches(p, x):
        wide = jnp.tanh(x @ p[0])
        # The backward pass of the last branch, which runs first, makes the cotangent of
        # `wide`.
        first, last = jnp.tanh(wide @ p[1]), jnp.tanh(wide @ p[2])
        return jnp.mean((first + last) ** 2)

    p = [
        *weights(key, WIDE, WIDE, NARROW),
        *weights(jax.random.fold_in(key, 2), WIDE, NARROW),
    ]
    wide, first, last, both = kept_of(two_branches, p, x)
    assert wide == (WIDE, False)
    assert first == (NARROW, False)
    assert last == both == (NARROW, True)


def test_what_waits_while_something_large_is_made_without_a_gradient(key, x):
    p = weights(key, WIDE, WIDE, NARROW, NARROW)

    def distilled(p, x):
        loss = narrowing(p, x)
        teacher = jnp.sin(x @ jax.lax.stop_gradient(p[0]))
        return loss * jnp.mean(jax.lax.stop_gradient(teacher))

    assert widths_of_brief(narrowing, p, x) == [NARROW, NARROW]
    assert widths_of_brief(distilled, p, x) == []

    def distilled_in_a_loop(p, x):
        """The teacher is wider, and one row after another goes through it."""
        teacher = jnp.ones((WIDE, BATCH * WIDE))
        loss = narrowing(p, x)
        means = jax.lax.map(lambda row: jnp.mean(jnp.sin(row @ teacher)), x)
        return loss * jax.lax.stop_gradient(jnp.mean(means))

    assert widths_of_brief(distilled_in_a_loop, p, x) == []


def test_what_is_cheap_or_in_a_loop_is_not_the_largest_value(key, x):
    """It may never exist as a whole."""
    p = weights(key, WIDE, WIDE, WIDE, NARROW, NARROW)

    def of_repeated(p, x):
        return narrowing(p, jnp.mean(jnp.tile(x, (8, 1, 1)), axis=0))

    def of_scaled(p, x):
        """A product four times as large, in each iteration, gives a number."""
        weights = jnp.ones((2, WIDE, 4 * WIDE))
        scales = jax.lax.map(lambda w: jnp.mean(jnp.abs(x @ w)), weights)
        return narrowing(p, x * jax.lax.stop_gradient(jnp.mean(scales)))

    for loss in (of_repeated, of_scaled):
        assert widths_of_brief(loss, p, x) == [NARROW, NARROW]


@pytest.mark.parametrize("reads_wide_first", [False, True])
def test_what_is_read_after_a_large_value_was_restored_is_not_brief(
    key, x, reads_wide_first
):
    frozen, *p = weights(key, WIDE, WIDE, NARROW, NARROW)

    def loss(q, x):
        p, small = q
        wide = jnp.tanh(x @ frozen)
        loss = narrowing(p, wide)
        # The backward pass first reads the last operand of the forward pass.
        return loss + (jnp.mean(wide @ small) if reads_wide_first else jnp.sum(small))

    found = widths_of_brief(loss, (p, jnp.ones((WIDE, 1))), x)
    assert found == ([] if reads_wide_first else [NARROW, NARROW])


def test_what_a_gradient_itself_is_made_of_is_read_last(key, x):
    """After all that the backward pass makes, and so beside the largest of it."""

    @jax.custom_vjp
    def scaled(w, x):
        return jnp.sum(w * x)

    scaled.defvjp(
        lambda w, x: (jnp.sum(w * x), x), lambda x, cotangent: (x, jnp.zeros_like(x))
    )

    def loss(p, x):
        *p, w = p
        for v in p:
            x = jnp.tanh(x @ v)
        return jnp.mean(x**2) + scaled(w, x)

    p = weights(key, WIDE, WIDE, WIDE, NARROW, NARROW)
    assert widths_of_brief(narrowing, p, x) == [NARROW, NARROW]
    p.append(jnp.zeros((BATCH, NARROW)))
    assert widths_of_brief(loss, p, x) == [NARROW]


def test_an_effect_makes_nothing(key, x):
    p = weights(key, WIDE, WIDE, NARROW, NARROW)

    def printing(p, x):
        loss = narrowing(p, x)
        jax.debug.print("{}", loss)
        return loss

    assert widths_of_brief(printing, p, x) == [NARROW, NARROW]


def test_nothing_is_brief_in_the_body_of_a_loop(key, x):
    p = weights(key, WIDE, WIDE, NARROW, NARROW)

    def looped(p, xs):
        return jax.lax.scan(lambda sum, x: (sum + narrowing(p, x), None), 0.0, xs)[0]

    assert widths_of_brief(looped, p, jnp.stack([x, x, x])) == []


def test_nothing_is_brief_beside_a_large_result(key, x):
    p = weights(key, WIDE, WIDE, NARROW, NARROW)

    def with_features(p, x):
        return jnp.tanh(x @ p[0]), narrowing(p, x)

    def outside(p, x):
        features, loss = dafjax.remat_compress(with_features, store=pool)(p, x)
        return loss + jnp.sum(features**2)

    with lasting_only("beside features") as pool, record_plans() as recorder:
        jax.jit(jax.grad(outside)).lower(p, x)
    (plan,) = recorder.plans.values()
    assert plan.compresses
    assert plan.brief == frozenset()


def test_results_count_together_and_arguments_do_not(key, x):
    p = weights(key, WIDE, WIDE, NARROW, *[NARROW // 2] * 3)

    def with_narrow(p, x, num_results):
        results = [x]
        for w in p:
            x = jnp.tanh(x @ w)
            results.append(x)
        return jnp.mean(x**2), results[-num_results:]

    def with_argument(p, x):
        return narrowing(p, x), x

    def num_brief(loss, *arguments):
        with lasting_only("results") as pool, record_plans() as recorder:
            wrapped = dafjax.remat_compress(loss, store=pool)
            jax.jit(jax.grad(wrapped, has_aux=True)).lower(p, *arguments)
        (plan,) = recorder.plans.values()
        return len(plan.brief)

    assert num_brief(with_argument, x) == 4
    assert num_brief(functools.partial(with_narrow, num_results=1), x) > 0
    assert num_brief(functools.partial(with_narrow, num_results=3), x) == 0


def test_a_store_that_does_not_take_them_never_sees_them(key, x, monkeypatch):
    p = weights(key, WIDE, WIDE, WIDE, NARROW, NARROW)
    seen = {"put": [], "get": []}
    for name, values in seen.items():
        monkeypatch.setattr(
            PagePool, name, lambda self, x, to=values: to.append(x) or x
        )
    for lasting_only in (False, True):
        with PagePool(lasting_only=lasting_only) as pool:
            gradient(pool).lower(p, x)
        assert len(seen["put"]) == (2 if lasting_only else 4)
        for values in seen.values():
            assert values
            assert not any(isinstance(packed, PackedAffine) for packed in values)
            values.clear()


def test_a_pool_of_lasting_residuals_leaves_the_others_in_arrays(key, x, stochastic):
    p = weights(key, WIDE, WIDE, WIDE, NARROW, NARROW)
    want = gradient(Arrays())(p, x)
    with (
        PagePool(name="all") as everything,
        PagePool(name="lasting", lasting_only=True) as lasting,
    ):
        for pool, num_sites in [(everything, 4), (lasting, 2)]:
            got = jax.block_until_ready(gradient(pool)(p, x))
            assert len(pool.sites) == pool.stats().entries == num_sites
            for ours, theirs in zip(got, want, strict=True):
                assert relative_error(ours, theirs) < 1e-6
        # Other residuals have the bits of their codecs.
        for pool in (everything, lasting):
            pool.set_bits("*", 8)
            got = gradient(pool)(p, x)
            assert relative_error(got[0], want[0]) > 1e-3
            unchanged = relative_error(got[-1], want[-1]) < 1e-6
            assert unchanged is (pool is lasting)


def test_where_all_are_brief_the_pool_has_no_sites(key, x):
    *rest, last = weights(key, WIDE, WIDE, WIDE, NARROW, NARROW)

    def loss(last, x):
        return narrowing([*map(jax.lax.stop_gradient, rest), last], x)

    with lasting_only("empty") as pool:
        assert "lasting_only=True" in repr(pool)
        jax.block_until_ready(gradient(pool, loss)(last, x))
        assert pool.sites == ()
        with pytest.raises(ValueError, match=r"lasting_only.*is not among them"):
            pool.set_bits("*", 8)


def test_a_target_is_refused(key, x):
    reason = r".*a `PagePool\(lasting_only=True\)` leaves in arrays has fixed bits"
    with lasting_only("no target") as pool:
        with pytest.raises(ValueError, match=r"remat_compress\(bits=Noise" + reason):
            dafjax.remat_compress(narrowing, bits=dafjax.NoiseCeiling(0.1), store=pool)
        with pytest.raises(ValueError, match="`target` must be None" + reason):
            pool.target = dafjax.AverageBits(2)
        assert pool.target is None


def test_a_step_needs_less_in_all_than_with_a_pool_of_everything(key):
    p, x = networks.conv_example(key, batch=128, depth=10)

    def downsampling(p, x):
        """The first two blocks of four times the pixels need the most memory."""
        x = jnp.repeat(jnp.repeat(x, 2, axis=1), 2, axis=2)
        for block in p[:2]:
            x = networks.conv_block(block, x)
        return networks.conv_loss(p[2:], x[:, ::2, ::2])

    temp, peak = {}, {}
    for name, lasting_only in [("all", False), ("lasting", True)]:
        with PagePool(name=f"{name}, images", lasting_only=lasting_only) as pool:
            step = gradient(pool, downsampling).lower(p, x).compile()
            temp[name] = step.memory_analysis().temp_size_in_bytes
            jax.block_until_ready(step(p, x))
            peak[name] = pool.stats().peak_nbytes
    arrays = temp_nbytes(gradient(Arrays(), downsampling).lower(p, x))
    assert peak["lasting"] < 0.7 * peak["all"]
    # They wait in the memory of the first blocks.
    assert temp["lasting"] < 1.005 * temp["all"]
    # Arrays are read in more chunks than pool entries, which fill pages.
    assert temp["lasting"] + peak["lasting"] < 1.1 * arrays


@pytest.mark.parametrize("option", ["lasting_only", "backward_once"])
def test_options_that_are_no_flags_are_refused(option):
    with pytest.raises(TypeError, match=f"`{option}` must be True or False"):
        PagePool(**{option: 1})
