"""What dafjax knows of JAX's primitives: `OPS`, one row per primitive.

To support a primitive, add a row. A primitive without a row is expensive, and
an error of its operands may change its result in any way: its result is saved.
`tests/test_rules.py` checks that every primitive of `jax.lax` has a row.
"""

import dataclasses
import enum
import math
from collections.abc import Mapping
from typing import Any, final

from jax.extend.core import JaxprEqn

from dafjax import config
from dafjax._trace import axis_rules
from dafjax._trace.axis_rules import AxisRule, SumRule


class Cost(enum.Enum):
    """The cost of running a primitive again."""

    # Little beside a matrix product of the same size.
    CHEAP = enum.auto()
    # A matrix product or a convolution.
    PRODUCT = enum.auto()
    # Random bits: expensive, but the same from the same key.
    DRAW = enum.auto()
    EXPENSIVE = enum.auto()


class Error(enum.IntEnum):
    """The effect of a small operand error on the result; larger is worse."""

    # It stays small. The function has no pole, and no edge with an infinite slope.
    SMOOTH = 0
    # It stays small, but away from a pole or an edge only.
    CONTINUOUS = 1
    # It can become huge. Recomputed from 2-bit logits, a softmax was off by a factor of
    # 10^5. With a pole, the code of a value near the pole may lie beyond it.
    AMPLIFIED = 2
    # The result is an integer or a boolean, or jumps.
    JUMPS = 3
    # The result flips even where a recomputed operand rounds differently.
    FLIPS = 4
    # No error is allowed: the operands must be exact. The result tells where an element
    # is, or an operand is a matrix that divides.
    NEEDS_EXACT = 5


class Operands(enum.Enum):
    """The operands in which a primitive is linear while the others are fixed."""

    NONE = enum.auto()
    ALL = enum.auto()
    FIRST = enum.auto()
    ALL_BUT_FIRST = enum.auto()

    def of(self, num_operands: int) -> range:
        """Returns the numbers of these operands."""
        starts = {Operands.NONE: num_operands, Operands.ALL_BUT_FIRST: 1}
        stop = 1 if self is Operands.FIRST else num_operands
        return range(starts.get(self, 0), stop)


class Elements(enum.Flag):
    """How elements of a result relate to elements of the operands."""

    # In any way, as in a sum over an axis.
    MIXED = 0
    # Each is computed from the elements at the same place. (Of operands with length 1
    # along an axis, that element stands for all.)
    EACH = enum.auto()
    # They are the elements of the operand: moved, repeated, converted ...
    COPIED = enum.auto()
    # ... or negated.
    NEGATED = enum.auto()
    # `COPIED`, and at the same place: only the devices that hold them change.
    PLACED = enum.auto()
    # `COPIED`, at the same place in another dtype.
    CONVERTED = enum.auto()
    # They are elements of several operands, or of one among zeros.
    JOINED = enum.auto()
    # They are some elements of the first operand: a part cut out of it.
    SLICED = enum.auto()
    # They are some elements of the first operand, chosen by indices.
    LOOKED_UP = enum.auto()
    # They are elements of the operands, in another way than the above.
    MOVED = enum.auto()


class Ends(enum.Enum):
    """Whether many elements of a result lie at an end of its range, or near it."""

    NO = enum.auto()
    # Yes: they are at their least or greatest value; some may be a thousand times
    # farther away. (A logistic function reaches its bounds for large operands only.)
    YES = enum.auto()
    # If elements of all operands do.
    AS_OPERANDS = enum.auto()


class Combines(enum.Enum):
    """Which arithmetic a primitive does with several operands."""

    OTHER = enum.auto()
    ADD = enum.auto()
    SUBTRACT = enum.auto()
    MULTIPLY = enum.auto()


class Lowering(enum.Flag):
    """How XLA:CPU runs a primitive. The memory model (`dafjax/_memory/`) reads it."""

    # In a kernel of its own, which writes its results to memory.
    OWN_KERNEL = 0
    # In the kernels that read its result. It can compute its operands, too.
    FUSED = enum.auto()
    # In one such kernel only: several would compute it several times.
    ONCE = enum.auto()
    # It gives a written operand another shape, and moves nothing.
    RESHAPE = enum.auto()
    # It repeats elements.
    BROADCAST = enum.auto()
    # It reorders axes. A matrix product does that to its own result.
    TRANSPOSE = enum.auto()
    # It sums over axes, or the like. It computes operands that nothing else reads.
    REDUCTION = enum.auto()
    # It multiplies matrices, in a library.
    MATRIX_PRODUCT = enum.auto()
    # It writes into the buffer of its first operand.
    IN_PLACE = enum.auto()
    # It does not run: its results are its operands.
    IDENTITY = enum.auto()


@final
@dataclasses.dataclass(frozen=True)
class OpRule:
    """What dafjax knows of a primitive.

    Attributes:
        cost: The cost of running it again.
        error: The effect of a small operand error.
        linear_in: The operands that enter linearly. A product is linear in each
            operand, as long as the other one does not depend on it.
        elements: How elements of the result relate to elements of the operands.
        ends: Whether many elements of the result lie at an end of its range.
        combines: Its arithmetic.
        degree: The degree of a result that is homogeneous, but not linear, in all its
            operands together; `None` if it is not.
        least: The least result for real operands, if there is one.
        lowering: How XLA:CPU runs it.
        complex_error: `error` for complex numbers, if it is another.
        limit: The magnitude of an operand beyond which a result is constant, to the
            last bit of a float32.
        is_copied_before: Whether XLA copies the operands into another layout first.
        axes: Where an axis of an operand lies in the results (`axis_rules.py`); `None`
            if that is not known. Elementwise primitives need no such rule.
        runs_in_chunks: Whether it runs on chunks of rows as `axes` says. Elementwise
            primitives do.
        sums: Given its parameters, the axes of its operands over which it sums.
    """

    cost: Cost = Cost.EXPENSIVE
    error: Error = Error.JUMPS
    linear_in: Operands = Operands.NONE
    elements: Elements = Elements.MIXED
    ends: Ends = Ends.NO
    combines: Combines = Combines.OTHER
    degree: float | None = None
    least: float | None = None
    lowering: Lowering = Lowering.OWN_KERNEL
    complex_error: Error | None = None
    limit: float = math.inf
    is_copied_before: bool = False
    axes: AxisRule | None = None
    runs_in_chunks: bool = False
    sums: SumRule | None = None

    @property
    def is_cheap(self) -> bool:
        """Whether running it again costs little beside a product."""
        return self.cost is Cost.CHEAP

    @property
    def is_product(self) -> bool:
        """Whether it is a matrix product or a convolution."""
        return self.cost is Cost.PRODUCT

    @property
    def is_elementwise(self) -> bool:
        """Whether each element is computed from the elements at the same place."""
        return Elements.EACH in self.elements

    @property
    def keeps_values(self) -> bool:
        """Whether all elements of the result are elements of the operand."""
        return Elements.COPIED in self.elements

    @property
    def keeps_magnitudes(self) -> bool:
        """Whether elements are only moved, repeated, converted or negated."""
        return bool(self.elements & (Elements.COPIED | Elements.NEGATED))

    @property
    def slices(self) -> bool:
        """Whether results are parts of the first operand."""
        return Elements.SLICED in self.elements

    @property
    def joins(self) -> bool:
        """Whether a result has elements of several operands, or zeros beside them."""
        return Elements.JOINED in self.elements

    @property
    def adds(self) -> bool:
        """Whether it adds or subtracts its operands."""
        return self.combines in (Combines.ADD, Combines.SUBTRACT)

    @property
    def adds_or_moves(self) -> bool:
        """Whether each element is one of the operands' elements, or a sum of some."""
        return self.adds or self.keeps_magnitudes or self.slices or self.joins

    @property
    def converts(self) -> bool:
        """Whether the result is the operand in another dtype."""
        return Elements.CONVERTED in self.elements

    @property
    def looks_up(self) -> bool:
        """Whether indices choose the result's elements from the first operand."""
        return Elements.LOOKED_UP in self.elements

    def axis_after(self, eqn: JaxprEqn, operand: int, axis: int) -> int | None:
        """Returns where an axis of an operand lies in the results (`axis_rules.py`)."""
        if self.axes is not None:
            return self.axes(eqn, operand, axis)
        return axis if self.is_elementwise else None

    def error_of(self, *, is_complex: bool) -> Error:
        """Returns the effect of a small error, for complex or for real numbers."""
        complex_error = self.complex_error if is_complex else None
        return self.error if complex_error is None else complex_error

    def is_tame(self, *, is_complex: bool = False) -> bool:
        """Returns whether it is cheap, and a small error of an operand stays small."""
        return self.is_cheap and self.error_of(is_complex=is_complex) <= (
            Error.CONTINUOUS
        )

    def is_amplifying(self, *, is_complex: bool = False) -> bool:
        """Returns whether a small error of an operand can become a huge one."""
        return self.error_of(is_complex=is_complex) is Error.AMPLIFIED

    def ends_given(self, operands_do: bool) -> bool:
        """Returns whether many elements of the result lie at an end of its range.

        Args:
            operands_do: Whether elements of all its operands do.
        """
        return self.ends is Ends.YES or (operands_do and self.ends is Ends.AS_OPERANDS)

    def is_reduction(self, num_elements: int, reduced_from: int) -> bool:
        """Returns whether a result is too small beside an operand to be compressed.

        Args:
            num_elements: Elements of the result.
            reduced_from: Elements of the largest operand.
        """
        # A slice is no statistic: a sixteenth takes as many bytes as the whole in 2
        # bits.
        counted = 2 * num_elements if self.slices else num_elements
        return self.is_cheap and is_much_smaller(counted, reduced_from)


def is_much_smaller(num_elements: int, than: int) -> bool:
    """Returns whether a value has so few elements that it may be saved as it is.

    Such is a statistic beside the array that it describes, even if that is a group of 8
    channels: the number that a norm divides by must be exact.
    """
    return num_elements * config.STATISTIC_OF <= than


def _in_chunks(axes: AxisRule) -> dict[str, Any]:
    return {"axes": axes, "runs_in_chunks": True}


_REDUCED = _in_chunks(axis_rules.is_not_removed("axes"))
_ALONG = _in_chunks(axis_rules.is_not_along("axis"))
_WINDOWS = _in_chunks(axis_rules.is_within_windows)
_SLICES = _in_chunks(axis_rules.stays)
_MATRICES = OpRule(axes=axis_rules.is_before_matrices)
_ALL_AXES: dict[str, Any] = {"axes": axis_rules.stays}

_CHEAP, _PRODUCT, _DRAW = Cost.CHEAP, Cost.PRODUCT, Cost.DRAW
_ALL, _FIRST, _REST = Operands.ALL, Operands.FIRST, Operands.ALL_BUT_FIRST
_EACH, _COPIED, _PLACED = Elements.EACH, Elements.COPIED, Elements.PLACED
_JOINED, _SLICED, _MOVED = Elements.JOINED, Elements.SLICED, Elements.MOVED
_ADD, _MULTIPLY = Combines.ADD, Combines.MULTIPLY
_FUSED, _ONCE = Lowering.FUSED, Lowering.FUSED | Lowering.ONCE
_RESHAPE, _TRANSPOSE = _FUSED | Lowering.RESHAPE, _FUSED | Lowering.TRANSPOSE
_IN_PLACE, _IDENTITY = Lowering.IN_PLACE, Lowering.IDENTITY

# Rows that several primitives share.
_UNKNOWN = OpRule()
_SMOOTH = OpRule(_CHEAP, Error.SMOOTH, elements=_EACH, lowering=_FUSED)
# A function with a power series for real numbers, with poles for complex ones.
_SERIES = OpRule(
    *(_CHEAP, Error.SMOOTH),
    elements=_EACH,
    lowering=_ONCE,
    complex_error=Error.AMPLIFIED,
)
_CONTINUOUS = OpRule(_CHEAP, Error.CONTINUOUS, elements=_EACH, lowering=_ONCE)
_AMPLIFYING = OpRule(_CHEAP, Error.AMPLIFIED, elements=_EACH, lowering=_ONCE)
_JUMPS = OpRule(_CHEAP, Error.JUMPS, elements=_EACH, lowering=_FUSED)
_FLIPS = OpRule(_CHEAP, Error.FLIPS, elements=_EACH, lowering=_FUSED)
_LINEAR = OpRule(_CHEAP, Error.SMOOTH, _ALL, _EACH, lowering=_FUSED)
_INTEGERS = OpRule(_CHEAP, Error.JUMPS)
_COPY = OpRule(_CHEAP, Error.SMOOTH, _ALL, _COPIED, Ends.AS_OPERANDS)
_PLACE = OpRule(_CHEAP, Error.SMOOTH, _ALL, _COPIED | _PLACED, Ends.AS_OPERANDS)
_MOVE = OpRule(_CHEAP, Error.SMOOTH, _ALL, _MOVED, Ends.AS_OPERANDS)
_JOIN = OpRule(_CHEAP, Error.SMOOTH, _ALL, _JOINED, Ends.AS_OPERANDS)
_SLICE = OpRule(_CHEAP, Error.SMOOTH, _ALL, _SLICED, Ends.AS_OPERANDS)
_OF_WINDOWS = OpRule(_CHEAP, Error.CONTINUOUS)
_REDUCTION = OpRule(_CHEAP, Error.CONTINUOUS, lowering=Lowering.REDUCTION)


def _row(rule: OpRule, **changes: Any) -> OpRule:
    return dataclasses.replace(rule, **changes)


OPS: Mapping[str, OpRule] = {
    # Sums, products and linear functions of each element.
    "add": _row(_LINEAR, combines=_ADD, ends=Ends.AS_OPERANDS),
    "add_any": _row(_LINEAR, combines=_ADD, ends=Ends.AS_OPERANDS),
    "complex": _LINEAR,
    "conj": _LINEAR,
    "convert_element_type": _row(
        _LINEAR,
        elements=_EACH | _COPIED | Elements.CONVERTED,
        ends=Ends.AS_OPERANDS,
    ),
    "copy": _row(_LINEAR, elements=_EACH | _COPIED, ends=Ends.AS_OPERANDS),
    "div": _row(_CONTINUOUS, linear_in=_FIRST, ends=Ends.AS_OPERANDS),
    "imag": _LINEAR,
    "mul": _row(_LINEAR, combines=_MULTIPLY, ends=Ends.AS_OPERANDS),
    "neg": _row(_LINEAR, elements=_EACH | Elements.NEGATED),
    "real": _LINEAR,
    "reduce_precision": _row(
        _LINEAR, elements=_EACH | _COPIED, ends=Ends.AS_OPERANDS, lowering=_IDENTITY
    ),
    "select_n": _row(_SMOOTH, degree=1, linear_in=_REST, ends=Ends.AS_OPERANDS),
    "stop_gradient": _row(_LINEAR, lowering=_IDENTITY),
    "sub": _row(_LINEAR, combines=Combines.SUBTRACT),
    # Functions of each element without poles.
    "abs": _row(_SMOOTH, least=0, degree=1, ends=Ends.YES),
    "asinh": _SERIES,
    "atan": _SERIES,
    "clamp": _row(_SMOOTH, ends=Ends.YES),
    "cos": _SERIES,
    "erf": _row(_SERIES, least=-1, limit=4.0),
    "erfc": _row(_SERIES, least=0, ends=Ends.YES),
    "exp_neg_sq": _row(_SERIES, least=0, limit=10.5, ends=Ends.YES),
    # `Equation.error` knows that a negative power has a pole.
    "integer_pow": _row(_SMOOTH, ends=Ends.YES),
    # No limit: it goes to 0, and its logarithm goes on.
    "logistic": _row(_SERIES, least=0),
    "max": _row(_SMOOTH, degree=1, ends=Ends.YES),
    "min": _row(_SMOOTH, degree=1, ends=Ends.YES),
    "sin": _SERIES,
    "square": _row(_SMOOTH, least=0, degree=2, ends=Ends.YES),
    "polynomial": _row(_SMOOTH, linear_in=_REST),
    "tanh": _row(_SERIES, least=-1, limit=9.5),
    # With a pole, or an edge of infinite slope.
    "atan2": _CONTINUOUS,
    "cbrt": _row(_CONTINUOUS, degree=1 / 3, complex_error=Error.AMPLIFIED),
    "sqrt": _row(
        _CONTINUOUS, least=0, degree=0.5, complex_error=Error.AMPLIFIED, ends=Ends.YES
    ),
    # Exponentials and logarithms.
    "acos": _AMPLIFYING,
    "acosh": _AMPLIFYING,
    "asin": _AMPLIFYING,
    "atanh": _AMPLIFYING,
    "cosh": _row(_AMPLIFYING, least=1, ends=Ends.YES),
    "digamma": _AMPLIFYING,
    "erf_inv": _AMPLIFYING,
    "exp": _row(_AMPLIFYING, least=0, ends=Ends.YES),
    "exp2": _row(_AMPLIFYING, least=0, ends=Ends.YES),
    "expm1": _row(_AMPLIFYING, least=-1),
    "lgamma": _AMPLIFYING,
    "log": _AMPLIFYING,
    "log1p": _AMPLIFYING,
    "log2": _AMPLIFYING,
    "pow": _row(_AMPLIFYING, ends=Ends.YES),
    "rsqrt": _row(_AMPLIFYING, least=0, degree=-0.5, ends=Ends.YES),
    "sinh": _AMPLIFYING,
    "tan": _AMPLIFYING,
    # Comparisons, integers and bits.
    "and": _JUMPS,
    "ceil": _JUMPS,
    "eq": _FLIPS,
    "eq_to": _FLIPS,
    "floor": _JUMPS,
    "ge": _JUMPS,
    "gt": _JUMPS,
    "is_finite": _JUMPS,
    "le": _JUMPS,
    "le_to": _JUMPS,
    "lt": _JUMPS,
    "lt_to": _JUMPS,
    "ne": _FLIPS,
    "nextafter": _JUMPS,
    "not": _JUMPS,
    "or": _JUMPS,
    "rem": _row(_JUMPS, lowering=_ONCE),
    "round": _JUMPS,
    "shift_left": _JUMPS,
    "shift_right_arithmetic": _JUMPS,
    "shift_right_logical": _JUMPS,
    "sign": _JUMPS,
    "xor": _JUMPS,
    "argmax": _row(_INTEGERS, lowering=Lowering.REDUCTION, **_REDUCED),
    "argmin": _row(_INTEGERS, lowering=Lowering.REDUCTION, **_REDUCED),
    "bitcast_convert_type": _row(_INTEGERS, lowering=_FUSED, **_ALL_AXES),
    "clz": _INTEGERS,
    "mulhi": _INTEGERS,
    "population_count": _INTEGERS,
    # Elements moved as they are.
    "broadcast_in_dim": _row(
        _COPY,
        lowering=_FUSED | Lowering.BROADCAST,
        **_in_chunks(axis_rules.after_broadcast),
    ),
    "concatenate": _row(_JOIN, **_in_chunks(axis_rules.is_not_along("dimension"))),
    "device_put": _MOVE,
    "dynamic_slice": _row(_SLICE, lowering=_FUSED, **_SLICES),
    "dynamic_update_slice": _row(_JOIN, lowering=_FUSED | _IN_PLACE),
    "gather": _row(_MOVE, elements=Elements.LOOKED_UP, lowering=_FUSED),
    "iota": _row(_MOVE, lowering=_FUSED),
    "name": _row(_MOVE, elements=_MOVED | _PLACED, lowering=_IDENTITY, **_ALL_AXES),
    "pad": _row(_JOIN, lowering=_ONCE, **_in_chunks(axis_rules.after_pad)),
    "reshape": _row(_COPY, lowering=_RESHAPE, **_in_chunks(axis_rules.after_reshape)),
    "rev": _row(
        _COPY, lowering=_FUSED, **_in_chunks(axis_rules.is_not_along("dimensions"))
    ),
    "scatter": _row(_JOIN, lowering=_IN_PLACE),
    "slice": _row(_SLICE, lowering=_FUSED, **_SLICES),
    "split": _row(_SLICE, **_ALONG),
    "squeeze": _row(
        _COPY, lowering=_RESHAPE, **_in_chunks(axis_rules.is_not_removed("dimensions"))
    ),
    "stack": _row(_JOIN, axes=axis_rules.after_stack),
    "tile": _MOVE,
    "transpose": _row(
        _COPY, lowering=_TRANSPOSE, **_in_chunks(axis_rules.after_transpose)
    ),
    "unstack": _row(_SLICE, axes=axis_rules.is_not_removed("axis")),
    # Which device holds an array. A gathered weight is gathered again in the backward
    # pass: never saved whole, never compressed.
    "all_gather": _PLACE,
    "all_gather_invariant": _PLACE,
    "all_gather_reduced": _PLACE,
    "pbroadcast": _PLACE,
    "pvary": _PLACE,
    "reshard": _PLACE,
    "sharding_constraint": _row(_PLACE, lowering=_IDENTITY, **_ALL_AXES),
    # Reductions and cumulative ones.
    "cumlogsumexp": _row(_OF_WINDOWS, **_ALONG),
    "cummax": _row(_OF_WINDOWS, degree=1, **_ALONG),
    "cummin": _row(_OF_WINDOWS, degree=1, **_ALONG),
    "cumprod": _row(_OF_WINDOWS, error=Error.AMPLIFIED, **_ALONG),
    "cumsum": _row(
        _OF_WINDOWS,
        linear_in=_ALL,
        ends=Ends.AS_OPERANDS,
        **_ALONG,
    ),
    "reduce_and": _row(_REDUCTION, **_REDUCED),
    "reduce_max": _row(_REDUCTION, degree=1, ends=Ends.YES, **_REDUCED),
    "reduce_min": _row(_REDUCTION, degree=1, ends=Ends.YES, **_REDUCED),
    "reduce_or": _row(_REDUCTION, **_REDUCED),
    "reduce_prod": _row(_REDUCTION, error=Error.AMPLIFIED, **_REDUCED),
    "reduce_sum": _row(
        _REDUCTION,
        linear_in=_ALL,
        ends=Ends.AS_OPERANDS,
        **_REDUCED,
        sums=axis_rules.sums_axes,
    ),
    "reduce_window_max": _row(_OF_WINDOWS, degree=1, ends=Ends.YES, **_WINDOWS),
    "reduce_window_min": _row(_OF_WINDOWS, degree=1, ends=Ends.YES, **_WINDOWS),
    "reduce_window_sum": _row(
        _OF_WINDOWS, linear_in=_ALL, ends=Ends.AS_OPERANDS, **_WINDOWS
    ),
    # Products.
    "conv_general_dilated": OpRule(
        _PRODUCT,
        Error.SMOOTH,
        _ALL,
        combines=_MULTIPLY,
        is_copied_before=True,
        **_in_chunks(axis_rules.after_convolution),
        sums=axis_rules.sums_convolutions,
    ),
    "dot_general": OpRule(
        _PRODUCT,
        Error.SMOOTH,
        _ALL,
        combines=_MULTIPLY,
        lowering=Lowering.MATRIX_PRODUCT,
        **_in_chunks(axis_rules.after_product),
        sums=axis_rules.sums_products,
    ),
    "ragged_dot_general": OpRule(_PRODUCT, Error.SMOOTH, _ALL, combines=_MULTIPLY),
    # A `dot_general` that sums nothing: XLA multiplies elements in a fused kernel.
    "outer_product": OpRule(
        *(_CHEAP, Error.SMOOTH, _ALL),
        combines=_MULTIPLY,
        **_in_chunks(axis_rules.after_product),
    ),
    # Keys, small arrays that say which numbers are drawn, and drawing.
    "random_clone": _row(_INTEGERS, **_ALL_AXES),
    "random_fold_in": _row(_INTEGERS, **_ALL_AXES),
    "random_seed": _INTEGERS,
    "random_split": _INTEGERS,
    "random_unwrap": _row(_INTEGERS, lowering=_IDENTITY, **_ALL_AXES),
    "random_wrap": _row(_INTEGERS, lowering=_IDENTITY, **_ALL_AXES),
    "philox2x32": OpRule(_DRAW),
    "philox4x32": OpRule(_DRAW),
    "random_bits": OpRule(_DRAW, **_ALL_AXES),
    "rng_bit_generator": OpRule(_DRAW),
    "threefry2x32": OpRule(_DRAW),
    "threefry4x32": OpRule(_DRAW),
    # The gradient of max-pooling looks for the place of the maximum.
    "select_and_gather_add": OpRule(
        error=Error.NEEDS_EXACT, axes=axis_rules.is_within_windows
    ),
    "select_and_scatter_add": OpRule(
        error=Error.NEEDS_EXACT, axes=axis_rules.is_within_windows
    ),
    "sort": OpRule(error=Error.NEEDS_EXACT, axes=axis_rules.is_not_along("dimension")),
    # Matrices that divide: a code near 0 may decode to 0, and the rows of a factor can
    # differ by any scale.
    "custom_linear_solve": OpRule(error=Error.NEEDS_EXACT),
    "triangular_solve": _row(_MATRICES, error=Error.NEEDS_EXACT),
    "tridiagonal_solve": OpRule(error=Error.NEEDS_EXACT),
    "scatter-add": OpRule(linear_in=_ALL, elements=_JOINED, lowering=_IN_PLACE),
    # Nothing is known of these but where their axes lie.
    "cholesky": _MATRICES,
    "eigh": _MATRICES,
    "fft": OpRule(axes=axis_rules.is_not_transformed),
    "lu": _MATRICES,
    "qr": _MATRICES,
    "svd": _MATRICES,
    "top_k": OpRule(axes=axis_rules.is_not_along("axis")),
    # Nothing but the lowering is known of these.
    "optimization_barrier": OpRule(lowering=_IDENTITY),
    "reduce_xor": OpRule(lowering=Lowering.REDUCTION),
    "scatter-max": OpRule(lowering=_IN_PLACE),
    "scatter-min": OpRule(lowering=_IN_PLACE),
    "scatter-mul": OpRule(lowering=_IN_PLACE),
    "scatter-sub": OpRule(lowering=_IN_PLACE),
    # Primitives of dafjax.
    "dafjax_first_order": OpRule(lowering=_IDENTITY),
    "dafjax_pin": OpRule(lowering=_IDENTITY),
    "dafjax_pin_late": OpRule(lowering=_IDENTITY),
    "dafjax_row_major": OpRule(lowering=_IDENTITY),
    "dafjax_sum_groups": OpRule(lowering=Lowering.REDUCTION),
    "dafjax_sum_rows": OpRule(lowering=Lowering.REDUCTION),
    # Calls that dafjax's passes make.
    "bounded_exp": _row(_CONTINUOUS, least=0, ends=Ends.YES),
    "normalized": _row(_CONTINUOUS, linear_in=_FIRST),
    "one_minus_square": _SMOOTH,
    "phase": _row(_JUMPS, elements=_EACH | _PLACED),
    "pick_places": OpRule(linear_in=_REST),
    "scaled_back": _row(_CONTINUOUS, linear_in=_FIRST),
    "scaled_numerator": _row(_CONTINUOUS, linear_in=_FIRST),
    "select_rectified": _row(_SMOOTH, linear_in=_REST, ends=Ends.YES),
}

# Primitives that need no row: they are expensive, or stand for whole programs, or have
# effects, and nothing better is known of them. Listed so that a new primitive of JAX
# fails a test until someone decides about it.
WITHOUT_ROW = frozenset(
    [
        *("accum_grad_in_ref", "after_all", "all_gather_done"),
        *("all_gather_reduced_start", "all_gather_start", "all_to_all"),
        *("all_to_all_done", "all_to_all_start", "approx_top_k", "axis_index"),
        *("bessel_i0e", "bessel_i1e", "call", "call_hi_primitive", "checkpoint"),
        *("cholesky_update", "closed_call", "composite", "cond"),
        *("core_call", "create_token", "custom_jvp_call", "custom_jvp_call_jaxpr"),
        *("custom_lin", "custom_vjp_call"),
        *("custom_vjp_call_jaxpr", "custom_vmap_call", "dce_sink", "debug_callback"),
        *("debug_print", "eig", "empty", "empty2", "empty_ref", "eval_jaxpr"),
        *("ffi_call", "free_ref", "freeze", "from_edtype", "geqp3", "geqrf"),
        *("hessenberg", "householder_product", "igamma", "igamma_grad_a", "igammac"),
        *("inspect_sharding", "io_callback", "iota_2x32_shape", "jit"),
        *("layout_constraint", "linear_call", "lu_pivots_to_permutation"),
        *("new_ref", "ormqr", "pbroadcast_done"),
        *(
            "pbroadcast_dynamic",
            "pbroadcast_start",
            "pjit",
            "platform_index",
            "pmax",
            "pmin",
            "polygamma",
        ),
        *("ppermute", "ppermute_done", "ppermute_start", "precv", "preduced", "psend"),
        *("psum", "psum_done", "psum_invariant", "psum_invariant_start", "psum_start"),
        *("pure_callback", "ragged_all_to_all", "random_gamma", "reduce"),
        *("reduce_scatter", "reduce_scatter_done", "reduce_scatter_start"),
        *("reduce_window", "reduced_vary_cast", "reduced_vary_cast_p"),
        *("regularized_incomplete_beta", "relayout", "remat2", "remat_opt"),
        "rng_uniform",
        *("scaled_dot", "scan", "schur", "select_and_scatter", "shard_map", "stage"),
        *("symmetric_product", "tie", "to_edtype"),
        *("tridiagonal", "unreachable", "unreduced_pmax", "unreduced_pmin"),
        "unreduced_psum",
        *("unreduced_psum_start", "unreduced_reduce_scatter"),
        *("unreduced_reduce_scatter_start", "vary_unreduced_cast"),
        *("vary_unreduced_cast_p", "while"),
        *("zeros_like", "zeta"),
    ]
)


# Functions of JAX with a derivative rule that are read as primitives, not inlined.
# `exp_neg_sq` is the slope of `erf` since JAX 0.12. It splits a number by its bits, and
# bits of a number that is decoded from codes are not those of the exact number.
READ_AS_PRIMITIVES = frozenset({"exp_neg_sq"})


def rule_of(primitive: str) -> OpRule:
    """Returns the row of a primitive, or the row of unknown primitives."""
    return OPS.get(primitive, _UNKNOWN)
