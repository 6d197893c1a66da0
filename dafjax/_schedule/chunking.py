"""How a stage runs in chunks of the batch.

A chunk is a few rows of the batch axis. It is decoded, recomputed and run through all
of a stage before the next chunk is decoded. So only the stage's inputs and outputs
exist as whole arrays. A result is written chunk by chunk into the buffer of an input
that has had its last use.

Sums over rows, such as the gradient of a weight, are accumulated over the chunks.
Equations that depend on a sum run in a second chunk loop, which recomputes what is
cheap. A norm takes one loop for its sums and one for the gradient of its input.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, final

import jax
from jax.sharding import AxisType

from dafjax import config
from dafjax._numbers import Like
from dafjax._plan.plan import ProgramPlan
from dafjax._schedule.steps import Division, Loop, Rows, Step, Unpacking
from dafjax._trace.by_rows import Axes, axes_read, axes_summed
from dafjax._trace.equation import Equation
from dafjax._trace.residuals import Program
from dafjax._trace.tracing import nbytes_of
from dafjax.codecs import AbstractCodec


@final
@dataclasses.dataclass(frozen=True)
class Parts:
    """How residuals can be decoded in chunks of rows (of the first dimension).

    Attributes:
        codecs: The codec of each residual.
        most: Maximum number of chunks.
        likes: Shape and dtype of each residual.
        are_apart: Whether the chunks are unrolled in the program and their results stay
            separate arrays (`chunks.py`). Otherwise they run in a loop.
        serves_gpus: Whether residuals stored for a chunk loop may also be read in
            unrolled chunks.
        divides_made: Whether chunks may divide a value that a stage computes, where
            they cannot divide a residual: see `multiplies_again`.
    """

    codecs: Mapping[int, AbstractCodec]
    most: int
    likes: Mapping[int, Like]
    are_apart: bool = False
    serves_gpus: bool = False
    divides_made: bool = False

    def rows(self, values: Collection[int], there: Iterable[Rows]) -> Rows:
        """Returns the chunks of some residuals, a single one if they cannot be chunked.

        All residuals have the same number of rows.

        Args:
            values: The residuals.
            there: The chunks of the already chunked values that are read with them.
        """
        known = set(there)
        if known:
            rows = known.pop()
            if not known and self._can_be_divided(values, rows):
                return rows
            return Rows(1, is_interleaved=False)
        largest = max((self.likes[v] for v in values), key=nbytes_of)
        if self.is_among_largest(nbytes_of(largest)):
            # Devices do not share arrays that are read in unrolled chunks.
            is_interleaved = not self.are_apart and all(
                self.codecs[v].packs_rows(self.likes[v]) for v in values
            )
            if not (self.are_apart or is_interleaved or self._are_on_one_device):
                # A chunk of consecutive rows would be gathered from other devices.
                return Rows(1, is_interleaved=False)
            for count in self._counts(largest):
                rows = Rows(count, is_interleaved)
                if self._can_be_divided(values, rows):
                    return rows
        return Rows(1, is_interleaved=False)

    def rows_of_made(self, like: Like) -> Rows:
        """Returns the chunks of a value that a stage computes, or a single one.

        Args:
            like: Shape and dtype of the value.
        """
        if not self.is_among_largest(nbytes_of(like)):
            return Rows(1, is_interleaved=False)
        shape = like.shape[first_long(like.shape) :]
        counts = self._counts(jax.ShapeDtypeStruct(shape, like.dtype))
        return Rows(next(counts, 1), not self._are_on_one_device)

    def is_among_largest(self, nbytes: int) -> bool:
        """Returns whether a value is about as large as the largest residual."""
        return nbytes >= config.LEAST_SHARE_OF_LARGEST * self._largest_nbytes

    def _counts(self, like: Like) -> Iterator[int]:
        """Yields the possible numbers of chunks of an array, the best first."""
        if not self.are_apart:
            serves_gpus = self.serves_gpus and self._calls_unpack
            return _counts(like, self.most, serves_gpus=serves_gpus)
        # If GPUs share the batch axis, each chunk's sums would need an all-reduce.
        if _gpus_may_share() and not self._calls_unpack:
            return iter(())
        return _counts(
            like,
            min(self.most, config.MOST_UNROLLED),
            least=config.LEAST_NBYTES_UNROLLED,
        )

    @property
    def _are_on_one_device(self) -> bool:
        """Whether no devices share residuals, as they never do in a page pool."""
        return jax.device_count() == 1 or self._calls_unpack

    @functools.cached_property
    def _calls_unpack(self) -> bool:
        return _calls_unpack(self.codecs.values())

    @functools.cached_property
    def _largest_nbytes(self) -> int:
        return max(map(nbytes_of, self.likes.values()), default=0)

    def _can_be_divided(self, values: Iterable[int], rows: Rows) -> bool:
        pairs = [(self.codecs[v], self.likes[v]) for v in values]
        return all(
            codec.packs_parts(like, rows.num_parts)
            and (codec.packs_rows(like) or not rows.is_interleaved)
            for codec, like in pairs
        )


def usual_parts() -> int:
    """Returns the default maximum number of chunks of a chunk loop."""
    return config.CHUNKS_IN_LOOPS


def usual_parts_apart(codecs: Iterable[AbstractCodec]) -> int:
    """Returns the default maximum number of unrolled chunks.

    Args:
        codecs: The codecs of the residuals.
    """
    return (
        config.CHUNKS_UNROLLED_OF_CALLS
        if _calls_unpack(codecs)
        else config.CHUNKS_UNROLLED
    )


def most_parts(like: Like, most: int, *, serves_gpus: bool = False) -> int:
    """Returns the number of chunks that suits an array, 1 if it cannot be chunked.

    Args:
        like: Shape and dtype of the array.
        most: Maximum number of chunks of a chunk loop.
        serves_gpus: As in `Parts`.
    """
    return next(_counts(like, most, serves_gpus=serves_gpus), 1)


def are_shared_by_type(avals: Iterable[Any]) -> bool:
    """Returns whether array types contain how devices share the arrays.

    This is so on meshes with explicit axes and in `shard_map`. Chunks would then have
    types of their own.
    """
    types = {t for aval in avals for t in aval.sharding.mesh.axis_types}
    return not types.isdisjoint({AxisType.Explicit, AxisType.Manual})


def _counts(
    like: Like, most: int, *, least: int | None = None, serves_gpus: bool = False
) -> Iterator[int]:
    """Yields the possible numbers of chunks of an array, the best first.

    The largest is best. With `serves_gpus`, those are best that combine into the
    unrolled chunks of GPUs.
    """
    counts: Iterable[int] = range(most, 1, -1)
    if serves_gpus:
        counts = sorted(counts, key=lambda n: (math.gcd(n, config.MOST_UNROLLED), n))[
            ::-1
        ]
    for count in counts:
        if _can_have_parts(like, count, least or config.LEAST_NBYTES_OF_CHUNK):
            yield count


def _calls_unpack(codecs: Iterable[AbstractCodec]) -> bool:
    """Returns whether a custom call decodes a residual, outside of its consumers."""
    return not all(codec.decodes_fused for codec in codecs)


def _gpus_may_share() -> bool:
    return jax.default_backend() == "gpu" and jax.device_count() > 1


def _can_have_parts(like: Like, count: int, least_nbytes: int) -> bool:
    """Returns whether an array has `count` equal chunks of `least_nbytes` or more."""
    if not like.shape:
        return False
    there, rest = divmod(like.shape[0], count)
    # If devices share the batch axis, each holds some rows of every chunk.
    if rest or there % jax.device_count():
        return False
    return nbytes_of(like) >= count * least_nbytes


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
    it reads a chunked value, or if it multiplies matrices to such a large value that
    only equations of the same chunk read: attention probabilities that are recomputed.
    Then residuals are decoded whole, and rows may be attention heads.

    Args:
        plan: The program and its saved residuals.
        stretch: The steps of the stage.
        later: The values that are read after the stage.
        parts: How residuals can be decoded in chunks.
        in_parts: The live chunked values, with their chunks.
    """
    program = plan.program
    stage = _Stage(plan, stretch, later, parts)
    pieces = list(_pieces(stretch))
    unpacked = [piece.value for piece in pieces if isinstance(piece, Unpacking)]
    large = [v for v in unpacked if program.is_large(v)]
    there = {v: in_parts[v] for v in read_in(stretch) if v in in_parts}
    lengths = {v: tuple(program.avals[v].shape[:1]) for v in (*large, *there)}
    if large and not parts.are_apart and not there:
        # Smaller residuals are decoded whole if they have other rows.
        largest = max(large, key=program.nbytes)
        large = [v for v in large if lengths[v] == lengths[largest]]
    shapes = {lengths[v] for v in (*large, *there)}
    if len(shapes) == 1 and () not in shapes:
        ((num_rows,),) = shapes
        rows = parts.rows(large, there.values())
        division = stage.divided(num_rows, rows, large, {*large, *there})
        if division is not None:
            return division
    if parts.are_apart or there or not parts.divides_made:
        return None
    equations = (piece for piece in pieces if isinstance(piece, Equation))
    made = [v for eqn in equations for v in eqn.outputs if program.is_large(v)]
    if not made:
        return None
    largest = max(made, key=program.nbytes)
    aval = program.avals[largest]
    rows = parts.rows_of_made(jax.ShapeDtypeStruct(aval.shape, aval.dtype))
    return stage.divided(aval.shape[first_long(aval.shape)], rows, (), {largest})


@final
@dataclasses.dataclass(frozen=True)
class _Stage:
    """A stage that may run in chunks; attributes as the arguments of `divide`."""

    plan: ProgramPlan
    stretch: Sequence[Step]
    later: Collection[int]
    parts: Parts

    def divided(
        self,
        num_rows: int,
        rows: Rows,
        unpacked: Collection[int],
        largest: Collection[int],
    ) -> Division | None:
        """Returns the chunk plan for given chunks, if there is one.

        Args:
            num_rows: The length of the divided axis.
            rows: The chunks.
            unpacked: The residuals that are decoded in chunks.
            largest: These, the values that are chunked before the stage, or the largest
                value that the stage computes.
        """
        program, are_apart = self.plan.program, self.parts.are_apart
        finishing = {step.equation for step in self.stretch if step.finishes}
        is_divided = rows.num_parts > 1
        if not (is_divided or are_apart):
            return None
        levels = _Levels(program, num_rows, finishing, unpacked, are_apart=are_apart)
        if not all(map(levels.add, _pieces(self.stretch))) or levels.mixes_rows:
            return None
        equations = (step.equation for step in self.stretch if step.equation)
        made = {v for eqn in equations for v in eqn.outputs}
        wanted = made.intersection(self.later)
        loops, rest = levels.loops(wanted, self.later, are_apart=are_apart)
        division = Division(num_rows, rows, levels.axes, loops, rest, are_apart)
        pays = not is_divided or self._saves_memory(division, unpacked, largest)
        products = division.products
        runs_once = len(products) == len(set(products))
        if not (loops and runs_once and pays):
            return None
        if not (unpacked or are_apart) and not self._spares(division, largest):
            return None
        return division

    def _saves_memory(
        self, division: Division, unpacked: Collection[int], largest: Collection[int]
    ) -> bool:
        """Returns whether sums, and copies of what products read, are small."""
        program = self.plan.program
        # Two copies of a sum exist while a chunk is added to it.
        sums = [v for loop in division.loops for eqn in loop.sums for v in eqn.outputs]
        if 2 * _nbytes(program, sums) > _nbytes(program, largest):
            return False
        # A loop copies the chunk of what a product reads; elementwise kernels slice it.
        sources = {v for loop in division.loops for v in loop.sources}
        read = {v for eqn in division.products for v in eqn.input_values}
        copied = sources & read
        whole = _nbytes(program, unpacked or largest)
        in_chunk = (whole + _nbytes(program, copied)) / division.num_parts
        return division.is_apart or in_chunk <= whole

    def _spares(self, division: Division, largest: Collection[int]) -> bool:
        """Returns whether as much as `largest` is never whole.

        Only what a product writes in chunks, and nothing reads whole, is spared.
        """
        program = self.plan.program
        made = {v for eqn in division.products for v in eqn.outputs}
        spared = made.intersection(division.axes)
        spared = spared.difference(*(loop.results for loop in division.loops))
        return _nbytes(program, spared) >= _nbytes(program, largest)


def multiplies_again(plan: ProgramPlan, parts: Parts) -> bool:
    """Returns whether large products of activations are computed again.

    Such are attention probabilities. They are about as large as the largest residual,
    or larger. If there are none, the largest values are residuals and their cotangents.
    """
    again = plan.recomputed.values()
    products = (e for e in again if e.rule.is_product and not e.makes_channels)
    sizes = (plan.program.nbytes(v) for eqn in products for v in eqn.outputs)
    return any(map(parts.is_among_largest, sizes))


def first_long(shape: Sequence[int]) -> int:
    """Returns the first axis that is longer than 1: in a batch of one, not the first.

    The first if there is none.
    """
    return next((axis for axis, length in enumerate(shape) if length > 1), 0)


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
        self,
        program: Program,
        num_rows: int,
        finishing: Container[Equation | None],
        unpacked: Collection[int],
        *,
        are_apart: bool,
    ) -> None:
        self.axes: dict[int, int] = dict.fromkeys(unpacked, 0)
        self._program = program
        self._unpacked = unpacked
        self._are_apart = are_apart
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
        if piece.value in self._unpacked:
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
            found = self._axes_of(eqn, reads_parts=reads_parts)
            if found is not None:
                read, made = found
                self._learn(eqn, read)
                level = self._level(eqn)
                self._by_rows.append(eqn)
                self.axes.update(zip(eqn.outputs, made, strict=True))
                self._level_of_parts.update(dict.fromkeys(eqn.outputs, level))
                return True
        if reads_parts or any(map(is_large, eqn.input_values)):
            summed = self._axes_summed(eqn, reads_parts=reads_parts)
            if summed is not None:
                self._learn(eqn, summed)
                level = self._level(eqn)
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

    def _axes_of(
        self, eqn: Equation, *, reads_parts: bool
    ) -> tuple[Axes, Sequence[int]] | None:
        """Returns the axes along which an equation reads and writes chunks."""
        shapes = [self._program.avals[v].shape for v in eqn.outputs]
        firsts = tuple(0 if self._are_apart else first_long(s) for s in shapes)
        # A chunk of a chunk's axis may lie at another one.
        others = itertools.product(*(range(len(s)) for s in shapes))
        for axes in (firsts, *(others if reads_parts and not self._are_apart else ())):
            pairs = zip(shapes, axes, strict=True)
            if any(s[a : a + 1] != (self._num_rows,) for s, a in pairs):
                continue
            read = axes_read(eqn, axes)
            if read is not None and self._agrees(eqn, read):
                return read, axes
        return None

    def _axes_summed(self, eqn: Equation, *, reads_parts: bool) -> Axes | None:
        """Returns the axes along which an equation sums over chunks."""
        avals = [var.aval for var in eqn.jaxpr.invars]
        shapes: list[tuple[int, ...]] = [getattr(a, "shape", ()) for a in avals]
        for axes in axes_summed(eqn):
            pairs = list(zip(shapes, axes, strict=True))
            are_first = all(
                a == (0 if self._are_apart else first_long(s)) for s, a in pairs
            )
            is_divided = all(s[a : a + 1] == (self._num_rows,) for s, a in pairs)
            if is_divided and (are_first or reads_parts) and self._agrees(eqn, axes):
                return axes
        return None

    def _agrees(self, eqn: Equation, axes: Axes) -> bool:
        """Returns whether inputs may be read along these axes."""
        for atom, axis in zip(eqn.inputs, axes, strict=True):
            if not isinstance(atom, int):
                # A constant would be read in chunks.
                if axis is not None:
                    return False
            elif axis is None:
                if atom in self._level_of_parts:
                    return False
            elif self.axes.get(atom, axis) != axis or (self._are_apart and axis):
                return False
        return True

    def _level(self, eqn: Equation) -> int:
        known = self._level_of_parts | self._level_of_whole
        return max((known.get(v, 0) for v in eqn.input_values), default=0)

    def _learn(self, eqn: Equation, axes: Axes) -> None:
        """Records the inputs of a chunked equation, and where it divides them."""
        pairs = [
            (atom, axis)
            for atom, axis in zip(eqn.inputs, axes, strict=True)
            if isinstance(atom, int)
        ]
        by_rows = {atom: axis for atom, axis in pairs if axis is not None}
        self._sources[eqn] = by_rows.keys() - self._level_of_parts.keys()
        self._read_in_parts |= by_rows.keys()
        self._read_whole.update(atom for atom, axis in pairs if axis is None)
        self.axes.update(by_rows)

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
            alike = (
                v
                for v in free
                if (avals[v].shape, avals[v].dtype) == like
                and self.axes[v] == self.axes[value]
            )
            replaced.append(next(alike, None))
            free = [v for v in free if v != replaced[-1]]
        return tuple(replaced)
