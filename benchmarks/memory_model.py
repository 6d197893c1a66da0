"""The static memory model beside XLA's own analysis of the compiled program.

For each network of the zoo it compiles the gradient plain, under `jax.checkpoint`, with
dafjax, and with dafjax recomputing, for both schedulers of XLA:CPU. A ratio above 1
means that the model predicts more than XLA allocates.

Examples:
    python -m benchmarks.memory_model
    python -m benchmarks.memory_model --networks 'layer_*'
"""

import dataclasses
import functools
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import tyro

import dafjax
from benchmarks.environment import RESULTS, describe_environment, write_result
from benchmarks.tables import make_console, make_table
from benchmarks.zoo import Network, chosen
from dafjax._memory.predict import predict_temp_nbytes


METHODS: Mapping[str, Callable[..., Any]] = {
    "plain": lambda loss: loss,
    "checkpoint": jax.checkpoint,
    "dafjax": dafjax.remat_compress,
    "rematerialize": functools.partial(dafjax.remat_compress, rematerialize=True),
}
SCHEDULERS: Mapping[str, Mapping[str, str]] = {
    "default": {},
    "memory": {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"},
}


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of the command line."""

    networks: tuple[str, ...] = ("*",)
    """Patterns of names."""
    out: pathlib.Path = RESULTS / "memory_model.json"
    """The file to write."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line."""
    options = tyro.cli(
        Options,
        args=arguments,
        description=__doc__,
        prog="python -m benchmarks.memory_model",
    )
    environment = describe_environment()
    console = make_console()
    records = []
    for name, network in chosen(options.networks):
        for method in METHODS:
            for record in measure(network, method):
                records.append({"network": name, **record})
                console.print(_row(records[-1]), highlight=False)
    console.print(
        make_table(
            "Static model against the compiler",
            left=("method", "scheduler"),
            right=("median error", "95 %", "worst ratio"),
            rows=_summary(records),
        )
    )
    write_result(options.out, environment, {"records": records})


def measure(network: Network, method: str) -> list[dict[str, Any]]:
    """Returns the predicted and the compiler's bytes for both schedulers.

    Args:
        network: The network.
        method: One of `METHODS`.
    """
    step = jax.jit(jax.value_and_grad(METHODS[method](network.loss)))
    traced = step.trace(network.params, *network.batch)
    lowered = traced.lower()
    records = []
    for scheduler, compiler_options in SCHEDULERS.items():
        is_memory = scheduler == "memory"
        start = time.perf_counter()
        predicted = predict_temp_nbytes(traced.jaxpr, memory_optimized=is_memory)
        seconds = time.perf_counter() - start
        options: Any = dict(compiler_options)
        analysis: Any = lowered.compile(compiler_options=options).memory_analysis()
        records.append(
            {
                "method": method,
                "scheduler": scheduler,
                "predicted_nbytes": predicted,
                "temp_nbytes": analysis.temp_size_in_bytes,
                "seconds": seconds,
            }
        )
    return records


def _ratio(record: Mapping[str, Any]) -> float:
    return record["predicted_nbytes"] / record["temp_nbytes"]


def _row(record: Mapping[str, Any]) -> str:
    real, predicted = (record[key] / 1e6 for key in ("temp_nbytes", "predicted_nbytes"))
    names = (record[key] for key in ("network", "method", "scheduler"))
    return "  ".join((*names, f"{real:.2f} MB", f"{predicted:.2f}")) + (
        f"  {_ratio(record):.2f}  {record['seconds']:.2f} s"
    )


def _summary(records: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    rows = []
    for method in (*METHODS, "all"):
        for scheduler in SCHEDULERS:
            ratios = np.array(
                [
                    _ratio(record)
                    for record in records
                    if method in (record["method"], "all")
                    and record["scheduler"] == scheduler
                ]
            )
            if len(ratios) == 0:
                continue
            errors = np.abs(ratios - 1)
            worst = ratios[np.argmax(errors)]
            cells = (np.median(errors), np.percentile(errors, 95), worst)
            rows.append([method, scheduler, *(f"{cell:.3f}" for cell in cells)])
    return rows


if __name__ == "__main__":
    main()
