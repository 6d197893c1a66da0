"""Which orders are forced on XLA, for tests that show what each is for."""

import dataclasses
from typing import final


@final
@dataclasses.dataclass(frozen=True)
class Ties:
    """Which ties are made: all of them, except in tests that show what each is for.

    Attributes:
        forward: Ties of a value with its packed form, before it is used on. Without
            them packing is put off until the backward pass.
        cotangent: The dependency of unpacking on the backward pass. Without it
            residuals are unpacked as soon as they are packed.
        outgoing: Ties of what a stretch of the backward pass computed with the start of
            the next one. Without them small reductions are put off, and their operands
            live on.
        partial: Ties of what was recomputed from one residual with the unpacking of the
            next, on GPUs only where a custom call unpacks it. Without them all are
            unpacked at once.
        operands: Ties of cotangents with what was restored for the same equation, on
            CPUs. Without them copies of the cotangents wait for it.
        arguments: The dependency of large arguments on the backward pass, of zeros that
            gradients of lookups are added to, and of keys on the forward pass. Without
            it rearranged copies of all weights, zeros for the gradients of tables, and
            the random bits of all layers, wait from the start.
        results: Ties of small results with what is packed last. Without them a loss is
            put off until after the backward pass, and the logits live on.
        layouts: The order in memory of large arguments that wait for a dependency, of
            their gradients, and of cotangents that products read. Without it XLA:GPU
            rearranges arguments before that, what an optimizer keeps of them, and
            cotangents for each product.
        in_place: Waiting for the results of products, which do not come out of a tie.
            Without it XLA:CPU computes nothing in their place.
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
