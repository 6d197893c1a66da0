"""Image data sets as pure NumPy: one file per format, chosen by name."""

import os
from typing import Literal, get_args

from models.data.cifar import load_cifar10, load_cifar100
from models.data.dataset import (
    ArraySplit as ArraySplit,
    Dataset as Dataset,
    Split as Split,
    evaluation_batches as evaluation_batches,
    training_batches as training_batches,
)
from models.data.digits import load_digits
from models.data.fashion_mnist import load_fashion_mnist
from models.data.image_folder import load_image_folder


ImageName = Literal["digits", "fashion-mnist", "cifar10", "cifar100", "image-folder"]


def load(name: str, *, directory: str | os.PathLike[str], seed: int) -> Dataset:
    """Loads the data set `name`.

    Args:
        name: One of `ImageName`.
        directory: Where data sets that do not ship with a package lie.
        seed: Chooses the split where a data set has none of its own.

    Returns:
        The training and the test split.

    Raises:
        ValueError: If the name is unknown.
        FileNotFoundError: If a file is missing; the message says what to put where.
    """
    if name == "digits":
        return load_digits(seed=seed)
    if name == "fashion-mnist":
        return load_fashion_mnist(directory)
    if name == "cifar10":
        return load_cifar10(directory)
    if name == "cifar100":
        return load_cifar100(directory)
    if name == "image-folder":
        return load_image_folder(directory)
    raise ValueError(f"`data` must be one of {get_args(ImageName)}, but got {name!r}.")
