"""Writes the derivative of `tanh` as one factor of a cotangent.

Up to version 0.10, JAX computes `c (1 - y)` from the cotangent `c` and adds `y` times
that. The two terms cancel where `y` is near -1. If the noise of the two is treated as
independent, it does not cancel. `c (1 - y^2)`, as in later versions, is a single term.
"""

import collections
import dataclasses
from collections.abc import Iterable, Mapping

import jax
import numpy as np

from dafjax._trace.equation import Atom, Constant, Equation, call_equation, values_of
from dafjax._trace.residuals import Program


def name_slopes(program: Program) -> Program:
    """Returns the program with such derivatives as one operation of `forward`."""
    forward, backward = program.forward, program.backward
    makers = {value: eqn for eqn in (*forward, *backward) for value in eqn.outputs}
    reads = collections.Counter(values_of((*program.results, *program.gradients)))
    for eqn in (*forward, *backward):
        reads.update(values_of(eqn.operand_atoms))
    slopes: dict[Equation, Equation | None] = {}
    for eqn in backward:
        found = _terms(eqn, makers, reads)
        if found is None:
            continue
        first, second, complement, y = found
        slopes[complement] = call_equation(
            one_minus_square, [program.avals[y]], (y,), complement.outputs, eqn
        )
        slopes[first] = slopes[second] = None
        slopes[eqn] = dataclasses.replace(first, outputs=eqn.outputs)
    return dataclasses.replace(
        program,
        forward=_replaced(forward, slopes),
        backward=_replaced(backward, slopes),
    )


def one_minus_square(x: jax.Array) -> jax.Array:
    """Returns `1 - x^2`, without cancellation near 1."""
    return (1 - x) * (1 + x)


def _terms(
    eqn: Equation, makers: Mapping[int, Equation], reads: Mapping[int, int]
) -> tuple[Equation, Equation, Equation, int] | None:
    """Returns the equations of `c (1 - y)`, `c (1 - y) y` and `1 - y`; and `y`.

    `None` if `eqn` is not a sum of the first two.
    """
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
    # If another equation reads the terms, they are computed anyway.
    if (reads[first.outputs[0]], reads[second.outputs[0]]) != (2, 1):
        return None
    for y in second.input_values:
        for value in first.input_values:
            made = makers.get(value)
            if made is None or reads[value] != 1:
                continue
            if _complemented(made, makers) == y:
                return first, second, made, y
    return None


def _complemented(eqn: Equation, makers: Mapping[int, Equation]) -> int | None:
    """Returns the value that an equation subtracts from 1; `None` if it does not."""
    if eqn.primitive != "sub":
        return None
    one, value = eqn.operand_atoms
    return value if _is_one(one, makers) and isinstance(value, int) else None


def _is_one(atom: Atom, makers: Mapping[int, Equation]) -> bool:
    if isinstance(atom, Constant):
        return np.ndim(atom.value) == 0 and atom.value == 1
    # On meshes with explicit axes, an equation places the number on devices.
    eqn = makers.get(atom)
    if eqn is None or not eqn.rule.keeps_values or len(eqn.operand_atoms) != 1:
        return False
    return _is_one(eqn.operand_atoms[0], makers)


def _replaced(
    equations: Iterable[Equation], others: Mapping[Equation, Equation | None]
) -> tuple[Equation, ...]:
    found = (others.get(eqn, eqn) for eqn in equations)
    return tuple(eqn for eqn in found if eqn is not None)
