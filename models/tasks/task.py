"""What a training run learns: examples, a model, a loss, and metrics of quality."""

import abc
import dataclasses
from collections.abc import Mapping
from typing import Any, final

import flax.linen as nn
import jax
import numpy as np
import tokenizers

from models.data import Split
from models.weights.families import Config
from models.wrapping import WrapBlock


Variables = Mapping[str, Any]
Batch = tuple[Any, ...]  # of arrays, their first axis that of examples


@final
@dataclasses.dataclass(frozen=True)
class Metric:
    """A measure of quality on the test split.

    Attributes:
        name: Such as `accuracy`; records have it as `test_accuracy`.
        is_share: Whether it is shown in percent.
        higher_is_better: Which way it improves.
    """

    name: str
    is_share: bool = False
    higher_is_better: bool = True

    @property
    def key(self) -> str:
        """Its name in records."""
        return f"test_{self.name}"

    @property
    def title(self) -> str:
        """Its name in tables and plots."""
        return f"Test {self.name}"

    @property
    def axis(self) -> str:
        """The label of its axis in plots."""
        return f"{self.title} (%)" if self.is_share else self.title

    def show(self, value: float) -> str:
        """Returns a value as text."""
        return f"{value:.2%}" if self.is_share else f"{value:.4f}"

    def improves(self, value: float, best: float | None) -> bool:
        """Whether a value is better than the best before it; `None` if it is first."""
        if best is None:
            return True
        return value > best if self.higher_is_better else value < best


ACCURACY = Metric("accuracy", is_share=True)
LOSS = Metric("loss", higher_is_better=False)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Task(abc.ABC):
    """What is learned, by which model, from which examples.

    Attributes:
        name: What the examples are of.
        config: The shape of the model.
        train: Examples to learn from.
        test: Examples to measure on.
        metric: What tells checkpoints apart.
        tokenizer: What made the tokens; `None` of images.
    """

    name: str
    config: Config
    train: Split
    test: Split
    metric: Metric
    tokenizer: tokenizers.Tokenizer | None = None

    @property
    def trained(self) -> tuple[str, ...]:
        """Paths of the variables that are differentiated, for `lora.split`."""
        return self.config.trained

    @property
    def mutable(self) -> tuple[str, ...]:
        """Collections of variables that the forward pass changes."""
        return ()

    @abc.abstractmethod
    def make_model(self, wrap_block: WrapBlock) -> nn.Module:
        """Returns the model, its blocks of a wrapped class."""

    @abc.abstractmethod
    def init(self, model: nn.Module, key: jax.Array) -> Variables:
        """Draws variables; they do not depend on how blocks are wrapped."""

    @abc.abstractmethod
    def loss(
        self, model: nn.Module, variables: Variables, key: jax.Array, batch: Batch
    ) -> tuple[jax.Array, tuple[Variables, dict[str, jax.Array]]]:
        """Returns the mean loss of a batch in training.

        Args:
            model: What `make_model` returns.
            variables: Its variables.
            key: What is random in this step.
            batch: What `train.take` returns.

        Returns:
            The loss, a float32 scalar; the collections that changed; and metrics of
            the batch, scalars.
        """

    @abc.abstractmethod
    def predict(
        self, model: nn.Module, variables: Variables, batch: Batch
    ) -> dict[str, jax.Array]:
        """Returns what `measure` needs, an entry for each example of a batch."""

    @abc.abstractmethod
    def measure(self, predictions: Mapping[str, np.ndarray]) -> dict[str, float]:
        """Returns metrics of the test split, `loss` and that of `metric` among them.

        Args:
            predictions: What `predict` returned, for all examples of the split.
        """

    def samples(
        self, model: nn.Module, variables: Variables, seed: int
    ) -> tuple[dict[str, float], str]:
        """Returns metrics and text for a person to look at, once a run has ended.

        Most tasks have none: `{}` and `""`.
        """
        del model, variables, seed
        return {}, ""
