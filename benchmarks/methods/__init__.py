"""The competitors, one small file each; every file exports `make(bits) -> Method`."""

from collections.abc import Callable, Mapping

from benchmarks.methods import (
    compress,
    compress_again,
    compress_halves,
    compress_measured,
    remat_best,
    remat_full,
    save_all,
)
from benchmarks.methods.method import Method as Method


METHODS: Mapping[str, Callable[[int], Method]] = {
    "save_all": save_all.make,
    "remat_full": remat_full.make,
    "remat_best": remat_best.make,
    "compress": compress.make,
    "compress_again": compress_again.make,
    "compress_halves": compress_halves.make,
    "compress_measured": compress_measured.make,
}
# Halves are an option on GPUs; on CPUs there are more parts. What it takes to measure
# bits is looked at in programs for GPUs.
CPU_METHODS = tuple(
    name for name in METHODS if name not in ("compress_halves", "compress_measured")
)
BASELINE = "save_all"


def make_method(name: str, *, bits: int) -> Method:
    """Returns the method `name`; `bits` matters only to those that compress.

    Raises:
        ValueError: There is no such method.
    """
    if name not in METHODS:
        raise ValueError(
            f"`method` must be one of {', '.join(METHODS)}, but got {name!r}."
        )
    return METHODS[name](bits)
