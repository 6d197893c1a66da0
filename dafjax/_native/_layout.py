"""Sizes of the packed layout: the Python counterpart of `xla_ffi/format`."""

import math


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
    """Returns the number of whole folded rows of a matrix.

    The groups of a lane share these positions.
    """
    return size // folded_width(columns) if columns > 0 else 0


def num_tiles(size: int, columns: int = 0) -> int:
    """Returns the number of tiles of a row of `size` elements.

    Args:
        size: Elements of the row.
        columns: Columns of the matrix that the row stands for; 0 for groups of
            consecutive elements.
    """
    if columns == 0:
        return -(-size // TILE)
    width = folded_width(columns)
    return -(-size // (width * ROWS)) * (width // LANES)


def num_blocks(size: int, block_size: int, columns: int = 0) -> int:
    """Returns the number of groups of a row of `size` elements; see `num_tiles`."""
    if columns == 0:
        return -(-size // block_size)
    width = folded_width(columns)
    return -(-size // (width * block_size)) * width


def num_words(size: int, bits: int, columns: int = 0) -> int:
    """Returns the number of uint16 words of a row of `size` codes; see `num_tiles`."""
    return num_tiles(size, columns) * LANES * bits
