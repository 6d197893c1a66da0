"""Text from a language model: the likeliest tokens, or draws from its distribution."""

import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from models.gpt2 import GPT2
from models.losses import tied_logits


def generate(
    model: GPT2,
    variables: Mapping[str, Any],
    prompt: jax.Array,
    num_tokens: int,
    *,
    lengths: jax.Array | None = None,
    key: jax.Array | None = None,
    temperature: float = 1.0,
    top_p: float = 1.0,
    end: int | None = None,
) -> jax.Array:
    """Continues sequences of tokens.

    It is compiled once for a model and its shapes. Each token takes a pass over the
    whole sequence; nothing is cached from one to the next.

    Args:
        model: The model.
        variables: Its variables.
        prompt: Integers [batch, length], with a length of 1 at least.
        num_tokens: How many are added to the longest prompt. With it they are at most
            the model's `context`.
        lengths: Integers [batch], from 1 to `length`: the tokens of each prompt, where
            they differ; what stands behind them is left out, and shorter prompts have
            more tokens added. All of `prompt` if `None`.
        key: With a key, tokens are drawn; without one, each is the likeliest (greedy).
        temperature: Logits are divided by it before a draw; above 0. Below 1 draws keep
            closer to the likeliest token.
        top_p: Draws are from the smallest set of tokens that together have at least
            this probability, above 0 and at most 1: nucleus sampling, Holtzman et al.:
            The Curious Case of Neural Text Degeneration (2020), section 3.1.
        end: Once this token was added, a sequence goes on with nothing but it. It may
            stand in the prompt: GPT-2's begins its texts, too.

    Returns:
        int32 [batch, length + num_tokens]: each prompt and what was added to it.

    Raises:
        ValueError: An argument is out of its range.

    Example:
        >>> from models.gpt2 import GPT2Config
        >>> model = GPT2(GPT2Config(2, width=8, num_heads=2, vocabulary=10, context=16))
        >>> prompt = jnp.array([[1, 2, 3]])
        >>> variables = model.init(jax.random.key(0), prompt)
        >>> generate(model, variables, prompt, 5).shape
        (1, 8)
    """
    _check(model, prompt, num_tokens, temperature, top_p, end)
    if lengths is None:
        lengths = jnp.full(len(prompt), prompt.shape[1])
    _check_lengths(lengths, prompt)
    drawing = (key, temperature, top_p)
    return _generate(
        model, num_tokens, key is None, end, variables, prompt, lengths, *drawing
    )


def nucleus(logits: jax.Array, top_p: jax.Array | float) -> jax.Array:
    """Returns logits with those outside of the nucleus at minus infinity.

    Args:
        logits: float32 [..., vocabulary].
        top_p: The nucleus is the smallest set of tokens that together have at least
            this probability; the likeliest token is in it in any case.

    Example:
        >>> nucleus(jnp.log(jnp.array([0.5, 0.1, 0.4])), 0.8) > -jnp.inf
        Array([ True, False,  True], dtype=bool)
    """
    descending = jnp.flip(jnp.sort(logits, axis=-1), axis=-1)
    probabilities = jax.nn.softmax(descending, axis=-1)
    before = jnp.cumsum(probabilities, axis=-1) - probabilities
    # The first one has nothing before it.
    inside = (before < top_p).at[..., 0].set(True)
    least = jnp.min(jnp.where(inside, descending, jnp.inf), axis=-1, keepdims=True)
    return jnp.where(logits >= least, logits, -jnp.inf)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _generate(
    model: GPT2,
    num_tokens: int,
    greedy: bool,
    end: int | None,
    variables: Mapping[str, Any],
    prompt: jax.Array,
    lengths: jax.Array,
    key: jax.Array | None,
    temperature: jax.Array,
    top_p: jax.Array,
) -> jax.Array:
    batch, length = prompt.shape
    embedding = variables["params"]["tokens"]["embedding"]

    def add_one(
        place: jax.Array, carried: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        tokens, ended = carried
        # What stands behind `place` changes nothing: attention looks back only.
        hidden = model.apply(variables, tokens, return_hidden=True)
        logits = tied_logits(hidden[:, place - 1], embedding)
        if greedy:
            drawn = jnp.argmax(logits, axis=-1)
        else:
            drawn = jax.random.categorical(
                jax.random.fold_in(key, place), nucleus(logits / temperature, top_p)
            )
        is_given = place < lengths
        if end is not None:
            drawn = jnp.where(ended, end, drawn)
            ended = (drawn == end) & ~is_given
        drawn = jnp.where(is_given, tokens[:, place], drawn)
        return tokens.at[:, place].set(drawn.astype(jnp.int32)), ended

    tokens = jnp.zeros((batch, length + num_tokens), jnp.int32)
    tokens = tokens.at[:, :length].set(prompt.astype(jnp.int32))
    ended = jnp.zeros(batch, bool)
    first = jnp.min(lengths, initial=length)
    return jax.lax.fori_loop(first, length + num_tokens, add_one, (tokens, ended))[0]


def _check(
    model: GPT2,
    prompt: jax.Array,
    num_tokens: int,
    temperature: float,
    top_p: float,
    end: int | None,
) -> None:
    is_integer = jnp.issubdtype(prompt.dtype, jnp.integer)
    if prompt.ndim != 2 or prompt.shape[1] < 1 or not is_integer:
        raise ValueError(
            "`prompt` must be integers [batch, length], with a length of at least 1, "
            f"but got {prompt.dtype} {list(prompt.shape)}."
        )
    context = model.config.context
    if num_tokens < 0 or prompt.shape[1] + num_tokens > context:
        raise ValueError(
            f"`num_tokens` must be from 0 to {context - prompt.shape[1]}, so that with "
            f"the prompt of {prompt.shape[1]} there are at most `context` ({context}), "
            f"but got {num_tokens}."
        )
    if not 0 < temperature < math.inf:
        raise ValueError(
            f"`temperature` must be finite and above 0, but got {temperature}."
        )
    if not 0 < top_p <= 1:
        raise ValueError(f"`top_p` must be above 0 and at most 1, but got {top_p}.")
    if end is not None and not 0 <= end < model.config.vocabulary:
        raise ValueError(
            f"`end` must be a token, from 0 to {model.config.vocabulary - 1}, but got "
            f"{end}."
        )


def _check_lengths(lengths: jax.Array, prompt: jax.Array) -> None:
    batch, longest = prompt.shape
    if lengths.shape != (batch,) or not jnp.issubdtype(lengths.dtype, jnp.integer):
        raise ValueError(
            f"`lengths` must be integers [{batch}], one for each prompt, but got "
            f"{lengths.dtype} {list(lengths.shape)}."
        )
    if batch and not 1 <= int(jnp.min(lengths)) <= int(jnp.max(lengths)) <= longest:
        raise ValueError(
            f"`lengths` must be from 1 to {longest}, the length of `prompt`, but got "
            f"{lengths.tolist()}."
        )
