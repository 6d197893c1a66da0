"""Classification of images by a residual network."""

import dataclasses
from collections.abc import Mapping
from typing import Any, final

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import DTypeLike

from models import resnet
from models.data import Dataset
from models.tasks.task import ACCURACY, Batch, Task, Variables
from models.wrapping import WrapBlock


@final
@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class ImageClassification(Task):
    """Which class an image is of.

    Attributes:
        image_shape: (height, width, channels).
    """

    image_shape: tuple[int, int, int]

    @property
    def mutable(self) -> tuple[str, ...]:
        return ("batch_stats",)

    def make_model(self, wrap_block: WrapBlock) -> nn.Module:
        return resnet.ResNet(self.config, wrap_block=wrap_block)

    def init(self, model: nn.Module, key: jax.Array) -> Variables:
        return model.init(key, jnp.zeros((1, *self.image_shape)), train=True)

    def loss(
        self, model: nn.Module, variables: Variables, key: jax.Array, batch: Batch
    ) -> tuple[jax.Array, tuple[Variables, dict[str, jax.Array]]]:
        del key
        images, labels = batch
        logits, updated = model.apply(
            variables, images, train=True, mutable=list(self.mutable)
        )
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        accuracy = jnp.mean(jnp.argmax(logits, axis=-1) == labels)
        return jnp.mean(losses), (updated, {"accuracy": accuracy})

    def predict(
        self, model: nn.Module, variables: Variables, batch: Batch
    ) -> dict[str, jax.Array]:
        images, labels = batch
        logits = model.apply(variables, images, train=False)
        return {
            "loss": optax.softmax_cross_entropy_with_integer_labels(logits, labels),
            "is_correct": jnp.argmax(logits, axis=-1) == labels,
        }

    def measure(self, predictions: Mapping[str, np.ndarray]) -> dict[str, float]:
        return {
            "loss": float(np.mean(predictions["loss"], dtype=np.float64)),
            "accuracy": float(np.mean(predictions["is_correct"])),
        }


MODELS: Mapping[str, Any] = {
    "resnet18": resnet.resnet18,
    "resnet34": resnet.resnet34,
    "resnet50": resnet.resnet50,
}


def classify_images(
    model: str, dataset: Dataset, *, width: int, dtype: DTypeLike = jnp.float32
) -> ImageClassification:
    """Returns the task of a data set.

    Args:
        model: One of `MODELS`.
        dataset: What to classify.
        width: Filters of the first stage.
        dtype: What the model computes in.
    """
    config = MODELS[model](
        dtype=dtype,
        num_classes=dataset.num_classes,
        num_filters=width,
        # A stem for small images keeps their size.
        stem="cifar" if dataset.image_shape[0] <= 64 else "imagenet",
    )
    return ImageClassification(
        name=dataset.name,
        config=config,
        train=dataset.train,
        test=dataset.test,
        metric=ACCURACY,
        image_shape=dataset.image_shape,
    )
