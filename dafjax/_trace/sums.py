"""Chooses how programs run sums over leading axes."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.extend.core as jex_core
import numpy as np

from dafjax._native import are_grouped, sum_groups, sum_rows_p
from dafjax._typing import Array


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
