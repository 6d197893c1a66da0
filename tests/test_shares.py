"""Shares of a sum of exponentials add up to 1, also of codes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dafjax
from dafjax._passes.quotients import sum_of_shares
from dafjax._plan.plan import record_plans
from dafjax.policies import CompressExpensive
from tests.helpers import relative_error


NAME = ("softmax_denominator",)
KEY = jax.random.key(0)
W = jax.random.normal(jax.random.fold_in(KEY, 1), (64, 256)) / 8
X = jax.random.normal(jax.random.fold_in(KEY, 2), (128, 64))


def gradient_of_logits(loss, bits, *, num_draws=1):
    """Returns gradients by what is added to the logits, with noise of their own."""

    @jax.jit
    def draw(seed):
        compressed = dafjax.remat_compress(
            lambda added: loss(X @ W + added), bits=bits, seed=seed
        )
        return jax.grad(compressed)(jnp.zeros((128, 256)))

    return jnp.stack([draw(np.uint32(seed)) for seed in range(num_draws)])


def kept_shapes(function, *arguments):
    with record_plans() as recorder:
        jax.jit(jax.grad(function)).lower(*arguments)
    (plan,) = {plan.fingerprint: plan for plan in recorder.plans.values()}.values()
    return [kept.shape for kept in plan.kept], plan


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_what_all_of_a_row_have_in_common_cancels(bits):
    """A weighted mean of equal values does not depend on the weights."""

    def loss(logits):
        return jnp.sum(jax.nn.softmax(logits) * 100.0)

    gradient = gradient_of_logits(loss, bits)
    assert np.abs(gradient).max() < 1e-4


def test_exact_sums_and_codes_do_not_add_up():
    """The control: written so that the sum is read for itself, it is kept exact."""

    def loss(logits):
        e = jnp.exp(logits - jax.lax.stop_gradient(logits.max(-1, keepdims=True)))
        total = jnp.sum(e, -1, keepdims=True)
        return jnp.sum(e / total * 100.0) + 0 * jnp.sum(total**3)

    gradient = gradient_of_logits(loss, 2)
    assert np.abs(gradient).max() > 1e-3


@pytest.mark.parametrize("bits", [1, 2])
def test_gradients_of_logits_add_up_to_0(bits):
    labels = jnp.arange(128) % 256

    def loss(logits):
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return jnp.sum(losses)

    gradient = gradient_of_logits(loss, bits)
    np.testing.assert_allclose(jnp.sum(gradient, -1), 0, atol=1e-4)
    assert np.abs(gradient).max() > 0.5


def test_the_sum_is_not_kept():
    def loss(w):
        return jnp.sum(jnp.sin(jax.nn.softmax(X @ w) @ W.T))

    wrapped = dafjax.remat_compress(loss, policy=CompressExpensive())
    shapes, plan = kept_shapes(wrapped, W)
    assert (128, 256) in shapes
    sums = [k.shape for k in plan.kept if k.primitive == "reduce_sum"]
    assert not sums
    assert "sum_of_codes" in {eqn.primitive for eqn in plan.recomputed.values()}


def test_few_exponentials_keep_their_sum():
    """The noise of a sum of few is theirs."""

    def loss(w):
        return jnp.sum(jnp.sin(jax.nn.softmax((X @ w).reshape(-1, 8))))

    _, plan = kept_shapes(dafjax.remat_compress(loss), W)
    assert "sum_of_codes" not in {eqn.primitive for eqn in plan.recomputed.values()}


def test_noise_leaves_the_mean_as_it_was():
    values = jax.random.normal(jax.random.fold_in(KEY, 3), (256, 32))

    def loss(logits):
        return jnp.sum(jnp.square(jax.nn.softmax(3 * logits) @ values + 1))

    exact = jax.grad(loss)(X @ W)
    draws = gradient_of_logits(loss, 4, num_draws=32)
    error = jnp.sum((jnp.mean(draws, 0) - exact) ** 2) / jnp.sum(exact**2)
    variance = jnp.mean(jnp.sum((draws - exact) ** 2, (1, 2))) / jnp.sum(exact**2)
    # Of what the mean of 32 draws may be off, little is bias.
    assert error < 2 * variance / 32


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_where_all_codes_stand_for_0_nothing_is_divided_by_0(dtype):
    e = jnp.zeros((4, 32), dtype).at[0].set(1).at[1, 3].set(jnp.nan)
    total = sum_of_shares(e, axes=(1,))
    np.testing.assert_array_equal(total.astype(jnp.float32), [32, jnp.nan, 1, 1])
    assert total.dtype == dtype


def attention_loss(weights, x, softmax=jax.nn.softmax):
    """Queries and keys are kept, because the exponentials are many."""
    q, k, v = (x @ weights[name] for name in "qkv")
    shares = softmax(q @ k.swapaxes(1, 2) / 8)
    return jnp.mean(jnp.sin(shares @ v + x) ** 2)


def noise_of_attention(loss, without=()):
    """Returns the noise at 8 bits in the gradients of queries and keys.

    Inputs have a mean: all keys have a large part in common, which must cancel.
    """
    keys = jax.random.split(KEY, 4)
    pairs = zip("qkv", keys, strict=False)
    weights = {n: jax.random.normal(key, (64, 64)) / 8 for n, key in pairs}
    x = 3 + jax.random.normal(keys[3], (4, 256, 64))

    @jax.jit
    def draw(seed):
        wrapped = dafjax.remat_compress(loss, bits=8, seed=seed, without_passes=without)
        return jax.grad(wrapped)(weights, x)

    exact = jax.grad(loss)(weights, x)
    found = [draw(np.uint32(seed)) for seed in range(4)]
    return max(
        np.mean([relative_error(f[name], exact[name]) for f in found]) for name in "qk"
    )


def masked(logits):
    rows, columns = (jax.lax.broadcasted_iota(int, (256, 256), n) for n in range(2))
    return jax.nn.softmax(logits, where=rows >= columns)


def summed_in_float32(logits):
    e = jnp.exp(logits - logits.max(-1, keepdims=True)).astype(jnp.bfloat16)
    total = jnp.sum(e.astype(jnp.float32), -1, keepdims=True)
    return e.astype(jnp.float32) / total


@pytest.mark.parametrize("softmax", [jax.nn.softmax, masked])
def test_shares_of_recomputed_exponentials_add_up(softmax):
    loss = functools.partial(attention_loss, softmax=softmax)
    noise = noise_of_attention(loss)
    assert noise < 0.05
    assert noise_of_attention(loss, NAME) > 2.5 * noise


def test_sums_of_converted_exponentials_follow_codes():
    def loss(w):
        return jnp.sum(jnp.sin(summed_in_float32(X @ w)))

    _, plan = kept_shapes(dafjax.remat_compress(loss), W)
    assert "sum_of_codes" in {eqn.primitive for eqn in plan.recomputed.values()}
