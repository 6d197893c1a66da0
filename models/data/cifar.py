"""CIFAR-10 and CIFAR-100 in their binary version.

Format: https://www.cs.toronto.edu/~kriz/cifar.html. A record is one label byte
(CIFAR-100: a coarse and a fine one), then 3072 bytes of pixels: 1024 red, 1024 green,
1024 blue, each plane 32x32 in row-major order. A file is records without a header.
"""

import os
import pathlib

import numpy as np

from models.data.dataset import ArraySplit, Dataset, channel_statistics


_SIDE = 32
_NUM_PIXEL_BYTES = 3 * _SIDE * _SIDE
_PAGE = "https://www.cs.toronto.edu/~kriz/cifar.html"


def load_cifar10(directory: str | os.PathLike[str]) -> Dataset:
    """Loads `cifar-10-batches-bin/` in `directory`."""
    train_files = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
    return _load(
        name="cifar10",
        folder=pathlib.Path(directory) / "cifar-10-batches-bin",
        archive="cifar-10-binary.tar.gz",
        train_files=train_files,
        test_files=("test_batch.bin",),
        num_label_bytes=1,
        num_classes=10,
    )


def load_cifar100(directory: str | os.PathLike[str]) -> Dataset:
    """Loads `cifar-100-binary/` in `directory`, with the 100 fine labels."""
    return _load(
        name="cifar100",
        folder=pathlib.Path(directory) / "cifar-100-binary",
        archive="cifar-100-binary.tar.gz",
        train_files=("train.bin",),
        test_files=("test.bin",),
        num_label_bytes=2,
        num_classes=100,
    )


def _load(
    *,
    name: str,
    folder: pathlib.Path,
    archive: str,
    train_files: tuple[str, ...],
    test_files: tuple[str, ...],
    num_label_bytes: int,
    num_classes: int,
) -> Dataset:
    missing = [f for f in (*train_files, *test_files) if not (folder / f).is_file()]
    if missing:
        raise FileNotFoundError(
            f"The data set {name} was not found: `{folder}` lacks "
            f"{', '.join(missing)}. Download {archive} (the binary version) from "
            f"{_PAGE} and unpack it in `{folder.parent}`, or pass `--data-dir`."
        )
    read = [
        _concatenate([_read(folder / f, num_label_bytes, num_classes) for f in files])
        for files in (train_files, test_files)
    ]
    mean, std = channel_statistics(read[0][0])
    train, test = (ArraySplit(images, labels, mean, std) for images, labels in read)
    return Dataset(name, train, test, num_classes, (_SIDE, _SIDE, 3))


def _concatenate(
    parts: list[tuple[np.ndarray, np.ndarray]],
) -> tuple[np.ndarray, np.ndarray]:
    images, labels = zip(*parts, strict=True)
    return np.concatenate(images), np.concatenate(labels)


def _read(
    path: pathlib.Path, num_label_bytes: int, num_classes: int
) -> tuple[np.ndarray, np.ndarray]:
    data = np.fromfile(path, dtype=np.uint8)
    record_nbytes = num_label_bytes + _NUM_PIXEL_BYTES
    if data.size == 0 or data.size % record_nbytes:
        raise ValueError(
            f"`{path}` must be a whole number of records of {record_nbytes} bytes, but "
            f"holds {data.size} bytes: it is incomplete, or not the binary version."
        )
    records = data.reshape(-1, record_nbytes)
    labels = records[:, num_label_bytes - 1]  # the last label byte is the fine label
    if labels.max() >= num_classes:
        raise ValueError(
            f"`{path}` must hold labels below {num_classes}, but got {labels.max()}: "
            "it is not a file of this data set."
        )
    planes = records[:, num_label_bytes:].reshape(-1, 3, _SIDE, _SIDE)
    return np.ascontiguousarray(planes.transpose(0, 2, 3, 1)), labels
