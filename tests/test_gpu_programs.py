"""Whole programs for GPUs, compiled without one: custom calls, memory, barriers."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.compilation_cache import compilation_cache

import dafjax
from benchmarks import training, transformers
from benchmarks.gpu_devices import GPUS, one_device
from benchmarks.gpu_work import work_of
from benchmarks.methods import make_method
from benchmarks.mlp import Workload
from dafjax import _remat_compress, _rules
from dafjax._native import _cuda, hold, pin, tie
from dafjax._passes import pipeline
from dafjax._passes.pipeline import PASSES
from dafjax._plan.plan import ProgramPlan
from dafjax._schedule import chunks, forward, interpreter, lower, stages
from dafjax._schedule.steps import Ties
from dafjax._trace.equation import Equation
from dafjax.codecs import Affine, Bitmask
from dafjax.stores import PagePool
from tests import networks
from tests.helpers import slow


pytestmark = pytest.mark.gpu_programs

HERE = "H200"
DEVICES = [HERE, "Orin", slow("Thor")]

# Tests that compare with the same program run in one process, which compiles it once.
_OF_STEPS = pytest.mark.xdist_group("steps")
_OF_TRANSFORMERS = pytest.mark.xdist_group("transformers")
_OF_CONVOLUTIONS = pytest.mark.xdist_group("convolutions")


@pytest.fixture(autouse=True, scope="module")
def compile_anew():
    """A program for an absent device cannot be loaded from the cache."""
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    yield
    jax.config.update("jax_enable_compilation_cache", True)
    compilation_cache.reset_cache()


@functools.cache
def compiled(method, device=HERE, *, layers=8, ties=True, library=True):
    """Compiles a step of blocks whose activations have 2, 8 and 8 MiB."""
    workload = Workload(make_method(method, bits=2), layers, width=256, tokens=2048)
    with pytest.MonkeyPatch.context() as monkeypatch:
        if not ties:
            none = Ties(**{name: False for name in Ties.__dataclass_fields__})
            monkeypatch.setattr(_remat_compress, "Ties", lambda: none)
            # Loops over parts run one after another by themselves.
            monkeypatch.setattr(stages, "divide", lambda *arguments: None)
        if not library:
            monkeypatch.setattr(_cuda, "register", lambda: False)
        return workload.compile(sharding=one_device(GPUS[device]))


def temp_of(program):
    return program.memory_analysis().temp_size_in_bytes


def temp_nbytes(*args, **kwargs):
    return temp_of(compiled(*args, **kwargs))


def custom_calls(program):
    return set(re.findall(r'custom_call_target="(dafjax_\w+)"', program.as_text()))


@_OF_STEPS
@pytest.mark.parametrize("device", DEVICES)
def test_a_program_packs_by_custom_calls(device):
    assert "dafjax_pack_affine" in custom_calls(compiled("compress", device))


def test_what_a_product_reads_as_it_is_stored_is_unpacked_by_custom_calls():
    """Where values are scaled back, XLA decodes in the kernel that scales."""

    def linear(weights, x):
        return jnp.mean(functools.reduce(jnp.matmul, weights, x) ** 2)

    assert custom_calls(gradient_of_products(linear)) >= {
        "dafjax_pack_affine",
        "dafjax_unpack_affine",
    }


def shifts_of_forward_pass(program):
    """Returns the shifts before the backward pass."""
    lines = program.as_text().splitlines()
    return [line for line in lines if " shift-" in line and "transpose(" not in line]


def test_beside_custom_calls_nothing_packs():
    """Packing in jax.numpy shifts bits."""
    assert shifts_of_forward_pass(compiled("compress", layers=2)) == []
    without = compiled("compress", layers=2, library=False)
    assert shifts_of_forward_pass(without)
    assert custom_calls(without) == set()


def test_what_no_product_reads_is_decoded_in_the_kernels_that_read_it(monkeypatch):
    """So it is never written, and the program moves fewer bytes, by fewer kernels."""
    params = jax.eval_shape(lambda: networks.conv_params(jax.random.key(0), 3, 64))
    x = jax.ShapeDtypeStruct((64, 32, 32, 64), jnp.float32)

    def gradient(params, x):
        return jax.grad(dafjax.remat_compress(networks.conv_loss))(params, x)

    fused = compile_on("H200", gradient, params, x)
    assert custom_calls(fused) == {"dafjax_pack_affine", "dafjax_tie"}
    for codec in (Affine, Bitmask):
        monkeypatch.setattr(codec, "decode_fused", codec.decode)
    called = compile_on("H200", lambda *operands: gradient(*operands), params, x)
    assert custom_calls(called) > custom_calls(fused)
    work, of_calls = (work_of(program.as_text()) for program in (fused, called))
    assert work.moved_nbytes < 0.9 * of_calls.moved_nbytes
    assert work.kernels < of_calls.kernels
    assert temp_of(fused) < 1.01 * temp_of(called)


@_OF_STEPS
@pytest.mark.parametrize(
    ("device", "most"), [(HERE, 0.18), ("Orin", 0.25), slow("Thor", 0.25)]
)
def test_a_step_needs_a_fraction_of_plain(device, most):
    assert temp_nbytes("compress", device) < most * temp_nbytes("save_all", device)


@_OF_STEPS
def test_a_step_needs_less_than_under_checkpoint():
    assert temp_nbytes("compress") < 0.9 * temp_nbytes("remat_full")


@_OF_STEPS
@pytest.mark.parametrize("device", [slow(HERE), slow("Orin"), slow("Thor")])
def test_a_step_of_many_layers_needs_less_than_plain_and_checkpoint(device):
    got = temp_nbytes("compress", device, layers=16)
    assert got < 0.16 * temp_nbytes("save_all", device, layers=16)
    assert got < 0.9 * temp_nbytes("remat_full", device, layers=16)


@_OF_STEPS
@pytest.mark.slow
def test_without_ties_less_is_saved_of_many_layers():
    untied = temp_nbytes("compress", layers=16, ties=False)
    assert untied > 1.5 * temp_nbytes("compress", layers=16)


@_OF_STEPS
def test_without_ties_less_is_saved():
    assert temp_nbytes("compress", ties=False) > 1.3 * temp_nbytes("compress")


@_OF_STEPS
def test_without_ties_little_is_saved_where_custom_calls_decode(monkeypatch):
    monkeypatch.setattr(Affine, "decode_fused", Affine.decode)
    untied = compiled.__wrapped__("compress", ties=False).memory_analysis()
    assert untied.temp_size_in_bytes > 0.4 * temp_nbytes("save_all")


def aside(wait):
    """Compiles a value that waits for an unread sine."""

    def function(x):
        return wait(x, jnp.sin(x))[0]

    x = jax.ShapeDtypeStruct((64,), jnp.float32, sharding=one_device(GPUS[HERE]))
    return jax.jit(function).lower(x).compile().as_text()


def test_what_nobody_reads_is_held_on_to():
    assert "sine" in aside(lambda x, y: hold(x, after=[y]))
    # What that is a custom call for.
    assert "sine" not in aside(tie)


def residual_loss(params, x):
    """A loss of blocks of a residual stream."""
    for weight, bias in params:
        x = x + jax.nn.gelu(x @ weight + bias)
    return jnp.mean(x**2)


def residual_blocks():
    """Returns arguments of the loss: 4 blocks, and 4096 rows of 512."""
    block = tuple(jax.ShapeDtypeStruct(s, jnp.float32) for s in ((512, 512), (512,)))
    return [block] * 4, jax.ShapeDtypeStruct((4096, 512), jnp.float32)


@pytest.mark.parametrize("bits", [2, dafjax.AverageBits(2)], ids=repr)
def test_page_pools_in_loops(bits, monkeypatch):
    """XLA:GPU computes which part an iteration reads; no barrier may be in its way."""
    monkeypatch.setattr(_rules, "installed_plugins", tuple)
    with PagePool() as pool:
        loss = dafjax.remat_compress(residual_loss, bits=bits, store=pool)
        program = compile_on("H200", jax.grad(loss), *residual_blocks())
    assert custom_calls(program) >= {"dafjax_pool_put", "dafjax_pool_get"}
    assert any(" while(" in line for line in program.as_text().splitlines())


def test_few_rows_are_summed_in_two_steps():
    """XLA has 16 blocks of threads for 4096 rows of 512 columns."""
    of_groups = []
    for loss in (residual_loss, dafjax.remat_compress(residual_loss)):
        text = compile_on("H200", jax.grad(loss), *residual_blocks()).as_text()
        of_groups.append(len(re.findall(r" = f32\[16,512\]\S* reduce\(", text)))
    # The gradients of the biases.
    assert of_groups == [0, 4]


def strided_loss(params, x):
    """Blocks behind convolutions that halve the image."""
    for p in params:
        x = jax.lax.conv_general_dilated(
            x, p["kernel"], (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        x = networks.conv_block(p, x)
    return jnp.mean(x**2)


def test_gradients_of_strided_convolutions_are_recognized():
    """Without a call of its own, zeros are put between the elements of a cotangent."""
    params = jax.eval_shape(lambda: networks.conv_params(jax.random.key(0), 3, 32))
    x = jax.ShapeDtypeStruct((32, 32, 32, 32), jnp.float32)
    calls = []
    for loss in (strided_loss, dafjax.remat_compress(strided_loss)):
        text = compile_on("H200", jax.grad(loss), params, x).as_text()
        calls.append(text.count("$convBackwardInput"))
    # Three strided convolutions and two of the blocks behind them: the image has no
    # cotangent.
    assert calls == [5, 5]


def compile_on(device, function, *arguments, donated=()):
    sharding = one_device(GPUS[device])
    placed = training.place(arguments, sharding)
    return jax.jit(function, donate_argnums=donated).lower(*placed).compile()


@functools.cache
def gradient_of_convolutions(*, loops=False, num_images=64, **options):
    """Compiles a gradient; an image has 256 KiB of each of the largest residuals."""
    params = jax.eval_shape(lambda: networks.conv_params(jax.random.key(0), 3, 64))
    x = jax.ShapeDtypeStruct((num_images, 32, 32, 64), jnp.float32)
    loss = dafjax.remat_compress(networks.conv_loss, **options)
    with pytest.MonkeyPatch.context() as monkeypatch:
        if loops:
            monkeypatch.setattr(_rules, "installed_plugins", tuple)
        return compile_on("H200", jax.grad(loss), params, x)


def loops_of(program):
    return [line for line in program.as_text().splitlines() if " while(" in line]


@_OF_CONVOLUTIONS
def test_loops_over_parts_run_without_waiting_for_the_host():
    """Where XLA knows how often, it asks no device whether a loop goes on."""
    loops = loops_of(gradient_of_convolutions(loops=True))
    assert loops
    assert all('"known_trip_count":{"n":"8"}' in line for line in loops)


@_OF_CONVOLUTIONS
def test_parts_are_apart_and_take_less_than_in_loops():
    apart = gradient_of_convolutions(max_parts=2)
    in_loops = gradient_of_convolutions(loops=True)
    assert loops_of(apart) == []
    work, of_loops = work_of(apart.as_text()), work_of(in_loops.as_text())
    assert work.kernels < 0.6 * of_loops.kernels
    assert work.moved_nbytes < 0.9 * of_loops.moved_nbytes
    assert temp_of(apart) < 1.1 * temp_of(in_loops)


def test_what_is_in_a_page_pool_is_in_parts_that_are_apart():
    """Calls unpack it: in four parts it takes the memory of a loop over eight."""
    with PagePool() as pool, PagePool() as other:
        apart = gradient_of_convolutions(num_images=128, store=pool)
        in_loops = gradient_of_convolutions(num_images=128, store=other, loops=True)
    assert custom_calls(apart) >= {"dafjax_pool_put", "dafjax_pool_get"}
    assert loops_of(apart) == []
    work, of_loops = work_of(apart.as_text()), work_of(in_loops.as_text())
    assert work.kernels < 0.6 * of_loops.kernels
    assert work.moved_nbytes < 0.9 * of_loops.moved_nbytes
    assert temp_of(apart) < 1.1 * temp_of(in_loops)


def products_loss(weights, x):
    for w in weights:
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2)


@functools.cache
def gradient_of_products(products_loss=products_loss, **options):
    weights = [jax.ShapeDtypeStruct((256, 256), jnp.float32)] * 4
    x = jax.ShapeDtypeStruct((64, 256, 256), jnp.float32)
    loss = dafjax.remat_compress(products_loss, **options)
    return compile_on("H200", lambda *args: jax.grad(loss)(*args), weights, x)


def test_all_examples_at_once_need_no_more_than_halves():
    at_once, halves = gradient_of_products(), gradient_of_products(max_parts=2)
    work, of_halves = work_of(at_once.as_text()), work_of(halves.as_text())
    assert work.kernels < 0.75 * of_halves.kernels
    assert work.moved_nbytes < 0.9 * of_halves.moved_nbytes
    assert temp_of(at_once) < 1.01 * temp_of(halves)


@_OF_CONVOLUTIONS
@pytest.mark.parametrize(
    ("compile_it", "place", "name", "without"),
    [
        # The last token is unread, and XLA drops the values that it waits for.
        (
            functools.partial(gradient_of_products),
            *(interpreter, "_one_behind", lambda gradients, *_, **__: list(gradients)),
        ),
        # XLA delays sums until their later use.
        (
            functools.partial(gradient_of_convolutions, max_parts=2),
            *(chunks, "_after_chunk", lambda made, token: (made, token)),
        ),
    ],
)
def test_without_one_of_its_orders_more_is_there(
    compile_it, place, name, without, monkeypatch
):
    nbytes = temp_of(compile_it())
    monkeypatch.setattr(place, name, without)
    # The cached program has the order.
    anew = functools.partial(compile_it.func.__wrapped__, **compile_it.keywords)
    assert temp_of(anew()) > 1.1 * nbytes


@_OF_CONVOLUTIONS
def test_what_was_decoded_is_not_written_for_a_second_kernel():
    """Each level of a norm decodes again. Otherwise codes stay as 32-bit integers."""
    text = gradient_of_convolutions().as_text()
    whole = r" = \(?(?:\S+, )*(?:u32|s32|pred)\[64,(?:32,32,64|128,1,16,32)\]"
    lines = text[text.index("ENTRY") :].splitlines()
    assert [line for line in lines if re.search(whole, line)] == []


def step_nbytes(device, *, layouts, layers=3):
    """Returns the temp bytes of a training step with kernels of 9 MiB."""

    def step(params, trace, x):
        gradient = jax.grad(dafjax.remat_compress(networks.conv_loss))(params, x)
        trace = jax.tree.map(lambda t, g: 0.9 * t + g, trace, gradient)
        return jax.tree.map(lambda p, t: p - 0.1 * t, params, trace), trace

    params = jax.eval_shape(
        lambda: networks.conv_params(jax.random.key(0), layers, 512)
    )
    x = jax.ShapeDtypeStruct((32, 4, 4, 512), jnp.float32)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(_remat_compress, "Ties", lambda: Ties(layouts=layouts))
        compiled = compile_on(device, step, params, params, x, donated=(0, 1))
    return temp_of(compiled)


@pytest.mark.parametrize(("layers", "least"), [(3, 1.3), slow(6, 1.5)])
def test_where_no_layout_is_pinned_weights_are_turned_round_at_the_start(layers, least):
    """Orin runs convolutions in another order than the one arrays have."""
    pinned, free = (
        step_nbytes("Orin", layouts=layouts, layers=layers) for layouts in (True, False)
    )
    assert free > least * pinned


def test_what_is_pinned_is_rearranged_behind_a_call():
    def function(x):
        return jnp.sin(pin(x)).T.reshape(-1)

    x = jax.ShapeDtypeStruct((64, 32), jnp.float32, sharding=one_device(GPUS[HERE]))
    assert custom_calls(jax.jit(function).lower(x).compile()) == {"dafjax_tie"}


def work_of_transformer(device, *, layers, **options):
    """Returns the work of a GPT-2's gradient, its blocks in a Python loop.

    Compiled anew, because the test may have changed the program.
    """
    jax.clear_caches()
    shape = transformers.Shape(
        bits=2, layers=layers, width=256, heads=4, length=128, **options
    )
    gradient = shape.workload("compress", batch=8, scan=False)
    return work_of(gradient.compile(sharding=one_device(GPUS[device])).as_text())


@functools.cache
def usual_work(device=HERE, *, layers=1, **options):
    """Returns the work of a GPT-2's gradient, as users have it."""
    return work_of_transformer(device, layers=layers, **options)


@_OF_TRANSFORMERS
@pytest.mark.parametrize("device", ["H200", slow("Orin")])
def test_cotangents_are_made_in_the_order_in_which_products_read_them(
    device, monkeypatch
):
    """Products return cotangents of queries, keys and values in another order."""
    ordered = usual_work(device)
    monkeypatch.setattr(interpreter, "row_major", lambda x: x)
    turned = work_of_transformer(device, layers=1)
    # The operands of the products of a layer, written and read again.
    nbytes = 2 * 4 * 8 * 128 * 3 * 256
    assert ordered.moved_nbytes < turned.moved_nbytes - nbytes
    assert ordered.kernels < turned.kernels


@pytest.mark.slow
@_OF_TRANSFORMERS
@pytest.mark.usefixtures("standard_promotion")
def test_a_weight_that_is_converted_waits_in_the_kernel_that_converts_it(monkeypatch):
    """This kernel reads it in float32 and writes it in bfloat16."""
    waits_inside = usual_work(layers=2, dtype="bfloat16")
    monkeypatch.setattr(ProgramPlan, "weights_as_read", ProgramPlan.whole_weights)
    waits_before = work_of_transformer(HERE, layers=2, dtype="bfloat16")
    # Of each block: read and written in float32 once more.
    num_weights, num_elements = 4 * 2, 12 * 256 * 256 * 2
    assert waits_inside.kernels <= waits_before.kernels - num_weights
    less_moved = waits_before.moved_nbytes - waits_inside.moved_nbytes
    assert less_moved >= 2 * 4 * num_elements


@pytest.mark.slow
@_OF_TRANSFORMERS
def test_a_weight_that_products_read_turned_waits_in_no_array_of_its_own(monkeypatch):
    """A tied table is padded where it is read, and not copied before."""
    waits_inside = usual_work(layers=2)
    monkeypatch.setattr(ProgramPlan, "weights_as_read", ProgramPlan.whole_weights)
    waits_before = work_of_transformer(HERE, layers=2)
    table_nbytes = 4 * 5000 * 256
    less_moved = waits_before.moved_nbytes - waits_inside.moved_nbytes
    assert less_moved >= 2 * table_nbytes


@pytest.mark.slow
@_OF_TRANSFORMERS
@pytest.mark.usefixtures("standard_promotion")
def test_products_make_gradients_of_weights_in_the_dtype_of_the_weights(monkeypatch):
    """They are in float32, and were written in bfloat16 before that."""
    in_float32 = usual_work(layers=2, dtype="bfloat16")
    left = tuple(item for item in PASSES if item.name != "gradient_epilogue")
    monkeypatch.setattr(pipeline, "PASSES", left)
    converted = work_of_transformer(HERE, layers=2, dtype="bfloat16")
    num_weights, num_elements = 4 * 2, 12 * 256 * 256 * 2
    assert in_float32.kernels <= converted.kernels - num_weights
    # Written and read once less, of four bytes for an element less two.
    less_moved = converted.moved_nbytes - in_float32.moved_nbytes
    assert less_moved >= 2 * num_elements


@_OF_TRANSFORMERS
def test_tables_are_not_copied_for_lookups(monkeypatch):
    looked_up = usual_work()
    monkeypatch.setattr(Equation, "whole_input_values", Equation.input_values)
    copied = work_of_transformer(HERE, layers=1)
    assert looked_up.kernels < copied.kernels
    # Of 5000 words: read and written.
    assert looked_up.moved_nbytes <= copied.moved_nbytes - 2 * 4 * 5000 * 256


@pytest.mark.slow
def test_zeros_for_gradients_of_lookups_are_made_late(monkeypatch):
    """Where the function is run again: else a table of them waits from the start."""

    def nbytes():
        shape = transformers.Shape(bits=2, layers=3, length=128)
        gradient = shape.workload("compress_again", batch=1, scan=False)
        program = gradient.compile(sharding=one_device(GPUS[HERE]))
        return temp_of(program)

    late = nbytes()
    jax.clear_caches()
    monkeypatch.setattr(lower, "_filled_for_lookups", lambda plan: frozenset())
    table_nbytes = 4 * 5000 * 768
    assert late < nbytes() - 0.9 * table_nbytes


@pytest.mark.slow
def test_a_norm_sums_in_the_kernel_that_makes_what_it_reads(monkeypatch):
    early = work_of_transformer(HERE, layers=3)
    monkeypatch.setattr(forward, "adds_operands", lambda primitive: False)
    late = work_of_transformer(HERE, layers=3)
    # Two of each block, but not the norm before the last packed residual.
    num_norms = 2 * 3 - 1
    assert early.kernels <= late.kernels - num_norms
    stream_nbytes = 4 * 8 * 128 * 256
    assert early.moved_nbytes <= late.moved_nbytes - num_norms * stream_nbytes


@_OF_CONVOLUTIONS
def test_measured_bits_add_little_to_a_program():
    """The measurement takes a kernel or two for each sampled value."""
    params = jax.eval_shape(lambda: networks.conv_params(jax.random.key(0), 3, 64))
    x = jax.ShapeDtypeStruct((64, 32, 32, 64), jnp.float32)
    loss = dafjax.remat_compress(networks.conv_loss, bits=dafjax.AverageBits(2))
    placed = training.place((params, x), one_device(GPUS[HERE]))
    measured = dafjax.jit(jax.grad(loss)).lower(*placed).compile()
    fixed = gradient_of_convolutions()
    # The sums of sensitivities, small numbers; no loop over chunks.
    assert len(loops_of(measured)) <= 1
    assert temp_of(measured) < 1.1 * temp_of(fixed)
    assert "dafjax_ledger_note" in custom_calls(measured)
    kernels, of_fixed = (
        work_of(program.as_text()).kernels for program in (measured, fixed)
    )
    assert kernels < 2.5 * of_fixed


@pytest.mark.parametrize("device", [HERE, slow("Orin"), slow("Thor")])
def test_a_resnet_needs_a_quarter(device):
    nbytes = {}
    for method in ("save_all", "compress"):
        workload = training.Workload(make_method(method, bits=2), batch=64, width=16)
        program = workload.compile(sharding=one_device(GPUS[device]))
        nbytes[method] = temp_of(program)
    assert nbytes["compress"] < 0.25 * nbytes["save_all"]


@pytest.mark.slow
def test_the_cotangent_of_a_batch_norm_is_read_once(monkeypatch):
    """Without the pass, a sum for the bias and another one for the mean read it."""

    def work():
        jax.clear_caches()
        step = training.Workload(make_method("compress", bits=2), batch=64, width=16)
        return work_of(step.compile(sharding=one_device(GPUS[HERE])).as_text())

    once = work()
    left = tuple(item for item in PASSES if item.name != "factor_sums")
    monkeypatch.setattr(pipeline, "PASSES", left)
    twice = work()
    assert once.kernels < twice.kernels
    assert once.moved_nbytes < 0.98 * twice.moved_nbytes
