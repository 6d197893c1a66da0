"""Trains the same model by several methods, each in a fresh process, and compares."""

import dataclasses
import os
import pathlib
import statistics
import subprocess
import sys
from collections.abc import Sequence

import rich.box
import rich.console
import rich.table

from models import plots
from models.config import TrainConfig
from models.run_directory import Record, RunDirectory


_COLUMNS = (
    "Step\ntime",
    "Compiled\ntemp",
    "Saved\nresiduals",
    "Peak\nRSS",
    "Final\nloss",
    "Test\naccuracy",
)

_ROOT = pathlib.Path(__file__).resolve().parent.parent


def run(config: TrainConfig, console: rich.console.Console) -> list[Record]:
    """Trains with every method and every seed; writes table, metrics and plots.

    A fresh process per run makes its peak of resident memory its own.

    Returns:
        One result per method, averaged over seeds.

    Raises:
        ValueError: If a run fails; the process has printed the reason.
    """
    out = RunDirectory(config.resolved_directory)
    out.create(resume=config.resume)
    out.write_config(dataclasses.asdict(config))
    runs: list[Record] = []
    records: list[Record] = []
    for seed in range(config.seed, config.seed + config.seeds):
        for method in config.methods:
            name = method if config.seeds == 1 else f"{method}-seed{seed}"
            single = dataclasses.replace(
                config, method=method, seed=seed, out=out.path / name, compare=False
            )
            runs.append(_run_in_process(single, console))
            records += RunDirectory(single.resolved_directory).read_metrics()
    results = [_merge(m, [r for r in runs if r["method"] == m]) for m in config.methods]
    out.write_metrics(records)
    out.write_result({"results": results, "runs": runs})
    of_one_seed = [r for r in records if r["seed"] == config.seed]
    plots.plot_loss(results, of_one_seed, out.path / "loss.png")
    plots.plot_memory(results, out.path / "memory.png")
    console.print(make_table(config, results))
    console.print(
        f"Written to {out.path}: metrics.jsonl, result.json, loss.png, memory.png.",
        markup=False,
    )
    return results


def _run_in_process(config: TrainConfig, console: rich.console.Console) -> Record:
    directory = RunDirectory(config.resolved_directory)
    if config.resume:
        finished = directory.read_result()
        if finished is not None and _is_of(finished, config):
            return finished
        resume = (directory.path / "config.json").exists()
        config = dataclasses.replace(config, resume=resume)
    path = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")]))
    completed = subprocess.run(
        [sys.executable, "-m", "models.train", *config.to_arguments()],
        env={**os.environ, "PYTHONPATH": path},
        check=False,
    )
    if completed.returncode == 130:
        raise KeyboardInterrupt
    result = directory.read_result()
    if completed.returncode or result is None:
        raise ValueError(
            f"Training with method {config.method} ended with status "
            f"{completed.returncode}; its message stands above."
        )
    return result


def _is_of(result: Record, config: TrainConfig) -> bool:
    """Whether a result is what these options would give."""
    asked_for = {"identity": config.identity(), "epochs": config.epochs}
    return {key: result.get(key) for key in asked_for} == asked_for


def _merge(method: str, runs: Sequence[Record]) -> Record:
    """Averages over seeds what depends on them, and takes the rest from the first."""
    averaged = ("step_seconds", "final_loss", "test_loss", "test_accuracy")
    means = {key: statistics.fmean(run[key] for run in runs) for key in averaged}
    return runs[0] | means | {"num_seeds": len(runs)}


def make_table(config: TrainConfig, results: Sequence[Record]) -> rich.table.Table:
    """Returns the comparison; below each figure stands its ratio to the first row."""
    first = results[0]
    seeds = f", mean of {config.seeds} seeds" if config.seeds > 1 else ""
    table = rich.table.Table(
        title=(
            f"{config.model}, width {config.width} "
            f"({first['num_params'] / 1e6:.2f} M parameters), {config.data}, "
            f"batch {config.batch}, {config.epochs} epochs{seeds}"
        ),
        caption=(
            "Ratios are to the first row. Peak RSS is of the whole process, with "
            "Python, JAX and the compiler; below it, what training added. Temp and "
            "residuals are with the page pool, if there is one."
        ),
        box=rich.box.SIMPLE_HEAD,
        collapse_padding=True,
        pad_edge=False,
        leading=1,
    )
    table.add_column("Method", max_width=16)
    for title in _COLUMNS:
        table.add_column(title, justify="right", no_wrap=True)
    for result in results:
        slowdown = result["step_seconds"] / first["step_seconds"]
        table.add_row(
            result["label"],
            f"{result['step_seconds'] * 1e3:.0f} ms\n{slowdown:.2f}x",
            _with_ratio(result, first, "temp_nbytes"),
            _with_ratio(result, first, "residual_nbytes"),
            _resident(result),
            f"{result['final_loss']:.4f}",
            f"{result['test_accuracy']:.2%}",
        )
    return table


def _with_ratio(result: Record, first: Record, key: str) -> str:
    # What waits in a page pool is no part of the program, but of its memory.
    nbytes, reference = (r[key] + r.get("pool_nbytes", 0) for r in (result, first))
    # A zero has no ratio: a method may keep nothing.
    ratio = f"{reference / nbytes:.1f}x less" if nbytes else ""
    return f"{nbytes / 1e6:.1f} MB\n{ratio}"


def _resident(result: Record) -> str:
    peak, before = (
        result[key]
        for key in ("peak_resident_nbytes", "resident_nbytes_before_training")
    )
    if peak is None or before is None:
        return "unknown"
    return f"{peak / 1e6:.0f} MB\n+{(peak - before) / 1e6:.0f} MB"
