"""The instructions of the backward pass, which one interpreter runs, and their listing.

`lower.py` turns the steps of a schedule into these instructions. Values are the numbers
of `Program.avals`. Decodes and delayed reads depend on a token: a scalar 0 that every
barrier renews.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, TypeAlias, final

import jax

from dafjax._plan.plan import ProgramPlan
from dafjax._schedule.steps import Division, Loop
from dafjax._trace.equation import Atom, Equation
from dafjax._trace.residuals import Program, atoms_text, equation_text
from dafjax.codecs import AbstractCodec


@final
@dataclasses.dataclass(frozen=True)
class Barrier:
    """Makes all later instructions wait for some values.

    Attributes:
        through: Values that pass through: later instructions read the results.
        waits: Values that are barrier inputs only: XLA:CPU can compute in place in
            their buffers.
        late: Late outputs: they wait for the others, which do not wait for them.
        packed: Residuals whose codes pass through.
        in_rows: Values of `through` and `waits` that pass in row-major order.
        begins: Whether a stage begins. Then new statistics pass through, too.
        only_on_cpus: Whether there is a barrier on CPUs only.
    """

    through: tuple[int, ...] = ()
    waits: tuple[int, ...] = ()
    late: tuple[int, ...] = ()
    packed: tuple[int, ...] = ()
    in_rows: tuple[int, ...] = ()
    begins: bool = False
    only_on_cpus: bool = False


@final
@dataclasses.dataclass(frozen=True)
class Join:
    """Makes co-scheduled operands, `values`, wait for each other on CPUs."""

    values: tuple[int, ...]


@final
@dataclasses.dataclass(frozen=True)
class Late:
    """Delays reads of large arguments, `values`, until after the last barrier.

    Later instructions tell which of them they read.
    """

    values: tuple[int, ...]


@final
@dataclasses.dataclass(frozen=True)
class Unpack:
    """Decodes a residual, or a chunk of it.

    Attributes:
        value: The residual.
        like: Shape and dtype to decode.
        fused: Whether XLA decodes inside the consumers.
        codes_wait: Whether the codes wait for the token; in a chunk loop, the index of
            the chunk does.
        waits: Whether decoding waits for the token.
    """

    value: int
    like: jax.ShapeDtypeStruct
    fused: bool
    codes_wait: bool
    waits: bool


@final
@dataclasses.dataclass(frozen=True)
class Run:
    """Runs an equation.

    Attributes:
        equation: The equation.
        late: Its operands whose reads the last `Late` delays.
        when: Whether it runs after the last barrier: `"filled"` fills an array then,
            `"drawn"` reads all of its operands then.
    """

    equation: Equation
    late: tuple[int, ...] = ()
    when: Literal["any", "filled", "drawn"] = "any"


@final
@dataclasses.dataclass(frozen=True)
class Chunked:
    """Runs a body of instructions on each chunk of the batch.

    Attributes:
        division: The chunk plan of the stage.
        loop: The sources, sums and results of the chunks.
        body: The instructions: `Barrier`, `Unpack` and `Run`. The sums run after them.
        late: Sources and operands whose reads the last `Late` delays.
        barrier: In a chunk loop, the barrier that each chunk of the sources passes.
        in_memory: In a chunk loop, the sources with a layout constraint on each chunk.
    """

    division: Division
    loop: Loop
    body: tuple[Barrier | Unpack | Run, ...]
    late: tuple[int, ...]
    barrier: Barrier | None = None
    in_memory: tuple[int, ...] = ()

    @property
    def mode(self) -> Literal["loop", "unroll"]:
        """Whether the chunks run in a loop or are unrolled in the program."""
        return "unroll" if self.division.is_apart else "loop"


Instruction: TypeAlias = Barrier | Join | Late | Unpack | Run | Chunked


@final
@dataclasses.dataclass(frozen=True, eq=False)
class Lowered:
    """A backward pass, ready to run.

    Attributes:
        plan: The program and its saved residuals.
        codecs: The codec of each residual.
        instructions: The instructions.
        pinned: Values with a layout constraint.
        is_apart: Whether it runs on a GPU, with unrolled chunks.
    """

    plan: ProgramPlan
    codecs: Mapping[int, AbstractCodec]
    instructions: tuple[Instruction, ...]
    pinned: frozenset[Atom]
    is_apart: bool


def listing(instructions: Iterable[Instruction], program: Program) -> str:
    """Returns the instructions as text, one a line.

    In chunks, equations are shown with the shapes of the whole arrays.

    Args:
        instructions: The instructions.
        program: The program whose values they compute.
    """
    last = f"return    {atoms_text(program.gradients)}"
    return "\n".join([*_lines(instructions, program), last])


def _lines(
    instructions: Iterable[Instruction], program: Program, name: str = ""
) -> Iterator[str]:
    for item in instructions:
        names = [field.name for field in dataclasses.fields(item)]
        # An equation ends with a comment.
        names.sort(key=lambda field: field == "equation")
        words = [_text(field, getattr(item, field), program) for field in names]
        first = f"{name or type(item).__name__.lower():8}"
        yield "  ".join([first, *filter(None, words)])
        if isinstance(item, Chunked):
            barrier = () if item.barrier is None else (item.barrier,)
            body = _lines((*barrier, *item.body), program)
            sums = _lines(map(Run, item.loop.sums), program, "sum")
            yield from (f"    {line}" for line in (*body, *sums))
            yield from _lines(map(Run, item.loop.finishing), program, "epilogue")


def _text(field: str, x: Any, program: Program) -> str:
    """Returns a field of an instruction as text, empty if there is nothing to tell."""
    match x:
        case Equation():
            return equation_text(program, x)
        case Division():
            kind = "unrolled chunks" if x.is_apart else "chunks"
            return f"{x.num_parts} {kind} of {x.num_rows_of_part} rows"
        case Loop():
            names = "sources", "results", "replaced"
            words = (_text(name, getattr(x, name), program) for name in names)
            return "  ".join(filter(None, words))
        case jax.ShapeDtypeStruct():
            return f"{x.dtype.name}[{','.join(map(str, x.shape))}]"
        case bool():
            return field * x
        case int():
            return f"%{x}"
        case str():
            return "" if x == "any" else x
        case tuple() if x and field != "body":
            return f"{field} {atoms_text(x)}"
    return ""
