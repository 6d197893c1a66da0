"""The benchmarks measure what they say, and refuse to time what is wrong."""

import functools
import importlib
import itertools
import json

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dafjax
from benchmarks import (
    accuracy,
    allocators,
    bit_allocation,
    block_layout,
    codec_throughput,
    eager_overhead,
    environment,
    harness,
    importance,
    largest_batch,
    layer_growth,
    memory_limits,
    methods,
    minimum_cut,
    naive_codec,
    nonlinear_minima,
    passes,
    peak_rss,
    plan_bytes,
    pool_budget,
    pool_fragmentation,
    pool_speed,
    pool_step,
    quantizer_cost,
    reference_allocators,
    residuals,
    small_networks,
    step_memory,
    training,
    transformer_memory,
    zoo_memory,
)
from benchmarks.actnn import layer_inputs
from benchmarks.harness import Check, Contender, Spread, WrongAnswerError, compare
from benchmarks.monotony import falls_as_it_grows
from benchmarks.uniform_bits import UniformBits
from dafjax.codecs import Affine, Bitmask
from models.resnet import ResNetConfig
from models.tasks import images
from models.tasks.task import ACCURACY, LOSS
from tests.helpers import prepared


pytestmark = pytest.mark.usefixtures("standard_promotion")


PROGRAMS = (
    "step_memory",
    "codec_throughput",
    "quantizer_cost",
    "block_layout",
    "accuracy",
    "transformer_memory",
    "eager_overhead",
    "gpu_memory",
    "importance",
    "largest_batch",
    "layer_growth",
    "machine_code",
    "plan_bytes",
    "pool_step",
    "pool_fragmentation",
    "pool_speed",
    "pool_budget",
    "nonlinear_minima",
    "bit_allocation",
    "gradient_noise",
    "zoo_memory",
    "memory_limits",
)


@pytest.fixture
def one_block(monkeypatch):
    monkeypatch.setattr(
        images,
        "MODELS",
        {"resnet18": functools.partial(ResNetConfig, stage_sizes=(1,))},
    )


class FakeClock:
    """Advances only when a contender runs, by its next duration."""

    def __init__(self):
        self.now = 0.0
        self.calls = []

    def __call__(self):
        return self.now

    def contender(self, name, durations, value=1.0):
        steps = itertools.chain([0.0], durations)  # the first run is for the check

        def run():
            self.now += next(steps)
            self.calls.append(name)
            return jnp.asarray(value)

        return Contender(run, {"answer": Check(0.01)})


def test_medians_and_ratios_are_computed_per_round():
    clock = FakeClock()
    contenders = {
        "base": clock.contender("base", [1.0, 10.0, 2.0]),
        "other": clock.contender("other", [2.0, 30.0, 1.0]),
    }
    timings = compare(contenders, baseline="base", rounds=3, clock=clock)
    assert timings["other"].seconds == Spread(median=2.0, mad=1.0)
    # The ratio of the medians would be 1; of the rounds it is the median of 2, 3, 1/2.
    assert timings["other"].ratio == Spread(median=2.0, mad=1.0)
    assert timings["base"].ratio == Spread(median=1.0, mad=0.0)
    assert timings["other"].samples == (2.0, 30.0, 1.0)


def test_rounds_are_interleaved_and_start_with_another_contender():
    clock = FakeClock()
    contenders = {name: clock.contender(name, [1.0] * 3) for name in "abc"}
    compare(contenders, baseline="a", rounds=3, clock=clock)
    assert "".join(clock.calls) == "abc" + "abc" + "bca" + "cab"


@pytest.mark.parametrize("wrong", [1.1, 0.0, np.nan, np.inf])
def test_a_wrong_answer_is_not_timed(wrong):
    clock = FakeClock()
    contenders = {
        "base": clock.contender("base", [1.0]),
        "wrong": clock.contender("wrong", [1.0], value=wrong),
    }
    with pytest.raises(WrongAnswerError, match=r"wrong: the error .* of its answer"):
        compare(contenders, baseline="base", rounds=1, clock=clock)
    assert clock.calls == ["base", "wrong"]  # one run each, for the check


def test_an_answer_of_another_shape_is_wrong():
    clock = FakeClock()
    contenders = {
        "base": clock.contender("base", [1.0]),
        "other": clock.contender("other", [1.0], value=np.ones(2)),
    }
    with pytest.raises(WrongAnswerError, match="other"):
        compare(contenders, baseline="base", rounds=1, clock=clock)


def test_the_baseline_is_checked_against_what_is_expected():
    base = Contender(lambda: jnp.ones(3), {"sum": Check(expected=np.zeros(3))})
    with pytest.raises(WrongAnswerError, match=r"base: .* of its sum"):
        compare({"base": base}, baseline="base", rounds=1)


@pytest.mark.parametrize(
    ("baseline", "rounds", "message"),
    [("absent", 1, "`baseline` must be one of base"), ("base", 0, "`rounds` must be")],
)
def test_bad_options_of_a_comparison(baseline, rounds, message):
    base = Contender(lambda: jnp.ones(3), {"answer": Check()})
    with pytest.raises(ValueError, match=message):
        compare({"base": base}, baseline=baseline, rounds=rounds)


def test_a_contender_without_checks_is_refused():
    base = Contender(lambda: jnp.ones(3), {})
    with pytest.raises(ValueError, match="`checks` of base must not be empty"):
        compare({"base": base}, baseline="base", rounds=1)


def test_projection_error_tells_noise_from_a_wrong_gradient(rng):
    exact = rng.standard_normal(100_000)
    noisy = exact + rng.standard_normal(exact.shape)
    assert harness.relative_error(noisy, exact) == pytest.approx(1, abs=0.02)
    assert harness.projection_error(noisy, exact) < 0.02
    assert harness.projection_error(0 * exact, exact) == 1
    assert harness.projection_error(2 * exact, exact) == 1


class TinyNetwork(nn.Module):
    """Two layers share the input; the second conv and the head have their own."""

    @nn.compact
    def __call__(self, x):
        a = nn.Conv(5, (3, 3), name="left")(x)
        b = nn.Conv(5, (1, 1), name="right")(x)
        y = nn.relu(nn.BatchNorm(use_running_average=False)(a)) + b
        return nn.Dense(7)(jnp.mean(y, axis=(1, 2)))


def test_layer_inputs_of_a_network_counted_by_hand():
    network = TinyNetwork()
    x = jnp.zeros((2, 4, 4, 3))
    variables = jax.eval_shape(network.init, jax.random.key(0), x)

    def apply(variables, x):
        return network.apply(variables, x, mutable=["batch_stats"])

    inputs = layer_inputs(apply, variables, x)
    image, norm, head = 2 * 4 * 4 * 3, 2 * 4 * 4 * 5, 2 * 5
    assert inputs.num_layers == 4
    assert inputs.nbytes == 4 * (2 * image + norm + head)
    assert inputs.unique_nbytes == 4 * (image + norm + head)


def test_layer_inputs_count_bfloat16_as_float32():
    inputs = layer_inputs(
        lambda x: nn.Dense(2, dtype=jnp.bfloat16).init_with_output(
            jax.random.key(0), x
        ),
        jax.ShapeDtypeStruct((3, 5), jnp.bfloat16),
    )
    assert inputs.nbytes == 4 * 3 * 5


def test_dafjax_and_autodiff_agree_on_what_is_saved(one_block):
    method = methods.make_method("compress", bits=2)
    workload = training.Workload(method, batch=8, width=16)
    saved = workload.saved_residuals()
    assert saved.stored_nbytes < saved.raw_nbytes / 8
    assert workload.saved_nbytes() == pytest.approx(saved.stored_nbytes, rel=0.01)


def test_initial_gradients_inside_of_blocks_are_not_zero(one_block):
    method = methods.make_method("save_all", bits=2)
    workload = training.Workload(method, batch=2, width=2)
    gradient = training.gradient(workload.stepper(workload.compile())())
    assert all(bool(jnp.any(g != 0)) for g in jax.tree.leaves(gradient))


def test_steps_are_checked_before_they_are_timed(one_block, monkeypatch):
    def make_zero(bits):
        def wrap(loss):
            return lambda params, *args: loss(
                jax.tree.map(jax.lax.stop_gradient, params), *args
            )

        return methods.Method("no gradient", wrap_loss=wrap)

    few = {"save_all": methods.METHODS["save_all"], "zero": make_zero}
    monkeypatch.setattr(methods, "METHODS", few)
    options = step_memory.Options(
        batch=(2,), width=2, methods=("save_all", "zero"), rounds=1
    )
    with pytest.raises(WrongAnswerError, match=r"zero: .* of its gradient"):
        step_memory.time_steps(options)


def test_an_unknown_method_is_refused():
    with pytest.raises(ValueError, match="`method` must be one of save_all"):
        methods.make_method("magic", bits=2)


def test_kernels_are_checked_and_timed(tmp_path):
    out = tmp_path / "throughput.json"
    codec_throughput.main(
        ["--megabytes", "1", "--threads", "1", "--rounds", "1", "--out", str(out)]
    )
    result = json.loads(out.read_text())
    operations = {record["operation"] for record in result["throughput"]}
    assert {"pack affine2 stochastic", "unpack affine8", "pack bitmask"} <= operations
    assert {"pack affine2 columns", "unpack affine2 columns"} <= operations
    assert all(r["fraction_of_read"]["median"] > 0 for r in result["throughput"])
    rates = {r["codec"]: r["bits_per_element"] for r in result["accuracy"]}
    assert rates["affine2 stochastic"] == 2.125
    assert result["environment"]["instruction_set"] is not None


def test_layouts_differ_where_channels_do(rng):
    channels = (rng.standard_normal((512, 64)) * np.arange(64)).astype(np.float32)
    values = {"channels": [channels], "rows": [channels.T.copy()]}
    by_kind = {r["values"]: r for r in block_layout.measure(values, (4,), 64)}
    assert by_kind["channels"]["gain_db"] > 1
    assert by_kind["rows"]["gain_db"] < -1
    for record in by_kind.values():
        assert record["rows_bits_per_element"] == 4.5
        assert record["columns_bits_per_element"] == 4.5


@pytest.mark.slow
def test_values_of_the_layers_are_recorded():
    values = residuals.gpt2_values(batch=1, steps=0)
    probabilities = values["GPT-2: attention probabilities"]
    assert [p.shape for p in probabilities] == [(1, 4, 256, 256)] * 4
    np.testing.assert_allclose(probabilities[0].sum(axis=-1), 1, rtol=1e-5)
    assert values["GPT-2: qkv"][0].shape == (1, 256, 768)
    assert len(values["GPT-2: norm input (stream)"]) == 9
    values = residuals.resnet_values(width=2, batch=2, steps=1)
    assert len(values["ResNet: conv output, norm input"]) == 20
    assert len(values["ResNet: conv input (after relu)"]) == 19


def test_the_naive_codec_is_right(key, rng):
    # The last block is not full.
    size = 700
    x = jnp.asarray(rng.standard_normal(size), jnp.float32)
    like = jax.ShapeDtypeStruct(x.shape, x.dtype)
    codes, scale, minimum = naive_codec.pack(x, key)
    assert codes.dtype == jnp.uint8
    assert codes.size == -(-size // 256) * 64
    restored = naive_codec.unpack((codes, scale, minimum), like)
    assert float(jnp.max(jnp.abs(restored - x))) <= float(jnp.max(scale)) * 1.001
    mask = x > 0
    packed = naive_codec.pack_mask(mask)
    assert packed.size == -(-size // 8)
    mask_like = jax.ShapeDtypeStruct(mask.shape, mask.dtype)
    np.testing.assert_array_equal(naive_codec.unpack_mask(packed, mask_like), mask)


def test_both_ways_of_the_quantizer_are_right():
    items = [
        quantizer_cost.Item(jax.ShapeDtypeStruct(shape, dtype), codec)
        for shape, dtype, codec in (
            ((4, 500), jnp.float32, Affine(bits=2)),
            ((4, 256, 32), jnp.float32, Affine(bits=2, blocks="columns")),
            ((4, 500), jnp.bool_, Bitmask()),
        )
    ]
    timings = compare(quantizer_cost.contenders(items), baseline="dafjax", rounds=1)
    assert set(timings) == {"dafjax", "jax.numpy"}
    assert 0 < timings["jax.numpy"].errors["values"] < 0.9


def make_hoarding_step(num_hoarded):
    """Returns a step that keeps so many times 40 MB that its program does not tell."""
    hoard = []
    w = jnp.ones((1000, 1000))
    x = jnp.ones((10_000, 1000))
    compiled = jax.jit(lambda x: jnp.sin(x @ w) @ w).lower(x).compile()

    def take_step():
        hoard.extend(np.ones(5_000_000) for _ in range(num_hoarded))
        return compiled(x)

    return compiled, take_step


@pytest.mark.slow
@pytest.mark.parametrize("num_hoarded", [0, 2])
def test_resident_memory_sees_what_a_step_allocates(num_hoarded):
    # In a process of its own: of what others have freed this one may keep some.
    measured = peak_rss.peak_rss_in_fresh_process(make_hoarding_step, num_hoarded)
    assert measured.planned >= 80e6
    excess = measured.added - measured.planned
    assert abs(excess - num_hoarded * 40e6) < 0.15 * measured.planned


@pytest.mark.slow
def test_a_layer_adds_what_the_plan_says(tmp_path):
    out = tmp_path / "growth.json"
    small = ["--width", "128", "--heads", "4", "--vocabulary", "64"]
    sizes = ["--layers", "2", "6", "--batch", "8", "--length", "256"]
    options = ["--bits", "2", "--scan", "True"]
    layer_growth.main([*small, *sizes, *options, "--out", str(out)])
    (record,) = json.loads(out.read_text())["growth"]
    assert record["bits"] == 2
    assert 0.9 < record["added_over_planned"] < 1.1
    assert record["added_nbytes"] < 0.1 * record["plain_nbytes"]


@pytest.mark.slow
def test_more_sequences_fit_where_codes_are_kept(tmp_path):
    out = tmp_path / "batches.json"
    sizes = [
        "--layers",
        "4",
        "--width",
        "64",
        "--heads",
        "4",
        "--vocabulary",
        "100",
        "--length",
        "32",
    ]
    options = [
        "--limit",
        "16MiB",
        "--methods",
        "save_all",
        "compress",
        "--schedulers",
        "default",
    ]
    largest_batch.main([*sizes, *options, "--out", str(out)])
    plain, compressed = json.loads(out.read_text())["batches"]
    assert compressed["batch"] > 2 * plain["batch"]
    for record in (plain, compressed):
        tried = dict(record["tried"])
        assert record["nbytes"] == tried[record["batch"]] <= 2**24
        assert tried[record["batch"] + 1] > 2**24
    with pytest.raises(ValueError, match="`--limit` is 1MiB, but one sequence takes"):
        largest_batch.main([*sizes, "--limit", "1MiB", "--out", str(out)])


def test_plans_keep_few_more_bytes_than_a_minimum_cut(tmp_path):
    out = tmp_path / "plans.json"
    plan_bytes.main(["--layers", "3", "--out", str(out)])
    for record in json.loads(out.read_text())["plans"]:
        # Statistics and short chains cost a little; a cut is a bound for all plans.
        assert 1 <= record["even_over_cut"] < 1.15
        assert record["plan_seconds"] < 5


def test_a_minimum_cut_keeps_the_one_product_that_all_follows_from():
    def loss(w, x):
        y = jnp.sin(x @ w)
        return jnp.sum(jnp.cos(y) * y)

    x = jax.ShapeDtypeStruct((64, 256), jnp.float32)
    w = jax.ShapeDtypeStruct((256, 256), jnp.float32)
    program = prepared(jax.make_jaxpr(loss)(w, x), [True, False])
    codec = Affine(bits=2)
    assert minimum_cut.minimum_cut_nbytes(
        program, codec, min_nbytes=0
    ) == codec.packed_nbytes(x)


def test_eager_calls_are_checked_and_timed(tmp_path):
    out = tmp_path / "eager.json"
    eager_overhead.main(
        ["--layers", "2", "--width", "32", "--rounds", "1", "--out", str(out)]
    )
    calls = {
        record["what"]: record["timings"]
        for record in json.loads(out.read_text())["calls"]
    }
    assert calls["call"]["dafjax"]["errors"]["call"] < 1e-4
    # Of 2 bits: without noise nothing would have been packed.
    assert 0.01 < calls["gradient"]["dafjax"]["errors"]["gradient"] < 2


@pytest.mark.slow
def test_a_transformer_is_measured_and_checked(tmp_path):
    out = tmp_path / "transformer.json"
    size = {"layers": 2, "width": 64, "heads": 2, "vocabulary": 100, "length": 128}
    options = {**size, "lora-rank": 4, "rounds": 1, "out": out}
    arguments = [text for k, v in options.items() for text in (f"--{k}", str(v))]
    transformer_memory.main(
        [*arguments, "--time", "--scan", "True", "--methods", "save_all", "compress"]
    )
    result = json.loads(out.read_text())
    assert {record["blocks"] for record in result["temp"]} == {"scan"}
    ratios = {r["method"]: r["ratio"] for r in result["temp"]}
    assert ratios["compress"] > 1.5 * ratios["save_all"] == 1.5
    # Adapters start with B = 0, and the gradient of A with it.
    assert 0.01 < result["time"]["compress"]["errors"]["gradient"] < 1.5


@pytest.mark.slow
def test_a_classifier_of_sequences_is_measured_and_checked(tmp_path):
    out = tmp_path / "roberta.json"
    size = {"layers": 2, "width": 64, "heads": 2, "vocabulary": 100, "length": 128}
    options = {**size, "model": "roberta", "lora-rank": 4, "rounds": 1, "out": out}
    arguments = [text for k, v in options.items() for text in (f"--{k}", str(v))]
    transformer_memory.main(
        [*arguments, "--time", "--scan", "True", "--methods", "save_all", "compress"]
    )
    result = json.loads(out.read_text())
    ratios = {r["method"]: r["ratio"] for r in result["temp"]}
    assert ratios["compress"] > 1.5 * ratios["save_all"] == 1.5
    assert 0.01 < result["time"]["compress"]["errors"]["adapters"] < 1.5


@pytest.mark.slow
def test_a_step_with_a_pool_is_checked_and_measured(tmp_path):
    out = tmp_path / "pool.json"
    small = ["--width", "4", "--images", "8", "--layers", "2", "--length", "64"]
    pool_step.main([*small, "--rounds", "1", "--out", str(out)])
    steps = json.loads(out.read_text())["steps"]
    assert [step["network"] for step in steps] == ["resnet18", "gpt2"]
    for step in steps:
        for name in ("pool", "pool, lasting only"):
            peak = step["pool_peak_nbytes"][name]
            assert 0 < peak <= step["pool_committed_nbytes"][name]
            # Bit for bit.
            assert step["time"][name]["errors"] == {"equal": 0.0}
        assert step["temp_nbytes"]["pool"] < step["temp_nbytes"]["arrays"]
        assert step["time"]["pool, measuring"]["errors"]["equal"] < 1e-5
        assert step["measuring_over_pool"]["median"] > 0


def test_the_zoo_is_compiled_with_each_method(tmp_path):
    out = tmp_path / "zoo.json"
    methods = ["plain", "blocks", "dafjax"]
    network = ["--networks", "layer_norm_32"]
    zoo_memory.main([*network, "--methods", *methods, "--out", str(out)])
    result = json.loads(out.read_text())
    (record,) = result["networks"]
    assert list(record["methods"]) == methods
    sizes = {name: m["temp_nbytes"] for name, m in record["methods"].items()}
    assert 0 < sizes["dafjax"] < sizes["blocks"] < sizes["plain"]
    summary = result["summary"]
    assert summary["median_plain_over_dafjax"] == sizes["plain"] / sizes["dafjax"]
    assert summary["more_than_plain"] == []
    assert summary["failed"] == {}


def test_a_network_that_fails_is_in_the_summary_of_the_zoo():
    network = zoo_memory.Network(lambda w: jnp.zeros(3) / w, jnp.ones(()), ())
    record = zoo_memory.measure(network, zoo_memory.METHODS["plain"])
    records = [{"network": "vector", "methods": {"plain": record}}]
    failed = zoo_memory.summarize(records)["failed"]
    assert failed["vector, plain"].startswith("TypeError: Gradient only defined")


def test_limits_of_memory_are_kept(tmp_path):
    out = tmp_path / "limits.json"
    memory_limits.main(
        [
            *("--networks", "layer_norm_192", "--shares", "0.5", "0.01"),
            *("--accumulate", "--no-resident", "--out", str(out)),
        ]
    )
    half, little = json.loads(out.read_text())["steps"]
    assert half["total_nbytes"] <= half["limit"]
    assert half["noise"]["worst"] < 1e-5
    assert "do not hold" in little["error"]


def test_environment_names_what_a_number_depends_on():
    described = environment.describe_environment()
    assert len(described["commit"]) == 40
    assert isinstance(described["dirty"], bool)
    assert {"jax", "jaxlib", "flax"} <= described["packages"].keys()
    assert len(described["load_average"]) == 3


@pytest.mark.parametrize("program", PROGRAMS)
def test_help_names_the_options(program, capsys):
    module = importlib.import_module(f"benchmarks.{program}")
    with pytest.raises(SystemExit) as exit_info:
        module.main(["--help"])
    assert exit_info.value.code == 0
    assert "--batch" in (text := capsys.readouterr().out) or "--out" in text


def test_best_fit_takes_the_smallest_hole_and_merges_neighbors():
    heap = allocators.BestFit(align=1)
    a, b, c, d, e = (heap.allocate(n) for n in (50, 10, 30, 10, 5))
    heap.free(a)
    heap.free(c)
    assert heap.allocate(20) == c
    assert heap.allocate(50) == a
    heap.free(b)
    heap.free(d)
    # What is left of the hole at `c`, and `d`.
    assert heap.allocate(20) == c + 20
    heap.free(e)
    # The last hole grows at the end.
    assert heap.allocate(9) == b
    assert heap.allocate(12) == e
    assert heap.held_nbytes() == 112


def test_steps_of_the_fragmentation_benchmark_stay_below_what_may_live():
    options = pool_fragmentation.Options(steps=3000, live_mib=24, overlap=4)
    live: dict[int, list] = {}
    for step in pool_fragmentation.make_steps(options):
        run, sizes = live.get(step.device, (step.run, []))
        sizes = sizes if run == step.run else []
        live[step.device] = (step.run, [*sizes, step.nbytes])
        assert sum(sum(sizes) for _, sizes in live.values()) <= 24 << 20


def test_pages_take_less_than_a_heap_for_residuals_that_come_and_go():
    # Large ones, so that few steps are enough.
    options = pool_fragmentation.Options(
        steps=1200, live_mib=64, overlap=8, least=1 << 19, most=1 << 22
    )
    steps = list(pool_fragmentation.make_steps(options))
    pages = pool_fragmentation.run_pool(steps, 50, budget=None)
    heap = pool_fragmentation.run_allocator(steps, 50, allocators.BestFit())
    malloc = pool_fragmentation.run_allocator(steps, 50, allocators.Malloc())
    records = [
        pool_fragmentation.summarize(name, curve, 0.3)
        for name, curve in {"pages": pages, "heap": heap, "malloc": malloc}.items()
    ]
    assert len({r["live_nbytes"] for r in records}) == 1
    assert records[0]["held_per_live"] < 1.15 < records[1]["held_per_live"]
    assert records[0]["utilization_least"] > 0.95
    assert records[0]["growths_after_warm_up"] == 0
    within = pool_fragmentation.run_pool(steps, 50, budget=32 << 20)
    assert max(record["held_nbytes"] for record in within) <= 32 << 20
    assert within[-1]["degraded_nbytes"] > 0


def test_the_fragmentation_benchmark_writes_a_plot(tmp_path):
    out = tmp_path / "out.json"
    pool_fragmentation.main(
        ["--steps", "400", "--live-mib", "16", "--demands-mib", "10", "--out", str(out)]
    )
    result = json.loads(out.read_text())
    assert result["allocators"][0]["allocator"] == "page pool"
    assert {r["growth"] for r in result["growth"]} == {"adaptive", "100 MB"}
    assert out.with_suffix(".png").stat().st_size > 1000


def test_pool_speed_copies_through_both(tmp_path):
    out = tmp_path / "out.json"
    pool_speed.main(
        ["--blobs-kib", "64", "256", "--total-mib", "1", "--rounds", "1",
         "--pages", "2", "--entries", "5", "--out", str(out)]
    )  # fmt: skip
    result = json.loads(out.read_text())
    assert [r["blobs_nbytes"] for r in result["copies"]] == [
        [65536, 262144],
        [65536],
        [262144],
    ]
    assert result["bookkeeping"][0]["ns_per_page_operation"] > 0


@pytest.fixture
def tiny_network(monkeypatch):
    """In place of the GPT-2, layers that compile in a second."""

    def loss(params, state, x):
        for w in params:
            x = jnp.tanh(x @ w)
        return jnp.mean((x - 0.5) ** 2), state

    def init(seed):
        keys = jax.random.split(jax.random.key(seed), 3)
        return [jax.random.normal(key, (256, 256)) / 16 for key in keys], {}

    def make(sizes):
        return small_networks.Network(
            loss,
            init,
            lambda rng: (rng.standard_normal((2048, 256), np.float32),),
            optax.sgd(0.1),
        )

    monkeypatch.setitem(small_networks._MAKERS, "gpt2", make)


@pytest.mark.slow
def test_budgets_are_obeyed_in_one_program(tmp_path, tiny_network):
    out = tmp_path / "out.json"
    pool_budget.main(
        ["--networks", "gpt2", "--settings", "3", "--steps", "6", "--points", "2",
         "--seeds", "2", "--out", str(out)]
    )  # fmt: skip
    record = json.loads(out.read_text())["networks"]["gpt2"]
    assert record["recompiles"] == 0
    for rows in record["ways"].values():
        assert all(0.5 < row["peak_over_budget"] <= 1 for row in rows)
        errors = [row["error"] for row in rows]
        assert errors == sorted(errors, reverse=True)
    assert out.with_suffix(".png").stat().st_size > 1000


def test_what_falls_within_noise_is_told_from_what_rises():
    falls = [[9.0, 9.2, 8.9], [5.0, 5.1, 4.9], [5.1, 4.9, 5.0], [1.0, 1.1, 0.9]]
    assert falls_as_it_grows([1, 2, 3, 4], falls)["rises"] == []
    assert falls_as_it_grows([1, 2], falls[:2])["spearman"] == pytest.approx(-1)
    assert falls_as_it_grows([1, 2, 3, 4], falls)["falls"]
    noise = [falls[0], [8.9, 9.3, 8.8]]
    assert not falls_as_it_grows([1, 2], noise)["falls"]
    rises = falls_as_it_grows([1, 2, 3], [falls[1], falls[3], falls[0]])
    assert rises["rises"] == [2]
    assert rises["spearman"] > 0


def test_minima_are_compared_by_error_and_bias(tmp_path, tiny_network):
    out = tmp_path / "out.json"
    nonlinear_minima.main(
        ["--steps", "3", "--averages", "2", "--nonlinear", "1", "4",
         "--amplified", "1", "--draws", "4", "--learn", "2", "--heads", "4",
         "--out", str(out)]
    )  # fmt: skip
    (result,) = json.loads(out.read_text())["networks"]
    assert "smooth" in {site["use"] for site in result["sites"]}
    for record in result["records"]:
        assert record["reached_bits"] <= 2
        assert 0 < record["squared_error"] < 10
        assert record["squared_bias"] < record["squared_error"]


def test_rules_of_others_are_compared_to_ours(tmp_path, tiny_network):
    out = tmp_path / "out.json"
    bit_allocation.main(
        ["--networks", "gpt2", "--steps", "3", "--averages", "2",
         "--draws", "2", "--oracle-draws", "1", "--learn", "2", "--out", str(out)]
    )  # fmt: skip
    record = json.loads(out.read_text())["networks"]["gpt2"]
    by_rule = {r["rule"]: r for r in record["allocations"]}
    least = by_rule["optimum"]["expected"]
    for name in ("uniform", "ActNN", "GACT", "dafjax"):
        assert by_rule[name]["reached_bits"] <= 2
        assert by_rule[name]["expected"] >= least * (1 - 1e-6)
        assert by_rule[name]["measured"] > 0
    # Layers with weights read some of the residuals; of others ActNN knows nothing.
    assert {site["ActNN"] is None for site in record["sites"]} == {True, False}


@pytest.mark.parametrize("seed", range(5))
def test_the_optimum_is_that_of_all_allocations(seed):
    rng = np.random.default_rng(seed)
    sizes = [int(n) for n in rng.integers(1, 1000, 5)]
    costs = [float(c) for c in np.exp(rng.normal(0, 3, 5))]
    budget = int(sum(sizes) * rng.uniform(1, 6))

    def total(bits):
        return sum(c / (2**b - 1) ** 2 for c, b in zip(costs, bits, strict=True))

    fitting = [
        bits
        for bits in itertools.product((1, 2, 4, 8), repeat=5)
        if sum(n * b for n, b in zip(sizes, bits, strict=True)) <= budget
    ]
    best = total(min(fitting, key=total))
    found = reference_allocators.optimum(costs, sizes, budget)
    assert found in fitting
    assert total(found) == pytest.approx(best, rel=1e-6)
    for rule in (
        reference_allocators.descend(costs, sizes, budget),
        reference_allocators.as_layers_before([None, *costs[1:]], sizes, budget),
        reference_allocators.uniform(sizes, budget),
    ):
        assert rule in fitting


def test_residuals_without_sensitivity_get_the_bits_of_the_layer_before():
    sensitivities = [None, 100.0, None, 0.01]
    bits = reference_allocators.as_layers_before(sensitivities, [10] * 4, 140)
    assert bits == (4, 4, 4, 1)


def test_sensitivities_of_actnn_are_those_of_the_formula():
    def loss(w, x):
        y = jnp.sin(x @ w["in"])
        return jnp.mean((y @ w["out"]) ** 2)

    keys = jax.random.split(jax.random.key(0), 3)
    w = {
        "in": jax.random.normal(keys[0], (64, 128)) / 8,
        "out": jax.random.normal(keys[1], (128, 32)) / 11,
    }
    x = jax.random.normal(keys[2], (256, 64))
    gradient = importance.Gradient.of(loss, w, x)
    site, _ = gradient.sites
    y = jnp.sin(x @ w["in"])
    above = jax.grad(lambda z: jnp.mean(z**2))(y @ w["out"])
    ranges = Affine(bits=1).encode(y).scale.astype(jnp.float32)
    expected = 128 / 4 * jnp.mean(ranges**2) * jnp.sum(above**2)
    found = reference_allocators.actnn_sensitivities(gradient)
    assert found == {site.value: pytest.approx(float(expected), rel=1e-3)}


def test_sensitivities_of_gact_are_those_of_the_formula():
    draws = iter([0.0, 3.0, 1.0, 2e6, 0.0])

    def squared_distance(a, b):
        return (a - b) ** 2

    found = reference_allocators.gact_sensitivities(
        lambda bits: next(draws), squared_distance, 2
    )
    assert found == [18.0, 1e10]


@pytest.mark.slow
def test_small_networks_learn(one_block):
    sizes = small_networks.Sizes(
        resnet_width=16, gpt2_layers=1, gpt2_width=64, gpt2_length=64
    )
    for name in ("resnet18", "gpt2"):
        network = small_networks.make_network(name, sizes)
        losses = [point.loss for point in network.train(0, 24)]
        assert np.mean(losses[-4:]) < np.mean(losses[:4])


def test_accuracies_are_compared_seed_by_seed(tmp_path):
    runs = [
        {"fixed": {"final_loss": 2.0}, "adaptive": {"final_loss": 1.5}},
        {"fixed": {"final_loss": 3.0}, "adaptive": {"final_loss": 2.7}},
    ]
    pair = accuracy._pair(runs, "final_loss", "adaptive", "fixed")
    assert pair["mean"] == pytest.approx(-0.4)
    assert pair["standard_error"] == pytest.approx(0.1)


@pytest.mark.slow
def test_without_a_pass_its_worth_is_missing(tmp_path):
    out, page = tmp_path / "passes.json", tmp_path / "passes.md"
    arguments = ["--workloads", "pooled_sines", "--seeds", "1", "--rounds", "1"]
    passes.main([*arguments, "--out", str(out), "--page", str(page)])
    records = json.loads(out.read_text())["records"]
    temp = {record["without"]: record["temp_nbytes"] for record in records}
    assert temp["argmax_pooling"] > 1.5 * temp[""]
    assert temp["relu_mask"] == temp[""]
    assert "| `argmax_pooling` | temp" in page.read_text()


def test_uniform_bits_are_those_of_all_that_is_read():
    def loss(x):
        return jnp.sum(jnp.tanh(jnp.exp(jnp.tanh(x @ x))) ** 3)

    x = jnp.ones((128, 128))
    planned, uniform = (
        dafjax.saved_residuals(dafjax.remat_compress(loss, **options), x)
        for options in ({}, {"policy": UniformBits(2)})
    )
    assert len(uniform.kept) > len(planned.kept)
    codecs = {kept.codec for kept in uniform.kept if kept.codec is not None}
    assert codecs == {Affine(2)}


@pytest.mark.parametrize(
    ("metric", "expected"), [(ACCURACY, [-10.0, 10.0]), (LOSS, [-20.0, 25.0])]
)
def test_shares_are_compared_in_points_and_losses_in_percent(metric, expected):
    values = [(0.5, 0.4), (0.4, 0.5)]
    runs = [{"none": {metric.key: a}, "fixed": {metric.key: b}} for a, b in values]
    options = accuracy.Options(contenders=("none", "fixed"))
    behind = accuracy._behind(options, runs, metric)
    assert behind == {"fixed": pytest.approx(expected)}
