"""One training run, from its set-up to its result."""

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import rich.console
import rich.progress

from models import memory, plots
from models.checkpoints import Checkpoints
from models.data import evaluation_batches, training_batches
from models.run_directory import Record
from models.setup import Setup, compile_evaluation, compile_training, initial_state
from models.step import TrainState


def train(setup: Setup, console: rich.console.Console) -> Record:
    """Trains, writes metrics and checkpoints, and returns the result.

    An interrupt loses the epoch that runs at that moment, and no finished one.

    Raises:
        ValueError: If the run to resume has other options, or cannot be read.
        FloatingPointError: If the loss is no longer finite.
    """
    config, directory = setup.config, setup.directory
    directory.create(resume=config.resume)
    state = initial_state(setup)
    with Checkpoints(directory.path) as checkpoints:
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
                state, records = _train_epoch(setup, train_step, state, epoch, progress)
                records.append(
                    _summary(setup, records, _evaluate(setup, eval_step, state))
                )
                # Metrics first: resuming drops those of epochs without a checkpoint.
                directory.append_metrics(records)
                checkpoints.save(epoch, state, config.identity())
    dynamic = {
        "identity": config.identity(),
        "epochs": config.epochs,
        "resident_nbytes_before_training": resident_nbytes,
        "peak_resident_nbytes": memory.peak_resident_nbytes(),
    }
    metrics = directory.read_metrics()
    result = static | dynamic | _outcome(metrics)
    watched = [record for record in metrics if "bits" in record]
    if watched:
        result["pool_nbytes"] = max(record["pool_nbytes"] for record in watched)
        plots.plot_bits(watched, directory.path / "bits.png")
    directory.write_result(result)
    return result


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
    setup: Setup, eval_step: jax.stages.Compiled, state: TrainState
) -> Record:
    loss = num_correct = 0.0
    for batch in evaluation_batches(setup.dataset.test, batch_size=setup.config.batch):
        metrics = eval_step(state.params, state.batch_stats, *batch)
        loss += float(metrics["loss"])
        num_correct += float(metrics["num_correct"])
    num_examples = len(setup.dataset.test)
    return {
        "test_loss": loss / num_examples,
        "test_accuracy": num_correct / num_examples,
    }


def _train_epoch(
    setup: Setup,
    train_step: Callable[..., tuple[TrainState, Record]],
    state: TrainState,
    epoch: int,
    progress: rich.progress.Progress,
) -> tuple[TrainState, list[Record]]:
    config = setup.config
    task = progress.add_task(
        f"{setup.method.label}: epoch {epoch}/{config.epochs}",
        total=setup.steps_per_epoch,
        loss="",
    )
    records: list[Record] = []
    batches = training_batches(
        setup.dataset.train, batch_size=config.batch, seed=config.seed, epoch=epoch
    )
    for index, (images, labels) in enumerate(batches):
        start = time.perf_counter()
        state, metrics = train_step(state, images, labels)
        loss = float(metrics["loss"])  # waits for the step
        seconds = time.perf_counter() - start
        number = (epoch - 1) * setup.steps_per_epoch + index + 1
        if not abs(loss) < float("inf"):
            raise FloatingPointError(
                f"The loss is {loss} at step {number}. A smaller `--learning-rate` "
                f"(now {config.resolved_learning_rate}) may help."
            )
        watched = setup.method.watch()
        records.append(
            {
                "kind": "step",
                "method": config.method,
                "seed": config.seed,
                "epoch": epoch,
                "step": number,
                "loss": loss,
                "accuracy": int(metrics["num_correct"]) / config.batch,
                "seconds": seconds,
                **watched,
            }
        )
        progress.update(task, advance=1, loss=f"loss {loss:.3f}{_live(watched)}")
    return state, records


def _live(watched: Mapping[str, Any]) -> str:
    """Returns the bits of residuals and the bytes of their pool, for the display."""
    if not watched:
        return ""
    bits = statistics.fmean(watched["bits"].values() or [0])
    return f", {bits:.1f} bits, {watched['pool_nbytes'] / 1e6:.1f} MB"


def _summary(setup: Setup, steps: list[Record], evaluation: Record) -> Record:
    return {
        "kind": "epoch",
        "method": setup.config.method,
        "seed": setup.config.seed,
        "epoch": steps[-1]["epoch"],
        "step": steps[-1]["step"],
        "loss": statistics.fmean(record["loss"] for record in steps),
        "accuracy": statistics.fmean(record["accuracy"] for record in steps),
        **evaluation,
    }


def _outcome(records: list[Record]) -> Record:
    """Returns what the metrics of a finished run come to."""
    last = [record for record in records if record["kind"] == "epoch"][-1]
    # The first step of a process also pays for first-touch of its memory.
    seconds = [r["seconds"] for r in records if r["kind"] == "step"]
    return {
        "step_seconds": statistics.median(seconds[1:] or seconds),
        "final_loss": last["loss"],
        "test_loss": last["test_loss"],
        "test_accuracy": last["test_accuracy"],
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
