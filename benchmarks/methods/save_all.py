"""Plain autodiff: every residual is kept as it is."""

from benchmarks.methods.method import Method


def make(bits: int) -> Method:
    """Returns the method."""
    return Method("plain")
