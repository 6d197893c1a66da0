"""`dafjax.remat_compress` round the whole loss, the forward pass run twice."""

import dataclasses
import functools

import dafjax
from benchmarks.methods import compress
from benchmarks.methods.method import Method


def make(bits: int) -> Method:
    """Returns the method with codes of `bits` bits."""
    return dataclasses.replace(
        compress.make(bits),
        label=f"dafjax, {bits} bits, rematerialized",
        wrap_loss=functools.partial(
            dafjax.remat_compress, bits=bits, rematerialize=True
        ),
    )
