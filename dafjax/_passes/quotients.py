"""Passes about quotients: softmax, and weighted means.

Recomputes a softmax denominator from its dequantized numerators.

A softmax is `exp(x) / sum(exp(x))`. If its backward pass reads the exponentials from
codes, or recomputes them from codes of `x`, but reads the exact sum, the shares of a
row do not add up to 1. The part that all cotangents of the row have in common cancels
in exact arithmetic; here it is multiplied by the difference from 1. If the sum is taken
over these exponentials, the shares add up to 1. (Fine-tuned RoBERTa, 2 bits: this
halves the noise that the exponentials bring into the cotangents of queries. One layer
of attention on inputs with a mean of 3, 8 bits: 0.79 of the gradient's norm becomes
0.02.) And the exact sum need not be stored.

Recomputes both parts of a weighted mean from the same codes.

A weighted mean is `sum(w v) / sum(w)`, as in linear attention. Its gradient with regard
to a weight is proportional to `v` less the mean. Where the weights are products,
`w = q k`, the gradient with regard to `q` is a weighted sum of such differences, most
of which cancel. If the numerator has its own codes, its rounding noise does not
cancel. So everything between the weights and the quotient is recomputed from codes of
`q`, `k` and `v`. Then the gradient is nearly the exact one at the unpacked operands.
(Three layers of causal linear attention, 8 bits: a noise of 0.29 of the gradient's norm
becomes 0.01; 2 bits: 20 becomes 0.35.)
"""

import dataclasses
from collections.abc import Container, Iterable, Iterator, Mapping
from typing import final

import jax
import jax.numpy as jnp

from dafjax import config
from dafjax._passes.bounds import find_least
from dafjax._trace.equation import Atom, Equation, call_equation
from dafjax._trace.graph import find_numbers, live_equations, number_of
from dafjax._trace.residuals import Program, Recipe
from dafjax._trace.rules import Combines


def note_denominators(program: Program) -> Program:
    """Returns the program with a recipe for each softmax denominator.

    Such is a sum of many exponentials that the backward pass only divides by.
    """
    exponentials = _exponentials(program)
    residuals = program.residuals()
    equations = (*live_equations(program.forward, residuals), *program.backward)
    recipes = dict(program.recipes)
    for eqn in program.forward:
        if eqn.primitive != "reduce_sum" or not exponentials.issuperset(eqn.inputs):
            continue
        (operand,), (total,) = eqn.input_values, eqn.outputs
        is_sum_of_many = (
            program.avals[operand].size >= config.MANY_TERMS * program.avals[total].size
        )
        if is_sum_of_many and _only_divides(total, equations):
            codes = _sum_of_codes(program, eqn)
            recipes[total] = Recipe(codes, needs=operand, needs_codes=True)
    return dataclasses.replace(program, recipes=recipes)


def _exponentials(program: Program) -> set[int]:
    """Returns exponentials, also in another dtype, or with zeros in place of some."""
    numbers = find_numbers(program.forward)
    found: set[int] = set()
    for eqn in program.forward:
        atoms = eqn.operand_atoms
        if eqn.primitive == "select_n":
            moves = all(number_of(a, numbers) == 0 or a in found for a in atoms[1:])
        else:
            moves = eqn.rule.converts and found.issuperset(eqn.inputs)
        if eqn.primitive == "exp" or moves:
            found.update(eqn.outputs)
    return found


def sum_of_shares(exponentials: jax.Array, *, axes: tuple[int, ...]) -> jax.Array:
    """Returns softmax denominators: the sums, but 1 where all codes decode to 0."""
    total = jnp.sum(exponentials, axes)
    return jnp.where(total == 0, 1, total)


def _sum_of_codes(program: Program, eqn: Equation) -> Equation:
    """Returns an equation that sums the dequantized exponentials."""
    axes = tuple(eqn.params["axes"])

    def sum_of_codes(exponentials: jax.Array) -> jax.Array:
        return sum_of_shares(exponentials, axes=axes)

    operands = [program.avals[value] for value in eqn.input_values]
    return call_equation(sum_of_codes, operands, eqn.inputs, eqn.outputs, eqn)


def _only_divides(value: int, equations: Iterable[Equation]) -> bool:
    """Returns whether all readers of a sum, broadcast or not, divide by it.

    A reader may also ask for its sign: all sums of exponentials have the same sign.
    """
    same = {value}
    for eqn in equations:
        if same.isdisjoint(eqn.input_values):
            continue
        if eqn.rule.keeps_magnitudes or eqn.primitive == "abs":
            same.update(eqn.outputs)
        elif not (_divides_by(eqn, same) or _compares_with_zero(eqn)):
            return False
    return True


def _divides_by(eqn: Equation, values: Container[int]) -> bool:
    numerator, *others = eqn.operand_atoms
    is_numerator = isinstance(numerator, int) and numerator in values and bool(others)
    return eqn.divisor is not None and eqn.divisor in values and not is_numerator


def _compares_with_zero(eqn: Equation) -> bool:
    _, *others = eqn.operand_atoms
    return eqn.primitive in ("ge", "gt", "sign") and all(
        number_of(other, {}) == 0 for other in others
    )


def note_means(program: Program) -> Program:
    """Returns the program with recipes for weighted means.

    If no weight is negative, all values between a numerator and the factors that it has
    in common with its denominator follow from codes. So does a copy of the denominator,
    which scales the numerator. The denominator itself stays exact.

    If weights may be negative, a sum from codes may say little of the exact one. Or a
    sum goes on from an earlier iteration of a loop, and has codes of its own. Then all
    that the two sums have as terms or factors gets the bits of amplified values.
    """
    residuals = set(program.residuals())
    # The backward pass reads a numerator for the gradient of the denominator.
    quotients = [q for q in _quotients(program) if q.numerator in residuals]
    if not quotients:
        return program
    factors = _factors(program)
    terms = _factors(program, of_terms=True)
    rewriter = _Rewriter(program)
    for quotient in quotients:
        numerator, denominator = quotient.numerator, quotient.path[-1]
        above, below = terms[numerator], terms[denominator]
        if numerator in below or denominator in above or above.isdisjoint(below):
            continue
        between = _between(factors, numerator, denominator)
        if not between or not rewriter.scale(quotient, between):
            rewriter.amplified |= above | below
    return rewriter.program()


def _between(
    factors: Mapping[int, frozenset[int]], numerator: int, denominator: int
) -> set[int]:
    """Returns the values between two values and the factors that they share."""
    above, below = factors[numerator], factors[denominator]
    common = above & below
    farther = (factors[value] - {value} for value in common)
    nearest = common.difference(*farther)
    return {v for v in above ^ below if not nearest.isdisjoint(factors[v])}


@final
@dataclasses.dataclass(frozen=True)
class _Quotient:
    """A quotient of two values.

    Attributes:
        numerator: The numerator.
        path: The denominator is the last of these values. If there are others, the
            numerator is multiplied by the first one, which follows from the inverse of
            the denominator.
    """

    numerator: int
    path: tuple[int, ...]


@final
class _Rewriter:
    """Adds copies of denominators, and recipes for numerators.

    Attributes:
        amplified: As in `Program`.
    """

    def __init__(self, program: Program) -> None:
        self._program = program
        self._makers = program.producers
        self._least = find_least(program)
        self._avals = list(program.avals)
        self._recipes = dict(program.recipes)
        self._from_codes: set[int] = set()
        self.amplified: frozenset[int] = frozenset()
        # The copies, by value and by the equation that they copy.
        self._copies: dict[int, int] = {}
        self._copied: dict[Equation, list[Equation]] = {}

    def scale(self, quotient: _Quotient, between: Iterable[int]) -> bool:
        """Scales a numerator by its denominator over a copy of codes.

        Args:
            quotient: The weighted mean.
            between: The values between its two parts and their common factors.

        Returns:
            Whether that is possible: the denominator must be a sum of numbers that are
            not negative, with no more elements than the numerator.
        """
        shapes = (self._avals[v].shape for v in (quotient.numerator, quotient.path[0]))
        numerator, factor = shapes
        if jnp.broadcast_shapes(numerator, factor) != numerator:
            return False
        between = set(between)
        moved = self._moved(quotient.path[-1], between)
        sums = (v for v in moved if not self._moves(self._makers[v]))
        if any(self._least.get(value, -1) < 0 for value in sums):
            return False
        self._from_codes |= between - moved
        self._scale(quotient, moved.union(quotient.path))
        return True

    def program(self) -> Program:
        """Returns the rewritten program."""
        forward = [
            made
            for eqn in self._program.forward
            for made in (*self._copied.get(eqn, ()), eqn)
        ]
        return dataclasses.replace(
            self._program,
            avals=tuple(self._avals),
            forward=tuple(forward),
            recipes=self._recipes,
            from_codes=frozenset(self._from_codes),
            amplified=self.amplified,
        )

    def _moves(self, eqn: Equation) -> bool:
        return eqn.rule.is_elementwise or eqn.rule.keeps_magnitudes

    def _moved(self, value: int, between: Container[int]) -> set[int]:
        """Returns a value, and those that it follows from element by element."""
        found = {value}
        if self._moves(self._makers[value]):
            for operand in self._makers[value].input_values:
                if operand in between:
                    found |= self._moved(operand, between)
        return found

    def _scale(self, quotient: _Quotient, exact: Iterable[int]) -> None:
        for value in sorted(exact):
            if value not in self._copies:
                eqn = self._makers[value]
                inputs = (
                    self._copies.get(a, a) if isinstance(a, int) else a
                    for a in eqn.inputs
                )
                self._copies |= self._copy(eqn, tuple(inputs))
        numerator, factor = quotient.numerator, quotient.path[0]
        eqn = self._makers[numerator]
        unscaled = self._copy(eqn, eqn.inputs)[numerator]
        parts = [factor, self._copies[factor]]
        if factor != quotient.path[-1]:
            parts.reverse()
        inputs = unscaled, *parts
        operands = [self._avals[value] for value in inputs]
        scaled = call_equation(scaled_numerator, operands, inputs, (numerator,), eqn)
        self._recipes[numerator] = Recipe(scaled, needs=unscaled, needs_codes=True)

    def _copy(self, eqn: Equation, inputs: tuple[Atom, ...]) -> dict[int, int]:
        """Adds a copy of an equation; returns copies of its results."""
        first = len(self._avals)
        self._avals.extend(self._avals[value] for value in eqn.outputs)
        outputs = tuple(range(first, len(self._avals)))
        made = dataclasses.replace(eqn, inputs=inputs, outputs=outputs)
        self._copied.setdefault(eqn, []).append(made)
        self._from_codes.update(outputs)
        return dict(zip(eqn.outputs, outputs, strict=True))


def scaled_numerator(
    numerator: jax.Array, exact: jax.Array, denominator: jax.Array
) -> jax.Array:
    """Returns a numerator of codes, times the exact denominator over that of codes.

    The ratio stays from 1/2 to 2: the codes may say little of a sum that nearly
    vanishes.
    """
    ratio = exact / denominator
    return numerator * jnp.where(jnp.isnan(ratio), 1, jnp.clip(ratio, 0.5, 2))


def _quotients(program: Program) -> Iterator[_Quotient]:
    """Yields the quotients of two values."""
    makers = program.producers
    for eqn in program.forward:
        pairs: list[tuple[Atom, tuple[int, ...]]] = []
        if eqn.primitive == "div" and eqn.divisor is not None:
            pairs = [(eqn.operand_atoms[0], (eqn.divisor,))]
        elif eqn.rule.combines is Combines.MULTIPLY and eqn.rule.is_elementwise:
            first, second = eqn.operand_atoms
            pairs = [
                (first, _inverted(second, makers)),
                (second, _inverted(first, makers)),
            ]
        for numerator, path in pairs:
            # An argument is not recomputed.
            if path and isinstance(numerator, int) and numerator in makers:
                yield _Quotient(numerator, path)


def _inverted(atom: Atom, makers: Mapping[int, Equation]) -> tuple[int, ...]:
    """Returns the path from a value that is `1 / x`, broadcast or not, to `x`."""
    path: list[int] = []
    while isinstance(atom, int) and atom in makers:
        eqn = makers[atom]
        path.append(atom)
        if eqn.divisor is not None:
            is_inverse = len(eqn.input_values) == 1 and eqn.params.get("y", -1) == -1
            return (*path, eqn.divisor) if is_inverse else ()
        if not eqn.rule.keeps_magnitudes or not eqn.input_values:
            return ()
        atom = eqn.input_values[0]
    return ()


def _factors(program: Program, *, of_terms: bool = False) -> dict[int, frozenset[int]]:
    """Returns for each value the values that it is proportional to, itself included.

    A product is proportional to each of its factors. Numbers do not count, and what a
    layer reads does not: each layer has its own weights.

    Args:
        program: The program.
        of_terms: Whether it is enough that some terms of a sum are.
    """
    is_real = [jnp.issubdtype(aval.dtype, jnp.inexact) for aval in program.avals]
    factors = {
        value: frozenset([value])
        for value in range(program.num_arguments)
        if is_real[value]
    }
    given = set(factors)
    for eqn in program.forward:
        rule, atoms = eqn.rule, eqn.operand_atoms
        if rule.is_cheap and given.issuperset(eqn.input_values):
            given.update(eqn.outputs)
        is_layer = eqn.makes_channels and len(given.intersection(eqn.input_values)) == 1
        linear = (
            range(len(atoms)) if rule.degree == 1 else rule.linear_in.of(len(atoms))
        )
        found = [
            factors[atom]
            for atom in (atoms[number] for number in linear)
            if isinstance(atom, int) and atom in factors
        ]
        if not found and rule.keeps_values:
            # A number in all places.
            continue
        joined = frozenset[int]()
        if is_layer:
            pass
        elif rule.combines is Combines.MULTIPLY or (of_terms and rule.adds):
            joined = joined.union(*found)
        elif found:
            joined = found[0].intersection(*found[1:])
        if rule.slices:
            # Two slices have no elements in common. What they follow from has.
            joined = frozenset(v for v in joined if len(factors[v]) == 1)
        factors.update((v, joined | {v}) for v in eqn.outputs if is_real[v])
    return factors
