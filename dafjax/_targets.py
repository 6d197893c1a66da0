"""What bits are allocated for, while a program runs."""

import dataclasses
from typing import TypeAlias, final

from dafjax._nbytes import parse_nbytes
from dafjax._numbers import as_real


@final
@dataclasses.dataclass(frozen=True)
class AverageBits:
    """So many bits an element on average, more of them where they matter more.

    While a program trains, the backward pass measures how much the gradient suffers
    from the rounding of each residual. Bits are then given out anew, so that the
    gradient's variance is least: in a `dafjax.stores.PagePool` before each step, and
    nothing is compiled anew; in other stores by `dafjax.adaptive_jit`, which compiles a
    step at most a few times.

    What enters gradients nonlinearly has 2 bits at least as long as the average allows
    it. What an exponential is taken of has 8, as fewer ruin a gradient: where that does
    not fit, a pool gives it and the others their fewest, so that the average is above
    the target (`PagePool.stats` shows it); `adaptive_jit` raises an error.

    Attributes:
        bits: Bits of the codes of an element, from 1 to 8, without what blocks need
            besides.

    Raises:
        TypeError: `bits` is no number.
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
    """So many bytes for all residuals in codes, as `AverageBits` otherwise.

    It is a target for bits. The budget of a `dafjax.stores.PagePool` is a limit: what
    does not fit it loses precision as it is put.

    Attributes:
        nbytes: Bytes, or text such as `"64MiB"`, kept as a number.

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

    An error bound in place of a budget, as AC-GC has it (Evans and Aamodt 2021).

    Attributes:
        relative: The most that the variance of the gradient may be, over the squared
            norm of the gradient; above 0.

    Raises:
        TypeError: `relative` is no number.
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
    """Returns the kind of a target and its value, as the compiled library has them."""
    match target:
        case AverageBits(bits):
            return "average_bits", float(bits)
        case Budget(nbytes):
            return "nbytes", float(nbytes)
        case NoiseCeiling(relative):
            return "relative_variance", float(relative)
    return "none", 0.0
