"""Which stretches of the backward pass run in parts of their rows, and how.

A part of the rows, a few of the examples, is unpacked, recomputed, and run through all
of a stretch before the next part is unpacked. So nothing but what comes from before the
stretch, and what goes on, is there as a whole; and a result is written part by part in
the place of something that is not read any more.

Sums over rows, such as the gradient of a weight, are taken part by part. What depends
on a sum comes in another loop behind it, in which what is cheap is computed again: a
norm takes one loop for its sums, and one for the gradient of what it normalized.
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
    """Returns how a stretch runs in parts of its rows, `None` if it does not.

    It does where large residuals are unpacked in it that all have the same rows and are
    not much smaller than the largest of all, and everything that is made of them is
    made row by row, or is a small sum over rows. And where something is read that is
    there in parts.

    Args:
        plan: What is kept.
        stretch: The steps.
        later: What is read after them.
        parts: In which parts residuals can be unpacked.
        in_parts: What is there in parts, and in which.
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
    # A sum is there twice while a part is added to it.
    sums = [v for loop in loops for eqn in loop.sums for v in eqn.outputs]
    if is_divided and 2 * _nbytes(program, sums) > _nbytes(program, {*large, *there}):
        return None
    return Division(num_rows, rows, loops, rest, parts.are_apart)


def read_in(stretch: Iterable[Step]) -> set[int]:
    """Returns what is read in a stretch."""
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
    """Finds how many sums, one after another, have to be there before each value.

    What needs none is of level 0 and runs in the first loop.
    """

    def __init__(
        self, program: Program, num_rows: int, finishing: Container[Equation | None]
    ) -> None:
        self._program = program
        self._num_rows = num_rows
        self._is_finishing = finishing
        # The level of what is made in parts alone, and of what is made as a whole.
        self._level_of_parts: dict[int, int] = {}
        self._level_of_whole: dict[int, int] = {}
        self._by_rows: list[Unpacking | Equation] = []
        self._sums: list[tuple[int, Equation]] = []
        # What finishes sums; and the levels of loops that make sums or finish them.
        self._finishing: list[tuple[int, Equation]] = []
        self._level_of_sum: dict[int, int] = {}
        self._others: list[tuple[int, Unpacking | Equation]] = []
        self._sources: dict[Equation, set[int]] = {}
        # What equations that run in parts read of which only the part is there, and
        # what they read as a whole.
        self._read_in_parts: set[int] = set()
        self._read_whole: set[int] = set()

    def add(self, piece: Unpacking | Equation) -> bool:
        """Returns whether the next of a stretch can be run where it runs in parts."""
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
        """Returns the loops, and what runs behind them.

        Args:
            results: What is to be there in the end.
            later: What is read then, and must not be replaced.
            are_apart: Whether nothing is replaced. Then a result is made as soon as it
                can be, and read by the loops behind that.
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
            if not needed.difference(there).isdisjoint(_made_by(piece)):
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
        """Whether something is read by rows, or is there in parts, and read whole."""
        in_parts = self._read_in_parts | self._level_of_parts.keys()
        return not in_parts.isdisjoint(self._read_whole)

    def _add(self, eqn: Equation) -> bool:
        """Decides how an equation runs; returns whether the stretch can be divided."""
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
        """Returns whether what an equation reads is made of a sum; then it is added."""
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
        """Returns `rows`, `None` if rows of a constant would be read."""
        if rows is None:
            return None
        pairs = zip(eqn.inputs, rows, strict=True)
        return None if any(row and not isinstance(x, int) for x, row in pairs) else rows

    def _level(self, eqn: Equation) -> int:
        known = self._level_of_parts | self._level_of_whole
        return max((known.get(v, 0) for v in eqn.input_values), default=0)

    def _level_in_parts(self, eqn: Equation, rows: Sequence[bool]) -> int:
        """Returns the level of what runs in parts, and notes how it reads."""
        by_rows = _where(eqn.inputs, rows)
        self._sources[eqn] = by_rows - self._level_of_parts.keys()
        self._read_in_parts |= by_rows
        self._read_whole |= _where(eqn.inputs, [not row for row in rows])
        return self._level(eqn)

    def _replaced(
        self, results: Iterable[int], free: Iterable[int]
    ) -> tuple[int | None, ...]:
        """Returns in whose place each result can be written, if in any's."""
        avals = self._program.avals
        # XLA must not write to arguments.
        free = [v for v in free if v >= self._program.num_arguments]
        replaced: list[int | None] = []
        for value in results:
            like = avals[value].shape, avals[value].dtype
            alike = (v for v in free if (avals[v].shape, avals[v].dtype) == like)
            replaced.append(next(alike, None))
            free = [v for v in free if v != replaced[-1]]
        return tuple(replaced)


def _made_by(piece: Unpacking | Equation) -> tuple[int, ...]:
    return piece.outputs if isinstance(piece, Equation) else (piece.value,)


def _where(atoms: Iterable[Atom], chosen: Iterable[bool]) -> set[int]:
    pairs = zip(atoms, chosen, strict=True)
    return {atom for atom, take in pairs if take and isinstance(atom, int)}
