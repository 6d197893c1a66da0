"""The residual network: its size, its shapes, and that it learns."""

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from models import resnet, step
from models.data import ArraySplit
from models.tasks.images import ImageClassification
from models.tasks.task import ACCURACY
from tests.helpers import relative_error


TINY = resnet.resnet18(num_filters=8)
IMAGE_SHAPE = (32, 32, 3)


def num_parameters(config: resnet.ResNetConfig) -> int:
    images = jax.ShapeDtypeStruct((1, *IMAGE_SHAPE), jnp.float32)
    model = resnet.ResNet(config)
    variables = jax.eval_shape(
        lambda key, x: model.init(key, x, train=True), jax.random.key(0), images
    )
    return sum(x.size for x in jax.tree.leaves(variables["params"]))


def test_resnet18_has_the_parameters_of_the_paper_with_a_small_stem():
    # Stem 1 856, stages 147 968 + 525 568 + 2 099 712 + 8 393 728, head 5 130.
    assert num_parameters(resnet.resnet18()) == 11_173_962


def test_resnet34_has_the_parameters_of_the_paper_with_a_small_stem():
    assert num_parameters(resnet.resnet34()) == 21_282_122


def test_the_imagenet_resnet18_has_the_published_number_of_parameters():
    config = resnet.resnet18(num_classes=1000, stem="imagenet")
    assert num_parameters(config) == 11_689_512


def test_resnet50_has_the_published_number_of_parameters():
    assert num_parameters(resnet.resnet50(num_classes=1000, stem="imagenet")) == (
        25_557_032
    )
    # The stem is 7 680 less, the head 990 * 2 049.
    assert num_parameters(resnet.resnet50()) == 23_520_842


@pytest.mark.parametrize("make", [resnet.resnet18, resnet.resnet50])
@pytest.mark.parametrize(("stem", "side"), [("cifar", 32), ("imagenet", 64)])
def test_the_logits_have_one_row_per_image_and_one_column_per_class(stem, side, make):
    config = make(num_filters=8, num_classes=7, stem=stem)
    images = jax.ShapeDtypeStruct((3, side, side, 3), jnp.float32)
    logits, _ = jax.eval_shape(
        lambda key, x: resnet.ResNet(config).init_with_output(key, x, train=True),
        jax.random.key(0),
        images,
    )
    assert logits.shape == (3, 7)
    assert logits.dtype == jnp.float32


@pytest.mark.usefixtures("standard_promotion")
def test_bfloat16_is_close_and_keeps_weights_and_logits_in_float32(key):
    config = resnet.resnet18(num_filters=8)
    images = jax.random.normal(key, (4, 16, 16, 3))

    def init_and_apply(config):
        model = resnet.ResNet(config)
        init = functools.partial(model.init, train=True)
        variables = jax.jit(init)(key, images)
        apply = functools.partial(model.apply, train=True, mutable=["batch_stats"])
        return variables, jax.jit(apply)(variables, images)

    variables, (logits, updated) = init_and_apply(config)
    half_variables, (half_logits, half_updated) = init_and_apply(
        dataclasses.replace(config, dtype=jnp.bfloat16)
    )
    jax.tree.map(np.testing.assert_array_equal, variables, half_variables)
    assert {x.dtype for x in jax.tree.leaves(half_updated)} == {jnp.dtype("float32")}
    assert half_logits.dtype == jnp.float32
    assert 1e-4 < relative_error(half_logits, logits) < 0.05
    errors = jax.tree.leaves(jax.tree.map(relative_error, half_updated, updated))
    assert max(errors) < 0.05


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_filters": 0}, "`num_filters` must be at least 1, but got 0"),
        ({"num_classes": 0}, "`num_classes` must be at least 1, but got 0"),
        ({"stem": "large"}, "`stem` must be 'cifar' or 'imagenet', but got 'large'"),
        ({"block": "wide"}, "`block` must be 'basic' or 'bottleneck', but got 'wide'"),
        ({"stage_sizes": ()}, "`stage_sizes` must hold at least one block"),
    ],
)
def test_a_bad_shape_is_an_error_that_names_it(options, message):
    with pytest.raises(ValueError, match=message):
        resnet.resnet18(**options)


def make_task(rng, config, *, count, loc=0.0):
    split = ArraySplit(
        images=rng.normal(loc=loc, size=(count, *IMAGE_SHAPE)),
        labels=rng.integers(10, size=count),
        mean=np.zeros(3, np.float32),
        std=np.ones(3, np.float32),
    )
    return ImageClassification(
        name="noise",
        config=config,
        train=split,
        test=split,
        metric=ACCURACY,
        image_shape=IMAGE_SHAPE,
    )


def begin(task, optimizer):
    model = task.make_model(resnet.no_wrapping)
    variables = jax.jit(functools.partial(task.init, model))(jax.random.key(0))
    return model, *step.begin(task, variables, optimizer)


@pytest.mark.slow
def test_the_loss_falls_in_ten_steps(rng):
    task = make_task(rng, TINY, count=16)
    optimizer = optax.sgd(0.1)
    model, state, frozen = begin(task, optimizer)
    assert (set(state.mutable), frozen) == ({"batch_stats"}, {})
    train_step = jax.jit(step.make_train_step(step.make_loss(task, model), optimizer))
    batch = task.train.take(np.arange(16))
    losses = []
    for _ in range(10):
        state, metrics = train_step(state, frozen, jax.random.key(1), *batch)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < 0.85 * losses[0]
    assert int(state.step) == 10


@pytest.mark.slow
def test_training_moves_the_running_statistics(rng):
    config = resnet.ResNetConfig(stage_sizes=(1,), num_filters=8)
    task = make_task(rng, config, count=4, loc=3.0)
    model, state, _ = begin(task, optax.sgd(0.1))
    loss = jax.jit(step.make_loss(task, model))
    batch = task.train.take(np.arange(4))
    _, (after, _) = loss(state.trained, state.mutable, jax.random.key(1), *batch)
    before, after = (
        x["batch_stats"]["stem_norm"]["mean"] for x in (state.mutable, after)
    )
    assert not np.allclose(after, before)


def test_wrapping_blocks_leaves_the_initial_weights_as_they_are(rng):
    config = resnet.ResNetConfig(stage_sizes=(1, 1), num_filters=8)
    task = make_task(rng, config, count=1)
    plain, wrapped = (
        jax.jit(functools.partial(task.init, task.make_model(wrap)))(jax.random.key(3))
        for wrap in (resnet.no_wrapping, nn.remat)
    )
    jax.tree.map(np.testing.assert_array_equal, plain, wrapped)
