"""`jax.checkpoint` round each block, with the compiler option that makes it work.

XLA:CPU of jaxlib <= 0.10 removes the barriers that keep rematerialization apart from
the forward pass, and then merges the two. Without that pass `jax.checkpoint` saves
memory. The option does the same as
`XLA_FLAGS=--xla_disable_hlo_passes=cse_barrier_expander`.
"""

import flax.linen as nn

from benchmarks.methods.method import Method


def make(bits: int) -> Method:
    """Returns the method."""
    return Method(
        "jax.checkpoint, barriers kept",
        wrap_block=nn.remat,
        compiler_options={"xla_disable_hlo_passes": "cse_barrier_expander"},
    )
