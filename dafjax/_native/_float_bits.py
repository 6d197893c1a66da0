"""Floating-point arithmetic on bit patterns, which no compiler flushes or contracts."""

import jax.numpy as jnp
from jax import lax

from dafjax._typing import Array


EXPONENT_MASK = 0x7F800000
_MANTISSA_MASK = 0x007FFFFF
_SIGN_MASK = 0x80000000
_HIGH_HALF = 0xFFFF0000


def to_bits(x: Array) -> Array:
    """Returns the uint32 pattern of a float32 array."""
    return lax.bitcast_convert_type(x, jnp.uint32)


def from_bits(bits: Array) -> Array:
    """Returns the float32 array of a uint32 pattern."""
    return lax.bitcast_convert_type(bits, jnp.float32)


def widened_bits(x: Array) -> Array:
    """Returns the float32 pattern of a float32, bfloat16 or float16 array, exactly."""
    if x.dtype == jnp.bfloat16:
        return bfloat16_bits(x) << jnp.uint32(16)
    # Every float16 is a normal float32 or zero, so this flushes nothing.
    return to_bits(x.astype(jnp.float32))


def is_finite(bits: Array) -> Array:
    """Tells which float32 patterns are neither infinite nor NaN."""
    return (bits & jnp.uint32(EXPONENT_MASK)) != jnp.uint32(EXPONENT_MASK)


def flush(bits: Array) -> Array:
    """Turns the patterns of subnormals and of -0 into the pattern of +0."""
    has_exponent = (bits & jnp.uint32(EXPONENT_MASK)) != jnp.uint32(0)
    return jnp.where(has_exponent, bits, jnp.uint32(0))


def bfloat16_down(x: Array) -> Array:
    """Rounds float32 towards minus infinity to a bfloat16 value, kept in float32."""
    return _truncate_or_extend(x, extend_negative=True)


def bfloat16_up(x: Array) -> Array:
    """Rounds float32 towards plus infinity to a bfloat16 value, kept in float32."""
    return _truncate_or_extend(x, extend_negative=False)


def _truncate_or_extend(x: Array, *, extend_negative: bool) -> Array:
    bits = to_bits(x)
    is_negative = (bits & jnp.uint32(_SIGN_MASK)) != jnp.uint32(0)
    extend = is_negative == jnp.asarray(extend_negative)
    bits = bits + jnp.where(extend, jnp.uint32(0xFFFF), jnp.uint32(0))
    return from_bits(bits & jnp.uint32(_HIGH_HALF))


def bfloat16_bits(x: Array) -> Array:
    """Returns the pattern of a bfloat16 array, in the low half of a uint32."""
    return lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.uint32)


def to_bfloat16_exact(x: Array) -> Array:
    """Converts float32 that holds bfloat16 values to bfloat16."""
    return _from_half_bits(to_bits(x) >> jnp.uint32(16), jnp.bfloat16)


def round_to(x: Array, dtype: jnp.dtype) -> Array:
    """Rounds finite float32 to nearest even in `dtype`.

    It computes in integers, because XLA may drop a narrowing cast before a widening
    cast.
    """
    if dtype == jnp.float32:
        return x
    bits = to_bits(x)
    if dtype == jnp.bfloat16:
        return _from_half_bits(_round_off(bits, 16) >> jnp.uint32(16), jnp.bfloat16)
    sign = (bits >> jnp.uint32(16)) & jnp.uint32(0x8000)
    magnitude = bits & jnp.uint32(~_SIGN_MASK & 0xFFFFFFFF)
    # The exponent bias is 127 in float32 and 15 in float16.
    normal = (_round_off(magnitude, 13) - jnp.uint32(112 << 23)) >> jnp.uint32(13)
    # Below 2^-14 float16 has the spacing 2^-24, as float32 has from 0.5 to 1.
    half = jnp.float32(0.5)
    subnormal = to_bits(from_bits(magnitude) + half) - to_bits(half)
    is_normal = magnitude >= jnp.uint32((127 - 14) << 23)
    return _from_half_bits(sign | jnp.where(is_normal, normal, subnormal), jnp.float16)


def _round_off(bits: Array, count: int) -> Array:
    """Rounds a pattern to nearest even at bit `count`; the bits below are garbage."""
    odd = (bits >> jnp.uint32(count)) & jnp.uint32(1)
    return bits + jnp.uint32((1 << (count - 1)) - 1) + odd


def _from_half_bits(bits: Array, dtype: jnp.dtype) -> Array:
    return lax.bitcast_convert_type(bits.astype(jnp.uint16), dtype)


def power_over(scale: Array, exponent: Array) -> Array:
    """Divides `2^exponent` by positive bfloat16 values kept in float32.

    It divides integers, because GPU division is approximate. With
    `scale = m * 2^(e - 7)`, 128 <= m < 256, the quotient is
    `2^31 / m * 2^(exponent - e - 24)`. `2^31 / m` is between 2^23 and 2^24 and rounds
    to an integer that float32 holds, so the result is correctly rounded. No quotient is
    halfway between two integers, since m would have to be a power of two.
    """
    bits = to_bits(scale)
    mantissa = ((bits & jnp.uint32(_MANTISSA_MASK)) >> jnp.uint32(16)) + jnp.uint32(128)
    quotient = (jnp.uint32(1 << 31) + (mantissa >> jnp.uint32(1))) // mantissa
    biased = (bits >> jnp.uint32(23)).astype(jnp.int32)
    shift = exponent - (biased - jnp.int32(127)) - jnp.int32(24)
    pattern = lax.bitcast_convert_type(quotient.astype(jnp.float32), jnp.int32)
    pattern = pattern + (shift << jnp.int32(23))
    return lax.bitcast_convert_type(pattern, jnp.float32)
