"""The error of everything that is wrong with a file of weights."""

from collections.abc import Sequence


_NUM_LISTED = 5


class WeightsError(ValueError):
    """A file of weights is missing, damaged, refused, or of another model."""


def listed(items: Sequence[str]) -> str:
    """Returns the first few items, and how many more there are."""
    text = ", ".join(items[:_NUM_LISTED])
    more = len(items) - _NUM_LISTED
    return f"{text} and {more} more" if more > 0 else text
