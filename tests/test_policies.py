"""Decisions about residuals, and gradients with them."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import io_callback

import dafjax
from dafjax.codecs import Affine, Bitmask
from dafjax.policies import (
    Compress,
    CompressDots,
    CompressExpensive,
    CompressNames,
    Recompute,
    Residual,
    Save,
    SaveAll,
)
from tests.helpers import gradient_nbytes, relative_error


def residual(
    primitive,
    shape=(64, 1024),
    dtype=jnp.float32,
    *,
    operand=0,
    known=False,
    sources=1,
    steers=False,
    copies=1,
    source_elements=64 * 1024,
    contracted=0,
    multiplied=False,
):
    return Residual(
        shape=shape,
        dtype=jnp.dtype(dtype),
        primitive=primitive,
        reduced_from=operand,
        known=known,
        sources=sources,
        steers=steers,
        copies=copies,
        source_elements=source_elements,
        contracted=contracted,
        multiplied=multiplied,
    )


@pytest.mark.parametrize(
    ("described", "decision"),
    [
        (residual("dot_general"), Compress()),
        (residual("conv_general_dilated", dtype=jnp.bfloat16), Compress()),
        (residual("scan"), Compress()),
        (residual("a custom call nobody knows"), Compress()),
        (residual("tanh"), Recompute()),
        (residual("add", sources=3), Recompute()),
        # Three times as many elements: the matrix of long attention.
        (residual("exp", source_elements=64 * 1024 // 4), Recompute()),
        (residual("exp", source_elements=64 * 1024 // 2), Compress()),
        (residual("dot_general", source_elements=99, contracted=64), Recompute()),
        (residual("dot_general", source_elements=99, contracted=256), Compress()),
        # One product is computed again, and no other behind it.
        (
            residual("dot_general", source_elements=99, contracted=64, multiplied=True),
            Compress(),
        ),
        (residual("exp", source_elements=99, multiplied=True), Recompute()),
        # The jumps of what is recomputed would be elsewhere.
        (residual("round", source_elements=99), Compress()),
        (residual("dot_general", sources=0, source_elements=0), Compress()),
        # Chains stay short.
        (residual("add", sources=4), Compress()),
        # The noise of a code must not meet itself.
        (residual("add", sources=1, steers=True), Recompute()),
        (residual("add", sources=2, steers=True), Compress()),
        # Jumps where the operand moves a little: recomputing would flip it.
        (residual("sign"), Compress()),
        (residual("gt", dtype=jnp.bool_), Compress(Bitmask())),
        # Follows from exact values: exact again.
        (residual("gt", dtype=jnp.bool_, sources=0), Recompute()),
        (residual("argmax", dtype=jnp.int32), Save()),
        (residual("convert_element_type", dtype=jnp.int32), Save()),
        (residual("convert_element_type", dtype=jnp.int32, sources=0), Recompute()),
        (residual("dot_general", dtype=jnp.float64), Compress()),
        (residual("dot_general", dtype=jnp.complex64), Compress()),
        (residual("dot_general", dtype=jnp.float8_e5m2), Save()),
        # The mean over the last of 8 columns or more is a statistic.
        (residual("reduce_sum", (64, 1024), operand=64 * 1024 * 8), Save()),
        (residual("reduce_sum", (64, 1024), operand=64 * 1024 * 7), Recompute()),
        (residual("dot_general", (16, 256)), Save()),
        (residual("dot_general", (17, 256)), Compress()),
        # All iterations of a loop count.
        (residual("dot_general", (1, 256), copies=16), Save()),
        (residual("dot_general", (1, 256), copies=17), Compress()),
        (residual("rev", known=True), Recompute()),
        (residual("argument"), Compress()),
    ],
)
def test_compress_expensive_decides(described, decision):
    assert CompressExpensive()(described) == decision


def test_the_policy_s_codec_goes_before_the_default():
    policy = CompressExpensive(Affine(bits=4))
    assert policy(residual("dot_general")) == Compress(Affine(bits=4))


def test_saving_all_saves_what_does_not_follow_from_arguments():
    assert SaveAll()(residual("tanh")) == Save()
    assert SaveAll()(residual("rev", known=True)) == Recompute()


def test_policies_are_hashable_data():
    assert hash(CompressExpensive()) == hash(CompressExpensive())
    assert CompressExpensive(max_sources=2) != CompressExpensive()
    assert repr(CompressExpensive(min_nbytes=7)) == (
        "CompressExpensive(codec=None, max_sources=3, min_nbytes=7)"
    )


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"codec": 2}, TypeError, r"codec=\.\.\.\).*got `2`.*Affine\(bits=2\)"),
        ({"max_sources": 0}, ValueError, r"max_sources=\.\.\.\).*at least 1.*got 0"),
        ({"max_sources": 1.5}, TypeError, r"max_sources=\.\.\.\).*int.*1\.5"),
        ({"min_nbytes": -1}, ValueError, r"min_nbytes=\.\.\.\).*at least 0.*got -1"),
    ],
)
def test_a_bad_option_is_named_with_its_value(options, error, message):
    with pytest.raises(error, match=message):
        CompressExpensive(**options)


def tagged_loss(w, x):
    for _ in range(4):
        x = checkpoint_name(jnp.tanh(x @ w + 1), "block")
    return jnp.mean(x**2)


@pytest.mark.filterwarnings("ignore:.*no name in the function matches 'tanh'")
@pytest.mark.parametrize(
    ("policy", "primitives"),
    [
        (CompressDots(), {"dot_general"}),
        (CompressNames("block"), {"tanh"}),
        (CompressNames(("bl*", "tanh")), {"tanh"}),
        (SaveAll(), None),
    ],
)
def test_a_policy_keeps_what_it_says_and_gradients_are_right(policy, primitives, key):
    w, x = 0.1 * jax.random.normal(key, (128, 128)), jnp.ones((256, 128))
    wrapped = dafjax.remat_compress(tagged_loss, policy=policy, bits=8)
    error = relative_error(
        jax.jit(jax.grad(wrapped))(w, x), jax.grad(tagged_loss)(w, x)
    )
    assert error < 0.02
    if primitives is not None:
        plan = dafjax.saved_residuals(wrapped, w, x)
        kept = [item for item in plan.kept if item.primitive != "extent_scale"]
        assert {item.primitive for item in kept} <= primitives
        # What is named is kept once. The last is needed, the first follows from it.
        assert 3 <= len(kept) <= 4


def test_what_no_policy_names_is_recomputed(key):
    w, x = 0.1 * jax.random.normal(key, (256, 256)), jnp.ones((2048, 256))

    def nbytes(policy):
        wrapped = dafjax.remat_compress(tagged_loss, policy=policy)
        return gradient_nbytes(wrapped, w, x)

    nothing_kept = dafjax.remat_compress(tagged_loss, policy=CompressNames("blok"))
    with pytest.warns(UserWarning, match=r"policy=.*matches 'blok'.*'block'"):
        got = jax.grad(nothing_kept)(w, x)
    np.testing.assert_allclose(got, jax.grad(tagged_loss)(w, x), rtol=1e-3, atol=1e-7)
    assert nbytes(CompressNames("block")) < 0.9 * nbytes(SaveAll())


def test_of_what_little_is_made_into_one_product_runs_again(key):
    """The layers behind a bottleneck are not all computed again from it."""

    def loss(weights, x):
        for weight in weights:
            x = jax.nn.gelu(x @ weight)
        return jnp.mean(x**2)

    widths = (64, 128, 8, 128, 128, 128, 64)
    keys = jax.random.split(key, len(widths) - 1)
    shapes = itertools.pairwise(widths)
    weights = [jax.random.normal(k, s) for k, s in zip(keys, shapes, strict=True)]
    x = jax.random.normal(key, (512, widths[0]))

    def num_products(loss):
        program = str(jax.make_jaxpr(jax.grad(loss))(weights, x))
        return program.count("dot_general[")

    wrapped = dafjax.remat_compress(loss)
    # Where it is read, behind two ties.
    assert num_products(wrapped) <= num_products(loss) + 2


def test_effects_are_not_repeated():
    calls = []

    def observe(x):
        calls.append(1)
        return np.asarray(x)

    def loss(w, x):
        for _ in range(2):
            like = jax.ShapeDtypeStruct(x.shape, x.dtype)
            seen = io_callback(observe, like, jax.lax.stop_gradient(x), ordered=False)
            x = checkpoint_name(jnp.sin(x @ w) * jax.lax.stop_gradient(seen), "block")
        return jnp.sum(x)

    policy = CompressNames("block")
    jax.grad(dafjax.remat_compress(loss, policy=policy))(
        jnp.eye(64), jnp.ones((64, 64))
    )
    jax.effects_barrier()
    assert len(calls) == 2


def test_what_is_smaller_than_its_codes_is_saved_as_it_is():
    def loss(a, b):
        return jnp.sin(jnp.dot(a, b))

    wrapped = dafjax.remat_compress(loss, policy=CompressDots())
    (kept,) = dafjax.saved_residuals(wrapped, jnp.ones(9), jnp.ones(9)).kept
    assert kept.codec is None


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: CompressNames((1,)), TypeError, r"\(names\).*strings.*`\(1,\)`"),
        (lambda: CompressNames(()), ValueError, r"\(names\).*got none"),
        (lambda: CompressNames("a", 4), TypeError, r"CompressNames\(codec=.*got `4`"),
        (lambda: CompressDots(4), TypeError, r"CompressDots\(codec=.*got `4`"),
    ],
)
def test_bad_options_of_policies_are_named(make, error, message):
    with pytest.raises(error, match=message):
        make()
