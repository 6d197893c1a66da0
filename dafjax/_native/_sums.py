"""Sums over leading axes, on GPUs in two steps of our own.

XLA:GPU sums up to 4096 rows in one step, with 32 columns per thread block. With a few
hundred columns, most of a large GPU is then idle, and the sum, together with all
computation fused into it, takes as long as for an array many times as large. (H200,
`[256, 4, 4, 512]`, decoded for the gradient of a batch norm: 87 us in one step; 9 us
and 1 us in two steps.) XLA:GPU itself sums more than 4096 rows in two steps.

The second step has little to do but still takes about 2 us. So several sums, such as
the two of a norm, can share it: `sum_groups` is the first step of one sum, and
`sum_together` the second step of several.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn, Primitive
from jax.interpreters import ad, batching

from dafjax._native._primitive import lower_as, make_primitive, retyped
from dafjax._numbers import Array


def num_groups(x: Any, num_axes: int) -> tuple[int, ...]:
    """Returns the number of parts of each leading axis; a group is one part of each.

    Axes are divided one by one, because joining them first would copy the array into
    another layout. All numbers are 1 if one step, or XLA's own two steps, are best.
    """
    whole = (1,) * num_axes
    rows = math.prod(x.shape[:num_axes])
    columns = math.prod(x.shape[num_axes:])
    if columns <= 1 or rows == 0 or x.dtype != jnp.float32:
        return whole
    is_large = rows > _ROWS_OF_ONE_STEP
    blocks = _MANY_BLOCKS_OF_THREADS if is_large else _BLOCKS_OF_THREADS
    wanted = -(-blocks * _COLUMNS_OF_BLOCK // columns)
    if is_large:
        wanted = max(wanted, math.isqrt(rows))
    wanted = in_all = min(wanted, rows // _ROWS_OF_GROUP)
    groups: list[int] = []
    for size in x.shape[: num_axes if is_large else 1]:
        counts = (n for n in range(min(wanted, size), 1, -1) if size % n == 0)
        groups.append(next(counts, 1))
        # The parts of the next axis are contiguous only if this axis is divided fully.
        if groups[-1] < size:
            break
        wanted //= size
    if is_large and 2 * math.prod(groups) < in_all:
        # The axes lack suitable divisors. XLA's own two steps pad the rows instead.
        return whole
    return (*groups, *whole[len(groups) :])


# The most rows that XLA:GPU sums in one step, and the columns of a thread block.
_ROWS_OF_ONE_STEP = 4096
_COLUMNS_OF_BLOCK = 32
# Two thread blocks per multiprocessor of the largest GPUs. A group has at least enough
# rows for all threads of its block.
_BLOCKS_OF_THREADS = 256
_ROWS_OF_GROUP = 128
# With this many thread blocks, XLA:GPU fuses decoding into the sum. On its own it would
# make as many groups as each group has rows.
_MANY_BLOCKS_OF_THREADS = 2048


def are_grouped(x: Any, num_axes: int) -> bool:
    """Returns whether GPUs sum these rows in two steps of our own."""
    return math.prod(num_groups(x, num_axes)) > 1


def sum_groups(x: Array, num_axes: int) -> Array:
    """Sums each group of rows, `[groups, *columns]`: the first step of a sum on GPUs.

    If devices share `x`, `[*rows, *columns]`, the first group has the sum of all rows,
    and the other groups are 0.
    """
    return sum_groups_p.bind(x, num_axes=num_axes)


def sum_together(arrays: Sequence[Array]) -> list[Array]:
    """Sums arrays of one shape over their first axis, in one kernel."""
    zeros = [jnp.zeros((), x.dtype) for x in arrays]
    return list(lax.reduce(list(arrays), zeros, _add_each, (0,)))


def _add_each(a: Sequence[Array], b: Sequence[Array]) -> list[Array]:
    return [x + y for x, y in zip(a, b, strict=True)]


def _abstract_sum(x: Any, *, num_axes: int) -> Any:
    return retyped(x, x.shape[num_axes:])


def _abstract_groups(x: Any, *, num_axes: int) -> Any:
    groups = math.prod(num_groups(x, num_axes))
    return retyped(x, (groups, *x.shape[num_axes:]))


def _sum(x: Array, *, num_axes: int) -> Array:
    return lax.reduce_sum(x, range(num_axes))


def _sum_groups(x: Array, *, num_axes: int) -> Array:
    columns = x.shape[num_axes:]
    sums = lax.reduce_sum(_divided(x, num_axes), range(1, 2 * num_axes, 2))
    return sums.reshape(-1, *columns)


def _sum_as_one_group(x: Array, *, num_axes: int) -> Array:
    total = _sum(x, num_axes=num_axes)[jnp.newaxis]
    others = math.prod(num_groups(x, num_axes)) - 1
    return jnp.pad(total, [(0, others)] + [(0, 0)] * (total.ndim - 1))


def _sum_in_two_steps(x: Array, *, num_axes: int) -> Array:
    if not are_grouped(x, num_axes):
        return _sum(x, num_axes=num_axes)
    # Without the barrier, XLA merges both sums into one.
    sums = lax.optimization_barrier(_sum_groups(x, num_axes=num_axes))
    return lax.reduce_sum(sums, (0,))


def _divided(x: Array, num_axes: int) -> Array:
    """Splits each axis of rows in two: groups, and rows of a group."""
    groups = num_groups(x, num_axes)
    pairs = zip(groups, x.shape, strict=False)
    parts = [n for count, size in pairs for n in (count, size // count)]
    return x.reshape(*parts, *x.shape[num_axes:])


def _derive(primitive: Primitive, function: Callable[..., Array]) -> None:
    """Gives a primitive the derivative and the batching rule of a linear function."""

    def transpose(cotangent: Array, x: ad.UndefinedPrimal, **params: Any) -> Any:
        of_one = functools.partial(function, **params)
        return jax.linear_transpose(of_one, x.aval)(cotangent)

    def batch(
        operands: Sequence[Array], axes: Sequence[int], **params: Any
    ) -> tuple[Array, int]:
        of_one = functools.partial(function, **params)
        return jax.vmap(of_one, in_axes=axes[0])(operands[0]), 0

    ad.deflinear2(primitive, transpose)
    batching.primitive_batchers[primitive] = batch


# Both primitives sum over the first `num_axes` axes. Groups of rows do not match the
# shards of a divided array.
sum_rows_p: Primitive = make_primitive(
    "dafjax_sum_rows", abstract_eval=_abstract_sum, reference=_sum
)
lower_as(sum_rows_p, _sum_in_two_steps, where_divided=_sum, platform="cuda")
_derive(sum_rows_p, _sum)

sum_groups_p: Primitive = make_primitive(
    "dafjax_sum_groups", abstract_eval=_abstract_groups, reference=_sum_groups
)
lower_as(sum_groups_p, _sum_groups, where_divided=_sum_as_one_group, platform="cuda")
_derive(sum_groups_p, _sum_groups)


def summing_rows(eqn: JaxprEqn, operands: Sequence[Any]) -> JaxprEqn:
    """Returns an equation that computes the same, but sums rows with `sum_rows_p`.

    Args:
        eqn: Any equation.
        operands: The arrays that it runs on. Their types have the shardings; the types
            in the equation do not. Sums of arrays on explicit axes of a mesh stay as
            they are.
    """
    if not _sums_rows(eqn, operands):
        return eqn
    return eqn.replace(
        primitive=sum_rows_p, params={"num_axes": len(eqn.params["axes"])}
    )


def sums_of_groups(eqn: JaxprEqn, operands: Sequence[Any]) -> Array | None:
    """Returns an equation's sums over groups of rows, float32 `[groups, *columns]`.

    They add up to its result. `None` if it sums no rows, or if the rows form one group.

    Args:
        eqn: Any equation.
        operands: The arrays that it runs on, as in `summing_rows`.
    """
    if not _sums_rows(eqn, operands):
        return None
    (x,) = operands
    num_axes = len(eqn.params["axes"])
    return sum_groups(x, num_axes) if are_grouped(x, num_axes) else None


def _sums_rows(eqn: JaxprEqn, operands: Sequence[Any]) -> bool:
    if eqn.primitive.name != "reduce_sum" or any(map(_is_shared, operands)):
        return False
    aval: Any = eqn.invars[0].aval
    axes = eqn.params["axes"]
    return (
        0 < len(axes) < aval.ndim
        and axes == tuple(range(len(axes)))
        and aval.dtype == jnp.float32
    )


def _is_shared(operand: Any) -> bool:
    return bool(jax.typeof(operand).sharding.mesh.explicit_axes)
