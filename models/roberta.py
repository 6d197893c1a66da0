"""RoBERTa in plain Flax Linen, for classification of and regression on sequences.

Liu et al.: RoBERTa, https://arxiv.org/abs/1907.11692. The blocks are those of BERT
(Devlin et al., https://arxiv.org/abs/1810.04805): normalization after each sum, and a
GELU by the error function. `wrap_block` is injected, so that every method of saving
memory runs on the very same model. With `lora_rank` the projections to queries and to
values have low-rank adapters: see `models/lora.py`.
"""

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from models.checks import check_sizes, check_transformer
from models.lora import LoRA
from models.wrapping import WrapBlock, no_wrapping


@dataclasses.dataclass(frozen=True)
class RobertaConfig:
    """The shape of a RoBERTa.

    Attributes:
        num_layers: Blocks.
        width: Channels of the residual stream.
        num_heads: Attention heads; `width` is a multiple of it.
        num_labels: Logits for each sequence; 1 is for regression.
        vocabulary: Tokens.
        context: The longest sequence. 512 of 514 learned positions are used: positions
            are counted from `padding + 1` on.
        padding: The token that fills short sequences up.
        dropout: Rate, in training, after the embeddings, of attention probabilities, at
            the end of each branch and in the head.
        scan_layers: Whether the blocks are one `nn.scan` instead of a Python loop.
        lora_rank: The rank of the adapters of queries and values; 0: none.
        lora_alpha: Adapters are scaled by `lora_alpha / lora_rank`. Hu et al. train the
            base model with 8 and the large one with 16 (tables 9 and 10).
        dtype: What is computed in: float32 or bfloat16. Weights and logits are float32
            in any case.
    """

    num_layers: int = 12
    width: int = 768
    num_heads: int = 12
    num_labels: int = 2
    vocabulary: int = 50265
    context: int = 512
    padding: int = 1
    dropout: float = 0.1
    scan_layers: bool = False
    lora_rank: int = 0
    lora_alpha: float = 8.0
    dtype: DTypeLike = jnp.float32

    def __post_init__(self) -> None:
        check_transformer(self)
        check_sizes(self, "num_labels")
        if not 0 <= self.dropout < 1:
            raise ValueError(
                f"`dropout` must be from 0 to below 1, but got {self.dropout}."
            )

    @property
    def num_positions(self) -> int:
        """Learned positions: those up to `padding` are never attended to."""
        return self.context + self.padding + 1

    @property
    def trained(self) -> tuple[str, ...]:
        """Paths of the variables that are trained, for `lora.split`.

        The head of a new task is trained in full beside the adapters, as Hu et al. do.
        """
        return ("lora", "params/head") if self.lora_rank else ("params",)


def _dense(config: RobertaConfig, features: int, name: str) -> nn.Dense:
    init = nn.initializers.normal(0.02)
    return nn.Dense(features, kernel_init=init, dtype=config.dtype, name=name)


def _layer_norm(config: RobertaConfig, name: str) -> nn.LayerNorm:
    return nn.LayerNorm(epsilon=1e-5, dtype=config.dtype, name=name)


def _dropout(config: RobertaConfig, train: bool) -> nn.Dropout:
    return nn.Dropout(config.dropout, deterministic=not train)


class RobertaBlock(nn.Module):
    """`norm(x + attention(x))`, then `norm(x + mlp(x))`.

    `train` is a field, not an argument of the call, so that a wrapper sees a function
    of arrays only.
    """

    config: RobertaConfig
    train: bool

    @nn.compact
    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        # x: [batch, length, width]; mask: bool [batch, length]
        config = self.config
        y = _dense(config, config.width, "attention_out")(self._attention(x, mask))
        x = _layer_norm(config, "norm1")(x + _dropout(config, self.train)(y))
        y = nn.gelu(_dense(config, 4 * config.width, "mlp_in")(x), approximate=False)
        y = _dense(config, config.width, "mlp_out")(y)
        return _layer_norm(config, "norm2")(x + _dropout(config, self.train)(y))

    def _attention(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        config = self.config
        heads = (config.num_heads, config.width // config.num_heads)
        query, key, value = (
            self._projection(x, name).reshape(*x.shape[:-1], *heads)
            for name in ("query", "key", "value")
        )
        mask = mask[:, None, None, :]  # [batch, heads, query, key]
        if self.train and config.dropout > 0:
            # `jax.nn.dot_product_attention` drops no probabilities.
            y = nn.dot_product_attention(
                query,
                key,
                value,
                mask=mask,
                dropout_rate=config.dropout,
                dropout_rng=self.make_rng("dropout"),
                broadcast_dropout=False,
                dtype=config.dtype,
                force_fp32_for_softmax=True,
            )
        else:
            y = jax.nn.dot_product_attention(query, key, value, mask=mask)
        return y.reshape(x.shape)

    def _projection(self, x: jax.Array, name: str) -> jax.Array:
        config = self.config
        y = _dense(config, config.width, name)(x)
        if not config.lora_rank or name == "key":
            return y
        rank, alpha = config.lora_rank, config.lora_alpha
        adapter = LoRA(rank, alpha, config.width, config.dtype, name=f"{name}_lora")
        return y + adapter(x)


class ClassificationHead(nn.Module):
    """A hidden layer on the first token of each sequence, then the logits."""

    config: RobertaConfig
    train: bool

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        # x: [batch, length, width]
        config = self.config
        x = _dropout(config, self.train)(x[:, 0])
        x = nn.tanh(_dense(config, config.width, "hidden")(x))
        x = _dropout(config, self.train)(x)
        return _dense(config, config.num_labels, "out")(x).astype(jnp.float32)


class Roberta(nn.Module):
    """A RoBERTa; its blocks are of class `wrap_block(RobertaBlock)`.

    Example:
        >>> model = Roberta(RobertaConfig(2, width=8, num_heads=2, vocabulary=10))
        >>> tokens = jnp.array([[0, 5, 6, 2], [0, 7, 2, 1]])
        >>> variables = model.init(jax.random.key(0), tokens, train=False)
        >>> model.apply(variables, tokens, train=False).shape
        (2, 2)
        >>> rngs = {"dropout": jax.random.key(1)}
        >>> model.apply(variables, tokens, train=True, rngs=rngs).shape
        (2, 2)
    """

    config: RobertaConfig
    wrap_block: WrapBlock = no_wrapping

    @nn.compact
    def __call__(
        self,
        tokens: jax.Array,
        mask: jax.Array | None = None,
        *,
        train: bool,
        return_hidden: bool = False,
    ) -> jax.Array:
        """Maps sequences to logits, float32 [batch, num_labels].

        Args:
            tokens: Integers [batch, length], the first of each sequence `<s>`.
            mask: Booleans [batch, length], false where a sequence is filled up; where
                `tokens` is not `padding` if `None`.
            train: Whether there is dropout, with the key of `rngs={"dropout": key}`.
            return_hidden: Whether to return what the head reads instead, [batch,
                length, width] in `dtype`.

        Raises:
            ValueError: If the sequences are longer than `context`, or `mask` has
                another shape than `tokens`.
        """
        config = self.config
        if tokens.shape[-1] > config.context:
            raise ValueError(
                f"`tokens` must have at most `context` ({config.context}) of them in a "
                f"sequence, but got {tokens.shape[-1]}."
            )
        mask = tokens != config.padding if mask is None else mask.astype(bool)
        if mask.shape != tokens.shape:
            raise ValueError(
                "`mask` must have the shape of `tokens`, but got "
                f"{mask.shape} and {tokens.shape}."
            )
        x = self._embed(tokens, mask, train)
        block_class = self.wrap_block(RobertaBlock)
        if config.scan_layers:
            scan = nn.scan(
                lambda block, x, mask: (block(x, mask), None),
                variable_axes={"params": 0, "lora": 0},
                split_rngs={"params": True, "dropout": True},
                in_axes=nn.broadcast,
                length=config.num_layers,
            )
            x, _ = scan(block_class(config, train, name="blocks"), x, mask)
        else:
            for index in range(config.num_layers):
                x = block_class(config, train, name=f"block{index + 1}")(x, mask)
        if return_hidden:
            return x
        return ClassificationHead(config, train, name="head")(x)

    def _embed(self, tokens: jax.Array, mask: jax.Array, train: bool) -> jax.Array:
        config = self.config

        def embedding(num_rows: int, name: str) -> nn.Embed:
            return nn.Embed(
                num_rows,
                config.width,
                embedding_init=nn.initializers.normal(0.02),
                dtype=config.dtype,
                name=name,
            )

        count = mask.astype(jnp.int32)
        positions = jnp.cumsum(count, axis=-1) * count + config.padding
        x = embedding(config.vocabulary, "tokens")(tokens)
        x = x + embedding(config.num_positions, "positions")(positions)
        # BERT's second kind of embedding, of which RoBERTa has one row for all tokens.
        x = x + embedding(1, "token_types")(jnp.zeros_like(tokens))
        return _dropout(config, train)(_layer_norm(config, "norm")(x))


roberta_base = RobertaConfig
roberta_large = functools.partial(
    RobertaConfig, num_layers=24, width=1024, num_heads=16, lora_alpha=16.0
)
roberta_base_lora = functools.partial(roberta_base, lora_rank=8)
roberta_large_lora = functools.partial(roberta_large, lora_rank=8)
