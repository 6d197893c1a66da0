"""The order of the backward pass, without running it."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from dafjax._bits import Bits
from dafjax._plan.planner import make_plan
from dafjax._schedule import schedule
from dafjax._schedule.schedule import _Builder
from dafjax._schedule.steps import Unpacking, written
from dafjax._trace.equation import call_equation, evaluate
from dafjax.policies import CompressExpensive
from tests import networks
from tests.helpers import prepared, scheduled


@pytest.fixture
def plan(key):
    params, x = networks.conv_example(key, depth=4)
    leaves, structure = jax.tree.flatten((params, x))

    def loss(*leaves):
        return networks.conv_loss(*jax.tree.unflatten(structure, leaves))

    return make_plan(
        prepared(jax.make_jaxpr(loss)(*leaves), [True] * len(leaves)),
        policy=CompressExpensive(min_nbytes=256),
        bits=Bits(),
    )


def stretches(steps):
    """Cuts the steps where a stretch begins."""
    cut = [n for n, step in enumerate(steps) if step.begins]
    return [steps[a:b] for a, b in zip(cut, [*cut[1:], len(steps)], strict=True)]


def test_every_equation_has_one_step_and_the_gradients_the_last(plan):
    *steps, last = scheduled(plan)
    assert last.equation is None
    assert len(steps) == len(plan.program.backward)
    assert {step.equation for step in steps} == set(plan.program.backward)


def test_a_stretch_begins_before_every_expensive_equation(plan):
    for step in scheduled(plan):
        if step.equation is not None and not step.equation.rule.is_cheap:
            assert step.begins


def test_nothing_is_unpacked_before_the_first_stretch(plan):
    steps = scheduled(plan)
    first = next(n for n, step in enumerate(steps) if step.begins)
    assert not any(step.unpacked for step in steps[:first])


def test_nothing_is_unpacked_twice_in_a_stretch(plan):
    for stretch in stretches(scheduled(plan)):
        unpacked = [value for step in stretch for value in step.unpacked]
        assert len(unpacked) == len(set(unpacked))


def test_everything_kept_in_codes_is_unpacked(plan):
    unpacked = {v for step in scheduled(plan) for v in step.unpacked}
    assert unpacked == {item.value for item in plan.kept if item.codec is not None}


def test_what_a_stretch_computed_and_is_needed_later_goes_through_the_next_tie(plan):
    steps = scheduled(plan)
    gradients = set(plan.program.gradients)
    for before, after in zip(stretches(steps), stretches(steps)[1:], strict=False):
        computed = {
            v for step in before if step.equation for v in step.equation.outputs
        }
        assert computed & gradients <= set(after[0].cotangents)


def test_saved_values_go_through_the_tie_of_the_stretch_that_reads_them(plan):
    raw = {item.value for item in plan.kept if item.codec is None}
    for stretch in stretches(scheduled(plan)):
        read = {
            v
            for step in stretch
            for eqn in (*step.recomputed, step.equation)
            if eqn is not None
            for v in eqn.input_values
        }
        assert raw & read <= set(stretch[0].given)


def test_a_large_argument_does_not_go_through_ties(plan):
    large = {v for v in plan.arguments if plan.program.avals[v].size * 4 > 16 * 1024}
    assert large
    for step in scheduled(plan):
        assert large.isdisjoint(step.given)


def test_a_backward_pass_without_compressed_residuals_has_no_stretch():
    closed = jax.make_jaxpr(lambda x: jnp.sum(x * 2.0))(jnp.ones(3))
    plan = make_plan(prepared(closed, [True]), policy=CompressExpensive(), bits=Bits())
    assert not any(step.begins for step in scheduled(plan))


def test_sources_are_unpacked_one_after_another(plan):
    behind = [
        set(item.behind)
        for step in scheduled(plan)
        for item in step.restored
        if isinstance(item, Unpacking)
    ]
    assert any(behind)
    recomputed = set(plan.recomputed)
    assert all(values <= recomputed for values in behind)


def test_operands_are_restored_in_an_order_in_which_they_can_be(plan):
    kept = {item.value for item in plan.kept}
    for stretch in stretches(scheduled(plan)):
        at_hand = kept | set(plan.arguments)
        for step in stretch:
            for item in step.restored:
                if isinstance(item, Unpacking):
                    assert set(item.behind) <= at_hand
                    continue
                assert set(item.input_values) <= at_hand
                at_hand.update(item.outputs)


def test_a_product_reads_its_cotangent_tied_with_what_was_restored(plan):
    restored = {item.value for item in plan.kept} | set(plan.recomputed)
    joined = [set(step.joined) for step in scheduled(plan) if step.joined]
    assert joined
    for values in joined:
        assert values & restored
        assert values - restored


def test_a_stretch_only_waits_for_what_products_gave(plan):
    steps = scheduled(plan)
    made_by = {v: s.equation for s in steps if s.equation for v in s.equation.outputs}
    awaited = {v for step in steps for v in step.awaited}
    assert awaited
    assert not any(made_by[v].rule.is_cheap for v in awaited)
    through = {v for step in steps for v in step.cotangents} - awaited
    assert all(made_by[v].rule.is_cheap for v in through if v in made_by)
    assert through & made_by.keys()


def softmax_plan():
    """Attention, whose exponentials are read for probabilities and again later."""
    x = jnp.ones((2, 128, 32))

    def loss(query, key, value):
        weights = jnp.exp(jnp.einsum("btd,bsd->bts", query, key) / 32.0)
        weights = weights / weights.sum(-1, keepdims=True)
        return jnp.sum(jnp.einsum("bsd,bts->bdt", value, weights) ** 2)

    return make_plan(
        prepared(jax.make_jaxpr(loss)(x, x, x), [True] * 3),
        policy=CompressExpensive(min_nbytes=256),
        bits=Bits(),
    )


def waiting_sources(plan):
    """Returns residuals unpacked for a product that reads others, and read later."""
    found = set()
    for first, *others in stretches(scheduled(plan)):
        if first.equation is None or first.equation.rule.is_cheap:
            continue
        waiting = {v for v in first.unpacked if plan.program.nbytes(v) > 16 * 1024}
        waiting.difference_update(first.equation.input_values)
        for step in others:
            for eqn in (*step.recomputed, step.equation):
                if eqn is not None:
                    found |= waiting.intersection(eqn.input_values)
    return found


def test_what_a_product_was_recomputed_from_does_not_wait_beside_it():
    assert not waiting_sources(softmax_plan())


def test_without_a_stretch_of_its_own_exponentials_wait(monkeypatch):
    monkeypatch.setattr(_Builder, "_sources_waited", lambda self, now: False)
    monkeypatch.setattr(
        schedule, "order_products", lambda plan, **_: plan.program.backward
    )
    (value,) = waiting_sources(softmax_plan())
    assert softmax_plan().program.avals[value].shape == (2, 128, 128)


def test_a_loop_has_slices_delayed_and_no_whole_arguments(plan):
    x, w = jnp.ones((128, 128)), jnp.ones((128, 128))
    closed = jax.make_jaxpr(lambda w, x: jnp.tanh(x @ w) @ w)(w, x)
    plan = make_plan(
        prepared(closed, [True, True]),
        policy=CompressExpensive(min_nbytes=256),
        bits=Bits(),
        activations=(1,),
    )
    for slices in (frozenset(), frozenset([0])):
        steps = scheduled(dataclasses.replace(plan, slices=slices))
        assert {v for step in steps for v in step.delayed} == slices


def test_large_arguments_of_convolutions_are_delayed(plan):
    large = {v for v in plan.arguments if plan.program.avals[v].size * 4 > 16 * 1024}
    delayed = {v for step in scheduled(plan) for v in step.delayed}
    assert delayed == large


def test_what_products_read_is_written_and_nothing_else(plan):
    """A rectifier's selection is a call, and does not count: XLA sees what it does."""
    assert "select_rectified" in {eqn.primitive for eqn in plan.recomputed.values()}
    seen = set()
    for step in scheduled(plan):
        if step.equation is None:
            continue
        multiplies = step.equation.rule.is_product
        read = set(step.equation.input_values) if multiplies else set()
        assert written((*step.restored, step.equation)) == read
        seen.add(multiplies)
    assert seen == {True, False}


def test_a_call_of_a_product_is_not_fused(plan):
    product = next(e for e in plan.program.forward if e.rule.is_product)

    def call(x, w):
        return jnp.sin(evaluate(product, (x, w))[0])

    avals = [plan.program.avals[v] for v in product.input_values]
    inputs, outputs = product.inputs, product.outputs
    equation = call_equation(call, avals, inputs, outputs, product)
    assert not equation.is_fusible
    assert written([equation]) == set(product.input_values)
