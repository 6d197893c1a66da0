"""Where gradients are finished, and which are not rounded before."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import dafjax
from dafjax._passes.algebra import finish_early, finishing_equations
from dafjax._trace import residuals
from dafjax._trace.equation import evaluate, look_up


pytestmark = pytest.mark.usefixtures("standard_promotion")

SHAPE = 64, 32


def trace(loss, *arguments):
    closed = jax.make_jaxpr(loss)(*arguments)
    return residuals.differentiate(closed, [True] * len(arguments))


def run(program, *arguments):
    """Returns the gradients that a program gives, for a cotangent of 1."""
    env = dict(enumerate(arguments))
    env.update((v, jnp.ones((), program.avals[v].dtype)) for v in program.cotangents)
    for eqn in (*program.forward, *program.backward):
        outputs = evaluate(eqn, look_up(eqn.inputs, env))
        made = [(x.shape, x.dtype) for x in outputs]
        assert made == [
            (program.avals[v].shape, program.avals[v].dtype) for v in eqn.outputs
        ]
        env.update(zip(eqn.outputs, outputs, strict=True))
    return look_up(program.gradients, env)


def layer(x, kernel, bias, dtype=jnp.bfloat16):
    """As Flax has it: all is converted first, so that gradients are converted last."""
    x, kernel, bias = (a.astype(dtype) for a in (x, kernel, bias))
    return jnp.tanh(x @ kernel + bias)


def two_layers(x, first, second, bias, dtype=jnp.bfloat16):
    hidden = layer(x, first, bias, dtype)
    return jnp.sum(layer(hidden, second, bias, dtype).astype(jnp.float32))


@pytest.fixture
def arguments(key):
    keys = jax.random.split(key, 4)
    columns = SHAPE[1]
    shapes = (SHAPE, (columns, columns), (columns, columns), (columns,))
    return [jax.random.normal(k, s) for k, s in zip(keys, shapes, strict=True)]


def test_what_is_left_to_do_for_a_gradient_comes_behind_what_makes_it(arguments):
    program = trace(two_layers, *arguments)
    finishing = finishing_equations(program)
    assert "convert_element_type" in {eqn.primitive for eqn in finishing}
    before, after = program.backward, finish_early(program).backward
    # Products with their operands swapped take the place of transposes.
    turned = len(before) - len(after)
    assert turned == sum(eqn.primitive == "transpose" for eqn in before) > 0
    early = turned
    finished = {eqn.outputs for eqn in finishing}
    for previous, eqn in itertools.pairwise(after):
        if eqn.outputs in finished and eqn.primitive != "dot_general":
            assert previous.outputs == eqn.input_values
            early += 1
    assert early == len(finishing)
    # Those of the weights wait for the cotangent of the input before.
    places = [eqn.outputs for eqn in before]
    assert any(
        places.index(eqn.outputs) > places.index(eqn.input_values) + 1
        for eqn in finishing
    )


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_products_give_gradients_that_are_not_rounded(arguments, dtype):
    program = trace(lambda *args: two_layers(*args, dtype), *arguments)
    rounded = run(program, *arguments)
    exact = run(finish_early(program), *arguments)
    for number, (before, after) in enumerate(zip(rounded, exact, strict=True)):
        assert before.dtype == after.dtype == jnp.float32
        np.testing.assert_array_equal(before.astype(dtype), after.astype(dtype))
        # The sum that is the bias's is rounded: XLA's kernels convert what they sum.
        is_product = number < 3
        assert (before != after).any() == is_product


def last_weight(make):
    """Returns a loss in which `make` takes an input and a weight in bfloat16."""

    def loss(x, weight):
        return jnp.sum(make(x.astype(jnp.bfloat16), weight).astype(jnp.float32))

    return loss


def multiply_in_bfloat16(x, weight):
    algorithm = lax.DotAlgorithmPreset.BF16_BF16_F32
    return lax.dot(x, weight.astype(jnp.bfloat16), precision=algorithm)


@pytest.mark.parametrize(
    "make",
    [
        # How it sums is said.
        multiply_in_bfloat16,
        # Read twice: the two gradients are added before they are converted.
        lambda x, w: x @ w.astype(jnp.bfloat16) + jnp.sin(x) @ w.astype(jnp.bfloat16),
        # Computed in float32 anyway.
        lambda x, w: x.astype(jnp.float32) @ w,
        # No product.
        lambda x, w: x * w.astype(jnp.bfloat16)[:1],
    ],
)
def test_other_gradients_are_as_they_were(key, make):
    x = jax.random.normal(key, SHAPE)
    weight = jax.random.normal(key, (SHAPE[1], SHAPE[1]))
    program = trace(last_weight(make), x, weight)
    finished = finish_early(program)
    assert finished.avals == program.avals
    for before, after in zip(
        run(program, x, weight), run(finished, x, weight), strict=True
    ):
        np.testing.assert_array_equal(before, after)


def test_a_gradient_in_bfloat16_stays_so(key):
    x = jax.random.normal(key, SHAPE, jnp.bfloat16)
    weight = jax.random.normal(key, (SHAPE[1], SHAPE[1]), jnp.bfloat16)
    program = trace(last_weight(lambda x, w: x @ w), x, weight)
    assert finish_early(program).avals == program.avals


@pytest.mark.slow
def test_importances_are_those_of_gradients_that_are_finished_as_a_whole(key):
    """In parts the sum of a bias that Flax reshapes is there finished alone."""
    dtype = jnp.bfloat16
    keys = jax.random.split(key, 4)
    weights = [(jax.random.normal(k, (256, 256)) / 16).astype(dtype) for k in keys[:3]]
    biases = [jnp.zeros((16, 16), dtype)] * 3
    x = jax.random.normal(keys[3], (16, 256, 256)).astype(dtype)

    def loss(weights, biases, x):
        for weight, bias in zip(weights, biases, strict=True):
            x = x + jnp.tanh(x @ weight + jnp.reshape(bias, (1, 1, -1)))
        return jnp.mean(jnp.square(x))

    def importances(max_parts):
        with dafjax.stores.PagePool() as pool:
            wrapped = dafjax.remat_compress(
                loss, bits=dafjax.AverageBits(2), store=pool, max_parts=max_parts
            )
            take = jax.jit(jax.grad(wrapped, argnums=(0, 1)))
            for _ in range(2):
                jax.block_until_ready(take(weights, biases, x))
            sites = pool.stats().sites
        return np.array([site.importance for site in sites.values()])

    np.testing.assert_allclose(importances(8), importances(1), rtol=0.1)


@pytest.mark.parametrize(
    "turn",
    [
        lambda weight: weight,
        lambda weight: weight.T,
        lambda weight: -weight.T,
        lambda weight: (2 * weight).T.T,
    ],
    ids=["as it is", "transposed", "negated", "twice"],
)
@pytest.mark.parametrize("is_inside", [True, False])
def test_gradients_of_transposed_weights_run(key, turn, is_inside):
    """XLA:CPU fails at the transpose of a product that reads bfloat16."""
    x = jax.random.normal(key, (8, 64, 128))
    weight = jax.random.normal(key, (128, 128)) / 11

    def loss(weight, x):
        weight = turn(weight) if is_inside else weight
        y = jnp.tanh(x.astype(jnp.bfloat16) @ weight.astype(jnp.bfloat16))
        return jnp.mean(y.astype(jnp.float32) ** 2)

    def gradient(wrap):
        def outer(weight):
            return wrap(loss)(weight if is_inside else turn(weight), x)

        return jax.jit(jax.grad(outer))(weight)

    wrap = functools.partial(dafjax.remat_compress, bits=8)
    expected = gradient(lambda loss: loss)
    np.testing.assert_allclose(gradient(wrap), expected, atol=2e-4)
