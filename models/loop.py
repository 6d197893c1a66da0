"""One training run, from options to a result."""

import dataclasses
import functools
import statistics
import time
from typing import Any

import jax
import optax
import rich.console
import rich.progress

from models import memory, resnet, step
from models.checkpoints import Checkpoints
from models.config import TrainConfig
from models.data import Dataset, evaluation_batches, load, training_batches
from models.methods import Method, make_method
from models.optimizer import make_optimizer
from models.run_directory import Record, RunDirectory


_MODELS = {"resnet18": resnet.resnet18, "resnet34": resnet.resnet34}


@dataclasses.dataclass(frozen=True)
class Setup:
    """Everything that is fixed during a run.

    Attributes:
        config: The options.
        dataset: Training and test split.
        method: What is wrapped.
        model: The model, its blocks wrapped by the method.
        optimizer: Turns gradients into updates.
        directory: Where the run is written.
    """

    config: TrainConfig
    dataset: Dataset
    method: Method
    model: resnet.ResNet
    optimizer: optax.GradientTransformation
    directory: RunDirectory

    @property
    def steps_per_epoch(self) -> int:
        """The number of full batches in the training split."""
        return len(self.dataset.train) // self.config.batch


def set_up(config: TrainConfig) -> Setup:
    """Loads the data and builds the model.

    Raises:
        ValueError: If an option is out of range or does not fit the others.
        FileNotFoundError: If the data set or the run to resume is missing.
    """
    method = make_method(config.method, bits=config.bits, policy=config.policy)
    dataset = load(config.data, directory=config.data_dir, seed=config.seed)
    steps_per_epoch = len(dataset.train) // config.batch
    if steps_per_epoch < 1:
        raise ValueError(
            f"`--batch` must be at most {len(dataset.train)}, the number of training "
            f"images in {config.data}, but got {config.batch}."
        )
    shape = _MODELS[config.model](
        num_classes=dataset.num_classes,
        num_filters=config.width,
        # A stem for small images keeps their size.
        stem="cifar" if dataset.image_shape[0] <= 64 else "imagenet",
    )
    optimizer = make_optimizer(
        config.optimizer,
        learning_rate=config.resolved_learning_rate,
        weight_decay=config.resolved_weight_decay,
        schedule=config.schedule,
        steps_per_epoch=steps_per_epoch,
        epochs=config.epochs,
    )
    return Setup(
        config=config,
        dataset=dataset,
        method=method,
        model=resnet.ResNet(shape, wrap_block=method.wrap_block),
        optimizer=optimizer,
        directory=RunDirectory(config.resolved_directory),
    )


def train(setup: Setup, console: rich.console.Console) -> Record:
    """Trains, writes metrics and checkpoints, and returns the result.

    An interrupt loses the epoch that runs at that moment, and no finished one.

    Raises:
        ValueError: If the run to resume has other options, or cannot be read.
        FloatingPointError: If the loss is no longer finite.
    """
    config, directory = setup.config, setup.directory
    directory.create(dataclasses.asdict(config), resume=config.resume)
    state = step.create_state(
        setup.model,
        setup.optimizer,
        image_shape=setup.dataset.image_shape,
        seed=config.seed,
    )
    with Checkpoints(directory.path) as checkpoints:
        num_finished = 0
        if config.resume:
            state, num_finished = _restore(setup, checkpoints, state)
        with console.status(f"compiling ({setup.method.label})"):
            train_step, static = _compile(setup, state)
            evaluate = _compile_evaluation(setup, state)
        resident_nbytes = memory.resident_nbytes()
        with _progress(console) as progress:
            for epoch in range(num_finished + 1, config.epochs + 1):
                state, records = _train_epoch(setup, train_step, state, epoch, progress)
                records.append(_summary(setup, records, evaluate(state)))
                # Metrics first: resuming drops those of epochs without a checkpoint.
                directory.append_metrics(records)
                checkpoints.save(epoch, state, config.identity())
    dynamic = {
        "resident_nbytes_before_training": resident_nbytes,
        "peak_resident_nbytes": memory.peak_resident_nbytes(),
    }
    result = static | dynamic | _outcome(directory.read_metrics())
    directory.write_result(result)
    return result


def _restore(
    setup: Setup, checkpoints: Checkpoints, state: step.TrainState
) -> tuple[step.TrainState, int]:
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


def _compile(
    setup: Setup, state: step.TrainState
) -> tuple[jax.stages.Compiled, Record]:
    """Compiles the training step and describes it."""
    batch = step.abstract_batch(setup.config.batch, setup.dataset.image_shape)
    loss = setup.method.wrap_loss(step.make_loss(setup.model))
    candidates = [
        step.compile_train_step(
            step.make_train_step(loss, setup.optimizer),
            state,
            batch,
            compiler_options=options,
        )
        for options in setup.method.compiler_options
    ]
    compiled = min(candidates, key=memory.temp_nbytes)
    return compiled, {
        "method": setup.method.name,
        "label": setup.method.label,
        "seed": setup.config.seed,
        "num_params": sum(x.size for x in jax.tree.leaves(state.params)),
        "temp_nbytes": memory.temp_nbytes(compiled),
        "residual_nbytes": memory.saved_residual_nbytes(
            loss, state.params, state.batch_stats, *batch
        ),
    }


def _compile_evaluation(setup: Setup, state: step.TrainState) -> Any:
    batch_size = setup.config.batch
    images, labels = step.abstract_batch(batch_size, setup.dataset.image_shape)
    weights = jax.ShapeDtypeStruct((batch_size,), "float32")
    compiled = (
        jax.jit(step.make_eval_step(setup.model))
        .lower(state.params, state.batch_stats, images, labels, weights)
        .compile()
    )
    return functools.partial(_evaluate, setup, compiled)


def _evaluate(
    setup: Setup, compiled: jax.stages.Compiled, state: step.TrainState
) -> Record:
    loss = num_correct = 0.0
    for batch in evaluation_batches(setup.dataset.test, batch_size=setup.config.batch):
        metrics = compiled(state.params, state.batch_stats, *batch)
        loss += float(metrics["loss"])
        num_correct += float(metrics["num_correct"])
    num_examples = len(setup.dataset.test)
    return {
        "test_loss": loss / num_examples,
        "test_accuracy": num_correct / num_examples,
    }


def _train_epoch(
    setup: Setup,
    train_step: jax.stages.Compiled,
    state: step.TrainState,
    epoch: int,
    progress: rich.progress.Progress,
) -> tuple[step.TrainState, list[Record]]:
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
            }
        )
        progress.update(task, advance=1, loss=f"loss {loss:.3f}")
    return state, records


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
