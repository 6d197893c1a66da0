"""Delayed reads: arrays that XLA cannot use before a token is computed."""

from typing import Any

import jax
import jax.numpy as jnp

from dafjax._trace.equation import Equation
from dafjax._trace.graph import is_array


def not_before(token: jax.Array, value: jax.Array) -> jax.Array:
    """Returns an array that XLA cannot read or copy before the token is computed.

    Unlike a barrier it adds no copy if XLA rearranges the array anyway.

    Args:
        token: A scalar that is 0, which XLA does not know.
        value: Any array. For keys, their data wait.
    """
    aval = jax.typeof(value)
    if is_array(aval) and jnp.issubdtype(aval.dtype, jax.dtypes.prng_key):
        data = not_before(token, jax.random.key_data(value))
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(value))
    if not can_be_tied(value):
        return value
    return jax.lax.select(token == 0, value, jnp.zeros_like(value))


def fill_not_before(token: jax.Array, equation: Equation) -> list[jax.Array]:
    """Runs an equation that fills an array with a number, after the token.

    Args:
        token: A scalar that is 0, which XLA does not know.
        equation: The equation; its `filling` is not None.
    """
    (eqn,) = equation.jaxpr.eqns
    aval: Any = eqn.outvars[0].aval
    late = jnp.asarray(equation.filling, aval.dtype) + token.astype(aval.dtype)
    return [eqn.primitive.bind(late, **eqn.params)]


def can_be_tied(value: Any) -> bool:
    """Returns whether a value is an array of numbers: neither of keys nor a token."""
    aval = jax.typeof(value)
    return is_array(aval) and not jnp.issubdtype(aval.dtype, jax.dtypes.extended)
