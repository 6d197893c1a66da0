"""Primitive that keeps an array in row-major order on GPUs: a layout constraint.

Arguments and results of a program are row-major. XLA:GPU runs convolutions in other
layouts, and elementwise operations in the layout of their operands. Without a
constraint it transposes a weight first, for all computations that use it. It also
transposes the optimizer's state of a weight, to match a transposed gradient.
"""

from collections.abc import Sequence
from typing import Any

from jax.extend.core import Primitive
from jax.interpreters import ad, batching

from dafjax._native import _reference
from dafjax._native._primitive import can_pass_through, make_primitive
from dafjax._typing import Array


def pin(x: Array) -> Array:
    """Returns its argument, and stops XLA:GPU from moving a layout change across it.

    On a GPU it is a custom call that reuses the buffer of its operand. Elsewhere it is
    a no-op. It has the derivative of the identity.

    Args:
        x: An array. An array of an extended dtype (PRNG keys) is returned unchanged.
    """
    return pin_p.bind(x) if can_pass_through(x) else x


def _abstract_eval(aval: Any) -> Any:
    return aval


def _batch(operands: Sequence[Array], axes: Sequence[int]) -> tuple[Array, int]:
    return pin_p.bind(*operands), axes[0]


pin_p: Primitive = make_primitive(
    "dafjax_pin",
    target="dafjax_tie",
    abstract_eval=_abstract_eval,
    reference=_reference.pin,
    multiple_results=False,
    aliased=True,
    is_call_on_cpu=False,
)
ad.deflinear2(pin_p, lambda cotangent, _: [cotangent])
batching.primitive_batchers[pin_p] = _batch
