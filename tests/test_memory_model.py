"""The static memory model against XLA's analysis of the compiled program.

`python -m benchmarks.memory_model` compares both over the whole zoo.
"""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import dafjax
from dafjax._memory.predict import (
    predict_temp_nbytes,
    predict_temp_nbytes_of_passes,
)
from dafjax._trace.residuals import differentiate, is_differentiable, vjp_of_perturbed
from dafjax._trace.tracing import as_function
from tests import networks


MEMORY_OPTIMIZED = {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}


def normal(*shape):
    return jax.random.normal(jax.random.key(len(shape)), shape)


def layer_norms(weights, x):
    for w in weights:
        mean = jnp.mean(x, -1, keepdims=True)
        x = x + jnp.tanh((x - mean) * lax.rsqrt(jnp.var(x, -1, keepdims=True)) @ w)
    return jnp.mean(x**2)


def attention(weights, x):
    for w in weights:
        query, key, value = jnp.split(x @ jnp.tile(w, (1, 3)), 3, -1)
        scores = jnp.einsum("bqd,bkd->bqk", query, key)
        x = x + jnp.einsum("bqk,bkd->bqd", jax.nn.softmax(scores), value)
    return jnp.mean(x**2)


def recurrent(weights, x):
    def step(h, x):
        h = jnp.tanh(h @ weights[0] + x @ weights[1])
        return h, h

    return jnp.mean(lax.scan(step, jnp.zeros(x.shape[1:]), x)[1] ** 2)


def convolutions(params, x):
    return networks.conv_loss(params, x)


WEIGHTS = tuple(normal(128, 128) / 11 for _ in range(4))
PROGRAMS = {
    "layer_norms": (layer_norms, (WEIGHTS, normal(512, 128))),
    "attention": (attention, (WEIGHTS, normal(8, 128, 128))),
    "recurrent": (recurrent, (WEIGHTS, normal(64, 32, 128))),
    "convolutions": (
        convolutions,
        (networks.conv_params(jax.random.key(0), 3), normal(16, 16, 16, 16)),
    ),
}
WRAPS = {"plain": lambda fun: fun, "dafjax": dafjax.remat_compress}


def compared(loss, arguments, *, memory_optimized):
    """Returns the predicted bytes, and those that XLA allocates."""
    traced = jax.jit(jax.value_and_grad(loss)).trace(*arguments)
    options: Any = MEMORY_OPTIMIZED if memory_optimized else None
    analysis: Any = traced.lower().compile(compiler_options=options).memory_analysis()
    predicted = predict_temp_nbytes(traced.jaxpr, memory_optimized=memory_optimized)
    return predicted, analysis.temp_size_in_bytes


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_it_predicts_temporary_bytes(name, wrap):
    loss, arguments = PROGRAMS[name]
    for memory_optimized in (False, True):
        predicted, allocated = compared(
            WRAPS[wrap](loss), arguments, memory_optimized=memory_optimized
        )
        assert predicted == pytest.approx(allocated, rel=0.25)


@pytest.mark.parametrize("name", PROGRAMS)
def test_it_predicts_the_same_of_passes_that_are_traced_already(name):
    loss, arguments = PROGRAMS[name]
    leaves, structure = jax.tree.flatten(arguments)
    closed = jax.make_jaxpr(lambda *x: loss(*jax.tree.unflatten(structure, x)))(*leaves)
    moves = tuple(map(is_differentiable, closed.in_avals))
    program = differentiate(closed, moves)

    def both(leaves, cotangent):
        run = as_function(closed)
        results, pullback = vjp_of_perturbed(run, leaves, moves, [True])
        return results, pullback([cotangent])

    traced = jax.make_jaxpr(both)(leaves, jnp.float32(1))
    assert predict_temp_nbytes_of_passes(program) == predict_temp_nbytes(traced)


def test_results_and_arguments_are_not_counted():
    x = normal(512, 512)
    assert predict_temp_nbytes(jax.make_jaxpr(lambda x: x + 1)(x)) == 0


def test_what_nothing_reads_is_not_counted():
    def unused(x):
        del_me = x @ x
        return x + 0 * lax.stop_gradient(x), del_me

    closed = jax.make_jaxpr(lambda x: unused(x)[0])(normal(512, 512))
    assert predict_temp_nbytes(closed) == 0


def test_a_buffer_is_reused_after_its_last_use():
    def chain(x, length):
        for _ in range(length):
            x = jnp.tanh(x) @ x
        return jnp.sum(x)

    x = normal(256, 256)
    short, long = (
        predict_temp_nbytes(jax.make_jaxpr(lambda x, n=n: chain(x, n))(x))
        for n in (3, 9)
    )
    assert 2 * x.nbytes <= short == long


def test_branches_count_once():
    def branches(x):
        return lax.cond(x[0, 0] > 0, lambda: (x @ x) @ x, lambda: (x @ x) @ (x @ x))

    x = normal(256, 256)
    assert x.nbytes <= predict_temp_nbytes(jax.make_jaxpr(branches)(x)) < 4 * x.nbytes


def test_tangents_of_counters_are_no_numbers():
    """JAX writes them as literals of a dtype that cannot be compared."""

    def loss(weights, x):
        def step(i, h):
            return h + jnp.tanh(h @ weights[i])

        return jnp.sum(lax.fori_loop(0, 3, step, x))

    arguments = normal(3, 64, 64), normal(256, 64)
    wrapped = dafjax.remat_compress(loss)
    closed = jax.jit(jax.value_and_grad(wrapped)).trace(*arguments).jaxpr
    assert predict_temp_nbytes(closed) > arguments[1].nbytes
