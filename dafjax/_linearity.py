"""Which residuals in codes are read in a way that is not linear.

Rounding noise has mean 0. What is linear in a value with such noise has its mean right,
whatever the noise; what is not linear, as the derivative of a GELU, has a bias that
grows with the square of the noise. Such residuals need more bits.

The product of two values is linear in each as long as their noise is not the same.
"""

from collections.abc import Iterable, Mapping

from dafjax._graph import Equation
from dafjax._primitives import linear_operands


def find_nonlinear(
    recomputed: Mapping[int, Equation], inexact: Iterable[int]
) -> frozenset[int]:
    """Returns which values in codes some recomputed value depends on nonlinearly.

    Args:
        recomputed: For every value that the backward pass computes again, how.
        inexact: The values that it unpacks with an error.
    """
    # The values in codes that each value depends on.
    sources = {value: frozenset([value]) for value in inexact}
    nonlinear: set[int] = set()
    equations = dict.fromkeys(recomputed[value] for value in sorted(recomputed))
    for eqn in equations:
        of_operands = [
            sources.get(atom, frozenset()) if isinstance(atom, int) else frozenset()
            for atom in eqn.operand_atoms
        ]
        linear = linear_operands(eqn.primitive, len(of_operands))
        together: set[int] = set()
        for number, found in enumerate(of_operands):
            if number not in linear:
                nonlinear |= found
            elif eqn.primitive == "mul":
                nonlinear |= together & found
            together |= found
        sources.update((v, frozenset(together)) for v in eqn.outputs if v in recomputed)
    return frozenset(nonlinear)
