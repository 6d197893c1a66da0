"""`jax.checkpoint` round each block, as users get it."""

import flax.linen as nn

from benchmarks.methods.method import Method


def make(bits: int) -> Method:
    """Returns the method."""
    return Method("jax.checkpoint", wrap_block=nn.remat)
