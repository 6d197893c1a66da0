"""Training steps on a GPU: time, the most memory, and losses of each method.

A ResNet-18's training step, and the gradient of a GPT-2. Times are of interleaved
rounds; memory is the most that the device's allocator had in use, of a process in which
no other method ran.

Examples:
    python -m benchmarks.on_gpu.steps
    python -m benchmarks.on_gpu.steps --resnet-batch 8 --resnet-width 4 --gpt2-layers 1
        --gpt2-width 32 --gpt2-heads 2 --gpt2-batch 2 --rounds 2
"""

import dataclasses
import functools
import multiprocessing
import pathlib
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from typing import Any, Literal

import jax
import tyro

from benchmarks.environment import RESULTS, describe_environment, write_result
from benchmarks.harness import Check, Contender, Meter, Timing, compare
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
    methods: tuple[str, ...] = ("save_all", "remat_full", "compress", "compress_whole")
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
    # Processes of their own come first: after this one has allocated, less is free.
    peaks = {
        (network, method): _peak_in_fresh_process(options, network, method)
        for network in options.networks
        for method in options.methods
    }
    with run_tegrastats() if options.jetson else nullcontext() as meter:
        for network in options.networks:
            timings = _time(options, network, meter)
            records = [
                {
                    "network": network,
                    "label": make_method(method, bits=options.bits).label,
                    **peaks[network, method],
                    **dataclasses.asdict(timing),
                }
                for method, timing in timings.items()
            ]
            result["steps"] += records
            console.print(_table(network, records))
        if meter is not None:
            result["jetson"] = meter.record()
    write_result(options.out, environment, result)
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


def _peak_in_fresh_process(options: Options, network: Name, method: str) -> Record:
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=1, mp_context=context) as pool:
        return pool.submit(measure_peak, options, network, method).result()


def measure_peak(options: Options, network: Name, method: str) -> Record:
    """Takes steps; the device's peak is of all that this process has done."""
    compiled, take_step = make_step(options, network, method)
    losses = [float(take_step()[0]) for _ in range(_NUM_LOSSES)]
    stats = jax.devices()[0].memory_stats()
    return {
        "method": method,
        "losses": losses,
        "temp_nbytes": memory.temp_nbytes(compiled),
        "argument_nbytes": compiled.memory_analysis().argument_size_in_bytes,
        # CPUs do not tell.
        "peak_nbytes": stats["peak_bytes_in_use"] if stats else None,
    }


def _time(options: Options, network: Name, meter: Meter | None) -> dict[str, Timing]:
    contenders = {
        method: Contender(
            make_step(options, network, method)[1],
            {"loss": Check(_LOSS_TOLERANCE, extract=lambda out: out[0])},
        )
        for method in options.methods
    }
    baseline = BASELINE if BASELINE in options.methods else options.methods[0]
    return compare(contenders, baseline=baseline, rounds=options.rounds, meter=meter)


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
