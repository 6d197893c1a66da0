"""The barriers that force an order on XLA, for tests that remove them one by one."""

import dataclasses
from typing import final


@final
@dataclasses.dataclass(frozen=True)
class Ties:
    """Which barriers are inserted: all of them, except in tests that show their effect.

    Attributes:
        forward: Barriers that take a value and its packed form, before the value's
            later uses. Without them packing is delayed until the backward pass.
        cotangent: The dependency of decoding on the backward pass. Without it residuals
            are decoded as soon as they are packed.
        outgoing: Barriers that take the results of a backward stage, at the start of
            the next one. Without them small reductions are delayed, and their operands
            stay live.
        partial: Barriers between partial results, recomputed from one residual, and the
            decode of the next residual; on GPUs only if a custom call decodes it.
            Without them all residuals are decoded at once.
        operands: Barriers that take cotangents and the restored operands of the same
            equation, on CPUs. Without them copies of the cotangents stay live until the
            operands are restored.
        arguments: The dependency on the backward pass of large arguments and of zeros
            that lookup gradients are added to, and the dependency on the forward pass
            of keys. Without it rearranged copies of all weights, zeros for the
            gradients of tables and the random bits of all layers are live from the
            start.
        results: Barriers that take small results and the value packed last. Without
            them a loss is delayed until after the backward pass, and the logits stay
            live.
        layouts: Layout constraints on large delayed arguments, on their gradients, and
            on cotangents that products read. Without them XLA:GPU rearranges arguments
            before the dependency, the optimizer's state for them, and cotangents for
            each product.
        in_place: Whether results of products are barrier inputs only. Otherwise XLA:CPU
            does not compute in place in their buffers.
    """

    forward: bool = True
    cotangent: bool = True
    outgoing: bool = True
    partial: bool = True
    operands: bool = True
    arguments: bool = True
    results: bool = True
    layouts: bool = True
    in_place: bool = True
