"""Finds how the backward pass reads residuals: linearly, nonlinearly or amplified.

Rounding noise has mean 0. A function that is linear in a noisy value has the right
mean, however large the noise. A nonlinear function, such as the derivative of a GELU,
has a bias that grows with the square of the noise. Residuals that are read nonlinearly
need more bits, and operands of exponentials need most.

The product of two values is linear in each, unless both have the same noise. Noise
belongs to elements: two slices of a value have different noise, and a sum over many
elements has little of the noise of each.
"""

import dataclasses
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import final

from dafjax import config
from dafjax._bits import Use
from dafjax._trace.equation import Atom, Equation
from dafjax._trace.residuals import Program
from dafjax._trace.rules import Combines, Error


def find_uses(
    program: Program, recomputed: Mapping[int, Equation], inexact: Iterable[int]
) -> dict[int, Use]:
    """Returns how results of the backward pass depend on each value in codes.

    Args:
        program: The function and its transpose.
        recomputed: For every value that the backward pass recomputes, its equation.
        inexact: The values that the backward pass unpacks with an error.
    """
    follower = _Follower(inexact)
    for eqn in dict.fromkeys(recomputed[value] for value in sorted(recomputed)):
        # A sum over many elements has hardly any noise.
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
                if program.avals[value].size * config.MANY_SHARING > size:
                    follower.noise[value] = noise
    return follower.uses


@final
@dataclasses.dataclass(frozen=True)
class _Noise:
    """The noise that a value has.

    The noise comes from values in codes, from slices (parts) of noisy values, or from
    slices of slices. A slice can come from a value in codes along several paths. The
    paths are not distinguished: a value with the noise of the slice has it from all
    paths, and repeated slicing and concatenation makes very many of them.

    Attributes:
        values: The values in codes that the noise comes from.
        parts: The values that have this noise: values in codes, and slices, by number.
        wholes: The `parts`, and all values that they are slices of.
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
        """Returns the noise of a slice of a value with this noise."""
        if not self.values:
            return self
        return _Noise(self.values, frozenset([part]), self.wholes | {part})

    def shared_with(self, other: "_Noise") -> frozenset[int]:
        """Returns the parts whose noise both have.

        A part of one counts if the other has the noise of it or of a slice of it.
        """
        return (self.parts & other.wholes) | (other.parts & self.wholes)


_NO_NOISE = _Noise()


class _Follower:
    """Follows noise from value to value, and notes how equations read it."""

    def __init__(self, inexact: Iterable[int]) -> None:
        self.uses = dict.fromkeys(inexact, Use.LINEAR)
        self.noise = {value: _noise_of_codes(value) for value in self.uses}

    def read(self, eqn: Equation, cotangents: Container[int] = ()) -> _Noise:
        """Notes how an equation reads its operands; returns the noise in them.

        Every equation is linear in each cotangent.
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
                # The number of a part is the number of the value that the slice made.
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
