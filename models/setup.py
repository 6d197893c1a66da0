"""What is fixed during a training run: task, model, compiled steps."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import optax

from models import memory, step, weights
from models.config import TrainConfig
from models.methods import Method, MethodOptions, make_method
from models.optimizer import make_optimizer
from models.run_directory import Record, RunDirectory
from models.tasks.choose import choose_task
from models.tasks.task import Batch, Task, Variables


@dataclasses.dataclass(frozen=True)
class Setup:
    """Everything that is fixed during a run.

    Attributes:
        config: The options, filled in.
        task: What is learned.
        method: What is wrapped.
        model: The model, its blocks wrapped by the method.
        optimizer: Turns gradients into updates.
        directory: Where the run is written.
    """

    config: TrainConfig
    task: Task
    method: Method
    model: nn.Module
    optimizer: optax.GradientTransformation
    directory: RunDirectory

    @property
    def steps_per_epoch(self) -> int:
        """The number of full batches in the training split."""
        return len(self.task.train) // self.config.batch

    @property
    def key(self) -> jax.Array:
        """What dropout and masks of all steps come from; weights have another."""
        return jax.random.fold_in(jax.random.key(self.config.seed), 1)

    @functools.cached_property
    def shapes(self) -> tuple[step.TrainState, Variables, Batch]:
        """A state, frozen variables and a batch, in shape and dtype only."""

        def begin(key: jax.Array) -> tuple[step.TrainState, Variables]:
            variables = self.task.init(self.model, key)
            return step.begin(self.task, variables, self.optimizer)

        state, frozen = jax.eval_shape(begin, jax.random.key(self.config.seed))
        return state, frozen, step.abstract_batch(self.task, self.config.batch)


def set_up(config: TrainConfig) -> Setup:
    """Loads the data and builds the model.

    Raises:
        ValueError: If an option is out of range or does not fit the others.
        FileNotFoundError: If the data set or the run to resume is missing.
    """
    config = config.filled()
    options = MethodOptions(config.bits, config.policy, config.store, config.budget)
    method = make_method(config.method, options)
    task = choose_task(config)
    steps_per_epoch = len(task.train) // config.batch
    if steps_per_epoch < 1:
        raise ValueError(
            f"`--batch` must be at most {len(task.train)}, the number of training "
            f"examples in {config.data}, but got {config.batch}."
        )
    optimizer = make_optimizer(
        config.optimizer,
        learning_rate=config.learning_rate,
        weight_decay=config.weight_decay,
        schedule=config.schedule,
        steps_per_epoch=steps_per_epoch,
        epochs=config.epochs,
    )
    return Setup(
        config=config,
        task=task,
        method=method,
        model=task.make_model(method.wrap_block),
        optimizer=optimizer,
        directory=RunDirectory(config.resolved_directory),
    )


def initial_state(setup: Setup) -> tuple[step.TrainState, Variables]:
    """Draws or loads the initial weights; they do not depend on the method.

    Returns:
        The state, and the variables that stay as they are.

    Raises:
        WeightsError: If there are weights to start from, but they do not fit.
    """
    # Random numbers of many shapes take six times longer to compile with
    # optimizations, and this program runs once.
    options = {"xla_backend_optimization_level": "0"}
    draw = functools.partial(setup.task.init, setup.model)
    variables = jax.jit(draw, compiler_options=options)(
        jax.random.key(setup.config.seed)
    )
    if setup.config.weights is not None:
        variables = weights.load(
            setup.config.weights, setup.task.config, variables, fresh_head=True
        )
    return step.begin(setup.task, variables, setup.optimizer)


def compile_training(setup: Setup) -> tuple[Callable[..., Any], Record]:
    """Compiles the training step, and describes its memory.

    Of a method that adapts it is the memory of the first program.
    """
    state, frozen, batch = setup.shapes
    loss = setup.method.wrap_loss(step.make_loss(setup.task, setup.model))
    train_step = setup.method.jit(
        step.make_train_step(loss, setup.optimizer), donate_argnums=0
    )
    arguments = (state, frozen, setup.key, *batch)
    candidates = [
        step.compile_train_step(train_step, *arguments, compiler_options=options)
        for options in setup.method.compiler_options
    ]
    compiled = min(candidates, key=memory.temp_nbytes)
    num_trained = _num_elements(state.trained)
    return train_step if setup.method.adapts else compiled, {
        "method": setup.method.name,
        "label": setup.method.label,
        "seed": setup.config.seed,
        "data": setup.task.name,
        "metric": dataclasses.asdict(setup.task.metric),
        "num_params": num_trained + _num_elements(frozen),
        "num_trained": num_trained,
        "temp_nbytes": memory.temp_nbytes(compiled),
        "residual_nbytes": residual_nbytes(setup),
    }


def residual_nbytes(setup: Setup) -> int:
    """Returns the bytes that one step keeps for its backward pass; runs nothing."""
    state, frozen, batch = setup.shapes
    loss = setup.method.wrap_loss(step.make_loss(setup.task, setup.model))
    others = {**frozen, **state.mutable}
    return memory.saved_residual_nbytes(
        loss, state.trained, others, setup.key, *batch, jit=setup.method.jit
    )


def compile_evaluation(setup: Setup) -> jax.stages.Compiled:
    """Compiles the evaluation step."""
    state, frozen, batch = setup.shapes
    evaluate = jax.jit(step.make_eval_step(setup.task, setup.model))
    others = {**frozen, **state.mutable}
    return evaluate.lower(state.trained, others, *batch).compile()


def _num_elements(variables: Variables) -> int:
    return sum(x.size for x in jax.tree.leaves(variables))
