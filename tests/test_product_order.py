"""Which products of the backward pass change places."""

import jax
import jax.numpy as jnp
import pytest

from dafjax._bits import Bits
from dafjax._plan.planner import make_plan
from dafjax._schedule.schedule import schedule_backward
from dafjax._schedule.stages import order_products
from dafjax._schedule.values import codecs_in, parts_apart, parts_in
from dafjax.policies import CompressExpensive
from dafjax.stores import Arrays
from tests import networks
from tests.helpers import prepared


LENGTH, CHANNELS = 64, 8


def plan_of(loss, *arguments, perturbed=None):
    closed = jax.make_jaxpr(loss)(*arguments)
    return make_plan(
        prepared(closed, perturbed or [True] * len(arguments)),
        policy=CompressExpensive(min_nbytes=256),
        bits=Bits(),
    )


@pytest.fixture
def attention(key):
    """The plan of a loss of queries, keys and values."""

    def loss(*heads):
        return jnp.sum(jnp.sin(jax.nn.dot_product_attention(*map(jnp.tanh, heads))))

    return plan_of(loss, *jax.random.normal(key, (3, 1, LENGTH, 1, CHANNELS)))


def convolution(x, kernel, stride):
    numbers = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(
        x, kernel, (stride, stride), "SAME", dimension_numbers=numbers
    )


@pytest.fixture
def shortcut(key):
    """The plan of a residual block that halves an image."""

    def loss(x, first, kernels, of_shortcut):
        image = jnp.tanh(convolution(x, first, 1))
        y = jnp.tanh(convolution(image, kernels[0], 2))
        y = jnp.tanh(convolution(y, kernels[1], 1))
        return jnp.sum(jnp.sin(y + convolution(image, of_shortcut, 2)))

    x = jax.random.normal(key, (4, 16, 16, CHANNELS))
    kernels = jnp.ones((2, 3, 3, CHANNELS, CHANNELS))
    arguments = x, kernels[0], kernels, jnp.ones((1, 1, CHANNELS, CHANNELS))
    return plan_of(loss, *arguments, perturbed=[False, True, True, True])


@pytest.fixture
def convolutions(key):
    params, x = networks.conv_example(key, depth=4)
    leaves, structure = jax.tree.flatten((params, x))
    return plan_of(
        lambda *leaves: networks.conv_loss(*jax.tree.unflatten(structure, leaves)),
        *leaves,
    )


def products(equations, program):
    """Returns the sizes of what expensive equations make, in their order."""
    return [
        program.avals[eqn.outputs[0]].size for eqn in equations if not eqn.rule.is_cheap
    ]


def test_the_small_cotangent_of_values_is_made_before_that_of_probabilities(attention):
    program = attention.program
    before = products(program.backward, program)
    after = products(order_products(attention), program)
    large = LENGTH**2
    assert before.index(large) == 0
    assert after.index(large) == 1
    assert sorted(before) == sorted(after)


@pytest.mark.parametrize("are_apart", [False, True])
@pytest.mark.parametrize("name", ["attention", "convolutions", "shortcut"])
def test_every_equation_stays_behind_those_that_it_reads(name, are_apart, request):
    plan = request.getfixturevalue(name)
    program = plan.program
    ordered = order_products(plan, are_apart=are_apart)
    assert len(ordered) == len(program.backward)
    assert set(ordered) == set(program.backward)
    at_hand = {*program.residuals(), *program.cotangents}
    for equation in ordered:
        assert at_hand.issuperset(equation.input_values)
        at_hand.update(equation.outputs)


def test_weights_that_are_turned_round_move_nothing(convolutions):
    """Their gradients would wait: of large ones XLA:GPU had seven instead of three."""
    for are_apart in (False, True):
        ordered = order_products(convolutions, are_apart=are_apart)
        products = [eqn for eqn in ordered if not eqn.rule.is_cheap]
        before = [e for e in convolutions.program.backward if not e.rule.is_cheap]
        assert products == before


def test_cheap_equations_and_a_chain_of_products_stay_in_order(key):
    def loss(*weights):
        y = weights[0]
        for w in weights[1:]:
            y = jnp.tanh(y @ w)
        return jnp.sum(y)

    # One argument alone: every product of the backward pass needs the one before.
    weights = jax.random.normal(key, (5, 16, 16))
    plan = plan_of(loss, *weights, perturbed=[True, *[False] * 4])
    assert order_products(plan) == plan.program.backward


def test_a_print_in_between_keeps_its_place(key):
    @jax.custom_vjp
    def shown(x):
        return x

    def backward(_, cotangent):
        jax.debug.print("{}", cotangent[0, 0])
        return (cotangent,)

    shown.defvjp(lambda x: (x, None), backward)

    def loss(probabilities, value):
        y = shown(jnp.tanh(probabilities)) @ shown(jnp.tanh(value))
        return jnp.sum(jnp.sin(y))

    plan = plan_of(
        loss,
        jax.random.normal(key, (LENGTH, LENGTH)),
        jax.random.normal(key, (LENGTH, CHANNELS)),
    )
    effects = [eqn for eqn in plan.program.backward if eqn.has_effect]
    assert len(effects) == 2
    assert [eqn for eqn in order_products(plan) if eqn.has_effect] == effects


def test_a_large_cotangent_of_a_small_one_is_made_where_it_is_read(shortcut):
    """On GPUs: the small one waits."""
    program = shortcut.program
    image_size = 4 * 16 * 16 * CHANNELS

    def between(equations):
        """Returns how many products run between the two cotangents of the image."""
        found = products(equations, program)
        first, second = (n for n, size in enumerate(found) if size == image_size)
        return second - first - 1

    assert between(program.backward) > 0
    assert between(order_products(shortcut)) > 0
    assert between(order_products(shortcut, are_apart=True)) == 0


def test_what_two_gradients_read_is_unpacked_once(shortcut):
    """On GPUs: that of the shortcut's kernel waits for the other one."""
    counts = []
    codecs = codecs_in(Arrays(), shortcut)
    for parts in (parts_in(Arrays(), shortcut, 1), parts_apart(shortcut, codecs, 1)):
        steps = schedule_backward(shortcut, parts)
        unpacked = [value for step in steps for value in step.unpacked]
        counts.append(len(unpacked) - len(set(unpacked)))
    in_loops, apart = counts
    assert apart < in_loops


def test_a_gradient_that_is_read_late_is_made_at_once_if_more_would_wait(key):
    """Of a kernel that is used twice: what it is made of is larger than it is."""

    def loss(kernel, x):
        return jnp.sum(
            jnp.sin(convolution(jnp.tanh(convolution(x, kernel, 1)), kernel, 1))
        )

    kernel = jax.random.normal(key, (3, 3, CHANNELS, CHANNELS))
    plan = plan_of(loss, kernel, jax.random.normal(key, (4, 16, 16, CHANNELS)))
    program = plan.program
    before = products(program.backward, program)
    assert before[0] == kernel.size != before[1]
    assert order_products(plan, are_apart=True) == program.backward


def test_expansions_come_right_before_what_reads_them():
    """Outer products are larger than their factors, and would wait in their place."""

    def loss(w, x):
        y = jnp.einsum("bi,bij->bj", x, w)
        z = jnp.einsum("bi,bij->bj", jnp.tanh(y), w)
        return jnp.sum(jnp.sin(z))

    plan = plan_of(loss, jnp.ones((8, 32, 32)), jnp.ones((8, 32)))
    names = [eqn.primitive for eqn in order_products(plan)]
    (first, second) = (n for n, name in enumerate(names) if name == "outer_product")
    (total,) = (n for n, name in enumerate(names) if name == "add_any")
    assert names.index("dot_general") < first < second < total
