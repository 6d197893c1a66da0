"""The steps of the backward pass: what each restores, computes and waits for."""

import dataclasses
from collections.abc import Iterable
from typing import final

from dafjax._schedule.rows import Rows
from dafjax._trace.equation import Equation


@final
@dataclasses.dataclass(frozen=True)
class Unpacking:
    """Decodes a compressed residual.

    Attributes:
        value: The residual.
        behind: Earlier partial results: values recomputed in the same step that pass
            through a barrier before the decode.
    """

    value: int
    behind: tuple[int, ...] = ()

    @property
    def outputs(self) -> tuple[int, ...]:
        """The residual, as an equation has outputs."""
        return (self.value,)


@final
@dataclasses.dataclass(frozen=True, eq=False)
class Loop:
    """A chunk loop that runs a stage or a part of it.

    Attributes:
        before: Decodes and equations that run before the loop, on whole arrays.
        by_rows: Decodes and equations that run on each chunk, in order.
        sources: Values that exist before the loop and are read in chunks.
        sums: Equations that run on each chunk after `by_rows`, and whose results are
            added over the chunks.
        finishing: Gradient epilogues, which turn a sum into a gradient as soon as the
            sum is complete.
        results: Values computed in chunks that later steps read.
        replaced: For each result the value whose buffer it overwrites, or `None`.
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
        """The values decoded or computed in chunks, in order."""
        return tuple(v for piece in self.by_rows for v in piece.outputs)

    @property
    def unpacked(self) -> tuple[int, ...]:
        """The residuals decoded in chunks, in order."""
        return tuple(p.value for p in self.by_rows if isinstance(p, Unpacking))


@final
@dataclasses.dataclass(frozen=True, eq=False)
class Division:
    """The chunk plan of a stage.

    Attributes:
        num_rows: Length of the batch axis, the same for all chunked values.
        rows: How the batch axis is split into chunks.
        loops: The chunk loops, in order.
        rest: Decodes and equations that run after the loops, on whole arrays.
        is_apart: Whether the chunks are unrolled in the program and their results stay
            separate arrays. Otherwise they run in a loop (`chunks.py`).
    """

    num_rows: int
    rows: Rows
    loops: tuple[Loop, ...]
    rest: tuple[Unpacking | Equation, ...]
    is_apart: bool

    @property
    def num_parts(self) -> int:
        """The number of chunks."""
        return self.rows.num_parts

    @property
    def stays_in_parts(self) -> bool:
        """Whether results remain chunked after the stage."""
        return self.is_apart and self.num_parts > 1

    @property
    def num_rows_of_part(self) -> int:
        """The number of rows per chunk."""
        return self.num_rows // self.num_parts

    @property
    def unpacked(self) -> tuple[int, ...]:
        """The residuals decoded in chunks, each listed once."""
        return tuple(dict.fromkeys(v for loop in self.loops for v in loop.unpacked))

    @property
    def unpacked_in_all(self) -> tuple[int, ...]:
        """All decoded residuals, each listed once per decode."""
        whole = (self.rest, *(loop.before for loop in self.loops))
        return (
            *(v for loop in self.loops for v in loop.unpacked),
            *(p.value for ps in whole for p in ps if isinstance(p, Unpacking)),
        )


@final
@dataclasses.dataclass(frozen=True)
class Step:
    """One equation of the backward pass, with what must be ready before it.

    Attributes:
        equation: The equation; `None` stands for returning the gradients.
        begins: Whether a stage begins at this step.
        cotangents: If so, the backward-pass values that its barrier takes.
        awaited: Those `cotangents` that are barrier inputs only.
        given: If a stage begins, the saved inputs: uncompressed saved values and small
            arguments that pass through its barrier.
        settled: If a stage begins, late outputs: gradients of weights that have had
            their last use.
        restored: Decodes of residuals and recomputed forward equations, in order.
        delayed: Large arguments that are read no earlier than the stage begins.
        joined: Operands of the equation that pass through one barrier before it.
        finishes: Whether the equation is a gradient epilogue.
        division: If a stage begins, its chunk plan, or `None` if it is not chunked.
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
        """The residuals to decode, in order."""
        return tuple(r.value for r in self.restored if isinstance(r, Unpacking))

    @property
    def recomputed(self) -> tuple[Equation, ...]:
        """The forward equations to recompute, in order."""
        return tuple(r for r in self.restored if isinstance(r, Equation))


def written(pieces: Iterable[Unpacking | Equation | None]) -> set[int]:
    """Returns the operands of equations that XLA runs in kernels of their own.

    These must be in memory. XLA can compute all other operands inside the consumers.
    """
    return {
        value
        for piece in pieces
        if isinstance(piece, Equation) and not piece.is_fusible
        for value in piece.input_values
    }
