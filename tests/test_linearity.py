"""How what the backward pass computes depends on products that are kept in codes."""

import cProfile

import jax
import jax.numpy as jnp
import pytest

from dafjax._bits import Use
from dafjax._plan.analysis import find_uses
from tests.helpers import prepared


SHAPE = (64, 64)


def analyzed(f, *shapes):
    """Returns what `find_uses` is asked if products are in codes, the rest computed."""
    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    program = prepared(jax.make_jaxpr(f)(*args), [True] * len(args))
    recomputed, inexact = {}, []
    for eqn in program.forward:
        if eqn.primitive == "dot_general":
            inexact.extend(eqn.outputs)
        else:
            recomputed.update(dict.fromkeys(eqn.outputs, eqn))
    return program, recomputed, inexact


def evens(y):
    return jax.lax.slice(y, (0, 0), y.shape, (2, 1))


def odds(y):
    return jax.lax.slice(y, (1, 0), y.shape, (2, 1))


def twice(y):
    return jnp.concatenate([y, y])


def halves(y):
    return evens(y), odds(y)


def quarters(y):
    return halves(evens(y))


def quarter_and_other_half(y):
    first, second = halves(y)
    return twice(evens(first)), second


def half_with_itself(y):
    half = evens(y)
    return half, half


def half_and_its_quarter(y):
    half = evens(y)
    return half, twice(odds(half))


def quarter_and_its_half(y):
    return half_and_its_quarter(y)[::-1]


def whole_and_quarter(y):
    return y, twice(twice(evens(odds(y))))


def half_and_quarters_of_both(y):
    first, second = halves(y)
    return first, jnp.concatenate([evens(first), odds(second)])


APART = (halves, quarters, quarter_and_other_half)
TOGETHER = (
    half_with_itself,
    half_and_its_quarter,
    quarter_and_its_half,
    whole_and_quarter,
    half_and_quarters_of_both,
)


def use_in_product(factors):
    """Returns how a product enters whose parts a cotangent meets one after another."""

    def f(w, x, u):
        first, second = factors(x @ w)
        return jnp.mean((u[: len(first)] * first) * second)

    (use,) = find_uses(*analyzed(f, SHAPE, SHAPE, SHAPE)).values()
    return use


@pytest.mark.parametrize("factors", APART)
def test_a_product_of_parts_that_are_apart_is_linear(factors):
    assert use_in_product(factors) == Use.LINEAR


@pytest.mark.parametrize("factors", TOGETHER)
def test_a_product_with_a_part_of_the_other_factor_is_not_linear(factors):
    assert use_in_product(factors) == Use.SMOOTH


def test_a_sum_shares_what_one_of_its_terms_has_part_of():
    """Both products are in the sum; the other factor is of the second alone."""

    def f(w, v, x, u):
        y, z = x @ w, x @ v
        first, half = evens(y), evens(z)
        total = first + twice(odds(half))
        return jnp.mean((u[: len(half)] * total) * half)

    uses = find_uses(*analyzed(f, SHAPE, SHAPE, SHAPE, SHAPE))
    assert list(uses.values()) == [Use.LINEAR, Use.SMOOTH]


def calls_per_equation(length):
    """Returns how many calls it takes to analyze a scan of gated states."""

    def combine(first, second):
        return first[0] * second[0], second[0] * first[1] + second[1]

    def f(w, x):
        gate_and_input = jnp.split(x @ w, 2, axis=-1)
        _, states = jax.lax.associative_scan(combine, gate_and_input)
        return jnp.sum(jnp.square(states))

    program, recomputed, inexact = analyzed(f, SHAPE, (length, SHAPE[0]))
    profile = cProfile.Profile()
    profile.runcall(find_uses, program, recomputed, inexact)
    calls = sum(entry.callcount for entry in profile.getstats())
    return calls / (len(recomputed) + len(program.backward))


def test_an_equation_takes_as_many_calls_however_often_a_scan_halves():
    """The ways from a state to the product multiply with every halving."""
    assert calls_per_equation(16) < 1.2 * calls_per_equation(4)
