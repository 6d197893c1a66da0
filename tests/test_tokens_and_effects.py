"""Values without numbers, and operations that do more than compute."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback

import dafjax
from dafjax.policies import CompressExpensive
from dafjax.stores import PagePool
from tests.helpers import relative_error


compressed = functools.partial(
    dafjax.remat_compress, bits=8, policy=CompressExpensive(min_nbytes=256)
)


@pytest.fixture
def operands(key):
    # Large enough for barriers of results.
    keys = jax.random.split(key)
    return tuple(jax.random.normal(k, (96, 96)) / 10 for k in keys)


def loss_of(f):
    """Returns the sum of squares of all results that are floating-point."""

    def loss(w, x):
        leaves = jax.tree.leaves(f(w, x))
        dtypes = [getattr(jax.typeof(leaf), "dtype", None) for leaf in leaves]
        return sum(
            jnp.sum(leaf**2)
            for leaf, dtype in zip(leaves, dtypes, strict=True)
            if dtype == jnp.float32
        )

    return loss


def assert_close_but_not_equal(f, operands, **options):
    got = jax.grad(loss_of(compressed(f, **options)))(*operands)
    want = jax.grad(loss_of(f))(*operands)
    assert 1e-6 < relative_error(got, want) < 0.1


def count_with_token(token):
    """Returns 3, and a token that a loop has carried."""
    return lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, s[1]), (0, token))


def unread(w, x):
    lax.create_token()
    return jnp.sin(x @ w)


def first_of_results(w, x):
    return lax.create_token(), jnp.sin(x @ w)


def last_of_results(w, x):
    return jnp.sin(x @ w), lax.after_all(lax.create_token(), lax.create_token())


def in_a_loop(w, x):
    count, token = count_with_token(lax.create_token())
    return jnp.sin(x @ w) * count.astype(x.dtype), token


def in_the_body_of_a_loop(w, x):
    def body(x, _):
        count, _ = count_with_token(lax.create_token())
        return jnp.sin(x @ w) * count.astype(x.dtype), None

    return lax.scan(body, x, length=2)[0]


def operand_of_a_branch(w, x):
    def branch(x, token):
        del token
        return jnp.sin(x @ w)

    return lax.cond(x[0, 0] > 0, branch, lambda x, _: x @ w, x, lax.create_token())


def operand_of_a_call(w, x):
    call = jax.jit(lambda h, token: (jnp.sin(h), token))
    return call(x @ w, lax.create_token())


TOKENS = [
    unread,
    first_of_results,
    last_of_results,
    in_a_loop,
    in_the_body_of_a_loop,
    operand_of_a_branch,
    operand_of_a_call,
]


@pytest.mark.parametrize("f", TOKENS)
def test_tokens(f, operands):
    assert_close_but_not_equal(f, operands)


def test_a_token_is_an_argument(operands):
    def f(w, x, token):
        return jnp.sin(x @ w), token

    def gradient(f):
        return jax.grad(loss_of(lambda w, x: f(w, x, lax.create_token())))(*operands)

    assert 1e-6 < relative_error(gradient(compressed(f)), gradient(f)) < 0.1


@pytest.mark.parametrize(
    "make",
    [
        lambda: {"rematerialize": True},
        lambda: {"store": PagePool()},
        lambda: {"activation_argnums": 1},
        lambda: {"policy": jax.checkpoint_policies.save_only_these_names("a")},
    ],
    ids=["second forward pass", "pool", "activation", "policy"],
)
def test_tokens_with_options(make, operands):
    def f(w, x):
        h, token = last_of_results(w, x)
        count, token = count_with_token(token)
        return jnp.sin(h @ w) * count.astype(h.dtype), token

    assert_close_but_not_equal(f, operands, **make())


def test_a_function_of_tokens_alone(operands):
    @compressed
    def f(token):
        return lax.after_all(token, token)

    _, token = jax.value_and_grad(
        lambda w: (w.sum(), f(lax.create_token())), has_aux=True
    )(operands[0])
    assert token is not None


def keys_in_a_loop(w, x):
    def body(carry, key):
        x, other = carry
        other, more = jax.random.split(other)
        noise = jax.random.normal(key, x.shape) + jax.random.normal(more, x.shape)
        return (jnp.sin(x @ w) * noise, other), key

    keys = jax.random.split(jax.random.key(1), 2)
    return lax.scan(body, (x, jax.random.key(2)), keys)


def keys_first_of_results(w, x):
    return jax.random.key(1), jnp.sin(x @ w)


def no_elements(w, x):
    return jnp.sin(jnp.concatenate([x[:0], x]) @ w), jnp.sin(x[:0] @ w)


def integers(w, x):
    h = x @ w
    return (10 * h).astype(jnp.int32), None, jnp.sin(h), {"n": jnp.arange(3), "e": ()}


def float0(w, x):
    return np.zeros(3, jax.dtypes.float0), jnp.sin(x @ w)


def barrier(w, x):
    h, key, n = lax.optimization_barrier((x @ w, jax.random.key(2), jnp.int32(3)))
    return jnp.sin(h) * jax.random.normal(key, h.shape) * n.astype(h.dtype)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def scaled(factor, h):
    return factor * jnp.sin(h)


scaled.defjvp(
    lambda factor, primals, tangents: (
        scaled(factor, *primals),
        factor * jnp.cos(primals[0]) * tangents[0],
    )
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def scaled_by_rule(factor, h, n):
    return factor * jnp.sin(h) * n.astype(h.dtype)


scaled_by_rule.defvjp(
    lambda factor, h, n: (scaled_by_rule(factor, h, n), (h, n)),
    lambda factor, saved, ct: (
        factor * jnp.cos(saved[0]) * saved[1].astype(ct.dtype) * ct,
        np.zeros((), jax.dtypes.float0),
    ),
)


def rules(w, x):
    return scaled_by_rule(2, scaled(3, x @ w), jnp.int32(2))


def pure_callback(w, x):
    h = x @ w
    seen = jax.pure_callback(
        lambda h: 2 * np.asarray(h), jax.typeof(h), lax.stop_gradient(h)
    )
    return jnp.sin(h) * seen


@pytest.mark.parametrize(
    "f",
    [
        keys_in_a_loop,
        keys_first_of_results,
        no_elements,
        integers,
        float0,
        barrier,
        rules,
        pure_callback,
    ],
)
def test_other_values_and_operations(f, operands):
    assert_close_but_not_equal(f, operands)


class TestEffects:
    """Where the forward pass runs twice, callbacks that read or write run once."""

    @staticmethod
    def layers(calls, callback, w, x):
        def observe(total):
            calls.append(1)
            return np.float32(np.sign(total) + 2)

        for _ in range(4):
            x = jnp.sin(jnp.sin(x @ w) @ w)
            x = x * callback(observe, lax.stop_gradient(x.sum()))
        return x

    @staticmethod
    def read(observe, total):
        return io_callback(observe, jax.typeof(total), total, ordered=True)

    @staticmethod
    def write(observe, total):
        io_callback(lambda total: observe(total) and None, None, total)
        return jnp.float32(1)

    @staticmethod
    def compute(observe, total):
        return jax.pure_callback(observe, jax.typeof(total), total)

    @pytest.mark.parametrize("callback", ["read", "write", "compute"])
    def test_the_gradient_and_the_number_of_calls(self, callback, operands):
        calls = []
        f = functools.partial(self.layers, calls, getattr(self, callback))
        want = jax.grad(loss_of(f))(*operands)
        jax.effects_barrier()
        num_calls = len(calls)
        calls.clear()
        got = jax.grad(loss_of(compressed(f, rematerialize=True)))(*operands)
        jax.effects_barrier()
        assert 1e-6 < relative_error(got, want) < 0.2
        if callback != "compute":
            assert len(calls) == num_calls == 4

    def test_in_loops(self, operands):
        calls = []

        def f(w, x):
            def body(carry, _):
                x, total = carry
                callback = lambda observe, _: self.read(observe, total)
                x = self.layers(calls, callback, w, x)
                return (x, lax.stop_gradient(x.sum())), None

            return lax.scan(body, (x, jnp.float32(1)), length=2)[0][0]

        want = jax.grad(loss_of(f))(*operands)
        for options in ({}, {"rematerialize": True}):
            calls.clear()
            got = jax.grad(loss_of(compressed(f, **options)))(*operands)
            jax.effects_barrier()
            assert 1e-6 < relative_error(got, want) < 0.2
            assert len(calls) == 8

    def test_of_a_result_that_no_gradient_reaches(self, operands):
        def layer(w, x):
            h = jnp.sin(x @ w)
            return h, lax.stop_gradient(h.sum())

        def loss(wrap, w, x):
            h, total = wrap(layer)(w, x)
            return jnp.sum(h**2) * self.read(lambda total: np.float32(2), total)

        got = jax.grad(functools.partial(loss, compressed))(*operands)
        want = jax.grad(functools.partial(loss, lambda f: f))(*operands)
        assert 1e-6 < relative_error(got, want) < 0.1

    def test_a_token_between_segments(self, operands):
        def f(w, x):
            token = lax.create_token()
            for _ in range(4):
                x = jnp.sin(jnp.sin(x @ w) @ w)
            count, token = count_with_token(token)
            return jnp.sin(x @ w) * count.astype(x.dtype), token

        assert_close_but_not_equal(f, operands, rematerialize=True)
