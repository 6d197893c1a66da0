"""The packed format in Python: sizes, groups, bit planes and rounding noise.

The counterpart of `xla_ffi/format`; `xla_ffi/README.md` defines it, sections 1, 3, 4.
"""

import dataclasses
import math
from typing import final

import jax.numpy as jnp
import numpy as np
from jax import lax

from dafjax._numbers import Array


# Elements of a tile: ROWS rows of LANES lanes (xla_ffi/README.md, section 1).
LANES = 32
ROWS = 16
TILE = LANES * ROWS

# Widths of the planes of a code, most significant bits first.
PLANE_WIDTHS: dict[int, tuple[int, ...]] = {
    1: (1,),
    2: (1, 1),
    3: (1, 1, 1),
    4: (1, 1, 2),
    8: (1, 1, 2, 4),
}
BITS = tuple(PLANE_WIDTHS)
BLOCK_SIZES = (64, 128, 256, 512, 1024)


def folded_width(columns: int) -> int:
    """Returns the lanes of a folded row: the least multiple of `columns` and 32."""
    return math.lcm(columns, LANES)


def num_positions(size: int, columns: int) -> int:
    """Returns the number of whole folded rows, which the groups of a lane share."""
    return size // folded_width(columns) if columns > 0 else 0


def num_tiles(size: int, columns: int = 0) -> int:
    """Returns the number of tiles of a row of `size` elements."""
    if columns == 0:
        return -(-size // TILE)
    width = folded_width(columns)
    return -(-size // (width * ROWS)) * (width // LANES)


def num_words(size: int, bits: int, columns: int = 0) -> int:
    """Returns the number of uint16 words of a row of `size` codes."""
    return num_tiles(size, columns) * LANES * bits


@final
@dataclasses.dataclass(frozen=True)
class Format:
    """An affine code: how the elements of a row are grouped, rounded and packed.

    Rows `[*batch, size]` of float32, bfloat16 or float16 become codes, uint16
    `[*batch, num_words(size)]`, and the scale and the minimum of each group, bfloat16
    `[*batch, num_blocks(size)]`. All methods on arrays keep the leading axes.

    Attributes:
        bits: Bits of a code: 1, 2, 3, 4 or 8.
        block_size: Elements of a quantization group, which share a scale: 64, 128, 256,
            512 or 1024.
        columns: Columns of the matrix in C order that a row stands for, if each group
            lies within one column (section 4); 0 for groups of consecutive elements.
        stochastic: Whether to round codes stochastically (unbiased) or to nearest.
        dithered: Whether the decoder subtracts the noise of stochastic rounding, which
            halves the variance of the error (section 3). It then needs the seeds.
    """

    bits: int
    block_size: int
    columns: int = 0
    stochastic: bool = True
    dithered: bool = False

    def check(self, function: str, size: int) -> None:
        """Raises ValueError unless the format has codes of rows of `size` elements."""
        for name, valid in (("bits", BITS), ("block_size", BLOCK_SIZES)):
            value = getattr(self, name)
            if value not in valid:
                raise ValueError(
                    f"{function}: `{name}` must be one of {valid}, not {value}."
                )
        if self.columns < 0 or (self.columns > 0 and size % self.columns != 0):
            raise ValueError(
                f"{function}: `columns` must be 0 or divide the elements of a row, "
                f"{size}, but is {self.columns}."
            )

    def num_words(self, size: int) -> int:
        """Returns the number of uint16 words of the codes of a row."""
        return num_words(size, self.bits, self.columns)

    def num_blocks(self, size: int) -> int:
        """Returns the number of groups of a row."""
        unit = self.block_size * self._width
        return -(-size // unit) * self._width

    def padded_size(self, size: int) -> int:
        """Returns the least size of whole groups and whole tiles that holds `size`."""
        unit = math.lcm(self.block_size, TILE if self.columns == 0 else ROWS)
        unit *= self._width
        return -(-size // unit) * unit

    def to_blocks(self, x: Array) -> Array:
        """Arranges a padded row as `[blocks, block_size]`."""
        *batch, size = x.shape
        rows = (*batch, size // self.block_size // self._width)
        blocks = x.reshape(*rows, self.block_size, self._width).swapaxes(-1, -2)
        return blocks.reshape(*batch, size // self.block_size, self.block_size)

    def from_blocks(self, blocks: Array) -> Array:
        """Inverts `to_blocks`."""
        *batch, count, _ = blocks.shape
        x = blocks.reshape(*batch, count // self._width, self._width, self.block_size)
        return x.swapaxes(-1, -2).reshape(*batch, count * self.block_size)

    def to_tiles(self, x: Array) -> Array:
        """Arranges a padded row as `[tiles, 16, 32]`."""
        *batch, size = x.shape
        groups = self.lane_groups
        x = x.reshape(*batch, size // TILE // groups, ROWS, groups, LANES)
        return x.swapaxes(-2, -3).reshape(*batch, size // TILE, ROWS, LANES)

    def from_tiles(self, tiles: Array) -> Array:
        """Inverts `to_tiles`."""
        *batch, count, _, _ = tiles.shape
        groups = self.lane_groups
        x = tiles.reshape(*batch, count // groups, groups, ROWS, LANES)
        return x.swapaxes(-2, -3).reshape(*batch, count * TILE)

    def spread(self, parameters: Array, positions: int) -> Array:
        """Broadcasts parameters of groups to elements `[*batch, positions, lanes]`."""
        *batch, count = parameters.shape
        rows = count // self._width
        length = self.block_size if self.columns else self.block_size // LANES
        lanes = self.lane_groups * LANES
        parameters = parameters.reshape(*batch, rows, 1, self._width)
        spread = jnp.broadcast_to(parameters, (*batch, rows, length, lanes))
        spread = spread.reshape(*batch, rows * length, lanes)
        return lax.slice_in_dim(spread, 0, positions, axis=-2)

    def of_tiles(self, parameters: Array, tiles: int) -> tuple[Array, Array]:
        """Returns the uint32 parameters of two groups of each tile, `[*batch, tiles]`.

        They are the group of lane 0 in row 0, and the group of lane 28 in row 14; 0
        where `parameters`, the stored groups, have no such group.
        """
        # Only slices and broadcasts: XLA fuses these into the kernel that reads them.
        *batch, count = parameters.shape
        groups = self.lane_groups
        if self.columns:
            per_block = self.block_size // ROWS
            grid = parameters.reshape(*batch, count // self._width, 1, groups, LANES)
            found = [lax.slice_in_dim(grid, n, n + 1, axis=-1) for n in (0, 28)]
        else:
            per_block = max(1, self.block_size // TILE)
            of_tile = max(1, TILE // self.block_size)
            missing = -(-tiles // per_block) * of_tile - count
            padding = [(0, 0, 0)] * len(batch) + [(0, missing, 0)]
            padded = lax.pad(parameters, jnp.uint32(0), padding)
            grid = padded.reshape(*batch, -1, 1, groups, of_tile)
            last = of_tile * 7 // 8
            found = [lax.slice_in_dim(grid, n, n + 1, axis=-1) for n in (0, last)]
        first, last = (self._repeat(x[..., 0], per_block, tiles) for x in found)
        return first, last

    def _repeat(self, blocks: Array, times: int, tiles: int) -> Array:
        """Repeats a group's parameters for the tiles that lie below one another."""
        *batch, count, _, groups = blocks.shape
        repeated = jnp.broadcast_to(blocks, (*batch, count, times, groups))
        repeated = repeated.reshape(*batch, count * times * groups)
        return lax.slice_in_dim(repeated, 0, tiles, axis=-1)

    @property
    def lane_groups(self) -> int:
        """Number of tiles that lie side by side."""
        return 1 if self.columns == 0 else folded_width(self.columns) // LANES

    @property
    def _width(self) -> int:
        """Number of groups that lie side by side."""
        return 1 if self.columns == 0 else folded_width(self.columns)


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
    The codes are uint32 `[*batch, tiles / groups * 16, groups * 32]`.
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


_GOLDEN_RATIO = 0x9E3779B9
_FACTOR = 0x9F27
_POWERS = np.array([pow(_FACTOR, row, 1 << 16) for row in range(ROWS)], np.uint32)


def checksums(tiles: Array) -> Array:
    """Sums the float32 patterns of every other row of each tile, wrapping around.

    Patterns of elements that are not finite must be 0.
    """
    return jnp.sum(tiles[..., ::2, :], axis=(-2, -1), dtype=jnp.uint32)


def noise_words(seed: Array, checksum: Array) -> Array:
    """Computes the 16-bit noise word of every element: `[*batch, tiles, 16, 32]`.

    Args:
        seed: uint32 scalar, or `[*batch]`.
        checksum: uint32 `[*batch, tiles]`: `checksums` or `checksums_of_codes`.
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
    """Combines the parameters that `Format.of_tiles` returns, for dithered codes.

    The upper half of a parameter is the stored scale, the lower half the minimum.
    """
    return first + last * jnp.uint32(_GOLDEN_RATIO)


def _mix(x: Array) -> Array:
    """Scrambles a uint32: the finalizer `lowbias32` of Wellons (hash-prospector)."""
    x = x ^ (x >> jnp.uint32(16))
    x = x * jnp.uint32(0x7FEB352D)
    x = x ^ (x >> jnp.uint32(15))
    x = x * jnp.uint32(0x846CA68B)
    return x ^ (x >> jnp.uint32(16))
