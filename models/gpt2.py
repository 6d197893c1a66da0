"""GPT-2 in plain Flax Linen, for language modelling.

Radford et al.: Language Models are Unsupervised Multitask Learners (2019). `wrap_block`
is injected, so that every method of saving memory runs on the very same model.
"""

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp

from models.wrapping import WrapBlock, no_wrapping


@dataclasses.dataclass(frozen=True)
class GPT2Config:
    """The shape of a GPT-2.

    Attributes:
        num_layers: Blocks.
        width: Channels of the residual stream.
        num_heads: Attention heads; `width` is a multiple of it.
        vocabulary: Tokens.
        context: The longest sequence.
        scan_layers: Whether the blocks are one `nn.scan` instead of a Python loop.
    """

    num_layers: int = 12
    width: int = 768
    num_heads: int = 12
    vocabulary: int = 50257
    context: int = 1024
    scan_layers: bool = False

    def __post_init__(self) -> None:
        for name in ("num_layers", "width", "num_heads", "vocabulary", "context"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"`{name}` must be at least 1, but got {getattr(self, name)}."
                )
        if self.width % self.num_heads != 0:
            raise ValueError(
                f"`width` must be a multiple of `num_heads`, but got {self.width} and "
                f"{self.num_heads}."
            )


def _dense(features: int, scale: float, name: str) -> nn.Dense:
    init = nn.initializers.normal(scale)
    return nn.Dense(features, kernel_init=init, name=name)


def _layer_norm(name: str) -> nn.LayerNorm:
    return nn.LayerNorm(epsilon=1e-5, name=name)


class TransformerBlock(nn.Module):
    """`x + attention(norm(x))`, then `x + mlp(norm(x))`."""

    config: GPT2Config

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        # x: [batch, length, width]
        # Branches start small, so that the residual stream keeps its size: section 2.3.
        branch_scale = 0.02 / (2 * self.config.num_layers) ** 0.5
        y = self._attention(_layer_norm("norm1")(x))
        x = x + _dense(self.config.width, branch_scale, "attention_out")(y)
        y = _dense(4 * self.config.width, 0.02, "mlp_in")(_layer_norm("norm2")(x))
        return x + _dense(self.config.width, branch_scale, "mlp_out")(nn.gelu(y))

    def _attention(self, x: jax.Array) -> jax.Array:
        heads = (self.config.num_heads, self.config.width // self.config.num_heads)
        x = _dense(3 * self.config.width, 0.02, "attention_in")(x)
        query, key, value = (
            part.reshape(*part.shape[:-1], *heads) for part in jnp.split(x, 3, axis=-1)
        )
        y = jax.nn.dot_product_attention(query, key, value, is_causal=True)
        return y.reshape(*y.shape[:-2], self.config.width)


class GPT2(nn.Module):
    """A GPT-2; its blocks are of class `wrap_block(TransformerBlock)`."""

    config: GPT2Config
    wrap_block: WrapBlock = no_wrapping

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Maps tokens, int [batch, length], to logits [batch, length, vocabulary]."""
        config = self.config
        embedding = nn.Embed(
            config.vocabulary,
            config.width,
            embedding_init=nn.initializers.normal(0.02),
            name="tokens",
        )
        positions = self.param(
            "positions", nn.initializers.normal(0.01), (config.context, config.width)
        )
        x = embedding(tokens) + positions[: tokens.shape[-1]]
        block_class = self.wrap_block(TransformerBlock)
        if config.scan_layers:
            scan = nn.scan(
                lambda block, x, _: (block(x), None),
                variable_axes={"params": 0},
                split_rngs={"params": True},
                length=config.num_layers,
            )
            x, _ = scan(block_class(config, name="blocks"), x, None)
        else:
            for index in range(config.num_layers):
                x = block_class(config, name=f"block{index + 1}")(x)
        return embedding.attend(_layer_norm("norm")(x))


gpt2_small = GPT2Config
gpt2_medium = functools.partial(GPT2Config, num_layers=24, width=1024, num_heads=16)
