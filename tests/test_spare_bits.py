"""Twice the bits for what is small."""

import functools

import jax
import jax.numpy as jnp
import pytest

import dafjax
from dafjax._plan import planner
from dafjax._plan.analysis import with_spare_bits
from tests.helpers import relative_error


def test_the_smallest_have_twice_the_bits():
    bits = {0: 2, 1: 2, 2: 4, 3: 8, 4: 1}
    sizes = {0: 10_000, 1: 100, 2: 10, 3: 1, 4: 10}
    assert with_spare_bits(bits, sizes) == {0: 2, 1: 4, 2: 8, 3: 8, 4: 2}


@pytest.mark.parametrize(("small", "raised"), [(60, True), (70, False)])
def test_it_costs_a_32nd_at_most(small, raised):
    bits = with_spare_bits({0: 2, 1: 2, 2: 2}, {0: 4000, 1: small, 2: small})
    assert bits == ({0: 2, 1: 4, 2: 4} if raised else {0: 2, 1: 2, 2: 2})


def test_what_cannot_have_more_bits_counts_too():
    bits, sizes = {0: 2, 1: 2}, {0: 40, 1: 50}
    assert with_spare_bits(bits, sizes, beside=2300) == bits
    assert with_spare_bits(bits, sizes, beside=2400) == {0: 4, 1: 2}
    assert with_spare_bits(bits, sizes, beside=5600) == {0: 4, 1: 4}


def test_of_one_size_all_have_them_or_none():
    same = dict.fromkeys(range(100), 2)
    assert with_spare_bits(same, dict.fromkeys(range(100), 50)) == same
    assert with_spare_bits({}, {}) == {}


WIDTH, RANK = 256, 4


def adapted_loss(p, x):
    """Layers with adapters, whose weights alone are trained."""
    for a, b, w in zip(p["a"], p["b"], p["w"], strict=True):
        x = x + jnp.tanh(x @ jax.lax.stop_gradient(w) + (x @ a) @ b)
    return jnp.mean(x**2)


def adapted_example(key):
    keys = jax.random.split(key, 4)
    shapes = {"a": (WIDTH, RANK), "b": (RANK, WIDTH), "w": (WIDTH, WIDTH)}
    p = {
        name: list(0.06 * jax.random.normal(k, (4, *shape)))
        for k, (name, shape) in zip(keys, shapes.items(), strict=False)
    }
    return p, jax.random.normal(keys[3], (2048, WIDTH))


def bits_of_hidden(plan):
    return [k.codec.bits for k in plan.kept if k.codec and k.shape[-1] == RANK]


@pytest.mark.parametrize("bits", [2, dafjax.Bits(2, nonlinear=2)])
def test_values_between_the_factors_of_an_adapter_have_twice_the_bits(bits, key):
    p, x = adapted_example(key)
    plan = dafjax.saved_residuals(dafjax.remat_compress(adapted_loss, bits=bits), p, x)
    found = bits_of_hidden(plan)
    assert len(found) == 4
    assert set(found) == {4}


def layers_and_heads(p, x, *, layers):
    """Two loops over layers, the second with half the rows, and a head after each."""

    def layer(x, parameters):
        a, b, w = parameters
        return x + jnp.tanh(x @ w + (x @ a) @ b), None

    loss = jnp.zeros(())
    for _ in range(2):
        if layers:
            parameters = tuple(jnp.stack(p[name][:layers]) for name in "abw")
            x, _ = jax.lax.scan(layer, x, parameters)
        loss += jnp.mean(jnp.tanh(x[::16] @ p["w"][0]) ** 2)
        x = x[::2]
    return loss


def plan_of_heads(key, *, layers, rematerialize):
    loss = functools.partial(layers_and_heads, layers=layers)
    wrapped = dafjax.remat_compress(loss, rematerialize=rematerialize)
    return dafjax.saved_residuals(wrapped, *adapted_example(key))


@pytest.mark.parametrize("rematerialize", [False, True])
def test_a_head_is_small_beside_what_waits_of_a_loop(rematerialize, key):
    def bits_of_last_head(layers):
        plan = plan_of_heads(key, layers=layers, rematerialize=rematerialize)
        (head,) = (k for k in plan.kept if k.codec and k.shape == (64, WIDTH))
        return head.codec.bits

    assert bits_of_last_head(layers=4) == 2 * bits_of_last_head(layers=0)


@pytest.mark.parametrize("rematerialize", [False, True])
def test_all_of_them_cost_a_32nd_at_most(rematerialize, key, monkeypatch):
    def nbytes():
        plan = plan_of_heads(key, layers=4, rematerialize=rematerialize)
        return plan.stored_nbytes

    with_spare = nbytes()
    monkeypatch.setattr(planner, "with_spare_bits", lambda bits, sizes, beside: bits)
    assert 1 < with_spare / nbytes() < 33 / 32


def test_what_is_named_has_the_bits_that_it_was_given(key):
    p, x = adapted_example(key)

    def loss(p, x):
        with jax.named_scope("all"):
            return adapted_loss(p, x)

    wrapped = dafjax.remat_compress(loss, bits={"all": 2})
    assert set(bits_of_hidden(dafjax.saved_residuals(wrapped, p, x))) == {2}


def test_where_bits_are_allocated_they_stay_what_they_were(key):
    p, x = adapted_example(key)
    wrapped = dafjax.remat_compress(adapted_loss, store=dafjax.stores.PagePool())
    assert set(bits_of_hidden(dafjax.saved_residuals(wrapped, p, x))) == {2}

    def loss(p, x):
        for a, b, w in zip(p["a"], p["b"], p["w"], strict=True):
            x = x + jnp.tanh(x @ w + jax.nn.gelu(x @ a) @ b)
        return jnp.mean(x**2)

    # 8 bits for what enters nonlinearly would mean that an exponential is taken of it.
    wrapped = dafjax.remat_compress(loss, bits=dafjax.AverageBits(1))
    step = dafjax.jit(jax.grad(wrapped))
    step(p, x)
    assert set(step.bits.values()) == {1}


def test_codecs_of_a_policy_neither_get_bits_nor_lend_them(key):
    p, x = adapted_example(key)

    class Policy(dafjax.policies.AbstractPolicy):
        is_binding = False

        def __call__(self, residual):
            decision = dafjax.policies.CompressExpensive()(residual)
            is_small = residual.shape[-1:] == (RANK,)
            if decision == dafjax.policies.Compress() and not is_small:
                return dafjax.policies.Compress(dafjax.codecs.Affine(bits=1))
            return decision

    wrapped = dafjax.remat_compress(adapted_loss, policy=Policy())
    assert set(bits_of_hidden(dafjax.saved_residuals(wrapped, p, x))) == {2}


def test_the_gradient_of_an_adapter_has_less_noise(monkeypatch, key):
    p, x = adapted_example(key)
    want = jax.jit(jax.grad(adapted_loss))(p, x)["b"]

    def error():
        # A function of its own has no trace yet.
        loss = dafjax.remat_compress(lambda p, x: adapted_loss(p, x))
        return relative_error(jax.jit(jax.grad(loss))(p, x)["b"], want)

    with_spare = error()
    monkeypatch.setattr(planner, "with_spare_bits", lambda bits, sizes, beside: bits)
    assert error() > 1.3 * with_spare
