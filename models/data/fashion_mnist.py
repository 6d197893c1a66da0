"""Fashion-MNIST: 70,000 images of clothes, 28x28 pixels of grey (Xiao et al. 2017).

Format (https://yann.lecun.com/exdb/mnist): two zero bytes, the type of elements (8:
unsigned bytes), the number of axes, the length of each axis as a big-endian 32-bit
number, then the elements in row-major order; all compressed by gzip.
"""

import gzip
import os
import pathlib
import zlib

import numpy as np

from models.data.dataset import ArraySplit, Dataset, channel_statistics


_SIDE = 28
_NUM_CLASSES = 10
_UNSIGNED_BYTES = 8
_FILES = {
    split: (f"{split}-images-idx3-ubyte.gz", f"{split}-labels-idx1-ubyte.gz")
    for split in ("train", "t10k")
}

# Where Debian's package `dataset-fashion-mnist` installs the files.
_INSTALLED = pathlib.Path("/usr/share/datasets/fashion-mnist")


def load_fashion_mnist(
    directory: str | os.PathLike[str], installed: pathlib.Path = _INSTALLED
) -> Dataset:
    """Loads the four files from `fashion-mnist/` in `directory`, or from the package.

    Args:
        directory: Where data sets are looked for.
        installed: Where Debian's package puts them, which is looked at last.

    Returns:
        The data set, standardized by the training split; images are 28x28x1.

    Raises:
        FileNotFoundError: A file is missing.
        ValueError: A file is incomplete, or not one of this data set.
    """
    folders = pathlib.Path(directory) / "fashion-mnist", installed
    names = [name for pair in _FILES.values() for name in pair]
    found = (f for f in folders if all((f / name).is_file() for name in names))
    folder = next(found, None)
    if folder is None:
        raise FileNotFoundError(
            f"The data set fashion-mnist was not found: neither `{folders[0]}` nor "
            f"`{installed}` has {', '.join(names)}. Install Debian's package "
            "`dataset-fashion-mnist`, or put the files into the first folder, or pass "
            "`--data-dir`."
        )
    (images, labels), test = (
        (_images(folder / of_images), _labels(folder / of_labels))
        for of_images, of_labels in _FILES.values()
    )
    for name, split in zip(_FILES, ((images, labels), test), strict=True):
        if len(split[0]) != len(split[1]):
            raise ValueError(
                f"`{folder}`: the files {name}-* must hold as many labels as images, "
                f"but hold {len(split[1])} and {len(split[0])}."
            )
    mean, std = channel_statistics(images)
    return Dataset(
        "fashion-mnist",
        ArraySplit(images, labels, mean, std),
        ArraySplit(*test, mean, std),
        _NUM_CLASSES,
        (_SIDE, _SIDE, 1),
    )


def _images(path: pathlib.Path) -> np.ndarray:
    images = _read(path, 3)
    if images.shape[1:] != (_SIDE, _SIDE):
        raise ValueError(
            f"`{path}` must hold images of {_SIDE}x{_SIDE} pixels, but holds an array "
            f"of shape {images.shape}."
        )
    return images[..., None]


def _labels(path: pathlib.Path) -> np.ndarray:
    labels = _read(path, 1)
    if labels.size and labels.max() >= _NUM_CLASSES:
        raise ValueError(
            f"`{path}` must hold labels below {_NUM_CLASSES}, but got {labels.max()}."
        )
    return labels


def _read(path: pathlib.Path, num_axes: int) -> np.ndarray:
    """Returns the array in a file, of unsigned bytes."""
    try:
        data = gzip.decompress(path.read_bytes())
    except (EOFError, OSError, zlib.error) as error:
        raise ValueError(
            f"`{path}` must be a whole file compressed by gzip: {error}. Get it again."
        ) from error
    header = 4 + 4 * num_axes
    shape = tuple(np.frombuffer(data[4:header], ">u4").tolist())
    expected = bytes([0, 0, _UNSIGNED_BYTES, num_axes])
    size = len(data) - header
    if data[:4] != expected or size != int(np.prod(shape, dtype=object)):
        raise ValueError(
            f"`{path}` must begin with the bytes {expected.hex()}, and hold as many "
            f"bytes as the axes {shape} that it names, but begins with "
            f"{data[:4].hex()} and holds {size}. It is incomplete, or another file."
        )
    return np.frombuffer(data, np.uint8, offset=header).reshape(shape)
