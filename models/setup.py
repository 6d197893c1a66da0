"""What is fixed during a training run: data, model, compiled steps."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import optax

from models import memory, resnet, step
from models.config import TrainConfig
from models.data import Dataset, load
from models.methods import Method, MethodOptions, make_method
from models.optimizer import make_optimizer
from models.run_directory import Record, RunDirectory


MODELS = {
    "resnet18": resnet.resnet18,
    "resnet34": resnet.resnet34,
    "resnet50": resnet.resnet50,
}


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
    options = MethodOptions(config.bits, config.policy, config.store, config.budget)
    method = make_method(config.method, options)
    dataset = load(config.data, directory=config.data_dir, seed=config.seed)
    steps_per_epoch = len(dataset.train) // config.batch
    if steps_per_epoch < 1:
        raise ValueError(
            f"`--batch` must be at most {len(dataset.train)}, the number of training "
            f"images in {config.data}, but got {config.batch}."
        )
    shape = MODELS[config.model](
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


def initial_state(setup: Setup) -> step.TrainState:
    """Draws the initial weights; they depend on seed and model, not on the method."""
    return step.create_state(
        setup.model,
        setup.optimizer,
        image_shape=setup.dataset.image_shape,
        seed=setup.config.seed,
    )


def compile_training(setup: Setup) -> tuple[Callable[..., Any], Record]:
    """Compiles the training step, and describes its memory.

    Of a method that adapts it is the memory of the first program.
    """
    state, batch = _shapes(setup)
    loss = setup.method.wrap_loss(step.make_loss(setup.model))
    train_step = setup.method.jit(
        step.make_train_step(loss, setup.optimizer), donate_argnums=0
    )
    candidates = [
        step.compile_train_step(train_step, state, batch, compiler_options=options)
        for options in setup.method.compiler_options
    ]
    compiled = min(candidates, key=memory.temp_nbytes)
    return train_step if setup.method.adapts else compiled, {
        "method": setup.method.name,
        "label": setup.method.label,
        "seed": setup.config.seed,
        "num_params": sum(x.size for x in jax.tree.leaves(state.params)),
        "temp_nbytes": memory.temp_nbytes(compiled),
        "residual_nbytes": residual_nbytes(setup),
    }


def residual_nbytes(setup: Setup) -> int:
    """Returns the bytes that one step keeps for its backward pass; runs nothing."""
    state, batch = _shapes(setup)
    loss = setup.method.wrap_loss(step.make_loss(setup.model))
    return memory.saved_residual_nbytes(
        loss, state.params, state.batch_stats, *batch, jit=setup.method.jit
    )


def compile_evaluation(setup: Setup) -> jax.stages.Compiled:
    """Compiles the evaluation step."""
    state, batch = _shapes(setup)
    weights = jax.ShapeDtypeStruct((setup.config.batch,), "float32")
    evaluate = jax.jit(step.make_eval_step(setup.model))
    return evaluate.lower(state.params, state.batch_stats, *batch, weights).compile()


def _shapes(
    setup: Setup,
) -> tuple[step.TrainState, tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]]:
    """Returns a state and a batch in shape and dtype only."""
    image_shape = setup.dataset.image_shape
    init = step.make_init(setup.model, setup.optimizer, image_shape)
    state = jax.eval_shape(init, jax.random.key(setup.config.seed))
    return state, step.abstract_batch(setup.config.batch, image_shape)
