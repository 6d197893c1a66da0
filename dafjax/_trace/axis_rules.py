"""Which axes a primitive keeps apart: for chunks of a batch, and for its examples.

An axis is kept if elements at different places along it stay apart. A row is one index
of the first axis.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias


Params: TypeAlias = Mapping[str, Any]
# Takes the parameters, an axis of the first operand, and the rank of that operand.
AxisRule: TypeAlias = Callable[[Params, int, int], bool]
RowRule: TypeAlias = Callable[[Params, Sequence[bool]], Sequence[bool] | None]


def always(params: Params, axis: int, rank: int) -> bool:
    """Keeps all axes that have their length in the result."""
    del params, axis, rank
    return True


def is_not_reduced(params: Params, axis: int, rank: int) -> bool:
    """Keeps the axes over which it does not reduce."""
    del rank
    return axis not in params["axes"]


def is_not_along(params: Params, axis: int, rank: int) -> bool:
    """Keeps the axes but that along which it works."""
    del rank
    return axis != params["axis"]


def is_not_sorted(params: Params, axis: int, rank: int) -> bool:
    """Keeps the axes but that along which it sorts."""
    del rank
    return axis != params["dimension"]


def is_not_among_dimensions(params: Params, axis: int, rank: int) -> bool:
    """Keeps the axes that it neither removes nor reverses."""
    del rank
    return axis not in params["dimensions"]


def is_not_padded(params: Params, axis: int, rank: int) -> bool:
    """Keeps the axes that it does not pad."""
    del rank
    return params["padding_config"][axis] == (0, 0, 0)


def is_not_transformed(params: Params, axis: int, rank: int) -> bool:
    """Keeps the axes before the transformed ones."""
    return axis < rank - len(params["fft_lengths"])


def is_before_matrices(params: Params, axis: int, rank: int) -> bool:
    """Keeps the batch axes of matrices."""
    del params
    return axis < rank - 2


def is_within_windows(params: Params, axis: int, rank: int) -> bool:
    """Keeps the axes along which each window has one element."""
    del rank
    dilation = params.get("base_dilation")
    is_dilated = dilation is not None and dilation[axis] != 1
    is_padded = params["padding"][axis] != (0, 0)
    return params["window_dimensions"][axis] == 1 and not (is_dilated or is_padded)


def rows_of_first(keeps: AxisRule) -> RowRule:
    """Returns the rule of a primitive that reads rows of its first operand alone.

    Args:
        keeps: Whether it keeps an axis. The rank does not matter for the first one.
    """

    def read(params: Params, have_rows: Sequence[bool]) -> Sequence[bool] | None:
        first, *others = have_rows
        is_kept = first and keeps(params, 0, 0)
        return [True, *(False for _ in others)] if is_kept else None

    return read


def joins_rows(params: Params, have_rows: Sequence[bool]) -> Sequence[bool] | None:
    """The rule of `concatenate`."""
    return have_rows if all(have_rows) and params["dimension"] != 0 else None


def reshapes_rows(params: Params, have_rows: Sequence[bool]) -> Sequence[bool] | None:
    """The rule of `reshape`."""
    return [True] if have_rows[0] and params["dimensions"] is None else None


def transposes_rows(params: Params, have_rows: Sequence[bool]) -> Sequence[bool] | None:
    """The rule of `transpose`."""
    return [True] if have_rows[0] and params["permutation"][0] == 0 else None


def broadcasts_rows(params: Params, have_rows: Sequence[bool]) -> Sequence[bool] | None:
    """The rule of `broadcast_in_dim`."""
    first, *others = have_rows
    return [params["broadcast_dimensions"][:1] == (0,) and first, *others]


def multiplies_rows(params: Params, have_rows: Sequence[bool]) -> Sequence[bool] | None:
    """The rule of `dot_general`."""
    (contracted, _), (batch, of_second) = params["dimension_numbers"]
    if have_rows[0] and not batch and 0 not in contracted:
        return [True, False]
    # One product for each row.
    return [True, True] if batch[:1] == of_second[:1] == (0,) else None


def convolves_rows(params: Params, have_rows: Sequence[bool]) -> Sequence[bool] | None:
    """The rule of `conv_general_dilated`."""
    numbers = params["dimension_numbers"]
    keeps_images = numbers.lhs_spec[0] == numbers.out_spec[0] == 0
    is_kept = keeps_images and params["batch_group_count"] == 1
    return [True, False] if have_rows[0] and is_kept else None


def sums_first_axis(params: Params) -> bool:
    """Whether `reduce_sum` sums over rows."""
    return 0 in params["axes"]


def sums_products(params: Params) -> bool:
    """Whether `dot_general` sums over the rows of both operands."""
    contracted, _ = params["dimension_numbers"]
    return (0, 0) in zip(*contracted, strict=True)


def sums_convolutions(params: Params) -> bool:
    """Whether a convolution sums over the rows of both operands."""
    numbers = params["dimension_numbers"]
    groups = params["batch_group_count"] * params["feature_group_count"]
    return numbers.lhs_spec[1] == numbers.rhs_spec[1] == 0 and groups == 1
