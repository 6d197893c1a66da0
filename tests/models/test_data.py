"""Loaders on tiny files of the true formats, and the order of batches."""

import gzip
import itertools
import re

import numpy as np
import PIL.Image
import pytest

from models import data
from models.data import digits
from models.data.fashion_mnist import load_fashion_mnist


def write_cifar(path, labels, *, rng):
    """Writes records as the official files have them, and returns the images."""
    planes = rng.integers(256, size=(len(labels), 3, 32, 32), dtype=np.uint8)
    records = [
        bytes(label) + plane.tobytes()
        for label, plane in zip(labels, planes, strict=True)
    ]
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"".join(records))
    return planes.transpose(0, 2, 3, 1)


def write_cifar10(directory, rng):
    folder = directory / "cifar-10-batches-bin"
    images = [
        write_cifar(folder / f"data_batch_{n}.bin", [[n], [n + 1]], rng=rng)
        for n in range(1, 6)
    ]
    write_cifar(folder / "test_batch.bin", [[9], [0], [4]], rng=rng)
    return np.concatenate(images)


def write_image_folder(root, rng, suffix="png"):
    for split, count in (("train", 3), ("val", 2)):
        for name in ("cat", "dog"):
            folder = root / split / name
            folder.mkdir(parents=True)
            for index in range(count):
                pixels = rng.integers(256, size=(40, 56, 3), dtype=np.uint8)
                PIL.Image.fromarray(pixels).save(folder / f"{index}.{suffix}")


def everything(split):
    return split.take(np.arange(len(split)))


def test_the_digits_are_1797_images_of_32x32x3():
    dataset = data.load("digits", directory="unused", seed=0)
    images, labels = everything(dataset.train)
    assert len(dataset.train) + len(dataset.test) == 1797
    assert images.shape == (len(dataset.train), *dataset.image_shape)
    assert dataset.image_shape == (32, 32, 3)
    assert images.dtype == np.float32
    assert labels.dtype == np.int32
    assert set(labels.tolist()) == set(range(10))


def test_the_digits_are_standardized_by_the_training_split():
    images, _ = everything(data.load("digits", directory="unused", seed=0).train)
    np.testing.assert_allclose(images.mean(), 0, atol=1e-4)
    np.testing.assert_allclose(images.std(), 1, atol=1e-4)


def test_the_split_of_the_digits_depends_on_the_seed_alone():
    first, again, other = (
        everything(data.load("digits", directory="unused", seed=seed).test)[1]
        for seed in (0, 0, 1)
    )
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)


def test_resizing_keeps_a_linear_ramp_between_pixel_centers():
    ramp = np.broadcast_to(np.arange(4.0), (4, 4))
    resized = digits.resize_linear(ramp, 8)
    np.testing.assert_allclose(
        resized[3], [0, 0.25, 0.75, 1.25, 1.75, 2.25, 2.75, 3], atol=1e-12
    )


def test_cifar10_records_are_a_label_and_three_planes(tmp_path, rng):
    written = write_cifar10(tmp_path, rng)
    dataset = data.load("cifar10", directory=tmp_path, seed=0)
    images, labels = everything(dataset.train)
    mean = written.reshape(-1, 3).mean(axis=0)
    std = written.reshape(-1, 3).std(axis=0)
    np.testing.assert_allclose(images, (written - mean) / std, atol=1e-5)
    assert labels.tolist() == [1, 2, 2, 3, 3, 4, 4, 5, 5, 6]
    assert everything(dataset.test)[1].tolist() == [9, 0, 4]
    assert dataset.num_classes == 10


def test_cifar100_uses_the_fine_label(tmp_path, rng):
    folder = tmp_path / "cifar-100-binary"
    write_cifar(folder / "train.bin", [[3, 99], [4, 0]], rng=rng)
    write_cifar(folder / "test.bin", [[19, 50]], rng=rng)
    dataset = data.load("cifar100", directory=tmp_path, seed=0)
    assert everything(dataset.train)[1].tolist() == [99, 0]
    assert everything(dataset.test)[1].tolist() == [50]
    assert dataset.num_classes == 100


def write_idx(path, array, *, shape=None):
    """Writes an array as the official files have it."""
    header = bytes([0, 0, 8, array.ndim])
    header += np.asarray(shape or array.shape, ">u4").tobytes()
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(gzip.compress(header + array.tobytes()))


def write_fashion_mnist(folder, rng):
    images = rng.integers(256, size=(7, 28, 28), dtype=np.uint8)
    for name, part in (("train", slice(0, 4)), ("t10k", slice(4, 7))):
        write_idx(folder / f"{name}-images-idx3-ubyte.gz", images[part])
        labels = np.arange(7, dtype=np.uint8)[part]
        write_idx(folder / f"{name}-labels-idx1-ubyte.gz", labels)
    return images


class TestFashionMNIST:
    def test_images_are_grey(self, tmp_path, rng):
        written = write_fashion_mnist(tmp_path / "fashion-mnist", rng)[:4]
        dataset = data.load("fashion-mnist", directory=tmp_path, seed=0)
        images, labels = everything(dataset.train)
        expected = (written - written.mean()) / written.std()
        np.testing.assert_allclose(images[..., 0], expected, atol=1e-5)
        assert images.shape[1:] == dataset.image_shape == (28, 28, 1)
        assert labels.tolist() == [0, 1, 2, 3]
        assert everything(dataset.test)[1].tolist() == [4, 5, 6]

    def test_the_package_of_debian_is_looked_at_last(self, tmp_path, rng):
        write_fashion_mnist(tmp_path / "installed", rng)
        found = load_fashion_mnist(tmp_path, tmp_path / "installed")
        assert len(found.train) == 4
        with pytest.raises(FileNotFoundError, match="package `dataset-fashion-mnist`"):
            load_fashion_mnist(tmp_path, tmp_path / "other")

    @pytest.mark.parametrize(
        ("name", "array", "message"),
        [
            ("images-idx3", np.zeros((4, 9, 9), np.uint8), "images of 28x28 pixels"),
            ("labels-idx1", np.full(4, 10, np.uint8), "labels below 10, but got 10"),
            ("labels-idx1", np.zeros(3, np.uint8), "as many labels as images"),
            ("labels-idx1", np.zeros((4, 1), np.uint8), "must begin with the bytes"),
        ],
    )
    def test_other_files_are_refused(self, name, array, message, tmp_path, rng):
        folder = tmp_path / "fashion-mnist"
        write_fashion_mnist(folder, rng)
        write_idx(folder / f"train-{name}-ubyte.gz", array)
        with pytest.raises(ValueError, match=message):
            data.load("fashion-mnist", directory=tmp_path, seed=0)

    def test_files_that_are_cut_short_are_refused(self, tmp_path, rng):
        folder = tmp_path / "fashion-mnist"
        write_fashion_mnist(folder, rng)
        path = folder / "t10k-images-idx3-ubyte.gz"
        whole = path.read_bytes()
        path.write_bytes(whole[:-9])
        with pytest.raises(ValueError, match="compressed by gzip"):
            data.load("fashion-mnist", directory=tmp_path, seed=0)
        write_idx(path, np.zeros((3, 28, 28), np.uint8), shape=(2**32 - 1, 28, 28))
        with pytest.raises(ValueError, match="incomplete, or another file"):
            data.load("fashion-mnist", directory=tmp_path, seed=0)


def test_a_seed_chooses_few_training_examples(tmp_path, rng):
    write_fashion_mnist(tmp_path / "fashion-mnist", rng)
    whole = data.load("fashion-mnist", directory=tmp_path, seed=0)
    few = whole.with_few(3, seed=0)
    chosen = everything(few.train)[1].tolist()
    assert len(few.train) == len(set(chosen)) == 3
    assert everything(whole.with_few(3, seed=0).train)[1].tolist() == chosen
    assert len(few.test) == len(whole.test)
    with pytest.raises(ValueError, match="`--examples` must be at most the 4"):
        whole.with_few(5, seed=0)


@pytest.mark.parametrize("suffix", ["png", "jpg"])
def test_an_image_folder_has_one_class_per_folder(tmp_path, rng, suffix):
    write_image_folder(tmp_path, rng, suffix)
    dataset = data.load("image-folder", directory=tmp_path, seed=0)
    images, labels = dataset.train.take(np.asarray([0, 3, 5]))
    assert images.shape == (3, 224, 224, 3)
    assert images.dtype == np.float32
    assert labels.tolist() == [0, 1, 1]
    assert (len(dataset.train), len(dataset.test)) == (6, 4)
    assert dataset.num_classes == 2


def test_an_image_keeps_its_colors_and_becomes_rgb(tmp_path):
    for split in ("train", "val"):
        (tmp_path / split / "red").mkdir(parents=True)
        PIL.Image.new("RGBA", (30, 20), "red").save(tmp_path / split / "red" / "a.png")
    dataset = data.load("image-folder", directory=tmp_path, seed=0)
    images, _ = everything(dataset.train)
    expected = (np.asarray([1, 0, 0]) - [0.485, 0.456, 0.406]) / [0.229, 0.224, 0.225]
    np.testing.assert_allclose(images[0, 100, 100], expected, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("cifar10", r"lacks data_batch_1.bin.*Download cifar-10-binary.tar.gz"),
        ("cifar100", r"lacks train.bin, test.bin.*Download cifar-100-binary.tar.gz"),
        ("image-folder", r"Put images into `.*/train/CLASS/`"),
    ],
)
def test_a_missing_data_set_says_what_to_put_where(name, message, tmp_path):
    with pytest.raises(FileNotFoundError, match=message) as raised:
        data.load(name, directory=tmp_path, seed=0)
    assert str(tmp_path) in str(raised.value)


def test_an_unknown_data_set_is_an_error_that_lists_the_names():
    with pytest.raises(ValueError, match=r"one of .*digits.*but got 'mnist'"):
        data.load("mnist", directory=".", seed=0)


def test_a_truncated_cifar_file_is_an_error_that_names_it(tmp_path, rng):
    write_cifar10(tmp_path, rng)
    path = tmp_path / "cifar-10-batches-bin" / "data_batch_3.bin"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match=f"{re.escape(str(path))}.*records of 3073"):
        data.load("cifar10", directory=tmp_path, seed=0)


def test_a_label_out_of_range_is_an_error(tmp_path, rng):
    write_cifar10(tmp_path, rng)
    path = tmp_path / "cifar-10-batches-bin" / "test_batch.bin"
    write_cifar(path, [[10]], rng=rng)
    with pytest.raises(ValueError, match="labels below 10, but got 10"):
        data.load("cifar10", directory=tmp_path, seed=0)


def test_a_class_that_only_the_test_split_has_is_an_error(tmp_path, rng):
    write_image_folder(tmp_path, rng)
    (tmp_path / "val" / "cat").rename(tmp_path / "val" / "bird")
    with pytest.raises(ValueError, match=r"bird` is a class that .* lacks"):
        data.load("image-folder", directory=tmp_path, seed=0)


def test_a_class_without_images_is_an_error(tmp_path, rng):
    write_image_folder(tmp_path, rng)
    for path in (tmp_path / "train" / "cat").iterdir():
        path.unlink()
    with pytest.raises(FileNotFoundError, match=r"has no images. Put files"):
        data.load("image-folder", directory=tmp_path, seed=0)


def test_an_unreadable_image_is_an_error_that_names_it(tmp_path, rng):
    write_image_folder(tmp_path, rng)
    (tmp_path / "train" / "cat" / "0.png").write_bytes(b"not an image")
    dataset = data.load("image-folder", directory=tmp_path, seed=0)
    with pytest.raises(ValueError, match=r"cat/0.png` is not a readable image"):
        dataset.train.take(np.asarray([0]))


def tiny_split(num_examples):
    return data.ArraySplit(
        images=np.zeros((num_examples, 1, 1, 1)),
        labels=np.arange(num_examples),
        mean=np.zeros(1),
        std=np.ones(1),
    )


def order(epoch, seed=0):
    batches = data.training_batches(
        tiny_split(10), batch_size=3, seed=seed, epoch=epoch
    )
    return [labels.tolist() for _, labels in batches]


def test_the_order_of_batches_depends_on_seed_and_epoch_alone():
    assert order(epoch=1) == order(epoch=1)
    assert order(epoch=1) != order(epoch=2)
    assert order(epoch=1) != order(epoch=1, seed=1)


def test_training_batches_are_full_and_hold_no_example_twice():
    batches = order(epoch=1)
    seen = list(itertools.chain.from_iterable(batches))
    assert [len(batch) for batch in batches] == [3, 3, 3]
    assert len(set(seen)) == len(seen)


def test_evaluation_batches_hold_every_example_once():
    batches = list(data.evaluation_batches(tiny_split(10), batch_size=4))
    assert [len(labels) for _, (_, labels) in batches] == [4, 4, 4]
    counted = [
        label for count, (_, labels) in batches for label in labels[:count].tolist()
    ]
    assert counted == list(range(10))


def test_a_batch_larger_than_the_split_is_an_error():
    with pytest.raises(ValueError, match=r"`batch` \(11\) must be at most"):
        next(data.training_batches(tiny_split(10), batch_size=11, seed=0, epoch=0))
