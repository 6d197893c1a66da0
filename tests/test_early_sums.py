"""Which sums of the forward pass are taken before their operand is packed."""

import jax
import jax.numpy as jnp
import pytest

import dafjax
from dafjax._bits import Bits
from dafjax._plan.planner import make_plan
from dafjax._schedule.forward import with_early_sums
from dafjax.policies import CompressExpensive
from tests.helpers import prepared


def norm(x):
    mean = jnp.mean(x, axis=-1, keepdims=True)
    variance = jnp.mean(x**2, axis=-1, keepdims=True) - mean**2
    return (x - mean) * jax.lax.rsqrt(variance + 1e-6)


def stream(x, w):
    return jnp.tanh(x @ w) + x @ w


def stages_of(loss, *arguments):
    program = make_plan(
        prepared(jax.make_jaxpr(loss)(*arguments), [True] * len(arguments)),
        policy=CompressExpensive(),
        bits=Bits(),
    )
    packed = {item.value for item in program.kept if item.codec is not None}
    # A copy is packed in place of the value that it stands for.
    packed.update(program.copies.values())
    equations = program.program.forward
    stages = with_early_sums(program.program, equations, packed)
    # Each once, with what is made of it.
    assert {stage.equation for stage in stages} == set(equations)
    assert len(stages) == len(equations)
    assert sorted(v for stage in stages for v in stage.made) == sorted(
        v for eqn in equations for v in eqn.outputs
    )
    known = set(range(program.program.num_arguments))
    for stage in stages:
        assert known.issuperset(stage.equation.input_values)
        known.update(stage.equation.outputs)
    return stages


@pytest.fixture
def x(key):
    return jax.random.normal(key, (256, 64))


@pytest.fixture
def w(key):
    return jax.random.normal(key, (64, 64))


def test_a_norm_takes_its_sums_before_what_it_reads_is_packed(x, w):
    stages = stages_of(lambda x, w: jnp.sum(jnp.sin(norm(stream(x, w)) @ w)), x, w)
    (last,) = [now for now, stage in enumerate(stages) if stage.sums]
    *before, early = stages[last - 3 : last + 1]
    first, *others = [stage.equation for stage in (*before, early)]
    assert first.primitive == "add"
    primitives = {eqn.primitive for eqn in others}
    assert primitives in ({"reduce_sum", "square"}, {"reduce_sum", "integer_pow"})
    assert all(stage.made == () for stage in before)
    assert early.made[0] == first.outputs[0]
    assert len(early.sums) == 2


@pytest.mark.parametrize(
    "function",
    [
        # A product: nothing is made in the kernel that makes it.
        lambda x, w: norm(x @ w) @ w,
        # Of an exponential: that XLA:GPU divides in the kernel that sums.
        lambda x, w: jax.nn.softmax(jnp.tanh(x @ w)) @ w,
        # What is summed is read by others, too.
        lambda x, w: jnp.sqrt(1 + stream(x, w) ** 2) @ w,
        # Not of what is packed alone.
        lambda x, w: jnp.sum(stream(x, w) * x, -1, keepdims=True) * jnp.tanh(x @ w),
    ],
)
def test_other_sums_stay_where_they_are(function, x, w):
    stages = stages_of(lambda x, w: jnp.sum(jnp.sin(function(x, w))), x, w)
    assert not any(stage.sums for stage in stages)


def test_what_has_an_effect_keeps_its_place(x, w):
    """Else it would overtake what is to happen before it."""
    said = []

    def loss(x, w):
        s = stream(x, w)
        t = s * x
        jax.debug.callback(lambda _: said.append("t"), jnp.sum(t), ordered=True)
        jax.debug.callback(lambda _: said.append("s"), s, ordered=True)
        return jnp.sum(jnp.sin(norm(s) @ w) * t)

    jax.block_until_ready(jax.grad(dafjax.remat_compress(loss))(x, w))
    jax.effects_barrier()
    assert said == ["t", "s"]


def test_parts_that_are_all_of_it_are_no_sum(x, w):
    def loss(x, w):
        parts = jnp.split(stream(x, w), 32)
        return sum(jnp.sum(jnp.sin(part @ w)) for part in parts)

    assert not any(stage.sums for stage in stages_of(loss, x, w))
