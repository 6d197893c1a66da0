"""Sums over leading axes, as programs run them."""

from typing import Any

import jax.extend.core as jex_core
import numpy as np

from dafjax._native import sum_rows_p


def summing_rows(eqn: jex_core.JaxprEqn) -> jex_core.JaxprEqn:
    """Returns an equation that computes the same, and sums over rows as `sum_rows`."""
    return (
        eqn
        if not _sums_rows(eqn)
        else eqn.replace(primitive=sum_rows_p, params={"axes": eqn.params["axes"]})
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
        # What is divided among devices by its type stays so.
        and not aval.sharding.mesh.explicit_axes
    )
