"""The mode of a wrapped function: what it stores, and what it computes again."""

import enum


class Mode(enum.Enum):
    """What a wrapped function stores for its backward pass."""

    # What JAX stores: the function stays as it is (`bits=None`).
    PLAIN = enum.auto()
    # Codes of residuals.
    CODES = enum.auto()
    # Codes of the values between segments, which the backward pass computes again
    # (`rematerialize=True`).
    RERUN = enum.auto()
    # The values between such segments, as they are (`rematerialize="exact"`).
    EXACT = enum.auto()

    @property
    def has_segments(self) -> bool:
        """Whether the backward pass computes segments of the function again."""
        return self in (Mode.RERUN, Mode.EXACT)
