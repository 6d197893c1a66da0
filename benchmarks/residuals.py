"""Real residuals: what the layers of two small, trained models read and write."""

import collections
import functools
from collections.abc import Callable, Iterator
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.small_networks import bytes_of_text
from models import step
from models.data.digits import load_digits
from models.gpt2 import GPT2, GPT2Config
from models.tasks.images import classify_images
from models.wrapping import no_wrapping


# Arrays by what they are; the last axis is that of the channels.
Values = dict[str, list[np.ndarray]]
Note = Callable[[nn.Module, jax.Array, jax.Array], Iterator[tuple[str, jax.Array]]]

_GPT2 = GPT2Config(num_layers=4, width=256, num_heads=4, vocabulary=256, context=256)


def resnet_values(*, width: int, batch: int, steps: int) -> Values:
    """Trains a ResNet-18 on the digits and returns what its convolutions see.

    Args:
        width: Filters of the first stage.
        batch: Images in a step.
        steps: Training steps before the values are taken.
    """
    digits = load_digits(seed=0)
    task = classify_images("resnet18", digits, width=width)
    model = task.make_model(no_wrapping)
    optimizer = optax.sgd(0.05, momentum=0.9)
    rng = np.random.default_rng(0)
    batches = (
        digits.train.take(rng.integers(len(digits.train), size=batch))
        for _ in range(steps)
    )
    key = jax.random.key(0)
    variables = jax.jit(functools.partial(task.init, model))(key)
    state, frozen = step.begin(task, variables, optimizer)
    take_step = jax.jit(step.make_train_step(step.make_loss(task, model), optimizer))
    for examples in batches:
        state, _ = take_step(state, frozen, key, *examples)
    variables = step.all_variables(state, frozen)
    images, _ = digits.test.take(np.arange(batch))
    apply = functools.partial(model.apply, train=True, mutable=["batch_stats"])
    return _record(_note_resnet, apply, variables, images)


def gpt2_values(*, batch: int, steps: int) -> Values:
    """Trains a GPT-2 on sources of Flax and returns what its layers see.

    Args:
        batch: Sequences of 256 bytes in a step.
        steps: Training steps before the values are taken.
    """
    model = GPT2(_GPT2)
    # Ten times as fast, all positions would be the same for the first hundred steps.
    optimizer = optax.adam(3e-4)
    text = bytes_of_text()
    rng = np.random.default_rng(0)

    def take_batch() -> np.ndarray:
        starts = rng.integers(len(text) - _GPT2.context, size=batch)
        rows = [text[start : start + _GPT2.context] for start in starts]
        return np.array([list(row) for row in rows], np.int32)

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        logits = model.apply(params, tokens)
        return optax.softmax_cross_entropy_with_integer_labels(
            logits[:, :-1], tokens[:, 1:]
        ).mean()

    @jax.jit
    def take_step(params: Any, state: Any, tokens: jax.Array) -> tuple[Any, Any]:
        updates, state = optimizer.update(jax.grad(loss)(params, tokens), state)
        return optax.apply_updates(params, updates), state

    params = jax.jit(model.init)(jax.random.key(0), take_batch())
    state = optimizer.init(params)
    for _ in range(steps):
        params, state = take_step(params, state, take_batch())
    return _record(_note_gpt2, model.apply, params, take_batch())


def _record(note: Note, apply: Callable[..., Any], *arguments: Any) -> Values:
    """Returns what `note` makes of the input and the output of each layer."""

    def run(*arguments: Any) -> dict[str, list[jax.Array]]:
        values = collections.defaultdict(list)

        def intercept(
            call: Callable[..., Any], args: Any, kwargs: Any, context: Any
        ) -> Any:
            output = call(*args, **kwargs)
            if context.method_name == "__call__":
                for kind, value in note(context.module, args[0], output):
                    values[kind].append(value)
            return output

        with nn.intercept_methods(intercept):
            apply(*arguments)
        return dict(values)

    return jax.tree.map(np.asarray, jax.jit(run)(*arguments))


def _note_resnet(
    module: nn.Module, x: jax.Array, y: jax.Array
) -> Iterator[tuple[str, jax.Array]]:
    if isinstance(module, nn.Conv):
        if module.name != "stem":  # which reads images
            yield "ResNet: conv input (after relu)", x
        yield "ResNet: conv output, norm input", y


def _note_gpt2(
    module: nn.Module, x: jax.Array, y: jax.Array
) -> Iterator[tuple[str, jax.Array]]:
    if isinstance(module, nn.LayerNorm):
        yield "GPT-2: norm input (stream)", x
    match module.name:
        case "attention_in":
            yield "GPT-2: layer input (norm output)", x
            yield "GPT-2: qkv", y
            yield "GPT-2: attention probabilities", _probabilities(y)
        case "attention_out":
            yield "GPT-2: attention output", x
            yield "GPT-2: branch output", y
        case "mlp_in":
            yield "GPT-2: layer input (norm output)", x
            yield "GPT-2: MLP hidden, gelu input", y
        case "mlp_out":
            yield "GPT-2: gelu output", x
            yield "GPT-2: branch output", y


def _probabilities(qkv: jax.Array) -> jax.Array:
    """Returns the causal attention probabilities, [batch, heads, query, key]."""
    length = qkv.shape[-2]
    query, key, _ = (
        part.reshape(*part.shape[:-1], _GPT2.num_heads, -1)
        for part in jnp.split(qkv, 3, axis=-1)
    )
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) * query.shape[-1] ** -0.5
    past = jnp.tril(jnp.ones((length, length), bool))
    return jax.nn.softmax(jnp.where(past, scores, -jnp.inf), axis=-1)
