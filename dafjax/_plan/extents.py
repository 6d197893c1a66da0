"""Finds the part of each value over which a later statistic normalizes it.

A layer norm divides each row by its own scale, a batch norm each channel, a query norm
each head. Rounding noise grows with the range of a quantization group. If a group holds
several rows, all of them get the noise of the largest row; the norm then divides a
small row, and its noise, by the scale of the small row alone. So a group must not mix
rows that a norm keeps apart. This module finds, for each value, the axes that norms
reduce. Each index of the other axes has a scale of its own. A product of two
activations with batch axes scales its result in the same way, once for each index.
"""

import dataclasses
import itertools
import math
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, final

from dafjax import config
from dafjax._plan.analysis import find_given
from dafjax._trace.axis_rules import IN_ORDER
from dafjax._trace.equation import Equation
from dafjax._trace.graph import readers_of
from dafjax._trace.residuals import Program


# The axes of an array, each as factors: their lengths, and whether a norm reduces them.
_Factor: TypeAlias = tuple[int, bool]
_Axes: TypeAlias = tuple[tuple[_Factor, ...], ...]
# A value, and some of its axes.
_Reduction: TypeAlias = tuple[int, tuple[int, ...]]


@final
@dataclasses.dataclass(frozen=True)
class Extent:
    """The part of an array that shares one scale.

    Attributes:
        axes: The factors of each axis of the array. A norm keeps some apart, and sums
            over the others.
        is_centered: Whether the norm subtracts a mean over the extent.
    """

    axes: _Axes
    is_centered: bool = False

    @property
    def view(self) -> tuple[int, ...]:
        """The shape of the array if each factor is an axis of its own."""
        return tuple(length for length, _ in self._factors)

    @property
    def reduced(self) -> tuple[int, ...]:
        """The axes of the view that share a scale."""
        return tuple(n for n, (_, is_reduced) in enumerate(self._factors) if is_reduced)

    @property
    def size(self) -> int:
        """How many elements share a scale."""
        return math.prod(length for length, is_reduced in self._factors if is_reduced)

    def keeps(self, axis: int) -> bool:
        """Returns whether each index of an axis of the array has scales of its own."""
        return not any(is_reduced for _, is_reduced in self.axes[axis])

    @property
    def is_worth_a_scale(self) -> bool:
        """Whether a scale costs little beside the codes of so many elements."""
        return self.size >= config.FEWEST_PER_SCALE

    @property
    def kept_strides(self) -> Iterable[tuple[int, int]]:
        """Yields the length and the stride of each factor that is kept apart."""
        stride = 1
        for length, is_reduced in reversed(self._factors):
            if not is_reduced and length > 1:
                yield length, stride
            stride *= length

    @property
    def _factors(self) -> tuple[_Factor, ...]:
        return tuple(itertools.chain.from_iterable(self.axes))


def extent_of_rows(shape: tuple[int, ...]) -> Extent:
    """Returns an extent for each row: an index of all axes but the last."""
    *leading, length = shape
    return Extent((*(((n, False),) for n in leading), ((length, True),)))


def extent_of_examples(shape: tuple[int, ...]) -> Extent:
    """Returns an extent for each example, or one for all if examples are small."""
    axes = tuple(((n, axis > 0 or len(shape) == 1),) for axis, n in enumerate(shape))
    if Extent(axes).is_worth_a_scale:
        return Extent(axes)
    return Extent(tuple(((n, True),) for n in shape))


def extent_of_channels(shape: tuple[int, ...]) -> Extent:
    """Returns an extent for each channel: an index of the last axis."""
    *leading, length = shape
    return Extent((*(((n, True),) for n in leading), ((length, False),)))


def find_extents(program: Program) -> dict[int, Extent]:
    """Returns the extent of every value that the program normalizes later.

    A value has an extent if some statistic of it divides, or if such a statistic scales
    it. Of several extents, the smallest counts.
    """
    statistics, scales = _statistics_that_divide(program)
    found: dict[int, Extent] = {}
    for operand, axes in (*statistics, *_scaled(program, scales)):
        shape = program.avals[operand].shape
        factors = tuple(((n, axis in axes),) for axis, n in enumerate(shape))
        _follow(program, operand, Extent(factors), found)
    for value, extent in _of_batched_products(program):
        known = found.get(value)
        if extent.is_worth_a_scale and (known is None or extent.size < known.size):
            found[value] = extent
    return found


def find_statistics(program: Program) -> frozenset[int]:
    """Returns the sums and maxima that divide, with what follows from them."""
    return _statistics_that_divide(program)[1]


def find_apart(program: Program, extents: Mapping[int, Extent]) -> Iterator[int]:
    """Yields the normalized results of convolutions that mix few channels.

    In its backward pass, a norm subtracts the part of a cotangent along the normalized
    values, and rounding turns this part round a little. A product of many channels
    mixes these errors with those of other channels. A depthwise convolution passes them
    on. The mask of the ReLU before it is much like the values after it, so that errors
    add up in the gradients of that layer, and the gradients themselves almost cancel.
    """
    for eqn in program.forward:
        if eqn.primitive == "conv_general_dilated" and _mixes_few_channels(eqn):
            (value,) = eqn.outputs
            channels = eqn.params["dimension_numbers"].out_spec[1]
            if value in extents and extents[value].keeps(channels):
                yield value


def _mixes_few_channels(eqn: Equation) -> bool:
    kernel: Any = eqn.jaxpr.eqns[0].invars[1].aval
    channels = kernel.shape[eqn.params["dimension_numbers"].rhs_spec[1]]
    return eqn.params["feature_group_count"] > 1 and channels < config.MANY_TERMS


def _of_batched_products(program: Program) -> Iterator[tuple[int, Extent]]:
    """Yields the values that a product scales anew for each index of its batch axes.

    In the output of a state space model each step multiplies the states by a vector of
    its own. The product of activations with weights has no such vectors.

    Yields:
        Results of such products, and elementwise functions of them; with the extent.
    """
    given = find_given(program, range(program.num_arguments))
    scaled: dict[int, Extent] = {}
    for eqn in program.forward:
        if eqn.primitive == "dot_general" and given.isdisjoint(eqn.input_values):
            (value,) = eqn.outputs
            _, (batch, _) = eqn.params["dimension_numbers"]
            axes = enumerate(program.avals[value].shape)
            scaled[value] = Extent(tuple(((n, a >= len(batch)),) for a, n in axes))
        elif eqn.rule.is_elementwise:
            shapes = {program.avals[v].shape for v in eqn.outputs}
            for operand in eqn.input_values:
                if operand in scaled and {program.avals[operand].shape} == shapes:
                    scaled.update((v, scaled[operand]) for v in eqn.outputs)
    yield from scaled.items()


def _scaled(program: Program, scales: Container[int]) -> Iterator[_Reduction]:
    """Yields each value that scales multiply or divide, and the axes of one scale."""
    for eqn in program.forward:
        if eqn.primitive not in ("mul", "div"):
            continue
        first, second = eqn.operand_atoms
        for value, scale in ((first, second), (second, first)):
            if not (isinstance(value, int) and isinstance(scale, int)):
                continue
            shape, of_scale = (program.avals[v].shape for v in (value, scale))
            if scale not in scales or len(shape) != len(of_scale):
                continue
            axes = tuple(a for a, n in enumerate(shape) if of_scale[a] < n)
            if axes:
                yield value, axes


def _follow(
    program: Program,
    value: int,
    extent: Extent,
    found: dict[int, Extent],
) -> None:
    """Notes the extent of a value, and of the values it is cheaply computed from."""
    stack = [(value, extent)]
    while stack:
        value, extent = stack.pop()
        known = found.get(value)
        if known is not None and known.size <= extent.size:
            if known.axes == extent.axes and extent.is_centered > known.is_centered:
                found[value] = extent
            else:
                continue
        eqn = program.producers.get(value)
        if eqn is not None and eqn.primitive in _BOUNDED:
            continue
        if extent.is_worth_a_scale:
            found[value] = extent
        if eqn is not None:
            stack.extend(_operands(program, eqn, value, extent))


# All results of these primitives have the same scale.
_BOUNDED = frozenset(["bounded_exp", "exp", "logistic", "tanh"])


def _operands(
    program: Program,
    eqn: Equation,
    value: int,
    extent: Extent,
) -> list[tuple[int, Extent]]:
    """Returns the operands that carry the scales of an equation's result."""
    shape = program.avals[value].shape
    if eqn.rule.is_elementwise:
        if eqn.primitive == "sub":
            first, second = eqn.operand_atoms
            centers = isinstance(second, int) and _is_mean(program, second, extent)
            if centers and isinstance(first, int):
                return [(first, dataclasses.replace(extent, is_centered=True))]
        alike = [v for v in eqn.input_values if program.avals[v].shape == shape]
        return [(v, extent) for v in alike]
    carry = _CARRIES.get(eqn.primitive)
    if carry is None or not eqn.input_values:
        return []
    operand = eqn.input_values[0]
    axes = carry(eqn, value, program.avals[operand].shape, extent.axes)
    return [] if axes is None else [(operand, dataclasses.replace(extent, axes=axes))]


def _is_mean(program: Program, value: int, extent: Extent) -> bool:
    """Returns whether a value, broadcast or not, has one number for each extent."""
    eqn = program.producers.get(value)
    while eqn is not None and eqn.rule.is_cheap and eqn.primitive != "reduce_sum":
        eqn = program.producers.get(eqn.input_values[0]) if eqn.input_values else None
    if eqn is None or eqn.primitive != "reduce_sum":
        return False
    num_extents = math.prod(extent.view) // extent.size
    return program.avals[eqn.outputs[0]].size == num_extents


def _statistics_that_divide(
    program: Program,
) -> tuple[list[_Reduction], frozenset[int]]:
    """Returns the reductions whose results, or cheap functions of them, divide.

    Returns two things: for each such reduction, the value that it reduces and the
    reduced axes; and the set of all results, with the values that follow from them
    before they are broadcast to more elements.
    """
    readers = readers_of(program.forward)
    # The number of elements that each value is computed from, before broadcasts.
    sizes = {v: math.prod(aval.shape) for v, aval in enumerate(program.avals)}
    for eqn in program.forward:
        if eqn.primitive in IN_ORDER or eqn.rule.is_elementwise:
            of = max((sizes[v] for v in eqn.input_values), default=0)
            sizes.update((v, min(of, sizes[v])) for v in eqn.outputs)

    def follow(reduction: Equation) -> tuple[bool, set[int]]:
        (start,) = reduction.outputs
        size = program.avals[start].size
        stack, seen, divides = [start], {start}, False
        while stack:
            value = stack.pop()
            for eqn in readers[value]:
                divides |= eqn.primitive in _INVERTING or eqn.divisor == value
                small = all(sizes[v] <= size for v in eqn.input_values)
                follows = eqn.is_tame or eqn.is_amplifying
                if follows and small:
                    stack.extend(v for v in eqn.outputs if v not in seen)
                    seen.update(eqn.outputs)
        return divides, seen

    found, scales = [], set()
    for eqn in program.forward:
        reduction = _reduction(eqn)
        if reduction is None:
            continue
        divides, following = follow(eqn)
        if divides:
            found.append(reduction)
            scales |= following
    return found, frozenset(scales)


_INVERTING = frozenset(["pow", "rsqrt"])


def _reduction(eqn: Equation) -> _Reduction | None:
    """Returns the value that an equation reduces, and the axes, if it reduces one."""
    if eqn.primitive in ("reduce_sum", "reduce_max") and eqn.input_values:
        return eqn.input_values[0], tuple(eqn.params["axes"])
    if eqn.primitive == "dot_general":
        first, second = eqn.operand_atoms
        (contracted, of_second), (batch, of_other) = eqn.params["dimension_numbers"]
        same = (tuple(contracted), tuple(batch)) == (tuple(of_second), tuple(of_other))
        if isinstance(first, int) and first == second and same:
            return first, tuple(contracted)
    return None


def _carry_axes(
    eqn: Equation, value: int, shape: tuple[int, ...], axes: _Axes
) -> _Axes:
    """Returns the axes of an array that is transposed or reduced."""
    del value
    (written,) = eqn.jaxpr.eqns
    places = (eqn.rule.axis_after(written, 0, axis) for axis in range(len(shape)))
    return tuple(
        ((length, True),) if place is None else axes[place]
        for length, place in zip(shape, places, strict=True)
    )


def _carry_order(
    eqn: Equation, value: int, shape: tuple[int, ...], axes: _Axes
) -> _Axes | None:
    """Returns the axes of an array that has the same elements in the same order."""
    del value
    factors = list(itertools.chain.from_iterable(axes))
    is_permuted = eqn.primitive == "reshape" and eqn.params["dimensions"] is not None
    if is_permuted or math.prod(shape) != math.prod(length for length, _ in factors):
        return None
    return _regroup(factors, shape)


def _carry_slice(
    eqn: Equation, value: int, shape: tuple[int, ...], axes: _Axes
) -> _Axes | None:
    """Returns the axes of an array, given the axes of a slice of it."""
    if eqn.params["strides"] is not None and set(eqn.params["strides"]) != {1}:
        return None
    return _widen(axes, shape, eqn.params["start_indices"])


def _carry_split(
    eqn: Equation, value: int, shape: tuple[int, ...], axes: _Axes
) -> _Axes | None:
    starts = [0] * len(shape)
    sizes = eqn.params["sizes"]
    variable = eqn.jaxpr.outvars[eqn.outputs.index(value)]
    place = next(n for n, v in enumerate(eqn.jaxpr.eqns[0].outvars) if v is variable)
    starts[eqn.params["axis"]] = sum(sizes[:place])
    return _widen(axes, shape, starts)


def _widen(axes: _Axes, shape: tuple[int, ...], starts: Sequence[int]) -> _Axes | None:
    """Returns the axes of an array, given the axes of a slice; None if none fit."""
    found = []
    for factors, length, start in zip(axes, shape, starts, strict=True):
        part = math.prod(n for n, _ in factors)
        if part == length:
            found.append(factors)
            continue
        # The factors after the first one repeat along the whole axis.
        first, *rest = factors if not factors[0][1] else ((1, False), *factors)
        unit = math.prod(n for n, _ in rest)
        if length % unit or start % unit:
            return None
        found.append(((length // unit, first[1]), *rest))
    return tuple(found)


def _regroup(factors: Iterable[_Factor], shape: tuple[int, ...]) -> _Axes | None:
    """Returns the factors, in order, as axes of a shape; None if they do not fit."""
    remaining = [factor for factor in factors if factor[0] != 1][::-1]
    axes = []
    for length in shape:
        of_axis: list[_Factor] = []
        left = length
        while left > 1:
            n, is_reduced = remaining.pop()
            taken = n if left % n == 0 else left if n % left == 0 else 0
            if not taken:
                return None
            if n > taken:
                remaining.append((n // taken, is_reduced))
            of_axis.append((taken, is_reduced))
            left //= taken
        axes.append(tuple(_merged(of_axis)) or ((length, False),))
    return tuple(axes)


def _merged(factors: Iterable[_Factor]) -> list[_Factor]:
    merged: list[_Factor] = []
    for length, is_reduced in factors:
        if merged and merged[-1][1] == is_reduced:
            length *= merged.pop()[0]
        merged.append((length, is_reduced))
    return merged


_CARRIES = {
    **dict.fromkeys(IN_ORDER, _carry_order),
    "reduce_max": _carry_axes,
    "reduce_sum": _carry_axes,
    "slice": _carry_slice,
    "split": _carry_split,
    "transpose": _carry_axes,
}
