"""Memory and time of the gradient of a transformer: method x scheduler, loop and scan.

Parameters are neither donated nor updated: gradients are results, so that temp is what
the passes need besides. With `--lora-rank` only the adapters are differentiated, and
RoBERTa's head.

Examples:
    python -m benchmarks.transformer_memory
    python -m benchmarks.transformer_memory --scan True --time --rss
    python -m benchmarks.transformer_memory --layers 24 --width 1024 --heads 16
        --batch 2 --length 512 --lora-rank 8 --out benchmarks/results/lora_memory.json
    python -m benchmarks.transformer_memory --model roberta --vocabulary 50265
        --batch 8 --length 128 --lora-rank 8
        --out benchmarks/results/roberta_memory.json
"""

import dataclasses
import functools
import pathlib
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import jax
import rich.table
import tyro

from benchmarks.environment import RESULTS, describe_environment, write_result
from benchmarks.harness import (
    Check,
    Contender,
    Meter,
    Timing,
    compare,
    projection_error,
)
from benchmarks.methods import BASELINE, CPU_METHODS, make_method
from benchmarks.peak_rss import peak_rss_in_fresh_process
from benchmarks.tables import (
    make_console,
    make_rss_table,
    make_table,
    make_time_table,
)
from benchmarks.tegrastats import run_tegrastats
from benchmarks.training import SCHEDULERS
from benchmarks.transformers import Shape
from models import memory


_LOSS_TOLERANCE = 1e-4

Record = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Options(Shape):
    """Options of the command line."""

    batch: int = 4
    """Sequences."""
    scan: tuple[bool, ...] = (False, True)
    """Whether blocks are a Python loop, or one scan; --time and --rss use the first."""
    methods: tuple[str, ...] = CPU_METHODS
    """Files of benchmarks/methods; the first is what ratios are to."""
    temp: bool = True
    """Ask the compiled gradients for their temporary memory; nothing runs."""
    time: bool = False
    """Also measure the time of a gradient."""
    rounds: int = 5
    """Rounds of --time."""
    jetson: bool = False
    """With --time: also energy, clocks and temperatures, by tegrastats."""
    rss: bool = False
    """Also measure resident memory, in a fresh process for each method."""
    out: pathlib.Path = RESULTS / "transformer_memory.json"
    """The file to write."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line."""
    options = tyro.cli(
        Options,
        args=arguments,
        description=__doc__,
        prog="python -m benchmarks.transformer_memory",
    )
    console = make_console()
    environment = describe_environment()
    result: Record = {"options": dataclasses.asdict(options)}
    if options.temp:
        result["temp"] = [r for scan in options.scan for r in _temp(options, scan)]
        console.print(_temp_table(result["temp"]))
    if options.rss:
        result["rss"] = [_rss(options, name) for name in options.methods]
        console.print(
            make_rss_table("Resident memory that a gradient adds", result["rss"])
        )
    if options.time:
        with run_tegrastats() if options.jetson else nullcontext() as meter:
            timings = _time(options, meter)
        result["time"] = {k: dataclasses.asdict(v) for k, v in timings.items()}
        title = f"Time of a gradient, {options.rounds} rounds"
        labels = {name: make_method(name, bits=options.bits).label for name in timings}
        console.print(make_time_table(title, labels, timings))
        if meter is not None:
            result["jetson"] = meter.record()
    write_result(options.out, environment, result)
    console.print(f"Written to {options.out}.", markup=False)


def _temp(options: Options, scan: bool) -> list[Record]:
    """Compiles every gradient; ratios are to the first method, same scheduler."""
    records = []
    for scheduler in SCHEDULERS:
        first = None
        for name in options.methods:
            workload = options.workload(name, batch=options.batch, scan=scan)
            nbytes = memory.temp_nbytes(workload.compile(scheduler=scheduler))
            first = first or nbytes
            records.append(
                {
                    "blocks": "scan" if scan else "loop",
                    "scheduler": scheduler,
                    "method": name,
                    "label": workload.method.label,
                    "temp_nbytes": nbytes,
                    "ratio": first / nbytes,
                }
            )
    return records


def _rss(options: Options, name: str) -> Record:
    """Measures resident memory of one method in a fresh process."""
    measured = peak_rss_in_fresh_process(_make_step, options, name)
    return {
        "method": name,
        "label": make_method(name, bits=options.bits).label,
        **measured.as_record(),
    }


def _make_step(
    options: Options, name: str
) -> tuple[jax.stages.Compiled, Callable[[], Any]]:
    workload = options.workload(name, batch=options.batch, scan=options.scan[0])
    compiled = workload.compile()
    return compiled, functools.partial(compiled, *workload.draw())


def _time(options: Options, meter: Meter | None = None) -> dict[str, Timing]:
    """Times one gradient of each method, after a check of its value."""
    contenders = {}
    arguments = options.workload(
        BASELINE, batch=options.batch, scan=options.scan[0]
    ).draw()
    for name in options.methods:
        workload = options.workload(name, batch=options.batch, scan=options.scan[0])
        compiled = workload.compile()
        of_adapters = {}
        if options.lora_rank:
            # Of the norm of all gradients they may be a ten thousandth.
            of_adapters["adapters"] = Check(
                workload.method.gradient_tolerance,
                extract=lambda out: out[1]["lora"],
            )
        contenders[name] = Contender(
            run=functools.partial(compiled, *arguments),
            checks={
                **of_adapters,
                "loss": Check(_LOSS_TOLERANCE, extract=lambda out: out[0]),
                "gradient": Check(
                    workload.method.gradient_tolerance, extract=lambda out: out[1]
                ),
                "projection": Check(
                    workload.method.projection_tolerance,
                    extract=lambda out: out[1],
                    error=projection_error,
                ),
            },
        )
    return compare(
        contenders,
        baseline=options.methods[0],
        rounds=options.rounds,
        meter=meter,
    )


def _temp_table(records: Sequence[Record]) -> rich.table.Table:
    return make_table(
        "Temporary memory of the compiled gradient",
        left=("Blocks", "Scheduler", "Method"),
        right=("Temp MB", "Plain / this"),
        rows=[
            (
                record["blocks"],
                record["scheduler"],
                record["label"],
                f"{record['temp_nbytes'] / 1e6:.1f}",
                f"{record['ratio']:.2f}x",
            )
            for record in records
        ],
    )


if __name__ == "__main__":
    main()
