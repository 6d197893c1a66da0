"""Rules that decide, for each value the backward pass could use, what becomes of it."""

import abc
import dataclasses
from typing import TypeAlias, final

import jax.numpy as jnp

from dafjax.codecs import AbstractCodec, Bitmask


@final
@dataclasses.dataclass(frozen=True)
class Save:
    """Keeps a residual as it is."""


@final
@dataclasses.dataclass(frozen=True)
class Compress:
    """Keeps a residual in codes.

    Attributes:
        codec: How it is packed. `None` stands for the codec that `remat_compress` makes
            of its `bits`.
    """

    codec: AbstractCodec | None = None


@final
@dataclasses.dataclass(frozen=True)
class Recompute:
    """Does not keep a residual: the backward pass computes it again."""


Decision: TypeAlias = Save | Compress | Recompute


@final
@dataclasses.dataclass(frozen=True)
class Residual:
    """A value of the forward pass that the backward pass could use, described.

    Attributes:
        shape: Its shape.
        dtype: Its dtype.
        primitive: The primitive that makes it, or `"argument"`.
        reduced_from: The number of elements of the largest operand of that primitive.
        known: Whether it follows from arguments and constants by cheap operations alone.
        sources: How many compressed values would have to be unpacked to recompute it.
    """

    shape: tuple[int, ...]
    dtype: jnp.dtype
    primitive: str
    reduced_from: int
    known: bool
    sources: int

    @property
    def num_elements(self) -> int:
        """The number of elements."""
        count = 1
        for length in self.shape:
            count *= length
        return count

    @property
    def nbytes(self) -> int:
        """Bytes as an ordinary array; 0 for dtypes without a size, such as keys."""
        return self.num_elements * getattr(self.dtype, "itemsize", 0)

    @property
    def is_floating(self) -> bool:
        """Whether codecs for real numbers apply: float16, bfloat16 or float32."""
        return self.dtype in _CODED_DTYPES


class AbstractPolicy(abc.ABC):
    """A rule from a residual's description to a decision.

    Policies are frozen, hashable data, so that traced programs can be cached by them.
    """

    @abc.abstractmethod
    def __call__(self, residual: Residual) -> Decision:
        """Decides what becomes of a residual.

        Args:
            residual: What is known of it.

        Returns:
            `Save()`, `Compress(codec)` or `Recompute()`.
        """


# Cheap enough to run again, and continuous in their floating-point operands, so that
# an operand with a small error gives a result with a small error.
_CHEAP = frozenset(
    ["abs", "acos", "acosh", "add", "add_any", "and", "asin", "asinh", "atan", "atan2", "atanh", "broadcast_in_dim", "cbrt", "clamp", "concatenate", "conj", "convert_element_type", "copy", "copy_p", "cos", "cosh", "cumlogsumexp", "cummax", "cummin", "cumprod", "cumsum", "device_put", "div", "dynamic_slice", "dynamic_update_slice", "eq", "erf", "erf_inv", "erfc", "exp", "exp2", "expand_dims", "expm1", "full_like", "gather", "ge", "gt", "imag", "integer_pow", "iota", "is_finite", "le", "lgamma", "log", "log1p", "logistic", "lt", "max", "min", "mul", "ne", "neg", "nextafter", "not", "or", "pad", "pow", "real", "real_pcast", "reduce_and", "reduce_max", "reduce_min", "reduce_or", "reduce_precision", "reduce_prod", "reduce_sum", "reduce_window_max", "reduce_window_sum", "reshape", "rev", "rsqrt", "scatter", "select_n", "shift_left", "shift_right_arithmetic", "shift_right_logical", "sin", "sinh", "slice", "split", "sqrt", "square", "squeeze", "stop_gradient", "sub", "tan", "tanh", "transpose", "xor"]
)

# Outputs jump where the operand moves a little.
_DISCONTINUOUS = frozenset({"ceil", "floor", "rem", "round", "sign"})

_CODED_DTYPES = frozenset(
    jnp.dtype(dtype) for dtype in (jnp.float16, jnp.bfloat16, jnp.float32)
)

# A raw value this many times smaller than what it was reduced from costs no more than the
# codes of that would at 2 bits of 32.
_REDUCTION = 16


@final
@dataclasses.dataclass(frozen=True)
class CompressExpensive(AbstractPolicy):
    """Keeps what is expensive to recompute, in codes, and recomputes the rest.

    - Outputs of matrix products, convolutions and other expensive operations are
      compressed; elementwise chains are recomputed from the unpacked values.
    - Small arrays, and the small results of reductions (the statistics of norms), are
      saved as they are: recomputing statistics from codes costs accuracy
      (ResNet-18 on digits lost 2.3 points at 2 bits).
    - Boolean arrays (comparison masks) are kept as exact bits.
    - A value whose recomputation would unpack more than `max_sources` compressed values,
      such as the output of a residual connection after another one, is compressed
      itself, so that chains stay short.
    - What follows cheaply from the arguments alone is recomputed.
    - Integers that depend on compressed values, float64, complex numbers and random keys
      are saved as they are.

    Attributes:
        codec: How floating-point values are packed. `None`: by the `bits` of
            `remat_compress`.
        max_sources: How many compressed values a recomputation may unpack.
        min_nbytes: Smaller arrays are saved raw.

    Example:
        >>> import dafjax
        >>> policy = dafjax.policies.CompressExpensive(dafjax.codecs.Affine(bits=4))
        >>> loss = dafjax.remat_compress(lambda w, x: ((x @ w) ** 2).sum(), policy=policy)
    """

    codec: AbstractCodec | None = None
    max_sources: int = 2
    min_nbytes: int = 16 * 1024

    def __post_init__(self) -> None:
        if self.codec is not None and not isinstance(self.codec, AbstractCodec):
            raise TypeError(
                "`CompressExpensive(codec=...)` must be a codec or `None`, but got "
                f"`{self.codec!r}`. Use for example `dafjax.codecs.Affine(bits=2)`."
            )
        for name, least in (("max_sources", 1), ("min_nbytes", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(
                    f"`CompressExpensive({name}=...)` must be an int, but got `{value!r}`."
                )
            if value < least:
                raise ValueError(
                    f"`CompressExpensive({name}=...)` must be at least {least}, but got "
                    f"{value}."
                )

    def __call__(self, residual: Residual) -> Decision:
        if residual.known:
            return Recompute()
        if residual.nbytes <= self.min_nbytes:
            return Save()
        if residual.dtype == jnp.bool_:
            return Compress(Bitmask())
        cheap = residual.primitive in _CHEAP
        if not residual.is_floating:
            return Recompute() if cheap and residual.sources == 0 else Save()
        if cheap and residual.num_elements * _REDUCTION <= residual.reduced_from:
            return Save()
        if cheap and residual.sources <= self.max_sources:
            return Recompute()
        return Compress(self.codec)


@final
@dataclasses.dataclass(frozen=True)
class SaveAll(AbstractPolicy):
    """Saves every residual as it is: plain reverse-mode differentiation."""

    def __call__(self, residual: Residual) -> Decision:
        return Recompute() if residual.known else Save()


def is_cheap(primitive: str) -> bool:
    """Returns whether recomputing an operation costs little."""
    return primitive in _CHEAP or primitive in _DISCONTINUOUS
