"""`dafjax.jit` chooses the least noisy program that fits into a limit."""

import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dafjax
from dafjax import _jit, _search, _step_memory
from dafjax._contexts import Choice, Mode, choosing
from tests import networks
from tests.helpers import slow


DEPTH, WIDTH, BATCH = 8, 128, 1024
NO_FUNCTION: Any = 3


def loss(weights, x):
    for w in weights:
        x = x + jnp.tanh(x @ w)
    return jnp.mean(x**2)


@pytest.fixture(scope="module")
def example():
    weights = jax.random.normal(jax.random.key(0), (DEPTH, WIDTH, WIDTH)) / 11
    return list(weights), jax.random.normal(jax.random.key(1), (BATCH, WIDTH))


def sgd(wrap):
    def step(weights, x):
        value, gradient = jax.value_and_grad(wrap(loss))(weights, x)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradient), value

    return step


def total_nbytes(step, *arguments, **options):
    compiled = jax.jit(step, **options).lower(*arguments).compile()
    memory: Any = compiled.memory_analysis()
    return (
        memory.argument_size_in_bytes
        + memory.temp_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
    )


def squared_error(got, want):
    return sum(float(jnp.sum((a - b) ** 2)) for a, b in zip(got, want, strict=True))


@pytest.fixture(scope="module")
def plain_nbytes(example):
    return total_nbytes(sgd(lambda loss: loss), *example)


def test_with_room_it_is_plain(example, plain_nbytes):
    step = dafjax.jit(sgd(dafjax.remat_compress), memory=plain_nbytes)
    expected = jax.jit(sgd(lambda loss: loss))(*example)
    jax.tree.map(np.testing.assert_array_equal, step(*example), expected)
    report = step.report()
    assert report.options == "plain"
    assert report.memory.total_nbytes == plain_nbytes


def test_it_fits_and_noise_falls_as_the_limit_grows(example, plain_nbytes):
    wrapped = sgd(dafjax.remat_compress)
    noise = []
    exact = jax.jit(sgd(lambda loss: loss))(*example)[0]
    for share in (0.42, 0.5, 0.9, 1.0):
        limit = int(share * plain_nbytes)
        step = dafjax.jit(wrapped, memory=limit)
        weights, _ = step(*example)
        report = step.report()
        assert report.memory.total_nbytes <= limit
        compiled = [tried for tried in report.tried if tried.compiled]
        assert len(compiled) <= 3
        # The program in the report runs.
        lowered: Any = step.lower(*example).compile().memory_analysis()
        assert lowered.temp_size_in_bytes == report.memory.temp_nbytes
        noise.append(squared_error(weights, exact))
    assert noise == sorted(noise, reverse=True)
    assert noise[0] > noise[-1] == 0


def test_what_does_not_fit_is_an_error_with_the_smallest_need(example):
    step = dafjax.jit(sgd(dafjax.remat_compress), memory="1MiB")
    with pytest.raises(ValueError, match=r"smallest program found needs \d"):
        step(*example)


def residual_blocks(weights, x):
    for w in weights:
        mean = jnp.mean(x, -1, keepdims=True)
        x = x + jnp.tanh((x - mean) * jax.lax.rsqrt(jnp.var(x, -1, keepdims=True)) @ w)
    return jnp.mean(x**2)


def normal(*shape):
    return jax.random.normal(jax.random.key(len(shape)), shape)


LARGEST = re.compile(
    r"model predicts that the largest batch that fits is (\d+), with b"
)


@pytest.mark.parametrize(
    ("fun", "weights", "x"),
    [
        (loss, [normal(WIDTH, WIDTH) / 11] * 4, normal(BATCH, WIDTH)),
        slow(residual_blocks, [normal(WIDTH, WIDTH) / 11] * 2, normal(BATCH, WIDTH)),
        slow(
            networks.conv_loss,
            networks.conv_params(jax.random.key(0), 2),
            normal(24, 16, 16, 16),
        ),
    ],
    ids=["mlp", "norms", "convolutions"],
)
def test_the_error_names_the_largest_batch(fun, weights, x):
    gradient = jax.value_and_grad(dafjax.remat_compress(fun))
    limit = int(0.25 * total_nbytes(jax.value_and_grad(fun), weights, x))
    with pytest.raises(ValueError, match=LARGEST) as error:
        dafjax.jit(gradient, memory=limit).lower(weights, x)
    (found,) = LARGEST.findall(str(error.value))
    batch = int(found)
    assert batch < len(x)
    # The model has an error of some percent.
    dafjax.jit(gradient, memory=int(1.03 * limit)).lower(weights, x[:batch])
    with pytest.raises(ValueError, match="smallest program"):
        dafjax.jit(gradient, memory=limit).lower(weights, x[: batch * 9 // 8 + 1])


def test_the_compiler_corrects_the_largest_batch(monkeypatch):
    weights, x = [normal(WIDTH, WIDTH) / 11] * 4, normal(BATCH, WIDTH)
    batches = []
    for divisor in (1, 3):
        predict = _step_memory.predict_temp_nbytes
        with monkeypatch.context() as patch:
            patch.setattr(
                _step_memory,
                "predict_temp_nbytes",
                lambda x, divisor=divisor, predict=predict: predict(x) // divisor,
            )
            step = dafjax.jit(jax.grad(dafjax.remat_compress(loss)), memory="1.5MiB")
            with pytest.raises(ValueError, match=LARGEST) as error:
                step.lower(weights, x)
        batches += map(int, LARGEST.findall(str(error.value)))
    assert batches[1] == pytest.approx(batches[0], rel=0.1)


def test_where_no_batch_fits_the_error_says_so(example):
    step = dafjax.jit(jax.grad(dafjax.remat_compress(loss)), memory="64kB")
    with pytest.raises(ValueError, match=r"model predicts that none fits, with"):
        step.lower(*example)


def test_without_a_batch_axis_the_error_names_no_batch(example):
    def step(x, weights, scale):
        return jax.grad(dafjax.remat_compress(loss))(weights, x * scale[0])

    weights, x = example
    # The arguments after the first have no common length, or are no examples.
    for scale in (jnp.ones(3), jnp.ones(WIDTH)):
        with pytest.raises(ValueError, match=r"take a smaller batch\.$"):
            dafjax.jit(step, memory="3MiB").lower(x, weights, scale)


def test_donated_arguments_count_once(example, plain_nbytes):
    options = {"donate_argnums": 0}
    donating = total_nbytes(sgd(lambda loss: loss), *example, **options)
    assert donating < plain_nbytes
    step = dafjax.jit(sgd(dafjax.remat_compress), memory=donating, **options)
    step(jax.tree.map(jnp.copy, example[0]), example[1])
    assert step.report().options == "plain"


def test_other_shapes_are_another_program(example, plain_nbytes):
    weights, x = example
    step = dafjax.jit(sgd(dafjax.remat_compress), memory=plain_nbytes // 2)
    step(weights, x)
    assert step.report().options != "plain"
    step(weights, x[:64])
    assert step.report().options == "plain"
    step(weights, x)
    assert step.report().options != "plain"


def test_a_call_compiles_once(example, plain_nbytes):
    traces = []

    @dafjax.remat_compress
    def counted(weights, x):
        traces.append(None)
        return loss(weights, x)

    step = dafjax.jit(jax.grad(counted), memory=plain_nbytes)
    step(*example)
    count = len(traces)
    step(*example)
    assert len(traces) == count


def test_a_wrong_prediction_is_made_good(example, plain_nbytes, monkeypatch):
    """Negative control: the compiler decides, not the model."""
    predict = _step_memory.predict_temp_nbytes
    monkeypatch.setattr(_step_memory, "predict_temp_nbytes", lambda x: predict(x) // 3)
    limit = plain_nbytes // 2
    step = dafjax.jit(sgd(dafjax.remat_compress), memory=limit)
    step(*example)
    report = step.report()
    assert report.tried[0].compiled.total_nbytes > limit >= report.memory.total_nbytes
    assert "too large" in str(report)
    assert "chosen" in str(report)


def test_static_arguments_and_methods(example, plain_nbytes):
    class Trainer:
        @dafjax.jit(memory=plain_nbytes, static_argnums=(0, 3))
        def step(self, weights, x, rate):
            gradient = jax.grad(dafjax.remat_compress(loss))(weights, x)
            return jax.tree.map(lambda w, g: w - rate * g, weights, gradient)

    weights = Trainer().step(*example, 0.1)
    assert jax.tree.map(jnp.shape, weights) == jax.tree.map(jnp.shape, example[0])


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda: dafjax.jit(NO_FUNCTION, memory=1),
            TypeError,
            "must be given a function",
        ),
        (lambda: dafjax.jit(loss, memory="much"), ValueError, "memory"),
        (
            lambda: dafjax.jit(loss, memory="1GiB").report(),
            RuntimeError,
            "call the step first",
        ),
        (
            lambda: dafjax.jit(loss, memory="1GiB")([], jnp.ones(3)),
            ValueError,
            "calls no",
        ),
        (
            lambda: jax.jit(dafjax.jit(loss, memory="1GiB"))([], jnp.ones(3)),
            ValueError,
            "round the whole step",
        ),
    ],
)
def test_errors_name_the_remedy(make, error, message):
    with pytest.raises(error, match=message):
        make()


def layers(weights, x):
    for w in weights:
        h = x @ w
        x = jnp.sin(h) @ w + jax.nn.gelu(h)
    return jnp.mean(x**2)


saving = functools.partial(
    dafjax.remat_compress, policy=jax.checkpoint_policies.dots_saveable
)


def num_products(step, example):
    return step.lower(*example).as_text().count("stablehlo.dot_general")


def test_what_a_policy_saves_is_saved_whatever_is_chosen(example):
    """With segments, products would run twice, from inputs in 8 bits."""
    wanted = jax.jit(jax.grad(layers))
    step = dafjax.jit(jax.grad(saving(layers)), memory="12MiB")
    for gradient, exact in zip(step(*example), wanted(*example), strict=True):
        np.testing.assert_allclose(gradient, exact, rtol=1e-4, atol=1e-8)
    assert num_products(step, example) == num_products(wanted, example)
    report = step.report()
    assert report.options == "bits=8"
    skipped = [tried for tried in report.tried if tried.is_skipped]
    assert [tried.options for tried in skipped] == ['rematerialize="exact"']
    assert skipped[0].others == (("layers", "plain"),)
    assert "skipped" in str(report)


def test_without_the_policy_segments_are_computed_again(example):
    """Negative control of the test above."""
    step = dafjax.jit(jax.grad(dafjax.remat_compress(layers)), memory="12MiB")
    step(*example)
    assert step.report().options == 'rematerialize="exact"'
    assert num_products(step, example) > num_products(
        jax.jit(jax.grad(layers)), example
    )


@pytest.mark.parametrize(
    ("choice", "other", "options", "options_of_other"),
    [
        (Choice(Mode.EXACT), "plain", {"rematerialize": "exact"}, {"bits": None}),
        (
            Choice(Mode.RERUN, 8),
            "bits=8",
            {"bits": 8, "rematerialize": True},
            {"bits": 8},
        ),
    ],
    ids=str,
)
def test_other_functions_of_the_step_are_computed_again(
    example, choice, other, options, options_of_other
):
    def both(weights, x, options, options_of_other):
        again = dafjax.remat_compress(loss, **options)
        return saving(layers, **options_of_other)(weights, x) + again(weights, x)

    def gradient(*options):
        fun = functools.partial(both, options=options[0], options_of_other=options[1])
        return jax.jit(jax.grad(fun))

    with choosing(choice):
        got = num_products(gradient({}, {}), example)
    assert got == num_products(gradient(options, options_of_other), example)
    assert got > num_products(gradient({}, {}), example)
    assert choice.others == {"layers": other}
    assert not choice.is_excluded


def nested(outer, inner):
    @outer
    def outside(weights, x):
        @inner
        def inside(weights, x):
            return layers(weights, x)

        return inside(weights, x)

    return outside


@pytest.mark.parametrize("limit", ["12MiB", "100MiB"])
def test_of_nested_functions_the_outermost_is_reported(example, limit):
    step = dafjax.jit(jax.grad(nested(saving, dafjax.remat_compress)), memory=limit)
    step.lower(*example)
    others = {name for tried in step.report().tried for name, _ in tried.others}
    assert others == ({"outside"} if limit == "12MiB" else set())
    step = dafjax.jit(jax.grad(nested(dafjax.remat_compress, saving)), memory=limit)
    step.lower(*example)
    assert not any(tried.others for tried in step.report().tried)


@pytest.mark.parametrize("choice", [Choice(Mode.EXACT), Choice(Mode.RERUN, 8)], ids=str)
def test_what_the_outermost_saves_no_inner_function_computes_again(example, choice):
    gradient = jax.grad(nested(saving, dafjax.remat_compress))
    with choosing(choice):
        got = num_products(jax.jit(gradient), example)
    assert choice.is_excluded
    assert got == num_products(jax.jit(jax.grad(layers)), example)
    # Negative control.
    with choosing(Choice(Mode.EXACT)):
        again = jax.grad(nested(lambda fun: fun, dafjax.remat_compress))
        assert got < num_products(jax.jit(again), example)


def test_a_saved_plan_is_for_the_whole_function(example):
    wrapped = dafjax.remat_compress(layers)
    plan = dafjax.saved_residuals(wrapped, *example)
    planned = dafjax.remat_compress(layers, policy=plan)
    step = dafjax.jit(jax.grad(planned, argnums=(0, 1)), memory="3MiB")
    with pytest.raises(ValueError, match=r"policies of `layers` exclude `remat"):
        step(*example)


def test_what_does_not_fit_names_functions_that_are_not_computed_again(example):
    step = dafjax.jit(jax.grad(saving(layers)), memory="3MiB")
    with pytest.raises(ValueError, match=r"policies of `layers` exclude `remat"):
        step(*example)


def test_a_store_that_changes_bits_is_refused(example):
    with dafjax.stores.PagePool() as pool:
        wrapped = dafjax.remat_compress(loss, store=pool)
        step = dafjax.jit(jax.grad(wrapped), memory="3MiB")
        with pytest.raises(NotImplementedError, match="Leave out the store"):
            step(*example)


def unequal(weights, x):
    """The later a layer, the less it matters."""
    total = 0.0
    for n, w in enumerate(weights):
        x = x + jnp.tanh(x @ w)
        total += 4.0**-n * jnp.mean(x**2)
    return total


@pytest.fixture
def adapting(monkeypatch):
    """A step whose bits adapt, its arguments and its limit."""
    without = tuple(kind for kind in _search._KINDS if not kind[0].has_segments)
    monkeypatch.setattr(_search, "_KINDS", without)
    arguments = [normal(64, 64) / 8] * 6, normal(4096, 64)
    limit = int(0.6 * total_nbytes(jax.grad(unequal), *arguments))
    wrapped = dafjax.remat_compress(unequal, bits=dafjax.AverageBits(2))
    return dafjax.jit(jax.grad(wrapped), memory=limit), arguments, limit


def test_bits_adapt_within_the_limit(adapting):
    step, arguments, limit = adapting
    first = step(*arguments)
    assert step.report().options in ("bits=4", "bits=2")
    bits, nbytes = step.bits, step.nbytes
    # The program that was compiled for the choice runs.
    lowered = step.lower(*arguments).compile().memory_analysis()
    assert lowered.temp_size_in_bytes == step.report().memory.temp_nbytes
    for _ in range(2):
        adapted = step(*arguments)
    assert step.num_compiles == 2
    assert step.bits != bits
    assert step.nbytes <= nbytes
    assert step.report().memory.total_nbytes <= limit
    lowered = step.lower(*arguments).compile().memory_analysis()
    assert lowered.temp_size_in_bytes == step.report().memory.temp_nbytes
    exact = jax.jit(jax.grad(unequal))(*arguments)
    assert 0 < squared_error(adapted, exact) < 0.9 * squared_error(first, exact)


def test_other_bits_that_do_not_fit_are_not_taken(adapting, monkeypatch):
    step, arguments, limit = adapting
    step(*arguments)
    bits, report = step.bits, step.report()
    too_much = dataclasses.replace(report.memory, temp_nbytes=limit)
    monkeypatch.setattr(_jit, "measure", lambda lowered: too_much)
    for _ in range(2):
        step(*arguments)
    assert step.num_compiles == 2
    assert step.bits == bits
    assert step.report() == report


def test_segments_that_are_computed_again_have_fixed_bits(example):
    wrapped = dafjax.remat_compress(layers, bits=dafjax.AverageBits(2))
    step = dafjax.jit(jax.grad(wrapped), memory="12MiB")
    step(*example)
    assert step.report().options == 'rematerialize="exact"'
    assert step.bits == {}


def test_a_step_with_a_limit_can_be_estimated(example, plain_nbytes):
    step = dafjax.jit(sgd(dafjax.remat_compress), memory=plain_nbytes // 2)
    got = dafjax.estimate(step, *example, compile=True)
    assert got.plain.total_nbytes == plain_nbytes
    assert got.dafjax == step.report().memory
    assert got.dafjax.total_nbytes <= plain_nbytes // 2


def test_static_arguments_are_other_programs(example):
    """The second has twice as many layers."""
    limit = total_nbytes(jax.grad(loss), *example)

    @dafjax.jit(memory=limit, static_argnames="repeats")
    def step(weights, x, repeats):
        return jax.grad(dafjax.remat_compress(loss))(weights * repeats, x)

    chosen = []
    for repeats in (1, 2, 1):
        step(*example, repeats)
        chosen.append(step.report().options)
    assert chosen == ["plain", 'rematerialize="exact"', "plain"]


def accumulated(weights, x):
    split = dafjax.accumulate(dafjax.remat_compress(loss))
    return jax.value_and_grad(split)(weights, x)


def test_microbatches_come_before_noise(example, plain_nbytes):
    step = dafjax.jit(accumulated, memory=int(0.3 * plain_nbytes))
    value, gradient = step(*example)
    expected = jax.value_and_grad(loss)(*example)
    np.testing.assert_allclose(value, expected[0], rtol=1e-5)
    for x, y in zip(gradient, expected[1], strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-7)
    report = step.report()
    assert report.options.startswith("plain, microbatches=")
    assert report.memory.total_nbytes <= 0.3 * plain_nbytes


def test_fewer_microbatches_with_more_room(example, plain_nbytes):
    def number(share):
        step = dafjax.jit(accumulated, memory=int(share * plain_nbytes))
        step.lower(*example)
        return int(step.report().options.rpartition("=")[2])

    assert 1 < number(0.6) < number(0.25)


def test_a_step_may_accumulate_without_wrapped_functions(example, plain_nbytes):
    def step(weights, x):
        return jax.value_and_grad(dafjax.accumulate(loss))(weights, x)

    jitted = dafjax.jit(step, memory=int(0.5 * plain_nbytes))
    jitted.lower(*example)
    assert jitted.report().options.startswith("plain, microbatches=")


def test_a_batch_that_cannot_be_split_is_named(example, plain_nbytes):
    def of_all(weights, x):
        z = loss(weights, x)
        return z + jnp.max(x @ weights[0])

    def step(weights, x):
        split = dafjax.accumulate(dafjax.remat_compress(of_all))
        return jax.value_and_grad(split)(weights, x)

    fits = dafjax.jit(step, memory=int(0.6 * plain_nbytes))
    fits.lower(*example)
    report = fits.report()
    assert "microbatches" not in report.options
    assert "cannot be computed in microbatches" in str(report)
    with pytest.raises(ValueError, match=r"cannot be computed in microbatches.*Raise"):
        dafjax.jit(step, memory=int(0.05 * plain_nbytes))(*example)
