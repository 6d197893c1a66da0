"""Gradients of quotients of two sums: linear attention, graph attention."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dafjax
from dafjax._passes.bounds import find_least
from dafjax._passes.quotients import note_means, scaled_numerator
from dafjax._trace.equation import values_of
from dafjax._trace.residuals import differentiate
from dafjax.policies import CompressExpensive, SaveAll
from tests.helpers import relative_error


BATCH, LENGTH, HEADS, WIDTH = 4, 64, 2, 16
NUM_NODES = BATCH * LENGTH
NODES = jax.random.randint(jax.random.key(5), (2, 3 * NUM_NODES), 0, NUM_NODES)


def elu_plus_one(x):
    return jax.nn.elu(x) + 1


def causal(q, k, v):
    q, k = elu_plus_one(q), elu_plus_one(k)
    states = jnp.cumsum(jnp.einsum("bthd,bthe->bthde", k, v), 1)
    total = jnp.einsum("bthd,bthd->bth", q, jnp.cumsum(k, 1))
    return jnp.einsum("bthd,bthde->bthe", q, states) / (total[..., None] + 1e-6)


def whole(q, k, v):
    q, k = jax.nn.softplus(q), jax.nn.softplus(k)
    states = jnp.einsum("bthd,bthe->bhde", k, v)
    total = jnp.einsum("bthd,bhd->bth", q, k.sum(1))
    return jnp.einsum("bthd,bhde->bthe", q, states) * (1 / total)[..., None]


def by_key(q, k, v):
    weights = jnp.exp(k - jax.lax.stop_gradient(k.max(1, keepdims=True)))
    totals = jnp.cumsum(weights, 1)
    return jax.nn.sigmoid(q) * jnp.cumsum(weights * v, 1) / totals


def on_graph(q, k, v):
    """Attention to neighbours. Some nodes have none."""
    q, k, v = (x.reshape(NUM_NODES, HEADS, WIDTH) for x in (q, k, v))
    source, target = NODES
    scores = jax.nn.leaky_relu((q[target] + jnp.sin(3 * k[source])).sum(-1) / 8)
    weights = jnp.exp(scores)[..., None]
    sums = jax.ops.segment_sum(weights * v[source], target, NUM_NODES)
    total = jax.ops.segment_sum(weights, target, NUM_NODES)
    return (sums / (total + 1e-6)).reshape(BATCH, LENGTH, HEADS, WIDTH)


def in_loop(q, k, v):
    q, k = elu_plus_one(q), elu_plus_one(k)

    def step(carry, operands):
        states, total = carry
        q, k, v = operands
        states, total = states + k[..., None] * v[..., None, :], total + k
        y = jnp.einsum("bhd,bhde->bhe", q, states)
        return (states, total), y / (jnp.einsum("bhd,bhd->bh", q, total)[..., None])

    zeros = jnp.zeros((BATCH, HEADS, WIDTH, WIDTH))
    operands = [x.swapaxes(0, 1) for x in (q, k, v)]
    _, y = jax.lax.scan(step, (zeros, zeros[..., 0]), operands)
    return y.swapaxes(0, 1)


def decaying(q, k, v):
    """The sums of RWKV, whose terms alone have a factor in common."""
    sharp = jnp.exp(k - 2)

    def step(carry, operands):
        above, below = carry
        weight, v = operands
        y = (above + 2 * weight * v) / (below + 2 * weight)
        return (0.9 * above + weight * v, 0.9 * below + weight), y

    zeros = jnp.zeros((BATCH, HEADS, WIDTH))
    operands = sharp.swapaxes(0, 1), v.swapaxes(0, 1)
    _, y = jax.lax.scan(step, (zeros, zeros), operands)
    return jax.nn.sigmoid(q) * y.swapaxes(0, 1)


def of_both_signs(q, k, v):
    states = jnp.einsum("bthd,bthe->bthde", k, v).cumsum(1)
    total = jnp.abs(jnp.einsum("bthd,bthd->bth", q, k.cumsum(1)))
    return jnp.einsum("bthd,bthde->bthe", q, states) / jnp.maximum(total, 1)[..., None]


def make_params():
    keys = iter(jax.random.split(jax.random.key(1), 7))
    width = HEADS * WIDTH
    params = {n: jax.random.normal(next(keys), (64, width)) / 8 for n in "qkv"}
    biases = {
        n + "_bias": 2 + 0.2 * jax.random.normal(next(keys), (width,)) for n in "qkv"
    }
    return params | biases | {"o": jax.random.normal(next(keys), (width, 64)) / 6}


def loss_of(attention):
    def loss(params, x):
        heads = (x @ params[n] + params[n + "_bias"] for n in "qkv")
        y = attention(*(h.reshape(BATCH, LENGTH, HEADS, WIDTH) for h in heads))
        return jnp.sum(jnp.sin(x + y.reshape(BATCH, LENGTH, -1) @ params["o"]))

    return loss


def worst_noise(attention, bits, without=()):
    """Returns the largest noise of a parameter array, root mean square of 4 seeds."""
    loss = loss_of(attention)
    params, x = make_params(), jax.random.normal(jax.random.key(0), (BATCH, LENGTH, 64))
    exact = jax.jit(jax.grad(loss))(params, x)

    @jax.jit
    def gradient(seed):
        wrapped = dafjax.remat_compress(
            loss,
            bits=bits,
            seed=seed,
            policy=CompressExpensive(),
            without_passes=without,
        )
        return jax.grad(wrapped)(params, x)

    errors = [
        jax.tree.map(relative_error, gradient(jnp.uint32(seed)), exact)
        for seed in range(4)
    ]
    return {
        name: np.sqrt(np.mean([np.square(error[name]) for error in errors]))
        for name in exact
    }


@pytest.mark.parametrize(
    "attention",
    [causal, whole, by_key, in_loop, decaying],
    ids=lambda f: f.__name__,
)
def test_noise_of_weighted_means_is_as_low_as_elsewhere(attention):
    for bits, most in ((8, 0.05), (2, 1.2)):
        noise = worst_noise(attention, bits)
        if attention in (by_key, decaying):
            # The gradient is 0: a factor of all weights has no effect.
            del noise["k_bias"]
        assert max(noise.values()) < most


def test_without_the_pass_noise_does_not_cancel():
    assert max(worst_noise(causal, 2, ["weighted_mean"]).values()) > 5


def test_empty_sums_bring_no_noise():
    # The gradient of a query is nearly zero, since all its scores change alike.
    noise = worst_noise(on_graph, 2)
    assert max(noise[name] for name in ("o", "v", "v_bias")) < 1


def test_weights_of_both_signs_keep_an_exact_scale():
    with_pass, without = (
        worst_noise(of_both_signs, 2, w) for w in ([], ["weighted_mean"])
    )
    assert max(with_pass.values()) < max(without.values()) / 4


def program_of(attention):
    shape = jax.ShapeDtypeStruct((BATCH, LENGTH, HEADS, WIDTH), jnp.float32)
    closed = jax.make_jaxpr(lambda *args: jnp.sum(jnp.sin(attention(*args))))(
        shape, shape, shape
    )
    return note_means(differentiate(closed, [True] * 3))


@pytest.mark.parametrize(
    "attention", [causal, whole, by_key, on_graph], ids=lambda f: f.__name__
)
def test_both_sums_follow_from_codes_where_weights_have_one_sign(attention):
    program = program_of(attention)
    assert program.from_codes
    assert not program.amplified
    recipes = [recipe.equation.primitive for recipe in program.recipes.values()]
    assert "scaled_numerator" in recipes


def of_complex(q, k, v):
    """Its weights are exponentials, but no real numbers."""
    z = jnp.exp(jax.lax.complex(q, k))
    y = jnp.cumsum(z * v.astype(z.dtype), 1) / jnp.cumsum(z, 1)
    return jnp.maximum(3, jnp.arange(WIDTH)).astype(q.dtype) * jnp.abs(y)


def with_wide_denominators(q, k, v):
    """Each numerator is divided by several sums of the same weights."""
    weights = jnp.exp(q)
    below = jnp.cumsum(weights, 1)
    return jnp.sum(weights * v, -1, keepdims=True) / below + k


@pytest.mark.parametrize(
    "attention",
    [of_both_signs, of_complex, with_wide_denominators],
    ids=lambda f: f.__name__,
)
def test_other_sums_have_codes_of_their_own(attention):
    program = program_of(attention)
    assert program.amplified
    assert not program.from_codes


def softmax(q, k, v):
    return jax.nn.softmax(q + k) * v


def normalized(q, k, v):
    x = q + k
    return v * x / jnp.sqrt(1e-6 + jnp.mean(x * x, -1, keepdims=True))


def shares(q, k, v):
    x = jax.nn.relu(q)
    return k * (x / x.sum(-1, keepdims=True)) + v


def masked(q, k, v):
    mask = jnp.float32(jax.lax.stop_gradient(k) > 0)
    return q + jnp.sum(v * mask, 1, keepdims=True) / jnp.sum(mask, 1, keepdims=True)


def layers(q, k, v):
    """A quotient of two layers that read the same values."""
    weights = jnp.eye(WIDTH)
    return jnp.dot(jnp.sin(v), weights + q[0, 0, 0]) / (
        3 + jnp.dot(jnp.sin(v), weights + k[0, 0, 0])
    )


@pytest.mark.parametrize(
    "function", [softmax, normalized, shares, masked, layers], ids=lambda f: f.__name__
)
def test_other_quotients_stay(function):
    program = program_of(function)
    assert not program.from_codes
    assert not program.amplified


def test_exact_policies_keep_exact_gradients():
    loss = loss_of(causal)
    params, x = make_params(), jax.random.normal(jax.random.key(0), (BATCH, LENGTH, 64))
    exact = jax.jit(jax.grad(loss))(params, x)
    found = jax.jit(jax.grad(dafjax.remat_compress(loss, policy=SaveAll())))(params, x)
    for error in jax.tree.leaves(jax.tree.map(relative_error, found, exact)):
        assert error < 1e-5


@pytest.mark.parametrize(
    ("function", "least"),
    [
        (elu_plus_one, 0),
        (jax.nn.softplus, 0),
        (lambda x: jax.nn.relu(x) + 1e-3, 1e-3),
        (lambda x: jnp.where(x >= 2, x, 3.0), 2),
        (lambda x: jnp.exp(x) / jnp.exp(x).sum(0), 0),
        (lambda x: (x * x) @ jnp.square(x), 0),
        (lambda x: jnp.zeros((9, 3)).at[1:4].add(jnp.abs(x)), 0),
        (lambda x: 2 * jnp.expm1(x), -2),
        (lambda x: jnp.abs(jax.lax.complex(x, x)), 0),
        (lambda x: (2 + jnp.exp(x)) * np.array([[0, 1, 3]], np.float32), 0),
        (lambda x: jnp.zeros(1).at[np.zeros(9, int)].add(jnp.expm1(x).ravel()), None),
        (lambda x: jnp.exp(x).at[4].get(mode="fill", fill_value=-1.0), None),
        (lambda x: jnp.stack([jnp.exp(x), x]), None),
        (jax.nn.silu, None),
        (lambda x: jnp.exp(x) - 1, None),
        (lambda x: jnp.where(x < 2, x, 3.0), None),
        (lambda x: x**3, None),
        (lambda x: -2 * jnp.exp(x), None),
    ],
)
def test_lower_bounds(function, least):
    closed = jax.make_jaxpr(function)(jnp.ones((3, 3)))
    program = differentiate(closed, [True])
    (result,) = values_of(program.results)
    found = find_least(program).get(result)
    assert found == (None if least is None else pytest.approx(least))
    if found is not None:
        x = 3 * jax.random.normal(jax.random.key(0), (3, 3))
        assert jnp.min(function(x)) >= found - 1e-6


@pytest.mark.parametrize(
    ("exact", "found", "ratio"),
    [(3.0, 2.0, 1.5), (3.0, 0.5, 2), (1.0, -0.1, 0.5), (0.0, 0.0, 1), (1.0, 0.0, 2)],
)
def test_scales_of_numerators_are_bounded(exact, found, ratio):
    assert scaled_numerator(jnp.float32(4), exact, jnp.float32(found)) == 4 * ratio
