"""The table of primitives is complete, and equations read it by their dtype."""

import importlib
import pathlib
import pkgutil
import re

import jax
import jax._src.lax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Primitive

import dafjax
from dafjax._memory.read import READERS
from dafjax._trace.graph import flatten
from dafjax._trace.rules import OPS, WITHOUT_ROW, Error, Lowering, Operands, rule_of


# Rows of primitives that only some supported versions of JAX have.
_OF_OTHER_VERSIONS = {
    *("exp_neg_sq", "log2", "philox2x32", "philox4x32", "polynomial", "threefry4x32")
}
_MODULES = (
    *(f"lax.{module.name}" for module in pkgutil.iter_modules(jax._src.lax.__path__)),
    *("ad_util", "ad_checkpoint", "callback", "core", "custom_batching"),
    *("custom_derivatives", "debugging", "dispatch", "ffi", "interpreters.ad"),
    *("pjit", "prng", "random", "random.prng", "random.threefry2x32", "shard_map"),
    *("random.threefry4x32", "random.philox2x32", "random.philox4x32"),
)


def _primitives() -> set[str]:
    """Names of the primitives that modules of JAX define."""
    found = set()
    for name in _MODULES:
        try:
            found |= _primitives_of(f"jax._src.{name}")
        except ImportError:
            continue  # Versions of JAX place `prng` differently.
    return found


def _primitives_of(module: str) -> set[str]:
    values = vars(importlib.import_module(module)).values()
    return {value.name for value in values if isinstance(value, Primitive)}


def _primitives_of_dafjax() -> set[str]:
    names = (path.stem for path in (_library() / "_native").glob("_[a-z]*.py"))
    return set().union(*(_primitives_of(f"dafjax._native.{n}") for n in names))


def test_every_primitive_of_jax_has_a_row_or_is_listed_without_one():
    names = _primitives()
    assert len(names) > 200
    assert names - OPS.keys() - WITHOUT_ROW == set()
    assert OPS.keys() & WITHOUT_ROW == set()


def test_no_row_names_a_primitive_that_jax_and_dafjax_lack():
    source = "".join(
        path.read_text()
        for path in (p for p in _library().rglob("*.py") if p.name != "rules.py")
    )
    functions = set(re.findall(r"def (\w+)\(", source))
    # The name that equations give to a `dot_general` that sums nothing.
    functions.add("outer_product")
    known = _primitives() | _primitives_of_dafjax() | functions
    assert OPS.keys() - known <= _OF_OTHER_VERSIONS


def test_the_memory_model_reads_primitives_that_exist():
    assert READERS.keys() <= _primitives() | _primitives_of_dafjax()


def test_elementwise_primitives_are_fused_or_do_not_run():
    rows = {name: rule for name, rule in OPS.items() if rule.is_elementwise}
    ways = Lowering.FUSED | Lowering.IDENTITY
    assert [name for name, rule in rows.items() if not rule.lowering & ways] == []


def _library() -> pathlib.Path:
    return pathlib.Path(dafjax.__file__).parent


def test_the_slope_of_erf_is_read_as_a_primitive():
    """Bits of a decoded number are not bits of the exact one (since JAX 0.12)."""
    slope = jax.make_jaxpr(jax.grad(jax.scipy.special.erf))(1.0)
    names = {eqn.primitive for eqn in flatten(slope).equations}
    assert not names & {"custom_jvp_call", "bitcast_convert_type"}


def test_a_function_with_the_name_of_one_of_jax_is_looked_into():
    @jax.custom_jvp
    def exp_neg_sq(x):
        return jnp.exp(x)

    exp_neg_sq.defjvps(lambda tangent, ans, x: ans * tangent)
    (eqn,) = flatten(jax.make_jaxpr(exp_neg_sq)(1.0)).equations
    assert eqn.primitive == "exp"


@pytest.mark.parametrize("function", [jnp.tanh, jnp.sin, jax.lax.asinh])
def test_what_is_smooth_for_real_numbers_has_poles_for_complex_ones(function):
    def error(dtype) -> Error:
        x = jnp.ones(3, dtype)
        (eqn,) = flatten(jax.make_jaxpr(jax.jit(function))(x)).equations
        return eqn.error

    assert error(jnp.float32) is Error.SMOOTH
    assert error(jnp.complex64) is Error.AMPLIFIED


def test_a_negative_power_has_a_pole():
    def error(power: int) -> Error:
        closed = jax.make_jaxpr(lambda x: jax.lax.integer_pow(x, power))(1.0)
        return flatten(closed).equations[0].error

    assert error(3) is Error.SMOOTH
    assert error(-3) is Error.CONTINUOUS


def test_minimum_pooling_is_cheap_as_maximum_pooling():
    assert rule_of("reduce_window_min") == rule_of("reduce_window_max")


def test_an_unknown_primitive_is_expensive_and_jumps():
    rule = rule_of("of_another_library")
    assert not rule.is_cheap
    assert rule.error is Error.JUMPS
    assert not rule.linear_in.of(2)


@pytest.mark.parametrize(
    ("operands", "numbers"),
    [
        (Operands.NONE, []),
        (Operands.ALL, [0, 1, 2]),
        (Operands.FIRST, [0]),
        (Operands.ALL_BUT_FIRST, [1, 2]),
    ],
)
def test_operands_by_number(operands, numbers):
    assert list(operands.of(3)) == numbers


_ONES = np.ones((4, 3, 5), np.float32)
# Functions of `[4, 3, 5]`, and where the axes that stay lie in the result.
_AXES = {
    "broadcast_in_dim": (
        lambda x: jax.lax.broadcast_in_dim(x, (4, 2, 3, 5), (0, 2, 3)),
        {0: 0, 1: 2, 2: 3},
    ),
    "concatenate": (lambda x: jax.lax.concatenate([x, x], 1), {0: 0, 2: 2}),
    "conv_general_dilated": (
        lambda x: jax.lax.conv(x, jnp.ones((2, 3, 2)), (1,), "SAME"),
        {0: 0},
    ),
    "cumsum": (lambda x: jax.lax.cumsum(x, 1), {0: 0, 2: 2}),
    "dot_general": (
        lambda x: jax.lax.dot_general(x, _ONES, (((1,), (1,)), ((0,), (0,)))),
        {0: 0, 2: 1},
    ),
    "fft": (jnp.fft.rfft, {0: 0, 1: 1}),
    "mul": (lambda x: x * x, {0: 0, 1: 1, 2: 2}),
    "pad": (
        lambda x: jax.lax.pad(x, 0.0, [(0, 0, 0), (1, -1, 0), (0, 0, 0)]),
        {0: 0, 2: 2},
    ),
    "reduce_max": (lambda x: jax.lax.reduce_max(x, (1,)), {0: 0, 2: 1}),
    "reduce_window_sum": (
        lambda x: jax.lax.reduce_window(
            x, 0.0, jax.lax.add, (1, 3, 1), (1, 1, 1), "SAME"
        ),
        {0: 0, 2: 2},
    ),
    "reshape": (lambda x: x.reshape(2, 2, 3, 5), {1: 2, 2: 3}),
    "rev": (lambda x: jax.lax.rev(x, (2,)), {0: 0, 1: 1}),
    "sort": (lambda x: jax.lax.sort(x, dimension=1), {0: 0, 2: 2}),
    "split": (lambda x: jax.lax.split(x, (1, 2), 1), {0: 0, 2: 2}),
    "transpose": (lambda x: x.transpose(2, 0, 1), {0: 1, 1: 2, 2: 0}),
}


@pytest.mark.parametrize("name", _AXES)
def test_an_axis_lies_where_the_table_says(name, key):
    function, places = _AXES[name]
    x = jax.random.normal(key, _ONES.shape)
    *_, eqn = flatten(jax.make_jaxpr(function)(x)).equations
    assert eqn.primitive == name
    (written,) = eqn.jaxpr.eqns
    found = {axis: eqn.rule.axis_after(written, 0, axis) for axis in range(x.ndim)}
    assert {axis: place for axis, place in found.items() if place is not None} == places
    for axis, place in places.items():
        moved = x.at[(slice(None),) * axis + (1,)].add(1.0)
        for result, other in zip(
            *map(jax.tree.leaves, (function(x), function(moved))), strict=True
        ):
            differs = jnp.moveaxis(result != other, place, 0)
            assert not differs[jnp.arange(len(differs)) != 1].any()
