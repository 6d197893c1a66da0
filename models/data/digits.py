"""The handwritten digits that ship with scikit-learn, as 32x32 RGB images."""

import numpy as np
import sklearn.datasets

from models.data.dataset import ArraySplit, Dataset, channel_statistics


_SIDE = 32  # the side of a CIFAR image, which the models' small stem is made for


def load_digits(*, seed: int, test_fraction: float = 0.2) -> Dataset:
    """Loads the 1797 digits of 8x8 pixels and resizes them to 32x32x3.

    Args:
        seed: Chooses the test examples.
        test_fraction: The share of examples that is held out.

    Returns:
        The data set, standardized by the training split.
    """
    images, labels = sklearn.datasets.load_digits(return_X_y=True)
    images = resize_linear(images.reshape(-1, 8, 8), _SIDE)
    images = np.repeat(images[..., None], 3, axis=-1).astype(np.float32)

    order = np.random.default_rng(seed).permutation(len(labels))
    num_test = round(len(labels) * test_fraction)
    test, train = order[:num_test], order[num_test:]
    mean, std = channel_statistics(images[train])
    return Dataset(
        name="digits",
        train=ArraySplit(images[train], labels[train], mean, std),
        test=ArraySplit(images[test], labels[test], mean, std),
        num_classes=10,
        image_shape=(_SIDE, _SIDE, 3),
    )


def resize_linear(images: np.ndarray, side: int) -> np.ndarray:
    """Resizes square images [..., n, n] to [..., side, side], bilinearly.

    Interpolation is separable, hence one [side, n] matrix from the left and its
    transpose from the right. Pixel centers lie at half-integers.
    """
    num_pixels = images.shape[-1]
    position = (np.arange(side) + 0.5) * num_pixels / side - 0.5
    distance = np.abs(np.clip(position, 0, num_pixels - 1)[:, None] - range(num_pixels))
    matrix = np.maximum(1.0 - distance, 0.0)
    return matrix @ images @ matrix.T
