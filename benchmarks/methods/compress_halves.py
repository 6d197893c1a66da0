"""`dafjax.remat_compress` round the whole loss, on GPUs in halves of the examples."""

import dataclasses
import functools

import dafjax
from benchmarks.methods import compress
from benchmarks.methods.method import Method


def make(bits: int) -> Method:
    """Returns the method with codes of `bits` bits."""
    return dataclasses.replace(
        compress.make(bits),
        label=f"dafjax, {bits} bits, in two parts",
        wrap_loss=functools.partial(dafjax.remat_compress, bits=bits, max_parts=2),
    )
