"""The loss, the training step and the evaluation step, as pure functions."""

from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax

from models import lora
from models.tasks.task import Batch, Task, Variables


ArrayTree = Any
Metrics = dict[str, jax.Array]
LossFunction = Callable[..., tuple[jax.Array, tuple[ArrayTree, Metrics]]]
WrapLoss = Callable[[LossFunction], LossFunction]


@flax.struct.dataclass
class TrainState:
    """All arrays that training changes.

    Attributes:
        trained: The variables that are differentiated.
        mutable: The collections that the forward pass changes.
        optimizer_state: What the optimizer keeps.
        step: int32 [], training steps that are done.
    """

    trained: Variables
    mutable: Variables
    optimizer_state: ArrayTree
    step: jax.Array


def begin(
    task: Task, variables: Variables, optimizer: optax.GradientTransformation
) -> tuple[TrainState, Variables]:
    """Returns the state before the first step, and the variables that stay as they are.

    Args:
        task: Says which are trained.
        variables: All of the model's.
        optimizer: Turns gradients into updates.
    """
    trained, others = lora.split(variables, task.trained)
    mutable = {name: others.pop(name) for name in task.mutable if name in others}
    state = TrainState(
        trained=trained,
        mutable=mutable,
        optimizer_state=optimizer.init(trained),
        step=jnp.zeros((), jnp.int32),
    )
    return state, others


def all_variables(state: TrainState, frozen: Variables) -> dict[str, Any]:
    """Returns the variables of the model, as `begin` was given them."""
    return lora.merge(state.trained, {**frozen, **state.mutable})


def make_loss(task: Task, model: nn.Module) -> LossFunction:
    """Returns `loss(trained, others, key, *batch) -> (loss, (mutable, metrics))`.

    The loss is one function of arrays, so that it can be wrapped as a whole. The
    auxiliary output holds the collections that changed and metrics of the batch.
    """

    def loss(
        trained: Variables, others: Variables, key: jax.Array, *batch: jax.Array
    ) -> tuple[jax.Array, tuple[ArrayTree, Metrics]]:
        variables = lora.merge(trained, others)
        return task.loss(model, variables, key, batch)

    return loss


def make_train_step(
    loss: LossFunction, optimizer: optax.GradientTransformation
) -> Callable[..., tuple[TrainState, Metrics]]:
    """Returns `step(state, frozen, key, *batch) -> (state, metrics)`.

    Args:
        loss: What `make_loss` returns, wrapped or not.
        optimizer: Turns gradients into updates.

    Returns:
        A pure function; the state is meant to be donated. What is random in a step
        depends on the key and the number of the step.
    """
    value_and_grad = jax.value_and_grad(loss, has_aux=True)

    def step(
        state: TrainState, frozen: Variables, key: jax.Array, *batch: jax.Array
    ) -> tuple[TrainState, Metrics]:
        key = jax.random.fold_in(key, state.step)
        (value, (mutable, metrics)), gradients = value_and_grad(
            state.trained, {**frozen, **state.mutable}, key, *batch
        )
        updates, optimizer_state = optimizer.update(
            gradients, state.optimizer_state, state.trained
        )
        new_state = TrainState(
            trained=optax.apply_updates(state.trained, updates),
            mutable=mutable,
            optimizer_state=optimizer_state,
            step=state.step + 1,
        )
        return new_state, {"loss": value, **metrics}

    return step


def make_eval_step(task: Task, model: nn.Module) -> Callable[..., Metrics]:
    """Returns `step(trained, others, *batch) -> predictions`, one for each example."""

    def step(trained: Variables, others: Variables, *batch: jax.Array) -> Metrics:
        return task.predict(model, lora.merge(trained, others), batch)

    return step


def compile_train_step(
    step: Callable[..., tuple[TrainState, Metrics]],
    *arguments: Any,
    compiler_options: Mapping[str, str],
) -> jax.stages.Compiled:
    """Compiles a training step ahead of time, the state donated.

    The very executable that trains can thus be asked for its memory. What `jax.jit`
    returned is compiled as it is.
    """
    jitted: Any = step if hasattr(step, "lower") else jax.jit(step, donate_argnums=0)
    lowered = jitted.lower(*arguments)
    return lowered.compile(compiler_options=dict(compiler_options) or None)


def abstract_batch(task: Task, batch_size: int) -> Batch:
    """Returns shapes and dtypes of a batch of examples."""
    example = task.train.take(np.zeros(1, np.int64))
    return tuple(
        jax.ShapeDtypeStruct((batch_size, *x.shape[1:]), x.dtype) for x in example
    )
