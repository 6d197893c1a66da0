"""`dafjax.jit` keeps to its target, puts bits where they matter, compiles seldom."""

import functools
import math
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax._src.core import jaxprs_in_params
from jax.sharding import NamedSharding, PartitionSpec

import dafjax
import dafjax.linen
import dafjax.nnx
from dafjax import _jit, allocation
from dafjax._native import _cpu, _pool, ledger_note, pool_hash
from dafjax.allocation import LADDER, Demand, Measured, better_bits, first_bits
from dafjax.stores import Arrays, Host, PagePool
from tests.helpers import persistent_cache, run_python


WIDTH, ROWS = 64, 512
# Elements of a layer's output; a tile is 512.
SIZE = WIDTH * ROWS


def two_branches(params, x, weights):
    """Two products whose gradients matter as much as they weigh."""
    return sum(
        weight * jnp.mean((x @ w) ** 2)
        for w, weight in zip(params, weights, strict=True)
    )


def relu_loss(params, x):
    for w in params:
        x = jax.nn.relu(x @ w)
    return jnp.mean(x**2)


@pytest.fixture
def example(key):
    keys = jax.random.split(key, 3)
    params = [jax.random.normal(k, (WIDTH, WIDTH)) / 8 for k in keys[:2]]
    return params, jax.random.normal(keys[2], (ROWS, WIDTH))


def wrapped(loss, target, **options):
    return dafjax.remat_compress(loss, bits=target, **options)


def adaptive_gradient(loss, target, **options):
    return dafjax.jit(jax.grad(wrapped(loss, target)), **options)


def run(step, arguments, times):
    for _ in range(times):
        result = step(*arguments)
    return jax.block_until_ready(result)


def error(got, want):
    difference = sum(
        jnp.sum((a - b) ** 2)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    )
    return float(difference / sum(jnp.sum(b**2) for b in jax.tree.leaves(want)))


def codes_in(closed):
    """Returns the bytes and the number of arrays of affine codes in a program."""
    nbytes = count = 0
    stack = [closed.jaxpr]
    while stack:
        for eqn in stack.pop().eqns:
            if eqn.primitive.name == "dafjax_pack_affine":
                nbytes += sum(v.aval.size * v.aval.dtype.itemsize for v in eqn.outvars)
                count += 1
            stack += jaxprs_in_params(eqn.params)
    return nbytes, count


WEIGHTS = (jnp.float32(1e-2), jnp.float32(1.0))


@pytest.mark.parametrize("bits", [1.5, 5])
def test_the_average_is_obeyed_and_what_matters_has_more_bits(example, bits):
    step = adaptive_gradient(two_branches, dafjax.AverageBits(bits))
    arguments = (*example, WEIGHTS)
    step(*arguments)
    (floor,) = set(step.bits.values())
    assert floor == max(b for b in LADDER if b <= bits)
    run(step, arguments, 7)
    little, much = step.bits.values()
    assert little < much
    assert little + much <= 2 * bits
    assert step.num_compiles == 2


@pytest.mark.parametrize("nbytes", [12_000, 40_000])
def test_a_budget_in_bytes_is_met(example, nbytes):
    step = adaptive_gradient(two_branches, dafjax.Budget(nbytes))
    arguments = (*example, WEIGHTS)
    for _ in range(3):
        step(*arguments)
        assert codes_in(step.trace(*arguments).jaxpr) == (step.nbytes, 2)
        assert step.nbytes <= nbytes
    assert step.nbytes > nbytes / 2


def test_a_budget_that_is_too_small_says_what_is_needed(example):
    step = adaptive_gradient(two_branches, dafjax.Budget(9000))
    # 1/8 byte for a code, 1/64 for the scale and minimum of a group of 256, and a seed
    # for each row of 512.
    least = 2 * SIZE * 9 // 64 + 2 * SIZE // 512 * 4
    with pytest.raises(ValueError, match=f"Budget.*at least {least} bytes"):
        step(*example, WEIGHTS)


def test_a_ceiling_of_noise_holds_from_the_first_call(example):
    arguments = (*example, WEIGHTS)
    exact = jax.jit(jax.grad(two_branches))(*arguments)
    totals = []
    for ceiling in (1.0, 0.01):
        step = adaptive_gradient(two_branches, dafjax.NoiseCeiling(ceiling))
        errors = [error(step(*arguments), exact) for _ in range(9)]
        # The expected error is exact up to the shape of distributions.
        assert max(errors) < 4 * ceiling
        totals.append(sum(step.bits.values()))
    assert totals[0] < totals[1]


class TestNumberOfCompiles:
    def test_nothing_is_compiled_where_nothing_changes(self, example):
        traces = []

        def loss(params, x):
            traces.append(None)
            return relu_loss(params, x)

        step = adaptive_gradient(loss, dafjax.AverageBits(2))
        run(step, example, 9)
        compiled, traced = step.num_compiles, len(traces)
        run(step, example, 140)
        assert (step.num_compiles, len(traces)) == (compiled, traced)
        assert compiled <= 2

    def test_no_more_is_compiled_than_allowed(self, example):
        most = 3
        traces = []

        def loss(*arguments):
            traces.append(None)
            return two_branches(*arguments)

        step = adaptive_gradient(loss, dafjax.AverageBits(2.5), most_compiles=most)
        weights = WEIGHTS
        for call in range(1, 140):
            if _jit.is_reading(call):
                # From now on, measurements say the opposite.
                weights = weights[::-1]
            step(*example, weights)
        assert step.num_compiles == most
        # One trace before the first compile lists the residuals.
        assert len(traces) <= most + 1

    def test_it_is_read_eight_times_in_tens_of_thousands_of_calls(self):
        readings = [n for n in range(40_000) if _jit.is_reading(n)]
        assert readings == [2, 8, 32, 128, 512, 2048, 8192, 32768]

    def test_other_bits_must_be_better_by_a_tenth(self):
        demands = {1: Demand(1000, 0, 1, 8), 2: Demand(1000, 0, 1, 8)}
        now = {1: 4, 2: 2}
        # If the residuals swap their bits, the variance falls by 4 % and by 27 %.
        for ratio, expected in ((1.05, None), (1.3, {1: 2, 2: 4})):
            measured = Measured({1: 1.0, 2: ratio}, 1.0)
            got = better_bits(dafjax.AverageBits(3), demands, now, measured)
            assert got == expected

    def test_a_ceiling_that_holds_is_left_alone(self):
        demands = {1: Demand(1000, 0, 1, 8)}
        measured = Measured({1: 1.0}, 1.0)
        # With 2 bits the variance is 1/9 of the gradient's square.
        for ceiling, now, expected in (
            (0.12, 2, None),
            (0.12, 4, None),
            (0.13, 4, {1: 2}),
            (0.1, 2, {1: 4}),
        ):
            target = dafjax.NoiseCeiling(ceiling)
            assert better_bits(target, demands, {1: now}, measured) == expected

    def test_other_nonlinear_uses_have_two_bits_as_far_as_they_fit(self):
        asked = {1: 8, 2: 4, 3: 4, 4: 2}
        demands = {site: Demand(1000, 0, bits, 8) for site, bits in asked.items()}
        measured = Measured({1: 1e-9, 2: 1e-3, 3: 1.0, 4: 1e-2}, 1.0)
        for average, expected in (
            (14 / 4, (8, 2, 2, 2)),
            (13 / 4, (8, 2, 2, 1)),
            (12 / 4, (8, 1, 2, 1)),
            (11 / 4, (8, 1, 1, 1)),
        ):
            target = dafjax.AverageBits(average)
            now = first_bits(target, demands)
            better = better_bits(target, demands, now, measured)
            assert tuple((better or now).values()) == expected

    def test_minima_are_kept(self):
        demands = {1: Demand(1000, 0, 8, 8), 2: Demand(3000, 0, 1, 8)}
        measured = Measured({1: 1e-9, 2: 1.0}, 1.0)
        for average, expected in ((8, (8, 8)), (5, (8, 4)), (3.5, (8, 2)), (3, (8, 1))):
            target = dafjax.AverageBits(average)
            bits = first_bits(target, demands)
            assert tuple(bits.values()) == expected
            assert better_bits(target, demands, bits, measured) is None
        with pytest.raises(ValueError, match=r"at least 2.75 bits on average"):
            first_bits(dafjax.AverageBits(2.5), demands)

    def test_the_argument_of_an_exponential_has_eight_bits(self, key):
        def attention(weights, x):
            for w in weights:
                q, k, v = jnp.split(x @ w, 3, axis=-1)
                scores = jnp.einsum("btd,bsd->bts", q, k) / 8
                x = x + jax.nn.softmax(scores) @ v
            return jnp.mean(x**2)

        weights = [jax.random.normal(key, (64, 192)) / 8]
        x = jax.random.normal(key, (1, 1024, 64))
        with pytest.raises(ValueError, match=r"at least .* bits on average"):
            adaptive_gradient(attention, dafjax.AverageBits(2))(weights, x)
        step = adaptive_gradient(attention, dafjax.AverageBits(7))
        step.trace(weights, x)
        assert sorted(step.bits.values())[-1] == 8


class TestGradients:
    @staticmethod
    def unequal(params, x):
        total = 0.0
        for number, w in enumerate(params):
            x = jax.nn.relu(x @ w)
            # The later a layer, the less it matters.
            total += 4.0**-number * jnp.mean(x**2)
        return total

    @pytest.fixture
    def example(self, key):
        keys = jax.random.split(key, 6)
        params = [jax.random.normal(k, (64, 64)) / 6 for k in keys[1:5]]
        return params, jax.random.normal(keys[0], (512, 64))

    def errors(self, example):
        exact = jax.jit(jax.grad(self.unequal))(*example)
        step = adaptive_gradient(self.unequal, dafjax.AverageBits(2))
        uniform = error(step(*example), exact)
        return uniform, error(run(step, example, 8), exact)

    def test_the_error_falls_with_the_same_average(self, example):
        uniform, adapted = self.errors(example)
        assert adapted < 0.6 * uniform

    def test_the_error_grows_with_bits_where_they_matter_least(
        self, example, monkeypatch
    ):
        right = allocation.allocate

        def wrong(sites, budget):
            return right(sites, budget)[::-1]

        monkeypatch.setattr(allocation, "allocate", wrong)
        monkeypatch.setattr(allocation, "HYSTERESIS", -1)
        uniform, adapted = self.errors(example)
        assert adapted > uniform

    def test_the_first_program_is_that_of_the_same_number_of_bits(self, example):
        step = adaptive_gradient(self.unequal, dafjax.AverageBits(2))
        plain = jax.jit(jax.grad(wrapped(self.unequal, "tight")))
        for got, want in zip(step(*example), plain(*example), strict=True):
            np.testing.assert_array_equal(got, want)

    def test_the_compiled_program_is_as_small_as_with_the_same_average(self, example):
        step = adaptive_gradient(self.unequal, dafjax.AverageBits(2))
        temps = []
        for _ in range(2):
            memory = step.lower(*example).compile().memory_analysis()
            temps.append((memory.temp_size_in_bytes, step.nbytes))
            run(step, example, 9)
        (uniform, uniform_nbytes), (adapted, adapted_nbytes) = temps
        assert step.num_compiles == 2
        assert adapted_nbytes <= uniform_nbytes
        assert adapted <= 1.1 * uniform


class TestWhatIsTraced:
    def test_outside_of_it_the_error_says_what_to_do(self, example):
        loss = wrapped(relu_loss, dafjax.AverageBits(2))
        # Without differentiation there are no residuals.
        assert loss(*example) == relu_loss(*example)
        for gradient in (jax.grad(loss), jax.jit(jax.grad(loss))):
            with pytest.raises(ValueError, match=r"AverageBits.*dafjax\.jit.*PagePool"):
                gradient(*example)

    def test_it_is_the_outermost_transformation(self, example):
        step = adaptive_gradient(relu_loss, dafjax.AverageBits(2))
        for inside in (jax.jit(step), lambda *a: jax.vjp(step, *a)):
            with pytest.raises(ValueError, match="round the whole step"):
                inside(*example)
        assert step.eval_shape(*example)[0].shape == (WIDTH, WIDTH)

    def test_functions_that_are_compiled_inside_are_traced_anew(self, example):
        loss = jax.jit(wrapped(two_branches, dafjax.AverageBits(2.5)))
        step = dafjax.jit(jax.jit(jax.grad(loss)))
        arguments = (*example, WEIGHTS)
        run(step, arguments, 3)
        assert set(step.bits.values()) == {1, 4}
        assert codes_in(step.trace(*arguments).jaxpr) == (step.nbytes, 2)

    def test_a_function_that_keeps_a_trace_is_an_error(self, example):
        loss = wrapped(two_branches, dafjax.AverageBits(2.5))
        kept = []

        def step(*arguments):
            if not kept:
                kept.append(jax.make_jaxpr(jax.grad(loss))(*arguments))
            closed = kept[0]
            leaves = jax.tree.leaves(arguments)
            return jax.core.eval_jaxpr(closed.jaxpr, closed.consts, *leaves)

        step = dafjax.jit(step)
        step(*example, WEIGHTS)
        with pytest.raises(RuntimeError, match=r"dot_general.*jaxprs or pullbacks"):
            step(*example, WEIGHTS)

    def test_each_has_bits_and_measures_of_its_own(self, example):
        gradient = jax.grad(wrapped(two_branches, dafjax.AverageBits(2.5)))
        one, other = dafjax.jit(gradient), dafjax.jit(gradient)
        for _ in range(3):
            one(*example, WEIGHTS)
            other(*example, WEIGHTS[::-1])
        assert one.bits.keys() == other.bits.keys()
        assert list(one.bits.values()) == [1, 4]
        assert list(other.bits.values()) == [4, 1]

    def test_targets_are_met_one_by_one(self, example):
        params, x = example
        losses = [
            wrapped(functools.partial(two_branches, weights=WEIGHTS), target)
            for target in (dafjax.AverageBits(2.5), dafjax.AverageBits(1))
        ]
        step = dafjax.jit(
            jax.grad(lambda params, x: sum(loss(params, x) for loss in losses))
        )
        run(step, (params, x), 3)
        (program,) = step._programs.values()
        bits = {}
        for site, fact in program.adaptive.facts.items():
            bits.setdefault(fact.target.bits, []).append(program.adaptive.bits[site])
        assert {target: sorted(found) for target, found in bits.items()} == {
            2.5: [1, 4],
            1: [1, 1],
        }

    def test_other_shapes_have_bits_of_their_own(self, example):
        params, x = example
        step = adaptive_gradient(two_branches, dafjax.Budget(20_000))
        for _ in range(4):
            step(params, x, WEIGHTS)
            step(params, x[:128], WEIGHTS)
        assert len(step.bits) == 4
        large, small = step._programs.values()
        assert (
            sum(large.adaptive.bits.values()) < sum(small.adaptive.bits.values()) == 16
        )
        assert step.nbytes <= 20_000

    def test_static_and_donated_arguments(self, example):
        @functools.partial(dafjax.jit, static_argnames="power", donate_argnums=0)
        def step(params, x, *, power):
            def loss(params, x):
                return jnp.mean(relu_loss(params, x) ** power)

            return jax.tree.map(
                lambda w, g: w - 0.1 * g,
                params,
                jax.grad(wrapped(loss, dafjax.AverageBits(2.5)))(params, x),
            )

        params, x = example
        for _ in range(3):
            before, params = params, step(params, x, power=2)
            assert all(w.is_deleted() for w in before)
        step(params, x, power=3)
        assert len(step._programs) == 2

    def test_methods_are_bound(self, example):
        class Trainer:
            @functools.partial(dafjax.jit, static_argnums=0)
            def step(self, params, x):
                return jax.grad(wrapped(relu_loss, dafjax.AverageBits(2)))(params, x)

        assert Trainer().step(*example)[0].shape == (WIDTH, WIDTH)

    def test_without_targets_it_is_jit(self, example):
        step = dafjax.jit(jax.grad(wrapped(relu_loss, 2)))
        want = jax.jit(jax.grad(wrapped(relu_loss, 2)))(*example)
        for got, exact in zip(run(step, example, 3), want, strict=True):
            np.testing.assert_array_equal(got, exact)
        assert step.bits == {}
        assert step.num_compiles == 1


class TestLiveBytes:
    """The largest number of bytes of codes that are live at a time."""

    def nbytes(self, fun, *arguments):
        step = dafjax.jit(fun)
        step.trace(*arguments)
        return step.nbytes

    def test_iterations_of_a_loop_are_stacked(self, example):
        _, x = example
        w = jnp.ones((6, WIDTH, WIDTH))

        def scanned(w, x):
            return jnp.mean(jax.lax.scan(lambda x, w: (jnp.sin(x @ w), None), x, w)[0])

        gradient = jax.grad(wrapped(scanned, dafjax.AverageBits(2)))
        two, six = (self.nbytes(gradient, w[:n], x) for n in (2, 6))
        # An input and an output: 2 bits, 1/8 for scales and minima, and a seed for each
        # row.
        assert two == 2 * 2 * (SIZE * 2.125 / 8 + SIZE / 512 * 4)
        assert six == 3 * two

    def test_blocks_in_a_loop_of_the_user_are_stacked(self, example):
        _, x = example
        w = jnp.ones((6, WIDTH, WIDTH))
        block = wrapped(
            lambda x, w: jnp.sin(x @ w), dafjax.AverageBits(2), activation_argnums=0
        )

        def scanned(w, x):
            return jnp.mean(jax.lax.scan(lambda x, w: (block(x, w), None), x, w)[0])

        two, six = (self.nbytes(jax.grad(scanned), w[:n], x) for n in (2, 6))
        assert six == 3 * two > 0

    def test_micro_batches_follow_each_other(self, example):
        params, x = example
        gradient = jax.grad(wrapped(relu_loss, dafjax.AverageBits(2)))

        def accumulated(params, x):
            def add(total, part):
                return jax.tree.map(jnp.add, total, gradient(params, part)), None

            zeros = jax.tree.map(jnp.zeros_like, params)
            return jax.lax.scan(add, zeros, x.reshape(4, -1, WIDTH))[0]

        whole = self.nbytes(gradient, params, x)
        assert self.nbytes(accumulated, params, x) == whole / 4

    def test_examples_that_are_mapped_count_each(self, example):
        params, x = example
        gradient = jax.grad(wrapped(relu_loss, dafjax.AverageBits(2)))
        mapped = jax.vmap(gradient, in_axes=(None, 0))
        one = self.nbytes(gradient, params, x[:128])
        assert self.nbytes(mapped, params, x.reshape(4, 128, WIDTH)) == 4 * one

    def test_equal_blocks_count_each(self, example):
        params, x = example
        block = wrapped(
            lambda x, w: jnp.sin(x @ w), dafjax.AverageBits(2), activation_argnums=0
        )

        def loss(params, x, repeats):
            for w in params * repeats:
                x = block(x, w)
            return jnp.mean(x)

        one, three = (
            self.nbytes(jax.grad(functools.partial(loss, repeats=n)), params, x)
            for n in (1, 3)
        )
        # The input of the first block is the argument, which is saved once.
        assert three > 2.5 * one


class TestScans:
    def test_bits_inside_and_outside_of_a_scan_change(self, example):
        params, x = example
        w = jnp.stack([params[0]] * 3)

        def loss(w, v, x):
            y = jnp.sin(x @ v[0])
            y, _ = jax.lax.scan(lambda y, w: (jnp.sin(y @ w), None), y, w)
            return 1e-2 * jnp.mean(y**2) + jnp.mean((x @ v[1]) ** 2)

        gradient = jax.grad(wrapped(loss, dafjax.AverageBits(2.5)), argnums=(0, 1))
        step = dafjax.jit(gradient)
        run(step, (w, params, x), 3)
        assert step.num_compiles == 2
        assert len(set(step.bits.values())) > 1


def test_another_process_finds_all_programs_in_the_persistent_cache(tmp_path):
    program = """
        import jax, jax.numpy as jnp
        from jax import monitoring
        import dafjax
        from tests.test_adaptive import WEIGHTS, adaptive_gradient, two_branches

        misses = []
        monitoring.register_event_listener(
            lambda name, **_: misses.append(name) if "cache_misses" in name else None
        )
        keys = jax.random.split(jax.random.key(0), 3)
        params = [jax.random.normal(k, (64, 64)) / 8 for k in keys[:2]]
        arguments = (params, jax.random.normal(keys[2], (512, 64)), WEIGHTS)
        step = adaptive_gradient(two_branches, dafjax.AverageBits(2.5))
        misses.clear()
        for _ in range(3):
            gradient = step(*arguments)
        print(step.num_compiles, len(misses), float(sum(map(jnp.sum, gradient))))
    """
    environment = persistent_cache(tmp_path)
    first, second = (run_python(program, **environment).split() for _ in range(2))
    assert (first[0], second[0]) == ("2", "2")
    assert int(first[1]) >= 2
    assert second[1] == "0"
    assert first[2] == second[2]


# With so many residuals, a thread holds the lock of the ledger most of the time.
FORK = """
import os, signal, threading
from dafjax._native import _cpu
ledger = _cpu.Ledger("forked", list(range(100_000)))
over = threading.Event()
def work():
    while not over.is_set():
        ledger.take()
thread = threading.Thread(target=work)
thread.start()
for _ in range(20):
    child = os.fork()
    if child == 0:
        signal.alarm(30)
        assert len(ledger.take()["importances"]) == 100_000
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
over.set()
thread.join()
"""


class TestMeasures:
    def test_nan_never_enters(self, example):
        params, x = example
        step = adaptive_gradient(two_branches, dafjax.AverageBits(2.5))
        for bad in (jnp.nan, jnp.inf, -jnp.inf, 3e38):
            run(step, (params, x.at[0, 0].set(bad), WEIGHTS), 7)
            (program,) = step._programs.values()
            taken = program.adaptive.ledger.take()
            assert all(np.isfinite(c) for c in taken["importances"].values())
        # The next reading is before the 32nd call.
        run(step, (params, x, WEIGHTS), 4)
        assert sorted(step.bits.values()) == [1, 4]

    # The second one is for GPUs: a callback on the host.
    @pytest.mark.parametrize("call", [ledger_note, _pool._note_by_callback])
    def test_a_ledger_refuses_numbers_that_are_no_importance(self, call):
        ledger = _cpu.Ledger("a ledger for a test", [1, 2])
        note = jax.jit(
            functools.partial(
                call,
                ledger=pool_hash("a ledger for a test"),
                sites=(1, 2, 3),
                facts=(None,) * 3,
            )
        )
        for row in ([1, 2, 3, 4], [np.nan, 1, 1, 1], [-1, np.inf, 1, -np.inf]):
            note(jnp.array(row, jnp.float32)).block_until_ready()
        assert ledger.take() == {
            "importances": {1: 1.0, 2: 3.0},
            "gradient_energy": 5.0,
            "notes": 3,
            "refused": 4,
        }
        assert ledger.take()["notes"] == 0
        with pytest.raises(ValueError, match="name"):
            _cpu.Ledger("a ledger for a test", [])
        del ledger
        # A note without a ledger is dropped.
        note(jnp.zeros(4)).block_until_ready()

    def test_an_outlier_does_not_outweigh_all_others(self):
        ledger = _cpu.Ledger("a ledger with an outlier", [1])
        note = jax.jit(
            functools.partial(
                ledger_note,
                ledger=pool_hash("a ledger with an outlier"),
                sites=(1,),
                facts=(None,),
            )
        )
        ordinary, spoiled = [3.0, 5.0], [1e27, 1e30]
        rows = [ordinary] * 4 + [spoiled] + [ordinary] * 3
        note(jnp.array(rows)).block_until_ready()
        taken = ledger.take()
        # An outlier counts as 8 times the mean.
        assert taken["importances"] == {1: pytest.approx(3 * (7 + 8))}
        assert taken["gradient_energy"] == pytest.approx(5 * (7 + 8))
        # The mean survives a reading.
        note(jnp.array([spoiled])).block_until_ready()
        assert ledger.take()["importances"][1] < 3 * 8 * 2

    def test_a_forked_child_does_not_wait_for_threads_of_its_parent(self):
        assert run_python(FORK) == "0\n" * 20

    def test_a_pool_measures_the_same(self, example, stochastic):
        arguments = (*example, WEIGHTS)
        # A pool, too, begins with 2 bits, because all uses are linear.
        step = adaptive_gradient(two_branches, dafjax.AverageBits(2))
        jax.block_until_ready(step(*arguments))
        (program,) = step._programs.values()
        taken = program.adaptive.ledger.take()
        got = {
            fact.name: taken["importances"][site]
            for site, fact in program.adaptive.facts.items()
        }
        with PagePool() as pool:
            pooled = dafjax.remat_compress(
                two_branches, bits=dafjax.AverageBits(4), store=pool
            )
            run(jax.jit(jax.grad(pooled)), arguments, 2)
            stats = pool.stats()
        want = {name: site.importance for name, site in stats.sites.items()}
        assert got.keys() == want.keys()
        for name, importance in want.items():
            assert got[name] == pytest.approx(importance, rel=1e-3)
        energy = pytest.approx(stats.gradient_energy, rel=1e-3)
        assert taken["gradient_energy"] == energy

    def test_on_two_devices_bits_are_the_same(self, example):
        params, x = example
        mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
        divided = jax.device_put(x, NamedSharding(mesh, PartitionSpec("data")))
        whole = jax.device_put(params, NamedSharding(mesh, PartitionSpec()))
        one, two = (
            adaptive_gradient(two_branches, dafjax.AverageBits(2.5)) for _ in range(2)
        )
        run(one, (params, x, WEIGHTS), 3)
        run(two, (whole, divided, WEIGHTS), 3)
        assert list(one.bits.values()) == list(two.bits.values()) == [1, 4]
        text = two.lower(whole, divided, WEIGHTS).compile().as_text()
        assert "all-reduce" in text
        for found in re.findall(r"= \(?\w+\[([\d,]*)\]\S* all-(?:gather|to-all)", text):
            assert math.prod(map(int, found.split(","))) <= 2 * 8192


class TestOtherApis:
    def test_codes_in_host_memory(self, example):
        loss = wrapped(two_branches, dafjax.AverageBits(2.5), store=Host())
        step = dafjax.jit(jax.grad(loss))
        run(step, (*example, WEIGHTS), 3)
        assert sorted(step.bits.values()) == [1, 4]

    def test_linen_blocks(self, example):
        class Block(nn.Module):
            @nn.compact
            def __call__(self, x):
                return x + nn.relu(nn.Dense(WIDTH)(x))

        class Model(nn.Module):
            block: type[nn.Module]

            @nn.compact
            def __call__(self, x):
                return self.block(name="b")(self.block(name="a")(x))

        def loss(block, variables):
            return jnp.mean(Model(block).apply(variables, x) ** 2)

        _, x = example
        block = dafjax.linen.remat_compress(Block, bits=dafjax.AverageBits(2))
        variables = Model(Block).init(jax.random.key(0), x)
        step = dafjax.jit(jax.grad(functools.partial(loss, block)))
        got = run(step, (variables,), 3)
        assert step.bits
        exact = jax.grad(functools.partial(loss, Block))(variables)
        assert 0 < error(got, exact) < 0.5

    def test_nnx_blocks(self, example):
        class Block(nnx.Module):
            def __init__(self, rngs):
                self.dense = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

            @dafjax.nnx.remat_compress(bits=dafjax.AverageBits(2))
            def __call__(self, x):
                return x + nnx.relu(self.dense(x))

        graphdef, state = nnx.split(Block(nnx.Rngs(0)))

        def loss(state, x):
            return jnp.mean(nnx.merge(graphdef, state)(x) ** 2)

        step = dafjax.jit(jax.grad(loss))
        run(step, (state, example[1]), 3)
        assert step.bits

    def test_residuals_are_listed_with_their_first_bits(self, example):
        loss = wrapped(relu_loss, dafjax.AverageBits(4))
        plan = dafjax.saved_residuals(loss, *example)
        assert "2 bits" in str(plan)
        assert plan == dafjax.saved_residuals(wrapped(relu_loss, 2), *example)
        # The plan without targets is not reused for the gradient.
        with pytest.raises(ValueError, match=r"dafjax\.jit"):
            jax.grad(loss)(*example)

    def test_memory_is_estimated(self, example):
        step = adaptive_gradient(relu_loss, dafjax.AverageBits(2))
        for _ in range(2):
            assert dafjax.estimate(step, *example).dafjax.temp_nbytes > 0
            run(step, example, 3)


@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (lambda: dafjax.jit(3), TypeError, "must be given a function"),
        (
            lambda: dafjax.jit(abs, most_compiles=0),
            ValueError,
            "at least 1, but got 0",
        ),
        (
            lambda: dafjax.jit(abs, most_compiles=2.0),
            TypeError,
            "must be an integer",
        ),
    ],
)
def test_options_are_checked(make, kind, message):
    with pytest.raises(kind, match=message):
        make()


def test_static_stores_allocate_by_it():
    store = Arrays().allocate_for(dafjax.AverageBits(2))
    assert store == Arrays().allocate_for(dafjax.AverageBits(2))
    assert hash(store) != hash(store.allocate_for(dafjax.AverageBits(1)))
