"""The worth of each pass: bytes, noise and time of eight workloads without it.

A pass that changes nothing anywhere should go. The table of `docs/passes.md` is made of
the result.

Examples:
    python -m benchmarks.passes
    python -m benchmarks.passes --workloads resnet18 --rounds 0
"""

import dataclasses
import functools
import json
import pathlib
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import tyro

import dafjax
from benchmarks.environment import RESULTS, describe_environment, write_result
from benchmarks.small_networks import Sizes, make_network
from benchmarks.tables import make_console, make_table
from benchmarks.transformers import Shape
from benchmarks.zoo import NETWORKS, Network
from dafjax._assess import array_noise
from dafjax._passes.pipeline import PASSES


Record = dict[str, Any]
_PAGE = pathlib.Path(__file__).resolve().parents[1] / "docs" / "passes.md"


def _resnet18() -> Network:
    network = make_network("resnet18", Sizes())
    params, state = network.init(0)
    batch = network.batch(np.random.default_rng(0))

    def loss(params: Any, state: Any, *batch: Any) -> jax.Array:
        return network.loss(params, state, *batch)[0]

    return Network(loss, params, (state, *batch))


def _transformer(model: str, rank: int, *, scan: bool) -> Network:
    shape = Shape(
        model="gpt2" if model == "gpt2" else "roberta",
        layers=4,
        width=256,
        heads=4,
        vocabulary=1024,
        length=128,
        lora_rank=rank,
    )
    workload = shape.workload("save_all", batch=8, scan=scan)
    params, *batch = workload.draw()
    return Network(workload.loss, params, tuple(batch))


def _pooled_sines() -> Network:
    """Convolutions, sines of many periods and max-pooling."""
    keys = jax.random.split(jax.random.key(0), 4)
    kernels = [jax.random.normal(key, (3, 3, 32, 32)) / 2 for key in keys[:3]]
    images = jax.random.normal(keys[3], (16, 32, 32, 32))

    def loss(kernels: Any, images: jax.Array) -> jax.Array:
        x = images
        for kernel in kernels:
            x = jax.lax.conv_general_dilated(
                x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
            )
            x = nn.max_pool(jnp.sin(x), (2, 2), (2, 2))
        return jnp.mean(x**2)

    return Network(loss, kernels, (images,))


WORKLOADS: Mapping[str, Callable[[], Network]] = {
    "resnet18": _resnet18,
    "gpt2": functools.partial(_transformer, "gpt2", 0, scan=False),
    "gpt2_scan": functools.partial(_transformer, "gpt2", 0, scan=True),
    "gpt2_lora": functools.partial(_transformer, "gpt2", 8, scan=True),
    "roberta_lora": functools.partial(_transformer, "roberta", 8, scan=False),
    "pooled_sines": _pooled_sines,
    "mobilenet": NETWORKS["mobilenet"],
    "linear_attention": NETWORKS["linear_attention"],
}


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of the command line."""

    workloads: tuple[str, ...] = tuple(WORKLOADS)
    """Names of workloads."""
    seeds: int = 4
    """Seeds of the rounding noise."""
    rounds: int = 5
    """Rounds of timing, all programs in turn in each; 0: no timing."""
    out: pathlib.Path = RESULTS / "passes.json"
    """The file to write."""
    page: pathlib.Path = _PAGE
    """The page to write."""
    measure: bool = True
    """Whether to measure; else the page is written anew from `out`."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line."""
    options = tyro.cli(
        Options, args=arguments, description=__doc__, prog="python -m benchmarks.passes"
    )
    console = make_console()
    if options.measure:
        environment = describe_environment()
        records = []
        for name in options.workloads:
            records += measure(name, WORKLOADS[name](), options.seeds, options.rounds)
            console.print(f"{name}: done", highlight=False)
        result = {"options": dataclasses.asdict(options), "records": records}
        write_result(options.out, environment, result)
    document = json.loads(options.out.read_text())
    rows = _rows(document)
    console.print(
        make_table(
            "Temp, saved bytes, noise and time without a pass, over those with all",
            left=("pass",),
            right=_workloads(document),
            rows=rows,
        )
    )
    options.page.write_text(_page(rows, document))


def measure(
    workload: str, network: Network, num_seeds: int, num_rounds: int
) -> list[Record]:
    """Measures a workload with all passes, and without each of them.

    Args:
        workload: Its name.
        network: The loss, parameters and batch.
        num_seeds: Seeds of the rounding noise.
        num_rounds: Rounds of timing.
    """
    names = ("", *(item.name for item in PASSES))
    operands = (network.params, *network.batch)
    exact = _leaves(jax.jit(jax.grad(network.loss))(*operands))
    compiled = {
        name: jax.jit(_gradient(network, [name] if name else []))
        .lower(jnp.uint32(0), *operands)
        .compile()
        for name in names
    }
    records: list[Record] = []
    for name, run in compiled.items():
        draws = [_leaves(run(jnp.uint32(n), *operands)) for n in range(num_seeds)]
        noise = [array.noise for array in array_noise(exact, draws).values()]
        plan = dafjax.saved_residuals(
            _wrapped(network, [name] if name else []), *operands
        )
        records.append(
            {
                "workload": workload,
                "without": name,
                "temp_nbytes": run.memory_analysis().temp_size_in_bytes,
                "saved_nbytes": plan.stored_nbytes,
                "noise": float(np.percentile(noise, 95)),
            }
        )
    times: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(num_rounds):
        for name, run in compiled.items():
            began = time.perf_counter()
            jax.block_until_ready(run(jnp.uint32(0), *operands))
            times[name].append(time.perf_counter() - began)
    for record in records:
        ratios = [
            mine / whole
            for mine, whole in zip(times[record["without"]], times[""], strict=True)
        ]
        record["time"] = statistics.median(ratios) if ratios else None
    return records


def _wrapped(
    network: Network, without: Sequence[str], seed: Any = 0
) -> Callable[..., jax.Array]:
    return dafjax.remat_compress(network.loss, without_passes=without, seed=seed)


def _gradient(network: Network, without: Sequence[str]) -> Callable[..., Any]:
    def gradient(seed: jax.Array, params: Any, *batch: Any) -> Any:
        return jax.grad(_wrapped(network, without, seed))(params, *batch)

    return gradient


def _leaves(gradient: Any) -> dict[str, np.ndarray]:
    pairs = jax.tree_util.tree_leaves_with_path(gradient)
    return {jax.tree_util.keystr(path): np.asarray(x, np.float64) for path, x in pairs}


def _workloads(document: Record) -> list[str]:
    return list(dict.fromkeys(record["workload"] for record in document["records"]))


def _rows(document: Record) -> list[list[str]]:
    found = {(r["workload"], r["without"]): r for r in document["records"]}
    is_timed = _was_quiet(document["environment"])
    return [
        [
            item.name,
            *(
                _cell(found[w, item.name], found[w, ""], is_timed=is_timed)
                for w in _workloads(document)
            ),
        ]
        for item in PASSES
    ]


def _was_quiet(environment: Record) -> bool:
    """Returns whether nothing else was using the machine, so that times hold."""
    loads = environment["load_average"][0], environment["load_average_at_end"][0]
    return max(loads) <= environment["usable_cores"]


def _cell(record: Record, whole: Record, *, is_timed: bool) -> str:
    """Returns the ratios that differ by half a percent, and by 3 % for noise, time."""
    parts = []
    for name, key, least in (
        ("temp", "temp_nbytes", 0.005),
        ("saved", "saved_nbytes", 0.005),
        ("noise", "noise", 0.03),
    ):
        ratio = record[key] / whole[key]
        if abs(ratio - 1) >= least:
            parts.append(f"{name} {ratio:.2f}")
    time_ratio = record["time"] if is_timed else None
    if time_ratio is not None and abs(time_ratio - 1) >= _NOTICEABLE:
        parts.append(f"time {time_ratio:.2f}")
    return ", ".join(parts) or "="


# Times of this machine differ by so much from run to run.
_NOTICEABLE = 0.05


def _page(rows: Sequence[Sequence[str]], document: Record) -> str:
    environment, workloads = document["environment"], _workloads(document)
    times = "" if _was_quiet(environment) else _NO_TIMES
    reasons = {item.name: item.reason for item in PASSES}
    lines = [
        *_INTRODUCTION.splitlines(),
        "",
        "| pass | what it is good for |",
        "|---|---|",
        *(f"| `{row[0]}` | {reasons[row[0]]} |" for row in rows),
        "",
        *_MEANING.format(commit=environment["commit"][:7]).splitlines(),
        *times.splitlines(),
        "",
        f"| without | {' | '.join(workloads)} |",
        f"|{'---|' * (len(workloads) + 1)}",
        *(f"| `{row[0]}` | {' | '.join(row[1:])} |" for row in rows),
        *_ELSEWHERE.splitlines(),
    ]
    return "\n".join([*lines, ""])


_INTRODUCTION = """# Passes

A pass rewrites a program before anything is decided about its residuals.
`dafjax/_passes/pipeline.py` lists them in order. The option `without_passes` of
`dafjax.remat_compress` leaves some out by name, as `without_passes=["relu_mask"]`.
`dafjax.explain(loss, *args, stage="passes")` shows the lines that each one changes.
"""

_MEANING = """The table has figures of the compiled gradient without one pass, over
those with all passes, at 2 bits. *Temp* is temporary memory, *saved* the bytes of
all residuals, *noise* the 95th percentile over parameter arrays. `=`: less than 0.5 %
(noise 3 %, time 5 %). `python -m benchmarks.passes` writes this page (commit {commit},
CPU).
"""

_NO_TIMES = """
Times are not shown: other programs were using the machine.
"""

_ELSEWHERE = """
Three passes show their worth elsewhere, in tests that fail without them:

- `factor_sums` and `gradient_epilogue` serve GPUs (`tests/test_gpu_programs.py`). The
  step of a ResNet-18 on an H200 moves 4.3 % fewer bytes in 515 kernels, not 541. The
  gradient of a GPT-2 in bfloat16 (two blocks) moves 0.8 % fewer in 241, not 257.
- `tanh_slope`: importances, in `tests/test_tanh_slope.py`. (Four layers of `tanh`: 8 to
  990 times too high without it.)
"""


if __name__ == "__main__":
    main()
