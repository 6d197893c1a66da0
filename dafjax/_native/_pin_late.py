"""Primitive that delays the reads of an array until a token is computed.

On CPUs a barrier on an argument would copy it. A `select` does not, if the array is
copied anyway, for example into another layout. On GPUs a `select` would be a kernel,
but a barrier costs nothing. There, however, XLA:GPU moves the layout that suits the
consumers to before the barrier, and copies the array early. So the array crosses the
barrier flattened: an array of one dimension has no layout.
"""

from collections.abc import Sequence
from typing import Any

from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from dafjax._native import _reference
from dafjax._native._pin import pin
from dafjax._native._primitive import make_primitive
from dafjax._native._sharding import is_divided
from dafjax._typing import Array


def pin_late(x: Array, token: Array) -> tuple[Array, Array]:
    """Returns its arguments; XLA reads the first one only after the token is computed.

    XLA:GPU also changes the layout of the array only after that. It has the derivative
    of the identity.

    Args:
        x: An array of numbers.
        token: A scalar that is 0 at run time; XLA must not be able to infer this.

    Returns:
        The array, and a token. Something must read this token, because XLA drops
        unused results.
    """
    late, token = pin_late_p.bind(x, token)
    return late, token


def _abstract_eval(x: Any, token: Any) -> tuple[Any, Any]:
    return x, token


def _wait_flat(x: Array, token: Array) -> tuple[Array, Array]:
    flat, token = lax.optimization_barrier((x.reshape(-1), token))
    return flat.reshape(x.shape), token


def _wait_shared(x: Array, token: Array) -> tuple[Array, Array]:
    late, token = _reference.pin_late(x, token)
    return pin(late), token


def _lower_on_cuda(
    context: mlir.LoweringRuleContext, x: Any, token: Any
) -> Sequence[Any]:
    function = _wait_shared if is_divided(context) else _wait_flat
    return mlir.lower_fun(function, multiple_results=True)(context, x, token)


def _jvp(
    primals: Sequence[Array], tangents: Sequence[Any]
) -> tuple[Sequence[Array], Sequence[Any]]:
    return pin_late_p.bind(*primals), list(tangents)


def _batch(
    operands: Sequence[Array], axes: Sequence[int | None]
) -> tuple[Sequence[Array], Sequence[int | None]]:
    x, token = operands
    if axes[1] is not None:
        # All batched tokens are 0, so any one will do.
        token = lax.index_in_dim(token, 0, axes[1], keepdims=False)
    return pin_late_p.bind(x, token), (axes[0], None)


pin_late_p: Primitive = make_primitive(
    "dafjax_pin_late",
    abstract_eval=_abstract_eval,
    reference=_reference.pin_late,
    multiple_results=True,
    is_call_on_cpu=False,
)
mlir.register_lowering(pin_late_p, _lower_on_cuda, platform="cuda")
ad.primitive_jvps[pin_late_p] = _jvp
batching.primitive_batchers[pin_late_p] = _batch
