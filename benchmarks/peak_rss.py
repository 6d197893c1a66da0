"""How much resident memory a few training steps add, in a process of their own.

Prints one JSON object. `benchmarks.step_memory --rss` runs it for every method.
"""

import ctypes
import dataclasses
import gc
import json
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import tyro

from benchmarks.methods import make_method
from benchmarks.training import Workload
from models import memory


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of the command line."""

    method: str = "save_all"
    """A file of benchmarks/methods."""
    scheduler: str = "default"
    """default or memory."""
    batch: int = 64
    """Images in a step."""
    bits: int = 2
    """Bits of the compressing methods."""
    width: int = 64
    """Filters of the first stage."""
    steps: int = 3
    """Steps to run."""


def measure(options: Options) -> dict[str, int]:
    """Runs the steps and returns resident bytes, and what XLA planned."""
    method = make_method(options.method, bits=options.bits)
    workload = Workload(method, options.batch, options.width)
    compiled = workload.compile(scheduler=options.scheduler)
    added = measure_steps(workload.stepper(compiled), options.steps)
    return {**added, "temp": memory.temp_nbytes(compiled)}


def measure_steps(take_step: Callable[[], Any], steps: int) -> dict[str, int]:
    """Takes some steps and returns resident bytes before and at the peak."""
    _forget_peak()
    before = memory.resident_nbytes()
    for _ in range(steps):
        jax.block_until_ready(take_step())
    peak = memory.peak_resident_nbytes()
    if before is None or peak is None:
        raise OSError(
            "Resident memory is read from /proc/self/status, which is absent."
        )
    return {
        "resident_before": before,
        "resident_peak": peak,
        "resident_added": peak - before,
    }


def _forget_peak() -> None:
    """Frees what the compiler used and resets VmHWM, whose peak is not the step's."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    pathlib.Path("/proc/self/clear_refs").write_text("5")


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line."""
    options = tyro.cli(
        Options,
        args=arguments,
        description=__doc__,
        prog="python -m benchmarks.peak_rss",
    )
    print(json.dumps(measure(options)))


if __name__ == "__main__":
    main()
