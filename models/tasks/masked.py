"""Masked words: what a RoBERTa is trained on before it is tuned."""

import dataclasses
from collections.abc import Mapping
from typing import final

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from models.losses import chunked_cross_entropy
from models.tasks.roberta_task import RobertaTask
from models.tasks.task import Batch, Variables
from models.tasks.token_losses import losses_of_examples, mean_loss


_SHARE = 0.15


@final
@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class MaskedLanguageModelling(RobertaTask):
    """Which token stands where one is hidden.

    Devlin et al.: BERT, https://arxiv.org/abs/1810.04805, section 3.1, and drawn anew
    in each step as RoBERTa does (Liu et al., section 4.1): 15 % of the tokens count. Of
    these 80 % are hidden, 10 % are other tokens, and 10 % stay. Logits are products
    with the embeddings; the head of sequences is not trained.

    Attributes:
        hidden: The token that hides another.
    """

    hidden: int

    @property
    def trained(self) -> tuple[str, ...]:
        return tuple(f"params/{name}" for name in self._names())

    def _names(self) -> tuple[str, ...]:
        blocks = (
            ("blocks",)
            if self.config.scan_layers
            else tuple(f"block{n + 1}" for n in range(self.config.num_layers))
        )
        return ("tokens", "positions", "token_types", "norm", *blocks)

    def loss(
        self, model: nn.Module, variables: Variables, key: jax.Array, batch: Batch
    ) -> tuple[jax.Array, tuple[Variables, dict[str, jax.Array]]]:
        key, dropout_key = jax.random.split(key)
        tokens, weights = self._mask(key, batch[0])
        hidden = model.apply(
            variables,
            tokens,
            train=True,
            return_hidden=True,
            rngs={"dropout": dropout_key},
        )
        embedding = variables["params"]["tokens"]["embedding"]
        return chunked_cross_entropy(hidden, embedding, batch[0], weights), ({}, {})

    def predict(
        self, model: nn.Module, variables: Variables, batch: Batch
    ) -> dict[str, jax.Array]:
        # The same tokens are hidden whenever it is measured.
        tokens, weights = self._mask(jax.random.key(0), batch[0])
        hidden = model.apply(variables, tokens, train=False, return_hidden=True)
        embedding = variables["params"]["tokens"]["embedding"]
        return losses_of_examples(hidden, embedding, batch[0], weights)

    def measure(self, predictions: Mapping[str, np.ndarray]) -> dict[str, float]:
        return mean_loss(predictions)

    def _mask(self, key: jax.Array, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Hides some tokens; returns what is seen, and the weight of each."""
        place_key, way_key, token_key = jax.random.split(key, 3)
        counts = jax.random.bernoulli(place_key, _SHARE, tokens.shape)
        counts &= tokens != self.config.padding
        way = jax.random.uniform(way_key, tokens.shape)
        drawn = jax.random.randint(token_key, tokens.shape, 0, self.config.vocabulary)
        seen = jnp.where(way < 0.8, self.hidden, jnp.where(way < 0.9, drawn, tokens))
        return jnp.where(counts, seen, tokens), counts.astype(jnp.float32)
