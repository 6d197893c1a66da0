"""The instructions that a backward pass is lowered to, and their listing."""

import pathlib
import re

import jax
import jax.numpy as jnp
import pytest
from packaging.version import Version

from dafjax import config
from dafjax._bits import Bits
from dafjax._plan.planner import make_plan
from dafjax._schedule.instructions import Barrier, Chunked, Join, Late, Unpack, listing
from dafjax._schedule.lower import lower
from dafjax._schedule.schedule import schedule_backward
from dafjax._schedule.steps import Ties
from dafjax._schedule.values import codecs_in, parts_apart
from dafjax.policies import CompressExpensive
from dafjax.stores import Arrays
from tests import networks
from tests.helpers import prepared, scheduled


GOLDEN = pathlib.Path(__file__).parent / "golden" / "schedule_mlp.txt"


@pytest.fixture
def small_parts(monkeypatch):
    # Tests have two devices, which could share the rows of a matrix.
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    monkeypatch.setattr(config, "LEAST_NBYTES_OF_CHUNK", 1)
    monkeypatch.setattr(config, "LEAST_NBYTES_UNROLLED", 1)
    monkeypatch.setattr(config, "LEAST_SHARE_OF_LARGEST", 0)


def mlp_loss(weights, x):
    for number, w in enumerate(weights):
        with jax.named_scope(f"layer_{number}"):
            x = jnp.tanh(x @ w)
    return jnp.mean(x**2)


def plan_of(loss, *arguments):
    leaves, structure = jax.tree.flatten(arguments)

    def flat(*leaves):
        return loss(*jax.tree.unflatten(structure, leaves))

    program = prepared(jax.make_jaxpr(flat)(*leaves), [True] * len(leaves))
    return make_plan(program, policy=CompressExpensive(), bits=Bits())


def lowered(plan, ties=None, most=1):
    codecs = codecs_in(Arrays(), plan)
    return lower(plan, codecs, scheduled(plan, most), ties or Ties()).instructions


def lowered_apart(plan, ties=None, most=1):
    codecs = codecs_in(Arrays(), plan)
    steps = schedule_backward(plan, parts_apart(plan, codecs, most))
    return lower(plan, codecs, steps, ties or Ties(), is_apart=True).instructions


@pytest.fixture
def plan(key):
    x = jnp.ones((32, 8, 8, 32))
    return plan_of(networks.conv_loss, networks.conv_params(key, 3, 32), x)


def kinds(instructions):
    return {type(item) for item in instructions}


@pytest.mark.skipif(
    not Version("0.10") <= Version(jax.__version__) < Version("0.11"),
    reason="Another JAX traces other equations.",
)
@pytest.mark.usefixtures("small_parts")
def test_a_perceptron_is_listed_as_it_was():
    """If a change is wanted, delete the file, run the test twice and read the diff."""
    weights = [jnp.ones((64, 64))] * 3
    plan = plan_of(mlp_loss, weights, jnp.ones((512, 64)))
    titles = "CPU, whole", "CPU, four chunks", "GPU, two chunks"
    programs = lowered(plan), lowered(plan, most=4), lowered_apart(plan, most=2)
    text = "".join(
        f"{title}\n{listing(instructions, plan.program)}\n\n"
        for title, instructions in zip(titles, programs, strict=True)
    )
    text = re.sub(r" \S*test_instructions\.py:.*", "", text)
    if not GOLDEN.exists():
        GOLDEN.write_text(text, encoding="utf-8")
        pytest.fail(f"{GOLDEN} was missing and has been written")
    assert text == GOLDEN.read_text(encoding="utf-8")


def test_without_a_tie_its_instructions_are_left_out(plan):
    assert kinds(lowered(plan)) == kinds(lowered(plan, Ties(partial=False)))
    assert Join not in kinds(lowered(plan, Ties(operands=False)))
    assert Late not in kinds(lowered(plan, Ties(arguments=False)))
    for name, left in [("in_place", "waits"), ("outgoing", "late")]:
        barriers = [b for b in lowered(plan) if isinstance(b, Barrier)]
        without = [
            b for b in lowered(plan, Ties(**{name: False})) if isinstance(b, Barrier)
        ]
        assert any(getattr(b, left) for b in barriers)
        assert not any(getattr(b, left) for b in without)
    without = lowered(plan, Ties(cotangent=False))
    assert not any(item.waits for item in without if isinstance(item, Unpack))


def test_partial_results_pass_a_barrier_before_the_next_decode(plan):
    def inner(ties=None):
        return [
            before
            for before, item in zip(
                lowered(plan, ties), lowered(plan, ties)[1:], strict=False
            )
            if isinstance(item, Unpack)
            if isinstance(before, Barrier) and not before.begins
        ]

    assert inner()
    assert not inner(Ties(partial=False))


def test_gpus_join_no_operands_and_their_codes_wait(plan):
    instructions = lowered_apart(plan)
    assert Join in kinds(lowered(plan))
    assert Join not in kinds(instructions)
    unpacked = [
        item
        for outer in instructions
        for item in (*getattr(outer, "body", ()), outer)
        if isinstance(item, Unpack) and item.fused
    ]
    assert unpacked
    assert all(item.codes_wait for item in unpacked)


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize(
    ("make", "mode"), [(lowered, "loop"), (lowered_apart, "unroll")]
)
def test_a_body_is_lowered_for_one_chunk(plan, make, mode):
    chunked = [item for item in make(plan, most=2) if isinstance(item, Chunked)]
    assert {item.mode for item in chunked} == {mode}
    rows = {
        item.like.shape[0]
        for outer in chunked
        for item in outer.body
        if isinstance(item, Unpack)
    }
    assert rows == {16}
    assert all(
        (item.barrier is None) == (mode == "unroll" or not item.loop.results)
        for item in chunked
    )
