"""The rows in which an array is packed."""

import math
from collections.abc import Sequence

from dafjax._native._layout import TILE, num_tiles


# A row is padded to whole tiles. Rows that grow by more than this are put together.
_MOST_PADDING = 1 / 16


def rows_of(shape: Sequence[int]) -> tuple[int, int]:
    """Returns the number of rows of an array and the number of elements of each.

    The first dimension of an array is mostly that of examples, and what devices divide
    among them. A row is one example, so that each device packs its own; or as many as
    it takes to fill tiles, for the smallest of arrays all.
    """
    if len(shape) < 2 or math.prod(shape) == 0:
        return 1, math.prod(shape)
    count, size = shape[0], math.prod(shape[1:])
    for together in range(1, count + 1):
        if count % together == 0:
            length = together * size
            if num_tiles(length) * TILE <= length * (1 + _MOST_PADDING):
                return count // together, length
    return 1, count * size
