"""How residuals in codes are read: linearly, nonlinearly, or amplified.

Rounding noise has mean 0. What is linear in a value with such noise has its mean right,
whatever the noise; what is not linear, as the derivative of a GELU, has a bias that
grows with the square of the noise. Such residuals need more bits; most of all those
that an exponential is taken of.

The product of two values is linear in each as long as their noise is not the same. The
noise of a value is where the value is: in another slice of it there is other noise, and
a sum over many elements has little of each.
"""

from collections.abc import Container, Iterable, Mapping, Sequence
from typing import TypeAlias

from dafjax._bits import Use
from dafjax._trace.equation import Atom, Equation
from dafjax._trace.primitives import (
    is_amplifying,
    is_product,
    linear_operands,
    sums_codes,
    takes_parts,
)
from dafjax._trace.residuals import Program


# Noise is that of a value in codes, then of which parts of it.
_Noise: TypeAlias = tuple[int, ...]

# So many elements together have hardly the noise of one.
_MANY = 16


def find_uses(
    program: Program, recomputed: Mapping[int, Equation], inexact: Iterable[int]
) -> dict[int, Use]:
    """Returns how what the backward pass computes depends on each value in codes.

    Args:
        program: The function and its transpose.
        recomputed: For every value that the backward pass computes again, how.
        inexact: The values that it unpacks with an error.
    """
    follower = _Follower(inexact)
    for eqn in dict.fromkeys(recomputed[value] for value in sorted(recomputed)):
        # What sums many has hardly any noise.
        noise = set() if sums_codes(eqn.primitive) else follower.read(eqn)
        values = [value for value in eqn.outputs if value in recomputed]
        if takes_parts(eqn.primitive):
            for value in values:
                follower.noise[value] = {(*one, value) for one in noise}
        else:
            follower.noise.update((value, noise) for value in values)
    cotangents = set(program.cotangents)
    for eqn in program.backward:
        noise = follower.read(eqn, cotangents)
        cotangents.update(eqn.outputs)
        # A product with weights mixes the noise of many elements, as a sum does.
        if not is_product(eqn.primitive):
            size = max(eqn.operand_sizes, default=0)
            for value in eqn.outputs:
                if program.avals[value].size * _MANY > size:
                    follower.noise[value] = noise
    return follower.uses


class _Follower:
    """Follows noise from value to value, and notes where it is not read linearly."""

    def __init__(self, inexact: Iterable[int]) -> None:
        self.uses = dict.fromkeys(inexact, Use.LINEAR)
        self.noise: dict[int, set[_Noise]] = {value: {(value,)} for value in self.uses}

    def read(self, eqn: Equation, cotangents: Container[int] = ()) -> set[_Noise]:
        """Notes how an equation reads its operands; returns the noise in them.

        Whatever it is, it is linear in each cotangent.
        """
        atoms = eqn.operand_atoms
        operands = self._noise_of(atoms)
        linear = linear_operands(eqn.primitive, len(operands))
        multiplies = eqn.primitive == "mul" or is_product(eqn.primitive)
        use = Use.AMPLIFIED if is_amplifying(eqn.primitive) else Use.NONLINEAR
        together: set[_Noise] = set()
        for number, found in enumerate(operands):
            atom = atoms[number]
            is_cotangent = isinstance(atom, int) and atom in cotangents
            if number not in linear and not is_cotangent:
                self._note(found, use)
            elif multiplies:
                self._note(_shared(together, found), use)
            together |= found
        return together

    def _noise_of(self, atoms: Sequence[Atom]) -> list[set[_Noise]]:
        return [
            self.noise.get(atom, set()) if isinstance(atom, int) else set()
            for atom in atoms
        ]

    def _note(self, noise: Iterable[_Noise], use: Use) -> None:
        for value, *_ in noise:
            self.uses[value] = max(self.uses[value], use)


def _shared(first: Iterable[_Noise], second: Iterable[_Noise]) -> list[_Noise]:
    """Returns the noise of `second` that is also in `first`, or part of what is."""
    return [
        b for b in second if any(a[: len(b)] == b or b[: len(a)] == a for a in first)
    ]
