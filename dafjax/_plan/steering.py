"""Finds values that can cause noise correlation: they enter cotangents that go on.

A residual in codes brings rounding noise into every product with it. If the product is
the gradient of an argument, the noise ends there, and its mean is 0. If it is a
cotangent that goes on, the noise goes on too. This is harmless if the next residual
that multiplies the cotangent has independent noise. If the noise of both comes from the
same code, the product contains the noise squared, whose mean is not 0: the gradient is
biased.
"""

from dafjax._trace.equation import Equation
from dafjax._trace.residuals import Program
from dafjax._trace.rules import is_much_smaller


def find_steering(program: Program) -> frozenset[int]:
    """Returns the values that can cause noise correlation in the backward pass.

    Such a value enters a cotangent that is multiplied with a residual later. Or, apart
    from statistics, it is all that such a value is recomputed from. Arguments do not
    count, because they are exact.
    """
    residuals = {v for v in program.residuals() if v >= program.num_arguments}
    # Cotangents that meet a residual later.
    carries: set[int] = set()

    def carries_on(eqn: Equation) -> bool:
        return not carries.isdisjoint(eqn.outputs)

    steering: set[int] = set()
    for eqn in reversed(program.backward):
        read = residuals.intersection(eqn.input_values)
        if carries_on(eqn):
            steering |= read
        if read or carries_on(eqn):
            carries.update(eqn.input_values)
    sizes = _sizes_before_broadcasting(program)
    for eqn in reversed(program.forward):
        if eqn.is_tame and not steering.isdisjoint(eqn.outputs):
            size = sizes[eqn.outputs[0]]
            large = [v for v in eqn.input_values if not is_much_smaller(sizes[v], size)]
            # For a sum of two, the sum itself is stored. Its operands need not be.
            if len(large) == 1:
                steering.update(large)
    return frozenset(steering)


def _sizes_before_broadcasting(program: Program) -> dict[int, int]:
    """Returns how many elements each value is computed from; 0 for arguments."""
    sizes = dict.fromkeys(range(program.num_arguments), 0)
    for eqn in program.forward:
        if eqn.rule.is_cheap:
            made_of = max((sizes[v] for v in eqn.input_values), default=0)
        else:
            made_of = max((program.avals[v].size for v in eqn.outputs), default=0)
        sizes.update((v, min(made_of, program.avals[v].size)) for v in eqn.outputs)
    return sizes
