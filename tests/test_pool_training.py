"""Training with residuals in a page pool: numbers, bits and budgets, lifetimes."""

import functools
import itertools
import signal
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import dafjax
from dafjax.codecs import Affine
from dafjax.policies import CompressExpensive
from dafjax.stores import Arrays, PagePool
from tests import networks
from tests.helpers import assert_same_bits, run_python


WIDTH = 64


@pytest.fixture
def pool(request):
    # Compiled programs keep the name of the pool: each test needs another.
    with PagePool(name=request.node.name) as pool:
        yield pool


def _assert_same(got, want):
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert_same_bits(ours, theirs)


def _example(key, batch=64, widths=(WIDTH, WIDTH, WIDTH)):
    p = networks.mlp_params(key, widths)
    return p, jax.random.normal(jax.random.fold_in(key, 7), (batch, widths[0]))


def _policy(bits, blocks="rows"):
    codec = Affine(bits=bits, block_size=64, blocks=blocks)
    return CompressExpensive(codec, min_nbytes=0)


def _gradient(store, *, bits=2, loss=networks.mlp_loss, **options):
    options.setdefault("policy", _policy(bits))
    return jax.jit(jax.grad(dafjax.remat_compress(loss, store=store, **options)))


def _wrapped_in_arrays():
    return dafjax.remat_compress(networks.mlp_loss, store=Arrays(), policy=_policy(2))


def _scanned(f):
    """The loss of layers in a scan, wrapped as a whole."""

    def loss(p, x):
        def layer(x, p):
            return jnp.tanh(x @ p["w"] + p["b"]), None

        x, _ = jax.lax.scan(layer, x, jax.tree.map(lambda *a: jnp.stack(a), *p))
        return jnp.mean(x**2)

    return f(loss)


def _branching(f):
    def loss(p, x):
        return jax.lax.cond(
            jnp.max(x) > 0, networks.mlp_loss, lambda p, x: 2 * jnp.mean(x), p, x
        )

    return f(loss)


def _mapped(f):
    wrapped = f(networks.mlp_loss)
    return lambda p, x: jnp.mean(
        jax.vmap(wrapped, (None, 0))(p, x.reshape(4, -1, x.shape[-1]))
    )


def _mapped_branches(f):
    branching = _branching(f)
    return lambda p, x: jnp.mean(
        jax.vmap(branching, (None, 0))(p, x.reshape(4, -1, x.shape[-1]))
    )


def _in_a_scan(f):
    wrapped = f(networks.mlp)

    def loss(p, x):
        def body(carry, x):
            return carry + jnp.mean(wrapped(p, x) ** 2), None

        return jax.lax.scan(body, 0.0, x.reshape(4, -1, x.shape[-1]))[0]

    return loss


def _nested(f):
    inner = f(networks.mlp)
    return f(lambda p, x: jnp.mean(inner(p, x) ** 2))


def _rematerialized(f):
    return jax.checkpoint(f(networks.mlp_loss))


LOSSES = {
    "plain": lambda f: f(networks.mlp_loss),
    "scan inside": _scanned,
    "inside scan": _in_a_scan,
    "cond": _branching,
    "vmap": _mapped,
    "vmap of cond": _mapped_branches,
    "nested": _nested,
    "checkpoint outside": _rematerialized,
}


def _gradient_of(name, store):
    wrap = functools.partial(dafjax.remat_compress, store=store, policy=_policy(2))
    return jax.value_and_grad(LOSSES[name](wrap), argnums=(0, 1))


@functools.cache
def _with_arrays(name):
    """Returns an example, and its loss and gradients with residuals in arrays."""
    p, x = _example(jax.random.key(7))
    return p, x, jax.jit(_gradient_of(name, Arrays()))(p, x)


class TestNumbers:
    @pytest.mark.parametrize("name", ["plain", "vmap of cond", "nested"])
    def test_eager_gradients_equal_those_of_arrays_bit_for_bit(self, pool, name, key):
        p, x = _example(key)
        want = _gradient_of(name, Arrays())(p, x)
        _assert_same(_gradient_of(name, pool)(p, x), want)
        assert pool.stats().total_entries > 0

    @pytest.mark.parametrize(
        ("bits", "blocks", "dtype"),
        [
            (1, "rows", "float32"),
            (2, "rows", "bfloat16"),
            (4, "rows", "float16"),
            (8, "rows", "float32"),
            (1, "columns", "float16"),
            (2, "columns", "float32"),
            (4, "columns", "float32"),
            (8, "columns", "bfloat16"),
        ],
    )
    def test_every_code_is_that_of_arrays(self, pool, bits, blocks, dtype, key):
        p, x = jax.tree.map(lambda a: a.astype(dtype), _example(key, batch=300))
        policy = _policy(bits, blocks)
        want = _gradient(Arrays(), policy=policy)(p, x)
        _assert_same(_gradient(pool, policy=policy)(p, x), want)
        assert {s.bits_put for s in pool.stats().sites.values()} == {bits}

    def test_convolutions_with_masks_and_columns(self, pool, key, stochastic):
        p, x = networks.conv_example(key)
        options = {"bits": 2, "loss": networks.conv_loss, "policy": None}
        want = _gradient(Arrays(), **options)(p, x)
        _assert_same(_gradient(pool, **options)(p, x), want)

    @pytest.mark.parametrize("value", [jnp.nan, jnp.inf])
    def test_values_that_are_not_finite_come_through(self, pool, value, key):
        p, x = _example(key)
        x = x.at[3, 4].set(value)
        _assert_same(_gradient(pool)(p, x), _gradient(Arrays())(p, x))

    def test_empty_arrays_come_through(self, pool):
        codec = pool.codec(Affine(), site="empty")
        x = jnp.zeros((0, 3))
        handle = codec.encode(x)
        assert codec.decode(handle, jax.ShapeDtypeStruct(x.shape, x.dtype)).size == 0

    def test_sites_are_named_as_in_the_table_of_residuals(self, pool, key):
        p, x = _example(key)
        loss = dafjax.remat_compress(networks.mlp_loss, store=pool, policy=_policy(2))
        table = str(dafjax.saved_residuals(loss, p, x))
        jax.jit(jax.grad(loss))(p, x)
        assert pool.sites
        assert pool.stats().sites.keys() <= set(pool.sites)
        for site in pool.sites:
            assert site.partition(" ")[0] in table

    def test_three_bits_masks_and_small_arrays_stay_in_arrays(self, pool, key):
        p, x = networks.conv_example(key)
        options = {"loss": networks.conv_loss, "policy": _policy(3)}
        want = _gradient(Arrays(), **options)(p, x)
        _assert_same(_gradient(pool, **options)(p, x), want)
        assert pool.stats().total_entries == 0

    def test_two_devices_in_turn(self, pool, key):
        gradient = _gradient(pool)
        want = _gradient(Arrays())(*_example(key))
        for device in [*jax.devices()[:2]] * 2:
            got = gradient(*jax.device_put(_example(key), device))
            _assert_same(got, want)

    @pytest.mark.parametrize("inside", [False, True])
    def test_shard_map_puts_what_each_device_has(self, pool, inside, key):
        p, x = _example(key)
        mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
        rows = PartitionSpec("data")

        def divided(store):
            loss = dafjax.remat_compress(
                networks.mlp_loss, store=store, policy=_policy(2)
            )
            total = lambda p, x: jax.lax.pmean(loss(p, x), "data")
            specs = {
                "mesh": mesh,
                "in_specs": (PartitionSpec(), rows),
                "out_specs": PartitionSpec(),
            }
            if inside:
                return jax.jit(jax.shard_map(jax.grad(total), **specs))
            return jax.jit(jax.grad(jax.shard_map(total, **specs)))

        gradient = divided(pool)
        x = jax.device_put(x, NamedSharding(mesh, rows))
        for _ in range(3):
            _assert_same(gradient(p, x), divided(Arrays())(p, x))
        stats = pool.stats()
        # Two residuals on each of two devices, of the execution that is not over.
        assert stats.live_entries == 2 * 2
        assert stats.total_entries == 3 * 2 * 2

    def test_two_pools(self, pool, key, request):
        p, x = _example(key)
        with PagePool(name=f"other {request.node.name}") as other:

            def loss(store):
                return dafjax.remat_compress(
                    networks.mlp_loss, store=store, policy=_policy(2)
                )

            both = jax.jit(jax.grad(lambda p, x: loss(pool)(p, x) + loss(other)(p, x)))
            want = jax.jit(
                jax.grad(lambda p, x: loss(Arrays())(p, x) + loss(Arrays())(p, x))
            )
            _assert_same(both(p, x), want(p, x))
            assert pool.stats().entries == other.stats().entries > 0


class TestAtRunTime:
    def test_bits_change_without_compiling_anything(self, pool, key):
        p, x = _example(key)
        gradient = _gradient(pool, bits=8)
        _assert_same(gradient(p, x), _gradient(Arrays(), bits=8)(p, x))
        for bits in [4, 2, 1, 8, 2, None]:
            pool.set_bits("*", bits)
            want = _gradient(Arrays(), bits=bits or 8)(p, x)
            _assert_same(gradient(p, x), want)
        assert gradient._cache_size() == 1

    def test_bits_may_exceed_those_of_the_codec(self, pool, key):
        p, x = _example(key)
        gradient = _gradient(pool, bits=2)
        want = jax.block_until_ready(gradient(p, x))
        pool.set_bits("*", 8)
        _assert_same(gradient(p, x), _gradient(Arrays(), bits=8)(p, x))
        pool.set_bits("*", None)
        _assert_same(gradient(p, x), want)

    def test_bits_of_a_site_that_is_not_there(self, pool):
        with pytest.raises(ValueError, match=r"`sites` must be .*'conv'.*none yet"):
            pool.set_bits("conv", 2)

    def test_a_budget_is_obeyed_and_costs_accuracy_not_steps(self, pool, key):
        # Large enough that pages, not their rounding, decide.
        p, x = _example(key, batch=2048, widths=(256, 512, 512, 512))
        gradient = _gradient(pool, bits=8)
        exact = jax.jit(jax.grad(networks.mlp_loss))(p, x)
        jax.block_until_ready(gradient(p, x))
        needed = pool.stats().pages_used * pool.stats().page_nbytes
        assert needed > 20 * 2**16
        errors = []
        for share in np.linspace(1.0, 0.15, 12):
            pool.budget = budget = int(needed * share)
            got = jax.block_until_ready(gradient(p, x))
            assert pool.stats().committed_nbytes <= budget
            errors.append(_distance(got, exact))
        assert gradient._cache_size() == 1
        assert np.isfinite(errors).all()
        assert errors[-1] > 5 * errors[0]
        # Monotone but for noise.
        assert all(b > 0.8 * a for a, b in itertools.pairwise(errors))
        pool.budget = None
        assert _distance(gradient(p, x), exact) == pytest.approx(errors[0], rel=0.1)

    @pytest.mark.parametrize("parts", [1, 2])
    def test_a_budget_for_scales_and_minima_alone_gives_means(self, pool, key, parts):
        p, x = _example(key, batch=2048, widths=(256, 512, 512))
        gradient = _gradient(pool, bits=8, max_parts=parts)
        jax.block_until_ready(gradient(p, x))
        nbytes = pool.stats().nbytes
        pool.budget = int(0.1 * nbytes)
        got = jax.block_until_ready(gradient(p, x))
        assert 0 in {s.bits_kept for s in pool.stats().sites.values()}
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(got))

    def test_a_budget_that_cannot_even_hold_those_is_a_clear_error(self, pool, key):
        p, x = _example(key, batch=2048, widths=(256, 512, 512))
        gradient = _gradient(pool, bits=8)
        pool.budget = 2**16
        message = r"RESOURCE_EXHAUSTED: .*pool_put: the page pool cannot hold .*budget"
        for _ in range(3):
            with pytest.raises(jax.errors.JaxRuntimeError, match=message):
                jax.block_until_ready(gradient(p, x))
        pool.budget = None
        # Of arrays sums are taken in parts.
        assert _distance(gradient(p, x), _gradient(Arrays(), bits=8)(p, x)) < 1e-6

    def test_a_put_and_its_get_vanish_where_nothing_uses_them(self, pool, key):
        codec = pool.codec(Affine(), site="x")
        x = jax.random.normal(key, (512,))

        @jax.jit
        def f(x):
            codec.decode(codec.encode(x), jax.ShapeDtypeStruct(x.shape, x.dtype))
            return x + 1

        jax.block_until_ready(f(x))
        assert pool.stats().total_entries == 0


def _distance(got, want):
    flat = [
        np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])
        for tree in (got, want)
    ]
    return float(np.linalg.norm(flat[0] - flat[1]) / np.linalg.norm(flat[1]))


class TestLifetimes:
    """After a step, only its own residuals are alive."""

    @pytest.fixture
    def loss(self, pool):
        return dafjax.remat_compress(networks.mlp_loss, store=pool, policy=_policy(2))

    @pytest.fixture
    def check(self, pool, loss, key):
        """Runs one more step: right, and its entries are the only ones alive."""
        p, x = _example(key)
        want = _gradient(Arrays())(p, x)
        step = jax.jit(jax.grad(loss))

        def run():
            before = pool.stats()
            _assert_same(step(p, x), want)
            stats = pool.stats()
            assert stats.live_entries == stats.total_entries - before.total_entries > 0
            # One increment of growth serves all that went before.
            assert stats.growths == 1

        return run

    def test_a_vjp_that_is_never_called(self, loss, check, key):
        p, x = _example(key)
        for _ in range(50):
            # The check must come after the allocations.
            jax.block_until_ready(jax.vjp(loss, p, x)[0])
        check()

    def test_a_vjp_that_is_called_twice(self, loss, check, key):
        p, x = _example(key)

        @jax.jit
        def twice(p, x):
            y, pullback = jax.vjp(loss, p, x)
            return pullback(jnp.ones_like(y)), pullback(2 * jnp.ones_like(y))

        for _ in range(5):
            once, double = twice(p, x)
            _assert_same(jax.tree.map(lambda a: 2 * a, once), double)
        check()

    def test_a_vjp_that_is_called_twice_eagerly(self, loss, check, key):
        p, x = _example(key)
        y, pullback = jax.vjp(loss, p, x)
        _assert_same(pullback(jnp.ones_like(y)), pullback(jnp.ones_like(y)))
        check()

    def test_jacrev(self, pool, check, key):
        p, x = _example(key)
        options = {"policy": _policy(2)}
        jacobians = [
            jax.jit(jax.jacrev(dafjax.remat_compress(f, store=store, **options)))(p, x)
            for f in [lambda p, x: networks.mlp(p, x).mean(0)]
            for store in (pool, Arrays())
        ]
        _assert_same(*jacobians)
        check()

    def test_programs_in_turn(self, pool, loss, check, key):
        # Run ids rise within a program only: the order of programs is another.
        p, x = _example(key)
        steps = [
            jax.jit(jax.grad(lambda p, x, n=n: n * loss(p, x))) for n in range(1, 7)
        ]
        for step in (*steps, *reversed(steps)):
            executions = pool.stats().executions
            jax.block_until_ready(step(p, x))
            assert pool.stats().executions == executions + 1
        check()

    def test_hoisted_loop_invariants(self, loss, check, key):
        p, x = _example(key)

        @jax.jit
        def repeated(p, x):
            def body(total, scale):
                y, pullback = jax.vjp(loss, p, x)
                gradient, _ = pullback(scale * jnp.ones_like(y))
                return jax.tree.map(jnp.add, total, gradient), None

            zeros = jax.tree.map(jnp.zeros_like, p)
            return jax.lax.scan(body, zeros, jnp.arange(1.0, 9.0))[0]

        for _ in range(3):
            got = repeated(p, x)
        want, _ = jax.jit(jax.grad(loss, (0, 1)))(p, x)
        jax.tree.map(
            functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6),
            got,
            jax.tree.map(lambda a: 36 * a, want),
        )
        check()

    def test_200_failing_steps(self, loss, check, key):
        p, x = _example(key)

        def fail(x):
            raise ValueError("fails on purpose")

        @jax.jit
        def failing(p, x):
            y, pullback = jax.vjp(loss, p, x)
            y = jax.pure_callback(fail, jax.ShapeDtypeStruct((), y.dtype), y)
            return pullback(y)

        for _ in range(200):
            with pytest.raises(jax.errors.JaxRuntimeError, match="fails on purpose"):
                jax.block_until_ready(failing(p, x))
        check()

    def test_20_interrupts(self, loss, check, key):
        p, x = _example(key)
        step = jax.jit(jax.grad(loss))
        step(p, x)
        # A shell that starts the tests in the background has it ignored.
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            for _ in range(20):
                step(p, x)
                with pytest.raises(KeyboardInterrupt):
                    signal.raise_signal(signal.SIGINT)
        finally:
            signal.signal(signal.SIGINT, before)
        # Those before are over when this one is.
        jax.block_until_ready(step(p, x))
        check()

    def test_6_executions_in_flight(self, loss, check, key):
        p, x = _example(key, batch=2048)
        step = jax.jit(jax.grad(loss))
        want = jax.block_until_ready(step(p, x))
        for got in [step(p, x) for _ in range(6)]:
            _assert_same(got, want)
        p, x = _example(key)
        check()

    def test_two_threads_that_dispatch(self, key, request):
        p, x = _example(key, batch=512, widths=(64, 256, 256))
        want = _gradient(Arrays())(p, x)
        with PagePool(name=request.node.name, executions_in_flight=4) as pool:
            step = _gradient(pool)
            step(p, x)
            failures = []

            def work():
                try:
                    for _ in range(40):
                        _assert_same(step(p, x), want)
                except BaseException as error:
                    failures.append(error)

            threads = [threading.Thread(target=work) for _ in range(2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert not failures
            assert pool.stats().live_entries <= 5 * len(pool.sites)

    @pytest.mark.parametrize("name", LOSSES)
    def test_nothing_is_live_when_a_step_is_done_and_collected(self, name, pool):
        """The step equals the step with arrays, bit for bit."""
        p, x, want = _with_arrays(name)
        step = jax.jit(_gradient_of(name, pool))
        for _ in range(3):
            got = jax.block_until_ready(step(p, x))
            assert pool.stats().live_entries > 0
            pool.collect()
            stats = pool.stats()
            assert (stats.live_entries, stats.entries, stats.committed_nbytes) == (
                0,
            ) * 3
            _assert_same(got, want)

    def test_nothing_is_live_after_an_eager_step(self, loss, pool, key):
        p, x = _example(key)
        for argnums in (0, 1, (0, 1)):
            jax.block_until_ready(jax.grad(loss, argnums)(p, x))
            pool.collect()
            assert pool.stats().entries == 0

    def test_nothing_is_live_after_a_step_in_parts(self, pool, key):
        p, x = _example(key, batch=8192, widths=(256, 1024, 1024))
        jax.block_until_ready(_gradient(pool)(p, x))
        # Each part is an entry.
        assert pool.stats().live_entries > len(pool.sites)
        pool.collect()
        assert pool.stats().entries == 0

    def test_a_pullback_that_has_yet_to_be_called_works_after_collect(
        self, loss, pool, key
    ):
        p, x = _example(key)
        want = jax.vjp(_wrapped_in_arrays(), p, x)[1](1.0)
        _, pullback = jax.block_until_ready(jax.vjp(loss, p, x))
        for _ in range(3):
            pool.collect()
        assert pool.stats().live_entries > 0
        _assert_same(pullback(1.0), want)
        # Twice, as long as nothing is collected between.
        _assert_same(jax.block_until_ready(pullback(1.0)), want)
        pool.collect()
        assert pool.stats().entries == 0

    def test_a_pullback_after_what_it_read_was_collected_is_a_clear_error(
        self, loss, pool, key
    ):
        p, x = _example(key)
        _, pullback = jax.vjp(loss, p, x)
        jax.block_until_ready(pullback(1.0))
        pool.collect()
        message = (
            "FAILED_PRECONDITION: .*pool_get: the residual .* its backward pass has"
        )
        with pytest.raises(jax.errors.JaxRuntimeError, match=message):
            jax.block_until_ready(pullback(1.0))

    def test_collecting_while_steps_run_changes_nothing(self, pool, key):
        p, x = _example(key, batch=2048, widths=(64, 256, 256))
        # Sums over chunks are added in another order; pool entries have fewer chunks.
        step = _gradient(pool, max_parts=1)
        want = _gradient(Arrays(), max_parts=1)(p, x)
        results = []
        for _ in range(20):
            # Without waiting: some steps have read only part of their residuals.
            results.append(step(p, x))
            pool.collect()
        for got in results:
            _assert_same(got, want)

    def test_a_residual_that_is_gone_is_a_clear_error(self, loss, pool, key):
        p, x = _example(key)
        y, pullback = jax.block_until_ready(jax.vjp(loss, p, x))
        pool.__exit__(None, None, None)
        message = "FAILED_PRECONDITION: .*pool_get: the residual .* is gone"
        with pytest.raises(jax.errors.JaxRuntimeError, match=message):
            jax.block_until_ready(pullback(jnp.ones_like(y)))

    @pytest.mark.parametrize("name", LOSSES)
    def test_residuals_are_freed_when_their_backward_pass_has_run(self, name, request):
        p, x, want = _with_arrays(name)
        with PagePool(name=request.node.name, backward_once=True) as pool:
            _assert_same(jax.jit(_gradient_of(name, pool))(p, x), want)
            stats = pool.stats()
            assert stats.total_entries > 0
            assert stats.nbytes < 0.6 * stats.peak_nbytes

    def test_a_loop_over_micro_batches_needs_the_memory_of_one(self, key, request):
        p, x = _example(key, batch=4 * 512)

        def accumulated(store):
            gradient = jax.grad(
                dafjax.remat_compress(networks.mlp_loss, store=store, policy=_policy(8))
            )

            def body(total, x):
                return jax.tree.map(jnp.add, total, gradient(p, x)), None

            zeros = jax.tree.map(jnp.zeros_like, p)
            parts = x.reshape(4, 512, -1)
            return jax.jit(lambda: jax.lax.scan(body, zeros, parts)[0])()

        want = accumulated(Arrays())
        peaks = []
        for backward_once in (False, True):
            name = f"{request.node.name} {backward_once}"
            with PagePool(name=name, backward_once=backward_once) as pool:
                _assert_same(accumulated(pool), want)
                peaks.append(pool.stats().peak_nbytes)
        assert peaks[1] == peaks[0] / 4

    def test_a_second_backward_pass_is_a_clear_error_then(self, key, request):
        p, x = _example(key)
        with PagePool(name=request.node.name, backward_once=True) as pool:
            loss = dafjax.remat_compress(
                networks.mlp_loss, store=pool, policy=_policy(2)
            )
            y, pullback = jax.vjp(loss, p, x)
            jax.block_until_ready(pullback(jnp.ones_like(y)))
            with pytest.raises(
                jax.errors.JaxRuntimeError, match="its backward pass has run"
            ):
                jax.block_until_ready(pullback(jnp.ones_like(y)))

    def test_eager_blocks_give_the_numbers_of_arrays(self, key, request, stochastic):
        """Each block is an execution: none may be over before its backward pass."""
        p, x = networks.conv_example(key, depth=2)

        def gradient(store):
            wrap = functools.partial(
                dafjax.remat_compress, store=store, activation_argnums=1
            )
            loss = functools.partial(networks.conv_loss, wrap_block=wrap)
            return jax.grad(loss)(p, x)

        want = gradient(Arrays())
        with PagePool(name=request.node.name, executions_in_flight=2) as pool:
            for _ in range(3):
                _assert_same(jax.block_until_ready(gradient(pool)), want)

    def test_a_pool_that_does_not_exist_any_more(self, key, request):
        _, x = _example(key)
        pool = PagePool(name=request.node.name)
        codec = pool.codec(Affine(), site="x")
        del pool
        with pytest.raises(jax.errors.JaxRuntimeError, match="does not exist in this"):
            jax.block_until_ready(codec.encode(x))

    def test_a_child_of_fork_starts_empty(self):
        program = """
import os, warnings
import jax, jax.numpy as jnp
import dafjax
pool = dafjax.stores.PagePool(name="forked")
f = dafjax.remat_compress(lambda x: jnp.sum(jnp.sin(x @ x)), store=pool)
jax.block_until_ready(jax.jit(jax.grad(f))(jnp.ones((128, 128))))
assert pool.stats().entries > 0
warnings.simplefilter("ignore")
child = os.fork()
if child == 0:
    os._exit(pool.stats().entries)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert pool.stats().entries > 0
"""
        run_python(program)


class TestRefusals:
    def test_programs_that_are_divided_among_devices(self, pool, key):
        p, x = _example(key)
        mesh = jax.make_mesh((2,), ("data",), (AxisType.Auto,))
        x = jax.device_put(x, NamedSharding(mesh, PartitionSpec("data")))
        with pytest.raises(NotImplementedError, match=r"dafjax\.stores\.Arrays\(\)"):
            _gradient(pool)(p, x)

    def test_other_platforms(self, pool, key):
        p, x = _example(key)
        gradient = _gradient(pool)
        with pytest.raises(NotImplementedError, match=r"dafjax\.stores\.Arrays\(\)"):
            gradient.trace(p, x).lower(lowering_platforms=("tpu",))

    def test_second_derivatives(self, pool, key):
        p, x = _example(key)
        loss = dafjax.remat_compress(networks.mlp_loss, store=pool, policy=_policy(2))
        with pytest.raises(NotImplementedError, match="first-order"):
            jax.grad(lambda p: jnp.sum(jax.grad(loss)(p, x)[0]["b"]))(p)

    def test_a_handle_that_this_pool_did_not_make(self, pool):
        codec = pool.codec(Affine(), site="forged")
        forged = jnp.asarray([[1, 2, 3, 4]], jnp.uint32)
        like = jax.ShapeDtypeStruct((512,), jnp.float32)
        with pytest.raises(jax.errors.JaxRuntimeError, match="this is no handle of"):
            jax.block_until_ready(codec.decode(forged, like))

    def test_a_handle_of_an_array_of_another_size(self, pool, key):
        codec = pool.codec(Affine(), site="x")
        handle = codec.encode(jax.random.normal(key, (4, 512)))
        like = jax.ShapeDtypeStruct((5, 512), jnp.float32)
        with pytest.raises(jax.errors.JaxRuntimeError, match="an entry of 4 tiles"):
            jax.block_until_ready(codec.decode(handle, like))
