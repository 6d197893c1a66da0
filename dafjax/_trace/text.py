"""Writes programs, equations and values as text."""

from collections.abc import Iterable, Iterator

import numpy as np

from dafjax._trace.equation import Atom, Constant, Equation
from dafjax._trace.residuals import Program


def program_lines(program: Program) -> Iterator[str]:
    """Yields a program as text, a line for each equation."""
    arguments = (value_text(program, v) for v in range(program.num_arguments))
    yield f"arguments {', '.join(arguments)}"
    yield "forward"
    yield from (f"  {equation_text(program, eqn)}" for eqn in program.forward)
    yield f"  results {atoms_text(program.results)}"
    cotangents = (value_text(program, v) for v in program.cotangents)
    yield f"backward of {', '.join(cotangents)}"
    yield from (f"  {equation_text(program, eqn)}" for eqn in program.backward)
    yield f"  gradients {atoms_text(program.gradients)}"
    for recipe in program.recipes.values():
        where = "in codes" if recipe.needs_codes else "saved"
        equation = equation_text(program, recipe.equation)
        yield f"recipe {equation}, if %{recipe.needs} is {where}"


def equation_text(program: Program, eqn: Equation) -> str:
    """Returns an equation with its place in the model and the user's line."""
    results = ", ".join(value_text(program, v) for v in eqn.outputs)
    place = " ".join(filter(None, (eqn.place, eqn.source)))
    text = f"{results} = {eqn.primitive} {atoms_text(eqn.operand_atoms)}"
    return f"{text}  # {place}".rstrip(" #")


def value_text(program: Program, value: int) -> str:
    """Returns a value with its shape and dtype."""
    return f"%{value} {program.avals[value].str_short()}"


def atoms_text(atoms: Iterable[Atom | None]) -> str:
    """Returns values as `%7`, numbers as they are, and `-` for `None`."""
    return " ".join(map(_atom, atoms))


def _atom(atom: Atom | None) -> str:
    if not isinstance(atom, Constant):
        return "-" if atom is None else f"%{atom}"
    return str(atom.value) if np.ndim(atom.value) == 0 else "constant"
