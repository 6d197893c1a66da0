"""Checks of the counts and the real numbers that users give."""

import numbers
import sys
from typing import Any

import numpy as np


def as_count(
    name: str, value: Any, *, least: int, most: int | None = None, remedy: str = ""
) -> int:
    """Returns a count that was given as an integer of Python or of NumPy.

    Args:
        name: The argument that it is, as the user wrote it.
        value: What the user gave.
        least: The least count.
        most: The greatest; None if there is none.
        remedy: A sentence that says what to do instead.

    Raises:
        TypeError: It is no integer, or a bool.
        ValueError: It is out of range.
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
    """Returns a number that was given as one of Python or of NumPy.

    Args:
        name: The argument that it is, as the user wrote it.
        value: What the user gave.
        lowest: The end of the range.
        highest: The other end, which is part of it; None: all that is finite.
        includes_lowest: Whether `lowest` is part of it.
        remedy: A sentence that says what to do instead.

    Raises:
        TypeError: It is no real number, or a bool.
        ValueError: It is out of range, or no number (NaN).
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
    # Nothing is true of NaN.
    inside = lowest <= real <= highest and (includes_lowest or real != lowest)
    if not inside:
        raise ValueError(
            f"`{name}` must be {valid}, but got {shown(real)}.{_after(remedy)}"
        )
    return real


def shown(value: object) -> str:
    """Returns a value as an error shows it: short, and whatever it is."""
    if isinstance(value, numbers.Integral) and abs(int(value)) >= 10**_MOST_DIGITS:
        # Python itself refuses to write integers of thousands of digits.
        return f"an integer of {int(value).bit_length()} bits"
    text = repr(value.item() if isinstance(value, np.generic) else value)
    return text if len(text) <= _MOST_CHARACTERS else text[:_MOST_CHARACTERS] + "..."


def _after(remedy: str) -> str:
    return f" {remedy}" if remedy else ""


_MOST_DIGITS = 40
_MOST_CHARACTERS = 80
