"""Finds numbers that the elements of a value are never less than."""

import math
from collections.abc import Callable, Mapping, Sequence

import jax.numpy as jnp
import numpy as np

from dafjax._trace.equation import Atom, Constant, Equation
from dafjax._trace.residuals import Program
from dafjax._trace.rules import Combines


def find_least(program: Program) -> dict[int, float]:
    """Returns a lower bound of each value of the forward pass that has one.

    NaN does not count.
    """
    found: dict[int, float] = {}
    makers: dict[int, Equation] = {}

    def is_real(atom: Atom) -> bool:
        aval = program.avals[atom] if isinstance(atom, int) else jnp.asarray(atom.value)
        return jnp.issubdtype(aval.dtype, jnp.floating)

    for eqn in program.forward:
        least = _least_of(eqn, found, makers, is_real)
        makers.update((value, eqn) for value in eqn.outputs)
        if least > -math.inf:
            found.update((value, least) for value in eqn.outputs)
    return found


def _least_of(
    eqn: Equation,
    found: Mapping[int, float],
    makers: Mapping[int, Equation],
    is_real: Callable[[Atom], bool],
) -> float:
    rule, atoms = eqn.rule, eqn.operand_atoms
    operands = [_bound(atom, found) for atom in atoms if is_real(atom)]
    least = min(operands, default=-math.inf)
    is_nonnegative = 0.0 if least >= 0 else -math.inf
    if eqn.primitive in _KEEP_SIGNS and least >= 0:
        return 0.0
    if rule.least is not None:
        return rule.least
    if eqn.primitive == "max":
        return max(operands)
    if eqn.primitive == "select_n":
        return min(_bounds_of_cases(atoms, found, makers))
    if eqn.is_square or eqn.params.get("y", 1) % 2 == 0:
        return 0.0
    if rule.combines is Combines.MULTIPLY and rule.is_elementwise:
        for factor, other in (atoms, atoms[::-1]):
            if isinstance(other, Constant) and _bound(other, found) >= 0:
                return _bound(factor, found) * float(np.max(other.value))
    if rule.combines is Combines.ADD:
        return sum(operands)
    if rule.keeps_values or rule.slices or rule.looks_up:
        return least
    if rule.joins:
        return least
    is_product = rule.combines is Combines.MULTIPLY or eqn.primitive == "div"
    grows = not rule.is_elementwise and rule.linear_in.of(len(atoms))
    return is_nonnegative if is_product or grows else -math.inf


_KEEP_SIGNS = frozenset(
    ["asinh", "atan", "cbrt", "erf", "expm1", "log1p", "sinh", "tanh"]
)


def _bound(atom: Atom, found: Mapping[int, float]) -> float:
    if isinstance(atom, Constant):
        return float(np.min(atom.value))
    return found.get(atom, -math.inf)


def _bounds_of_cases(
    atoms: Sequence[Atom], found: Mapping[int, float], makers: Mapping[int, Equation]
) -> list[float]:
    """Returns the bounds of the cases of a selection.

    `where(x > 0, x, y)` takes `x` only where it is at least 0.
    """
    mask, *cases = atoms
    bounds = [_bound(case, found) for case in cases]
    made = makers.get(mask) if isinstance(mask, int) else None
    if made is None or len(cases) != 2:
        return bounds
    first, *second = made.operand_atoms
    if made.primitive in ("gt", "ge") and first == cases[1]:
        bounds[1] = max(bounds[1], _bound(second[0], found))
    # A comparison that only NaN passes.
    is_nan = made.primitive == "ne" and second == [first]
    return bounds[:1] if is_nan else bounds
