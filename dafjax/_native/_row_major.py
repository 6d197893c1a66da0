"""Primitive that makes XLA:GPU write an array in row-major order.

Before a barrier XLA:GPU computes an array in the layout that is easiest to compute, and
after the barrier transposes it for each matrix product that reads it. A layout
constraint before the barrier costs nothing: the kernel that computes the array writes
it in that layout.
"""

from collections.abc import Sequence
from typing import Any

from jax.experimental.layout import Layout, with_layout_constraint
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from dafjax._native import _reference
from dafjax._native._primitive import can_pass_through, make_primitive
from dafjax._native._sharding import is_divided
from dafjax._typing import Array


def row_major(x: Array) -> Array:
    """Returns its argument, which XLA:GPU computes in row-major order.

    On other platforms, and where devices share the array, it is a no-op. It has the
    derivative of the identity.

    Args:
        x: An array. An array of an extended dtype (PRNG keys) is returned unchanged.
    """
    return row_major_p.bind(x) if can_pass_through(x) else x


def _abstract_eval(aval: Any) -> Any:
    return aval


def _constrain(x: Array) -> Array:
    return with_layout_constraint(x, Layout(tuple(range(x.ndim))))


def _lower_on_cuda(context: mlir.LoweringRuleContext, x: Any) -> Sequence[Any]:
    lower = _reference.pin if is_divided(context) else _constrain
    return mlir.lower_fun(lower, multiple_results=False)(context, x)


def _batch(operands: Sequence[Array], axes: Sequence[int]) -> tuple[Array, int]:
    return row_major_p.bind(*operands), axes[0]


row_major_p: Primitive = make_primitive(
    "dafjax_row_major",
    abstract_eval=_abstract_eval,
    reference=_reference.pin,
    multiple_results=False,
    is_call_on_cpu=False,
)
mlir.register_lowering(row_major_p, _lower_on_cuda, platform="cuda")
ad.deflinear2(row_major_p, lambda cotangent, _: [cotangent])
batching.primitive_batchers[row_major_p] = _batch
