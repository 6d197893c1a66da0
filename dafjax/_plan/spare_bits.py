"""More bits for the residuals that are small, which cost next to nothing.

The noise of a residual counts by what is made of it, not by how large it is. The values
between the two factors of a low-rank adapter are a hundred times fewer than those that
go into it, and a gradient is linear in either: at the same bits they bring as much
noise. (A RoBERTa of 4 layers and width 128 with adapters of rank 8, at 2 bits: 30 % of
the variance of their gradients, on Adam's scale, for 1.6 % of the bits. With twice the
bits all but a 25th of that is gone.)
"""

import itertools
from collections.abc import Mapping

from dafjax._bits import TWICE


# The part of the codes' bits, and of what waits beside them, that they may cost.
_SPARE = 1 / 32


def with_spare_bits(
    bits: Mapping[int, int], sizes: Mapping[int, int], *, beside: int = 0
) -> dict[int, int]:
    """Gives the smallest residuals twice the bits.

    As many as can have them for a 32nd more in all; of those of one size all or none.

    Args:
        bits: Of residuals, by their numbers.
        sizes: Their numbers of elements.
        beside: The bits of what waits outside of these codes: what loops and branches
            have packed, and what loops are run again from.

    Returns:
        The bits of all of them.
    """
    most = _SPARE * (beside + sum(sizes[value] * b for value, b in bits.items()))
    found = dict(bits)
    spent = 0
    by_size = sorted(bits, key=lambda value: sizes[value])
    for size, values in itertools.groupby(by_size, key=lambda value: sizes[value]):
        raised = {value: TWICE[bits[value]] for value in values}
        spent += sum(size * (b - bits[value]) for value, b in raised.items())
        if spent > most:
            break
        found.update(raised)
    return found
