"""What a data set is, and the two ways to iterate over a split of it."""

import dataclasses
from collections.abc import Iterator
from typing import Protocol

import numpy as np


Images = np.ndarray  # [batch, height, width, channels], float32, standardized
Labels = np.ndarray  # [batch], int32


Batch = tuple[np.ndarray, ...]  # the first axis of each is that of examples


class Split(Protocol):
    """A finite collection of examples that is read by index."""

    def __len__(self) -> int:
        """Returns the number of examples."""
        ...

    def take(self, indices: np.ndarray) -> Batch:
        """Returns the examples at `indices`; of images, standardized, with labels."""
        ...


@dataclasses.dataclass(frozen=True, eq=False)
class ArraySplit:
    """A split that lies in memory.

    Attributes:
        images: [examples, height, width, channels], of any real dtype.
        labels: [examples].
        mean: Per channel, in the units of `images`.
        std: Per channel, in the units of `images`.
    """

    images: np.ndarray
    labels: np.ndarray
    mean: np.ndarray
    std: np.ndarray

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, indices: np.ndarray) -> tuple[Images, Labels]:
        images = (self.images[indices].astype(np.float32) - self.mean) / self.std
        return images.astype(np.float32), self.labels[indices].astype(np.int32)


@dataclasses.dataclass(frozen=True, eq=False)
class Subset:
    """Some examples of a split.

    Attributes:
        split: The split.
        indices: Its examples.
    """

    split: Split
    indices: np.ndarray

    def __len__(self) -> int:
        return len(self.indices)

    def take(self, indices: np.ndarray) -> Batch:
        return self.split.take(self.indices[indices])


@dataclasses.dataclass(frozen=True)
class Dataset:
    """Images: a training and a test split of the same classes."""

    name: str
    train: Split
    test: Split
    num_classes: int
    image_shape: tuple[int, int, int]

    def with_few(self, count: int, *, seed: int) -> "Dataset":
        """Returns the data set with only so many training examples.

        Args:
            count: How many.
            seed: Chooses them.

        Raises:
            ValueError: There are fewer.
        """
        if count > len(self.train):
            raise ValueError(
                f"`--examples` must be at most the {len(self.train)} training examples "
                f"of {self.name}, but got {count}."
            )
        order = np.random.default_rng(seed).permutation(len(self.train))
        return dataclasses.replace(self, train=Subset(self.train, order[:count]))


def channel_statistics(images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns mean and standard deviation per channel, accumulated in float64."""
    axes = (0, 1, 2)
    mean = images.mean(axis=axes, dtype=np.float64)
    std = images.std(axis=axes, dtype=np.float64)
    # A constant channel has no spread; any nonzero divisor standardizes it.
    return mean.astype(np.float32), np.where(std > 0, std, 1.0).astype(np.float32)


def training_batches(
    split: Split, *, batch_size: int, seed: int, epoch: int
) -> Iterator[Batch]:
    """Yields the full batches of one epoch in an order given by (seed, epoch).

    The order depends on nothing else, so a resumed run sees the batches that an
    uninterrupted one would have seen. Examples beyond the last full batch are left
    out of this epoch, so that one compiled step serves all batches.

    Raises:
        ValueError: If the split does not fill one batch.
    """
    if batch_size > len(split):
        raise ValueError(
            f"`batch` ({batch_size}) must be at most the number of training examples "
            f"({len(split)})."
        )
    order = np.random.default_rng((seed, epoch)).permutation(len(split))
    for start in range(0, len(split) - batch_size + 1, batch_size):
        yield split.take(order[start : start + batch_size])


def evaluation_batches(split: Split, *, batch_size: int) -> Iterator[tuple[int, Batch]]:
    """Yields all examples in order, as full batches.

    With each comes how many of it count: the last one is filled up with the last
    example.
    """
    for start in range(0, len(split), batch_size):
        indices = np.arange(start, start + batch_size)
        batch = split.take(np.minimum(indices, len(split) - 1))
        yield min(batch_size, len(split) - start), batch
