"""Numbers of bytes as people write and read them."""

import re
from typing import Any


_UNITS = {
    "B": 1,
    **{f"{prefix}B": 1000**n for n, prefix in enumerate("kMGT", start=1)},
    **{f"{prefix}iB": 1024**n for n, prefix in enumerate("KMGT", start=1)},
}


def parse_nbytes(name: str, nbytes: Any) -> int:
    """Returns a number of bytes that was given as an integer or as text.

    Args:
        name: The argument that it is, as the user wrote it.
        nbytes: An integer, or a number with a unit: `"64MiB"`, `"1.5 GB"`.

    Raises:
        TypeError: It is neither an integer nor a string.
        ValueError: It is no positive number, or has no unit that is known.
    """
    if isinstance(nbytes, bool) or not isinstance(nbytes, (int, str)):
        raise TypeError(
            f"`{name}` must be an integer or a string, but got `{nbytes!r}` of type "
            f"`{type(nbytes).__name__}`. {_VALID}"
        )
    if isinstance(nbytes, int):
        number = nbytes
    else:
        match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([A-Za-z]+)", nbytes.strip())
        if match is None or match[2] not in _UNITS:
            raise ValueError(f"`{name}` cannot be read: {nbytes!r}. {_VALID}")
        number = int(float(match[1]) * _UNITS[match[2]])
    if number < 1:
        raise ValueError(f"`{name}` must be at least 1 byte, but got {nbytes!r}.")
    return number


_VALID = (
    'Write bytes as an integer, or a number with a unit, as "64MiB", "2GiB" or '
    f'"1.5GB"; the units are {", ".join(_UNITS)}.'
)


def readable(nbytes: int) -> str:
    """Returns bytes in binary units, with three digits or so."""
    if nbytes < 1024:
        return f"{nbytes} B"
    size = float(nbytes)
    for unit in ("KiB", "MiB"):
        size /= 1024
        if size < 1024:
            return f"{size:.1f} {unit}"
    return f"{size / 1024:.1f} GiB"
