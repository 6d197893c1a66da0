"""Memory and time of a whole ResNet-18 training step: method x scheduler x batch.

Examples:
    python -m benchmarks.step_memory
    python -m benchmarks.step_memory --batch 64 --time --rss
"""

import dataclasses
import pathlib
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import jax
import rich.table
import tyro

from benchmarks.actnn import layer_inputs
from benchmarks.environment import RESULTS, describe_environment, write_result
from benchmarks.harness import (
    Check,
    Contender,
    Meter,
    Timing,
    compare,
    projection_error,
)
from benchmarks.methods import BASELINE, CPU_METHODS, Method, make_method
from benchmarks.peak_rss import peak_rss_in_fresh_process
from benchmarks.tables import (
    make_console,
    make_rss_table,
    make_table,
    make_time_table,
)
from benchmarks.tegrastats import run_tegrastats
from benchmarks.training import SCHEDULERS, Workload, gradient, loss
from models import memory


# Forward passes agree up to the order of additions.
_LOSS_TOLERANCE = 1e-4

Record = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of the command line."""

    batch: tuple[int, ...] = (64, 256)
    """Images in a step; with --time and --rss, the first is used."""
    bits: int = 2
    """Bits of the compressing methods."""
    width: int = 64
    """Filters of the first stage; 64 is the width of the paper."""
    methods: tuple[str, ...] = CPU_METHODS
    """Files of benchmarks/methods; the first is what ratios are to."""
    saved: bool = True
    """Count saved residuals; traced, nothing runs."""
    temp: bool = True
    """Ask the compiled steps for their temporary memory; nothing runs."""
    time: bool = False
    """Also measure the time of a step."""
    rounds: int = 5
    """Rounds of --time."""
    jetson: bool = False
    """With --time: also energy, clocks and temperatures, by tegrastats."""
    rss: bool = False
    """Also measure resident memory, in a fresh process for each method."""
    out: pathlib.Path = RESULTS / "step_memory.json"
    """The file to write."""

    def method(self, name: str) -> Method:
        """Returns the method `name` with these options."""
        return make_method(name, bits=self.bits)

    def workload(self, name: str, batch: int) -> Workload:
        """Returns the step of the method `name`."""
        return Workload(self.method(name), batch, self.width)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line."""
    options = tyro.cli(
        Options,
        args=arguments,
        description=__doc__,
        prog="python -m benchmarks.step_memory",
    )
    console = make_console()
    environment = describe_environment()
    result: Record = {"options": dataclasses.asdict(options)}
    if options.saved:
        result["saved"] = [r for batch in options.batch for r in _saved(options, batch)]
        console.print(_saved_table(result["saved"]))
    if options.temp:
        result["temp"] = [r for batch in options.batch for r in _temp(options, batch)]
        console.print(_temp_table(result["temp"]))
    if options.rss:
        result["rss"] = [_rss(options, name) for name in options.methods]
        title = f"Resident memory that a step adds, batch {options.batch[0]}"
        console.print(make_rss_table(title, result["rss"]))
    if options.time:
        with run_tegrastats() if options.jetson else nullcontext() as meter:
            timings = time_steps(options, meter)
        result["time"] = {k: dataclasses.asdict(v) for k, v in timings.items()}
        title = f"Time of a step, batch {options.batch[0]}, {options.rounds} rounds"
        labels = {name: options.method(name).label for name in timings}
        console.print(make_time_table(title, labels, timings))
        if meter is not None:
            result["jetson"] = meter.record()
    write_result(options.out, environment, result)
    console.print(f"Written to {options.out}.", markup=False)


def _saved(options: Options, batch: int) -> list[Record]:
    """Counts saved residuals of each method against the inputs of the layers."""
    plain = options.workload(BASELINE, batch)
    inputs = layer_inputs(plain.loss, *plain.abstract_arguments())
    records = []
    for name in options.methods:
        workload = options.workload(name, batch)
        # Of a compressing method, what dafjax itself reports.
        nbytes = (
            workload.saved_residuals().stored_nbytes
            if name.startswith("compress")
            else workload.saved_nbytes()
        )
        records.append(
            {
                "batch": batch,
                "method": name,
                "label": workload.method.label,
                "saved_nbytes": nbytes,
                "layer_inputs": dataclasses.asdict(inputs),
                "ratio": inputs.nbytes / nbytes,
                "unique_ratio": inputs.unique_nbytes / nbytes,
            }
        )
    return records


def _temp(options: Options, batch: int) -> list[Record]:
    """Compiles every step; ratios are to the first method, same scheduler."""
    records = []
    for scheduler in SCHEDULERS:
        first = None
        for name in options.methods:
            workload = options.workload(name, batch)
            nbytes = memory.temp_nbytes(workload.compile(scheduler=scheduler))
            first = first or nbytes
            records.append(
                {
                    "batch": batch,
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
    batch = options.batch[0]
    measured = peak_rss_in_fresh_process(_make_step, options, name)
    return {
        "batch": batch,
        "method": name,
        "label": options.method(name).label,
        **measured.as_record(),
    }


def _make_step(
    options: Options, name: str
) -> tuple[jax.stages.Compiled, Callable[[], Any]]:
    workload = options.workload(name, options.batch[0])
    compiled = workload.compile()
    return compiled, workload.stepper(compiled)


def time_steps(options: Options, meter: Meter | None = None) -> dict[str, Timing]:
    """Times one step of each method, after a check of loss and gradient."""
    contenders = {}
    for name in options.methods:
        workload = options.workload(name, options.batch[0])
        contenders[name] = Contender(
            run=workload.stepper(workload.compile()),
            checks={
                "loss": Check(_LOSS_TOLERANCE, extract=loss),
                "gradient": Check(workload.method.gradient_tolerance, extract=gradient),
                "projection": Check(
                    workload.method.projection_tolerance,
                    extract=gradient,
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


def _saved_table(records: Sequence[Record]) -> rich.table.Table:
    return make_table(
        "Saved residuals of one step, against the inputs of its layers",
        left=("Batch", "Method"),
        right=("Saved MB", "Inputs MB", "Ratio", "Once each MB", "Ratio"),
        rows=[
            (
                str(record["batch"]),
                record["label"],
                _megabytes(record["saved_nbytes"]),
                _megabytes(record["layer_inputs"]["nbytes"]),
                f"{record['ratio']:.2f}x",
                _megabytes(record["layer_inputs"]["unique_nbytes"]),
                f"{record['unique_ratio']:.2f}x",
            )
            for record in records
        ],
    )


def _temp_table(records: Sequence[Record]) -> rich.table.Table:
    return make_table(
        "Temporary memory of the compiled step",
        left=("Batch", "Scheduler", "Method"),
        right=("Temp MB", "Plain / this"),
        rows=[
            (
                str(record["batch"]),
                record["scheduler"],
                record["label"],
                _megabytes(record["temp_nbytes"]),
                f"{record['ratio']:.2f}x",
            )
            for record in records
        ],
    )


def _megabytes(nbytes: int) -> str:
    return f"{nbytes / 1e6:.1f}"


if __name__ == "__main__":
    main()
