"""The programs that `dafjax.jit` chooses under limits of memory.

The step of a network computes its loss and its gradient. Each limit is a share of the
memory of the plain step: arguments, results and temporary arrays. For each limit the
table has the chosen options; the compiler's figure and the resident memory, over the
limit; and the noise of the gradient: the largest of all parameter arrays, and the
median. The resident memory is the bytes of the arguments, and the memory that a fresh
process adds while a step runs. `none` is an error that names the smallest need found.

Examples:
    python -m benchmarks.memory_limits
    python -m benchmarks.memory_limits --networks gpt --shares 0.5 --accumulate
"""

import dataclasses
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import tyro

import dafjax
from benchmarks.environment import RESULTS, describe_environment, write_result
from benchmarks.gradient_noise import leaves_by_path
from benchmarks.peak_rss import peak_rss_in_fresh_process
from benchmarks.tables import make_console, make_table
from benchmarks.zoo import NETWORKS, Network, chosen
from dafjax._assess import array_noise
from dafjax._step_memory import measure as measure_step


Record = dict[str, Any]

_NETWORKS = (
    *("convnext", "ctc", "equinox_mixer", "fno", "gpt", "gru"),
    *("mamba", "mobilenet", "moe", "qwen", "siren", "unet"),
)


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of the command line."""

    networks: tuple[str, ...] = _NETWORKS
    """Patterns of names."""
    shares: tuple[float, ...] = (0.9, 0.5, 0.25, 0.12)
    """Limits, over what the plain step needs."""
    accumulate: bool = False
    """Whether the loss may be split into microbatches."""
    resident: bool = True
    """Whether to measure the resident memory."""
    out: pathlib.Path = RESULTS / "memory_limits.json"
    """The file to write."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line."""
    options = tyro.cli(
        Options,
        args=arguments,
        description=__doc__,
        prog="python -m benchmarks.memory_limits",
    )
    environment = describe_environment()
    console = make_console()
    records = []
    for name, network in chosen(options.networks):
        plain = plain_nbytes(network)
        exact = leaves_by_path(
            jax.jit(jax.grad(network.loss))(network.params, *network.batch)
        )
        for share in options.shares:
            limit = int(share * plain)
            found = measure(name, network, limit, options)
            if "gradient" in found:
                found["noise"] = noise_of(exact, found.pop("gradient"))
            records.append({"network": name, "share": share, "limit": limit, **found})
            console.print("  ".join(_row(records[-1])), highlight=False)
    console.print(
        make_table(
            "Steps under limits of memory",
            left=("network", "limit", "chosen"),
            right=("compiled", "resident", "noise: worst", "median"),
            rows=map(_row, records),
        )
    )
    write_result(options.out, environment, {"steps": records})


def plain_nbytes(network: Network) -> int:
    """Returns the memory of the plain step."""
    step = jax.jit(jax.value_and_grad(network.loss))
    lowered = step.lower(network.params, *network.batch)
    return measure_step(lowered).total_nbytes


def make_step(network: Network, limit: int, *, accumulate: bool) -> dafjax.Jit:
    """Returns the step of a network under a limit."""
    loss = dafjax.remat_compress(network.loss)
    loss = dafjax.accumulate(loss) if accumulate else loss
    return dafjax.jit(jax.value_and_grad(loss), memory=limit)


def measure(name: str, network: Network, limit: int, options: Options) -> Record:
    """Returns the choice for a limit, its memory, and a gradient."""
    step = make_step(network, limit, accumulate=options.accumulate)
    try:
        _, gradient = step(network.params, *network.batch)
    except ValueError as error:
        return {"error": str(error)}
    report = step.report()
    found: Record = {
        "options": report.options,
        "total_nbytes": report.memory.total_nbytes,
        "gradient": leaves_by_path(gradient),
    }
    if options.resident:
        added = peak_rss_in_fresh_process(
            _compiled_step, name, limit, options.accumulate
        ).added
        found["resident_nbytes"] = report.memory.argument_nbytes + added
    return found


def _compiled_step(
    name: str, limit: int, accumulate: bool
) -> tuple[jax.stages.Compiled, Callable[[], Any]]:
    network = NETWORKS[name]()
    step = make_step(network, limit, accumulate=accumulate)
    compiled = step.lower(network.params, *network.batch).compile()
    return compiled, lambda: compiled(network.params, *network.batch)


def noise_of(exact: Any, gradient: Any) -> dict[str, float]:
    """Returns the noise of a gradient: the worst of all arrays, and the median."""
    noise = [array.noise for array in array_noise(exact, [gradient]).values()]
    return {"worst": float(np.max(noise)), "median": float(np.median(noise))}


def _row(record: Record) -> list[str]:
    cells = [record["network"], f"{record['share']:.2f}"]
    if "error" in record:
        return [*cells, "none", *("-",) * 4]
    limit = record["limit"]
    resident = record.get("resident_nbytes")
    return [
        *cells,
        record["options"],
        f"{record['total_nbytes'] / limit:.2f}",
        "-" if resident is None else f"{resident / limit:.2f}",
        *(f"{record['noise'][which]:.4f}" for which in ("worst", "median")),
    ]


if __name__ == "__main__":
    main()
