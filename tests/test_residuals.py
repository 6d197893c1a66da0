"""Forward and backward programs of a function."""

import jax
import jax.numpy as jnp

from dafjax._trace.residuals import differentiate
from tests import networks


def program(f, *arguments, perturbed):
    return differentiate(jax.make_jaxpr(f)(*arguments), perturbed)


def test_every_backward_equation_depends_on_a_cotangent(key):
    p = networks.mlp_params(key)
    x = jnp.ones((8, 64))
    leaves, structure = jax.tree.flatten((p, x))
    prog = program(
        lambda *leaves: networks.mlp_loss(*jax.tree.unflatten(structure, leaves)),
        *leaves,
        perturbed=[True] * len(leaves),
    )
    depends = set(prog.cotangents)
    for eqn in prog.backward:
        assert depends.intersection(eqn.input_values)
        depends.update(eqn.outputs)


def test_an_input_that_is_not_perturbed_causes_no_residual():
    def f(frozen, x):
        return (jnp.sin(x) @ frozen).sum()

    frozen, x = jnp.ones((4, 4)), jnp.ones((2, 4))
    with_both = program(f, frozen, x, perturbed=[True, True]).residuals()
    with_x = program(f, frozen, x, perturbed=[False, True]).residuals()
    assert len(with_x) < len(with_both)
    # cos(x), and the frozen weight itself, which is an argument.
    assert with_x[0] == 0
    assert len(with_x) == 2


def test_gradients_are_one_for_each_perturbed_argument():
    prog = program(
        lambda a, b, c: a * b * c, 1.0, 2.0, 3.0, perturbed=[True, False, True]
    )
    assert len(prog.gradients) == 2


def test_integer_results_have_no_cotangent():
    prog = program(lambda x: (x * 2.0, jnp.argmax(x)), jnp.ones(3), perturbed=[True])
    assert prog.differentiable == (True, False)
    assert len(prog.cotangents) == 1


def test_values_are_numbered_in_the_order_in_which_they_are_made(key):
    p, x = networks.conv_example(key)
    leaves, structure = jax.tree.flatten((p, x))
    prog = program(
        lambda *leaves: networks.conv_loss(*jax.tree.unflatten(structure, leaves)),
        *leaves,
        perturbed=[True] * len(leaves),
    )
    for eqn in (*prog.forward, *prog.backward):
        assert max(eqn.input_values, default=-1) < min(eqn.outputs)


def test_what_is_rematerialized_inside_is_computed_once(key):
    p, x = networks.conv_example(key)
    leaves, structure = jax.tree.flatten((p, x))

    def primitives(wrap_block):
        def f(*leaves):
            p, x = jax.tree.unflatten(structure, leaves)
            return networks.conv_loss(p, x, wrap_block=wrap_block)

        prog = program(f, *leaves, perturbed=[True] * len(leaves))
        return [eqn.primitive for eqn in prog.forward]

    assert primitives(jax.checkpoint).count("conv_general_dilated") == len(p)
