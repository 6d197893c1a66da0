"""One training run, from its set-up to its result."""

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
import rich.console
import rich.progress

from models import memory, plots, weights
from models.checkpoints import Checkpoints
from models.data import evaluation_batches, training_batches
from models.run_directory import Record
from models.setup import Setup, compile_evaluation, compile_training, initial_state
from models.step import TrainState, all_variables
from models.tasks.task import Variables


def train(setup: Setup, console: rich.console.Console) -> Record:
    """Trains, writes metrics, checkpoints and weights, and returns the result.

    An interrupt loses the epoch that runs at that moment, and no finished one.

    Raises:
        ValueError: If the run to resume has other options, or cannot be read.
        FloatingPointError: If the loss is no longer finite.
    """
    config, directory, metric = setup.config, setup.directory, setup.task.metric
    directory.create(resume=config.resume)
    identity = config.identity()  # reads the whole file of weights
    state, frozen = initial_state(setup)
    with Checkpoints(
        directory.path, higher_is_better=metric.higher_is_better
    ) as checkpoints:
        num_finished = 0
        if config.resume:
            state, num_finished = _restore(setup, checkpoints, state)
        directory.write_config(dataclasses.asdict(config))
        with console.status(f"compiling ({setup.method.label})"):
            train_step, static = compile_training(setup)
            eval_step = compile_evaluation(setup)
        resident_nbytes = memory.resident_nbytes()
        with _progress(console) as progress:
            for epoch in range(num_finished + 1, config.epochs + 1):
                if _is_stuck(setup):
                    break
                state, records, means = _train_epoch(
                    setup, train_step, state, frozen, epoch, progress
                )
                evaluation = _evaluate(setup, eval_step, state, frozen)
                last = {name: records[-1][name] for name in _PLACE}
                records.append({**last, "kind": "epoch", **means, **evaluation})
                # Metrics first: resuming drops those of epochs without a checkpoint.
                directory.append_metrics(records)
                score = _score(setup, evaluation[metric.key])
                checkpoints.save(epoch, state, identity, score)
        peak_resident_nbytes = memory.peak_resident_nbytes()
        best = checkpoints.best()
        best_state = state if best is None else checkpoints.restore(best, state)
    dynamic = {
        "identity": identity,
        "epochs": config.epochs,
        "resident_nbytes_before_training": resident_nbytes,
        "peak_resident_nbytes": peak_resident_nbytes,
    }
    metrics = directory.read_metrics()
    result = static | dynamic | _outcome(setup, metrics, best)
    watched = [record for record in metrics if "bits" in record]
    if watched:
        result["pool_nbytes"] = max(record["pool_nbytes"] for record in watched)
        plots.plot_bits(watched, directory.path / "bits.png")
    result |= _keep(setup, all_variables(best_state, frozen), console)
    directory.write_result(result)
    return result


# Where in a training a record is.
_PLACE = ("method", "seed", "epoch", "step")


def _keep(
    setup: Setup, variables: Variables, console: rich.console.Console
) -> Mapping[str, float]:
    """Saves the best weights, and what a person may look at; returns its metrics."""
    folder = setup.directory.path / "weights"
    folder.mkdir(exist_ok=True)
    save = weights.save_adapters if setup.config.lora else weights.save
    save(folder, setup.task.config, variables)
    if setup.task.tokenizer is not None:
        setup.task.tokenizer.save(str(folder / "tokenizer.json"))
    with console.status("writing samples"):
        metrics, text = setup.task.samples(setup.model, variables, setup.config.seed)
    if text:
        (setup.directory.path / "samples.txt").write_text(text, encoding="utf-8")
        console.print(text, markup=False, highlight=False)
    return metrics


def _score(setup: Setup, value: float) -> float:
    """Returns a metric for comparison: where it is undefined, the worst there is."""
    if math.isfinite(value):
        return value
    worst = 1e300
    return -worst if setup.task.metric.higher_is_better else worst


def _is_stuck(setup: Setup) -> bool:
    """Whether the last epochs, as many as `--patience` says, brought nothing better."""
    if setup.config.patience is None:
        return False
    metric = setup.task.metric
    best, waited = None, 0
    for record in setup.directory.read_metrics():
        if record["kind"] == "epoch":
            value = _score(setup, record[metric.key])
            if metric.improves(value, best):
                best, waited = value, 0
            else:
                waited += 1
    return waited >= setup.config.patience


def _restore(
    setup: Setup, checkpoints: Checkpoints, state: TrainState
) -> tuple[TrainState, int]:
    config = setup.config
    num_finished = checkpoints.latest()
    if num_finished is None:
        # Interrupted before the first epoch was finished: start over.
        setup.directory.write_metrics([])
        return state, 0
    before, now = checkpoints.identity(num_finished), config.identity()
    for name in sorted(before.keys() | now.keys()):
        if before.get(name) != now.get(name):
            raise ValueError(
                f"`--{name.replace('_', '-')}` is {now.get(name)}, but the run in "
                f"`{setup.directory.path}` has {before.get(name)}. Resume it with the "
                "same options, or start a new run in another directory."
            )
    if num_finished > config.epochs:
        raise ValueError(
            f"`--epochs` is {config.epochs}, but the run in `{setup.directory.path}` "
            f"has finished {num_finished}."
        )
    setup.directory.keep_metrics_before(num_finished)
    return checkpoints.restore(num_finished, state), num_finished


def _evaluate(
    setup: Setup, eval_step: jax.stages.Compiled, state: TrainState, frozen: Variables
) -> Record:
    batches = evaluation_batches(setup.task.test, batch_size=setup.config.batch)
    others = {**frozen, **state.mutable}
    predictions = [
        {
            name: np.asarray(values)[:count]
            for name, values in eval_step(state.trained, others, *batch).items()
        }
        for count, batch in batches
    ]
    names = predictions[0]
    together = {n: np.concatenate([part[n] for part in predictions]) for n in names}
    metrics = setup.task.measure(together)
    return {f"test_{name}": value for name, value in metrics.items()}


def _train_epoch(
    setup: Setup,
    train_step: Callable[..., tuple[TrainState, Record]],
    state: TrainState,
    frozen: Variables,
    epoch: int,
    progress: rich.progress.Progress,
) -> tuple[TrainState, list[Record], Record]:
    """Returns the state after an epoch, a record of each step, means of what it has."""
    config = setup.config
    task = progress.add_task(
        f"{setup.method.label}: epoch {epoch}/{config.epochs}",
        total=setup.steps_per_epoch,
        loss="",
    )
    records: list[Record] = []
    measured: list[Record] = []
    batches = training_batches(
        setup.task.train, batch_size=config.batch, seed=config.seed, epoch=epoch
    )
    key = setup.key
    for index, batch in enumerate(batches):
        start = time.perf_counter()
        state, metrics = train_step(state, frozen, key, *batch)
        values = {name: float(value) for name, value in metrics.items()}  # waits
        loss = values["loss"]
        seconds = time.perf_counter() - start
        number = (epoch - 1) * setup.steps_per_epoch + index + 1
        if not abs(loss) < float("inf"):
            raise FloatingPointError(
                f"The loss is {loss} at step {number}. A smaller `--learning-rate` "
                f"(now {config.learning_rate}) may help."
            )
        watched = setup.method.watch()
        records.append(
            {
                "kind": "step",
                "method": config.method,
                "seed": config.seed,
                "epoch": epoch,
                "step": number,
                "seconds": seconds,
                **values,
                **watched,
            }
        )
        measured.append(values)
        progress.update(task, advance=1, loss=f"loss {loss:.3f}{_live(watched)}")
    means = {n: statistics.fmean(m[n] for m in measured) for n in measured[0]}
    return state, records, means


def _live(watched: Mapping[str, Any]) -> str:
    """Returns the bits of residuals and the bytes of their pool, for the display."""
    if not watched:
        return ""
    bits = statistics.fmean(watched["bits"].values() or [0])
    return f", {bits:.1f} bits, {watched['pool_nbytes'] / 1e6:.1f} MB"


def _outcome(setup: Setup, records: list[Record], best: int | None) -> Record:
    """Returns what the metrics of a finished run come to.

    Args:
        setup: What was run.
        records: Its metrics.
        best: The epoch of the best checkpoint.
    """
    epochs = [record for record in records if record["kind"] == "epoch"]
    key = setup.task.metric.key
    # The first step of a process also pays for first-touch of its memory.
    seconds = [r["seconds"] for r in records if r["kind"] == "step"]
    return {
        "step_seconds": statistics.median(seconds[1:] or seconds),
        "final_loss": epochs[-1]["loss"],
        "best_epoch": best,
        **{f"best_{key}": r[key] for r in epochs if r["epoch"] == best},
        **{name: x for name, x in epochs[-1].items() if name.startswith("test_")},
    }


def _progress(console: rich.console.Console) -> rich.progress.Progress:
    return rich.progress.Progress(
        rich.progress.TextColumn("{task.description}"),
        rich.progress.BarColumn(),
        rich.progress.MofNCompleteColumn(),
        rich.progress.TextColumn("{task.fields[loss]}"),
        rich.progress.TimeElapsedColumn(),
        rich.progress.TimeRemainingColumn(),
        console=console,
    )
