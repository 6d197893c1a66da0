"""Bits of codes: fixed by use and by name, or allocated by measurement."""

import dataclasses
import enum
import fnmatch
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, final

import numpy as np

from dafjax import config
from dafjax._numbers import as_real, parse_nbytes, shown


CHOICES = (1, 2, 3, 4, 8)
# The bit widths that can be allocated: their codes are prefixes of each other.
LADDER = (1, 2, 4, 8)

# Twice as many, or the next larger choice; at most 8.
TWICE = {1: 2, 2: 4, 3: 8, 4: 8, 8: 8}


def _check(name: str, bits: Any) -> None:
    if isinstance(bits, bool) or not isinstance(bits, (int, np.integer)):
        raise TypeError(
            f"`Bits({name}=...)` must be one of {CHOICES}, but got `{shown(bits)}` of "
            f"type `{type(bits).__name__}`."
        )
    if bits not in CHOICES:
        raise ValueError(
            f"`Bits({name}=...)` must be one of {CHOICES}, but got {shown(bits)}."
        )


@final
class Use(enum.IntEnum):
    """How results of the backward pass depend on a residual in codes."""

    LINEAR = 0
    # Nonlinear, by functions without poles or edges.
    SMOOTH = 1
    NONLINEAR = 2
    # Through an exponential or a similar function.
    AMPLIFIED = 3


@final
@dataclasses.dataclass(frozen=True)
class Bits:
    """Bits of the codes of residuals.

    A residual that enters the gradient linearly causes no bias, however few its bits,
    because rounding is right on average. A residual that enters nonlinearly, such as
    the input of a GELU, causes a bias that grows with the square of the rounding error.
    It gets twice the bits, which makes the bias 25 times smaller. The table shows bias
    and error relative to the norm of the gradient, for a GPT-2 of 4 layers and width
    256 that was trained for 150 steps (48 seeds):

    | bits | bias | error of one step | bytes |
    |---|---|---|---|
    | 2, nonlinear 2 | 0.108 | 0.73 | 1.9 MB |
    | 2, nonlinear 3 | 0.022 | 0.59 | 2.2 MB |
    | 2, nonlinear 4 | 0.008 | 0.56 | 2.4 MB |
    | 2, nonlinear 8 | 0.007 | 0.56 | 3.5 MB |
    | 4, nonlinear 8 | 0.000 | 0.13 | 4.6 MB |

    A residual that enters through an exponential always has 8 bits, whatever the values
    here. Queries and keys are such residuals if attention is recomputed from them.

    A norm amplifies the noise of a depthwise convolution that it reads, so results of
    such convolutions count as nonlinear. (A MobileNet at 2 bits: noise of 0.83 in the
    median of all parameter arrays, 0.31 with 4 bits for these.)

    Residuals that are small beside the others, such as those between the factors of a
    low-rank adapter, get twice the bits, because their noise counts as much as the
    noise of large ones. This adds at most 1/32 to the total (about that with
    `rematerialize`). It does not apply to residuals that match `names`, nor where bits
    are allocated, as in a `dafjax.stores.PagePool`.

    Attributes:
        linear: Bits of residuals that enter gradients linearly.
        nonlinear: Bits of the others. `None`: twice as many, at most 8.
        names: Patterns (`*`, `?` and `[...]` as in file names) and the bits of
            residuals whose names match, linear or not; the first match counts. A name
            comes from `jax.ad_checkpoint.checkpoint_name`, or is the name that
            `dafjax.print_saved_residuals` and `dafjax.assess` print, or the place in
            the model in it, or a part of that place between slashes. A mapping, stored
            as a tuple of pairs.

    Raises:
        TypeError: An attribute has a wrong type.
        ValueError: A number of bits is not 1, 2, 3, 4 or 8.

    Example:
        >>> from dafjax import Bits
        >>> Bits(2, names={"attention*": 4})
        Bits(linear=2, nonlinear=4, names=(('attention*', 4),))
    """

    linear: int = 2
    nonlinear: int | None = None
    names: Mapping[str, int] | Sequence[tuple[str, int]] = ()

    def __post_init__(self) -> None:
        _check("linear", self.linear)
        if self.nonlinear is None:
            object.__setattr__(self, "nonlinear", TWICE[self.linear])
        _check("nonlinear", self.nonlinear)
        names = self.names
        pairs = tuple(names.items() if isinstance(names, Mapping) else names)
        for pair in pairs:
            if not isinstance(pair, tuple) or len(pair) != 2:
                raise TypeError(
                    f"`Bits(names=...)` must map patterns to bits, but got `{pair!r}`. "
                    'Use for example `{"attention*": 4}`.'
                )
            pattern, bits = pair
            if not isinstance(pattern, str):
                raise TypeError(
                    "The keys of `Bits(names=...)` must be strings, but got "
                    f"`{pattern!r}`."
                )
            _check(f"names[{pattern!r}]", bits)
        object.__setattr__(self, "names", pairs)

    @property
    def patterns(self) -> tuple[str, ...]:
        """The patterns in `names`."""
        return tuple(pattern for pattern, _ in self._pairs)

    @property
    def _pairs(self) -> tuple[tuple[str, int], ...]:
        assert isinstance(self.names, tuple)
        return self.names

    def has_named(self, names: Sequence[str]) -> bool:
        """Returns whether any of the given names matches a pattern."""
        return any(matches(pattern, names) for pattern in self.patterns)

    def of(self, names: Sequence[str], use: Use) -> int:
        """Returns the bits of a residual.

        Args:
            names: Its names.
            use: How results of the backward pass depend on it.
        """
        for pattern, bits in self._pairs:
            if matches(pattern, names):
                return (
                    max(bits, config.AMPLIFIED_BITS) if use is Use.AMPLIFIED else bits
                )
        assert self.nonlinear is not None
        if use is Use.AMPLIFIED:
            return config.AMPLIFIED_BITS
        return self.linear if use is Use.LINEAR else self.nonlinear


AnyBits: TypeAlias = int | str | Mapping[str, int] | Bits

# Presets: names that `bits` accepts in place of a number.
PRESETS: Mapping[str, Bits] = {
    "safe": Bits(4, nonlinear=8),
    "balanced": Bits(2, nonlinear=4),
    "tight": Bits(2, nonlinear=2),
}


def as_bits(bits: Any, name: str, *, others: Sequence[str] = ()) -> Bits:
    """Returns the user's argument `bits` as `Bits`.

    Args:
        bits: A number, the name of a preset, a mapping from patterns to bits, or
            `Bits`.
        name: Name of the argument in errors.
        others: Strings beside the presets that the caller accepts.

    Raises:
        TypeError: `bits` is none of these.
        ValueError: The number or preset does not exist.
    """
    if isinstance(bits, Bits):
        return bits
    if isinstance(bits, Mapping):
        return Bits(names=bits)
    if isinstance(bits, str):
        if bits not in PRESETS:
            raise ValueError(
                f"`{name}` must be one of {(*PRESETS, *others)} if it is a string, but "
                f"got {bits!r}."
            )
        return PRESETS[bits]
    if isinstance(bits, bool) or not isinstance(bits, (int, np.integer)):
        raise TypeError(
            f"`{name}` must be None, one of {CHOICES}, one of {tuple(PRESETS)}, a dict "
            f"from names to bits, or `dafjax.Bits(...)`, but got `{shown(bits)}` of "
            f"type `{type(bits).__name__}`."
        )
    if bits not in CHOICES:
        raise ValueError(
            f"`{name}` must be None or one of {CHOICES}, but got {shown(bits)}."
        )
    return Bits(int(bits))


def matches(pattern: str, names: Sequence[str]) -> bool:
    """Returns whether a pattern matches any of the given names."""
    return any(fnmatch.fnmatchcase(name, pattern) for name in names)


@final
@dataclasses.dataclass(frozen=True)
class AverageBits:
    """A number of bits per element on average, more for sensitive residuals.

    During training the backward pass measures the sensitivity of each residual: how
    much its rounding adds to the variance of the gradient. Bits are then allocated so
    that this variance is least. A `dafjax.stores.PagePool` does this before each step
    and recompiles nothing. For other stores `dafjax.jit` does it, and
    recompiles a step at most a few times.

    Residuals that enter gradients nonlinearly have at least 2 bits, as long as the
    average allows this. Residuals that are arguments of an exponential have 8, because
    fewer bits ruin a gradient. If these 8 bits do not fit, a pool still gives them, and
    the other residuals get their minimum. The average is then above the target
    (`PagePool.stats` shows it). `dafjax.jit` raises an error instead.

    Attributes:
        bits: Bits of the code of an element, from 1 to 8, without scales and minima.

    Raises:
        TypeError: `bits` is not a number.
        ValueError: `bits` is out of range.

    Example:
        >>> import dafjax, jax, jax.numpy as jnp
        >>> def loss(w, x):
        ...     return jnp.sum(jnp.sin(x @ w))
        >>> with dafjax.stores.PagePool() as pool:
        ...     compressed = dafjax.remat_compress(
        ...         loss, bits=dafjax.AverageBits(2), store=pool
        ...     )
        ...     gradient = jax.jit(jax.grad(compressed))
        ...     gradient(jnp.ones((256, 256)), jnp.ones((256, 256))).shape
        (256, 256)
    """

    bits: float

    def __post_init__(self) -> None:
        bits = as_real("AverageBits(bits=...)", self.bits, lowest=1, highest=8)
        object.__setattr__(self, "bits", bits)


@final
@dataclasses.dataclass(frozen=True)
class Budget:
    """A number of bytes for all residuals in codes; otherwise like `AverageBits`.

    This is a target of the bit allocation. In contrast, the budget of a
    `dafjax.stores.PagePool` is a limit: residuals lose precision if a new one does not
    fit.

    Attributes:
        nbytes: Bytes, or text such as `"64MiB"`, which is converted to a number.

    Raises:
        TypeError: `nbytes` is neither a number nor text.
        ValueError: `nbytes` cannot be read, or is not from 1 byte to 4 EiB.

    Example:
        >>> import dafjax
        >>> dafjax.Budget("64MiB")
        Budget(nbytes=67108864)
    """

    nbytes: int | str

    def __post_init__(self) -> None:
        nbytes = parse_nbytes("Budget(nbytes=...)", self.nbytes)
        object.__setattr__(self, "nbytes", nbytes)


@final
@dataclasses.dataclass(frozen=True)
class NoiseCeiling:
    """As few bits as keep the gradient's noise below a share of the gradient.

    This is an error bound in place of a budget, as in AC-GC (Evans and Aamodt 2021).

    Attributes:
        relative: The most variance of the gradient, divided by the squared norm of the
            gradient; above 0.

    Raises:
        TypeError: `relative` is not a number.
        ValueError: `relative` is out of range.

    Example:
        >>> import dafjax
        >>> dafjax.NoiseCeiling(0.01)
        NoiseCeiling(relative=0.01)
    """

    relative: float

    def __post_init__(self) -> None:
        relative = as_real(
            "NoiseCeiling(relative=...)", self.relative, lowest=1e-12, highest=1e12
        )
        object.__setattr__(self, "relative", relative)


@final
@dataclasses.dataclass(frozen=True)
class BatchNoise:
    """As few bits as keep the noise of rounding small beside the noise of the batch.

    The gradient of a batch is a sample of the gradient of all examples: it has noise
    that training copes with anyway. `dafjax.jit` measures that and what rounding adds:
    before some steps it computes exact gradients of two halves of the batch, whose
    difference tells the noise. The noise of an element counts in units of the root mean
    square of its array's gradient, so that all arrays matter, as in Adam. All residuals
    begin with 8 bits; where that is too much, name a limit, `dafjax.jit(memory=...)`.
    `remat_compress(bits="auto")` stands for `BatchNoise()`.

    Attributes:
        share: The most noise that rounding may add to the batch's gradient, over the
            noise that it has, as standard deviations; above 0. With a tenth, the noise
            grows by half a percent.
        in_axes: For each positional argument, the axis that holds the examples, as in
            `dafjax.accumulate`. `None`: they are found as there.

    Raises:
        TypeError: `share` is not a number.
        ValueError: `share` is out of range.

    Example:
        >>> import dafjax
        >>> dafjax.BatchNoise(0.2)
        BatchNoise(share=0.2, in_axes=None)
    """

    share: float = 0.1
    in_axes: Any = None

    def __post_init__(self) -> None:
        share = as_real("BatchNoise(share=...)", self.share, lowest=1e-12, highest=1e12)
        object.__setattr__(self, "share", share)


Target: TypeAlias = AverageBits | Budget | NoiseCeiling | BatchNoise
TARGETS = (AverageBits, Budget, NoiseCeiling, BatchNoise)
AUTO = "auto"


def as_number(target: Target | None) -> tuple[str, float]:
    """Returns the kind and value of a target, as the compiled library takes them."""
    match target:
        case AverageBits(bits):
            return "average_bits", float(bits)
        case Budget(nbytes):
            return "nbytes", float(nbytes)
        case NoiseCeiling(relative):
            return "relative_variance", float(relative)
    return "none", 0.0
