"""GPT-2 in plain Flax Linen, for language modelling.

Radford et al.: Language Models are Unsupervised Multitask Learners (2019). `wrap_block`
is injected, so that every method of saving memory runs on the very same model. With
`lora_rank` the attention projections have low-rank adapters: see `models/lora.py`.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from models.checks import check_transformer
from models.lora import LoRA
from models.losses import chunked_cross_entropy, tied_logits
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
        dtype: What is computed in: float32 or bfloat16. Weights, logits and losses are
            float32 in any case.
    """

    num_layers: int = 12
    width: int = 768
    num_heads: int = 12
    vocabulary: int = 50257
    context: int = 1024
    scan_layers: bool = False
    lora_rank: int = 0
    lora_alpha: float = 32.0
    dtype: DTypeLike = jnp.float32

    def __post_init__(self) -> None:
        check_transformer(self)

    @property
    def trained(self) -> tuple[str, ...]:
        """Paths of the variables that are trained, for `lora.split`."""
        return ("lora",) if self.lora_rank else ("params",)


class TransformerBlock(nn.Module):
    """`x + attention(norm(x))`, then `x + mlp(norm(x))`."""

    config: GPT2Config

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        # x: [batch, length, width]
        # Branches start small, so that the residual stream keeps its size: section 2.3.
        branch_scale = 0.02 / (2 * self.config.num_layers) ** 0.5
        y = self._attention(_layer_norm(self.config, "norm1")(x))
        x = x + self._projection(y, self.config.width, branch_scale, "attention_out")
        y = _layer_norm(self.config, "norm2")(x)
        y = self._dense(4 * self.config.width, 0.02, "mlp_in")(y)
        y = nn.gelu(y, approximate=True)  # the tanh of the published weights
        return x + self._dense(self.config.width, branch_scale, "mlp_out")(y)

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
        y = self._dense(features, scale, name)(x)
        if not self.config.lora_rank:
            return y
        rank, alpha = self.config.lora_rank, self.config.lora_alpha
        adapter = LoRA(rank, alpha, features, self.config.dtype, name=f"{name}_lora")
        return y + adapter(x)

    def _dense(self, features: int, scale: float, name: str) -> nn.Dense:
        init = nn.initializers.normal(scale)
        return nn.Dense(features, kernel_init=init, dtype=self.config.dtype, name=name)


def _layer_norm(config: GPT2Config, name: str) -> nn.LayerNorm:
    return nn.LayerNorm(epsilon=1e-5, dtype=config.dtype, name=name)


class GPT2(nn.Module):
    """A GPT-2; its blocks are of class `wrap_block(TransformerBlock)`."""

    config: GPT2Config
    wrap_block: WrapBlock = no_wrapping

    @nn.compact
    def __call__(self, tokens: jax.Array, *, return_hidden: bool = False) -> jax.Array:
        """Maps tokens, int [batch, length], to logits [batch, length, vocabulary].

        Args:
            tokens: At most `context` of them in a sequence.
            return_hidden: Whether to return what the logits are made of instead,
                [batch, length, width] in `dtype`: see `next_token_loss`.

        Raises:
            ValueError: If the sequences are longer than `context`.
        """
        config = self.config
        if tokens.shape[-1] > config.context:
            raise ValueError(
                f"`tokens` must have at most `context` ({config.context}) of them in a "
                f"sequence, but got {tokens.shape[-1]}."
            )
        embedding = nn.Embed(
            config.vocabulary,
            config.width,
            embedding_init=nn.initializers.normal(0.02),
            dtype=config.dtype,
            name="tokens",
        )
        positions = self.param(
            "positions", nn.initializers.normal(0.01), (config.context, config.width)
        )
        x = embedding(tokens) + positions[: tokens.shape[-1]].astype(config.dtype)
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
        x = _layer_norm(config, "norm")(x)
        return x if return_hidden else tied_logits(x, embedding.embedding)


def next_token_loss(
    model: GPT2,
    variables: Mapping[str, Any],
    tokens: jax.Array,
    weights: jax.Array | None = None,
    *,
    chunk: int = 128,
) -> jax.Array:
    """Returns the mean cross-entropy of each token, given those before it.

    Args:
        model: The model.
        variables: Its variables.
        tokens: Integers [batch, length], with a length of 2 at least.
        weights: [batch, length], not negative: how much a token counts; zero for
            padding. All one if `None`. The first token of a sequence never counts.
        chunk: The logits of so many positions exist at a time: see
            `losses.chunked_cross_entropy`.

    Returns:
        A float32 scalar.

    Example:
        >>> model = GPT2(GPT2Config(2, width=8, num_heads=2, vocabulary=10))
        >>> tokens = jnp.arange(8).reshape(1, 8)
        >>> variables = model.init(jax.random.key(0), tokens)
        >>> next_token_loss(model, variables, tokens).shape
        ()
    """
    # The last position has nothing to predict; the model sees it all the same, so that
    # lengths stay round numbers.
    hidden = model.apply(variables, tokens, return_hidden=True)
    if weights is None:
        weights = jnp.ones(tokens.shape, jnp.float32)
    return chunked_cross_entropy(
        hidden,
        variables["params"]["tokens"]["embedding"],
        jnp.roll(tokens, -1, axis=-1),
        jnp.roll(weights, -1, axis=-1).at[:, -1].set(0),
        chunk=chunk,
    )


gpt2_small = GPT2Config
gpt2_medium = functools.partial(GPT2Config, num_layers=24, width=1024, num_heads=16)
gpt2_large = functools.partial(GPT2Config, num_layers=36, width=1280, num_heads=20)
gpt2_xl = functools.partial(GPT2Config, num_layers=48, width=1600, num_heads=25)
gpt2_medium_lora = functools.partial(gpt2_medium, lora_rank=8)
