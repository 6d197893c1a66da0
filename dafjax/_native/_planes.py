"""Codes to bit planes and back in jax.numpy: `xla_ffi/README.md`, section 1."""

import jax.numpy as jnp
import numpy as np
from jax import lax

from dafjax._native._layout import LANES, PLANE_WIDTHS, ROWS, TILE
from dafjax._typing import Array


def to_tiles(x: Array) -> Array:
    """Reshapes `[*batch, tiles * 512]` to `[*batch, tiles, 16, 32]`."""
    return x.reshape(*x.shape[:-1], x.shape[-1] // TILE, ROWS, LANES)


def pack_planes(codes: Array, bits: int) -> Array:
    """Packs uint32 codes `[*batch, tiles, 16, 32]` into uint16 `[*batch, words]`.

    Word `p * 32 + l` of a `w`-bit plane of a tile is
    `sum_i field[p * (16 / w) + i, l] << (w * i)`.
    """
    *batch, tiles, _, _ = codes.shape
    planes = []
    for shift, width in _plane_places(bits):
        per_word = ROWS // width
        fields = (codes >> jnp.uint32(shift)) & jnp.uint32((1 << width) - 1)
        fields = fields.reshape(*batch, tiles, width, per_word, LANES)
        words = jnp.sum(
            fields << _field_shifts(width, fields.ndim), axis=-2, dtype=jnp.uint32
        )
        planes.append(words.astype(jnp.uint16).reshape(*batch, tiles * width * LANES))
    return jnp.concatenate(planes, axis=-1)


def unpack_planes(words: Array, bits: int, tiles: int, groups: int = 1) -> Array:
    """Inverts `pack_planes`, and puts every `groups` tiles side by side.

    It puts words side by side before it turns them into codes. XLA can then fuse all of
    this into the kernel that reads the codes; moving codes would be a transposition.

    Args:
        words: uint16 `[*batch, words]`.
        bits: Bits of a code.
        tiles: Tiles of a row.
        groups: Number of tiles that lie side by side, a divisor of `tiles`.

    Returns:
        uint32 codes `[*batch, tiles / groups * 16, groups * 32]`.
    """
    batch = words.shape[:-1]
    shape = (*batch, tiles // groups * ROWS, groups * LANES)
    codes = jnp.zeros(shape, jnp.uint32)
    start = 0
    for shift, width in _plane_places(bits):
        stop = start + tiles * width * LANES
        plane = lax.slice_in_dim(words, start, stop, axis=-1)
        plane = plane.reshape(*batch, tiles // groups, groups, width, LANES)
        plane = plane.swapaxes(-2, -3).astype(jnp.uint32)
        plane = plane.reshape(*batch, tiles // groups, width, 1, groups * LANES)
        # Shift `width` times by `numbers`: XLA:GPU would put shifts by multiples into a
        # table, which takes a kernel of its own.
        numbers = _field_shifts(width, plane.ndim) // width
        for _ in range(width):
            plane = plane >> numbers
        fields = (plane & jnp.uint32((1 << width) - 1)).reshape(shape)
        # Skip the shift by 0: XLA counts it as an operation, too.
        codes = codes | (fields << jnp.uint32(shift) if shift else fields)
        start = stop
    return codes


def _plane_places(bits: int) -> list[tuple[int, int]]:
    """Returns (lowest bit in the code, width) of each plane, in stored order."""
    places = []
    shift = bits
    for width in PLANE_WIDTHS[bits] if bits else ():
        shift -= width
        places.append((shift, width))
    return places


def _field_shifts(width: int, ndim: int) -> np.ndarray:
    """Returns the shift of each field of a word, along the last axis but one."""
    shifts = np.arange(0, ROWS, width, dtype=np.uint32)
    return shifts.reshape((1,) * (ndim - 2) + (ROWS // width, 1))
