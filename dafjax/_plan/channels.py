"""Finds values whose channels differ, so that per-channel quantization groups pay.

A convolution or a product with weights computes each channel with its own weights. So
channels differ in mean and size, also in sums and other elementwise functions of such
values. At the same number of bits, quantization groups within one channel are then more
accurate than groups that run across the channels: by 2 to 3 dB for the outputs of
convolutions, the hidden values of an MLP and the residual stream of a transformer. For
attention probabilities, whose last axis does not hold channels, they are worse by 8 dB
and more (`benchmarks/block_layout.py`).
"""

from collections.abc import Container

from dafjax._trace.equation import Equation
from dafjax._trace.residuals import Program
from dafjax._trace.rules import Elements, Error


def find_channels(program: Program, activations: Container[int]) -> frozenset[int]:
    """Returns the values whose last axis holds channels.

    Args:
        program: The function.
        activations: Its arguments that come from an earlier layer. By the convention of
            Flax and others, their last axis holds channels.
    """
    found = {v for v in range(program.num_arguments) if v in activations}
    # Values that follow cheaply from the other arguments: from weights, or from the
    # data that a first layer reads.
    given = set(range(program.num_arguments)) - found
    for eqn in program.forward:
        if eqn.rule.is_cheap and given.issuperset(eqn.input_values):
            given.update(eqn.outputs)
        if _is_product_with(eqn, given):
            found.update(eqn.outputs)
        elif _keeps_channels(eqn):
            shapes = {program.avals[v].shape for v in eqn.outputs}
            found.update(
                v
                for v in eqn.outputs
                for operand in eqn.input_values
                if operand in found and {program.avals[operand].shape} == shapes
            )
    return frozenset(found)


def _keeps_channels(eqn: Equation) -> bool:
    """Returns whether a result with its operands' shape also has their channels."""
    is_continuous = eqn.rule.is_elementwise and eqn.rule.error <= Error.CONTINUOUS
    return is_continuous or Elements.PLACED in eqn.rule.elements


def _is_product_with(eqn: Equation, given: Container[int]) -> bool:
    if not eqn.makes_channels:
        return False
    weights = eqn.operand_atoms[1]
    return not isinstance(weights, int) or weights in given
