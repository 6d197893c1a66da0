"""What a step of the backward pass can restore in parts of its rows."""

from collections.abc import Container, Iterable

from dafjax._schedule.steps import InParts, Step, Unpacking
from dafjax._trace.by_rows import rows_read
from dafjax._trace.equation import Atom, Equation
from dafjax._trace.residuals import Program


def in_parts(
    program: Program, step: Step, read: Container[int]
) -> tuple[Unpacking | Equation | InParts, ...]:
    """Returns how a step restores what is missing, a value in parts if it can.

    It can where several large residuals are unpacked for one large value and all
    that is large is made row by row.

    Args:
        program: The program of which it is a step.
        step: The step.
        read: What the step's equation and the rest of the stretch read.
    """
    pieces = {v: r for r in step.pieces for v in _made(r)}
    large = {v: r for v, r in pieces.items() if program.is_large(v)}
    wanted = [v for v in large if v in read]
    if sum(isinstance(r, Unpacking) for r in large.values()) < 2:
        return step.restored
    if len(wanted) != 1 or not program.avals[wanted[0]].shape:
        return step.restored
    num_rows = program.avals[wanted[0]].shape[0]
    sources: dict[int, None] = {}
    made: dict[Unpacking | Equation, None] = {}
    for value, piece in pieces.items():
        if isinstance(piece, Unpacking) and value in large:
            if program.avals[value].shape[:1] != (num_rows,):
                return step.restored
            sources[value] = None
        elif isinstance(piece, Equation):
            by_rows = rows_read(piece, num_rows) if value in large else ()
            if by_rows is None:
                return step.restored
            rows = _where(piece.inputs, by_rows)
            # Of what is there in parts alone nothing else can be made.
            if not large.keys() & set(piece.input_values) <= rows:
                return step.restored
            sources.update((v, None) for v in rows if v not in large)
        if value in large:
            made[piece] = None
    before = tuple(item for item in step.restored if item not in made)
    return *before, InParts(wanted[0], tuple(sources), tuple(made))


def _made(item: Unpacking | Equation) -> tuple[int, ...]:
    return item.outputs if isinstance(item, Equation) else (item.value,)


def _where(atoms: Iterable[Atom], chosen: Iterable[bool]) -> set[int]:
    pairs = zip(atoms, chosen, strict=False)
    return {atom for atom, take in pairs if take and isinstance(atom, int)}
