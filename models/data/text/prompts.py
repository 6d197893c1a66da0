"""Facts and the texts that people wrote about them, in tokens of a GPT-2."""

from collections.abc import Sequence

import numpy as np
import tokenizers

from models.data.text.splits import WindowSplit
from models.data.text.table_to_text import Description


END = "<|endoftext|>"

_SEPARATOR = " ||"


def encode_facts(tokenizer: tokenizers.Tokenizer, facts: str) -> tuple[int, ...]:
    """Returns the prompt: what a text is to say, and a separator."""
    return tuple(tokenizer.encode(facts + _SEPARATOR, add_special_tokens=False).ids)


def encode_descriptions(
    tokenizer: tokenizers.Tokenizer, descriptions: Sequence[Description], length: int
) -> WindowSplit:
    """Encodes each reference after its facts; only the reference counts.

    Args:
        tokenizer: Knows `<|endoftext|>`, which ends texts and fills them up.
        descriptions: Facts and references; each reference is an example.
        length: Predictions in an example; longer ones are cut off.

    Raises:
        ValueError: The facts alone are as long as that.
    """
    end = tokenizer.token_to_id(END)
    pairs = [(d.facts, text) for d in descriptions for text in d.references]
    tokens = np.full((len(pairs), length + 1), end, np.int32)
    weights = np.zeros((len(pairs), length), np.float32)
    for row, (facts, text) in enumerate(pairs):
        prompt = encode_facts(tokenizer, facts)
        if len(prompt) >= length:
            raise ValueError(
                f"`length` must be above {len(prompt)}, the number of tokens of the "
                f"facts {facts!r}, but got {length}."
            )
        answer = tokenizer.encode(f" {text}", add_special_tokens=False).ids
        whole = [*prompt, *answer, end][: length + 1]
        tokens[row, : len(whole)] = whole
        # Each weight is that of the next token.
        weights[row, len(prompt) - 1 : len(whole) - 1] = 1
    return WindowSplit(tokens, weights)
