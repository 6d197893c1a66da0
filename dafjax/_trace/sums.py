"""Sums and convolutions of examples that do not depend on chunks.

Makes convolutions in loop bodies as fast as outside of loops.

XLA:CPU transposes the operands of a convolution to the axis order of its library, but
only outside of loops. Inside, a convolution with another axis order takes 30 times as
long (jaxlib 0.10). Gradients of kernels have another order, because they sum over the
images, not over the features.

Chooses how programs run sums over leading axes.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.extend.core as jex_core
import numpy as np
from jax import lax

from dafjax._native import are_grouped, sum_groups, sum_rows_p
from dafjax._numbers import Array


def convolve_in_loop(
    operands: Sequence[jax.Array], params: Mapping[str, Any]
) -> jax.Array:
    """Returns the same as `conv_general_dilated`.

    Args:
        operands: The images and the kernel.
        params: The parameters of the primitive.
    """
    as_it_is = functools.partial(lax.conv_general_dilated_p.bind, **params)
    in_order = functools.partial(_convolve_in_order, params=params)
    return lax.platform_dependent(*operands, cpu=in_order, default=as_it_is)


def _convolve_in_order(
    images: jax.Array, kernel: jax.Array, *, params: Mapping[str, Any]
) -> jax.Array:
    numbers = params["dimension_numbers"]
    batch, features, *places = numbers.lhs_spec
    features_out, features_in, *taps = numbers.rhs_spec
    images = lax.transpose(images, (batch, *places, features))
    kernel = lax.transpose(kernel, (*taps, features_in, features_out))
    last = images.ndim - 1
    between = tuple(range(1, last))
    in_order = lax.ConvDimensionNumbers(
        lhs_spec=(0, last, *between),
        rhs_spec=(last, last - 1, *range(last - 1)),
        out_spec=(0, last, *between),
    )
    result = lax.conv_general_dilated_p.bind(
        images, kernel, **{**params, "dimension_numbers": in_order}
    )
    batch, features, *places = numbers.out_spec
    order = {axis: n for n, axis in enumerate((batch, *places, features))}
    return lax.transpose(result, tuple(order[axis] for axis in range(last + 1)))


def summing_rows(eqn: jex_core.JaxprEqn, operands: Sequence[Any]) -> jex_core.JaxprEqn:
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


def sums_of_groups(eqn: jex_core.JaxprEqn, operands: Sequence[Any]) -> Array | None:
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


def _sums_rows(eqn: jex_core.JaxprEqn, operands: Sequence[Any]) -> bool:
    if eqn.primitive.name != "reduce_sum" or any(map(_is_shared, operands)):
        return False
    aval: Any = eqn.invars[0].aval
    axes = eqn.params["axes"]
    return (
        0 < len(axes) < aval.ndim
        and axes == tuple(range(len(axes)))
        and aval.dtype == np.float32
    )


def _is_shared(operand: Any) -> bool:
    return bool(jax.typeof(operand).sharding.mesh.explicit_axes)
