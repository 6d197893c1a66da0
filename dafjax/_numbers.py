"""Numbers that users give, numbers of bytes, and tables for people to read.

Also the type aliases of the library.
"""

import decimal
import numbers
import re
import sys
from collections.abc import Container, Hashable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np


Array: TypeAlias = jax.Array
# Any pytree of arrays.
ArrayTree: TypeAlias = Any
# `jax.Device`, which type checkers treat as a variable.
Device: TypeAlias = Any
# Shape and dtype of the array that decoding restores.
Like: TypeAlias = jax.ShapeDtypeStruct
# A static parameter of a primitive.
Static: TypeAlias = Hashable


def align(rows: Sequence[Sequence[str]], *, right: Container[int]) -> str:
    """Returns the rows as lines, each column as wide as its widest cell.

    Args:
        rows: The rows, header included; all have the same number of cells.
        right: Indices of the columns to align on the right.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if number in right else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def as_count(
    name: str, value: Any, *, least: int, most: int | None = None, remedy: str = ""
) -> int:
    """Checks a count, a Python or NumPy integer, and returns it as an int.

    Args:
        name: The name of the argument, as the user wrote it.
        value: The user's argument.
        least: The least valid count.
        most: The greatest valid count; None for no limit.
        remedy: A sentence that says what to do instead.

    Raises:
        TypeError: `value` is not an integer, or is a bool.
        ValueError: `value` is out of range.
    """
    valid = (
        f"at least {least}" if most is None else f"an integer from {least} to {most}"
    )
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        wanted = "an integer" if most is None else valid
        raise TypeError(
            f"`{name}` must be {wanted}, but got `{shown(value)}` of type "
            f"`{type(value).__name__}`.{_after(remedy)}"
        )
    if value < least or (most is not None and value > most):
        raise ValueError(
            f"`{name}` must be {valid}, but got {shown(value)}.{_after(remedy)}"
        )
    return int(value)


def as_real(
    name: str,
    value: Any,
    *,
    lowest: float,
    highest: float | None = None,
    includes_lowest: bool = True,
    remedy: str = "",
) -> int | float:
    """Checks a real number of Python or NumPy, and returns it as an int or a float.

    Args:
        name: The name of the argument, as the user wrote it.
        value: The user's argument.
        lowest: The lower end of the range.
        highest: The upper end, which is part of the range; None for the largest finite
            float.
        includes_lowest: Whether `lowest` is part of the range.
        remedy: A sentence that says what to do instead.

    Raises:
        TypeError: `value` is not a real number, or is a bool.
        ValueError: `value` is out of range or NaN.
    """
    real = value
    if isinstance(value, np.integer):
        real = int(value)
    elif isinstance(value, np.floating):
        real = float(value)
    if highest is None:
        highest = sys.float_info.max
        valid = f"finite and at least {lowest:g}"
    elif includes_lowest:
        valid = f"from {lowest:g} to {highest:g}"
    else:
        valid = f"above {lowest:g} and at most {highest:g}"
    if isinstance(real, bool) or not isinstance(real, (int, float)):
        raise TypeError(
            f"`{name}` must be a number, {valid}, but got `{shown(value)}` of type "
            f"`{type(value).__name__}`.{_after(remedy)}"
        )
    # Every comparison with NaN is false.
    inside = lowest <= real <= highest and (includes_lowest or real != lowest)
    if not inside:
        raise ValueError(
            f"`{name}` must be {valid}, but got {shown(real)}.{_after(remedy)}"
        )
    return real


def shown(value: object) -> str:
    """Formats any value for an error message, in few characters."""
    if isinstance(value, numbers.Integral) and abs(int(value)) >= 10**_MOST_DIGITS:
        # Python refuses to convert integers of thousands of digits to text.
        return f"an integer of {int(value).bit_length()} bits"
    text = repr(value.item() if isinstance(value, np.generic) else value)
    return text if len(text) <= _MOST_CHARACTERS else text[:_MOST_CHARACTERS] + "..."


def _after(remedy: str) -> str:
    return f" {remedy}" if remedy else ""


_MOST_DIGITS = 40
_MOST_CHARACTERS = 80


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


def sum_dtype(dtype: Any) -> Any:
    """Returns the dtype in which the parts of a sum are added."""
    is_short = jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32
    return jnp.float32 if is_short else dtype


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
