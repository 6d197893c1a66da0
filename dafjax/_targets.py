"""Targets of the bit allocation during training."""

import dataclasses
from typing import TypeAlias, final

from dafjax._numbers import as_real, parse_nbytes


@final
@dataclasses.dataclass(frozen=True)
class AverageBits:
    """A number of bits per element on average, more for sensitive residuals.

    During training the backward pass measures the sensitivity of each residual: how
    much its rounding adds to the variance of the gradient. Bits are then allocated so
    that this variance is least. A `dafjax.stores.PagePool` does this before each step
    and recompiles nothing. For other stores `dafjax.adaptive_jit` does it, and
    recompiles a step at most a few times.

    Residuals that enter gradients nonlinearly have at least 2 bits, as long as the
    average allows this. Residuals that are arguments of an exponential have 8, because
    fewer bits ruin a gradient. If these 8 bits do not fit, a pool still gives them, and
    the other residuals get their minimum. The average is then above the target
    (`PagePool.stats` shows it). `adaptive_jit` raises an error instead.

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


Target: TypeAlias = AverageBits | Budget | NoiseCeiling


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
