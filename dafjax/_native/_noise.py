"""Rounding noise in jax.numpy: `xla_ffi/README.md`, section 3, bit for bit."""

import jax.numpy as jnp
from jax import lax

from dafjax._native._layout import LANES, ROWS
from dafjax._typing import Array


_GOLDEN_RATIO = 0x9E3779B9


def noise_words(seed: Array, checksum: Array) -> Array:
    """Computes the 16-bit noise word of every element.

    Args:
        seed: uint32 scalar.
        checksum: uint32 `[*batch, tiles]`, the wrapping sum of the float32 bit patterns
            of each tile's finite elements.

    Returns:
        uint32 `[*batch, tiles, 16 rows, 32 lanes]`, values below 2^16.
    """
    tile = lax.broadcasted_iota(jnp.uint32, checksum.shape, checksum.ndim - 1)
    stream = _mix(seed + jnp.uint32(_GOLDEN_RATIO))
    key = _mix(_mix(stream ^ tile) + checksum)

    # Two lanes share a 32-bit state: the low half serves the even one.
    pairs = (*checksum.shape, LANES // 2)
    pair = lax.broadcasted_iota(jnp.uint32, pairs, len(pairs) - 1)
    state = _mix(key[..., None] + pair * jnp.uint32(_GOLDEN_RATIO)) | jnp.uint32(1)

    rows = []
    for _ in range(ROWS):
        state = _xorshift(state)
        rows.append(state)
    words = jnp.stack(rows, axis=-2)  # [*batch, tiles, 16, 16]
    half = jnp.array([0, 16], jnp.uint32).reshape((1,) * words.ndim + (2,))
    words = (words[..., None] >> half) & jnp.uint32(0xFFFF)
    return words.reshape(*checksum.shape, ROWS, LANES)


def _mix(x: Array) -> Array:
    """Scrambles a uint32: the finalizer `lowbias32` of Wellons (hash-prospector)."""
    x = x ^ (x >> jnp.uint32(16))
    x = x * jnp.uint32(0x7FEB352D)
    x = x ^ (x >> jnp.uint32(15))
    x = x * jnp.uint32(0x846CA68B)
    return x ^ (x >> jnp.uint32(16))


def _xorshift(s: Array) -> Array:
    """Steps Marsaglia's 32-bit generator (13, 17, 5)."""
    s = s ^ (s << jnp.uint32(13))
    s = s ^ (s >> jnp.uint32(17))
    return s ^ (s << jnp.uint32(5))
