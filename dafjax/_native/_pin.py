"""Primitive that keeps an array in row-major order on GPUs.

Arguments and results of a program are in that order; XLA:GPU runs convolutions in
others, and what is elementwise in the order of what it meets. So it turns a weight
round before anything else, where nothing holds it back, for all that is computed of it;
and what an optimizer keeps of a weight, to meet a gradient that is turned round.
"""

from collections.abc import Sequence
from typing import Any

from jax.extend.core import Primitive
from jax.interpreters import ad, batching

from dafjax._native import _reference
from dafjax._native._primitive import can_pass_through, make_primitive
from dafjax._typing import Array


def pin(x: Array) -> Array:
    """Returns its argument, which XLA:GPU rearranges before it or after it alone.

    On a GPU it is a custom call that takes the buffer of its operand. Elsewhere it is
    nothing. Derivatives are those of the identity.

    Args:
        x: An array. One of an extended dtype (PRNG keys) is returned as it is.
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
