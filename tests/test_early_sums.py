"""Which sums of the forward pass are taken before their operand is packed."""

import jax
import jax.numpy as jnp
import pytest

from dafjax._bits import Bits
from dafjax._plan.planner import make_plan
from dafjax._schedule.early_sums import with_early_sums
from dafjax._trace.residuals import differentiate
from dafjax.policies import CompressExpensive


def norm(x):
    mean = jnp.mean(x, axis=-1, keepdims=True)
    variance = jnp.mean(x**2, axis=-1, keepdims=True) - mean**2
    return (x - mean) * jax.lax.rsqrt(variance + 1e-6)


def stream(x, w):
    return jnp.tanh(x @ w) + x @ w


def runs_of(loss, *arguments):
    program = make_plan(
        differentiate(jax.make_jaxpr(loss)(*arguments), [True] * len(arguments)),
        policy=CompressExpensive(),
        bits=Bits(),
    )
    packed = {item.value for item in program.kept if item.codec is not None}
    equations = program.program.forward
    runs = with_early_sums(program.program, equations, packed)
    # Each once, with what is made of it.
    assert {run.equation for run in runs} == set(equations)
    assert len(runs) == len(equations)
    assert sorted(v for run in runs for v in run.made) == sorted(
        v for eqn in equations for v in eqn.outputs
    )
    known = set(range(program.program.num_arguments))
    for run in runs:
        assert known.issuperset(run.equation.input_values)
        known.update(run.equation.outputs)
    return runs


@pytest.fixture
def x(key):
    return jax.random.normal(key, (256, 64))


@pytest.fixture
def w(key):
    return jax.random.normal(key, (64, 64))


def test_a_norm_takes_its_sums_before_what_it_reads_is_packed(x, w):
    runs = runs_of(lambda x, w: jnp.sum(jnp.sin(norm(stream(x, w)) @ w)), x, w)
    (last,) = [now for now, run in enumerate(runs) if run.sums]
    *before, early = runs[last - 3 : last + 1]
    first, *others = [run.equation for run in (*before, early)]
    assert first.primitive == "add"
    primitives = {eqn.primitive for eqn in others}
    assert primitives in ({"reduce_sum", "square"}, {"reduce_sum", "integer_pow"})
    assert all(run.made == () for run in before)
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
    runs = runs_of(lambda x, w: jnp.sum(jnp.sin(function(x, w))), x, w)
    assert not any(run.sums for run in runs)
