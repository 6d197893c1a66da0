"""Stretches of the backward pass that run in parts of their rows."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dafjax
from dafjax import config
from dafjax._bits import Bits
from dafjax._plan.planner import make_plan
from dafjax._schedule import chunking, stages
from dafjax._schedule.chunks import Chunks
from dafjax._schedule.stages import stretches_of
from dafjax._schedule.steps import Unpacking
from dafjax._sensitivity.moments import moments_of_rows, sample_rows
from dafjax._trace.by_rows import (
    axes_read,
    axes_summed,
    convolve_in_loop,
    evaluate_on_chunk,
)
from dafjax._trace.equation import Equation, call_equation
from dafjax._trace.residuals import differentiate
from dafjax.codecs import Affine, Bitmask
from dafjax.policies import CompressExpensive, CompressNames
from dafjax.stores import _page_pool
from tests import networks
from tests.helpers import like, prepared, relative_error, scheduled


def equation_of(function, *arguments):
    """Returns the equation that makes the result of a traced function."""
    closed = jax.make_jaxpr(function)(*arguments)
    program = differentiate(closed, [False] * len(arguments))
    return next(e for e in program.forward if program.results[0] in e.outputs)


def convolve(x, y, spec):
    return jax.lax.conv_general_dilated(x, y, (1, 1), "SAME", dimension_numbers=spec)


def products_of_rows(x, y):
    return jax.lax.dot_general(x, y, (((1,), (1,)), ((), ())))


class TestRows:
    """Which rows an equation reads, with 8 rows of 4."""

    @pytest.mark.parametrize(
        ("function", "rows"),
        [
            (lambda x, y: x * y, (0, 0)),
            (lambda x, y: x + y[:1], (0, None)),
            (lambda x, y: jnp.where(x > 0, x, y), (0, 0, 0)),
            (lambda x, y: x > y, (0, 0)),
            (lambda x, y: jnp.sum(x * y, axis=1), (0,)),
            (lambda x, y: x @ y.T, (0, None)),
            (lambda x, y: jnp.einsum("ni,ni->n", x, y), (0, 0)),
            (lambda x, y: (x * y).reshape(8, 2, 2), (0,)),
            (lambda x, y: (x * y).reshape(8, 2, 2).swapaxes(1, 2), (0,)),
            (lambda x, y: jax.lax.broadcast_in_dim(x, (8, 3, 4), (0, 2)), (0,)),
            (lambda x, y: jax.lax.broadcast_in_dim(x[0], (8, 4), (1,)), (None,)),
            (lambda x, y: jnp.cumsum(x * y, axis=0), None),
            (lambda x, y: (x * y).T, (1,)),
            (lambda x, y: products_of_rows(x, x), None),
            (lambda x, y: (x * y).reshape(4, 8), None),
            (lambda x, y: (x * y)[::-1], None),
            (lambda x, y: x.T @ y, (0, None)),
            (lambda x, y: jnp.sum(x * y, axis=0), (1,)),
        ],
    )
    def test_read(self, function, rows, key):
        x = jax.random.normal(key, (8, 4))
        assert axes_read(equation_of(function, x, x), (0,)) == rows

    def test_read_by_a_convolution(self, key):
        x = jax.random.normal(key, (8, 5, 5, 3))
        kernel = jax.random.normal(key, (3, 3, 3, 4))
        spec = ("NHWC", "HWIO", "NHWC")
        eqn = equation_of(lambda x, k: convolve(x, k, spec), x, kernel)
        assert axes_read(eqn, (0,)) == (0, None)
        assert (0, 0) not in axes_summed(eqn)
        transposed = equation_of(
            lambda x, k: convolve(x, k, ("NHWC", "HWIO", "CHWN")), x, kernel
        )
        assert axes_read(transposed, (3,)) == (0, None)
        assert axes_read(transposed, (0,)) is None

    def test_others_are_not_these(self, key):
        x = jax.random.normal(key, (8, 4))
        assert axes_read(equation_of(lambda x, y: x * y, x, x), (1,)) == (1, 1)

    @pytest.mark.parametrize(
        ("function", "rows"),
        [
            (lambda x, y: jnp.sum(x * y, axis=0), (0,)),
            (lambda x, y: jnp.sum(x * y), (0,)),
            (lambda x, y: jnp.einsum("ni,nj->ij", x, y), (0, 0)),
            (lambda x, y: jnp.einsum("ni,ni->i", x, y), (0, 0)),
            (lambda x, y: jnp.sum(x * y, axis=1), None),
            (lambda x, y: jnp.max(x * y, axis=0), None),
            (lambda x, y: x @ y.T, None),
        ],
    )
    def test_summed(self, function, rows, key):
        x = jax.random.normal(key, (8, 4))
        found = [a for a in axes_summed(equation_of(function, x, x)) if set(a) == {0}]
        assert found == ([] if rows is None else [rows])


def parts_of(eqn, operands, count, axes):
    """Runs an equation on every part of the rows of all operands."""
    num_rows = len(operands[0])
    for n in range(count):
        part = [x[n::count] for x in operands]
        (result,) = evaluate_on_chunk(eqn, part, axes, num_rows // count)
        yield result


def test_a_part_is_what_the_whole_has_there(key):
    x, y = jax.random.normal(key, (2, 8, 4))
    product = equation_of(lambda x, y: x * y, x, y)

    def larger(x, y):
        return jnp.where(x > y, x, jnp.zeros_like(x))

    call = call_equation(larger, [x.aval, y.aval], (0, 1), (2,), product)
    for eqn in (product, call):
        assert axes_read(eqn, (0,)) == (0, 0)
        (whole,) = evaluate_on_chunk(eqn, [x, y], (0,), 8)
        for n, part in enumerate(parts_of(eqn, [x, y], 4, (0,))):
            np.testing.assert_array_equal(part, whole[n::4])


def test_a_call_that_reads_rows_and_the_whole_of_one_operand(key):
    x, y = jax.random.normal(key, (2, 8, 4))
    product = equation_of(lambda x, y: x * y, x, y)
    for function, rows in (
        (lambda x, y: products_of_rows(x * x, y), (0, None)),
        (lambda x, y: products_of_rows(x * y, x), None),
    ):
        call = call_equation(function, [x.aval, y.aval], (0, 1), (2,), product)
        assert axes_read(call, (0,)) == rows


def test_sums_of_parts_add_up(key):
    x, y = jax.random.normal(key, (2, 8, 6, 6, 3))

    def gradient(x, y):
        return jax.lax.conv_general_dilated(
            *(x, y, (1, 1), ((1, 1), (1, 1))),
            dimension_numbers=jax.lax.ConvDimensionNumbers(
                (3, 0, 1, 2), (3, 0, 1, 2), (2, 3, 0, 1)
            ),
        )

    for function in (gradient, lambda x, y: jnp.einsum("nhwc,nhwd->cd", x, y)):
        eqn = equation_of(function, x, y)
        assert (0, 0) in axes_summed(eqn)
        total = sum(parts_of(eqn, [x, y], 4, ()))
        np.testing.assert_allclose(total, function(x, y), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("spec", ["NHWC HWIO NHWC", "NCHW OIHW HWNC", "CHWN IHWO HWNC"])
@pytest.mark.parametrize(("strides", "dilations"), [((1, 1), (1, 1)), ((2, 1), (1, 2))])
def test_a_convolution_in_a_loop_is_the_convolution(spec, strides, dilations, key):
    of_images, of_kernel, of_result = spec.split()
    shape = dict(zip("NHWC", (2, 9, 8, 3), strict=True))
    taps = dict(zip("HWIO", (3, 2, 3, 4), strict=True))
    x = jax.random.normal(key, [shape[axis] for axis in of_images])
    kernel = jax.random.normal(key, [taps[axis] for axis in of_kernel])

    def function(x, kernel):
        return jax.lax.conv_general_dilated(
            *(x, kernel, strides, ((1, 0), (2, 1))),
            lhs_dilation=dilations,
            rhs_dilation=dilations[::-1],
            dimension_numbers=(of_images, of_kernel, of_result),
        )

    eqn = equation_of(function, x, kernel)
    got = jax.jit(lambda *operands: convolve_in_loop(operands, eqn.params))(x, kernel)
    np.testing.assert_allclose(got, function(x, kernel), rtol=1e-5, atol=1e-5)


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


@pytest.fixture
def small_parts(monkeypatch):
    """Lets parts be small, as the arrays of these tests are, also beside others."""
    monkeypatch.setattr(config, "LEAST_NBYTES_OF_CHUNK", 1)
    monkeypatch.setattr(config, "LEAST_SHARE_OF_LARGEST", 0)


def plan_of(function, *arguments):
    return make_plan(
        prepared(jax.make_jaxpr(function)(*arguments), [True] * len(arguments)),
        policy=CompressExpensive(min_nbytes=256),
        bits=Bits(),
    )


def plan_of_convolutions(key, batch=32):
    params = networks.conv_params(key, 3, 32)
    x = jax.ShapeDtypeStruct((batch, 8, 8, 32), jnp.float32)
    leaves, structure = jax.tree.flatten((params, x))

    def loss(*leaves):
        return networks.conv_loss(*jax.tree.unflatten(structure, leaves))

    return plan_of(loss, *leaves)


def divisions(plan):
    return [s.division for s in scheduled(plan) if s.division is not None]


@pytest.mark.parametrize(
    ("function", "mixes"),
    [
        (lambda x, c: c * x + c, False),
        (lambda x, c: products_of_rows(c * x, jnp.ones((32, 256))), False),
        (lambda x, c: products_of_rows(c * x, c), True),
    ],
)
def test_what_is_read_whole_is_not_there_in_parts(function, mixes):
    x = jnp.ones((64, 256))
    program = differentiate(jax.make_jaxpr(function)(x, x), [False, False])
    levels = chunking._Levels(program, 64, (), unpacked=(0,), are_apart=False)
    assert levels.add(Unpacking(0))
    assert all(map(levels.add, program.forward))
    assert levels.mixes_rows == mixes


@pytest.mark.usefixtures("small_parts")
class TestDivision:
    """How stretches are divided, without running them."""

    def test_every_stretch_that_unpacks_is_divided(self, key):
        for first, *others in stretches_of(scheduled(plan_of_convolutions(key))):
            unpacks = any(step.unpacked for step in (first, *others))
            assert first.division is not None or not unpacks
            assert all(step.division is None for step in others)

    def test_what_depends_on_sums_comes_in_another_loop(self, key):
        found = divisions(plan_of_convolutions(key))
        assert {len(d.loops) for d in found} > {1}
        for d in found:
            summed = set()
            for loop in d.loops:
                read = {
                    v
                    for piece in (*loop.before, *loop.by_rows, *loop.sums)
                    if isinstance(piece, Equation)
                    for v in piece.input_values
                }
                now = {v for eqn in loop.sums for v in eqn.outputs}
                assert now.isdisjoint(read)
                assert now.isdisjoint(summed)
                summed |= now

    def test_products_run_once(self, key):
        for d in divisions(plan_of_convolutions(key)):
            products = [
                piece
                for loop in d.loops
                for piece in (*loop.by_rows, *loop.sums)
                if isinstance(piece, Equation) and not piece.rule.is_cheap
            ]
            assert len(products) == len(set(products))

    def test_the_cotangent_is_made_with_the_gradient_of_the_weight(self, key):
        both = [
            {p.primitive for p in loop.by_rows if isinstance(p, Equation)}
            for d in divisions(plan_of_convolutions(key))
            for loop in d.loops
            if any(eqn.primitive == "conv_general_dilated" for eqn in loop.sums)
        ]
        # Nobody wants the cotangent of the first block's input more than it does.
        assert sum("conv_general_dilated" in found for found in both) >= len(both) - 1

    def test_results_are_written_in_the_place_of_what_nobody_reads(self, key):
        plan = plan_of_convolutions(key)
        steps = scheduled(plan)
        places = set()
        for n, step in enumerate(steps):
            if step.division is None:
                continue
            end = next(
                (m for m in range(n + 1, len(steps)) if steps[m].begins), len(steps)
            )
            later = {
                v
                for other in steps[end:]
                for eqn in (*other.recomputed, other.equation)
                if eqn is not None
                for v in eqn.input_values
            }
            for loop in step.division.loops:
                free = {v for v in loop.replaced if v is not None}
                assert free <= set(loop.sources)
                assert free.isdisjoint(later)
                assert all(v >= plan.program.num_arguments for v in free)
                places |= free
        assert places

    def test_a_lookup_gradient_has_a_stage_of_its_own(self, key):
        """It is not live while chunks compute the cotangent that it reads."""
        tokens = jax.random.randint(key, (32, 64), 0, 4096)
        x = jax.random.normal(key, (32, 64, 32))

        def loss(table, first, second):
            hidden = jnp.tanh(x @ first + second[0])
            return jnp.mean(jnp.tanh(table[tokens] + hidden @ second) ** 2)

        plan = plan_of(loss, *(jnp.ones((n, 32)) for n in (4096, 32, 32)))
        are_chunked = set()
        for first, *others in stretches_of(scheduled(plan)):
            equations = [step.equation for step in (first, *others) if step.equation]
            looks_up = any(eqn.primitive == "scatter-add" for eqn in equations)
            assert not (looks_up and first.division)
            are_chunked.add(first.division is not None)
        assert True in are_chunked

    def test_mixed_rows_are_not_divided(self):
        x = jnp.ones((512, 512))

        def mixed(x, w):
            y = jnp.tanh(x @ w)
            return jnp.sum((y.T * y) @ w)

        def alone(x, w):
            y = jnp.tanh(x @ w)
            return jnp.sum((y * y) @ w)

        assert len(divisions(plan_of(alone, x, x))) > len(
            divisions(plan_of(mixed, x, x))
        )

    @pytest.mark.parametrize(
        ("devices", "batch", "count"),
        [
            (1, 12, 6),
            (1, 7, 7),
            (1, 11, None),
            (1, 34, 2),
            (4, 32, 8),
            (4, 24, 6),
            (4, 8, 2),
            (4, 4, None),
        ],
    )
    def test_rows_are_divided_evenly(self, devices, batch, count, key, monkeypatch):
        monkeypatch.setattr(jax, "device_count", lambda: devices)
        found = {d.num_parts for d in divisions(plan_of_convolutions(key, batch))}
        assert found == ({count} if count else set())


def test_small_parts_are_not_worth_it(key, monkeypatch):
    nbytes = 32 * 8 * 8 * 32 * 4
    for least, counts in ((nbytes // 4, {4}), (nbytes, set())):
        monkeypatch.setattr(config, "LEAST_NBYTES_OF_CHUNK", least)
        found = divisions(plan_of_convolutions(key))
        assert {d.num_parts for d in found} == counts


def test_what_is_small_beside_the_largest_is_not_divided(monkeypatch):
    """It decides nothing about how much memory there has to be."""
    monkeypatch.setattr(config, "LEAST_NBYTES_OF_CHUNK", 1)

    def loss(narrow, wide, last, x):
        return jnp.sum(jnp.tanh(jnp.tanh(jnp.tanh(x @ narrow) @ wide) @ last))

    def widths_in_parts(width):
        shapes = ((64, width), (width, 1024), (1024, 64), (8192, 64))
        plan = plan_of(loss, *map(jnp.ones, shapes))
        return {
            plan.program.avals[piece.value].shape[1]
            for division in divisions(plan)
            for loop in division.loops
            for piece in loop.by_rows
            if isinstance(piece, Unpacking)
        }

    assert widths_in_parts(1024) == {1024}
    assert widths_in_parts(512) == {1024}
    monkeypatch.setattr(config, "LEAST_SHARE_OF_LARGEST", 0.5)
    assert widths_in_parts(512) == {1024, 512}


def test_no_more_parts_than_asked_for(key, monkeypatch):
    monkeypatch.setattr(config, "LEAST_NBYTES_OF_CHUNK", 1)
    plan = plan_of_convolutions(key)
    for most, counts in ((1, set()), (2, {2}), (5, {4}), (16, {16})):
        found = [step.division for step in scheduled(plan, most)]
        assert {d.num_parts for d in found if d is not None} == counts


@pytest.mark.parametrize(
    ("max_parts", "error"),
    [(0, ValueError), (-1, ValueError), (2.0, TypeError), (True, TypeError)],
)
def test_what_is_no_number_of_parts_is_refused(max_parts, error):
    message = r"`remat_compress\(max_parts=...\)` must be an integer from 1 .*but got"
    with pytest.raises(error, match=message):
        dafjax.remat_compress(jnp.sin, max_parts=max_parts)


def test_large_sums_are_not_taken_in_parts(monkeypatch):
    """A second array for the sum would take what is saved."""
    monkeypatch.setattr(config, "LEAST_NBYTES_OF_CHUNK", 1)

    def loss(w, x):
        return jnp.sum(jnp.tanh(jnp.tanh(x @ w) @ w))

    def sums_products(num_rows):
        plan = plan_of(loss, jnp.ones((512, 512)), jnp.ones((num_rows, 512)))
        loops = [loop for d in divisions(plan) for loop in d.loops]
        assert loops
        return any(
            eqn.primitive == "dot_general" for loop in loops for eqn in loop.sums
        )

    assert sums_products(4096)
    assert not sums_products(64)


def gradient(loss, *arguments, **options):
    return jax.jit(jax.grad(dafjax.remat_compress(loss, **options)))(*arguments)


def assert_close(got, expected, tolerance):
    for a, b in zip(*map(jax.tree.leaves, (got, expected)), strict=True):
        assert relative_error(a, b) < tolerance


def counted(monkeypatch):
    """Counts the parts of the loops that run."""
    counts = []
    run = Chunks.run

    def counting(chunks):
        if chunks.item.mode == "loop":
            counts.append(chunks.item.division.num_parts)
        return run(chunks)

    monkeypatch.setattr(Chunks, "run", counting)
    return counts


def whole(monkeypatch):
    monkeypatch.setattr(stages, "divide", lambda *arguments: None)


@pytest.mark.usefixtures("small_parts")
class TestGradients:
    """They are those of the whole but for the order in which sums are taken."""

    def test_of_convolutions_and_norms(self, key, monkeypatch):
        params = networks.conv_params(key, 2, 32)
        x = jax.random.normal(key, (32, 8, 8, 32))
        counts = counted(monkeypatch)
        got = gradient(networks.conv_loss, params, x)
        assert set(counts) == {8}
        whole(monkeypatch)
        assert_close(got, gradient(networks.conv_loss, params, x), 1e-5)

    @pytest.mark.parametrize("batch", [2, 3, 8])
    def test_of_one_example_at_a_time(self, batch, key, monkeypatch):
        monkeypatch.setattr(jax, "device_count", lambda: 1)
        params = networks.conv_params(key, 2, 32)
        x = jax.random.normal(key, (batch, 16, 16, 32))
        counts = counted(monkeypatch)
        got = gradient(networks.conv_loss, params, x)
        assert set(counts) == {batch}
        whole(monkeypatch)
        assert_close(got, gradient(networks.conv_loss, params, x), 1e-5)

    def test_at_once_where_that_is_asked_for(self, key, monkeypatch):
        params = networks.conv_params(key, 3, 32)
        x = jax.random.normal(key, (32, 8, 8, 32))
        counts = counted(monkeypatch)
        for most in (1, 2):
            loss = dafjax.remat_compress(networks.conv_loss, max_parts=most)
            jax.jit(jax.grad(loss)).lower(params, x)
            assert set(counts) == ({2} if most > 1 else set())

    def test_parts_of_sums_are_added_in_32_bits(self, key, monkeypatch):
        def as_type(dtype):
            return jax.tree.map(lambda x: x.astype(dtype), (params, x))

        params = networks.conv_params(key, 2, 32)
        x = jax.random.normal(key, (32, 8, 8, 32))
        counts = counted(monkeypatch)
        got = gradient(networks.conv_loss, *as_type("bfloat16"))
        assert set(counts) == {8}
        whole(monkeypatch)
        at_once = gradient(networks.conv_loss, *as_type("bfloat16"))
        exact = jax.jit(jax.grad(networks.conv_loss))(*as_type("float32"))
        for a, b, c in zip(*map(jax.tree.leaves, (got, at_once, exact)), strict=True):
            assert a.dtype == b.dtype == jnp.bfloat16
            assert relative_error(a, c) <= 1.05 * relative_error(b, c)

    @pytest.mark.parametrize(
        "options",
        [
            {"policy": CompressNames(("y",))},
            {"rematerialize": True},
        ],
        ids=repr,
    )
    def test_of_other_plans(self, options, key, monkeypatch):
        """Where one residual is unpacked behind what was recomputed of another."""
        w = jax.random.normal(key, (32, 32)) / 6
        x = jax.random.normal(key, (16, 64, 32))

        def gradient():
            wrapped = dafjax.remat_compress(networks.named_loss, **options)
            return jax.jit(jax.grad(wrapped))(w, x)

        counts = counted(monkeypatch)
        got = gradient()
        assert counts
        whole(monkeypatch)
        assert relative_error(got, gradient()) < 1e-5

    def test_of_attention(self, key, monkeypatch):
        x = jax.random.normal(key, (8, 64, 32))
        weights = jax.random.normal(key, (3, 32, 32)) / 6

        def loss(weights, x):
            for _ in range(2):
                q, k, v = jnp.einsum("btc,ncd->nbtd", x, weights)
                scores = jnp.einsum("bqd,bkd->bqk", q, k) / 6
                x = x + jnp.einsum("bqk,bkd->bqd", jax.nn.softmax(scores), v)
                mean = x.mean(-1, keepdims=True)
                x = jax.nn.gelu((x - mean) / (1 + jnp.std(x, -1, keepdims=True)))
            return jnp.mean(x**2)

        counts = counted(monkeypatch)
        got = gradient(loss, weights, x)
        assert counts
        whole(monkeypatch)
        assert relative_error(got, gradient(loss, weights, x)) < 1e-5

    def test_cotangents_and_residuals_are_left_as_they_were(self, key, monkeypatch):
        """Results take the place of what XLA may write to, and of nothing else."""
        params = networks.conv_params(key, 2, 32)
        x = jax.random.normal(key, (32, 8, 8, 32))

        def blocks(x):
            for p in params:
                x = networks.conv_block(p, x)
            return x

        counts = counted(monkeypatch)
        _, pullback = jax.vjp(dafjax.remat_compress(blocks), x)
        cotangent = jax.random.normal(jax.random.fold_in(key, 1), x.shape)
        before = np.array(cotangent)
        (first,), (second,) = pullback(cotangent), pullback(cotangent)
        assert counts
        np.testing.assert_array_equal(cotangent, before)
        np.testing.assert_array_equal(first, second)

    def test_vmapped(self, key, monkeypatch):
        params = networks.conv_params(key, 2, 32)
        xs = jax.random.normal(key, (2, 16, 8, 8, 32))
        counts = counted(monkeypatch)
        wrapped = dafjax.remat_compress(networks.conv_loss)
        got = jax.jit(jax.vmap(jax.grad(wrapped), (None, 0)))(params, xs)
        assert counts
        whole(monkeypatch)
        wrapped = dafjax.remat_compress(networks.conv_loss)
        expected = jax.jit(jax.vmap(jax.grad(wrapped), (None, 0)))(params, xs)
        assert_close(got, expected, 1e-5)

    # As in test_apart.py.
    def test_shared_by_devices(self, key, monkeypatch):
        auto = (jax.sharding.AxisType.Auto,)
        mesh = jax.make_mesh((2,), ("data",), axis_types=auto)
        rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
        params = networks.conv_params(key, 2, 32)
        x = jax.random.normal(key, (32, 8, 8, 32))
        counts = counted(monkeypatch)
        policy = CompressExpensive(Affine(bits=2))
        shared = jax.device_put(x, rows)
        got = gradient(networks.conv_loss, params, shared, policy=policy)
        assert counts
        expected = gradient(networks.conv_loss, params, x, policy=policy)
        assert_close(got, expected, 1e-4)


def test_numbers_of_stretches_are_those_of_their_steps(key):
    steps = scheduled(plan_of_convolutions(key))
    assert list(itertools.chain(*stretches_of(steps))) == list(steps)


@pytest.mark.usefixtures("small_parts")
class TestInAPagePool:
    """Each part of a residual is an entry of its own."""

    @pytest.fixture(autouse=True)
    def small_entries(self, monkeypatch, stochastic):
        monkeypatch.setattr(_page_pool, "_NUM_ELEMENTS_OF_PAGE", 1)

    @staticmethod
    def example(key):
        params = networks.conv_params(key, 2, 32)
        return params, jax.random.normal(key, (32, 8, 8, 32))

    @staticmethod
    def gradient(pool, bits=2):
        loss = dafjax.remat_compress(networks.conv_loss, bits=bits, store=pool)
        compiled = jax.jit(jax.grad(loss))
        return lambda *arguments: jax.block_until_ready(compiled(*arguments))

    def test_parts_follow_each_other(self, key, monkeypatch):
        """Gradients are those with arrays but for the order of sums."""
        params, x = self.example(key)
        counts = counted(monkeypatch)
        with dafjax.stores.PagePool() as pool:
            got = self.gradient(pool)(params, x)
            assert set(counts) == {8}
            stats = pool.stats()
            assert stats.total_entries == 8 * len(stats.sites)
        assert_close(got, gradient(networks.conv_loss, params, x), 1e-5)
        whole(monkeypatch)
        with dafjax.stores.PagePool() as pool:
            at_once = self.gradient(pool)(params, x)
            stats = pool.stats()
            assert stats.total_entries == len(stats.sites)
        assert_close(got, at_once, 1e-5)

    def test_entries_are_freed_behind_their_last_loop(self, key):
        params, x = self.example(key)
        with dafjax.stores.PagePool(backward_once=True) as pool:
            take = self.gradient(pool)
            for _ in range(2):
                got = take(params, x)
                assert pool.stats().live_entries == 0
        assert_close(got, gradient(networks.conv_loss, params, x), 1e-5)

    def test_importances_are_those_of_the_whole(self, key, monkeypatch):
        params, x = self.example(key)

        def importances():
            with dafjax.stores.PagePool() as pool:
                take = self.gradient(pool, bits=dafjax.AverageBits(2))
                for _ in range(2):
                    take(params, x)
                sites = pool.stats().sites
            return np.array([site.importance for site in sites.values()])

        counts = counted(monkeypatch)
        got = importances()
        assert set(counts) == {8}
        whole(monkeypatch)
        np.testing.assert_allclose(got, importances(), rtol=0.1)

    def test_a_budget_takes_planes_of_parts(self, key):
        params, x = self.example(key)
        with dafjax.stores.PagePool() as pool:
            take = self.gradient(pool, bits=8)
            exact = take(params, x)
            pool.budget = int(0.7 * pool.stats().nbytes)
            got = take(params, x)
            assert pool.stats().evictions > 0
            assert pool.stats().committed_nbytes <= pool.budget
        assert_close(got, exact, 1.0)

    def test_bits_of_arrays_are_allocated_in_parts(self, key, monkeypatch):
        params, x = self.example(key)
        loss = dafjax.remat_compress(networks.conv_loss, bits=dafjax.AverageBits(2))
        counts = counted(monkeypatch)
        step = dafjax.jit(jax.grad(loss))
        for _ in range(3):
            got = step(params, x)
        assert set(counts) == {8}
        exact = jax.jit(jax.grad(networks.conv_loss))(params, x)
        assert_close(got, exact, 1.0)


def test_moments_of_parts_are_those_of_the_whole(key):
    x = 3.0 + jax.random.normal(key, (8, 16, 16)) * jnp.arange(8.0)[:, None, None]
    parts = [sample_rows(x[n : n + 2], 4) for n in range(0, 8, 2)]
    (mean_square,), (variance,) = moments_of_rows([parts])
    assert float(mean_square) == pytest.approx(float(jnp.mean(x * x)), rel=1e-5)
    assert float(variance) == pytest.approx(float(jnp.var(x)), rel=1e-5)


def test_parts_of_pool_entries_fill_pages():
    codec = dafjax.stores.PagePool(name="parts").codec(Affine(), site="x", num_parts=8)
    for rows, count in ((64, 8), (32, 4), (8, 1), (4, 1)):
        like = jax.ShapeDtypeStruct((rows, 64, 1024), jnp.float32)
        assert codec.packed_nbytes(like) == 16 * count
        assert codec.packs_parts(like, count)
        assert not codec.packs_parts(like, 16)
    # Rows that fill tiles together, 64 of them; and rows that never do.
    assert codec.packs_parts(jax.ShapeDtypeStruct((1 << 20, 8), jnp.float32), 8)
    assert not codec.packs_parts(jax.ShapeDtypeStruct((8 * 131071, 8), jnp.float32), 8)
