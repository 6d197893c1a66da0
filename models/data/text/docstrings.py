"""Two tasks on installed packages: which one a sentence is of, and what comes next.

Nothing is downloaded. The text depends on the versions of the packages, which are part
of the data sets' names. A file is in one split with all that is in it, so that what two
functions say in equal words is not in both.
"""

import dataclasses
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import final

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from models.data.text.corpus import (
    PACKAGES,
    Document,
    TextName,
    documents,
    share,
    versions,
)
from models.data.text.splits import SentenceSplit, WindowSplit, windows
from models.tokenizer import FamilyName


_TEST_SHARE = 0.25
# Of a package; few of them are in sentences of prose.
_MOST_CHARACTERS = 400_000
_MOST_CHARACTERS_OF_SENTENCES = 1_000_000
_SPECIAL = {
    "roberta": ("<s>", "<pad>", "</s>", "<unk>", "<mask>"),
    "gpt2": ("<|endoftext|>",),
}
_ENDS = {"roberta": "</s>", "gpt2": "<|endoftext|>"}

# What gives a package away. Sentences that name one are left out.
_NAMES = re.compile(
    r"\b(flax|linen|nnx|jax|jnp|lax|xla|matplotlib|mpl|plt|pyplot|numpy|np|optax|scipy|"
    r"sklearn|scikit)\b",
    re.IGNORECASE,
)
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+")
_CODE = re.compile(r"^\s*(>>>|\.\.\.|\.\. |[-=~^]{3,}|\|)")


@final
@dataclasses.dataclass(frozen=True, eq=False)
class Sentences:
    """Sentences of packages, to be told apart.

    Attributes:
        name: What it is of, with versions.
        tokenizer: What made the tokens, of the training split alone.
        train: Tokens, masks and labels.
        test: Likewise.
        classes: What the labels stand for.
    """

    name: str
    tokenizer: tokenizers.Tokenizer
    train: SentenceSplit
    test: SentenceSplit
    classes: tuple[str, ...]


@final
@dataclasses.dataclass(frozen=True, eq=False)
class RunningText:
    """Docstrings one after the other, to be continued.

    Attributes:
        name: What it is of, with versions.
        tokenizer: What made the tokens, of the training split alone.
        train: Windows.
        test: Likewise.
    """

    name: str
    tokenizer: tokenizers.Tokenizer
    train: WindowSplit
    test: WindowSplit


def load_sentences(
    *,
    length: int,
    vocabulary: int = 4096,
    packages: Sequence[str] = PACKAGES,
    most_of_each: int = 2000,
    tokenizer: tokenizers.Tokenizer | None = None,
) -> Sentences:
    """Loads sentences with the package that each is of.

    All packages have equally many sentences. Those that name a package are left out,
    and so are repeated ones.

    Args:
        length: Tokens of an example.
        vocabulary: Tokens that there are, if a tokenizer is made.
        packages: Installed packages.
        most_of_each: Sentences of a package, in both splits.
        tokenizer: One to use in place of one that is made of the training split.

    Raises:
        FileNotFoundError: A package is not installed.
    """
    train, test = _split(packages, most_characters=_MOST_CHARACTERS_OF_SENTENCES)
    of_train = _balanced(train, packages, round(most_of_each * (1 - _TEST_SHARE)))
    seen = {text for text, _ in of_train}
    of_test = _balanced(test, packages, round(most_of_each * _TEST_SHARE), seen)
    if tokenizer is None:
        tokenizer = train_tokenizer((text for text, _ in of_train), vocabulary)
    return Sentences(
        name=_name("docstrings", packages),
        tokenizer=tokenizer,
        train=encode_sentences(tokenizer, of_train, length),
        test=encode_sentences(tokenizer, of_test, length),
        classes=tuple(packages),
    )


def load_running_text(
    *,
    length: int,
    vocabulary: int = 4096,
    packages: Sequence[str] = PACKAGES,
    tokenizer: tokenizers.Tokenizer | None = None,
    family: FamilyName = "roberta",
    of: TextName = "docstrings",
) -> RunningText:
    """Loads docstrings, or sources without them, as windows of running text.

    Args:
        length: Predictions in a window.
        vocabulary: Tokens that there are, if a tokenizer is made.
        packages: Installed packages.
        tokenizer: One to use in place of one that is made of the training split.
        family: Whose special tokens it has.
        of: What the text is. The sources and the docstrings of a file are in the same
            split.

    Raises:
        FileNotFoundError: A package is not installed.
    """
    train, test = _split(packages, of, most_characters=_MOST_CHARACTERS)
    if tokenizer is None:
        # It is to serve what is learned later, too.
        both = train
        if of == "sources":
            both = train + _split(packages, most_characters=_MOST_CHARACTERS)[0]
        tokenizer = train_tokenizer((d.text for d in both), vocabulary, family)
    end = tokenizer.token_to_id(_ENDS[family])

    def tokens(split: Iterable[Document]) -> np.ndarray:
        encoded = tokenizer.encode_batch(
            [d.text for d in split], add_special_tokens=False
        )
        return np.concatenate([[*e.ids, end] for e in encoded])

    return RunningText(
        name=_name(f"{of} as text", packages),
        tokenizer=tokenizer,
        train=windows(tokens(train), length),
        test=windows(tokens(test), length),
    )


def train_tokenizer(
    texts: Iterable[str], vocabulary: int, family: FamilyName = "roberta"
) -> tokenizers.Tokenizer:
    """Makes a byte-level BPE of some text, with the special tokens of a family.

    Sennrich et al. 2016, on bytes as in GPT-2 (Radford et al. 2019). Nothing is unknown
    to it. That of RoBERTa puts `<s>` and `</s>` round what it encodes.

    Args:
        texts: The text.
        vocabulary: Tokens; at least 261.
        family: `"roberta"` or `"gpt2"`.
    """
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(_SPECIAL[family]),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    # One batch: counts do not depend on how it is divided among threads.
    tokenizer.train_from_iterator(list(texts), trainer)
    if family == "roberta":
        first, last = ((name, tokenizer.token_to_id(name)) for name in ("<s>", "</s>"))
        tokenizer.post_processor = processors.RobertaProcessing(last, first)
    return tokenizer


def encode_sentences(
    tokenizer: tokenizers.Tokenizer,
    examples: Sequence[tuple[str | tuple[str, str], int | float]],
    length: int,
) -> SentenceSplit:
    """Encodes texts, or pairs of them, to `length` tokens each.

    Args:
        tokenizer: Knows `<pad>`.
        examples: Texts with their labels; classes are ints, scores are floats.
        length: Tokens; longer texts are cut off, shorter ones padded.
    """
    padding = tokenizer.token_to_id("<pad>")
    tokenizer.enable_truncation(length)
    tokenizer.enable_padding(length=length, pad_id=padding, pad_token="<pad>")
    encoded = tokenizer.encode_batch([text for text, _ in examples])
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokens = np.array([e.ids for e in encoded], np.int32).reshape(-1, length)
    mask = np.array([e.attention_mask for e in encoded], bool).reshape(-1, length)
    labels = np.array([label for _, label in examples])
    is_score = np.issubdtype(labels.dtype, np.floating)
    return SentenceSplit(
        tokens, mask, labels.astype(np.float32 if is_score else np.int32)
    )


def _name(task: str, packages: Sequence[str]) -> str:
    return f"{task} ({', '.join(f'{n} {v}' for n, v in versions(packages).items())})"


def _split(
    packages: Sequence[str],
    of: TextName = "docstrings",
    *,
    most_characters: int,
) -> tuple[list[Document], list[Document]]:
    train: list[Document] = []
    test: list[Document] = []
    for package in packages:
        for document in documents(package, of, most_characters=most_characters):
            is_test = share(f"{package}/{document.path}") < _TEST_SHARE
            (test if is_test else train).append(document)
    return train, test


def _balanced(
    split: Iterable[Document],
    packages: Sequence[str],
    most_of_each: int,
    seen: Iterable[str] = (),
) -> list[tuple[str, int]]:
    """Returns sentences with their packages' numbers, equally many of each."""
    found: dict[str, list[str]] = {package: [] for package in packages}
    known = set(seen)
    for document in split:
        for sentence in _sentences(document.text):
            if sentence not in known:
                known.add(sentence)
                found[document.package].append(sentence)
    count = min(most_of_each, *map(len, found.values()))
    return [
        (sentence, number)
        for number, package in enumerate(packages)
        for sentence in sorted(found[package], key=share)[:count]
    ]


def _sentences(text: str) -> Iterator[str]:
    """Yields sentences of prose, without line breaks."""
    for paragraph in re.split(r"\n\s*\n", text):
        lines = paragraph.splitlines()
        if any(_CODE.match(line) for line in lines):
            continue
        for sentence in _SENTENCE_END.split(" ".join(map(str.strip, lines))):
            letters = sum(c.isalpha() or c == " " for c in sentence)
            is_prose = 40 <= len(sentence) <= 300 and letters > 0.85 * len(sentence)
            if is_prose and sentence[0].isupper() and not _NAMES.search(sentence):
                yield sentence
