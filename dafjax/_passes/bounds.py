"""Finds numbers that the elements of a value are never less than."""

import math
from collections.abc import Mapping, Sequence

import jax.numpy as jnp
import numpy as np

from dafjax._trace.equation import Atom, Constant, Equation
from dafjax._trace.residuals import Program
from dafjax._trace.rules import Combines


def find_least(program: Program) -> dict[int, float]:
    """Returns a lower bound of each value of the forward pass that has one.

    Only real numbers have one. NaN does not count.
    """
    found: dict[int, float] = {}
    makers: dict[int, Equation] = {}

    def is_real(atom: Atom) -> bool:
        aval = program.avals[atom] if isinstance(atom, int) else jnp.asarray(atom.value)
        return jnp.issubdtype(aval.dtype, jnp.floating)

    for eqn in program.forward:
        makers.update((value, eqn) for value in eqn.outputs)
        if not all(map(is_real, eqn.outputs)):
            continue
        bounds = [_bound(atom, found) for atom in eqn.operand_atoms if is_real(atom)]
        least = _least_of(eqn, bounds, found, makers)
        if least > -math.inf:
            found.update((value, least) for value in eqn.outputs)
    return found


def _least_of(
    eqn: Equation,
    bounds: Sequence[float],
    found: Mapping[int, float],
    makers: Mapping[int, Equation],
) -> float:
    rule, atoms = eqn.rule, eqn.operand_atoms
    least = min(bounds, default=-math.inf)
    is_nonnegative = 0.0 if least >= 0 else -math.inf
    if eqn.primitive in _KEEP_SIGNS and least >= 0:
        return 0.0
    if rule.least is not None:
        return rule.least
    if eqn.primitive == "max":
        return max(bounds)
    if eqn.primitive == "select_n":
        return min(_bounds_of_cases(atoms, found, makers))
    if eqn.is_square or eqn.params.get("y", 1) % 2 == 0:
        return 0.0
    if rule.combines is Combines.MULTIPLY and rule.is_elementwise:
        for factor, other in (atoms, atoms[::-1]):
            if isinstance(other, Constant) and _bound(other, found) >= 0:
                bound = _bound(factor, found)
                return bound * float((np.max if bound < 0 else np.min)(other.value))
    if rule.combines is Combines.ADD:
        return sum(bounds)
    if rule.looks_up and eqn.params["fill_value"] is not None:
        return -math.inf
    if rule.keeps_values or rule.slices or rule.looks_up:
        return least
    # Among these are sums: `scatter-add` joins, and adds.
    is_product = rule.combines is Combines.MULTIPLY or eqn.primitive == "div"
    grows = not rule.is_elementwise and rule.linear_in.of(len(atoms))
    return is_nonnegative if is_product or grows or rule.joins else -math.inf


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
