"""The loss, the training step and the evaluation step, as pure functions."""

from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import optax


ArrayTree = Any
Metrics = dict[str, jax.Array]
LossFunction = Callable[..., tuple[jax.Array, tuple[ArrayTree, jax.Array]]]
WrapLoss = Callable[[LossFunction], LossFunction]


@flax.struct.dataclass
class TrainState:
    """All arrays that training changes."""

    params: ArrayTree
    batch_stats: ArrayTree
    optimizer_state: ArrayTree
    step: jax.Array


def make_init(
    model: nn.Module,
    optimizer: optax.GradientTransformation,
    image_shape: tuple[int, ...],
) -> Callable[[jax.Array], TrainState]:
    """Returns `init(key) -> state`; equal for equal models, wrapped or not."""

    def init(key: jax.Array) -> TrainState:
        images = jnp.zeros((1, *image_shape))
        variables = model.init(key, images, train=True)
        return TrainState(
            params=variables["params"],
            batch_stats=variables["batch_stats"],
            optimizer_state=optimizer.init(variables["params"]),
            step=jnp.zeros((), jnp.int32),
        )

    return init


def create_state(
    model: nn.Module,
    optimizer: optax.GradientTransformation,
    *,
    image_shape: tuple[int, ...],
    seed: int,
) -> TrainState:
    """Draws the initial state from `seed`."""
    # Random numbers of many shapes take six times longer to compile with
    # optimizations, and this program runs once.
    options = {"xla_backend_optimization_level": "0"}
    init = make_init(model, optimizer, image_shape)
    return jax.jit(init, compiler_options=options)(jax.random.key(seed))


def make_loss(model: nn.Module) -> LossFunction:
    """Returns `loss(params, batch_stats, images, labels) -> (loss, aux)`.

    The loss is one function of arrays, so that it can be wrapped as a whole. The
    auxiliary output holds the new running statistics and the number of correct
    predictions.
    """

    def loss(
        params: ArrayTree, batch_stats: ArrayTree, images: jax.Array, labels: jax.Array
    ) -> tuple[jax.Array, tuple[ArrayTree, jax.Array]]:
        logits, updated = model.apply(
            {"params": params, "batch_stats": batch_stats},
            images,
            train=True,
            mutable=["batch_stats"],
        )
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        num_correct = jnp.sum(jnp.argmax(logits, axis=-1) == labels)
        return jnp.mean(losses), (updated["batch_stats"], num_correct)

    return loss


def make_train_step(
    loss: LossFunction, optimizer: optax.GradientTransformation
) -> Callable[[TrainState, jax.Array, jax.Array], tuple[TrainState, Metrics]]:
    """Returns `step(state, images, labels) -> (state, metrics)`.

    Args:
        loss: What `make_loss` returns, wrapped or not.
        optimizer: Turns gradients into updates.

    Returns:
        A pure function; the state is meant to be donated.
    """
    value_and_grad = jax.value_and_grad(loss, has_aux=True)

    def step(
        state: TrainState, images: jax.Array, labels: jax.Array
    ) -> tuple[TrainState, Metrics]:
        (value, (batch_stats, num_correct)), gradients = value_and_grad(
            state.params, state.batch_stats, images, labels
        )
        updates, optimizer_state = optimizer.update(
            gradients, state.optimizer_state, state.params
        )
        new_state = TrainState(
            params=optax.apply_updates(state.params, updates),
            batch_stats=batch_stats,
            optimizer_state=optimizer_state,
            step=state.step + 1,
        )
        return new_state, {"loss": value, "num_correct": num_correct}

    return step


def make_eval_step(model: nn.Module) -> Callable[..., Metrics]:
    """Returns `step(params, batch_stats, images, labels, weights) -> metrics`.

    The metrics are sums over the examples, each times its weight.
    """

    def step(
        params: ArrayTree,
        batch_stats: ArrayTree,
        images: jax.Array,
        labels: jax.Array,
        weights: jax.Array,
    ) -> Metrics:
        logits = model.apply(
            {"params": params, "batch_stats": batch_stats}, images, train=False
        )
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        correct = (jnp.argmax(logits, axis=-1) == labels).astype(jnp.float32)
        return {
            "loss": jnp.sum(losses * weights),
            "num_correct": jnp.sum(correct * weights),
        }

    return step


def compile_train_step(
    step: Callable[..., tuple[TrainState, Metrics]],
    state: TrainState,
    batch: tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct],
    *,
    compiler_options: Mapping[str, str],
) -> jax.stages.Compiled:
    """Compiles a training step ahead of time, the state donated.

    The very executable that trains can thus be asked for its memory. What `jax.jit`
    returned is compiled as it is.
    """
    jitted: Any = step if hasattr(step, "lower") else jax.jit(step, donate_argnums=0)
    lowered = jitted.lower(state, *batch)
    return lowered.compile(compiler_options=dict(compiler_options) or None)


def abstract_batch(
    batch_size: int, image_shape: tuple[int, ...]
) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """Returns shape and dtype of a batch of images and of its labels."""
    return (
        jax.ShapeDtypeStruct((batch_size, *image_shape), jnp.float32),
        jax.ShapeDtypeStruct((batch_size,), jnp.int32),
    )
