"""Splits of text in memory: sentences in tokens, and windows of running text."""

import dataclasses
from typing import final

import numpy as np


@final
@dataclasses.dataclass(frozen=True, eq=False)
class SentenceSplit:
    """Sentences, or pairs of them, in tokens, with a label each.

    Attributes:
        tokens: int32 [examples, length], padded.
        mask: bool [examples, length], false where padded.
        labels: int32 [examples] of classes, or float32 of scores.
    """

    tokens: np.ndarray
    mask: np.ndarray
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns tokens, mask and labels at `indices`."""
        return self.tokens[indices], self.mask[indices], self.labels[indices]


@final
@dataclasses.dataclass(frozen=True, eq=False)
class WindowSplit:
    """Windows of running text for a language model.

    Attributes:
        tokens: int32 [examples, length + 1]; each is predicted from those before it.
        weights: float32 [examples, length]; how much each prediction counts, 0 of
            padding and of prompts that are given.
    """

    tokens: np.ndarray
    weights: np.ndarray

    def __len__(self) -> int:
        return len(self.tokens)

    def take(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns tokens and weights at `indices`."""
        return self.tokens[indices], self.weights[indices]


def windows(tokens: np.ndarray, length: int) -> WindowSplit:
    """Cuts running text into windows that overlap in one token.

    Args:
        tokens: int [n].
        length: Predictions in a window; what is left at the end is left out.

    Raises:
        ValueError: There is not one window.
    """
    count = (len(tokens) - 1) // length
    if count < 1:
        raise ValueError(
            f"`length` must be less than the number of tokens, {len(tokens)}, but got "
            f"{length}."
        )
    starts = length * np.arange(count)[:, None]
    cut = tokens[starts + np.arange(length + 1)].astype(np.int32)
    return WindowSplit(cut, np.ones((count, length), np.float32))


def begin_with(token: int, split: WindowSplit) -> WindowSplit:
    """Returns windows that have one token more, the first, the same for all."""
    count = len(split)
    return WindowSplit(
        np.column_stack([np.full(count, token, np.int32), split.tokens]),
        np.column_stack([np.ones(count, np.float32), split.weights]),
    )
