"""Sums over leading axes, as programs run them."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.extend.core as jex_core
import numpy as np

from dafjax._native import sum_rows_p


def summing_rows(eqn: jex_core.JaxprEqn, operands: Sequence[Any]) -> jex_core.JaxprEqn:
    """Returns an equation that computes the same, and sums rows by `sum_rows_p`.

    Args:
        eqn: Any equation.
        operands: Arrays that it is run on. Types that say how devices share them are
            those of these, not of the equation, and such sums stay as they are.
    """
    if not _sums_rows(eqn) or any(map(_is_shared, operands)):
        return eqn
    return eqn.replace(
        primitive=sum_rows_p, params={"num_axes": len(eqn.params["axes"])}
    )


def _sums_rows(eqn: jex_core.JaxprEqn) -> bool:
    if eqn.primitive.name != "reduce_sum":
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
