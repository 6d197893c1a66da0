"""The classifier of sequences: its size, masks, dropout, adapters, and its memory."""

import collections
import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dafjax
from dafjax.policies import CompressExpensive, SaveAll
from models import lora, losses, roberta
from tests.helpers import gradient_nbytes, relative_error, slow


pytestmark = pytest.mark.usefixtures("standard_promotion")


TINY = roberta.RobertaConfig(
    num_layers=2, width=64, num_heads=4, vocabulary=50, context=32, lora_rank=4
)
LAYOUTS = [
    slow(TINY, id="loop"),
    pytest.param(dataclasses.replace(TINY, scan_layers=True), id="scan"),
]
every_layout = pytest.mark.parametrize("config", LAYOUTS)


@pytest.fixture
def tokens(key):
    """Sequences of 10 to 24 tokens; what the label depends on is the second."""
    drawn = jax.random.randint(key, (16, 24), 3, TINY.vocabulary)
    lengths = jnp.linspace(10, 24, 16).astype(int)
    tokens = jnp.where(jnp.arange(24) < lengths[:, None], drawn, TINY.padding)
    return tokens.at[:, 0].set(0)


@functools.partial(jax.jit, static_argnums=0)
def init(config, key, tokens):
    return roberta.Roberta(config).init(key, tokens, train=False)


@functools.partial(jax.jit, static_argnums=0)
def apply(config, variables, tokens, mask=None):
    return roberta.Roberta(config).apply(variables, tokens, mask, train=False)


def apply_in_training(config, variables, tokens, key, **options):
    """Applies the model with dropout; compiled anew, as a test may patch dropout."""
    model = roberta.Roberta(config)
    return jax.jit(functools.partial(model.apply, train=True, **options))(
        variables, tokens, rngs={"dropout": key}
    )


def make_loss(config):
    def loss(trained, frozen, tokens, key):
        logits = roberta.Roberta(config).apply(
            lora.merge(trained, frozen), tokens, train=True, rngs={"dropout": key}
        )
        labels = (tokens[:, 1] > 25).astype(jnp.int32)
        return losses.sequence_loss(logits, labels)

    return loss


def example(config, key, tokens):
    """Variables, divided; the adapters are not where they start."""
    variables = init(config, key, tokens)
    variables["lora"] = jax.tree.map(
        lambda x: x + 0.02 * jax.random.normal(key, x.shape), variables["lora"]
    )
    return lora.split(variables, config.trained)


def num_variables(config):
    tokens = jax.ShapeDtypeStruct((1, 8), jnp.int32)
    init = functools.partial(roberta.Roberta(config).init, train=False)
    variables = jax.eval_shape(init, jax.random.key(0), tokens)
    return {
        name: sum(x.size for x in jax.tree.leaves(part))
        for name, part in variables.items()
    }


@pytest.mark.parametrize("scan_layers", [False, True])
def test_both_sizes_have_the_published_number_of_parameters(scan_layers):
    base = roberta.roberta_base_lora(scan_layers=scan_layers)
    large = roberta.roberta_large_lora(scan_layers=scan_layers)
    # `RobertaForSequenceClassification` with two labels; and of Hu et al., table 2:
    # 0.3 and 0.8 million.
    assert num_variables(base) == {"params": 124_647_170, "lora": 294_912}
    assert num_variables(large) == {"params": 355_361_794, "lora": 786_432}


@every_layout
def test_what_is_beyond_a_sequence_changes_nothing(config, key, tokens):
    variables = init(config, key, tokens)
    logits = apply(config, variables, tokens)
    longer = jnp.pad(tokens, ((0, 0), (0, 6)), constant_values=config.padding)
    np.testing.assert_allclose(apply(config, variables, longer), logits, atol=1e-5)
    mask = tokens != config.padding
    other = jnp.where(mask, tokens, 7)
    np.testing.assert_allclose(apply(config, variables, other, mask), logits, atol=1e-5)
    assert not np.allclose(apply(config, variables, other), logits, atol=1e-5)


@every_layout
def test_in_training_every_key_drops_something_else(config, key, tokens):
    variables = init(config, key, tokens)
    model = roberta.Roberta(config)

    @jax.jit
    def logits(key):
        return model.apply(variables, tokens, train=True, rngs={"dropout": key})

    first, again, other = (logits(jax.random.key(n)) for n in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert relative_error(first, other) > 0.01


@pytest.mark.parametrize("same_key", [False, True], ids=["model", "control"])
def test_layers_of_a_scan_drop_different_values(key, same_key, monkeypatch):
    """Each layer adds one to what it does not drop, and all else is zero.

    After two layers channels have four values if the layers drop different ones, two
    if they drop the same.
    """
    if same_key:
        fixed = functools.partial(nn.Dropout.__call__, rng=jax.random.key(7))
        monkeypatch.setattr(nn.Dropout, "__call__", lambda *args: fixed(*args))
    config = dataclasses.replace(TINY, scan_layers=True, dropout=0.5)
    tokens = jnp.arange(8).reshape(1, 8) + 3
    zeros = jax.tree.map(jnp.zeros_like, init(config, key, tokens))
    blocks = zeros["params"]["blocks"]
    blocks["attention_out"]["bias"] += 1
    for name in ("norm1", "norm2"):
        blocks[name]["scale"] += 1
    hidden = apply_in_training(config, zeros, tokens, key, return_hidden=True)
    values = [len(np.unique(np.round(row, 3))) for row in np.asarray(hidden[0])]
    assert max(values) == (2 if same_key else 4)


def test_attention_with_dropout_is_attention_without_where_nothing_drops(key, tokens):
    """The two implementations agree: a rate that is tiny drops nothing."""
    variables = init(TINY, key, tokens)
    drops_nothing = dataclasses.replace(TINY, dropout=1e-9)
    got = apply_in_training(drops_nothing, variables, tokens, key)
    np.testing.assert_allclose(got, apply(TINY, variables, tokens), atol=1e-5)


@every_layout
def test_bfloat16_is_close_and_keeps_weights_and_logits_in_float32(config, key, tokens):
    variables = init(config, key, tokens)
    half = dataclasses.replace(config, dtype=jnp.bfloat16)
    jax.tree.map(np.testing.assert_array_equal, variables, init(half, key, tokens))
    logits = apply(half, variables, tokens)
    assert logits.dtype == jnp.float32
    assert 1e-4 < relative_error(logits, apply(config, variables, tokens)) < 0.05
    trained, frozen = lora.split(variables, config.trained)
    gradient = jax.eval_shape(jax.grad(make_loss(half)), trained, frozen, tokens, key)
    assert {x.dtype for x in jax.tree.leaves(gradient)} == {jnp.dtype("float32")}


@every_layout
def test_adapters_do_what_their_product_added_to_the_weights_does(config, key, tokens):
    trained, frozen = example(config, key, tokens)
    variables = lora.merge(trained, frozen)
    merged = jax.tree.map(jnp.copy, variables["params"])
    for name, block in variables["lora"].items():
        assert set(block) == {"query_lora", "value_lora"}
        for layer, pair in block.items():
            change = config.lora_alpha / config.lora_rank * (pair["a"] @ pair["b"])
            merged[name][layer.removesuffix("_lora")]["kernel"] += change
    base = dataclasses.replace(config, lora_rank=0)
    got = apply(config, variables, tokens)
    plain = apply(base, {"params": variables["params"]}, tokens)
    assert relative_error(plain, got) > 1e-3
    np.testing.assert_allclose(
        got, apply(base, {"params": merged}, tokens), rtol=1e-4, atol=1e-5
    )


@every_layout
def test_the_wrapped_gradient_is_of_adapters_and_head_and_close(config, key, tokens):
    trained, frozen = example(config, key, tokens)
    assert set(trained) == {"lora", "params"}
    assert set(trained["params"]) == {"head"}
    wrapped = dafjax.remat_compress(
        make_loss(config), bits=8, policy=CompressExpensive(min_nbytes=0)
    )
    arguments = (trained, frozen, tokens, key)
    value, got = jax.jit(jax.value_and_grad(wrapped))(*arguments)
    want_value, want = jax.jit(jax.value_and_grad(make_loss(config)))(*arguments)
    assert jax.tree.structure(got) == jax.tree.structure(trained)
    np.testing.assert_allclose(value, want_value, rtol=1e-5)
    errors = jax.tree.leaves(jax.tree.map(relative_error, got, want))
    assert max(errors) < 0.05
    assert max(errors) > 1e-4


def test_inputs_of_frozen_layers_are_not_residuals_at_all(key, tokens):
    """Even a policy that saves all residuals saves nothing for them."""

    def saved(lora_rank):
        config = dataclasses.replace(TINY, lora_rank=lora_rank, dropout=0.0)
        trained, frozen = lora.split(init(config, key, tokens), config.trained)
        loss = dafjax.remat_compress(
            lambda trained: make_loss(config)(trained, frozen, tokens, key),
            policy=SaveAll(),
        )
        return collections.Counter(
            (item.name.rpartition("block2")[2], item.shape)
            for item in dafjax.saved_residuals(loss, trained).kept
            if "block2" in item.name and item.dtype == jnp.float32
        )

    everything, of_adapters = saved(0), saved(4)
    shapes = [shape for _, shape in (everything - of_adapters).elements()]
    # The inputs of mlp_out and of attention_out.
    assert (16, 24, 256) in shapes
    added = [shape for _, shape in (of_adapters - everything).elements()]
    assert added == 2 * [(16, 24, 4)]


@pytest.mark.slow
def test_training_lowers_the_loss_of_the_wrapped_model(key, tokens):
    config = dataclasses.replace(TINY, lora_rank=0)
    start, frozen = lora.split(init(config, key, tokens), config.trained)
    optimizer = optax.adam(0.003)

    def fall(wrap):
        @jax.jit
        def step(trained, state, key):
            loss = wrap(make_loss(config))
            value, gradient = jax.value_and_grad(loss)(trained, frozen, tokens, key)
            updates, state = optimizer.update(gradient, state)
            return optax.apply_updates(trained, updates), state, value

        trained, state, values = start, optimizer.init(start), []
        for number in range(20):
            trained, state, value = step(trained, state, jax.random.key(number))
            values.append(float(value))
        return values[0] - values[-1]

    plain = fall(lambda loss: loss)
    assert plain > 0.2
    assert fall(dafjax.remat_compress) > 0.5 * plain


@pytest.mark.parametrize("scan_layers", [slow(False), True], ids=["loop", "scan"])
def test_the_gradient_of_adapters_needs_a_quarter_of_the_memory(scan_layers):
    """An eighth to a twelfth in full size: `benchmarks/results/roberta_memory.json`."""
    config = roberta.RobertaConfig(
        num_layers=4,
        width=128,
        num_heads=4,
        vocabulary=1000,
        lora_rank=8,
        scan_layers=scan_layers,
    )
    tokens = jax.ShapeDtypeStruct((8, 128), jnp.int32)
    variables = jax.eval_shape(
        functools.partial(roberta.Roberta(config).init, train=False),
        jax.random.key(0),
        tokens,
    )
    plain, compressed = (
        gradient_nbytes(
            loss, *lora.split(variables, config.trained), tokens, jax.random.key(0)
        )
        for loss in (make_loss(config), dafjax.remat_compress(make_loss(config)))
    )
    assert compressed < plain / 4


def test_one_label_is_a_regression(key, tokens):
    config = dataclasses.replace(TINY, num_labels=1)
    logits = apply(config, init(config, key, tokens), tokens)
    assert logits.shape == (16, 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"width": 0}, "`width` must be at least 1, but got 0"),
        ({"num_heads": 5}, "must be a multiple of `num_heads`, but got 768 and 5"),
        ({"dropout": 1.0}, "`dropout` must be from 0 to below 1, but got 1.0"),
        ({"lora_rank": -1}, "`lora_rank` must not be negative, but got -1"),
    ],
)
def test_a_bad_shape_is_an_error_that_names_it(options, message):
    with pytest.raises(ValueError, match=message):
        roberta.roberta_base(**options)


def test_a_bad_input_is_an_error_that_names_it(key, tokens):
    variables = init(TINY, key, tokens)
    with pytest.raises(ValueError, match=r"at most `context` \(32\).* but got 33"):
        apply(TINY, variables, jnp.zeros((1, 33), int))
    with pytest.raises(ValueError, match=r"`mask` must have the shape .*\(16, 1\)"):
        apply(TINY, variables, tokens, jnp.ones((16, 1), bool))
