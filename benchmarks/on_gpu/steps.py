"""Training steps on a GPU: time, the most memory, and losses of each method.

A ResNet-18's training step, and the gradient of a GPT-2. Times are of interleaved
rounds; memory is the most that the device's allocator had in use, of a process in which
no other method ran. It loads what was compiled to be timed: XLA:GPU tries kernels out
while it compiles, with memory of the same allocator. The result is written after each
network.

Examples:
    python -m benchmarks.on_gpu.steps
    python -m benchmarks.on_gpu.steps --resnet-batch 8 --resnet-width 4 --gpt2-layers 1
        --gpt2-width 32 --gpt2-heads 2 --gpt2-batch 2 --rounds 2
"""

import dataclasses
import functools
import multiprocessing
import pathlib
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from typing import Any, Literal

import jax
import tyro

from benchmarks.environment import RESULTS, describe_environment, write_result
from benchmarks.harness import Check, Contender, compare
from benchmarks.methods import BASELINE, make_method
from benchmarks.tables import make_console, make_table
from benchmarks.tegrastats import run_tegrastats
from benchmarks.training import Workload
from benchmarks.transformers import Shape
from models import memory


Name = Literal["resnet18", "gpt2"]
Record = dict[str, Any]
ArrayTree = Any

_LOSS_TOLERANCE = 1e-3
# Steps whose losses are reported.
_NUM_LOSSES = 5


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of the command line."""

    networks: tuple[Name, ...] = ("resnet18", "gpt2")
    """What is trained."""
    methods: tuple[str, ...] = ("save_all", "remat_full", "compress")
    """Files of benchmarks/methods; the first is what ratios are to."""
    bits: int = 2
    """Bits of the compressing methods."""
    resnet_batch: int = 256
    """Images."""
    resnet_width: int = 64
    """Filters of the first stage."""
    gpt2_batch: int = 8
    """Sequences."""
    gpt2_length: int = 512
    """Tokens of a sequence."""
    gpt2_layers: int = 12
    """Blocks."""
    gpt2_width: int = 768
    """Channels of the residual stream."""
    gpt2_heads: int = 12
    """Attention heads."""
    rounds: int = 15
    """How often each is timed."""
    jetson: bool = False
    """Also energy, clocks and temperatures, by tegrastats."""
    out: pathlib.Path = RESULTS / "gpu_steps.json"
    """The file to write."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line."""
    options = tyro.cli(
        Options,
        args=arguments,
        description=__doc__,
        prog="python -m benchmarks.on_gpu.steps",
    )
    console = make_console()
    environment = describe_environment()
    result: Record = {"options": dataclasses.asdict(options), "steps": []}
    if options.jetson:
        result["jetson"] = {}
    with tempfile.TemporaryDirectory() as programs:
        for network in options.networks:
            records, jetson = _in_fresh_process(programs, time_steps, options, network)
            for record in records:
                record |= _in_fresh_process(
                    programs, measure_peak, options, network, record["method"]
                )
            result["steps"] += records
            if options.jetson:
                result["jetson"][network] = jetson
            write_result(options.out, environment, result)
            console.print(_table(network, records))
    console.print(f"Written to {options.out}.", markup=False)


def make_step(
    options: Options, network: Name, method: str
) -> tuple[jax.stages.Compiled, Callable[[], ArrayTree]]:
    """Returns a compiled step, and what takes it once and returns its loss first."""
    if network == "resnet18":
        workload = Workload(
            make_method(method, bits=options.bits),
            options.resnet_batch,
            options.resnet_width,
        )
        compiled = workload.compile()
        take_step = workload.stepper(compiled)
        return compiled, lambda: (take_step()[1]["loss"],)
    shape = Shape(
        layers=options.gpt2_layers,
        width=options.gpt2_width,
        heads=options.gpt2_heads,
        length=options.gpt2_length,
        bits=options.bits,
    )
    gradient = shape.workload(method, batch=options.gpt2_batch, scan=False)
    compiled = gradient.compile()
    return compiled, functools.partial(compiled, *gradient.draw())


def _in_fresh_process(
    programs: str, function: Callable[..., Any], *arguments: Any
) -> Any:
    """Calls a function in another process, which finds programs in that folder."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(
        1, context, initializer=_keep_programs, initargs=(programs,)
    ) as pool:
        return pool.submit(function, *arguments).result()


def _keep_programs(folder: str) -> None:
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)


def time_steps(options: Options, network: Name) -> tuple[list[Record], Record | None]:
    """Returns the time and the planned memory of each method's step.

    And on Jetsons, what `tegrastats` has told meanwhile.
    """
    steps = {method: make_step(options, network, method) for method in options.methods}
    contenders = {
        method: Contender(
            take_step, {"loss": Check(_LOSS_TOLERANCE, extract=lambda out: out[0])}
        )
        for method, (_, take_step) in steps.items()
    }
    baseline = BASELINE if BASELINE in options.methods else options.methods[0]
    with run_tegrastats() if options.jetson else nullcontext() as meter:
        timings = compare(
            contenders, baseline=baseline, rounds=options.rounds, meter=meter
        )
    records = [
        {
            "network": network,
            "method": method,
            "label": make_method(method, bits=options.bits).label,
            "temp_nbytes": memory.temp_nbytes(compiled),
            "argument_nbytes": compiled.memory_analysis().argument_size_in_bytes,
            **dataclasses.asdict(timings[method]),
        }
        for method, (compiled, _) in steps.items()
    ]
    return records, None if meter is None else meter.record()


def measure_peak(options: Options, network: Name, method: str) -> Record:
    """Takes steps; the device's peak is of all that this process has done."""
    _, take_step = make_step(options, network, method)
    losses = [float(take_step()[0]) for _ in range(_NUM_LOSSES)]
    stats = jax.devices()[0].memory_stats()
    # CPUs do not tell.
    return {
        "losses": losses,
        "peak_nbytes": stats["peak_bytes_in_use"] if stats else None,
    }


def _table(network: str, records: Sequence[Record]) -> Any:
    first = records[0]
    return make_table(
        f"{network}: a step on {jax.devices()[0].device_kind}",
        left=("Method",),
        right=("ms", "/ first", "Temp MB", "Peak MB", "/ first", "Joules", "Loss 5"),
        rows=[
            (
                record["label"],
                f"{record['seconds']['median'] * 1e3:.1f}",
                f"{record['ratio']['median']:.3f} ±{record['ratio']['mad']:.3f}",
                f"{record['temp_nbytes'] / 1e6:.0f}",
                _megabytes(record["peak_nbytes"]),
                _over(record["peak_nbytes"], first["peak_nbytes"]),
                f"{record['joules']['median']:.2f}" if record["joules"] else "",
                f"{record['losses'][-1]:.4f}",
            )
            for record in records
        ],
    )


def _megabytes(nbytes: int | None) -> str:
    return "" if nbytes is None else f"{nbytes / 1e6:.0f}"


def _over(nbytes: int | None, first: int | None) -> str:
    return "" if nbytes is None or first is None else f"{nbytes / first:.3f}"


if __name__ == "__main__":
    main()
