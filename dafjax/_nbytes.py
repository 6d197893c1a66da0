"""Parses and formats numbers of bytes in human-readable form."""

import decimal
import re
from typing import Any

import numpy as np

from dafjax._numbers import shown


_UNITS = {
    "B": 1,
    **{f"{prefix}B": 1000**n for n, prefix in enumerate("kMGT", start=1)},
    **{f"{prefix}iB": 1024**n for n, prefix in enumerate("KMGT", start=1)},
}
# More than any machine has; the sum of a few such numbers still fits 64 bits.
MOST_NBYTES = 2**62
# A number with more than 60 digits is far too large anyway, so rounding it does no
# harm. A number beyond all exponents becomes infinite.
_EXACT = decimal.Context(prec=60, traps=[])


def parse_nbytes(
    name: str, nbytes: Any, *, most: int = MOST_NBYTES, remedy: str = ""
) -> int:
    """Returns the number of bytes that a user gave as an integer or as text.

    Args:
        name: The name of the argument, as the user wrote it.
        nbytes: An integer, or a number with a unit: `"64MiB"`, `"1.5 GB"`.
        most: The most bytes.
        remedy: A sentence that names other valid values.

    Raises:
        TypeError: `nbytes` is neither an integer nor a string.
        ValueError: `nbytes` has no known unit, or is not from 1 to `most`.
    """
    valid = f"{_VALID} {remedy}".rstrip()
    if isinstance(nbytes, bool) or not isinstance(nbytes, (int, np.integer, str)):
        raise TypeError(
            f"`{name}` must be an integer or a string, but got `{shown(nbytes)}` of "
            f"type `{type(nbytes).__name__}`. {valid}"
        )
    if isinstance(nbytes, str):
        match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([A-Za-z]+)", nbytes.strip())
        if match is None or match[2] not in _UNITS:
            raise ValueError(f"`{name}` cannot be read: {shown(nbytes)}. {valid}")
        # Not a float: it has too few digits for some numbers, and overflows for others.
        number = _EXACT.multiply(_EXACT.create_decimal(match[1]), _UNITS[match[2]])
    else:
        number = int(nbytes)
    if number < 1:
        raise ValueError(
            f"`{name}` must be at least 1 byte, but got {shown(nbytes)}. {valid}"
        )
    if number > most:
        raise ValueError(
            f"`{name}` must be at most {most} bytes ({readable(most)}), but got "
            f"{shown(nbytes)}. {valid}"
        )
    return int(number)


_VALID = (
    'Write bytes as an integer, or a number with a unit, as "64MiB", "2GiB" or '
    f'"1.5GB"; the units are {", ".join(_UNITS)}.'
)


def readable(nbytes: int) -> str:
    """Formats bytes in binary units, with one decimal."""
    if nbytes < 1024:
        return f"{nbytes} B"
    size = float(nbytes)
    for unit in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        size /= 1024
        if size < 1024:
            return f"{size:.1f} {unit}"
    return f"{size / 1024:.1f} EiB"
