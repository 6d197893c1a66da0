"""Continuation of text by a GPT-2: running text, or text that facts ask for."""

import dataclasses
from collections.abc import Mapping
from typing import Any, final

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from models.data.text.table_to_text import Description, bleu
from models.generate import generate
from models.gpt2 import GPT2, GPT2Config
from models.losses import chunked_cross_entropy
from models.tasks.task import Batch, Task, Variables
from models.tasks.token_losses import losses_of_examples, mean_loss
from models.wrapping import WrapBlock


_NUM_SAMPLES = 3
_BATCH = 16
_TOP_P = 0.9


@final
@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class LanguageModelling(Task):
    """Which token comes next.

    Attributes:
        end: The token that ends a text.
        prompts: Tokens of texts to be continued, when a run has ended.
        references: What people wrote in answer to the prompts; none of running text.
        num_tokens: The most tokens of a continuation; fewer where the model's context
            has no room for them after the longest prompt.
    """

    config: GPT2Config
    end: int
    prompts: tuple[tuple[int, ...], ...]
    references: tuple[Description, ...] = ()
    num_tokens: int = 40

    def make_model(self, wrap_block: WrapBlock) -> nn.Module:
        return GPT2(self.config, wrap_block=wrap_block)

    def init(self, model: nn.Module, key: jax.Array) -> Variables:
        return model.init(key, jnp.zeros((1, 8), jnp.int32))

    def loss(
        self, model: nn.Module, variables: Variables, key: jax.Array, batch: Batch
    ) -> tuple[jax.Array, tuple[Variables, dict[str, jax.Array]]]:
        del key
        tokens, weights = batch
        hidden = model.apply(variables, tokens[:, :-1], return_hidden=True)
        embedding = variables["params"]["tokens"]["embedding"]
        loss = chunked_cross_entropy(hidden, embedding, tokens[:, 1:], weights)
        return loss, ({}, {})

    def predict(
        self, model: nn.Module, variables: Variables, batch: Batch
    ) -> dict[str, jax.Array]:
        tokens, weights = batch
        hidden = model.apply(variables, tokens[:, :-1], return_hidden=True)
        embedding = variables["params"]["tokens"]["embedding"]
        return losses_of_examples(hidden, embedding, tokens[:, 1:], weights)

    def measure(self, predictions: Mapping[str, np.ndarray]) -> dict[str, float]:
        return mean_loss(predictions)

    def samples(
        self, model: nn.Module, variables: Variables, seed: int
    ) -> tuple[dict[str, float], str]:
        """Continues the prompts; BLEU if there are references."""
        ways: dict[str, dict[str, Any]] = {"greedy": {}}
        if not self.references:
            ways[f"top-p {_TOP_P}"] = {"key": jax.random.key(seed), "top_p": _TOP_P}
        texts = {
            way: self._continuations(model, variables, options)
            for way, options in ways.items()
        }
        metrics = {}
        if self.references:
            metrics["test_bleu"] = bleu(texts["greedy"], self.references)
        shown = [
            f"{self.tokenizer.decode(list(prompt))}\n"
            + "".join(f"  [{way}] {texts[way][n].strip()}\n" for way in ways)
            for n, prompt in enumerate(self.prompts[:_NUM_SAMPLES])
        ]
        return metrics, "\n".join(shown)

    def _continuations(
        self, model: Any, variables: Variables, options: Mapping[str, Any]
    ) -> list[str]:
        """Returns what follows each of the prompts."""
        texts: list[str] = []
        longest = max(map(len, self.prompts))
        num_tokens = min(self.num_tokens, self.config.context - longest)
        for start in range(0, len(self.prompts), _BATCH):
            prompts = self.prompts[start : start + _BATCH]
            # Batches are of one shape, which is compiled once.
            rows = [*prompts, *[prompts[-1]] * (_BATCH - len(prompts))]
            padded = np.array([[*row, *[0] * (longest - len(row))] for row in rows])
            lengths = np.array([len(row) for row in rows])
            tokens = generate(
                model,
                variables,
                jnp.asarray(padded, jnp.int32),
                num_tokens,
                lengths=jnp.asarray(lengths),
                end=self.end,
                **options,
            )
            for row, prompt in zip(np.asarray(tokens), prompts, strict=False):
                added = row[len(prompt) :][:num_tokens].tolist()
                until = added.index(self.end) if self.end in added else len(added)
                texts.append(self.tokenizer.decode(added[:until]))
        return texts
