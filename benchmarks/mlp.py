"""A training step of residual blocks of two products each."""

import dataclasses
from collections.abc import Callable
from typing import Any, final

import flax.linen as nn
import jax
import jax.numpy as jnp

from benchmarks.methods import Method
from benchmarks.training import place


ArrayTree = Any

_LEARNING_RATE = 0.01


class Block(nn.Module):
    """Adds `W2 gelu(W1 x)` to `x`."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        width = x.shape[-1]
        hidden = nn.gelu(nn.Dense(4 * width, use_bias=False)(x))
        return x + nn.Dense(width, use_bias=False)(hidden)


class MLP(nn.Module):
    """Blocks of a class, one after the other."""

    block: type[nn.Module]
    layers: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for number in range(self.layers):
            x = self.block(name=f"block{number}")(x)
        return x


@final
@dataclasses.dataclass(frozen=True)
class Workload:
    """One method's training step.

    Attributes:
        method: What is wrapped, and how it is compiled.
        layers: Blocks.
        width: Channels between blocks; within one there are four times as many.
        tokens: Rows of the input.
    """

    method: Method
    layers: int = 12
    width: int = 1024
    tokens: int = 16384

    @property
    def model(self) -> MLP:
        """The model, its blocks wrapped by the method."""
        return MLP(self.method.wrap_block(Block), self.layers)

    @property
    def loss(self) -> Callable[..., jax.Array]:
        """The mean square of the output, wrapped by the method."""
        return self.method.wrap_loss(
            lambda params, x: jnp.mean(self.model.apply(params, x) ** 2)
        )

    def make_step(self) -> Callable[..., tuple[ArrayTree, jax.Array]]:
        """Returns a step of gradient descent; no trace of another is taken for it."""
        value_and_grad = jax.value_and_grad(self.loss)

        def step(params: ArrayTree, x: jax.Array) -> tuple[ArrayTree, jax.Array]:
            value, gradient = value_and_grad(params, x)
            params = jax.tree.map(lambda w, g: w - _LEARNING_RATE * g, params, gradient)
            return params, value

        return step

    def compile(
        self, *, sharding: jax.sharding.Sharding | None = None
    ) -> jax.stages.Compiled:
        """Compiles the step, its weights donated.

        Args:
            sharding: On what it would run; None: on this machine.
        """
        x = jax.ShapeDtypeStruct((self.tokens, self.width), jnp.float32)
        params = jax.eval_shape(self.model.init, jax.random.key(0), x)
        lowered = self.method.jit(self.make_step(), donate_argnums=0).lower(
            *place((params, x), sharding)
        )
        return lowered.compile(
            compiler_options=dict(self.method.compiler_options) or None
        )
