"""`dafjax.remat_compress` round the whole loss."""

import functools

import dafjax
from benchmarks.methods.method import Method


# Of one step of a ResNet-18 from its initial weights: about twice what is measured.
_GRADIENT_TOLERANCE = {1: 4.0, 2: 1.5, 3: 0.7, 4: 0.3, 8: 0.02}
_PROJECTION_TOLERANCE = {1: 0.5, 2: 0.2, 3: 0.1, 4: 0.05, 8: 0.01}


def make(bits: int) -> Method:
    """Returns the method with codes of `bits` bits."""
    return Method(
        f"dafjax, {bits} bits",
        wrap_loss=functools.partial(dafjax.remat_compress, bits=bits),
        gradient_tolerance=_GRADIENT_TOLERANCE[bits],
        projection_tolerance=_PROJECTION_TOLERANCE[bits],
    )
