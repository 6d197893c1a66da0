"""The mode of a wrapped function: which residuals it stores."""

import enum


class Mode(enum.Enum):
    """The residuals that a wrapped function stores for its backward pass."""

    # Those of JAX: the function runs as it is (`bits=None`).
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

    @property
    def without_segments(self) -> "Mode":
        """The mode with as little noise that has no segments."""
        return {Mode.RERUN: Mode.CODES, Mode.EXACT: Mode.PLAIN}.get(self, self)

    def text(self, bits: int | None) -> str:
        """Returns the mode as options of `remat_compress`.

        Args:
            bits: Bits of a code, where there are codes.
        """
        again = ", rematerialize=True" if self is Mode.RERUN else ""
        texts = {Mode.PLAIN: "plain", Mode.EXACT: 'rematerialize="exact"'}
        return texts.get(self, f"bits={bits}{again}")
