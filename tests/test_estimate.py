"""Estimates of the memory of a step, and of the largest batch. Nothing runs."""

import dataclasses
import functools
import itertools
import math
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import dafjax
import dafjax.linen
import dafjax.nnx
from dafjax._step_memory import largest_that_fits
from tests import networks


MEMORY_OPTIMIZED = {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}
MIB = 2**20

WRAPS = {
    "plain": lambda fun: fun,
    "checkpoint": jax.checkpoint,
    "dafjax": dafjax.remat_compress,
}
METHODS = tuple(WRAPS)


def analysis(step, *args, **options):
    """Returns the compiler's figures for a step without dafjax."""
    compiled = jax.jit(step).lower(*args).compile(compiler_options=options or None)
    return compiled.memory_analysis()


def assert_equals(memory, expected):
    assert memory.temp_nbytes == expected.temp_size_in_bytes
    assert memory.argument_nbytes == expected.argument_size_in_bytes
    assert memory.output_nbytes == expected.output_size_in_bytes
    assert memory.donated_nbytes == expected.alias_size_in_bytes


def shapes_of(function):
    return jax.eval_shape(function)


def mlp_example(batch=1024, depth=6):
    params = shapes_of(lambda: networks.mlp_params(jax.random.key(0), (128,) * depth))
    return params, jax.ShapeDtypeStruct((batch, 128), jnp.float32)


def conv_example(batch=16):
    params = shapes_of(lambda: networks.conv_params(jax.random.key(0), 3))
    return params, jax.ShapeDtypeStruct((batch, 16, 16, 16), jnp.float32)


def mlp_step(wrap):
    """Differentiates and updates inside; what is wrapped is the loss."""

    def step(params, x):
        value, gradient = jax.value_and_grad(wrap(networks.mlp_loss))(params, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient), value

    return step


def conv_step(wrap):
    """The step wraps the blocks."""
    return jax.grad(functools.partial(networks.conv_loss, wrap_block=wrap))


def scan_step(wrap):
    """The step wraps the body of a loop."""

    def loss(w, x):
        block = wrap(lambda x, w: x + jnp.tanh(x @ w))
        return jnp.mean(jax.lax.scan(lambda x, w: (block(x, w), None), x, w)[0])

    return jax.value_and_grad(loss)


def inner_jit_step(wrap):
    """A loss calls the wrapped function in a `jax.jit`."""
    inner = jax.jit(wrap(networks.mlp))
    return jax.grad(lambda params, x: jnp.mean(jnp.square(inner(params, x))))


STEPS = {
    "mlp": (mlp_step, mlp_example()),
    "scan": (
        scan_step,
        (
            jax.ShapeDtypeStruct((8, 128, 128), jnp.float32),
            jax.ShapeDtypeStruct((1024, 128), jnp.float32),
        ),
    ),
    "inner jit": (inner_jit_step, mlp_example()),
}


@pytest.mark.parametrize("name", STEPS)
def test_each_method_is_the_step_written_by_hand(name):
    make_step, args = STEPS[name]
    got = dafjax.estimate(make_step(dafjax.remat_compress), *args, compile=True)
    for method, wrap in WRAPS.items():
        assert_equals(getattr(got, method), analysis(make_step(wrap), *args))
    assert got.dafjax_ratio < 0.7
    assert got.dafjax.temp_nbytes == got.dafjax_ratio * got.plain.temp_nbytes


@pytest.mark.parametrize("name", STEPS)
def test_a_model_predicts_what_the_compiler_says(name, monkeypatch):
    make_step, args = STEPS[name]
    step = make_step(dafjax.remat_compress)
    compiled = dafjax.estimate(step, *args, compile=True)
    with monkeypatch.context() as patch:
        patch.setattr(jax.stages.Traced, "lower", None)
        predicted = dafjax.estimate(step, *args)
    for method in METHODS:
        got, want = (getattr(x, method) for x in (predicted, compiled))
        assert got.temp_nbytes == pytest.approx(want.temp_nbytes, rel=0.25)
        # The compiler adds a table of pointers to the results.
        assert (
            0
            <= want.total_nbytes
            - want.temp_nbytes
            - (got.total_nbytes - got.temp_nbytes)
            < 512
        )


def test_compiler_options_reach_xla():
    args = conv_example()
    got = dafjax.estimate(
        conv_step(dafjax.remat_compress),
        *args,
        compile=True,
        compiler_options=MEMORY_OPTIMIZED,
    )
    for method, wrap in WRAPS.items():
        expected = analysis(conv_step(wrap), *args, **MEMORY_OPTIMIZED)
        assert_equals(getattr(got, method), expected)


@pytest.mark.parametrize("compile", [False, True])
def test_a_jitted_step_keeps_its_donated_and_static_arguments(compile):
    step = mlp_step(dafjax.remat_compress)
    args = mlp_example()
    static = functools.partial(
        jax.jit, donate_argnums=0, static_argnums=2, static_argnames="flag"
    )(lambda params, x, name, *, flag: step(params, x))
    found = dafjax.estimate(static, *args, "name", flag="value", compile=compile)
    got = found.dafjax
    nbytes = sum(a.size * 4 for a in jax.tree.leaves(args[0]))
    # The loss is new, and so is the table of pointers to the results.
    assert nbytes <= got.donated_nbytes <= got.output_nbytes < nbytes + 256
    once = got.argument_nbytes + got.temp_nbytes
    assert once <= got.total_nbytes < once + 256


def test_a_linen_module_is_compared_with_the_module_under_nn_remat():
    x = jax.ShapeDtypeStruct((512, 128), jnp.float32)

    def make_step(wrap):
        class Block(nn.Module):
            @nn.compact
            def __call__(self, x):
                return x + nn.relu(nn.Dense(x.shape[-1])(x))

        class Model(nn.Module):
            @nn.compact
            def __call__(self, x):
                for n in range(6):
                    x = wrap(Block)(name=f"block_{n}")(x)
                return x

        variables = jax.eval_shape(Model().init, jax.random.key(0), x)
        return jax.grad(lambda v, x: jnp.mean(Model().apply(v, x))), variables

    step, variables = make_step(dafjax.linen.remat_compress)
    got = dafjax.estimate(step, variables, x, compile=True)
    assert_equals(got.checkpoint, analysis(make_step(nn.remat)[0], variables, x))
    assert_equals(got.plain, analysis(make_step(lambda b: b)[0], variables, x))
    assert got.dafjax_ratio < 0.6


def test_an_nnx_step_is_compared_with_the_step_under_nnx_remat():
    def make_step(wrap):
        def block(linear, x):
            return x + jnp.tanh(linear(x))

        @nnx.jit
        def step(linears, x):
            def loss(linears):
                y = x
                for linear in linears:
                    y = wrap(block)(linear, y)
                return jnp.mean(y)

            return nnx.grad(loss)(linears)

        return step

    linears = nnx.eval_shape(
        lambda: nnx.List([nnx.Linear(128, 128, rngs=nnx.Rngs(n)) for n in range(6)])
    )
    x = jax.ShapeDtypeStruct((512, 128), jnp.float32)
    step = make_step(dafjax.nnx.remat_compress)
    got = dafjax.estimate(step, linears, x, compile=True)
    by_hand = {"plain": lambda f: f, "checkpoint": nnx.remat}
    for method, wrap in by_hand.items():
        expected = make_step(wrap).lower(linears, x).compile().memory_analysis()
        assert_equals(getattr(got, method), expected)
    assert got.dafjax_ratio < 0.6
    predicted = dafjax.estimate(step, linears, x).dafjax
    assert predicted.total_nbytes == pytest.approx(got.dafjax.total_nbytes, rel=0.25)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)], ids=str)
def test_what_was_traced_before_is_found_by_no_other_method(order, key):
    """Calls, estimates and searches share functions that `jax.jit` has cached."""
    inner = jax.jit(dafjax.remat_compress(networks.mlp))

    @jax.jit
    def step(params, x):
        return jax.grad(lambda p: jnp.mean(jnp.square(inner(p, x))))(params)

    params = networks.mlp_params(key, (128,) * 4)
    x = jax.random.normal(key, (1024, 128))
    expected = {
        method: analysis(inner_jit_step(wrap), params, x).temp_size_in_bytes
        for method, wrap in WRAPS.items()
    }

    def call():
        assert any(
            "dafjax_pack" in line
            for line in step.lower(params, x).as_text().splitlines()
        )
        return step(params, x)

    def estimate():
        got = dafjax.estimate(step, params, x, compile=True)
        assert {m: getattr(got, m).temp_nbytes for m in METHODS} == expected

    def fit():
        for method in METHODS:
            fitted = dafjax.fit_batch(
                step, lambda n: (params, x[:n]), "1GiB", method=method, max_batch=1
            )
            assert fitted.batch == 1

    actions = [call, estimate, fit]
    before = [actions[number]() for number in order]
    gradient = before[order.index(0)]
    again = call()
    estimate()
    assert jax.tree.all(jax.tree.map(jnp.array_equal, gradient, again))


def test_other_wrapped_functions_of_the_same_function_still_compress(key):
    """The cache of one wrapped function holds nothing of another's."""
    args = networks.mlp_params(key, (128,) * 6), jax.random.normal(key, (1024, 128))
    dafjax.estimate(jax.grad(dafjax.remat_compress(networks.mlp_loss)), *args)
    step = jax.grad(dafjax.remat_compress(networks.mlp_loss, bits=4))
    plain = analysis(jax.grad(networks.mlp_loss), *args).temp_size_in_bytes
    assert analysis(step, *args).temp_size_in_bytes < 0.8 * plain


def test_an_error_while_tracing_leaves_wrapped_functions_as_they_are(key):
    wrapped = dafjax.remat_compress(networks.mlp_loss)

    def step(params, x):
        jax.grad(wrapped)(params, x)
        raise RuntimeError("on purpose")

    args = mlp_example()
    with pytest.raises(RuntimeError, match="on purpose"):
        dafjax.estimate(step, *args)
    expected = analysis(jax.grad(dafjax.remat_compress(networks.mlp_loss)), *args)
    got = analysis(jax.grad(wrapped), *args)
    assert got.temp_size_in_bytes == expected.temp_size_in_bytes


def test_nothing_runs(key):
    ran = []

    @dafjax.remat_compress
    def loss(w, x):
        jax.debug.callback(lambda: ran.append(1))
        return jnp.mean(jnp.tanh(x @ w))

    w, x = jnp.ones((128, 128)), jnp.ones((256, 128))
    for compile in (False, True):
        options = {"max_batch": 2, "compile": compile}
        dafjax.estimate(jax.grad(loss), w, x, compile=compile)
        dafjax.fit_batch(jax.grad(loss), lambda n: (w, x[:n]), "1GiB", **options)
    jax.effects_barrier()
    assert ran == []
    jax.block_until_ready(jax.grad(loss)(w, x))
    jax.effects_barrier()
    assert ran


def test_shapes_give_the_estimate_of_arrays(key):
    args = networks.mlp_params(key), jax.random.normal(key, (64, 64))
    step = mlp_step(dafjax.remat_compress)
    got = dafjax.estimate(step, *args)
    assert got == dafjax.estimate(step, *jax.eval_shape(lambda: args))


def test_an_estimate_prints_as_a_table():
    memory = functools.partial(
        dafjax.StepMemory, argument_nbytes=2**20, output_nbytes=512, donated_nbytes=256
    )
    got = dafjax.Estimate(
        plain=memory(8 * MIB),
        checkpoint=memory(4 * MIB),
        dafjax=memory(MIB),
        is_compiled=True,
    )
    assert str(got).splitlines() == [
        "method             temp  of plain  arguments  results    total",
        "plain           8.0 MiB      1.00    1.0 MiB    512 B  9.0 MiB",
        "jax.checkpoint  4.0 MiB      0.50    1.0 MiB    512 B  5.0 MiB",
        "dafjax          1.0 MiB      0.12    1.0 MiB    512 B  2.0 MiB",
    ]
    assert got.checkpoint_ratio == 0.5
    predicted = dataclasses.replace(got, is_compiled=False)
    assert str(predicted).startswith(f"{got}\npredicted by a model of XLA:CPU; ")


@pytest.mark.parametrize("bits", [None, 2])
def test_a_step_that_calls_nothing_wrapped_is_named(bits):
    def a_step(w):
        return jax.grad(lambda w: jnp.sum(w**2))(w)

    step = dafjax.remat_compress(a_step, bits=None) if bits is None else a_step
    with pytest.raises(ValueError, match=r"`estimate\(step, ...\)`: `a_step` calls no"):
        dafjax.estimate(step, 1.0)
    with pytest.raises(ValueError, match=r"`fit_batch\(step, ...\)`: `a_step` calls"):
        dafjax.fit_batch(step, lambda n: (jnp.ones(n),), 1000)


def test_a_step_must_be_a_function():
    with pytest.raises(TypeError, match=r"`estimate\(step, ...\)` must be given a fun"):
        dafjax.estimate(3)


# Bytes of the batch of `multiple_of` and of the parameters leave room for some more.
LIMIT_NBYTES = 4 * MIB


@pytest.mark.parametrize(
    ("method", "multiple_of"), [("dafjax", 1), ("plain", 24), ("checkpoint", 24)]
)
def test_the_batch_fits_and_the_next_does_not(method, multiple_of):
    step = mlp_step(dafjax.remat_compress)
    got = dafjax.fit_batch(
        step,
        mlp_example,
        LIMIT_NBYTES,
        method=method,
        multiple_of=multiple_of,
        compile=True,
    )
    assert got.batch % multiple_of == 0
    assert got.batch > multiple_of

    def total(batch):
        memory = analysis(mlp_step(WRAPS[method]), *mlp_example(batch))
        return (
            memory.argument_size_in_bytes
            + memory.output_size_in_bytes
            + memory.temp_size_in_bytes
        )

    assert total(got.batch) == got.memory.total_nbytes <= LIMIT_NBYTES
    assert total(got.batch + multiple_of) > LIMIT_NBYTES
    assert dict(got.tried)[got.batch] == got.memory.total_nbytes
    # Odd batches are restored in fewer parts, or whole: bytes do not grow steadily.
    assert len(got.tried) <= (16 if multiple_of == 1 else 10)
    assert re.fullmatch(
        rf"{method}: a batch of {got.batch} needs [34]\.\d MiB of 4\.0 MiB", str(got)
    )


@pytest.mark.parametrize("method", METHODS)
def test_the_model_finds_about_the_batch_of_the_compiler(method):
    step = mlp_step(dafjax.remat_compress)
    options = {"method": method, "multiple_of": 8}
    predicted, compiled = (
        dafjax.fit_batch(step, mlp_example, LIMIT_NBYTES, compile=compile, **options)
        for compile in (False, True)
    )
    assert predicted.batch == pytest.approx(compiled.batch, rel=0.2)
    assert str(predicted).startswith(f"{method}: a batch of {predicted.batch} needs ")
    assert "predicted by a model" in str(predicted)
    assert "predicted" not in str(compiled)


def test_no_batch_above_the_largest_is_tried():
    tried = []

    def args_of_batch(n):
        tried.append(n)
        return mlp_example(n)

    got = dafjax.fit_batch(
        mlp_step(dafjax.remat_compress),
        args_of_batch,
        "1GiB",
        multiple_of=8,
        max_batch=30,
    )
    assert got.batch == 24 == max(tried)


BYTES_OF_COUNTS = {
    "linear": lambda n: 1000 + 37 * n,
    "steps": lambda n: 4096 * math.ceil((500 + 37 * n) / 4096),
    "raw at first": lambda n: min(1000 * n, 9000 + 50 * n),
    "flat at first": lambda n: max(20_000, 37 * n),
    "square": lambda n: 100 + n * n,
    "root": lambda n: int(1000 * n**0.5),
    "constant": lambda n: 100,
    "wall": lambda n: 1 if n < 300 else 10**9,
    "to and fro": lambda n: 37 * n + 20_000 * (n % 2),
    "falling": lambda n: 10**9 // n,
}


@pytest.mark.parametrize("name", BYTES_OF_COUNTS)
def test_the_search_ends_where_it_says(name):
    for limit, most in itertools.product((50, 3000, 30_000, 10**7), (1, 2, 77, 8192)):
        calls = []

        def nbytes_of(n, most=most, calls=calls):
            assert 1 <= n <= most
            assert n not in calls
            calls.append(n)
            return BYTES_OF_COUNTS[name](n)

        got = largest_that_fits(nbytes_of, limit, most)
        assert got == 0 or BYTES_OF_COUNTS[name](got) <= limit
        assert got == most or BYTES_OF_COUNTS[name](got + 1) > limit
        assert {got, min(got + 1, most)} - {0} <= set(calls)
        assert len(calls) <= 6 * math.log2(most) + 2
        if name in ("linear", "raw at first"):
            assert len(calls) <= 7


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("1B", 1),
        ("64MiB", 64 * MIB),
        ("2GiB", 2**31),
        ("1.5GB", 1_500_000_000),
        (" 3 kB ", 3000),
        (12345, 12345),
    ],
)
def test_a_limit_is_bytes_or_text(text, nbytes):
    def step(w):
        return jax.grad(dafjax.remat_compress(lambda w: jnp.sum(w**2)))(w)

    def fit():
        return dafjax.fit_batch(step, lambda n: (jnp.ones(n),), text, max_batch=1)

    if nbytes < 8:
        with pytest.raises(ValueError, match="1 B do not hold"):
            fit()
    else:
        assert fit().limit_nbytes == nbytes


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"limit": "2 GB?"}, ValueError, "cannot be read: '2 GB?'. Write bytes as an"),
        ({"limit": "2gb"}, ValueError, "the units are B, kB, MB, GB, TB, KiB, MiB, "),
        ({"limit": "GiB"}, ValueError, "`fit_batch(limit=...)` cannot be read: 'GiB'"),
        ({"limit": 0}, ValueError, "must be at least 1 byte, but got 0"),
        ({"limit": 1e9}, TypeError, "must be an integer or a string, but got `10000"),
        ({"limit": True}, TypeError, "`True` of type `bool`"),
        (
            {"method": "remat"},
            ValueError,
            "'plain', 'checkpoint', 'dafjax', but got `'remat'`",
        ),
        ({"multiple_of": 0}, ValueError, "`fit_batch(multiple_of=...)` must be at lea"),
        ({"multiple_of": 8.0}, TypeError, "must be an integer, but got `8.0`"),
        ({"max_batch": 7, "multiple_of": 8}, ValueError, "must be at least 8, but got"),
        ({"args_of_batch": 8}, TypeError, "must be a function from a batch size"),
        ({"args_of_batch": lambda n: n}, TypeError, "`args_of_batch(1)` returned a `i"),
        ({"step": "step"}, TypeError, "must be given a function, but got `'step'`"),
        ({"compiler_options": {}}, ValueError, "a model answers. Add `compile=True`"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_wrong_arguments_are_named(options, error, message):
    arguments = {
        "step": mlp_step(dafjax.remat_compress),
        "args_of_batch": mlp_example,
        "limit": "1GiB",
    }
    with pytest.raises(error, match=re.escape(message)):
        dafjax.fit_batch(**(arguments | options))


def test_a_limit_below_the_smallest_batch_tells_what_it_needs():
    step = mlp_step(dafjax.remat_compress)
    message = (
        r"100\.0 KiB do not hold the step with a batch of 8, which needs \d+\.\d KiB "
        r'under "plain": arguments .*, temporary arrays .*smaller `multiple_of` than '
        r'8, or `method="dafjax"`\.'
    )
    with pytest.raises(ValueError, match=message):
        dafjax.fit_batch(step, mlp_example, 100 * 1024, multiple_of=8, method="plain")
