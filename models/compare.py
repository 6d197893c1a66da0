"""Trains the same model by several methods, each in a fresh process, and compares."""

import dataclasses
import statistics
from collections.abc import Sequence

import rich.box
import rich.console
import rich.table

from models import plots
from models.config import TrainConfig
from models.fresh_process import train_in_fresh_process
from models.run_directory import Record, RunDirectory
from models.tasks.task import Metric


_COLUMNS = (
    "Step\ntime",
    "Compiled\ntemp",
    "Saved\nresiduals",
    "Peak\nRSS",
    "Final\nloss",
)


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
            runs.append(train_in_fresh_process(single))
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


def _merge(method: str, runs: Sequence[Record]) -> Record:
    """Averages over seeds what depends on them, and takes the rest from the first."""
    first = runs[0]
    of_quality = [key for key in first if key.startswith(("test_", "best_test_"))]
    averaged = ("step_seconds", "final_loss", *of_quality)
    means = {key: statistics.fmean(run[key] for run in runs) for key in averaged}
    return first | means | {"num_seeds": len(runs)}


def make_table(config: TrainConfig, results: Sequence[Record]) -> rich.table.Table:
    """Returns the comparison; below each metric stands its ratio to the first row."""
    first = results[0]
    seeds = f", mean of {config.seeds} seeds" if config.seeds > 1 else ""
    table = rich.table.Table(
        title=(
            f"{_model(config)} ({_parameters(first)}), {config.data}, "
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
    metric = Metric(**first["metric"])
    for title in (*_COLUMNS, metric.title.replace(" ", "\n")):
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
            metric.show(result[metric.key]),
        )
    return table


def _model(config: TrainConfig) -> str:
    if config.family == "resnet":
        return f"{config.model}, width {config.width}"
    adapters = f", LoRA {config.lora}" if config.lora else ""
    return f"{config.model}, {config.size}{adapters}"


def _parameters(result: Record) -> str:
    total, trained = result["num_params"], result["num_trained"]
    part = "" if trained == total else f", {trained / 1e6:.2f} M of them trained"
    return f"{total / 1e6:.2f} M parameters{part}"


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
