"""How residuals in codes are read: linearly, nonlinearly, or amplified.

Rounding noise has mean 0. What is linear in a value with such noise has its mean right,
whatever the noise; what is not linear, as the derivative of a GELU, has a bias that
grows with the square of the noise. Such residuals need more bits; most of all those
that an exponential is taken of.

The product of two values is linear in each as long as their noise is not the same.
"""

from collections.abc import Iterable, Mapping

from dafjax._bits import Use
from dafjax._graph import Equation
from dafjax._primitives import is_amplifying, is_product, linear_operands


def find_uses(
    recomputed: Mapping[int, Equation], inexact: Iterable[int]
) -> dict[int, Use]:
    """Returns how what is recomputed depends on each value in codes.

    Args:
        recomputed: For every value that the backward pass computes again, how.
        inexact: The values that it unpacks with an error.
    """
    uses = dict.fromkeys(inexact, Use.LINEAR)
    # The values in codes that each value depends on.
    sources = {value: frozenset([value]) for value in uses}
    for eqn in dict.fromkeys(recomputed[value] for value in sorted(recomputed)):
        of_operands = [
            sources.get(atom, frozenset()) if isinstance(atom, int) else frozenset()
            for atom in eqn.operand_atoms
        ]
        linear = linear_operands(eqn.primitive, len(of_operands))
        multiplies = eqn.primitive == "mul" or is_product(eqn.primitive)
        use = Use.AMPLIFIED if is_amplifying(eqn.primitive) else Use.NONLINEAR
        together: set[int] = set()
        for number, found in enumerate(of_operands):
            read_otherwise = found
            if number in linear:
                read_otherwise = together & found if multiplies else frozenset()
            for source in read_otherwise:
                uses[source] = max(uses[source], use)
            together |= found
        sources.update((v, frozenset(together)) for v in eqn.outputs if v in recomputed)
    return uses
