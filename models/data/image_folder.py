"""A folder of images in the layout of ImageNet: `train/CLASS/*` and `val/CLASS/*`."""

import dataclasses
import os
import pathlib

import numpy as np
import PIL.Image

from models.data.dataset import Dataset, Images, Labels


_SUFFIXES = frozenset({".bmp", ".jpeg", ".jpg", ".png", ".webp"})

# Statistics of the ImageNet training set, in units of 1 (white).
_MEAN = np.asarray([0.485, 0.456, 0.406], np.float32)
_STD = np.asarray([0.229, 0.224, 0.225], np.float32)

# The usual crop keeps the central 224 of 256 pixels.
_CROP_FRACTION = 224 / 256


@dataclasses.dataclass(frozen=True)
class ImageFolderSplit:
    """Images that are decoded when they are taken, so that a split needs no memory.

    Attributes:
        files: One path per example, in sorted order.
        classes: The label of each file.
        side: Height and width of the images that `take` returns.
    """

    files: tuple[pathlib.Path, ...]
    classes: tuple[int, ...]
    side: int

    def __len__(self) -> int:
        return len(self.files)

    def take(self, indices: np.ndarray) -> tuple[Images, Labels]:
        images = np.stack([_decode(self.files[i], self.side) for i in indices])
        labels = np.asarray([self.classes[i] for i in indices], np.int32)
        return (images - _MEAN) / _STD, labels


def load_image_folder(directory: str | os.PathLike[str], *, side: int = 224) -> Dataset:
    """Finds the images below `directory`; the classes are the folders of `train/`.

    Args:
        directory: Holds `train/CLASS/IMAGE` and `val/CLASS/IMAGE`.
        side: Height and width to which images are resized and cropped.

    Returns:
        The data set; nothing has been decoded yet.

    Raises:
        FileNotFoundError: If a folder is missing or has no image.
        ValueError: If `val/` holds a class that `train/` lacks.
    """
    root = pathlib.Path(directory)
    names = tuple(path.name for path in _class_folders(root, "train"))
    labels = {name: label for label, name in enumerate(names)}
    return Dataset(
        name="image-folder",
        train=_split(root, "train", labels, side),
        test=_split(root, "val", labels, side),
        num_classes=len(names),
        image_shape=(side, side, 3),
    )


def _class_folders(root: pathlib.Path, split: str) -> list[pathlib.Path]:
    folder = root / split
    found = sorted(p for p in folder.glob("*") if p.is_dir())
    if not found:
        raise FileNotFoundError(
            f"The image folder was not found: `{folder}` has no class folders. Put "
            f"images into `{root}/train/CLASS/` and `{root}/val/CLASS/`, one folder "
            "per class, or pass `--data-dir`."
        )
    return found


def _split(
    root: pathlib.Path, split: str, labels: dict[str, int], side: int
) -> ImageFolderSplit:
    files: list[pathlib.Path] = []
    classes: list[int] = []
    for folder in _class_folders(root, split):
        if folder.name not in labels:
            raise ValueError(
                f"`{folder}` is a class that `{root}/train` lacks; both must have the "
                "same class folders."
            )
        found = sorted(p for p in folder.iterdir() if p.suffix.lower() in _SUFFIXES)
        if not found:
            raise FileNotFoundError(
                f"`{folder}` has no images. Put files with one of the suffixes "
                f"{', '.join(sorted(_SUFFIXES))} there."
            )
        files.extend(found)
        classes.extend([labels[folder.name]] * len(found))
    return ImageFolderSplit(tuple(files), tuple(classes), side)


def _decode(path: pathlib.Path, side: int) -> np.ndarray:
    """Returns the central square of an image, [side, side, 3] in [0, 1]."""
    try:
        with PIL.Image.open(path) as opened:
            image = opened.convert("RGB")
    except OSError as error:
        raise ValueError(f"`{path}` is not a readable image: {error}.") from error
    crop = min(image.size) * _CROP_FRACTION
    left, top = ((length - crop) / 2 for length in image.size)
    image = image.resize(
        (side, side),
        PIL.Image.Resampling.BILINEAR,
        box=(left, top, left + crop, top + crop),
    )
    return np.asarray(image, np.float32) / 255
