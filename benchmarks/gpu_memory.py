"""Memory and work of whole programs on GPUs, compiled by XLA:GPU without a GPU.

It needs JAX's CUDA plugin, of the version of jaxlib, and no library or driver of CUDA:
`make bench-gpu-programs` puts it into a folder of its own and runs all of this.

Examples:
    JAX_PLATFORMS=cpu PYTHONPATH=build/gpu-plugin python -m benchmarks.gpu_memory
        --devices Orin --programs mlp
"""

import dataclasses
import pathlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import rich.table
import tyro

import dafjax
from benchmarks import mlp, training, transformers
from benchmarks.environment import RESULTS, describe_environment, write_result
from benchmarks.gpu_devices import GPUS, one_device
from benchmarks.gpu_work import work_of
from benchmarks.methods import BASELINE, make_method
from benchmarks.tables import make_console, make_table
from models import memory


# From a method's name and its bits to what has `compile(sharding=...)`.
PROGRAMS: Mapping[str, Callable[[str, int], Any]] = {
    "mlp": lambda name, bits: mlp.Workload(make_method(name, bits=bits)),
    "resnet18-64": lambda name, bits: training.Workload(
        make_method(name, bits=bits), batch=64
    ),
    "resnet18-256": lambda name, bits: training.Workload(
        make_method(name, bits=bits), batch=256
    ),
    "resnet18-256-bfloat16": lambda name, bits: training.Workload(
        make_method(name, bits=bits), batch=256, dtype=jnp.bfloat16
    ),
    "gpt2-loop": lambda name, bits: transformers.Shape(bits=bits).workload(
        name, batch=4, scan=False
    ),
    "gpt2-scan": lambda name, bits: transformers.Shape(bits=bits).workload(
        name, batch=4, scan=True
    ),
    "gpt2-loop-bfloat16": lambda name, bits: transformers.Shape(
        bits=bits, dtype="bfloat16"
    ).workload(name, batch=4, scan=False),
}

_CHECKPOINT = "remat_full"

Record = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Goal:
    """The most that `compress` may need at 2 bits, over what others need."""

    of_plain: float
    of_checkpoint: float | None = None


GOALS: Mapping[str, Goal] = {
    "mlp": Goal(0.16, 0.85),
    "resnet18-64": Goal(0.27),
    "resnet18-256": Goal(0.20, 0.50),
    "gpt2-loop": Goal(1 / 8),
    "gpt2-scan": Goal(1 / 8),
    # What waits in plain programs is half as large, and dafjax's codes are as large.
    "resnet18-256-bfloat16": Goal(0.30, 0.65),
    "gpt2-loop-bfloat16": Goal(1 / 8),
}


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of the command line."""

    devices: tuple[str, ...] = tuple(GPUS)
    """Descriptions of benchmarks/gpu_devices.py."""
    programs: tuple[str, ...] = tuple(PROGRAMS)
    """The MLP's and the ResNet-18's are training steps, the GPT-2's gradients."""
    methods: tuple[str, ...] = (
        *("save_all", "remat_full"),
        *("compress", "compress_halves", "compress_measured"),
    )
    """Files of benchmarks/methods. `remat_best` is not for GPUs: the barriers that its
    option keeps are kept there anyway, and must be gone in the end."""
    bits: int = 2
    """Bits of the compressing methods."""
    out: pathlib.Path = RESULTS / "gpu_memory.json"
    """The file to write."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line."""
    options = tyro.cli(
        Options,
        args=arguments,
        description=__doc__,
        prog="python -m benchmarks.gpu_memory",
    )
    console = make_console()
    environment = describe_environment()
    result: Record = {
        "options": dataclasses.asdict(options),
        "plugins": dafjax.cuda_status().plugins,
        "descriptions": {name: GPUS[name].target_config() for name in options.devices},
        "temp": [],
    }
    for device in options.devices:
        for program in options.programs:
            records = list(_measure(options, device, program))
            result["temp"] += records
            console.print(_table(f"{device}, {program}", records))
    write_result(options.out, environment, result)
    console.print(f"Written to {options.out}.", markup=False)


def _measure(options: Options, device: str, program: str) -> Iterator[Record]:
    """Compiles a program in every method."""
    sharding = one_device(GPUS[device])
    temp = {}
    for name in options.methods:
        workload = PROGRAMS[program](name, options.bits)
        start = time.perf_counter()
        compiled = workload.compile(sharding=sharding)
        seconds = time.perf_counter() - start
        temp[name] = memory.temp_nbytes(compiled)
        work = work_of(compiled.as_text())
        yield {
            "device": device,
            "program": program,
            "method": name,
            "label": workload.method.label,
            "temp_nbytes": temp[name],
            "of_plain": _over(temp[name], temp.get(BASELINE)),
            "of_checkpoint": _over(temp[name], temp.get(_CHECKPOINT)),
            "custom_calls": count_custom_calls(compiled),
            "kernels": work.kernels,
            "moved_nbytes": work.moved_nbytes,
            "compile_seconds": seconds,
        }


def count_custom_calls(compiled: jax.stages.Compiled) -> int:
    """Returns how many custom calls of dafjax a compiled program has."""
    return compiled.as_text().count('custom_call_target="dafjax_')


def _over(nbytes: int, reference: int | None) -> float | None:
    return None if reference is None else nbytes / reference


def _table(title: str, records: Sequence[Record]) -> rich.table.Table:
    return make_table(
        f"Temporary memory and work: {title}",
        left=("Method",),
        right=(
            *("Temp MB", "/ plain", "/ checkpoint", "Goals"),
            *("Calls", "Kernels", "GB moved"),
        ),
        rows=[
            (
                record["label"],
                f"{record['temp_nbytes'] / 1e6:.1f}",
                _ratio(record["of_plain"]),
                _ratio(record["of_checkpoint"]),
                _verdict(record),
                str(record["custom_calls"]),
                str(record["kernels"]),
                f"{record['moved_nbytes'] / 1e9:.2f}",
            )
            for record in records
        ],
    )


def _ratio(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.3f}"


def _verdict(record: Record) -> str:
    """Returns the goals of a method that has any, and whether they are met."""
    if record["method"] != "compress":
        return ""
    goal = GOALS[record["program"]]
    limits = [(record["of_plain"], goal.of_plain)]
    if goal.of_checkpoint is not None:
        limits.append((record["of_checkpoint"], goal.of_checkpoint))
    return ", ".join(
        f"{limit:.3f} {'met' if ratio is not None and ratio <= limit else 'MISSED'}"
        for ratio, limit in limits
    )


if __name__ == "__main__":
    main()
