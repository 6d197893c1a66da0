"""What the planner finds out about values: channels, and the use of noise.

Finds values whose channels differ, so that per-channel quantization groups pay.

A convolution or a product with weights computes each channel with its own weights. So
channels differ in mean and size, also in sums and other elementwise functions of such
values. At the same number of bits, quantization groups within one channel are then more
accurate than groups that run across the channels: by 2 to 3 dB for the outputs of
convolutions, the hidden values of an MLP and the residual stream of a transformer. For
attention probabilities, whose last axis does not hold channels, they are worse by 8 dB
and more (`benchmarks/block_layout.py`).

Finds values that can cause noise correlation: they enter cotangents that go on.

A residual in codes brings rounding noise into every product with it. If the product is
the gradient of an argument, the noise ends there, and its mean is 0. If it is a
cotangent that goes on, the noise goes on too. This is harmless if the next residual
that multiplies the cotangent has independent noise. If the noise of both comes from the
same code, the product contains the noise squared, whose mean is not 0: the gradient is
biased.

Finds how the backward pass reads residuals: linearly, nonlinearly or amplified.

Rounding noise has mean 0. A function that is linear in a noisy value has the right
mean, however large the noise. A nonlinear function, such as the derivative of a GELU,
has a bias that grows with the square of the noise. Residuals that are read nonlinearly
need more bits, and operands of exponentials need most.

The product of two values is linear in each, unless both have the same noise. Noise
belongs to elements: two slices of a value have different noise, and a sum over many
elements has little of the noise of each.

Finds values with many elements at or near one end of their range.

Examples are results of ReLUs, masks, and exponentials of scores less their maximum.
Stochastic rounding keeps the least value of a quantization group exact and has little
noise near it. Dithered rounding has the same noise everywhere. Where elements are
spread over the range, it has half the noise of stochastic rounding.

Promotes small residuals to more bits, which costs almost nothing.

The effect of a residual's noise depends on how the residual is used, not on its size.
The values between the two factors of a low-rank adapter are a hundred times fewer than
its inputs. A gradient is linear in both, so at the same number of bits both bring the
same noise. (In a RoBERTa of 4 layers and width 128 with adapters of rank 8, at 2 bits,
these values cause 30 % of the variance of the adapters' gradients, on Adam's scale, and
take 1.6 % of the bits. Twice the bits remove all but a 25th of that variance.)
"""

import dataclasses
import itertools
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import final

import jax.numpy as jnp

from dafjax import config
from dafjax._bits import TWICE, Use
from dafjax._trace.equation import Atom, Equation
from dafjax._trace.residuals import Program
from dafjax._trace.rules import Combines, Elements, Error, is_much_smaller


def find_channels(program: Program, activations: Container[int]) -> frozenset[int]:
    """Returns the values whose last axis holds channels.

    Args:
        program: The function.
        activations: Its arguments that come from an earlier layer. By the convention of
            Flax and others, their last axis holds channels.
    """
    found = {v for v in range(program.num_arguments) if v in activations}
    given = find_given(program, set(range(program.num_arguments)) - found)
    for eqn in program.forward:
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


def find_given(program: Program, arguments: Iterable[int]) -> frozenset[int]:
    """Returns what follows cheaply from some arguments, and these arguments.

    They are weights, for example, or the data that a first layer reads.
    """
    given = set(arguments)
    for eqn in program.forward:
        if eqn.rule.is_cheap and given.issuperset(eqn.input_values):
            given.update(eqn.outputs)
    return frozenset(given)


def _keeps_channels(eqn: Equation) -> bool:
    """Returns whether a result with its operands' shape also has their channels."""
    is_continuous = eqn.rule.is_elementwise and eqn.rule.error <= Error.CONTINUOUS
    return is_continuous or Elements.PLACED in eqn.rule.elements


def _is_product_with(eqn: Equation, given: Container[int]) -> bool:
    if not eqn.makes_channels:
        return False
    weights = eqn.operand_atoms[1]
    return not isinstance(weights, int) or weights in given


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
    for eqn in _in_order(recomputed):
        # A sum over many elements has hardly any noise.
        noise = _NO_NOISE if eqn.primitive == "sum_of_codes" else follower.read(eqn)
        values = [value for value in eqn.outputs if value in recomputed]
        if eqn.rule.slices:
            follower.noise.update((value, noise.of_part(value)) for value in values)
        else:
            follower.noise.update((value, noise) for value in values)
    for value in program.amplified & follower.noise.keys():
        follower.note(follower.noise[value], Use.AMPLIFIED)
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


def _in_order(recomputed: Mapping[int, Equation]) -> dict[Equation, None]:
    """Returns recomputations, each after those of its operands."""
    found: dict[Equation, None] = {}
    stack = sorted(recomputed, reverse=True)
    while stack:
        eqn = recomputed[stack[-1]]
        waits = [
            v
            for v in eqn.input_values
            if v in recomputed and recomputed[v] not in found
        ]
        if eqn in found or not waits:
            found.setdefault(eqn)
            stack.pop()
        stack.extend(waits if eqn not in found else ())
    return found


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
                self.note(found, use)
            elif multiplies:
                # The number of a part is the number of the value that the slice made.
                for part in together.shared_with(found):
                    self.note(self.noise[part], use)
            together |= found
        return together

    def _noise_of(self, atoms: Sequence[Atom]) -> list[_Noise]:
        return [
            self.noise.get(atom, _NO_NOISE) if isinstance(atom, int) else _NO_NOISE
            for atom in atoms
        ]

    def note(self, noise: _Noise, use: Use) -> None:
        """Notes that something reads a value with this noise."""
        for value in noise.values:
            self.uses[value] = max(self.uses[value], use)


def _noise_of_codes(value: int) -> _Noise:
    alone = frozenset([value])
    return _Noise(values=alone, parts=alone, wholes=alone)


def find_one_sided(program: Program) -> frozenset[int]:
    """Returns the numbers of these values."""
    found: set[int] = set()

    def is_at_an_end(value: int) -> bool:
        # Booleans and integers take few different values.
        dtype = program.avals[value].dtype
        return value in found or not jnp.issubdtype(dtype, jnp.inexact)

    for eqn in program.forward:
        # Scalars, such as constant factors, do not count.
        operands = [v for v in eqn.input_values if program.avals[v].size > 1]
        all_are = bool(operands) and all(map(is_at_an_end, operands))
        if eqn.rule.ends_given(all_are):
            found.update(eqn.outputs)
    return frozenset(found)


def with_spare_bits(
    bits: Mapping[int, int], sizes: Mapping[int, int], *, beside: int = 0
) -> dict[int, int]:
    """Gives the smallest residuals twice the bits.

    Promotes as many as possible for a total of a 32nd more bits. Of the residuals of
    one size, it promotes all or none.

    Args:
        bits: The bits of each residual, by its number.
        sizes: The number of elements of each residual, by its number.
        beside: The bits stored outside of these codes: the residuals that loops and
            branches have packed, and the values that loops are recomputed from.

    Returns:
        The bits of all residuals.
    """
    most = config.SPARE_BITS * (
        beside + sum(sizes[value] * b for value, b in bits.items())
    )
    found = dict(bits)
    spent = 0
    by_size = sorted(bits, key=lambda value: sizes[value])
    for size, values in itertools.groupby(by_size, key=lambda value: sizes[value]):
        raised = {value: TWICE[bits[value]] for value in values}
        spent += sum(size * (b - bits[value]) for value, b in raised.items())
        if spent > most:
            break
        found.update(raised)
    return found
