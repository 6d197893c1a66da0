"""The values of a backward pass: live values, and those stored by the forward pass."""

import collections
import dataclasses
import math
from collections.abc import (
    Callable,
    Iterable,
    Iterator,
    Mapping,
    MutableMapping,
    Sequence,
)
from typing import Any, NamedTuple, TypeAlias, final

import jax

from dafjax._numbers import Array, ArrayTree
from dafjax._plan.plan import ProgramPlan, site_names
from dafjax._schedule.chunking import Parts, are_shared_by_type, most_parts
from dafjax._schedule.instructions import Unpack
from dafjax._schedule.stages import stretches_of
from dafjax._schedule.steps import Division, Rows, Step
from dafjax._trace.by_rows import evaluate_on_chunk
from dafjax._trace.equation import Equation, evaluate, look_up
from dafjax.codecs import AbstractCodec
from dafjax.stores import AbstractStore


@final
class Values(dict[int, Any]):
    """The live values; reading a chunked value concatenates its chunks.

    Example:
        >>> import jax.numpy as jnp
        >>> from dafjax._schedule.steps import Rows
        >>> values = Values()
        >>> values.put_parts({7: (jnp.zeros(2), jnp.ones(2))}, Rows(2, False))
        >>> values[7]
        Array([0., 0., 1., 1.], dtype=float32)
    """

    def __init__(self, wholes: Mapping[int, Any] | None = None) -> None:
        super().__init__(wholes or {})
        # The chunks of values that are tuples of chunks.
        self._rows: dict[int, Rows] = {}

    def __getitem__(self, value: int) -> Any:
        if value in self._rows:
            self[value] = self._rows.pop(value).join(self.raw(value))
        return super().__getitem__(value)

    def raw(self, value: int) -> Any:
        """Returns a value as it is: the whole, or a tuple of its chunks."""
        return super().__getitem__(value)

    def put_parts(self, made: Mapping[int, tuple[Array, ...]], rows: Rows) -> None:
        """Adds chunked values."""
        self.update(made)
        self._rows.update(dict.fromkeys(made, rows))

    def parts(
        self, value: int, rows: Rows, wholes: Mapping[int, Any]
    ) -> tuple[Array, ...]:
        """Returns the chunks of a value.

        Args:
            value: The value.
            rows: The chunks to return.
            wholes: Live whole values, used if these chunks do not exist.
        """
        is_there = self._rows.get(value) == rows
        return self.raw(value) if is_there else rows.split(wholes[value])


# Returns the codes that an instruction decodes, and a new token if a barrier takes them
# with the given one.
Codes: TypeAlias = Callable[[Unpack, Array], tuple[ArrayTree, Array]]


@final
@dataclasses.dataclass
class Frame:
    """The state of the interpreter, outside of chunks or in one.

    Attributes:
        values: The live values; in a chunk, those of the chunk.
        token: A scalar 0 that waits for the last barrier.
        codes: Returns codes to decode.
        wholes: In a chunk, the whole values that it may read.
        division: In a chunk, the chunk plan.
        late: Delayed reads of values.
    """

    values: Values
    token: Array
    codes: Codes
    wholes: MutableMapping[int, Any] = dataclasses.field(default_factory=dict)
    division: Division | None = None
    late: Mapping[int, Any] = dataclasses.field(default_factory=dict)

    def at_hand(self, late: Iterable[int] = ()) -> MutableMapping[int, Any]:
        """Returns the values to read; of those in `late` the delayed reads."""
        delayed = {v: self.late[v] for v in late}
        return collections.ChainMap(delayed, self.values, self.wholes)

    def operands(self, equation: Equation, late: Iterable[int] = ()) -> list[Any]:
        """Returns what an equation reads."""
        return look_up(equation.inputs, self.at_hand(late))

    def evaluate(self, equation: Equation, operands: list[Any]) -> Iterable[Any]:
        """Runs an equation, on whole arrays or on a chunk."""
        if self.division is None:
            return evaluate(equation, operands)
        division = self.division
        axes = [division.axes[v] for v in equation.outputs if v in division.axes]
        return evaluate_on_chunk(equation, operands, axes, division.num_rows_of_part)


class MeasuredHandle(NamedTuple):
    """The stored form of a residual whose sensitivity the backward pass measures.

    Attributes:
        handle: The handle that the store returned.
        rounding_noise: float32 scalar from `codecs.sample_rounding_noise`. Codes of few
            bits do not show how evenly the values fill their quantization groups.
    """

    handle: ArrayTree
    rounding_noise: jax.Array


def codecs_in(
    store: AbstractStore, plan: ProgramPlan, schedule: Sequence[Step] = ()
) -> dict[int, AbstractCodec]:
    """Returns the codec with which a store packs each value of a plan.

    Args:
        store: The store.
        plan: The program and its saved residuals.
        schedule: The steps of the backward pass, which decide whether values are
            decoded whole or in chunks; empty if the backward pass starts by decoding
            all of them.
    """
    reads: collections.Counter[int] = collections.Counter()
    parts: collections.defaultdict[int, int] = collections.defaultdict(lambda: 1)
    for first, *others in stretches_of(schedule):
        division = first.division
        if division is None:
            reads.update(v for step in (first, *others) for v in step.unpacked)
            continue
        reads.update(division.unpacked_in_all)
        for value in division.unpacked:
            parts[value] = math.lcm(parts[value], division.num_parts)
    return {
        value: codec
        if value in plan.brief
        else store.codec(codec, site=site, reads=reads[value], num_parts=parts[value])
        for value, site, codec, _ in _packed(plan)
    }


def parts_in(
    store: AbstractStore, plan: ProgramPlan, most: int, *, serves_gpus: bool = False
) -> Parts:
    """Returns how a plan's values can be decoded in chunk loops.

    Args:
        store: The store that saves them. It packs for the chunks that are read.
        plan: The program and its saved residuals.
        most: Maximum number of chunks.
        serves_gpus: As in `Parts`.
    """
    if are_shared_by_type(plan.program.avals):
        most = 1
    packed = list(_packed(plan))
    codecs = {
        value: codec
        if value in plan.brief
        else store.codec(
            codec,
            site=site,
            num_parts=most_parts(like, most, serves_gpus=serves_gpus),
        )
        for value, site, codec, like in packed
    }
    likes = {value: like for value, *_, like in packed}
    return Parts(codecs, most, likes, serves_gpus=serves_gpus)


def parts_apart(
    plan: ProgramPlan, codecs: Mapping[int, AbstractCodec], most: int
) -> Parts:
    """Returns how a plan's values can be decoded in unrolled chunks.

    Args:
        plan: The program and its saved residuals.
        codecs: The codec of each value, from `codecs_in`.
        most: Maximum number of chunks.
    """
    likes = {value: like for value, *_, like in _packed(plan)}
    return Parts(codecs, most, likes, are_apart=True)


def can_be_apart(plan: ProgramPlan) -> bool:
    """Returns whether the backward pass may run with unrolled chunks.

    It may not if array types contain how devices share the arrays, or if an equation
    has side effects.
    """
    return not are_shared_by_type(plan.program.avals) and not any(
        eqn.has_effect for eqn in plan.program.backward
    )


def _packed(
    plan: ProgramPlan,
) -> Iterator[tuple[int, str, AbstractCodec, jax.ShapeDtypeStruct]]:
    for item, site in zip(plan.kept, site_names(plan), strict=True):
        if item.codec is not None:
            yield item.value, site, item.codec, item.like
