"""Chunk plans: which stages of the backward pass run in chunks, and how.

A chunk is a few rows of the batch axis. It is decoded, recomputed and run through all
of a stage before the next chunk is decoded. So only the stage's inputs and outputs
exist as whole arrays. A result is written chunk by chunk into the buffer of an input
that has had its last use.

Sums over rows, such as the gradient of a weight, are accumulated over the chunks.
Equations that depend on a sum run in a second chunk loop, which recomputes what is
cheap. A norm takes one loop for its sums and one for the gradient of its input.
"""

from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from typing import final

from dafjax._plan.plan import ProgramPlan
from dafjax._schedule.parts import Parts
from dafjax._schedule.rows import Rows
from dafjax._schedule.steps import Division, Loop, Step, Unpacking
from dafjax._trace.by_rows import rows_read, rows_summed
from dafjax._trace.equation import Atom, Equation
from dafjax._trace.residuals import Program


def divide(
    plan: ProgramPlan,
    stretch: Sequence[Step],
    later: Collection[int],
    parts: Parts,
    in_parts: Mapping[int, Rows],
) -> Division | None:
    """Returns the chunk plan of a stage, `None` if it is not chunked.

    A stage is chunked if it decodes large residuals that have the same number of rows
    and are not much smaller than the largest residual of the program, and if every
    equation on them works row by row or is a small sum over rows. It is also chunked if
    it reads a chunked value.

    Args:
        plan: The program and its saved residuals.
        stretch: The steps of the stage.
        later: The values that are read after the stage.
        parts: How residuals can be decoded in chunks.
        in_parts: The live chunked values, with their chunks.
    """
    program = plan.program
    pieces = list(_pieces(stretch))
    finishing = {step.equation for step in stretch if step.finishes}
    unpacked = [piece.value for piece in pieces if isinstance(piece, Unpacking)]
    large = [v for v in unpacked if program.is_large(v)]
    there = {v: in_parts[v] for v in read_in(stretch) if v in in_parts}
    shapes = {tuple(program.avals[v].shape[:1]) for v in (*large, *there)}
    if len(shapes) != 1 or () in shapes:
        return None
    ((num_rows,),) = shapes
    rows = parts.rows(large, there.values())
    is_divided = rows.num_parts > 1
    levels = _Levels(program, num_rows, finishing)
    if not (is_divided or parts.are_apart) or not all(map(levels.add, pieces)):
        return None
    if levels.mixes_rows:
        return None
    made = {v for step in stretch if step.equation for v in step.equation.outputs}
    wanted = made.intersection(later)
    loops, rest = levels.loops(wanted, later, are_apart=parts.are_apart)
    runs = [p for loop in loops for p in (*loop.by_rows, *loop.sums)]
    products = [p for p in runs if isinstance(p, Equation) and not p.rule.is_cheap]
    if not loops or len(products) > len(set(products)):
        return None
    # Two copies of a sum exist while a chunk is added to it.
    sums = [v for loop in loops for eqn in loop.sums for v in eqn.outputs]
    if is_divided and 2 * _nbytes(program, sums) > _nbytes(program, {*large, *there}):
        return None
    # A loop copies the chunk of what a product reads; elementwise kernels slice it.
    sources = {v for loop in loops for v in loop.sources}
    copied = sources.intersection(v for eqn in products for v in eqn.input_values)
    unpacked = _nbytes(program, large)
    in_chunk = (unpacked + _nbytes(program, copied)) / rows.num_parts
    if is_divided and not parts.are_apart and in_chunk > unpacked:
        return None
    return Division(num_rows, rows, loops, rest, parts.are_apart)


def read_in(stretch: Iterable[Step]) -> set[int]:
    """Returns the values that the equations of a stage read."""
    equations = (
        eqn
        for step in stretch
        for eqn in (*step.recomputed, *filter(None, [step.equation]))
    )
    return {v for eqn in equations for v in eqn.input_values}


def _pieces(stretch: Iterable[Step]) -> Iterable[Unpacking | Equation]:
    for step in stretch:
        yield from step.restored
        if step.equation is not None:
            yield step.equation


def _nbytes(program: Program, values: Iterable[int]) -> int:
    return sum(map(program.nbytes, values))


@final
class _Levels:
    """Finds the reduction depth of each value: how many sums it needs in sequence.

    Values of depth 0 need no sum and are computed in the first loop.
    """

    def __init__(
        self, program: Program, num_rows: int, finishing: Container[Equation | None]
    ) -> None:
        self._program = program
        self._num_rows = num_rows
        self._is_finishing = finishing
        # Reduction depth of values that exist only in chunks, and of whole values.
        self._level_of_parts: dict[int, int] = {}
        self._level_of_whole: dict[int, int] = {}
        self._by_rows: list[Unpacking | Equation] = []
        self._sums: list[tuple[int, Equation]] = []
        # Gradient epilogues of sums with their depths; and the depth of the loop that
        # computes each sum or its epilogue.
        self._finishing: list[tuple[int, Equation]] = []
        self._level_of_sum: dict[int, int] = {}
        self._others: list[tuple[int, Unpacking | Equation]] = []
        self._sources: dict[Equation, set[int]] = {}
        # Values that equations read in chunks, and values that chunked equations read
        # whole.
        self._read_in_parts: set[int] = set()
        self._read_whole: set[int] = set()

    def add(self, piece: Unpacking | Equation) -> bool:
        """Adds the next decode or equation; returns whether it can run in chunks."""
        if isinstance(piece, Equation):
            return not piece.has_effect and self._add(piece)
        if self._program.is_large(piece.value):
            self._by_rows.append(piece)
            self._level_of_parts[piece.value] = 0
        else:
            self._others.append((0, piece))
        return True

    def loops(
        self, results: Collection[int], later: Collection[int], *, are_apart: bool
    ) -> tuple[tuple[Loop, ...], tuple[Unpacking | Equation, ...]]:
        """Returns the chunk loops, and what runs after them.

        Args:
            results: The values that the stage must return.
            later: Values that are read after the stage and must not be overwritten.
            are_apart: Whether chunks are unrolled and nothing is overwritten. Then each
                result is computed as early as possible, and later loops read it.
        """
        wanted = tuple(sorted(self._level_of_parts.keys() & set(results)))
        levels = [self._level_of_parts[v] for v in wanted]
        levels.extend(level for level, _ in self._sums)
        last = max(levels, default=-1)
        loops: list[Loop] = []
        there: set[int] = set()
        for level in range(last + 1):
            made = tuple(v for v in wanted if self._level_of_parts[v] == level)
            if not are_apart:
                made = wanted if level == last else ()
            loops.append(self._loop(level, made, later, there))
            there.update(made)
        rest = tuple(piece for level, piece in self._others if level > last)
        return tuple(loops), rest

    def _loop(
        self,
        level: int,
        results: tuple[int, ...],
        later: Collection[int],
        there: Collection[int],
    ) -> Loop:
        sums = tuple(eqn for at, eqn in self._sums if at == level)
        needed = set(results).union(*(eqn.input_values for eqn in sums))
        by_rows: list[Unpacking | Equation] = []
        for piece in reversed(self._by_rows):
            if not needed.difference(there).isdisjoint(piece.outputs):
                by_rows.insert(0, piece)
                if isinstance(piece, Equation):
                    needed.update(piece.input_values)
        equations = [p for p in (*by_rows, *sums) if isinstance(p, Equation)]
        read = {v for eqn in equations for v in eqn.input_values}
        outside = (self._sources[eqn] for eqn in equations)
        sources = sorted(read.intersection(there).union(*outside))
        return Loop(
            before=tuple(piece for at, piece in self._others if at == level),
            by_rows=tuple(by_rows),
            sources=tuple(sources),
            sums=sums,
            finishing=tuple(eqn for at, eqn in self._finishing if at == level),
            results=results,
            replaced=self._replaced(results, [v for v in sources if v not in later]),
        )

    @property
    def mixes_rows(self) -> bool:
        """Whether a value is chunked or read in chunks, and also read whole."""
        in_parts = self._read_in_parts | self._level_of_parts.keys()
        return not in_parts.isdisjoint(self._read_whole)

    def _add(self, eqn: Equation) -> bool:
        """Decides how an equation runs; returns whether the stage can be chunked."""
        if eqn in self._is_finishing and self._finishes_sum(eqn):
            return True
        reads_parts = not self._level_of_parts.keys().isdisjoint(eqn.input_values)
        is_large = self._program.is_large
        if reads_parts or any(map(is_large, eqn.outputs)):
            rows = self._values_only(eqn, rows_read(eqn, self._num_rows))
            if rows is not None:
                level = self._level_in_parts(eqn, rows)
                self._by_rows.append(eqn)
                self._level_of_parts.update(dict.fromkeys(eqn.outputs, level))
                return True
        if reads_parts or any(map(is_large, eqn.input_values)):
            rows = self._values_only(eqn, rows_summed(eqn, self._num_rows))
            if rows is not None:
                level = self._level_in_parts(eqn, rows)
                self._sums.append((level, eqn))
                self._level_of_whole.update(dict.fromkeys(eqn.outputs, level + 1))
                self._level_of_sum.update(dict.fromkeys(eqn.outputs, level))
                return True
        level = self._level(eqn)
        self._others.append((level, eqn))
        self._level_of_whole.update(dict.fromkeys(eqn.outputs, level))
        return not reads_parts

    def _finishes_sum(self, eqn: Equation) -> bool:
        """Returns whether an equation is the epilogue of a sum; if so, adds it."""
        (value,) = eqn.input_values
        level = self._level_of_sum.get(value)
        if level is None:
            return False
        self._finishing.append((level, eqn))
        self._level_of_whole.update(dict.fromkeys(eqn.outputs, level + 1))
        self._level_of_sum.update(dict.fromkeys(eqn.outputs, level))
        return True

    @staticmethod
    def _values_only(
        eqn: Equation, rows: tuple[bool, ...] | None
    ) -> tuple[bool, ...] | None:
        """Returns `rows`, or `None` if a constant would be read in chunks."""
        if rows is None:
            return None
        pairs = zip(eqn.inputs, rows, strict=True)
        return None if any(row and not isinstance(x, int) for x, row in pairs) else rows

    def _level(self, eqn: Equation) -> int:
        known = self._level_of_parts | self._level_of_whole
        return max((known.get(v, 0) for v in eqn.input_values), default=0)

    def _level_in_parts(self, eqn: Equation, rows: Sequence[bool]) -> int:
        """Returns the depth of a chunked equation, and records its inputs."""
        by_rows = _where(eqn.inputs, rows)
        self._sources[eqn] = by_rows - self._level_of_parts.keys()
        self._read_in_parts |= by_rows
        self._read_whole |= _where(eqn.inputs, [not row for row in rows])
        return self._level(eqn)

    def _replaced(
        self, results: Iterable[int], free: Iterable[int]
    ) -> tuple[int | None, ...]:
        """Returns for each result the value it can overwrite, or `None`."""
        avals = self._program.avals
        # XLA must not overwrite arguments.
        free = [v for v in free if v >= self._program.num_arguments]
        replaced: list[int | None] = []
        for value in results:
            like = avals[value].shape, avals[value].dtype
            alike = (v for v in free if (avals[v].shape, avals[v].dtype) == like)
            replaced.append(next(alike, None))
            free = [v for v in free if v != replaced[-1]]
        return tuple(replaced)


def _where(atoms: Iterable[Atom], chosen: Iterable[bool]) -> set[int]:
    pairs = zip(atoms, chosen, strict=True)
    return {atom for atom, take in pairs if take and isinstance(atom, int)}
