"""What primitives do with values that have a part for each example of a batch."""

import dataclasses
import enum
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, final

import jax.numpy as jnp

from dafjax._trace.axis_rules import shape_of
from dafjax._trace.equation import Constant, Equation


@final
class Kind(enum.Enum):
    """How a value depends on the examples."""

    # In no way.
    SAME = enum.auto()
    # It has a part for each example, computed from this example alone.
    ROWS = enum.auto()
    # As `ROWS`, and it says where in the batch each example is.
    PLACES = enum.auto()
    # Places that are moved, or whether they are negative: what indexing by places
    # computes, and does not read.
    MOVED_PLACES = enum.auto()
    ARE_NEGATIVE = enum.auto()
    # It is a sum over the examples.
    SUM = enum.auto()
    # It is computed from sums over the examples, and from no example otherwise.
    LATE = enum.auto()
    # In another way, so that no sum over microbatches is right.
    MIXED = enum.auto()


@final
@dataclasses.dataclass(frozen=True)
class Status:
    """How a value depends on the examples of a batch.

    Attributes:
        kind: How it depends on the examples.
        axis: The axis that holds the examples, as `(outer, examples, inner)`.
        inner: How many elements of the axis one example has in a row; 0 if the axis
            repeats one element, or holds random numbers.
        keys: The arguments that it depends on and that may be keys of random numbers.
        columns: Of `PLACES`, which indices of the last axis hold places; `None`: all.
        size: Of places, how many there are.
        reason: Why it is `MIXED`, for an error.
    """

    kind: Kind
    axis: int = 0
    inner: int = 0
    keys: frozenset[int] = frozenset()
    columns: tuple[int, ...] | None = None
    size: int = 0
    reason: str = ""

    @property
    def has_rows(self) -> bool:
        """Whether it has a part for each example."""
        return self.kind is Kind.ROWS or self.has_places

    @property
    def has_places(self) -> bool:
        """Whether it tells where in the batch each example is."""
        return self.kind in (Kind.PLACES, Kind.MOVED_PLACES, Kind.ARE_NEGATIVE)

    @property
    def is_late(self) -> bool:
        """Whether it is a sum over examples, or computed from one."""
        return self.kind in (Kind.SUM, Kind.LATE)


class MixesError(Exception):
    """An equation computes an example from other examples."""


UNKNOWN = "dafjax does not know how it treats examples"
OTHERS = "it computes an example from others"
SOME = "it takes some examples only"
PLACES = "it computes with the places of examples in the batch"


def status_of_rows(
    eqn: Equation, aval: Any, axis: int | None, operands: Sequence[Status]
) -> Status:
    """Returns the status of a result that is computed from parts for each example.

    Args:
        eqn: The equation.
        aval: The type of the result, for the whole batch.
        axis: The axis of the result that holds examples, if one does.
        operands: The statuses of its operands.

    Raises:
        MixesError: An example depends on others.
    """
    special = _SPECIAL.get(eqn.jax_primitive, _by_axes)
    return special(eqn, aval, axis, operands)


def _by_axes(
    eqn: Equation, aval: Any, axis: int | None, operands: Sequence[Status]
) -> Status:
    """Returns the status of a result that keeps the axes of its operands apart."""
    if axis is None:
        raise MixesError("it combines examples, and not by a sum, or leaves some out")
    if not eqn.rule.is_elementwise and eqn.jax_primitive not in _KEEP_PLACES:
        _check_no_places(operands)
    if eqn.rule.axes is None and not eqn.rule.is_elementwise:
        raise MixesError(UNKNOWN)
    (written,) = eqn.jaxpr.eqns
    for number, (shape, status) in enumerate(zip(_shapes(eqn), operands, strict=True)):
        if not status.has_rows:
            continue
        if eqn.rule.axis_after(written, number, status.axis) != axis:
            raise MixesError(OTHERS)
        if shape[status.axis] != aval.shape[axis]:
            raise MixesError(SOME)
    if eqn.rule.is_elementwise and any(status.has_places for status in operands):
        return _of_places(eqn, operands)
    return _rows(axis, operands)


# They only move places, beside the functions of `_SPECIAL`.
_KEEP_PLACES = ("broadcast_in_dim", "name", "squeeze", "transpose")


def _of_places(eqn: Equation, operands: Sequence[Status]) -> Status:
    """Returns the status of an elementwise function of places.

    `x[places]` adds the length of `x` to negative places, of which there are none.
    """
    first, *others = operands
    kinds = [status.kind for status in operands]
    name = eqn.jax_primitive
    is_integer = jnp.issubdtype(eqn.params.get("new_dtype", bool), jnp.integer)
    if name == "convert_element_type" and is_integer:
        return first
    if kinds == [Kind.PLACES, Kind.SAME]:
        if name == "add":
            return dataclasses.replace(first, kind=Kind.MOVED_PLACES)
        (_, number) = eqn.operand_atoms
        if name == "lt" and isinstance(number, Constant) and number.value == 0:
            return dataclasses.replace(first, kind=Kind.ARE_NEGATIVE)
    if name == "select_n" and kinds[:2] == [Kind.ARE_NEGATIVE, Kind.PLACES]:
        return others[0]
    raise MixesError(PLACES)


def _rows(axis: int, operands: Sequence[Status]) -> Status:
    found = [status for status in operands if status.has_rows]
    kinds = {(status.kind, status.columns, status.size) for status in found}
    if len(kinds) > 1:
        raise MixesError(PLACES)
    ((kind, columns, size),) = kinds
    inner = common_inner(found)
    return Status(kind, axis, inner, columns=columns, size=size)


def common_inner(statuses: Iterable[Status]) -> int:
    """Returns the `inner` that values of equal shape share."""
    found = {status.inner for status in statuses} - {0}
    if len(found) > 1:
        raise MixesError("it pairs examples with others")
    return found.pop() if found else 0


def _shapes(eqn: Equation) -> list[tuple[int, ...]]:
    return [shape_of(atom) for atom in eqn.jaxpr.eqns[0].invars]


def _check_no_places(operands: Iterable[Status]) -> None:
    if any(status.has_places for status in operands):
        raise MixesError(PLACES)


def _sum(
    eqn: Equation, aval: Any, axis: int | None, operands: Sequence[Status]
) -> Status:
    if axis is None:
        _check_no_places(operands)
        return Status(Kind.SUM)
    return _by_axes(eqn, aval, axis, operands)


def _reshape(
    eqn: Equation, aval: Any, axis: int | None, operands: Sequence[Status]
) -> Status:
    status = operands[0]
    (shape, *_) = _shapes(eqn)
    if axis is None or eqn.params["dimensions"] is not None:
        raise MixesError(OTHERS)
    # Elements from one example to the next, and from one index of the axis to the next.
    stride = status.inner * math.prod(shape[status.axis + 1 :])
    step = math.prod(aval.shape[axis + 1 :])
    is_longer = aval.shape[axis] > shape[status.axis]
    if stride % step or (is_longer and not status.inner):
        raise MixesError(OTHERS)
    return dataclasses.replace(_rows(axis, operands), inner=stride // step)


def _update_slice(
    eqn: Equation, aval: Any, axis: int | None, operands: Sequence[Status]
) -> Status:
    """Returns the status of a `dynamic_update_slice`."""
    del aval
    array, update, *_ = operands
    shapes = _shapes(eqn)
    if (
        axis is None
        or not (array.has_rows and update.has_rows)
        or shapes[0][axis] != shapes[1][axis]
    ):
        raise MixesError(SOME)
    _check_no_places(operands)
    return _rows(axis, operands[:2])


def _concatenate(
    eqn: Equation, aval: Any, axis: int | None, operands: Sequence[Status]
) -> Status:
    along = eqn.params["dimension"]
    kinds = [status.kind for status in operands]
    if Kind.PLACES not in kinds:
        return _by_axes(eqn, aval, axis, operands)
    if axis is None or along == axis or any(s.axis != axis for s in operands):
        raise MixesError(OTHERS)
    lengths = [shape[along] for shape in _shapes(eqn)]
    if along != len(aval.shape) - 1 or set(lengths) != {1}:
        raise MixesError(PLACES)
    columns = tuple(n for n, kind in enumerate(kinds) if kind is Kind.PLACES)
    size = next(s.size for s in operands if s.kind is Kind.PLACES)
    inner = common_inner(operands)
    return Status(Kind.PLACES, axis, inner, columns=columns, size=size)


def _product(
    eqn: Equation, aval: Any, axis: int | None, operands: Sequence[Status]
) -> Status:
    contracted, _ = eqn.params["dimension_numbers"]
    axes = tuple(status.axis for status in operands)
    have_rows = all(status.has_rows for status in operands)
    if axis is not None or not have_rows or axes not in zip(*contracted, strict=True):
        return _by_axes(eqn, aval, axis, operands)
    _check_no_places(operands)
    common_inner(operands)
    return Status(Kind.SUM)


def _lookup(
    eqn: Equation, aval: Any, axis: int | None, operands: Sequence[Status]
) -> Status:
    """Returns the status of a `gather`."""
    del aval
    if axis is None:
        raise MixesError(SOME)
    table, indices = operands
    if not table.has_rows:
        _check_no_places(operands)
        return _rows(axis, operands)
    numbers = eqn.params["dimension_numbers"]
    length = _shapes(eqn)[0][table.axis]
    indexing = _Indexing(
        length=length,
        takes_all=eqn.params["slice_sizes"][table.axis] == length,
        of_table=numbers.operand_batching_dims,
        of_indices=numbers.start_indices_batching_dims,
        counted=numbers.start_index_map,
    )
    return indexing.status(axis, table, indices)


def _update(
    eqn: Equation, aval: Any, axis: int | None, operands: Sequence[Status]
) -> Status:
    """Returns the status of a `scatter`."""
    del aval
    table, indices, updates = operands
    if axis is None or not table.has_rows:
        raise MixesError(OTHERS)
    numbers = eqn.params["dimension_numbers"]
    apart = numbers.inserted_window_dims + numbers.operand_batching_dims
    indexing = _Indexing(
        length=_shapes(eqn)[0][table.axis],
        takes_all=table.axis not in apart,
        of_table=numbers.operand_batching_dims,
        of_indices=numbers.scatter_indices_batching_dims,
        counted=numbers.scatter_dims_to_operand_dims,
    )
    _check_no_places([updates])
    common_inner([table, updates])
    return indexing.status(axis, table, indices)


@final
@dataclasses.dataclass(frozen=True)
class _Indexing:
    """How a `gather` or `scatter` finds the part of an example in a table.

    Attributes:
        length: How long the table's axis of examples is.
        takes_all: Whether each index takes all of this axis.
        of_table: The axes of the table that the indices have, too.
        of_indices: The same axes of the indices.
        counted: The axes of the table that indices count, in the order of columns.
    """

    length: int
    takes_all: bool
    of_table: Sequence[int]
    of_indices: Sequence[int]
    counted: Sequence[int]

    def status(self, axis: int, table: Status, indices: Status) -> Status:
        """Returns the status of the result, whose axis holds the examples."""
        _check_no_places([table])
        shared = dict(zip(self.of_table, self.of_indices, strict=True))
        if shared.get(table.axis) == indices.axis and indices.kind is Kind.ROWS:
            return _rows(axis, [table, indices])
        if table.axis not in self.counted:
            if self.takes_all and not indices.has_rows:
                return _rows(axis, [table])
        elif indices.kind is Kind.PLACES and indices.size == self.length:
            columns = indices.columns or tuple(range(len(self.counted)))
            if columns == (self.counted.index(table.axis),):
                return _rows(axis, [table])
        raise MixesError(OTHERS)


_SPECIAL: Mapping[str, Callable[..., Status]] = {
    "concatenate": _concatenate,
    "dot_general": _product,
    "dynamic_update_slice": _update_slice,
    "gather": _lookup,
    "reduce_sum": _sum,
    "reshape": _reshape,
    "scatter": _update,
    "scatter-add": _update,
    "scatter-max": _update,
    "scatter-min": _update,
    "scatter-mul": _update,
}
