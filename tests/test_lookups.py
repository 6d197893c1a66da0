"""Lookups in tables that are converted."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dafjax
from dafjax._passes.algebra import look_up_first
from dafjax._trace import residuals
from dafjax._trace.equation import evaluate, look_up


pytestmark = pytest.mark.usefixtures("standard_promotion")

WORDS, WIDTH = 500, 64


def trace(function, *arguments, perturbed):
    return residuals.differentiate(jax.make_jaxpr(function)(*arguments), perturbed)


def results(program, *arguments):
    env = dict(enumerate(arguments))
    for eqn in program.forward:
        outputs = evaluate(eqn, look_up(eqn.inputs, env))
        env.update(zip(eqn.outputs, outputs, strict=True))
    return look_up(program.results, env)


@pytest.fixture
def table(key):
    return jax.random.normal(key, (WORDS, WIDTH))


@pytest.fixture
def words(key):
    # Some are no words: what is found then is NaN.
    return jax.random.randint(key, (4, 8), -WORDS, WORDS + 100)


def embed(table, words):
    return jnp.sin(jnp.take(table.astype(jnp.bfloat16), words, axis=0))


def test_what_was_found_is_converted_not_the_table(table, words):
    program = trace(embed, table, words, perturbed=[True, False])
    first = look_up_first(program)
    made = {v: eqn for eqn in first.forward for v in eqn.outputs}
    (lookup,) = [eqn for eqn in first.forward if eqn.primitive == "gather"]
    assert lookup.inputs[0] == 0
    (conversion,) = [eqn for eqn in made.values() if eqn.input_values == lookup.outputs]
    assert conversion.primitive == "convert_element_type"
    assert first.avals[lookup.outputs[0]].dtype == jnp.float32
    assert first.avals[conversion.outputs[0]].dtype == jnp.bfloat16
    before, after = (results(p, table, words) for p in (program, first))
    np.testing.assert_array_equal(*(x.astype(jnp.float32) for (x,) in (before, after)))
    assert jnp.isnan(before[0]).any()
    assert not jnp.isnan(before[0]).all()


@pytest.mark.parametrize(
    "function",
    [
        lambda table, words: jnp.sin(table[words]),
        lambda table, words: jnp.sin(jnp.sin(table)[words]),
        # Integers are not what they are converted to.
        lambda table, words: table[0, 0] * words.astype(jnp.float32)[words[0]],
    ],
)
def test_other_lookups_are_as_they_were(table, words, function):
    program = trace(function, table, words, perturbed=[True, False])
    assert look_up_first(program).forward == program.forward


def test_a_gradient_of_embeddings_is_that_of_the_plain_function(table, words):
    words = words % WORDS

    def loss(table):
        hidden = embed(table, words)
        for _ in range(3):
            hidden = jnp.tanh(hidden * 1.1)
        return jnp.sum(hidden.astype(jnp.float32) ** 2)

    policy = dafjax.policies.CompressExpensive(min_nbytes=64)
    wrapped = dafjax.remat_compress(loss, bits=8, policy=policy)
    value, gradient = jax.value_and_grad(wrapped)(table)
    exact_value, exact = jax.value_and_grad(loss)(table)
    assert value == exact_value
    error = jnp.linalg.norm(gradient - exact) / jnp.linalg.norm(exact)
    assert error < 0.03
