"""The gradients of transformers that benchmarks measure.

A GPT-2 learns to predict the next token, a RoBERTa to classify sequences, with dropout
and a padding mask; both are measured with their embeddings and heads.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, final

import jax
import jax.numpy as jnp
import optax

import dafjax
from benchmarks.methods import Method, make_method
from benchmarks.training import SCHEDULERS, place
from models import lora, losses
from models.gpt2 import GPT2, GPT2Config, next_token_loss
from models.roberta import Roberta, RobertaConfig


ArrayTree = Any


@dataclasses.dataclass(frozen=True)
class Shape:
    """A transformer and its text; options of command lines."""

    model: Literal["gpt2", "roberta"] = "gpt2"
    """The architecture."""
    layers: int = 12
    """Blocks."""
    width: int = 768
    """Channels of the residual stream."""
    heads: int = 12
    """Attention heads."""
    vocabulary: int = 5000
    """Tokens."""
    length: int = 256
    """Tokens of a sequence."""
    chunk: int = 0
    """Positions whose logits GPT-2's loss makes at a time; 0: all logits at once."""
    lora_rank: int = 0
    """Rank of the adapters, everything else frozen; 0: all weights are trained."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """What the model computes in; weights are float32."""
    bits: int = 2
    """Bits of the compressing methods."""
    microbatches: int = 1
    """Microbatches of `dafjax.accumulate`, for all methods."""

    def workload(self, method: str, *, batch: int, scan: bool) -> "Workload":
        """Returns the gradient of a method, for so many sequences.

        Args:
            method: A file of benchmarks/methods.
            batch: Sequences.
            scan: Whether blocks are a Python loop, or one scan.
        """
        make_config = GPT2Config if self.model == "gpt2" else RobertaConfig
        config = make_config(
            num_layers=self.layers,
            width=self.width,
            num_heads=self.heads,
            vocabulary=self.vocabulary,
            scan_layers=scan,
            lora_rank=self.lora_rank,
            dtype=jnp.dtype(self.dtype),
        )
        return Workload(
            make_method(method, bits=self.bits),
            config,
            batch,
            self.length,
            self.chunk,
            self.microbatches,
        )


@final
@dataclasses.dataclass(frozen=True)
class Workload:
    """One method's loss and gradient."""

    method: Method
    config: GPT2Config | RobertaConfig
    batch: int
    length: int
    chunk: int = 0
    microbatches: int = 1

    @property
    def loss(self) -> Callable[..., jax.Array]:
        """The mean loss, wrapped by the method.

        A function of the trained and the frozen variables, and of the batch.
        """
        in_axes: tuple[int | None, ...] = (None, None, 0)
        function: Callable[..., jax.Array] = self._next_token
        if isinstance(self.config, RobertaConfig):
            function, in_axes = self._classification, (None, None, 0, 0, None)
        elif self.chunk:
            function = self._chunked
        loss = self.method.wrap_loss(function)
        return dafjax.accumulate(loss, self.microbatches, in_axes=in_axes)

    def _next_token(
        self, trained: ArrayTree, frozen: ArrayTree, tokens: jax.Array
    ) -> jax.Array:
        model = GPT2(self.config, wrap_block=self.method.wrap_block)
        logits = model.apply(lora.merge(trained, frozen), tokens)
        return jnp.mean(
            optax.softmax_cross_entropy_with_integer_labels(
                logits[:, :-1], tokens[:, 1:]
            )
        )

    def _chunked(
        self, trained: ArrayTree, frozen: ArrayTree, tokens: jax.Array
    ) -> jax.Array:
        model = GPT2(self.config, wrap_block=self.method.wrap_block)
        variables = lora.merge(trained, frozen)
        return next_token_loss(model, variables, tokens, chunk=self.chunk)

    def _classification(
        self,
        trained: ArrayTree,
        frozen: ArrayTree,
        tokens: jax.Array,
        labels: jax.Array,
        key: jax.Array,
    ) -> jax.Array:
        model = Roberta(self.config, wrap_block=self.method.wrap_block)
        logits = model.apply(
            lora.merge(trained, frozen), tokens, train=True, rngs={"dropout": key}
        )
        return losses.sequence_loss(logits, labels)

    def init(self, key: jax.Array) -> tuple[ArrayTree, ArrayTree]:
        """Draws the trained and the frozen variables, equal for all methods."""
        tokens = jnp.zeros((1, 8), jnp.int32)
        if isinstance(self.config, RobertaConfig):
            variables = Roberta(self.config).init(key, tokens, train=False)
        else:
            variables = GPT2(self.config).init(key, tokens)
        return lora.split(variables, self.config.trained)

    def draw_batch(self) -> tuple[jax.Array, ...]:
        """Draws what the loss reads beside variables, equal for all methods."""
        shape = (self.batch, self.length)
        key = jax.random.key(1)
        if not isinstance(self.config, RobertaConfig):
            return (jax.random.randint(key, shape, 0, self.config.vocabulary),)
        tokens = jax.random.randint(key, shape, 3, self.config.vocabulary)
        # From half the length to all of it, as batches of real sequences have it.
        lengths = jnp.linspace(self.length // 2, self.length, self.batch).astype(int)
        is_there = jnp.arange(self.length) < lengths[:, None]
        tokens = jnp.where(is_there, tokens, self.config.padding)
        return tokens, jnp.arange(self.batch) % self.config.num_labels, key

    def draw(self) -> tuple[ArrayTree, ...]:
        """Draws the arguments of the loss, equal for all methods."""
        return *jax.jit(self.init)(jax.random.key(0)), *self.draw_batch()

    def compile(
        self,
        *,
        scheduler: str = "default",
        sharding: jax.sharding.Sharding | None = None,
    ) -> jax.stages.Compiled:
        """Compiles loss and gradient.

        Args:
            scheduler: A name of `SCHEDULERS`.
            sharding: On what they would run; None: on this machine.
        """
        arguments = place(jax.eval_shape(self.draw), sharding)
        lowered = self.method.jit(jax.value_and_grad(self.loss)).lower(*arguments)
        return lowered.compile(
            compiler_options={**self.method.compiler_options, **SCHEDULERS[scheduler]}
        )
