"""The largest batch of a transformer's gradient under a fixed limit of memory.

What counts is all that the compiled program holds: weights, batch, gradients and
temporary arrays. Each method has the scheduler of XLA:CPU that takes it farther.

Examples:
    python -m benchmarks.largest_batch
    python -m benchmarks.largest_batch --limit 4GiB --scan
    python -m benchmarks.largest_batch --model gpt2 --length 512
"""

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any, Literal

import jax
import tyro

from benchmarks.environment import RESULTS, describe_environment, write_result
from benchmarks.methods import CPU_METHODS, make_method
from benchmarks.tables import make_console, make_table
from benchmarks.training import SCHEDULERS
from benchmarks.transformers import Shape
from dafjax._numbers import parse_nbytes
from dafjax._step_memory import largest_that_fits


_MOST = 4096

Record = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Options(Shape):
    """Options of the command line."""

    model: Literal["gpt2", "roberta"] = "roberta"
    vocabulary: int = 50265
    length: int = 128
    # All logits of a large vocabulary would be most of a GPT-2's memory.
    chunk: int = 128
    lora_rank: int = 8
    scan: bool = False
    """Whether blocks are a Python loop, or one scan."""
    limit: str = "2GiB"
    """What the program may hold."""
    methods: tuple[str, ...] = CPU_METHODS
    """Files of benchmarks/methods; the first is what ratios are to."""
    schedulers: tuple[str, ...] = tuple(SCHEDULERS)
    """Schedulers of XLA:CPU; the one counts that takes a method farther."""
    out: pathlib.Path = RESULTS / "largest_batch.json"
    """The file to write."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line."""
    options = tyro.cli(
        Options,
        args=arguments,
        description=__doc__,
        prog="python -m benchmarks.largest_batch",
    )
    console = make_console()
    environment = describe_environment()
    records: list[Record] = []
    for method in options.methods:
        found = [_largest(options, method, name) for name in options.schedulers]
        best = max(found, key=lambda record: record["batch"])
        first = records[0]["batch"] if records else best["batch"]
        records.append({**best, "ratio": best["batch"] / first})
    console.print(
        make_table(
            f"Largest batch of {options.length} tokens in {options.limit}, "
            f"{options.model}, LoRA {options.lora_rank}",
            left=("Method", "Scheduler"),
            right=("Batch", "This / first", "MB"),
            rows=[
                (
                    record["label"],
                    record["scheduler"],
                    str(record["batch"]),
                    f"{record['ratio']:.2f}x",
                    f"{record['nbytes'] / 1e6:.0f}",
                )
                for record in records
            ],
        )
    )
    write_result(
        options.out,
        environment,
        {"options": dataclasses.asdict(options), "batches": records},
    )
    console.print(f"Written to {options.out}.", markup=False)


def _largest(options: Options, method: str, scheduler: str) -> Record:
    nbytes: dict[int, int] = {}

    def nbytes_of(batch: int) -> int:
        workload = options.workload(method, batch=batch, scan=options.scan)
        nbytes[batch] = _held_nbytes(workload.compile(scheduler=scheduler))
        return nbytes[batch]

    limit = parse_nbytes("limit", options.limit)
    batch = largest_that_fits(nbytes_of, limit, _MOST)
    if batch == 0:
        raise ValueError(
            f"`--limit` is {options.limit}, but one sequence takes "
            f"{nbytes[1] / 1e6:.0f} MB with method {method}."
        )
    return {
        "method": method,
        "label": make_method(method, bits=options.bits).label,
        "scheduler": scheduler,
        "batch": batch,
        "nbytes": nbytes[batch],
        "tried": sorted(nbytes.items()),
    }


def _held_nbytes(compiled: jax.stages.Compiled) -> int:
    analysis = compiled.memory_analysis()
    return (
        analysis.argument_size_in_bytes
        + analysis.temp_size_in_bytes
        + analysis.output_size_in_bytes
        - analysis.alias_size_in_bytes
    )


if __name__ == "__main__":
    main()
