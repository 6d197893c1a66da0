"""Two networks that train in seconds: a ResNet-18 on digits, a GPT-2 on bytes of text.

Both are one loss, `loss(params, state, *batch) -> (loss, state)`: the state is that of
batch norms, and empty for a GPT-2.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, Literal, final

import jax
import jax.numpy as jnp
import numpy as np
import optax

from models import step
from models.data.digits import load_digits
from models.data.text.corpus import documents
from models.gpt2 import GPT2, GPT2Config
from models.tasks.images import classify_images
from models.wrapping import no_wrapping


NetworkName = Literal["resnet18", "gpt2"]
ArrayTree = Any
Batch = tuple[np.ndarray, ...]


@dataclasses.dataclass(frozen=True)
class Sizes:
    """How large the networks are."""

    resnet_width: int = 16
    """Filters of the ResNet-18's first stage."""
    resnet_batch: int = 32
    """Images in a step."""
    gpt2_layers: int = 4
    """Blocks of the GPT-2."""
    gpt2_width: int = 128
    """Channels of its residual stream."""
    gpt2_heads: int = 4
    """Attention heads."""
    gpt2_length: int = 128
    """Bytes of a sequence."""
    gpt2_batch: int = 4
    """Sequences in a step."""


@final
@dataclasses.dataclass(frozen=True)
class Network:
    """A network, its data and how it is trained.

    Attributes:
        loss: `loss(params, state, *batch) -> (loss, state)`.
        init: Draws the parameters and the state from a seed.
        batch: Draws a batch.
        optimizer: Turns gradients into updates.
    """

    loss: Callable[..., tuple[jax.Array, ArrayTree]]
    init: Callable[[int], tuple[ArrayTree, ArrayTree]]
    batch: Callable[[np.random.Generator], Batch]
    optimizer: optax.GradientTransformation

    @functools.cached_property
    def gradient(self) -> Callable[..., tuple[tuple[jax.Array, ArrayTree], ArrayTree]]:
        """`gradient(params, state, *batch) -> ((loss, state), gradient)`, exact."""
        return jax.jit(jax.value_and_grad(self.loss, has_aux=True))

    @functools.cached_property
    def update(self) -> Callable[..., tuple[ArrayTree, ArrayTree]]:
        """`update(params, momenta, gradient) -> (params, momenta)`."""

        @jax.jit
        def update(params: ArrayTree, momenta: ArrayTree, gradient: ArrayTree) -> Any:
            updates, momenta = self.optimizer.update(gradient, momenta, params)
            return optax.apply_updates(params, updates), momenta

        return update

    def batches(self, seed: int, count: int) -> list[Batch]:
        """Draws batches."""
        rng = np.random.default_rng([seed, 1])
        return [self.batch(rng) for _ in range(count)]

    def train(
        self, seed: int, steps: int, gradient: Callable[..., Any] | None = None
    ) -> "Iterator[Point]":
        """Trains, and yields each step.

        Args:
            seed: Chooses weights and batches.
            steps: How many.
            gradient: Takes the place of the exact one.
        """
        params, state = self.init(seed)
        momenta = jax.jit(self.optimizer.init)(params)
        for batch in self.batches(seed, steps):
            (loss, after), found = (gradient or self.gradient)(params, state, *batch)
            yield Point(params, state, batch, float(loss), found)
            params, momenta = self.update(params, momenta, found)
            state = after


@final
@dataclasses.dataclass(frozen=True)
class Point:
    """A step of training, before its update.

    Attributes:
        params: Parameters.
        state: The state of batch norms.
        batch: What is learned from.
        loss: The loss.
        gradient: Its gradient.
    """

    params: ArrayTree
    state: ArrayTree
    batch: Batch
    loss: float
    gradient: ArrayTree

    @property
    def arguments(self) -> tuple[Any, ...]:
        """The arguments of the loss."""
        return self.params, self.state, *self.batch


def make_network(name: NetworkName, sizes: Sizes) -> Network:
    """Returns the network `name`."""
    return _MAKERS[name](sizes)


def _make_resnet18(sizes: Sizes) -> Network:
    digits = load_digits(seed=0)
    task = classify_images("resnet18", digits, width=sizes.resnet_width)
    model = task.make_model(no_wrapping)
    optimizer = optax.sgd(0.05, momentum=0.9)
    whole = step.make_loss(task, model)
    draw = jax.jit(functools.partial(task.init, model))

    def loss(params: ArrayTree, state: ArrayTree, *batch: Any) -> Any:
        # Nothing in it is random.
        value, (after, _) = whole(params, state, jax.random.key(0), *batch)
        return value, after

    def init(seed: int) -> tuple[ArrayTree, ArrayTree]:
        made, _ = step.begin(task, draw(jax.random.key(seed)), optimizer)
        return made.trained, made.mutable

    def batch(rng: np.random.Generator) -> Batch:
        return digits.train.take(
            rng.integers(len(digits.train), size=sizes.resnet_batch)
        )

    return Network(loss, init, batch, optimizer)


def _make_gpt2(sizes: Sizes) -> Network:
    length = sizes.gpt2_length
    model = GPT2(
        GPT2Config(
            num_layers=sizes.gpt2_layers,
            width=sizes.gpt2_width,
            num_heads=sizes.gpt2_heads,
            vocabulary=256,
            context=length,
        )
    )
    text = bytes_of_text()

    def loss(params: ArrayTree, state: ArrayTree, tokens: jax.Array) -> Any:
        logits = model.apply(params, tokens)
        losses = optax.softmax_cross_entropy_with_integer_labels(
            logits[:, :-1], tokens[:, 1:]
        )
        return jnp.mean(losses), state

    def init(seed: int) -> tuple[ArrayTree, ArrayTree]:
        tokens = jnp.zeros((1, 8), jnp.int32)
        return jax.jit(model.init)(jax.random.key(seed), tokens), {}

    def batch(rng: np.random.Generator) -> Batch:
        starts = rng.integers(len(text) - length, size=sizes.gpt2_batch)
        rows = [list(text[start : start + length]) for start in starts]
        return (np.array(rows, np.int32),)

    # Ten times as fast, all positions would be the same for the first hundred steps.
    return Network(loss, init, batch, optax.adam(3e-4))


def bytes_of_text() -> bytes:
    """Returns half a million bytes of Flax's sources, the same for a version of it."""
    found = documents("flax", "sources", most_characters=500_000)
    return "".join(document.text for document in found).encode()


_MAKERS: dict[NetworkName, Callable[[Sizes], Network]] = {
    "resnet18": _make_resnet18,
    "gpt2": _make_gpt2,
}
