"""Where an axis of an operand lies in the results of a primitive.

A rule takes an equation, the number of an operand, and one of its axes. It returns an
axis of the results, or `None`. Elements of the results at one place of that axis are
computed from elements of the operand at the same place only, as long as both axes have
the same length. (A slice may be shorter.)

A row is one index of the first axis.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from jax.extend.core import JaxprEqn


Params: TypeAlias = Mapping[str, Any]
AxisRule: TypeAlias = Callable[[JaxprEqn, int, int], int | None]
SumRule: TypeAlias = Callable[[Params], Iterator[tuple[int, ...]]]

# They keep elements in order, and change the shape.
IN_ORDER = ("broadcast_in_dim", "reshape", "squeeze")
# Parameters that hold the lengths of a result's axes.
LENGTHS = ("shape", "new_sizes", "limit_indices", "slice_sizes")


def shape_of(atom: Any) -> tuple[int, ...]:
    """Returns the shape of an operand or a result; `()` for a token."""
    return tuple(getattr(atom.aval, "shape", ()))


def stays(eqn: JaxprEqn, operand: int, axis: int) -> int | None:
    """All axes are axes of the results."""
    del eqn, operand
    return axis


def is_not_along(name: str) -> AxisRule:
    """All axes stay but those that a parameter names."""

    def rule(eqn: JaxprEqn, operand: int, axis: int) -> int | None:
        del operand
        return None if axis in _axes(eqn.params[name]) else axis

    return rule


def is_not_removed(name: str) -> AxisRule:
    """The results lack the axes that a parameter names."""

    def rule(eqn: JaxprEqn, operand: int, axis: int) -> int | None:
        del operand
        removed = _axes(eqn.params[name])
        return None if axis in removed else axis - sum(a < axis for a in removed)

    return rule


def _axes(named: int | Sequence[int]) -> Sequence[int]:
    return named if isinstance(named, Sequence) else (named,)


def after_stack(eqn: JaxprEqn, operand: int, axis: int) -> int | None:
    """The rule of `stack`, which adds an axis."""
    del operand
    return axis + (axis >= eqn.params["axis"])


def after_pad(eqn: JaxprEqn, operand: int, axis: int) -> int | None:
    """The rule of `pad`."""
    del operand
    return axis if eqn.params["padding_config"][axis] == (0, 0, 0) else None


def is_before_matrices(eqn: JaxprEqn, operand: int, axis: int) -> int | None:
    """The batch axes of matrices stay."""
    return axis if axis < len(shape_of(eqn.invars[operand])) - 2 else None


def is_not_transformed(eqn: JaxprEqn, operand: int, axis: int) -> int | None:
    """The axes before the transformed ones stay."""
    num_before = len(shape_of(eqn.invars[operand])) - len(eqn.params["fft_lengths"])
    return axis if axis < num_before else None


def is_within_windows(eqn: JaxprEqn, operand: int, axis: int) -> int | None:
    """The axes along which each window has one element stay."""
    del operand
    params = eqn.params
    dilation = params.get("base_dilation")
    is_dilated = dilation is not None and dilation[axis] != 1
    is_padded = params["padding"][axis] != (0, 0)
    is_alone = params["window_dimensions"][axis] == 1 and not (is_dilated or is_padded)
    return axis if is_alone else None


def after_broadcast(eqn: JaxprEqn, operand: int, axis: int) -> int | None:
    """The rule of `broadcast_in_dim`. Its other operands are lengths."""
    return None if operand else eqn.params["broadcast_dimensions"][axis]


def after_reshape(eqn: JaxprEqn, operand: int, axis: int) -> int | None:
    """The rule of `reshape`: an axis that is one of the result stays apart."""
    shape, result = shape_of(eqn.invars[operand]), shape_of(eqn.outvars[0])
    if eqn.params["dimensions"] is not None:
        return None
    before = math.prod(shape[:axis])
    same = (
        place
        for place, length in enumerate(result)
        if length == shape[axis] and math.prod(result[:place]) == before
    )
    return next(same, None)


def after_transpose(eqn: JaxprEqn, operand: int, axis: int) -> int | None:
    """The rule of `transpose`."""
    del operand
    return eqn.params["permutation"].index(axis)


def after_product(eqn: JaxprEqn, operand: int, axis: int) -> int | None:
    """The rule of `dot_general`: batch axes, then free ones, are axes of the result."""
    contracted, batch = eqn.params["dimension_numbers"]
    if axis in contracted[operand]:
        return None
    if axis in batch[operand]:
        return batch[operand].index(axis)
    bound = (*contracted[operand], *batch[operand])
    place = len(batch[0]) + axis - sum(a < axis for a in bound)
    if operand == 0:
        return place
    return place + len(shape_of(eqn.invars[0])) - len(contracted[0]) - len(batch[0])


def after_convolution(eqn: JaxprEqn, operand: int, axis: int) -> int | None:
    """The rule of `conv_general_dilated`: each image is convolved by itself."""
    numbers = eqn.params["dimension_numbers"]
    is_of_images = operand == 0 and axis == numbers.lhs_spec[0]
    is_apart = is_of_images and eqn.params["batch_group_count"] == 1
    return numbers.out_spec[0] if is_apart else None


def sums_axes(params: Params) -> Iterator[tuple[int, ...]]:
    """The axes over which `reduce_sum` sums."""
    return ((axis,) for axis in params["axes"])


def sums_products(params: Params) -> Iterator[tuple[int, ...]]:
    """The axes of both operands over which `dot_general` sums."""
    contracted, _ = params["dimension_numbers"]
    return zip(*contracted, strict=True)


def sums_convolutions(params: Params) -> Iterator[tuple[int, ...]]:
    """The axes of images and kernel over which a convolution sums."""
    numbers = params["dimension_numbers"]
    if params["batch_group_count"] * params["feature_group_count"] == 1:
        yield numbers.lhs_spec[1], numbers.rhs_spec[1]
