"""The derivative of `tanh` as one factor of a cotangent.

Up to version 0.10, JAX takes `c (1 - y)` for the cotangent `c` and adds `y` times that:
two terms that cancel each other where `y` is near -1. Noise of the two, taken as
independent, does not cancel. As `c (1 - y^2)`, as later versions have it, there is one.
"""

import collections
import dataclasses
from collections.abc import Iterable, Mapping, Sequence

import jax
import jax.core
import numpy as np

from dafjax._trace.equation import Atom, Constant, Equation, call_equation, values_of


def name_slopes(
    forward: Sequence[Equation],
    backward: Sequence[Equation],
    used: Iterable[Atom],
    avals: Sequence[jax.core.ShapedArray],
) -> tuple[tuple[Equation, ...], tuple[Equation, ...]]:
    """Returns the equations, with such slopes as one operation of the forward pass.

    Args:
        forward: What does not depend on a cotangent.
        backward: What does.
        used: What is read beside, by other programs.
        avals: Shape and dtype of every value.
    """
    makers = {value: eqn for eqn in (*forward, *backward) for value in eqn.outputs}
    reads = collections.Counter(values_of(used))
    for eqn in (*forward, *backward):
        reads.update(values_of(eqn.operand_atoms))
    slopes: dict[Equation, Equation | None] = {}
    for eqn in backward:
        found = _terms(eqn, makers, reads)
        if found is None:
            continue
        first, second, complement = found
        (y,) = complement.input_values
        slopes[complement] = call_equation(
            one_minus_square, [avals[y]], complement.inputs, complement.outputs, eqn
        )
        slopes[first] = slopes[second] = None
        slopes[eqn] = dataclasses.replace(first, outputs=eqn.outputs)
    return _replaced(forward, slopes), _replaced(backward, slopes)


def one_minus_square(x: jax.Array) -> jax.Array:
    """Returns `1 - x^2`, without cancellation near 1."""
    return (1 - x) * (1 + x)


def _terms(
    eqn: Equation, makers: Mapping[int, Equation], reads: Mapping[int, int]
) -> tuple[Equation, Equation, Equation] | None:
    """Returns what makes `c (1 - y)`, `c (1 - y) y` and `1 - y` for a sum of these."""
    if eqn.primitive != "add_any" or len(eqn.input_values) != 2:
        return None
    first, second = (makers.get(value) for value in eqn.input_values)
    if (
        first is None
        or second is None
        or {first.primitive, second.primitive} != {"mul"}
    ):
        return None
    if first.outputs[0] not in second.input_values:
        first, second = second, first
    # Nothing else reads them, or they would be there anyway.
    if (reads[first.outputs[0]], reads[second.outputs[0]]) != (2, 1):
        return None
    factors = set(second.input_values) - set(first.outputs)
    complements = [
        made
        for value in first.input_values
        if (made := makers.get(value)) is not None
        and _is_complement(made)
        and set(made.input_values) == factors
        and reads[value] == 1
    ]
    return (first, second, complements[0]) if len(complements) == 1 else None


def _is_complement(eqn: Equation) -> bool:
    """Returns whether an equation takes a value from one."""
    if eqn.primitive != "sub" or len(eqn.input_values) != 1:
        return False
    one, _ = eqn.operand_atoms
    return isinstance(one, Constant) and np.ndim(one.value) == 0 and one.value == 1


def _replaced(
    equations: Iterable[Equation], others: Mapping[Equation, Equation | None]
) -> tuple[Equation, ...]:
    found = (others.get(eqn, eqn) for eqn in equations)
    return tuple(eqn for eqn in found if eqn is not None)
