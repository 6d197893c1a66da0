"""The language model: its size, that it learns, and its adapters."""

import collections
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dafjax
from dafjax.policies import CompressExpensive, SaveAll
from models import gpt2, lora
from tests.helpers import gradient_nbytes, relative_error, slow


pytestmark = pytest.mark.usefixtures("standard_promotion")


TINY = gpt2.GPT2Config(
    num_layers=2, width=64, num_heads=4, vocabulary=50, context=32, lora_rank=4
)
LAYOUTS = [
    pytest.param(TINY, id="loop"),
    slow(dataclasses.replace(TINY, scan_layers=True), id="scan"),
]
every_layout = pytest.mark.parametrize("config", LAYOUTS)


@pytest.fixture
def tokens(key):
    # Each token follows from the one before, so that there is something to learn.
    first = jax.random.randint(key, (8, 1), 0, TINY.vocabulary)
    return (first + 3 * jnp.arange(24)) % TINY.vocabulary


@functools.partial(jax.jit, static_argnums=0)
def init(config, key, tokens):
    return gpt2.GPT2(config).init(key, tokens)


@functools.partial(jax.jit, static_argnums=0)
def apply(config, variables, tokens):
    return gpt2.GPT2(config).apply(variables, tokens)


def num_variables(config, collection="params"):
    tokens = jax.ShapeDtypeStruct((1, 8), jnp.int32)
    init = gpt2.GPT2(config).init
    variables = jax.eval_shape(init, jax.random.key(0), tokens)
    return sum(x.size for x in jax.tree.leaves(variables[collection]))


def example(config, key, tokens):
    """Variables, in two collections; the adapters are not where they start."""
    variables = init(config, key, tokens)
    adapters = jax.tree.map(
        lambda x: x + 0.02 * jax.random.normal(key, x.shape), variables["lora"]
    )
    return adapters, variables["params"]


def make_loss(config):
    def loss(adapters, frozen, tokens):
        variables = {"params": frozen, "lora": adapters}
        logits = gpt2.GPT2(config).apply(variables, tokens)
        return jnp.mean(
            optax.softmax_cross_entropy_with_integer_labels(
                logits[:, :-1], tokens[:, 1:]
            )
        )

    return loss


def test_all_sizes_have_the_published_number_of_parameters():
    assert num_variables(gpt2.gpt2_small()) == 124_439_808
    assert num_variables(gpt2.gpt2_medium()) == 354_823_168
    assert num_variables(gpt2.gpt2_large()) == 774_030_080
    assert num_variables(gpt2.gpt2_xl(scan_layers=True)) == 1_557_611_200


@every_layout
def test_bfloat16_is_close_and_keeps_weights_and_logits_in_float32(config, key, tokens):
    variables = init(config, key, tokens)
    half = dataclasses.replace(config, dtype=jnp.bfloat16)
    jax.tree.map(np.testing.assert_array_equal, variables, init(half, key, tokens))
    logits = apply(half, variables, tokens)
    assert logits.dtype == jnp.float32
    assert 1e-4 < relative_error(logits, apply(config, variables, tokens)) < 0.05


@pytest.mark.slow
def test_the_loss_in_chunks_is_that_of_all_logits(key, tokens):
    adapters, frozen = example(TINY, key, tokens)
    variables = {"params": frozen, "lora": adapters}
    weights = jnp.ones(tokens.shape)
    model = gpt2.GPT2(TINY)
    want = make_loss(TINY)(adapters, frozen, tokens)
    for given in (None, weights):
        got = gpt2.next_token_loss(model, variables, tokens, given, chunk=50)
        np.testing.assert_allclose(got, want, rtol=1e-5)
    # What is cut off counts nothing, and is not read.
    padded = gpt2.next_token_loss(
        model,
        variables,
        jnp.pad(tokens, ((0, 0), (0, 4))),
        jnp.pad(weights, ((0, 0), (0, 4))),
        chunk=50,
    )
    np.testing.assert_allclose(padded, want, rtol=1e-5)


def test_a_sequence_that_is_too_long_is_an_error(key):
    with pytest.raises(ValueError, match=r"at most `context` \(32\).* but got 33"):
        init(TINY, key, jnp.zeros((1, 33), int))


def test_adapters_of_rank_8_are_a_third_of_a_percent():
    # In each of 24 blocks 8 * (1024 + 3072) and 8 * (1024 + 1024).
    assert num_variables(gpt2.gpt2_medium_lora(), "lora") == 1_179_648
    assert num_variables(gpt2.gpt2_medium_lora()) == 354_823_168


@every_layout
def test_with_b_at_zero_the_model_is_the_base_model(config, key, tokens):
    variables = init(config, key, tokens)
    base = dataclasses.replace(config, lora_rank=0)
    jax.tree.map(
        np.testing.assert_array_equal,
        variables["params"],
        init(base, key, tokens)["params"],
    )
    np.testing.assert_allclose(
        apply(config, variables, tokens),
        apply(base, {"params": variables["params"]}, tokens),
        rtol=1e-5,
        atol=1e-6,
    )


@every_layout
def test_adapters_do_what_their_product_added_to_the_weights_does(config, key, tokens):
    adapters, frozen = example(config, key, tokens)
    merged = jax.tree.map(jnp.copy, frozen)
    for name, block in adapters.items():
        for layer, pair in block.items():
            kernel = merged[name][layer.removesuffix("_lora")]
            change = config.lora_alpha / config.lora_rank * (pair["a"] @ pair["b"])
            kernel["kernel"] += change
    base = dataclasses.replace(config, lora_rank=0)
    got = apply(config, {"params": frozen, "lora": adapters}, tokens)
    plain = apply(base, {"params": frozen}, tokens)
    assert relative_error(plain, got) > 0.05
    np.testing.assert_allclose(
        got, apply(base, {"params": merged}, tokens), rtol=1e-4, atol=1e-5
    )


@every_layout
def test_the_wrapped_gradient_is_of_adapters_alone_and_close(config, key, tokens):
    adapters, frozen = example(config, key, tokens)
    wrapped = dafjax.remat_compress(
        make_loss(config), bits=8, policy=CompressExpensive(min_nbytes=0)
    )
    value, got = jax.jit(jax.value_and_grad(wrapped))(adapters, frozen, tokens)
    want_value, want = jax.jit(jax.value_and_grad(make_loss(config)))(
        adapters, frozen, tokens
    )
    assert jax.tree.structure(got) == jax.tree.structure(adapters)
    np.testing.assert_allclose(value, want_value, rtol=1e-5)
    errors = jax.tree.leaves(jax.tree.map(relative_error, got, want))
    assert max(errors) < 0.05
    assert max(errors) > 1e-4


@pytest.mark.slow
def test_training_the_adapters_lowers_the_loss(key, tokens):
    start, frozen = example(TINY, key, tokens)
    optimizer = optax.adam(0.01)

    def fall(wrap):
        @jax.jit
        def step(adapters, state):
            loss = wrap(make_loss(TINY))
            value, gradient = jax.value_and_grad(loss)(adapters, frozen, tokens)
            updates, state = optimizer.update(gradient, state)
            return optax.apply_updates(adapters, updates), state, value

        adapters, state, losses = start, optimizer.init(start), []
        for _ in range(20):
            adapters, state, value = step(adapters, state)
            losses.append(float(value))
        return losses[0] - losses[-1]

    plain = fall(lambda loss: loss)
    # The embedding is frozen: there is little more to gain.
    assert plain > 0.2
    assert fall(dafjax.remat_compress) > 0.5 * plain


@pytest.mark.parametrize("scan_layers", [False, slow(True)], ids=["loop", "scan"])
def test_the_gradient_of_adapters_needs_a_fraction_of_the_memory(scan_layers):
    """A sixteenth in full size: `benchmarks/results/lora_memory.json`."""
    config = gpt2.GPT2Config(
        num_layers=4,
        width=256,
        num_heads=4,
        vocabulary=1000,
        lora_rank=8,
        scan_layers=scan_layers,
    )
    tokens = jax.ShapeDtypeStruct((2, 512), jnp.int32)
    variables = jax.eval_shape(
        lambda key, tokens: gpt2.GPT2(config).init(key, tokens),
        jax.random.key(0),
        tokens,
    )
    plain, compressed = (
        gradient_nbytes(loss, variables["lora"], variables["params"], tokens)
        for loss in (make_loss(config), dafjax.remat_compress(make_loss(config)))
    )
    # On jax 0.9 the plain loop needs less: 0.29.
    most = 0.31 if jax.__version_info__ < (0, 10) else 0.25
    assert compressed < most * plain


def saved_in_the_last_block(lora_rank, *, width=64, policy=None):
    """What the last block keeps, by place in the model and shape."""
    config = dataclasses.replace(TINY, context=256, lora_rank=lora_rank, width=width)
    tokens = jnp.zeros((4, config.context), jnp.int32)
    variables = init(config, jax.random.key(0), tokens)
    trained, frozen = lora.split(variables, config.trained)

    def loss(trained):
        model = gpt2.GPT2(config)
        return jnp.sum(model.apply(lora.merge(trained, frozen), tokens))

    wrapped = dafjax.remat_compress(loss, policy=policy)
    return collections.Counter(
        (item.name.rpartition("block2")[2], item.primitive, item.shape)
        for item in dafjax.saved_residuals(wrapped, trained).kept
        if "block2" in item.name
    )


def test_of_a_frozen_mlp_only_the_input_of_its_gelu_is_kept():
    # Wide enough that no product is short enough to be computed again.
    kept = saved_in_the_last_block(lora_rank=4, width=192)
    of_mlp = [item for item in kept.elements() if item[2] == (4, 256, 768)]
    assert of_mlp == [("/mlp_in", "dot_general", (4, 256, 768))]


def test_inputs_of_frozen_layers_are_not_residuals_at_all():
    """Even a policy that saves all residuals saves nothing for them."""
    everything = saved_in_the_last_block(lora_rank=0, policy=SaveAll())
    of_adapters = saved_in_the_last_block(lora_rank=4, policy=SaveAll())
    missing = list((everything - of_adapters).elements())
    assert sorted(item for item in missing if item[1] != "rsqrt") == [
        ("", "mul", (4, 256, 256)),  # the input of mlp_out
        ("/norm2", "add", (4, 256, 64)),  # the input of mlp_in
    ]
    # `x A` of the two adapters of a block; `x` itself is needed with and without.
    added = list((of_adapters - everything).elements())
    assert [(item[1], item[2]) for item in added] == 2 * [("dot_general", (4, 256, 4))]
