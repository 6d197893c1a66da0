"""`dafjax.remat_compress` round the whole loss, bits given out as they are measured."""

import dataclasses
import functools

import dafjax
from benchmarks.methods import compress
from benchmarks.methods.method import Method


def make(bits: int) -> Method:
    """Returns the method with codes of `bits` bits on average."""
    average = dafjax.AverageBits(bits)
    return dataclasses.replace(
        compress.make(bits),
        label=f"dafjax, {bits} bits on average",
        wrap_loss=functools.partial(dafjax.remat_compress, bits=average),
        jit=dafjax.jit,
    )
