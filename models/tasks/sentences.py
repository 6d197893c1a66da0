"""Classification of sentences, or of pairs, and scores of them, by a RoBERTa."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import final

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from models import losses
from models.tasks.roberta_task import RobertaTask
from models.tasks.task import Batch, Variables


Score = Callable[[np.ndarray, np.ndarray], float]


@final
@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class SentenceTask(RobertaTask):
    """A label, or with one logit a score, for each sequence.

    Attributes:
        scores: Functions of labels and predictions, by name.
    """

    scores: Mapping[str, Score]

    def loss(
        self, model: nn.Module, variables: Variables, key: jax.Array, batch: Batch
    ) -> tuple[jax.Array, tuple[Variables, dict[str, jax.Array]]]:
        tokens, mask, labels = batch
        rngs = {"dropout": key}
        logits = model.apply(variables, tokens, mask, train=True, rngs=rngs)
        metrics = {}
        if self.config.num_labels > 1:
            metrics["accuracy"] = jnp.mean(jnp.argmax(logits, axis=-1) == labels)
        return losses.sequence_loss(logits, labels), ({}, metrics)

    def predict(
        self, model: nn.Module, variables: Variables, batch: Batch
    ) -> dict[str, jax.Array]:
        tokens, mask, labels = batch
        logits = model.apply(variables, tokens, mask, train=False)
        if self.config.num_labels == 1:
            score = logits[:, 0]
            loss, prediction = (score - labels) ** 2, score
        else:
            loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
            prediction = jnp.argmax(logits, axis=-1)
        return {"loss": loss, "label": labels, "prediction": prediction}

    def measure(self, predictions: Mapping[str, np.ndarray]) -> dict[str, float]:
        labels, predicted = predictions["label"], predictions["prediction"]
        metrics = {
            name: score(labels, predicted) for name, score in self.scores.items()
        }
        return {
            "loss": float(np.mean(predictions["loss"], dtype=np.float64)),
            **metrics,
        }
