"""What is known of JAX's primitives: which are cheap to run again, which jump."""

import math


# Continuous in every operand: a small error of an operand is a small error of the
# result. `bounded_exp` is in `bounded_exp.py`; `normalized` and `scaled_back`, in
# `dafjax/_plan/normalized.py`, read statistics beside.
_ELEMENTWISE = frozenset(
    [
        *("abs", "add", "add_any", "asinh", "atan", "atan2", "bounded_exp", "cbrt"),
        *(
            "clamp",
            "complex",
            "conj",
            "convert_element_type",
            "copy",
            "copy_p",
            "cos",
            "div",
        ),
        *("erf", "erfc", "imag", "integer_pow", "logistic", "max", "min", "mul"),
        *("neg", "normalized", "one_minus_square", "real", "reduce_precision"),
        *("scaled_back", "select_n", "sin", "sqrt", "square", "stop_gradient", "sub"),
        "tanh",
    ]
)

# A small error of an operand can be a huge one of the result. Recomputed from codes of
# logits, a softmax was off by a factor of 10^5. The second half has poles or an edge:
# the code of a value near one may stand for one beyond it.
_AMPLIFYING = frozenset(
    [
        *("cosh", "cumprod", "exp", "exp2", "expm1", "pow", "reduce_prod", "sinh"),
        *("acos", "acosh", "asin", "atanh", "erf_inv", "lgamma", "log", "log1p"),
        *("log2", "rsqrt", "tan"),
    ]
)

# What reads a value in jumps, although its results are floating-point: the gradient of
# max-pooling looks for the place of the maximum again.
_SEARCHING = frozenset(["select_and_gather_add", "select_and_scatter_add", "sort"])

# Results are booleans or integers, or jump where an operand moves a little. `phase` is
# of `dafjax/_plan/phases.py`.
_DISCONTINUOUS = frozenset(
    [
        *("and", "ceil", "eq", "floor", "ge", "gt", "is_finite", "le", "lt", "ne"),
        *("nextafter", "not", "or", "phase", "rem", "round", "shift_left", "sign"),
        *("shift_right_arithmetic", "shift_right_logical", "xor"),
    ]
)

_PERIODIC = frozenset(["cos", "sin"])

# Beyond these arguments they are 1 or -1 to the last bit of a float32. (A logistic
# function is not among them: it goes to 0, and its logarithm does not.)
_SATURATING = {"erf": 4.0, "tanh": 9.5}

# Of complex numbers they have poles or branches, or grow like an exponential.
_WILD_IF_COMPLEX = frozenset(
    [
        *("asinh", "atan", "cbrt", "cos", "erf", "erfc", "logistic", "sin", "sqrt"),
        "tanh",
    ]
)

_PRODUCTS = frozenset(["conv_general_dilated", "dot_general", "ragged_dot_general"])

# Defined and continuous for every real operand, without poles and without edges where
# the derivative is infinite. (An integer power has a pole if the power is negative.)
_SMOOTH = _PRODUCTS | {
    *("abs", "asinh", "atan", "clamp", "cos", "erf", "erfc", "integer_pow", "logistic"),
    *("max", "min", "mul", "one_minus_square", "select_n", "sin", "square", "tanh"),
}

# Results have a least or a greatest value, and many elements are near it: some may be
# thousands of times farther away. (A logistic function has bounds, too, but comes near
# them only for large operands.)
_ONE_SIDED = frozenset(
    [
        *("abs", "bounded_exp", "clamp", "cosh", "erfc", "exp", "exp2", "integer_pow"),
        *("max", "min", "pow", "reduce_max", "reduce_min", "reduce_window_max"),
        *("rsqrt", "select_rectified", "sqrt", "square"),
    ]
)
# So where all their operands are on one side.
_KEEPING_SIDES = frozenset(
    [
        *("add", "add_any", "convert_element_type", "cumsum", "div", "mul"),
        *("reduce_sum", "reduce_window_sum", "select_n"),
    ]
)

_REARRANGING = frozenset(
    [
        *("broadcast_in_dim", "concatenate", "device_put", "dynamic_slice"),
        *("dynamic_update_slice", "expand_dims", "full_like", "gather", "iota", "name"),
        *("pad", "reshape", "rev", "scatter", "slice", "split", "squeeze", "stack"),
        *("tile", "transpose", "unstack"),
    ]
)

# Say where an array is, and leave its values alone. A gathered weight is gathered again
# in the backward pass: it is not kept whole, and never in codes.
_PLACING = frozenset(
    [
        *("all_gather", "all_gather_invariant", "all_gather_reduced", "mesh_cast"),
        *("pbroadcast", "pvary", "reshard", "sharding_constraint"),
    ]
)

_REDUCING = frozenset(
    [
        *("cumlogsumexp", "cummax", "cummin", "cumsum", "reduce_and"),
        *("reduce_max", "reduce_min", "reduce_or", "reduce_sum"),
        *("reduce_window_max", "reduce_window_sum"),
    ]
)

# Small arrays that say what is drawn, and the drawing itself.
_KEY_MAKING = frozenset(
    [
        *("random_clone", "random_fold_in", "random_seed", "random_split"),
        *("random_unwrap", "random_wrap"),
    ]
)
_DRAWING = frozenset(["random_bits", "rng_bit_generator", "threefry2x32"])

_CONTINUOUS = _ELEMENTWISE | _REARRANGING | _PLACING | _REDUCING
# Their results are integers, or bits that mean something else.
_COUNTING = frozenset(
    ["argmax", "argmin", "bitcast_convert_type", "clz", "population_count"]
)
_CHEAP = _CONTINUOUS | _AMPLIFYING | _DISCONTINUOUS | _KEY_MAKING | _COUNTING

_ELEMENT_BY_ELEMENT = (_ELEMENTWISE | _AMPLIFYING | _DISCONTINUOUS) - {
    *("cumprod", "reduce_prod")
}

_LINEAR_IN_ALL = (
    _REARRANGING
    | _PLACING
    | _PRODUCTS
    | {
        *(
            "add",
            "add_any",
            "complex",
            "conj",
            "convert_element_type",
            "copy",
            "copy_p",
            "cumsum",
        ),
        *("imag", "mul", "neg", "real", "reduce_precision", "reduce_sum"),
        *("reduce_window_sum", "stop_gradient", "sub"),
    }
)
_LINEAR_IN_FIRST = frozenset(["div", "normalized", "scaled_back"])
# They choose by what is exact; the first two are of `pooling.py` and `rectifiers.py`
# in `dafjax/_plan`.
_LINEAR_BUT_FIRST = frozenset(["pick_places", "select_rectified", "select_n"])

_PARTING = frozenset(["dynamic_slice", "slice", "split", "unstack"])

_ADDING = frozenset(["add", "add_any", "sub"])

_JOINING = frozenset(
    ["concatenate", "dynamic_update_slice", "pad", "scatter", "scatter-add", "stack"]
)

_ELEMENT_KEEPING = _PLACING | {
    *("broadcast_in_dim", "convert_element_type", "copy", "copy_p", "expand_dims"),
    *("neg", "reduce_precision", "reshape", "rev", "squeeze", "transpose"),
}

_VALUE_KEEPING = _PLACING | {
    *("broadcast_in_dim", "convert_element_type", "copy", "expand_dims", "reshape")
}

# XLA copies their operands into another layout.
_REARRANGING_OPERANDS = frozenset(["conv_general_dilated"])


def is_cheap(primitive: str) -> bool:
    """Returns whether running an operation again costs little beside a product.

    Everything unknown counts as expensive: matrix products, convolutions, loops, sorts,
    random bits, custom calls.
    """
    return primitive in _CHEAP


def draws(primitive: str) -> bool:
    """Returns whether an operation makes random bits, the same from the same key."""
    return primitive in _DRAWING


def is_elementwise(primitive: str) -> bool:
    """Returns whether each element of the result is made of those in its place.

    Of operands of one element in a dimension, that one stands for all.
    """
    return primitive in _ELEMENT_BY_ELEMENT


def is_product(primitive: str) -> bool:
    """Returns whether an operation is a matrix product or a convolution."""
    return primitive in _PRODUCTS


def sums_codes(primitive: str) -> bool:
    """Returns whether an operation sums what so many codes stand for that it is exact.

    `dafjax/_plan/shares.py` has it.
    """
    return primitive == "sum_of_codes"


def is_continuous(primitive: str, *, is_complex: bool = False) -> bool:
    """Returns whether a small error of an operand stays small in a floating result.

    Args:
        primitive: The operation.
        is_complex: Whether the result is complex.
    """
    if is_complex and primitive in _WILD_IF_COMPLEX:
        return False
    return primitive in _CONTINUOUS


def is_amplifying(primitive: str, *, is_complex: bool = False) -> bool:
    """Returns whether a small error of an operand can be a huge one of the result.

    Args:
        primitive: The operation.
        is_complex: Whether the result is complex.
    """
    return primitive in _AMPLIFYING or (is_complex and primitive in _WILD_IF_COMPLEX)


def is_periodic(primitive: str) -> bool:
    """Returns whether only an operand's phase matters, in periods of 2 pi."""
    return primitive in _PERIODIC


def saturation_limit(primitive: str) -> float:
    """Returns the magnitude beyond which an operation is constant, or infinity."""
    return _SATURATING.get(primitive, math.inf)


def is_one_sided(primitive: str, operands_are: bool) -> bool:
    """Returns whether many elements of a result are at an end of its range, or near it.

    Args:
        primitive: The operation.
        operands_are: Whether its operands are such.
    """
    keeps = keeps_values(primitive) or primitive in _REARRANGING | _KEEPING_SIDES
    return primitive in _ONE_SIDED or (operands_are and keeps)


def is_smooth(primitive: str) -> bool:
    """Returns whether an operation takes any real numbers, and has no pole or edge."""
    return primitive in _SMOOTH


def linear_operands(primitive: str, num_operands: int) -> range:
    """Returns the operands in which an operation is linear, if the others are exact.

    For products both: each is, as long as the other is not a function of it.
    """
    if primitive in _LINEAR_IN_ALL:
        return range(num_operands)
    if primitive in _LINEAR_IN_FIRST:
        return range(1)
    return range(1, num_operands) if primitive in _LINEAR_BUT_FIRST else range(0)


def takes_parts(primitive: str) -> bool:
    """Returns whether the results of an operation are parts of its first operand."""
    return primitive in _PARTING


def joins_parts(primitive: str) -> bool:
    """Returns whether a result has elements of several operands, or zeros besides."""
    return primitive in _JOINING


def adds_operands(primitive: str) -> bool:
    """Returns whether the result is the sum of the operands, or their difference."""
    return primitive in _ADDING


def multiplies_elements(primitive: str) -> bool:
    """Returns whether the result is the product of the operands, element by element."""
    return primitive == "mul"


def is_reduction(primitive: str, num_elements: int, reduced_from: int) -> bool:
    """Returns whether a result is worth no codes beside what it was reduced from.

    Args:
        primitive: What made it, a sum or a slice for example.
        num_elements: Its elements.
        reduced_from: Those of the largest operand.
    """
    # A part is no statistic. A sixteenth takes as many bytes as the whole in 2 bits.
    counted = 2 * num_elements if takes_parts(primitive) else num_elements
    return is_cheap(primitive) and is_much_smaller(counted, reduced_from)


def is_much_smaller(num_elements: int, than: int) -> bool:
    """Returns whether a value has so few elements that it may be saved as it is.

    Such is a statistic beside what it is a statistic of, even of a group of 8 channels:
    what a norm divides by must be exact.
    """
    return num_elements * 8 <= than


def compares_equality(primitive: str) -> bool:
    """Returns whether a result flips where an operand rounds otherwise."""
    return primitive in ("eq", "ne")


def converts(primitive: str) -> bool:
    """Returns whether the result is the operand in another dtype."""
    return primitive == "convert_element_type"


def looks_up(primitive: str) -> bool:
    """Returns whether the result is elements of the first operand, as indices say."""
    return primitive == "gather"


def keeps_elements(primitive: str) -> bool:
    """Returns whether elements are moved, repeated or negated, and no more."""
    return primitive in _ELEMENT_KEEPING


def keeps_last_axis(primitive: str) -> bool:
    """Returns whether elements of a result are of the channels that operands have.

    That is, if the results have the shape of the operands.
    """
    return primitive in _ELEMENTWISE | _PLACING | {"name", "phase"}


def keeps_values(primitive: str) -> bool:
    """Returns whether all elements of the result of one operand are elements of it."""
    return primitive in _VALUE_KEEPING


def needs_exact_operands(primitive: str) -> bool:
    """Returns whether an equation of the backward pass must read exact values."""
    return primitive in _SEARCHING


def rearranges_operands(primitive: str) -> bool:
    """Returns whether XLA copies the operands of an operation before it runs it."""
    return primitive in _REARRANGING_OPERANDS
