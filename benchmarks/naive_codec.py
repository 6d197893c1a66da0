"""The codec that a user of JAX would write first, in `jax.numpy`.

Two bits per element, minimum and maximum of every group of 256, noise from
`jax.random.uniform`, four codes in a byte; booleans eight in a byte.
"""

import jax
import jax.numpy as jnp


_GROUP = 256
_LEVELS = 3  # the largest code of two bits
_SHIFTS = (0, 2, 4, 6)

Packed = tuple[jax.Array, jax.Array, jax.Array]


def pack(x: jax.Array, key: jax.Array) -> Packed:
    """Returns codes (uint8), scales and minima of the groups."""
    padding = -x.size % _GROUP
    groups = jnp.pad(x.ravel(), (0, padding)).reshape(-1, _GROUP)
    minimum = jnp.min(groups, axis=1, keepdims=True)
    scale = (jnp.max(groups, axis=1, keepdims=True) - minimum) / _LEVELS
    # A constant group has no range; any nonzero divisor gives code 0.
    steps = (groups - minimum) / jnp.where(scale > 0, scale, 1)
    codes = jnp.floor(steps + jax.random.uniform(key, groups.shape))
    codes = jnp.clip(codes, 0, _LEVELS).astype(jnp.uint8).reshape(-1, len(_SHIFTS))
    shifted = codes << jnp.array(_SHIFTS, jnp.uint8)
    return jnp.sum(shifted, axis=1, dtype=jnp.uint8), scale, minimum


def unpack(packed: Packed, like: jax.ShapeDtypeStruct) -> jax.Array:
    """Inverts `pack`, up to the rounding."""
    codes, scale, minimum = packed
    fields = (codes[:, None] >> jnp.array(_SHIFTS, jnp.uint8)) & jnp.uint8(_LEVELS)
    groups = fields.reshape(-1, _GROUP).astype(like.dtype) * scale + minimum
    return groups.ravel()[: like.size].reshape(like.shape)


def pack_mask(mask: jax.Array) -> jax.Array:
    """Returns eight booleans in a byte."""
    return jnp.packbits(mask)


def unpack_mask(packed: jax.Array, like: jax.ShapeDtypeStruct) -> jax.Array:
    """Inverts `pack_mask`."""
    bits = jnp.unpackbits(packed, count=like.size)
    return bits.astype(jnp.bool_).reshape(like.shape)
