"""Checks of counts and real numbers in users' arguments."""

import numbers
import sys
from typing import Any

import numpy as np


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
