"""Primitives that run on a chunk of the batch axis give that chunk of the whole."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from dafjax._trace.by_rows import axes_read, evaluate_on_chunk
from dafjax._trace.equation import Equation
from dafjax._trace.graph import flatten


_NUM_ROWS = 8

_BY_ROWS: dict[str, Callable[[jax.Array], object]] = {
    "argmax": lambda x: lax.argmax(x, 2, jnp.int32),
    "argmin": lambda x: lax.argmin(x, 1, jnp.int32),
    "concatenate": lambda x: lax.concatenate([x, x], 1),
    "cumlogsumexp": lambda x: lax.cumlogsumexp(x, 1),
    "cummax": lambda x: lax.cummax(x, 2),
    "cummin": lambda x: lax.cummin(x, 1),
    "cumprod": lambda x: lax.cumprod(x, 1),
    "cumsum": lambda x: lax.cumsum(x, 2),
    "pad": lambda x: lax.pad(x, jnp.float32(2), [(0, 0, 0), (1, 2, 1), (-1, 0, 0)]),
    "reduce_and": lambda x: lax.reduce_and(x > 0, (1,)),
    "reduce_max": lambda x: lax.reduce_max(x, (1,)),
    "reduce_min": lambda x: lax.reduce_min(x, (2,)),
    "reduce_or": lambda x: lax.reduce_or(x > 0, (1, 2)),
    "reduce_prod": lambda x: lax.reduce_prod(x, (1,)),
    "reduce_sum": lambda x: lax.reduce_sum(x, (1,)),
    "reduce_window_max": lambda x: lax.reduce_window(
        x, -jnp.inf, lax.max, (1, 2, 2), (1, 2, 1), "VALID"
    ),
    "reduce_window_min": lambda x: lax.reduce_window(
        x, jnp.inf, lax.min, (1, 2, 2), (1, 1, 2), "SAME"
    ),
    "reduce_window_sum": lambda x: lax.reduce_window(
        x, 0.0, lax.add, (1, 2, 3), (1, 1, 1), "SAME"
    ),
    "reshape": lambda x: lax.reshape(x, (8, 24)),
    "rev": lambda x: lax.rev(x, (1, 2)),
    "slice": lambda x: lax.slice(x, (0, 1, 0), (8, 3, 6), (1, 1, 2)),
    "split": lambda x: lax.split(x, (2, 4), 2),
    "squeeze": lambda x: lax.squeeze(x[:, :1], (1,)),
    "transpose": lambda x: lax.transpose(x, (0, 2, 1)),
}

_ACROSS_ROWS: dict[str, Callable[[jax.Array], object]] = {
    "concatenate": lambda x: lax.concatenate([x[:3], x[3:]], 0),
    "cumsum": lambda x: lax.cumsum(x, 0),
    "pad": lambda x: lax.pad(x[:5], jnp.float32(0), [(2, 1, 0), (0, 0, 0), (0, 0, 0)]),
    "reduce_sum": lambda x: lax.reduce_sum(lax.concatenate([x, x], 1), (0,)),
    "reduce_window_sum": lambda x: lax.reduce_window(
        x, 0.0, lax.add, (3, 1, 1), (1, 1, 1), "SAME"
    ),
    "rev": lambda x: lax.rev(x, (0,)),
    "split": lambda x: lax.split(lax.concatenate([x, x], 0), (8, 8), 0),
    "transpose": lambda x: lax.transpose(x.reshape(8, 8, 3), (1, 0, 2)),
}


def _equation(function: Callable[[jax.Array], object], x: jax.Array) -> Equation:
    *_, eqn = flatten(jax.make_jaxpr(function)(x)).equations
    return eqn


@pytest.mark.parametrize("name", _BY_ROWS)
def test_a_chunk_of_rows_gives_the_chunk_of_the_result(name, key):
    x = jax.random.normal(key, (_NUM_ROWS, 4, 6))
    eqn = _equation(_BY_ROWS[name], x)
    assert eqn.primitive == name
    axes = (0,) * len(eqn.outputs)
    read = axes_read(eqn, axes)
    assert read is not None
    assert set(read) - {None} == {0}
    operands = [jax.random.normal(key, aval.shape) for aval in _avals(eqn)]
    operands = [
        x.astype(aval.dtype) for x, aval in zip(operands, _avals(eqn), strict=True)
    ]
    wholes = evaluate_on_chunk(eqn, operands, axes, _NUM_ROWS)
    chunk = [
        x if axis is None else x[2:4] for x, axis in zip(operands, read, strict=True)
    ]
    results = evaluate_on_chunk(eqn, chunk, axes, 2)
    for whole, result in zip(wholes, results, strict=True):
        np.testing.assert_array_equal(result, whole[2:4])


def _avals(eqn: Equation) -> list[jax.core.ShapedArray]:
    return [var.aval for var in eqn.jaxpr.invars]


@pytest.mark.parametrize("name", _ACROSS_ROWS)
def test_what_mixes_rows_is_not_run_on_chunks(name):
    eqn = _equation(_ACROSS_ROWS[name], jnp.ones((_NUM_ROWS, 4, 6)))
    assert eqn.primitive == name
    read = axes_read(eqn, (0,) * len(eqn.outputs))
    assert read is None or 0 not in read
