"""Text to batches of tokens, by the files that lie beside a model's weights."""

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Literal

import numpy as np
import tokenizers
import tokenizers.decoders
import tokenizers.models
import tokenizers.pre_tokenizers
import tokenizers.processors


FamilyName = Literal["roberta", "gpt2"]

# What fills short sequences up. GPT-2 has no such token; the mask tells it apart.
_PADDING = {"roberta": "<pad>", "gpt2": "<|endoftext|>"}
_SPECIAL = {"roberta": ("<s>", "<pad>", "</s>"), "gpt2": ("<|endoftext|>",)}
_ORIGIN = {
    "roberta": "FacebookAI/roberta-base or FacebookAI/roberta-large",
    "gpt2": "openai-community/gpt2",
}


class TokenizerError(ValueError):
    """The files of a tokenizer are missing, damaged, or of another model."""


@dataclasses.dataclass(frozen=True)
class Batch:
    """Sequences of one length.

    Attributes:
        tokens: int32 [batch, length].
        mask: bool [batch, length]; false where a sequence is filled up.
    """

    tokens: np.ndarray
    mask: np.ndarray


class Tokenizer:
    """A byte-level BPE tokenizer of RoBERTa or of GPT-2, read from a folder.

    RoBERTa's sequences are `<s> text </s>`, those of two texts
    `<s> text </s></s> second </s>`; GPT-2's are the text alone.

    Example:
        tokenizer = Tokenizer("weights/roberta-base", "roberta")
        batch = tokenizer.encode(["A film."], length=8)  # tokens: [1, 8]
    """

    def __init__(self, folder: pathlib.Path | str, family: FamilyName) -> None:
        """Reads `tokenizer.json`, or else `vocab.json` and `merges.txt`.

        Args:
            folder: Where the files lie.
            family: Whose tokenizer it is.

        Raises:
            TokenizerError: If the files are missing (the message says which to put
                where), damaged, or lack the special tokens of the family.
        """
        if family not in _SPECIAL:
            raise ValueError(
                f"`family` must be one of {', '.join(_SPECIAL)}, but got {family!r}."
            )
        self.backend: tokenizers.Tokenizer = _read(pathlib.Path(folder), family)
        """What does the work, of the library `tokenizers`."""
        """The tokenizer of the library `tokenizers`."""
        padding = self.backend.token_to_id(_PADDING[family])
        self.padding: int = padding
        """The token that short sequences are filled up with."""

    @property
    def num_tokens(self) -> int:
        """The size of the vocabulary, special tokens included."""
        return self.backend.get_vocab_size()

    def encode(
        self,
        texts: Sequence[str],
        second: Sequence[str] | None = None,
        *,
        length: int,
    ) -> Batch:
        """Makes a batch; what is longer than `length` is cut, of two texts the longer.

        Args:
            texts: One text for each sequence.
            second: The second texts, if sequences are of two.
            length: Tokens of every sequence, special ones included.

        Raises:
            ValueError: If there are not as many second texts, or `length` has no room
                for the special tokens.
        """
        if second is not None and len(second) != len(texts):
            raise ValueError(
                f"`second` must have as many texts as `texts`, {len(texts)}, but has "
                f"{len(second)}."
            )
        num_special = self.backend.num_special_tokens_to_add(second is not None)
        if length <= num_special:
            raise ValueError(
                f"`length` must be above {num_special}, the number of special tokens, "
                f"but got {length}."
            )
        pairs = texts if second is None else list(zip(texts, second, strict=True))
        # The state is set anew each time: a tokenizer file may bring another.
        self.backend.enable_truncation(length)
        self.backend.no_padding()
        encoded = self.backend.encode_batch(list(pairs))
        tokens = np.full((len(texts), length), self.padding, np.int32)
        mask = np.zeros((len(texts), length), bool)
        for row, encoding in enumerate(encoded):
            tokens[row, : len(encoding.ids)] = encoding.ids
            mask[row, : len(encoding.ids)] = True
        return Batch(tokens, mask)

    def decode(self, tokens: Sequence[int]) -> str:
        """Returns the text of tokens, without the special ones."""
        return self.backend.decode(list(tokens), skip_special_tokens=True)


def _read(folder: pathlib.Path, family: FamilyName) -> tokenizers.Tokenizer:
    whole = folder / "tokenizer.json"
    vocabulary, merges = folder / "vocab.json", folder / "merges.txt"
    try:
        if whole.exists():
            tokenizer = tokenizers.Tokenizer.from_file(str(whole))
        elif vocabulary.exists() and merges.exists():
            tokenizer = _assemble(vocabulary, merges, family)
        else:
            raise TokenizerError(
                f"There is no tokenizer in `{folder}`. Put `tokenizer.json`, or "
                f"`vocab.json` and `merges.txt`, of {_ORIGIN[family]} on Hugging Face "
                "into it."
            )
    except TokenizerError:
        raise
    except Exception as error:  # the library raises this very class
        raise TokenizerError(
            f"The tokenizer in `{folder}` cannot be read; the reason was: {error}"
        ) from error
    missing = [t for t in _SPECIAL[family] if tokenizer.token_to_id(t) is None]
    if missing:
        raise TokenizerError(
            f"The tokenizer in `{folder}` is not of {family}: it lacks the tokens "
            f"{', '.join(missing)}."
        )
    return tokenizer


def _assemble(
    vocabulary: pathlib.Path, merges: pathlib.Path, family: FamilyName
) -> tokenizers.Tokenizer:
    model = tokenizers.models.BPE.from_file(str(vocabulary), str(merges))
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
        add_prefix_space=False
    )
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    known = [t for t in _SPECIAL[family] if tokenizer.token_to_id(t) is not None]
    tokenizer.add_special_tokens(known)
    if family == "roberta" and len(known) == len(_SPECIAL[family]):
        first, last = (tokenizer.token_to_id(token) for token in ("<s>", "</s>"))
        tokenizer.post_processor = tokenizers.processors.RobertaProcessing(
            sep=("</s>", last), cls=("<s>", first), add_prefix_space=False
        )
    return tokenizer
