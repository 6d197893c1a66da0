"""The residual network: its size, its shapes, and that it learns."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from models import resnet, step


TINY = resnet.resnet18(num_filters=8)
IMAGE_SHAPE = (32, 32, 3)


def one_block():
    model = resnet.ResNet(resnet.ResNetConfig(stage_sizes=(1,), num_filters=8))
    optimizer = optax.sgd(0.1)
    return model, step.create_state(model, optimizer, image_shape=IMAGE_SHAPE, seed=0)


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


def test_the_loss_falls_in_ten_steps(rng):
    images = rng.normal(size=(16, *IMAGE_SHAPE)).astype(np.float32)
    labels = rng.integers(10, size=16).astype(np.int32)
    model = resnet.ResNet(TINY)
    optimizer = optax.sgd(0.1)
    state = step.create_state(model, optimizer, image_shape=IMAGE_SHAPE, seed=0)
    train_step = jax.jit(step.make_train_step(step.make_loss(model), optimizer))
    losses = []
    for _ in range(10):
        state, metrics = train_step(state, images, labels)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < 0.85 * losses[0]
    assert int(state.step) == 10


def test_training_moves_the_running_statistics(rng):
    images = rng.normal(loc=3.0, size=(4, *IMAGE_SHAPE)).astype(np.float32)
    labels = np.zeros(4, np.int32)
    model, state = one_block()
    loss = jax.jit(step.make_loss(model))
    _, (after, _) = loss(state.params, state.batch_stats, images, labels)
    before = state.batch_stats["stem_norm"]["mean"]
    assert not np.allclose(after["stem_norm"]["mean"], before)


def test_wrapping_blocks_leaves_the_initial_weights_as_they_are():
    config = resnet.ResNetConfig(stage_sizes=(1, 1), num_filters=8)
    states = [
        step.create_state(
            resnet.ResNet(config, wrap_block=wrap),
            optax.sgd(0.1),
            image_shape=IMAGE_SHAPE,
            seed=3,
        )
        for wrap in (resnet.no_wrapping, nn.remat)
    ]
    jax.tree.map(np.testing.assert_array_equal, states[0].params, states[1].params)


def test_padding_counts_nothing_in_an_evaluation(rng):
    images = rng.normal(size=(4, *IMAGE_SHAPE)).astype(np.float32)
    labels = np.arange(4, dtype=np.int32)
    model, state = one_block()
    evaluate = jax.jit(step.make_eval_step(model))
    arguments = (state.params, state.batch_stats)
    weights = np.asarray([1, 1, 1, 0], np.float32)
    three = evaluate(*arguments, images[:3], labels[:3], weights[:3])
    padded = evaluate(*arguments, images, labels, weights)
    np.testing.assert_allclose(padded["loss"], three["loss"], rtol=1e-5)
    assert padded["num_correct"] == three["num_correct"]
