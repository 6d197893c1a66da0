"""Primitive that returns its operand and refuses to be differentiated."""

from typing import Any, NoReturn

from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from dafjax._typing import Array


def first_order(x: Array) -> Array:
    """Returns its argument, and raises an error if it is differentiated.

    Use it inside derivative rules, where a second derivative would be wrong.
    """
    return first_order_p.bind(x)


def _refuse(*_: Any, **__: Any) -> NoReturn:
    raise NotImplementedError(
        "`remat_compress` supports first-order reverse-mode differentiation only, but "
        "a function that it wraps is differentiated twice. Use `bits=None` there. For "
        "a gradient inside a loss, as in a gradient penalty or MAML, wrap the outer "
        "loss and take the inner `jax.grad` of the plain function."
    )


# This is a primitive and not a `jax.custom_jvp`, because JAX 0.11 with `jax_remat3` and
# `jax_custom_vjp3` fails on a `custom_jvp` in the rule of a `custom_vjp`.
first_order_p = Primitive("dafjax_first_order")
first_order_p.def_impl(lambda x: x)
first_order_p.def_abstract_eval(lambda aval: aval)
mlir.register_lowering(first_order_p, lambda _, x: [x])
ad.primitive_jvps[first_order_p] = _refuse
batching.defvectorized(first_order_p)
