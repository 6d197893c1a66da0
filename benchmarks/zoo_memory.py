"""Temporary memory of compiled gradients over a zoo of networks.

Each network's `jax.jit(jax.value_and_grad(loss))` is compiled plain, with
`jax.checkpoint` round the loss and round each block (where the network has blocks), and
with dafjax. Nothing runs. The seconds are those of tracing and compiling, with empty
caches. A method that fails has its error in the result, and the others go on.

Examples:
    python -m benchmarks.zoo_memory
    python -m benchmarks.zoo_memory --networks 'qwen*' gpt --methods plain dafjax
"""

import dataclasses
import pathlib
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, final

import jax
import tyro

import dafjax
from benchmarks.environment import RESULTS, describe_environment, write_result
from benchmarks.tables import make_console, make_table
from benchmarks.zoo import MISSING, Network, chosen


Record = dict[str, Any]

# A network counts as worse than plain above this ratio.
_SLACK = 1.02


@final
@dataclasses.dataclass(frozen=True)
class Method:
    """A way to save memory.

    Attributes:
        loss: The loss to differentiate, or None where a network does not have it.
        compiler_options: What the gradient is compiled with.
    """

    loss: Callable[[Network], Callable[..., jax.Array] | None]
    compiler_options: Mapping[str, str] = dataclasses.field(default_factory=dict)


# XLA:CPU of jaxlib <= 0.10 merges the rematerialized operations with the forward pass
# unless this pass is off: `methods/remat_best.py`.
_KEEP_BARRIERS = {"xla_disable_hlo_passes": "cse_barrier_expander"}

METHODS: Mapping[str, Method] = {
    "plain": Method(lambda network: network.loss),
    "checkpoint": Method(lambda network: jax.checkpoint(network.loss), _KEEP_BARRIERS),
    "blocks": Method(lambda network: network.blocks, _KEEP_BARRIERS),
    "dafjax": Method(lambda network: dafjax.remat_compress(network.loss)),
    "again": Method(
        lambda network: dafjax.remat_compress(network.loss, rematerialize=True)
    ),
}


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of the command line."""

    networks: tuple[str, ...] = ("*",)
    """Patterns of names."""
    methods: tuple[str, ...] = tuple(METHODS)
    """Names of methods; `again` is dafjax with `rematerialize=True`."""
    out: pathlib.Path = RESULTS / "zoo_memory.json"
    """The file to write."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line."""
    options = tyro.cli(
        Options,
        args=arguments,
        description=__doc__,
        prog="python -m benchmarks.zoo_memory",
    )
    if unknown := set(options.methods) - METHODS.keys():
        raise ValueError(
            f"`methods` must be of {', '.join(METHODS)}, but got "
            f"{', '.join(sorted(unknown))}."
        )
    environment = describe_environment()
    console = make_console()
    for name, package in MISSING.items():
        console.print(f"left out: {name}, as {package} is not installed")
    records: list[Record] = []
    for name, network in chosen(options.networks):
        measured = {
            method: result
            for method in options.methods
            if (result := measure(network, METHODS[method])) is not None
        }
        records.append({"network": name, "methods": measured})
        console.print("  ".join(_row(records[-1])), highlight=False)
        # After each network, so that a run that is stopped has what it measured.
        result = {"summary": summarize(records), "networks": records}
        write_result(options.out, environment, {**result, "left_out": dict(MISSING)})
    console.print(
        make_table(
            "Temporary memory of a gradient, in MB",
            left=("network",),
            right=(*METHODS, "plain / dafjax", "dafjax / best", "compile", "dafjax"),
            rows=map(_row, records),
        )
    )
    for title, figure in summarize(records).items():
        console.print(f"{title.replace('_', ' ')}: {figure}", highlight=False)


def measure(network: Network, method: Method) -> Record | None:
    """Returns bytes and seconds of a network's gradient, or the error.

    Args:
        network: The network.
        method: How its loss is wrapped.
    """
    loss = method.loss(network)
    if loss is None:
        return None
    jax.clear_caches()
    try:
        start = time.perf_counter()
        gradient = jax.jit(jax.value_and_grad(loss))
        lowered = gradient.lower(network.params, *network.batch)
        traced = time.perf_counter()
        compiled = lowered.compile(compiler_options=dict(method.compiler_options))
        end = time.perf_counter()
    except Exception as error:  # The other networks are measured all the same.
        return {"error": f"{type(error).__name__}: {error}"}
    analysis = compiled.memory_analysis()
    assert analysis is not None, "XLA describes the memory of its programs."
    return {
        "temp_nbytes": analysis.temp_size_in_bytes,
        "lower_seconds": traced - start,
        "compile_seconds": end - traced,
    }


def summarize(records: Sequence[Record]) -> Record:
    """Returns the figures over all networks; where there is none, None."""
    savings = {r["network"]: _ratio(r, ["plain"], "dafjax") for r in records}
    savings = {name: x for name, x in savings.items() if x is not None}
    best = [_ratio(r, ["dafjax"], "checkpoint", "blocks") for r in records]
    slowdowns = [_slowdown(r) for r in records]
    return {
        "median_plain_over_dafjax": _median(savings.values()),
        "more_than_plain": [name for name, x in savings.items() if x < 1 / _SLACK],
        "median_dafjax_over_best_checkpoint": _median(best),
        "median_compile_over_plain": _median(slowdowns),
        "failed": {
            f"{record['network']}, {name}": method["error"]
            for record in records
            for name, method in record["methods"].items()
            if "error" in method
        },
    }


def _ratio(record: Record, above: Sequence[str], *below: str) -> float | None:
    """Returns the least bytes of some methods over the least of others."""
    over, under = _least(record, above), _least(record, below)
    return over / under if over is not None and under else None


def _least(record: Record, names: Iterable[str]) -> int | None:
    methods = [record["methods"].get(name, {}) for name in names]
    return min((m["temp_nbytes"] for m in methods if "temp_nbytes" in m), default=None)


def _seconds(record: Record, name: str) -> float | None:
    method = record["methods"].get(name, {})
    if "lower_seconds" not in method:
        return None
    return method["lower_seconds"] + method["compile_seconds"]


def _slowdown(record: Record) -> float | None:
    plain, dafjax_ = _seconds(record, "plain"), _seconds(record, "dafjax")
    return dafjax_ / plain if plain and dafjax_ else None


def _median(figures: Iterable[float | None]) -> float | None:
    known = [figure for figure in figures if figure is not None]
    return statistics.median(known) if known else None


def _row(record: Record) -> list[str]:
    def shown(figure: float | None, unit: str = "") -> str:
        return "-" if figure is None else f"{figure:.2f}{unit}"

    sizes = []
    for name in METHODS:
        failed = "error" in record["methods"].get(name, {})
        size = _least(record, [name])
        sizes.append("error" if failed else shown(size and size / 1e6))
    return [
        record["network"],
        *sizes,
        shown(_ratio(record, ["plain"], "dafjax")),
        shown(_ratio(record, ["dafjax"], "checkpoint", "blocks")),
        shown(_seconds(record, "plain"), "s"),
        shown(_seconds(record, "dafjax"), "s"),
    ]


if __name__ == "__main__":
    main()
