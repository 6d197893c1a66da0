"""Rounding noise in jax.numpy, bit for bit as in `xla_ffi/README.md`, section 3."""

import jax.numpy as jnp
import numpy as np
from jax import lax

from dafjax._native._layout import LANES, ROWS
from dafjax._typing import Array


_GOLDEN_RATIO = 0x9E3779B9
_FACTOR = 0x9F27
_POWERS = np.array([pow(_FACTOR, row, 1 << 16) for row in range(ROWS)], np.uint32)


def checksums(tiles: Array) -> Array:
    """Sums the bit patterns of every other row of each tile, wrapping around.

    Args:
        tiles: uint32 `[..., 16 rows, 32 lanes]`: float32 bit patterns, 0 for elements
            that are not finite.

    Returns:
        uint32 `[...]`.
    """
    return jnp.sum(tiles[..., ::2, :], axis=(-2, -1), dtype=jnp.uint32)


def noise_words(seed: Array, checksum: Array) -> Array:
    """Computes the 16-bit noise word of every element.

    Args:
        seed: uint32 scalar, or `[*batch]`.
        checksum: uint32 `[*batch, tiles]`, see `checksums` and
            `checksums_of_codes`.

    Returns:
        uint32 `[*batch, tiles, 16 rows, 32 lanes]`, values below 2^16.
    """
    tile = lax.broadcasted_iota(jnp.uint32, checksum.shape, checksum.ndim - 1)
    stream = _mix(seed + jnp.uint32(_GOLDEN_RATIO))
    if stream.ndim > 0:
        stream = stream[..., None]
    key = _mix(_mix(stream ^ tile) + checksum)

    # Two lanes share a draw of 32 bits; the even lane takes the low half.
    pairs = (*checksum.shape, LANES // 2)
    pair = lax.broadcasted_iota(jnp.uint32, pairs, len(pairs) - 1)
    draw = _mix(key[..., None] + pair * jnp.uint32(_GOLDEN_RATIO))
    half = jnp.array([0, 16], jnp.uint32).reshape((1,) * draw.ndim + (2,))
    first = ((draw[..., None] >> half) & jnp.uint32(0xFFFF)).reshape(
        *checksum.shape, 1, LANES
    )
    powers = _POWERS.reshape((1,) * checksum.ndim + (ROWS, 1))
    return (first * powers) & jnp.uint32(0xFFFF)


def checksums_of_codes(first: Array, last: Array) -> Array:
    """Combines the stored parameters of two groups of each tile, for dithered codes.

    Args:
        first: uint32 `[*batch, tiles]`: the stored scale (upper half) and minimum
            (lower half) of the group of lane 0 in row 0.
        last: The same for the group of lane 28 in row 14; 0 if none is stored.

    Returns:
        uint32 `[*batch, tiles]`.
    """
    return first + last * jnp.uint32(_GOLDEN_RATIO)


def _mix(x: Array) -> Array:
    """Scrambles a uint32: the finalizer `lowbias32` of Wellons (hash-prospector)."""
    x = x ^ (x >> jnp.uint32(16))
    x = x * jnp.uint32(0x7FEB352D)
    x = x ^ (x >> jnp.uint32(15))
    x = x * jnp.uint32(0x846CA68B)
    return x ^ (x >> jnp.uint32(16))
