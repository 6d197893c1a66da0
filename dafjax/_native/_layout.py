"""Sizes of the packed layout, the Python counterpart of `xla_ffi/format`."""

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


def num_tiles(size: int) -> int:
    """Returns the number of tiles of a row of `size` elements."""
    return -(-size // TILE)


def num_blocks(size: int, block_size: int) -> int:
    """Returns the number of blocks of a row of `size` elements."""
    return -(-size // block_size)


def num_words(size: int, bits: int) -> int:
    """Returns the number of uint16 words of a row of `size` codes of `bits` bits."""
    return num_tiles(size) * LANES * bits
