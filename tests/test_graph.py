"""Flat programs: calls inlined, equations evaluated one by one."""

import jax
import jax.numpy as jnp
import numpy as np

from dafjax._trace.equation import Constant, evaluate
from dafjax._trace.graph import flatten, live_equations


def run(graph, *arguments):
    env = dict(enumerate(arguments))
    read = lambda atoms: [a.value if isinstance(a, Constant) else env[a] for a in atoms]
    for eqn in graph.equations:
        env.update(zip(eqn.outputs, evaluate(eqn, read(eqn.inputs)), strict=True))
    return read(graph.outputs)


def test_running_the_flat_program_gives_what_the_function_gives(key):
    @jax.jit
    def inner(x):
        return jax.nn.relu(x) * 2.0, x.sum()

    def f(x):
        y, s = inner(jnp.sin(x))
        return jax.nn.gelu(y) + s, 3.0

    x = jax.random.normal(key, (5, 7))
    graph = flatten(jax.make_jaxpr(f)(x))
    for got, want in zip(run(graph, x), f(x), strict=True):
        np.testing.assert_array_equal(got, want)


def test_no_call_is_left_in_a_flat_program():
    def f(x):
        return jax.jit(jax.nn.silu)(jax.nn.relu(x))

    graph = flatten(jax.make_jaxpr(f)(jnp.ones(3)))
    assert {eqn.primitive for eqn in graph.equations} <= {"max", "logistic", "mul"}


def test_an_operand_read_twice_is_one_input():
    graph = flatten(jax.make_jaxpr(lambda x: x * x)(jnp.ones(3)))
    assert graph.equations[0].inputs == (0,)
    np.testing.assert_array_equal(run(graph, jnp.full(3, 3.0))[0], np.full(3, 9.0))


def test_live_equations_leave_out_what_is_not_wanted():
    def f(x):
        return jnp.sin(x), jnp.cos(x)

    graph = flatten(jax.make_jaxpr(f)(1.0))
    live = live_equations(graph.equations, graph.outputs[:1])
    assert [eqn.primitive for eqn in live] == ["sin"]


def test_an_equation_knows_its_place_in_the_model():
    def f(x):
        with jax.named_scope("head"):
            return jnp.sin(x)

    (eqn,) = flatten(jax.make_jaxpr(f)(1.0)).equations
    assert "head" in eqn.name_stack
    assert "test_graph.py" in eqn.source


def test_equal_operations_on_equal_values_have_equal_keys():
    def f(x, y):
        jax.debug.print("{}", x)
        jax.debug.print("{}", x)
        return [x + y, x + y, y + x, x * 0.0, x * -0.0, jnp.sum(x), jnp.sum(x)]

    graph = flatten(jax.make_jaxpr(f)(jnp.ones(3), jnp.ones(3)))
    effects = [eqn.key for eqn in graph.equations if eqn.has_effect]
    assert effects == [None, None]
    keys = [eqn.key for eqn in graph.equations if not eqn.has_effect]
    assert None not in keys
    assert [keys.index(key) for key in keys] == [0, 0, 2, 3, 4, 5, 5]
