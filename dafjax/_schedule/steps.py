"""The steps of a backward pass: what each restores, computes, and waits for."""

import dataclasses
from collections.abc import Iterable
from typing import final

import jax

from dafjax._plan.plan import Kept
from dafjax._schedule.rows import Rows
from dafjax._trace.equation import Equation


@final
@dataclasses.dataclass(frozen=True)
class Unpacking:
    """Unpacks a compressed residual.

    Attributes:
        value: The residual.
        behind: What was recomputed in this step before, and goes through a tie first.
    """

    value: int
    behind: tuple[int, ...] = ()


@final
@dataclasses.dataclass(frozen=True, eq=False)
class Loop:
    """A loop over parts of the rows, in which a stretch runs or a part of it.

    Attributes:
        before: What is unpacked and computed before it, as it is without parts.
        by_rows: What is unpacked and computed in it, in order.
        sources: What is read in it by rows, and was there before.
        sums: Equations that it runs behind those, whose results add up.
        finishing: Equations that make gradients of sums, as soon as those are there.
        results: What it makes by rows that is there as a whole in the end.
        replaced: For each of them what it takes the place of, `None` for nothing.
    """

    before: tuple[Unpacking | Equation, ...]
    by_rows: tuple[Unpacking | Equation, ...]
    sources: tuple[int, ...]
    sums: tuple[Equation, ...]
    finishing: tuple[Equation, ...]
    results: tuple[int, ...]
    replaced: tuple[int | None, ...]

    @property
    def made(self) -> tuple[int, ...]:
        """What is unpacked and computed by rows, in order."""
        return tuple(
            v
            for piece in self.by_rows
            for v in (piece.outputs if isinstance(piece, Equation) else (piece.value,))
        )

    @property
    def unpacked(self) -> tuple[int, ...]:
        """The residuals that are unpacked by rows, in order."""
        return tuple(p.value for p in self.by_rows if isinstance(p, Unpacking))


@final
@dataclasses.dataclass(frozen=True, eq=False)
class Division:
    """How a stretch runs in parts of its rows.

    Attributes:
        num_rows: The rows of all that has them.
        rows: The parts that they are divided into.
        loops: What runs in parts, one loop after another.
        rest: What is unpacked and computed behind the loops.
        is_apart: Whether parts run one after another in the program, and results stay
            in parts (`apart.py`). Else they run in a loop (`loops.py`).
    """

    num_rows: int
    rows: Rows
    loops: tuple[Loop, ...]
    rest: tuple[Unpacking | Equation, ...]
    is_apart: bool

    @property
    def num_parts(self) -> int:
        """How many parts there are."""
        return self.rows.num_parts

    @property
    def stays_in_parts(self) -> bool:
        """Whether results are there in parts behind it."""
        return self.is_apart and self.num_parts > 1

    @property
    def num_rows_of_part(self) -> int:
        """The rows of a part."""
        return self.num_rows // self.num_parts

    def likes_of_part(self, kept: Iterable[Kept]) -> dict[int, jax.ShapeDtypeStruct]:
        """Returns shape and dtype of a part of what is unpacked by rows."""
        unpacked = set(self.unpacked)
        return {
            item.value: jax.ShapeDtypeStruct(
                (self.num_rows_of_part, *item.shape[1:]), item.dtype
            )
            for item in kept
            if item.value in unpacked
        }

    @property
    def unpacked(self) -> tuple[int, ...]:
        """The residuals that are unpacked by rows, each once."""
        return tuple(dict.fromkeys(v for loop in self.loops for v in loop.unpacked))

    @property
    def unpacked_in_all(self) -> tuple[int, ...]:
        """The residuals that are unpacked, as often as they are."""
        whole = (self.rest, *(loop.before for loop in self.loops))
        return (
            *(v for loop in self.loops for v in loop.unpacked),
            *(p.value for ps in whole for p in ps if isinstance(p, Unpacking)),
        )


@final
@dataclasses.dataclass(frozen=True)
class Step:
    """One equation of the backward pass and what must be at hand for it.

    Attributes:
        equation: The equation; `None` stands for returning the gradients.
        begins: Whether a stretch begins before it.
        cotangents: If so, the values of the backward pass that go through the tie.
        awaited: Those of them that the tie need only wait for.
        given: If so, the saved values and small arguments that go through the tie.
        settled: If so, gradients of weights that are read no more.
        restored: How what is missing is restored, in order: residuals to unpack, and
            equations of the forward pass to run again.
        delayed: The large arguments to read no earlier than the stretch begins.
        joined: What of the equation's operands goes through one tie before it.
        finishes: Whether the equation does what is left to do for a gradient.
        division: If a stretch begins, how all of it runs in parts, where it does.
    """

    equation: Equation | None
    begins: bool
    cotangents: tuple[int, ...]
    awaited: tuple[int, ...]
    given: tuple[int, ...]
    restored: tuple[Unpacking | Equation, ...]
    delayed: tuple[int, ...]
    joined: tuple[int, ...]
    finishes: bool = False
    settled: tuple[int, ...] = ()
    division: Division | None = None

    @property
    def unpacked(self) -> tuple[int, ...]:
        """The residuals to unpack, in order."""
        return tuple(r.value for r in self.restored if isinstance(r, Unpacking))

    @property
    def recomputed(self) -> tuple[Equation, ...]:
        """The equations of the forward pass to run again, in order."""
        return tuple(r for r in self.restored if isinstance(r, Equation))


def written(pieces: Iterable[Unpacking | Equation | None]) -> set[int]:
    """Returns what is read by equations that XLA runs in kernels of their own.

    It has to be in memory for them; all else XLA can make in the kernels that read it.
    """
    return {
        value
        for piece in pieces
        if isinstance(piece, Equation) and not piece.is_fusible
        for value in piece.input_values
    }
