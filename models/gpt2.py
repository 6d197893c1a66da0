"""GPT-2 in plain Flax Linen, for language modelling.

Radford et al.: Language Models are Unsupervised Multitask Learners (2019). `wrap_block`
is injected, so that every method of saving memory runs on the very same model.

With `lora_rank` the attention projections have low-rank adapters (Hu et al.: LoRA,
https://arxiv.org/abs/2106.09685), variables of a collection of their own:

    model.apply({"params": frozen, "lora": adapters}, tokens)

The gradient with respect to `adapters` alone trains them and freezes everything else.
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
        lora_rank: The rank of the adapters of the attention projections; 0: none.
        lora_alpha: Adapters are scaled by `lora_alpha / lora_rank`. Hu et al. train
            GPT-2 with 32.
    """

    num_layers: int = 12
    width: int = 768
    num_heads: int = 12
    vocabulary: int = 50257
    context: int = 1024
    scan_layers: bool = False
    lora_rank: int = 0
    lora_alpha: float = 32.0

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
        if self.lora_rank < 0:
            raise ValueError(
                f"`lora_rank` must not be negative, but got {self.lora_rank}."
            )

    @property
    def trained(self) -> str:
        """The collection of variables that is trained; all others are frozen."""
        return "lora" if self.lora_rank else "params"


def _dense(features: int, scale: float, name: str) -> nn.Dense:
    init = nn.initializers.normal(scale)
    return nn.Dense(features, kernel_init=init, name=name)


def _layer_norm(name: str) -> nn.LayerNorm:
    return nn.LayerNorm(epsilon=1e-5, name=name)


class LoRA(nn.Module):
    """`(x A) B`, which is added to the output of a frozen layer.

    `B` starts at zero, so that the model starts as it was.
    """

    rank: int
    alpha: float
    features: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        def init_a() -> jax.Array:
            init = nn.initializers.he_uniform()
            return init(self.make_rng("params"), (x.shape[-1], self.rank))

        a = self.variable("lora", "a", init_a)
        b = self.variable("lora", "b", jnp.zeros, (self.rank, self.features))
        return (x @ a.value) @ b.value * (self.alpha / self.rank)


class TransformerBlock(nn.Module):
    """`x + attention(norm(x))`, then `x + mlp(norm(x))`."""

    config: GPT2Config

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        # x: [batch, length, width]
        # Branches start small, so that the residual stream keeps its size: section 2.3.
        branch_scale = 0.02 / (2 * self.config.num_layers) ** 0.5
        y = self._attention(_layer_norm("norm1")(x))
        x = x + self._projection(y, self.config.width, branch_scale, "attention_out")
        y = _dense(4 * self.config.width, 0.02, "mlp_in")(_layer_norm("norm2")(x))
        return x + _dense(self.config.width, branch_scale, "mlp_out")(nn.gelu(y))

    def _attention(self, x: jax.Array) -> jax.Array:
        heads = (self.config.num_heads, self.config.width // self.config.num_heads)
        x = self._projection(x, 3 * self.config.width, 0.02, "attention_in")
        query, key, value = (
            part.reshape(*part.shape[:-1], *heads) for part in jnp.split(x, 3, axis=-1)
        )
        y = jax.nn.dot_product_attention(query, key, value, is_causal=True)
        return y.reshape(*y.shape[:-2], self.config.width)

    def _projection(
        self, x: jax.Array, features: int, scale: float, name: str
    ) -> jax.Array:
        y = _dense(features, scale, name)(x)
        if not self.config.lora_rank:
            return y
        rank, alpha = self.config.lora_rank, self.config.lora_alpha
        return y + LoRA(rank, alpha, features, name=f"{name}_lora")(x)


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
                variable_axes={"params": 0, "lora": 0},
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
gpt2_medium_lora = functools.partial(gpt2_medium, lora_rank=8)
