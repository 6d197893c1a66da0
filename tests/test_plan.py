"""What is kept of a function, with bytes."""

import jax
import jax.numpy as jnp
import pytest

import dafjax
from dafjax._bits import Bits
from dafjax._passes.nonlinear import select_rectified
from dafjax._plan.planner import make_plan
from dafjax.codecs import Affine, Bitmask
from dafjax.policies import AbstractPolicy, CompressExpensive, SaveAll
from tests import networks
from tests.helpers import JAX_VERSION, prepared, relative_error


def plan_of(f, *arguments, policy=None, perturbed=None, activations=()):
    leaves, structure = jax.tree.flatten(arguments)
    closed = jax.make_jaxpr(lambda *x: f(*jax.tree.unflatten(structure, x)))(*leaves)
    return make_plan(
        prepared(closed, perturbed or [True] * len(leaves)),
        policy=policy or CompressExpensive(min_nbytes=256),
        bits=Bits(2),
        activations=activations,
    )


def compressed(plan):
    return [item for item in plan.kept if item.codec is not None]


def test_a_conv_norm_relu_block_keeps_one_tensor_in_codes_and_one_mask(key):
    p, x = networks.conv_example(key, depth=1)
    plan = plan_of(lambda p: networks.conv_loss(p, x), p)
    kinds = [(item.primitive, type(item.codec)) for item in compressed(plan)]
    assert kinds == [("conv_general_dilated", Affine), ("gt", Bitmask)]


def test_statistics_of_a_norm_are_saved_as_they_are(key):
    p, x = networks.conv_example(key, depth=1)
    plan = plan_of(lambda p: networks.conv_loss(p, x), p)
    raw = [item for item in plan.kept if item.codec is None]
    assert raw
    assert all(item.like.size <= 16 for item in raw)


def test_a_residual_connection_is_kept_where_the_chain_grows_long(key):
    p, x = networks.conv_example(key, depth=6)
    plan = plan_of(lambda p, x: networks.conv_loss(p, x), p, x, perturbed=None)
    adds = [item for item in compressed(plan) if item.primitive == "add"]
    assert 1 <= len(adds) <= 3


def test_arguments_are_never_kept(key):
    p = networks.mlp_params(key)
    x = jax.random.normal(key, (64, 64))
    plan = plan_of(networks.mlp_loss, p, x)
    assert all(item.value >= plan.program.num_arguments for item in plan.kept)
    assert plan.arguments


def test_an_activation_argument_is_kept_in_codes(key):
    p, x = networks.conv_example(key, depth=1)
    number = len(jax.tree.leaves(p))
    plan = plan_of(networks.conv_loss, p, x, activations=[number])
    assert ("argument", number) in [(k.primitive, k.value) for k in compressed(plan)]
    assert number not in plan.arguments


def test_bytes_of_a_plan_are_those_of_the_packed_layout(key):
    p, x = networks.conv_example(key, depth=1, batch=4)
    plan = plan_of(lambda p: networks.conv_loss(p, x), p)
    codes, mask = compressed(plan)
    n = 4 * 16 * 16 * 16
    # The loss is quadratic in what the norm normalizes: twice the bits.
    # An example has 128 rows of 32 channels, as two rows of 16 count; and a seed.
    assert codes.stored_nbytes == n * 4 // 8 + 2 * 2 * n // 128 + 4 * 4
    assert mask.stored_nbytes == n // 8
    assert codes.raw_nbytes == 4 * n


def test_what_is_shared_by_two_consumers_is_kept_once(key):
    w = jax.random.normal(key, (64, 64))

    def f(w, x):
        y = x @ w
        return (jax.nn.silu(y) @ w).sum() + (jnp.tanh(y) @ w).sum()

    plan = plan_of(f, w, jnp.ones((32, 64)), perturbed=[True, False])
    assert [item.primitive for item in compressed(plan)] == ["dot_general"]


def test_saving_all_keeps_what_jax_keeps(key):
    p, x = networks.conv_example(key, depth=2)
    plan = plan_of(lambda p: networks.conv_loss(p, x), p, policy=SaveAll())
    assert not plan.compresses


def test_an_integer_that_depends_on_codes_is_saved_exactly(key):
    w = jax.random.normal(key, (64, 64))

    def f(w, x):
        y = x @ w
        order = jnp.argsort(y, axis=1)
        return jnp.take_along_axis(y, order, axis=1)[:, :32].sum()

    plan = plan_of(f, w, jnp.ones((32, 64)), perturbed=[True, False])
    integers = [k for k in plan.kept if jnp.issubdtype(k.dtype, jnp.integer)]
    assert integers
    assert all(k.codec is None for k in integers)


def test_a_policy_that_returns_something_else_is_named():
    class Odd(AbstractPolicy):
        def __call__(self, residual):
            return "compress"

    with pytest.raises(TypeError, match=r"`policy` must return `Save.*'compress'"):
        plan_of(lambda x: jnp.sin(x) @ x, jnp.ones(64), policy=Odd())


def attention_loss(p, x):
    q, k, v = jnp.split(x @ p, 3, axis=-1)
    scores = jnp.einsum("btd,bsd->bts", q, k) / 8
    return jnp.mean(jnp.square(jax.nn.softmax(scores) @ v))


@pytest.mark.parametrize(("length", "bits"), [(128, [2, 2, 2]), (1024, [8, 2])])
def test_long_attention_is_recomputed_and_short_attention_is_kept(length, bits, key):
    """One tensor of 192 elements a token against `length` probabilities."""
    p = jax.random.normal(key, (64, 192)) / 8
    x = jax.random.normal(key, (2, length, 64))
    plan = plan_of(lambda p: attention_loss(p, x), p)
    assert [item.codec.bits for item in compressed(plan)] == bits
    is_square = [item.shape[1:] == (length, length) for item in plan.kept]
    assert any(is_square) == (length == 128)


def test_recomputed_attention_has_the_right_gradient(key):
    p = jax.random.normal(key, (64, 192)) / 8
    x = jax.random.normal(key, (2, 1024, 64))
    wrapped = dafjax.remat_compress(attention_loss)
    got = jax.jit(jax.grad(wrapped))(p, x)
    assert relative_error(got, jax.jit(jax.grad(attention_loss))(p, x)) < 0.15


@pytest.mark.parametrize(
    ("size", "options"),
    [
        (1, {}),
        (9, {}),
        (9, {"policy": CompressExpensive(Affine(bits=4))}),
        (9, {"bits": {"attention*": 2}}),
    ],
    ids=str,
)
def test_attention_of_large_scores_is_about_right(size, options, key):
    """An error of an exponent is a factor: 8 bits, or the matrix itself in codes."""
    keys = jax.random.split(key, 3)
    x = jax.random.normal(keys[0], (4, 512, 64))
    weights = [jax.random.normal(k, (64, 64)) * size**0.5 / 8 for k in keys[1:]]

    def loss(wq, wk):
        with jax.named_scope("attention1"):
            scores = jnp.einsum("btd,bsd->bts", x @ wq, x @ wk) / 8
            return jnp.mean(jnp.square(jax.nn.softmax(scores) @ x - x))

    exact = jax.jit(jax.grad(loss))(*weights)
    got = jax.jit(jax.grad(dafjax.remat_compress(loss, **options)))(*weights)
    # With errors of exponents it was 25 and more.
    assert relative_error(got, exact) < 2


def test_nan_stays_where_rectifiers_are(key):
    x = jax.random.normal(key, (256, 64)).at[3, 3].set(jnp.nan)
    w, v = jnp.eye(64), jnp.ones(64)

    def loss(w, v):
        return jnp.sum(jax.nn.relu(x @ w) @ v)

    got = jax.grad(dafjax.remat_compress(loss), 1)(w, v)
    assert bool(jnp.all(jnp.isnan(got) == jnp.isnan(jax.grad(loss, 1)(w, v))))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int32"])
def test_a_rectifier_selects_by_its_mask_and_keeps_nan(dtype):
    floats = [jnp.inf, -jnp.inf, jnp.nan] if dtype != "int32" else []
    x = jnp.asarray([3, -3, 0, *floats]).astype(dtype)
    for mask in (jnp.ones(x.shape, bool), jnp.zeros(x.shape, bool)):
        got = select_rectified(mask, x)
        assert got.dtype == x.dtype
        want = jnp.where(mask | jnp.isnan(x), x, jnp.zeros_like(x))
        assert bool(jnp.all((got == want) | (jnp.isnan(got) & jnp.isnan(want))))


def test_a_random_key_that_is_a_constant_is_no_number(key):
    @jax.jit
    def noise():
        one = jnp.reshape(jnp.broadcast_to(key, (1,)), ())
        return jax.random.normal(one, (256, 64))

    def loss(w):
        return jnp.sum((jnp.sin(jnp.ones((256, 64)) @ w) * noise()) @ w)

    got = jax.grad(dafjax.remat_compress(loss, bits=8))(jnp.eye(64))
    assert relative_error(got, jax.grad(loss)(jnp.eye(64))) < 0.05


def test_a_long_product_is_not_computed_again(key):
    """As of the last layer of a language model: 256 products for an element."""
    p = {"a": jnp.ones((64, 256)), "b": jnp.ones((256, 2048))}
    x = jnp.ones((64, 64))
    plan = plan_of(lambda p: jnp.sum(jnp.exp(jnp.sin(x @ p["a"]) @ p["b"])), p)
    assert (64, 2048) in [item.shape for item in compressed(plan)]
    p = {"a": p["a"][:, :32], "b": p["b"][:32]}
    plan = plan_of(lambda p: jnp.sum(jnp.exp(jnp.sin(x @ p["a"]) @ p["b"])), p)
    assert (64, 2048) not in [item.shape for item in compressed(plan)]


def test_a_norm_saves_two_small_arrays_and_no_views_of_them(key):
    def loss(w, x):
        y = x @ w
        mean = y.mean(-1, keepdims=True)
        variance = jnp.square(y - mean).mean(-1, keepdims=True)
        return jnp.sum(((y - mean) / jnp.sqrt(variance + 1e-6)) @ w)

    w, x = jax.random.normal(key, (256, 256)), jax.random.normal(key, (128, 256))
    plan = plan_of(lambda w: loss(w, x), w)
    raw = [item for item in plan.kept if item.codec is None]
    scales = {"extent_mean", "extent_scale"}
    assert [item.primitive for item in raw if item.primitive not in scales] == [
        "reduce_sum",
        "reduce_sum",
    ]


@pytest.mark.parametrize(
    "f",
    [
        lambda y: jnp.log(jnp.square(y)),
        lambda y: jnp.sqrt(jnp.abs(y)),
        lambda y: 1 / (y + jnp.sign(y) * 0.1),
        lambda y: y / (jnp.abs(y) + 1e-2),
        lambda y: jax.lax.rsqrt(jnp.square(y) + 1e-6),
    ],
    ids=["log", "sqrt", "reciprocal", "quotient", "rsqrt"],
)
def test_no_code_becomes_a_pole(f, key):
    """Of values near 0 many have the code of 0."""
    w, x = jnp.eye(64), jax.random.normal(key, (256, 64))

    def loss(w):
        return jnp.mean(jnp.tanh(f(x @ w)) @ w)

    got = jax.grad(dafjax.remat_compress(loss))(w)
    assert relative_error(got, jax.grad(loss)(w)) < 3


def test_a_scalar_whose_code_would_be_larger_is_exact(key):
    """Nothing is recomputed from it as if it were the source of all codes."""
    w = jax.random.normal(key, (64, 64))

    def f(w):
        scale = jax.lax.while_loop(lambda s: s > 1, lambda s: s / 2, jnp.max(w))
        return jnp.sum(jnp.tanh(jnp.tanh(jax.lax.stop_gradient(scale) * w @ w) @ w))

    policy = CompressExpensive(min_nbytes=0)
    kept = dafjax.saved_residuals(dafjax.remat_compress(f, policy=policy), w).kept
    codecs = {item.primitive: item.codec for item in kept}
    assert codecs["while"] is None
    assert codecs["dot_general"] is not None


@pytest.mark.parametrize(("rows", "packed"), [(64, False), (32768, True)])
def test_equality_masks_are_packed_only_where_they_are_large(rows, packed):
    """Recomputed operands might round differently, so a mask is never recomputed."""

    def loss(w, x):
        h = x @ w
        variance = jnp.maximum(0, jnp.mean(h * h, -1) - jnp.mean(h, -1) ** 2)
        return jnp.mean(h * jax.lax.rsqrt(variance + 1e-6)[:, None])

    shapes = (8, 512), (rows, 8)
    w, x = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)
    wrapped = dafjax.remat_compress(loss, policy=CompressExpensive())
    plan = dafjax.saved_residuals(wrapped, w, x)
    masks = [item for item in plan.kept if item.primitive == "eq"]
    # Since JAX 0.12 the derivative of `maximum` with a number has one mask, not two.
    assert len(masks) == (1 if JAX_VERSION >= (0, 12) else 2)
    assert all((item.codec is not None) == packed for item in masks)
