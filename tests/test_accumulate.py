"""`dafjax.accumulate` gives the loss and the gradient of the batch, or an error."""

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import dafjax
from dafjax._contexts import listing_wraps
from tests.helpers import relative_error, temp_nbytes


SIZE = 12
NO_FUNCTION: Any = 3
NO_NUMBER: Any = 2.5


@pytest.fixture(scope="module")
def weights():
    keys = jax.random.split(jax.random.key(0), 3)
    return {
        "in": jax.random.normal(keys[0], (8, 16)),
        "bias": jnp.ones(16),
        "out": jax.random.normal(keys[2], (16, 5)),
    }


@pytest.fixture(scope="module")
def batch():
    keys = jax.random.split(jax.random.key(1), 3)
    return {
        "x": jax.random.normal(keys[0], (SIZE, 8)),
        "y": jax.random.randint(keys[1], (SIZE,), 0, 5),
        "mask": jnp.where(jnp.arange(SIZE) % 5 < 2, jnp.linspace(1, 3, SIZE), 0),
    }


def logits(w, batch):
    return jnp.tanh(batch["x"] @ w["in"] + w["bias"]) @ w["out"]


def cross_entropies(w, batch):
    log_p = jax.nn.log_softmax(logits(w, batch))
    return -log_p[jnp.arange(len(batch["y"])), batch["y"]]


def mean(w, batch):
    return jnp.mean(cross_entropies(w, batch))


def masked_mean(w, batch):
    return jnp.sum(cross_entropies(w, batch) * batch["mask"]) / batch["mask"].sum()


def total(w, batch):
    return jnp.sum(jnp.square(logits(w, batch)))


def scaled_before_the_sum(w, batch):
    return jnp.sum(jnp.square(logits(w, batch)) / len(batch["x"]))


def root_of_mean(w, batch):
    return jnp.sqrt(jnp.mean(jnp.square(logits(w, batch))))


def variance_of_all(w, batch):
    z = logits(w, batch)
    return jnp.mean(z**2) - jnp.mean(z) ** 2


def with_weight_decay(w, batch):
    return mean(w, batch) + 0.1 * sum(jnp.sum(x**2) for x in w.values())


def with_inner_product(w, batch):
    z = logits(w, batch)
    return jnp.sum(jnp.vdot(z[:, 0], z[:, 1])) / len(z)


def flattened_tokens(w, batch):
    z = logits(w, batch)
    pairs = jnp.stack([z, 2 * z], axis=1).reshape(-1, 5)
    labels = jnp.repeat(batch["y"], 2)
    return optax.softmax_cross_entropy_with_integer_labels(pairs, labels).mean()


def in_a_loop(w, batch):
    def step(h, scale):
        return jnp.tanh(h * scale + w["bias"]), h[:, 0]

    h, seen = lax.scan(step, batch["x"] @ w["in"], jnp.arange(1.0, 4.0))
    return jnp.mean(h) + jnp.mean(seen**2)


def per_example(w, batch):
    def of_one(x, y):
        return -jax.nn.log_softmax(jnp.tanh(x @ w["in"]) @ w["out"])[y]

    return jnp.mean(jax.vmap(of_one)(batch["x"], batch["y"]))


@jax.custom_vjp
def clipped_one_by_one(z):
    return z


def _clip_rows(_, g):
    return (g / jnp.maximum(1, jnp.linalg.norm(g, axis=-1, keepdims=True)),)


clipped_one_by_one.defvjp(lambda z: (z, None), _clip_rows)


def with_a_rule_for_each_example(w, batch):
    return jnp.sum(clipped_one_by_one(jnp.square(logits(w, batch))))


def with_an_update_of_features(w, batch):
    z = logits(w, batch)
    changed = lax.dynamic_update_slice(z, jnp.ones((len(z), 1)), (0, 2))
    return jnp.sum(changed.at[jnp.arange(len(z)), batch["y"]].mul(2) ** 2)


@jax.custom_vjp
def straight_through(w):
    return jnp.round(w)


straight_through.defvjp(lambda w: (jnp.round(w), None), lambda _, g: (g,))


@jax.custom_vjp
def product_twice(w, x):
    return jnp.tanh(x @ w) @ w.T


def _backward_twice(saved, g):
    w, x = saved
    h = jnp.tanh(x @ w)
    d = (g @ w) * (1 - h**2)
    return x.T @ d + g.T @ h, d @ w.T


product_twice.defvjp(lambda w, x: (product_twice(w, x), (w, x)), _backward_twice)


@jax.custom_vjp
def shifted(b, x):
    return x + b


shifted.defvjp(lambda b, x: (x + b, None), lambda _, g: (g.sum(0)[None].sum(0), g))


def with_rules_for_weights(w, batch):
    h = product_twice(straight_through(w["in"]), batch["x"])
    return jnp.mean(jnp.square(shifted(w["in"][:, 0], h)))


LOSSES = [
    with_rules_for_weights,
    with_a_rule_for_each_example,
    with_an_update_of_features,
    mean,
    masked_mean,
    total,
    scaled_before_the_sum,
    root_of_mean,
    variance_of_all,
    with_weight_decay,
    with_inner_product,
    flattened_tokens,
    in_a_loop,
    per_example,
]


def assert_close(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    leaves = jax.tree.leaves(found), jax.tree.leaves(expected)
    for x, y in zip(*(map(jnp.asarray, several) for several in leaves), strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("number", [2, SIZE])
def test_microbatches_give_the_loss_of_the_batch(weights, batch, loss, number):
    accumulated = jax.value_and_grad(dafjax.accumulate(loss, number))
    expected = jax.value_and_grad(loss)(weights, batch)
    assert_close(accumulated(weights, batch), expected)


def test_the_mean_of_means_is_another_loss(weights, batch):
    parts = [jax.tree.map(lambda x, n=n: x[n::2], batch) for n in range(2)]
    naive = sum(masked_mean(weights, part) for part in parts) / 2
    assert abs(naive - masked_mean(weights, batch)) > 1e-3


@pytest.mark.parametrize(
    "wrap", [jax.jit, jax.checkpoint, dafjax.remat_compress], ids=lambda f: f.__name__
)
def test_a_wrapped_loss_is_split_inside(weights, batch, wrap):
    accumulated = dafjax.accumulate(wrap(masked_mean), 4)
    found = jax.jit(jax.value_and_grad(accumulated))(weights, batch)
    # Arrays of this size are not compressed.
    assert_close(found, jax.value_and_grad(masked_mean)(weights, batch))


def large_loss(w, x):
    for _ in range(4):
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2)


@pytest.mark.parametrize("layers", ["whole", "each"])
def test_microbatches_are_compressed(layers):
    w, x = jax.random.normal(jax.random.key(0), (64, 64)) / 8, jnp.ones((512, 64))

    def of_layers(w, x):
        layer = dafjax.remat_compress(lambda w, x: jnp.tanh(x @ w), bits=8)
        for _ in range(4):
            x = layer(w, x)
        return jnp.mean(x**2)

    whole = dafjax.remat_compress(large_loss, bits=8)
    loss = whole if layers == "whole" else of_layers
    found = jax.jit(jax.grad(dafjax.accumulate(loss, 2)))(w, x)
    error = relative_error(found, jax.grad(large_loss)(w, x))
    assert 1e-5 < error < 0.05


def test_temp_falls_with_the_microbatch():
    w, x = jnp.ones((64, 64)), jnp.ones((1024, 64))

    def temp(loss):
        return temp_nbytes(jax.jit(jax.grad(loss)).lower(w, x))

    plain, few, many = (
        temp(dafjax.accumulate(large_loss, number)) for number in (1, 4, 16)
    )
    assert few < plain / 3
    assert many < few / 2


def test_auxiliary_results_are_those_of_the_batch(weights, batch):
    def loss(w, batch):
        z = logits(w, batch)
        hits = jnp.mean(z.argmax(-1) == batch["y"])
        return jnp.mean(z**2), {
            "logits": z.T,
            "hits": hits,
            "count": jnp.sum(batch["y"]),
            "norm": jnp.sum(w["in"] ** 2),
            "flat": z.reshape(-1),
            "three": 3,
        }

    step = jax.value_and_grad(dafjax.accumulate(loss, 3), has_aux=True)
    expected = jax.value_and_grad(loss, has_aux=True)(weights, batch)
    (value, aux), gradient = step(weights, batch)
    assert_close(((value, aux), gradient), expected)


def test_only_the_loss_is_differentiated(weights, batch):
    def loss(w, batch):
        return mean(w, batch), jnp.sum(w["in"])

    def of_aux(w):
        return dafjax.accumulate(loss, 3)(w, batch)[1]

    with pytest.raises(NotImplementedError, match="only the first result"):
        jax.grad(of_aux)(weights)


def test_the_gradient_of_the_batch_is_in_its_order(weights, batch):
    def of_x(x, loss):
        return loss(weights, {**batch, "x": x})

    found = jax.grad(of_x)(batch["x"], dafjax.accumulate(root_of_mean, 4))
    assert_close(found, jax.grad(of_x)(batch["x"], root_of_mean))


def test_closed_over_weights_are_differentiated(weights, batch):
    def outer(w, wrap):
        scaled = jax.tree.map(lambda x: 2 * x, w)
        return wrap(lambda unused, batch: mean(scaled, batch))(None, batch)

    found = jax.grad(outer)(weights, lambda f: dafjax.accumulate(f, 3))
    assert_close(found, jax.grad(outer)(weights, lambda f: f))


def test_gradients_in_half_precision_are_added_in_single():
    w = jnp.ones((), jnp.bfloat16)
    x = jnp.full(512, 1.0, jnp.bfloat16)

    def loss(w, x):
        return jnp.sum((w * x).astype(jnp.float32))

    gradient = jax.grad(dafjax.accumulate(loss, 512))(w, x)
    # In bfloat16, 256 + 1 is 256.
    assert gradient.dtype == jnp.bfloat16
    assert gradient == 512


class Dropped(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dropout(0.5, deterministic=False)(nn.Dense(4)(x))


@pytest.mark.parametrize("make", [jax.random.key, jax.random.PRNGKey])
def test_each_microbatch_draws_other_numbers(make):
    module, x = Dropped(), jnp.ones((SIZE, 3))
    params = module.init({"params": make(0), "dropout": make(1)}, x)

    def loss(params, x, key):
        z: Any = module.apply(params, x, rngs={"dropout": key})
        return jnp.sum(z), z

    _, dropped = dafjax.accumulate(loss, SIZE)(params, x, make(2))
    masks = np.unique(np.asarray(dropped) != 0, axis=0)
    # 12 draws of 4 bits: one mask for all microbatches would give one row.
    assert len(masks) > 4


def test_a_key_for_the_batch_and_for_examples_raises():
    def loss(w, x, key):
        scale = 1 + jax.random.uniform(key)
        return jnp.mean(w * x * jax.random.normal(key, x.shape)) * scale

    with pytest.raises(ValueError, match="pass two keys"):
        dafjax.accumulate(loss, 2)(1.0, jnp.ones(4), jax.random.key(0))


def test_a_key_made_inside_raises():
    def loss(w, x):
        return jnp.sum(w * x * jax.random.normal(jax.random.key(0), x.shape))

    with pytest.raises(ValueError, match="a key that is no argument"):
        dafjax.accumulate(loss, 2)(1.0, jnp.ones(4))


def test_the_number_of_tokens_takes_no_second_forward_pass(weights, batch):
    step = jax.value_and_grad(dafjax.accumulate(masked_mean, 2))
    closed = jax.make_jaxpr(step)(weights, batch)
    loops = [e for e in closed.jaxpr.eqns if e.primitive.name == "scan"]
    products = [str(e.params["jaxpr"]).count("dot_general") for e in loops]
    assert products[0] == 0
    assert products[-1] > 0


def batch_norm(w, batch):
    z = logits(w, batch)
    return jnp.mean(((z - z.mean(0)) / z.std(0)) ** 3)


def contrastive(w, batch):
    z = logits(w, batch)
    return jnp.mean(jax.nn.logsumexp(z @ z.T, axis=1))


def some_examples(w, batch):
    return jnp.mean(logits(w, batch)[:6])


def every_other_example(w, batch):
    return jnp.mean(logits(w, batch)[::2])


def neighbours(w, batch):
    z = logits(w, batch)
    return jnp.mean(z * z[::-1])


def running_sum(w, batch):
    return jnp.mean(jnp.cumsum(logits(w, batch), axis=0) ** 2)


def worst_example(w, batch):
    return jnp.max(cross_entropies(w, batch))


def sorted_examples(w, batch):
    return jnp.sum(jnp.sort(logits(w, batch), axis=0) * jnp.ones(5))


def weighted_by_place(w, batch):
    places = jnp.arange(len(batch["x"])).astype(jnp.float32)
    return jnp.sum(cross_entropies(w, batch) * places)


def first_valid_examples(w, batch):
    valid = jnp.arange(len(batch["x"])) < 7
    return jnp.sum(jnp.where(valid, cross_entropies(w, batch), 0))


def wrong_layout(w, batch):
    z = logits(w, batch)
    return jnp.sum(z.reshape(5, -1) * z.T)


def over_examples(w, batch):
    def step(h, x):
        return jnp.tanh(h + x @ w["in"]), None

    return jnp.sum(lax.scan(step, jnp.zeros(16), batch["x"])[0])


def until_all_are_small(w, batch):
    def is_large(z):
        return jnp.any(jnp.abs(z) > 1)

    return jnp.sum(lax.while_loop(is_large, lambda z: z / 2, logits(w, batch)))


def shuffled(w, batch):
    z = logits(w, batch)
    return jnp.sum(z * z[batch["y"]])


def rolled(w, batch):
    z = logits(w, batch)
    places = jnp.arange(len(z))
    return jnp.sum(z[(places + 1) % len(z)] * z)


def reversed_by_index(w, batch):
    z = logits(w, batch)
    return jnp.sum(z[len(z) - 1 - jnp.arange(len(z))] * z)


def halved_places(w, batch):
    z = logits(w, batch)
    return jnp.sum(z[jnp.arange(len(z)) // 2] * z)


def of_own_place(w, batch):
    places = jnp.arange(len(batch["x"]))
    wide = batch["x"] @ jnp.tile(w["in"], (1, 2))
    return jnp.sum(wide[places, places])


def first_example_replaced(w, batch):
    z = logits(w, batch)
    return jnp.sum(lax.dynamic_update_slice(z, jnp.ones((1, 5)), (0, 0)) ** 2)


def to_the_power_of_their_number(w, batch):
    return jnp.mean(lax.integer_pow(logits(w, batch), len(batch["x"])))


def weights_of_the_last(w, batch):
    return mean(w, batch) * w["in"].reshape(-1)[len(batch["x"]) - 1]


@jax.custom_vjp
def clipped_together(z):
    return z


def _clip(_, g):
    return (g / jnp.maximum(1, jnp.linalg.norm(g)),)


clipped_together.defvjp(lambda z: (z, None), _clip)


@jax.custom_vjp
def divided_in_the_backward_pass(z):
    return z


divided_in_the_backward_pass.defvjp(lambda z: (z, None), lambda _, g: (g / len(g),))


def with_clipped_gradients(w, batch):
    return jnp.sum(clipped_together(logits(w, batch)))


def with_divided_gradients(w, batch):
    return jnp.sum(divided_in_the_backward_pass(logits(w, batch)))


def loop_of_rows_and_a_count(w, batch):
    def step(n, carry):
        z, count = carry
        return jnp.sin(z), count + n

    z, count = lax.fori_loop(0, 3, step, (logits(w, batch), jnp.zeros((), int)))
    return jnp.mean(z) * count.astype(jnp.float32)


def branch_on_rows_and_a_sum(w, batch):
    z = logits(w, batch)
    return lax.cond(
        w["in"][0, 0] > 0, lambda z, s: jnp.sum(z * s), lambda z, s: s, z, jnp.mean(z)
    )


def weights_of_a_clipped_gradient(w, batch):
    return mean({**w, "in": clipped_together(w["in"])}, batch)


@jax.custom_vjp
def decayed(w):
    return w


decayed.defvjp(lambda w: (w, w), lambda w, g: (g + 0.1 * w,))


def with_decay_in_the_backward_pass(w, batch):
    return mean({**w, "in": decayed(w["in"])}, batch)


def squeezed_for_one_example(w, batch):
    z = logits(w, batch)
    return jnp.sum(jnp.squeeze(z[:, None]).mean(0) ** 2)


def sum_of_places(w, batch):
    z = logits(w, batch)
    places = jnp.broadcast_to(jnp.arange(len(z))[:, None], (len(z), 3)).sum(1)
    return jnp.sum(z[places // 3])


MIXING = [
    weights_of_a_clipped_gradient,
    with_decay_in_the_backward_pass,
    sum_of_places,
    rolled,
    reversed_by_index,
    halved_places,
    of_own_place,
    first_example_replaced,
    to_the_power_of_their_number,
    weights_of_the_last,
    with_clipped_gradients,
    with_divided_gradients,
    loop_of_rows_and_a_count,
    branch_on_rows_and_a_sum,
    batch_norm,
    contrastive,
    some_examples,
    every_other_example,
    neighbours,
    running_sum,
    worst_example,
    sorted_examples,
    weighted_by_place,
    first_valid_examples,
    wrong_layout,
    over_examples,
    until_all_are_small,
    shuffled,
]


@pytest.mark.parametrize("wrap", [lambda f: f, dafjax.remat_compress])
@pytest.mark.parametrize("loss", MIXING)
def test_a_loss_that_mixes_examples_raises(weights, batch, loss, wrap):
    with pytest.raises(ValueError, match="cannot be computed in microbatches"):
        dafjax.accumulate(wrap(loss), 2)(weights, batch)


def test_a_squeezed_example_raises(weights, batch):
    with pytest.raises(ValueError, match="cannot be computed in microbatches"):
        dafjax.accumulate(squeezed_for_one_example, SIZE)(weights, batch)


def test_the_error_names_the_line(weights, batch):
    with pytest.raises(
        ValueError, match=r"`sub` at .*test_accumulate.py:\d+.*batch_norm"
    ):
        dafjax.accumulate(batch_norm, 2)(weights, batch)


def test_a_function_of_this_number_of_examples_alone_raises(weights, batch):
    of_each = jnp.ones(SIZE)

    def loss(w, batch):
        return jnp.sum(cross_entropies(w, batch) * of_each)

    with pytest.raises(ValueError, match="for 6 examples it raises TypeError"):
        dafjax.accumulate(loss, 2)(weights, batch)


def test_the_error_names_a_function_with_bound_arguments(weights, batch):
    def loss(w, batch, module):
        del module
        return batch_norm(w, batch)

    bound = functools.partial(loss, module="with a long text")
    with pytest.raises(ValueError, match="`loss` cannot be computed"):
        dafjax.accumulate(bound, 2)(weights, batch)


def test_a_program_that_depends_on_the_size_raises(weights, batch):
    def loss(w, batch):
        z = logits(w, batch)
        return jnp.mean(jnp.sin(z) if len(z) > 6 else z)

    with pytest.raises(ValueError, match=r"the whole batch needs .*sin"):
        dafjax.accumulate(loss, 2)(weights, batch)


def squared(w, x):
    return jnp.mean((x @ w) ** 2)


def swapped(x, w):
    return squared(w, x.T)


def of_a_tree(both):
    return squared(**both)


def of_pair(w, batch):
    return jnp.mean((batch["x"] @ w) ** batch["power"]) * batch["scale"]


@pytest.mark.parametrize(
    ("loss", "in_axes", "call"),
    [
        (squared, None, lambda f, w, x: f(w, x)),
        (squared, (None, 0), lambda f, w, x: f(w, x)),
        (squared, None, lambda f, w, x: f(w, x=x)),
        (swapped, (1, None), lambda f, w, x: f(x.T, w)),
        (
            of_pair,
            None,
            lambda f, w, x: f(w, {"x": x, "power": 2, "scale": jnp.ones(())}),
        ),
        (of_a_tree, ({"w": None, "x": -2},), lambda f, w, x: f({"w": w, "x": x})),
    ],
)
def test_arguments_that_hold_examples(loss, in_axes, call):
    w, x = jnp.arange(6.0).reshape(3, 2), jnp.arange(24.0).reshape(8, 3)
    found = call(dafjax.accumulate(loss, 4, in_axes=in_axes), w, x)
    np.testing.assert_allclose(found, squared(w, x), rtol=1e-6)


def test_arguments_that_are_no_arrays_reach_the_function():
    def loss(w, x, power, *, is_negative):
        assert isinstance(power, int)
        return jnp.mean((x @ w) ** power) * (-1 if is_negative else 1)

    w, x = jnp.ones(3), jnp.ones((8, 3))
    found = dafjax.accumulate(loss, 2)(w, x, 3, is_negative=True)
    assert found == -27


def test_auto_is_the_whole_batch_outside_of_jit(weights, batch):
    found = jax.make_jaxpr(dafjax.accumulate(mean))(weights, batch)
    assert str(found) == str(jax.make_jaxpr(mean)(weights, batch))


def test_vmap_of_an_accumulated_gradient(weights, batch):
    several = jax.tree.map(lambda x: jnp.stack([x, 2 * x]), weights)
    over = functools.partial(jax.vmap, in_axes=(0, None))
    found = over(jax.grad(dafjax.accumulate(masked_mean, 3)))(several, batch)
    assert_close(found, over(jax.grad(masked_mean))(several, batch))


def test_prints_once_for_each_microbatch(batch, capfd):
    def loss(w, batch):
        jax.debug.print("weights {}", w)
        jax.debug.print("labels {}", batch["y"][0])
        return jnp.mean(batch["x"] * w)

    jax.grad(dafjax.accumulate(loss, 3))(1.0, batch)
    jax.effects_barrier()
    out = capfd.readouterr().out
    assert out.count("labels") == 3
    assert out.count("weights") == 1


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda: dafjax.accumulate(NO_FUNCTION), TypeError, "given a function"),
        (lambda: dafjax.accumulate(mean, NO_NUMBER), TypeError, "an integer"),
        (lambda: dafjax.accumulate(mean, True), TypeError, "an integer"),
        (lambda: dafjax.accumulate(mean, 0), ValueError, "at least 1"),
    ],
)
def test_wrong_options_raise(call, error, match):
    with pytest.raises(error, match=match):
        call()


@pytest.mark.parametrize(
    ("arguments", "options", "error", "match"),
    [
        ((1.0, jnp.ones((8, 3))), {"microbatches": 3}, ValueError, "1, 2, 4, 8"),
        ((1.0, jnp.ones(()), jnp.ones(())), {}, ValueError, "there are none"),
        ((1.0, jnp.ones(4), jnp.ones(6)), {}, ValueError, "one number of examples"),
        ((1.0, jnp.ones(4)), {"in_axes": (0,)}, ValueError, "one entry for each"),
        ((1.0, jnp.ones(4)), {"in_axes": (None, 1)}, ValueError, "names the axis 1"),
        ((1.0, jnp.ones(4)), {"in_axes": (None, "x")}, TypeError, "hold integers"),
        ((1.0, [jnp.ones(4)]), {"in_axes": (None, (0, 0))}, ValueError, "does not fit"),
    ],
)
def test_wrong_arguments_raise(arguments, options, error, match):
    def loss(w, *xs):
        return sum(jnp.sum(w * x) for x in jax.tree.leaves(xs))

    call: Callable[..., Any] = dafjax.accumulate(loss, **{"microbatches": 2, **options})
    with pytest.raises(error, match=match):
        call(*arguments)


def test_a_loss_that_is_no_scalar_raises(weights, batch):
    with pytest.raises(TypeError, match="must return a scalar"):
        dafjax.accumulate(logits, 2)(weights, batch)


def test_of_nested_wrapped_functions_the_outermost_is_split():
    @dafjax.remat_compress
    def outer(x):
        return dafjax.remat_compress(jnp.sum)(x) + jnp.sum(x)

    with listing_wraps(opens=False) as wraps:
        jax.make_jaxpr(outer)(jnp.ones((8, 8)))
    assert len(wraps.of_scalars) == 1
