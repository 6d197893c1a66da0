"""How residuals in codes are read: linearly, nonlinearly, or amplified.

Rounding noise has mean 0. What is linear in a value with such noise has its mean right,
whatever the noise; what is not linear, as the derivative of a GELU, has a bias that
grows with the square of the noise. Such residuals need more bits; most of all those
that an exponential is taken of.

The product of two values is linear in each as long as their noise is not the same. The
noise of a value is where the value is: in another slice of it there is other noise, and
a sum over many elements has little of each.
"""

import dataclasses
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import final

from dafjax._bits import Use
from dafjax._trace.equation import Atom, Equation
from dafjax._trace.residuals import Program
from dafjax._trace.rules import Combines, Error


# So many elements together have hardly the noise of one. (Of a norm over 48 channels,
# one of them large, the mean of 16 gradients was off by 0.9 of the norm.)
_MANY = 64


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
        noise = _NO_NOISE if eqn.primitive == "sum_of_codes" else follower.read(eqn)
        values = [value for value in eqn.outputs if value in recomputed]
        if eqn.rule.slices:
            follower.noise.update((value, noise.of_part(value)) for value in values)
        else:
            follower.noise.update((value, noise) for value in values)
    cotangents = set(program.cotangents)
    for eqn in program.backward:
        noise = follower.read(eqn, cotangents)
        cotangents.update(eqn.outputs)
        # A product with weights mixes the noise of many elements, as a sum does.
        if not eqn.rule.is_product:
            size = max(eqn.operand_sizes, default=0)
            for value in eqn.outputs:
                if program.avals[value].size * _MANY > size:
                    follower.noise[value] = noise
    return follower.uses


@final
@dataclasses.dataclass(frozen=True)
class _Noise:
    """The noise that a value has.

    It is that of values in codes, or of parts of what has such noise, or of parts of
    parts. On how many ways a part is one of a value in codes does not matter: whatever
    has its noise has that of all ways. They are not told apart, as there are very many
    where a value is cut and put together again and again.

    Attributes:
        values: The values in codes that it comes from.
        parts: What it is the noise of: values in codes, and parts by their numbers.
        wholes: These, and all that they are parts of.
    """

    values: frozenset[int] = frozenset()
    parts: frozenset[int] = frozenset()
    wholes: frozenset[int] = frozenset()

    def __or__(self, other: "_Noise") -> "_Noise":
        return _Noise(
            self.values | other.values,
            self.parts | other.parts,
            self.wholes | other.wholes,
        )

    def of_part(self, part: int) -> "_Noise":
        """Returns the noise of a part of what has this noise."""
        if not self.values:
            return self
        return _Noise(self.values, frozenset([part]), self.wholes | {part})

    def shared_with(self, other: "_Noise") -> frozenset[int]:
        """Returns the parts of each that the other has noise of, or of a part of.

        They are where the noise of both is the same.
        """
        return (self.parts & other.wholes) | (other.parts & self.wholes)


_NO_NOISE = _Noise()


class _Follower:
    """Follows noise from value to value, and notes where it is not read linearly."""

    def __init__(self, inexact: Iterable[int]) -> None:
        self.uses = dict.fromkeys(inexact, Use.LINEAR)
        self.noise = {value: _noise_of_codes(value) for value in self.uses}

    def read(self, eqn: Equation, cotangents: Container[int] = ()) -> _Noise:
        """Notes how an equation reads its operands; returns the noise in them.

        Whatever it is, it is linear in each cotangent.
        """
        atoms = eqn.operand_atoms
        operands = self._noise_of(atoms)
        linear = eqn.rule.linear_in.of(len(operands))
        multiplies = eqn.rule.combines is Combines.MULTIPLY
        use = Use.NONLINEAR
        if eqn.is_amplifying:
            use = Use.AMPLIFIED
        elif eqn.error is Error.SMOOTH:
            use = Use.SMOOTH
        together = _NO_NOISE
        for number, found in enumerate(operands):
            atom = atoms[number]
            is_cotangent = isinstance(atom, int) and atom in cotangents
            if number not in linear and not is_cotangent:
                self._note(found, use)
            elif multiplies:
                # A part has the number of the value that was made by cutting it out.
                for part in together.shared_with(found):
                    self._note(self.noise[part], use)
            together |= found
        return together

    def _noise_of(self, atoms: Sequence[Atom]) -> list[_Noise]:
        return [
            self.noise.get(atom, _NO_NOISE) if isinstance(atom, int) else _NO_NOISE
            for atom in atoms
        ]

    def _note(self, noise: _Noise, use: Use) -> None:
        for value in noise.values:
            self.uses[value] = max(self.uses[value], use)


def _noise_of_codes(value: int) -> _Noise:
    alone = frozenset([value])
    return _Noise(values=alone, parts=alone, wholes=alone)
