"""Pairs the equations of a function's programs for different numbers of examples."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from dafjax._trace.axis_rules import IN_ORDER, LENGTHS
from dafjax._trace.equation import Atom, Constant, Equation, renumber
from dafjax._trace.example_rules import Kind, Status
from dafjax._trace.graph import Graph


class NotSeparableError(ValueError):
    """The programs of the batch and of a microbatch differ in more than sizes."""


# An equation of the whole batch, if there is one, and one of a microbatch.
Pair: TypeAlias = tuple[Equation | None, Equation]


def pair(
    whole: Graph, status: Mapping[int, Status], part: Graph
) -> tuple[dict[int, Atom], list[Pair]]:
    """Finds the values of the whole batch in the program of a microbatch.

    The program of a single example may lack changes of shapes, or have others.

    Args:
        whole: The program for the whole batch.
        status: How each of its values depends on the examples.
        part: The program for a microbatch.

    Returns:
        For each value, the value of `part`; and the equations of `part`.

    Raises:
        NotSeparableError: The programs differ in more than the number of examples.
    """
    found: dict[int, Atom] = {n: n for n in range(whole.num_inputs)}
    # For each value of `part`, the value whose elements it has in another shape.
    roots: dict[Atom, Atom] = {}
    equations: list[Pair] = []

    def root(atom: Atom) -> Atom:
        return roots.get(atom, atom)

    def agree(first: Sequence[Atom], second: Sequence[Atom]) -> bool:
        moved = renumber(first, found)
        return all(map(_is_same_atom, map(root, moved), map(root, second)))

    for eqn, other in _pairs(whole.equations, part.equations):
        if eqn is None:
            ((value,), (operand,)) = other.outputs, other.input_values
            roots[value] = root(operand)
            equations.append((None, other))
        elif other is None:
            ((value,), (operand,)) = eqn.outputs, eqn.input_values
            found[value] = found[operand]
        elif not agree(eqn.operand_atoms, other.operand_atoms):
            raise NotSeparableError(differ(eqn, other))
        elif _reshapes(eqn):
            ((made,), (operand,)) = other.outputs, other.input_values
            found[eqn.outputs[0]] = made
            roots[made] = root(operand)
            equations.append((eqn, other))
        elif _fit(eqn, other, status):
            found.update(zip(eqn.outputs, other.outputs, strict=True))
            equations.append((eqn, other))
        else:
            raise NotSeparableError(differ(eqn, other))
    if not agree(whole.outputs, part.outputs):
        raise NotSeparableError("they return other values")
    return found, equations


def _pairs(
    whole: Sequence[Equation], part: Sequence[Equation]
) -> Iterator[tuple[Any, Any]]:
    """Yields the equations of both that belong together; `None` for a missing one."""
    others = list(part)[::-1]
    for eqn in whole:
        while others and not are_alike(eqn, others[-1]) and _reshapes(others[-1]):
            if _reshapes(eqn) and len(whole) > len(part):
                break
            yield None, others.pop()
        if others and are_alike(eqn, others[-1]):
            yield eqn, others.pop()
        elif _reshapes(eqn):
            yield eqn, None
        else:
            raise NotSeparableError(differ(eqn, others[-1] if others else None))
    if others:
        raise NotSeparableError(differ(None, others[-1]))


def are_alike(eqn: Equation, other: Equation) -> bool:
    """Returns whether equations have one primitive, and equal numbers of operands."""
    first, second = (e.jaxpr.eqns[0] for e in (eqn, other))
    return first.primitive is second.primitive and all(
        len(a) == len(b)
        for a, b in ((first.invars, second.invars), (eqn.outputs, other.outputs))
    )


def _fit(eqn: Equation, other: Equation, status: Mapping[int, Status]) -> bool:
    """Returns whether equations compute the same, for more and for fewer examples."""
    results = zip(eqn.outputs, eqn.jaxpr.outvars, other.jaxpr.outvars, strict=True)
    for value, *variables in results:
        avals: Any = [var.aval for var in variables]
        shape, of_other = (tuple(getattr(aval, "shape", ())) for aval in avals)
        known = status[value]
        if known.has_rows and len(shape) == len(of_other):
            # The axis that holds examples may differ.
            of_other = (
                *of_other[: known.axis],
                shape[known.axis],
                *of_other[known.axis + 1 :],
            )
        if known.kind is not Kind.MIXED and shape != of_other:
            return False
    lengths = (*LENGTHS, "dimension_numbers")
    names = [name for name in eqn.params if name not in lengths]
    return all(is_same_param(eqn.params[n], other.params.get(n)) for n in names)


def _reshapes(eqn: Equation) -> bool:
    return eqn.jax_primitive in IN_ORDER and len(eqn.input_values) == 1


def differ(eqn: Equation | None, other: Equation | None) -> str:
    """Says for an error which equations of the programs differ."""
    shown = ("nothing more" if e is None else listed(e) for e in (eqn, other))
    return "the whole batch needs {}, but a microbatch {}".format(*shown)


def listed(eqn: Equation) -> str:
    """Returns an equation and its line, for an error."""
    place = f" at {eqn.source}" if eqn.source else ""
    return f"`{eqn.primitive}`{place}"


def _is_same_atom(first: Atom, second: Atom) -> bool:
    """Returns whether two atoms are the same value, or constants of one shape."""
    if isinstance(first, Constant) and isinstance(second, Constant):
        if np.ndim(first.value):
            return is_equal_atom(first, second)
        return np.ndim(second.value) == 0
    return first == second


def is_equal_atom(first: Atom, second: Atom) -> bool:
    """Returns whether two atoms are no constants that differ."""
    if isinstance(first, Constant) and isinstance(second, Constant):
        return first.value is second.value or np.array_equal(first.value, second.value)
    return True


def is_same_param(first: Any, second: Any) -> bool:
    """Returns whether two parameters are equal. Bodies and functions count as equal."""
    if isinstance(first, (bool, int, str)):
        return first == second
    if isinstance(first, tuple) and isinstance(second, tuple):
        return len(first) == len(second) and all(map(is_same_param, first, second))
    return True
