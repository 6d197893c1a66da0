"""Rules that decide, for each value the backward pass could use, what becomes of it."""

import abc
import dataclasses
import inspect
import warnings
from collections.abc import Callable
from typing import Any, TypeAlias, final

import jax.numpy as jnp
from jax import checkpoint_policies

from dafjax._bits import matches
from dafjax._numbers import as_count
from dafjax._trace.operation import Answer, Operation as Operation, read_answer
from dafjax._trace.rules import rule_of
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
        known: Whether it follows from arguments and constants by cheap operations
            alone.
        draw_cost: The time to draw it again from a random key, over that of the largest
            product; 0 if it does not follow from keys by drawing and cheap operations.
        sources: How many values in inexact codes would be unpacked to recompute it; 0
            if recomputing it gives the exact value.
        source_elements: The number of elements of those values together.
        amplified: Whether an exponential, or the like, of values in codes is taken
            where its operands are recomputed.
        divides: Whether it divides by what is recomputed from codes, which may be 0.
        contracted: How many products one element is the sum of; 0 unless a matrix
            product makes it.
        multiplied: Whether a matrix product is computed again to recompute its
            operands.
        steers: Whether it enters a cotangent that meets other residuals, and not only
            the gradients of arguments.
        copies: How many of it wait at the same time: one for each iteration of a loop.
        names: What `jax.ad_checkpoint.checkpoint_name` calls it, its place in the
            model, and the parts of that between slashes.
        program: The fingerprint of the traced function it is made in.
        number: Its number there.
        operations: The operations that name it with
            `jax.ad_checkpoint.checkpoint_name`, and the one that makes it. None where
            dafjax makes the value itself.
    """

    shape: tuple[int, ...]
    dtype: jnp.dtype
    primitive: str
    reduced_from: int
    known: bool
    sources: int
    source_elements: int = 0
    draw_cost: float = 0
    amplified: bool = False
    divides: bool = False
    contracted: int = 0
    multiplied: bool = False
    steers: bool = True
    copies: int = 1
    names: tuple[str, ...] = ()
    program: str = ""
    number: int = 0
    operations: tuple[Operation, ...] = dataclasses.field(
        default=(), repr=False, compare=False
    )

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
        """Whether it can be stored in codes for real numbers.

        float16, bfloat16 and float32 as they are; float64 as float32, complex numbers
        as two arrays of float32, with a scale beside.
        """
        return self.dtype in CODED_DTYPES or self.dtype in _WIDE_DTYPES


class AbstractPolicy(abc.ABC):
    """A rule from a residual's description to a decision.

    Policies are frozen, hashable data, so that traced programs can be cached by them.
    """

    @property
    def is_binding(self) -> bool:
        """Whether its decisions hold also where it packs nothing.

        If not, such a function is differentiated as usual.
        """
        return True

    @property
    def patterns(self) -> tuple[str, ...]:
        """Patterns of names that should be found in the function."""
        return ()

    def saves_exactly(self, residual: Residual) -> bool:
        """Tells whether the user asks for a residual by name or by operation.

        dafjax then saves it, also where it has a better way to recompute it.

        Args:
            residual: What is known of it.
        """
        del residual
        return False

    @abc.abstractmethod
    def __call__(self, residual: Residual) -> Decision:
        """Decides what becomes of a residual.

        Args:
            residual: What is known of it.

        Returns:
            `Save()`, `Compress(codec)` or `Recompute()`.
        """


CODED_DTYPES = frozenset(
    jnp.dtype(dtype) for dtype in (jnp.float16, jnp.bfloat16, jnp.float32)
)
_WIDE_DTYPES = frozenset(
    jnp.dtype(dtype) for dtype in ("float64", "complex64", "complex128")
)

# So many times fewer elements at 8 bits instead of 2 cost less than one at 2.
_EXPANSION = 3

# Computing a longer sum of products again costs more time than packing its result.
_MOST_CONTRACTED = 128


@final
@dataclasses.dataclass(frozen=True)
class CompressExpensive(AbstractPolicy):
    """Keeps what is expensive to recompute, in codes, and recomputes the rest.

    - Outputs of matrix products, convolutions and other expensive operations are
      compressed; elementwise chains are recomputed from the unpacked values, except
      where that could blow up a small error, as `exp` does: those are compressed too.
    - Small arrays, and the small results of reductions (the statistics of norms), are
      saved as they are: recomputing statistics from codes costs accuracy
      (a prototype of ResNet-18 on digits lost 2.3 points at 2 bits).
    - Boolean arrays (comparison masks, the places of maxima in the windows of a
      pooling) are kept as exact bits.
    - A value whose recomputation would unpack more than `max_sources` compressed
      values, such as the output of a residual connection after another one, is
      compressed itself, so that chains stay short. If it steers (see `Residual`), one
      is the most: else the noise of a code would meet itself where the other value in
      the same code is used, and the mean of a noise times itself is not 0. (A small
      ResNet at 2 bits with a mean-square loss: a bias of 0.44 of the gradient's norm
      without that rule, 0.05 with it.)
    - What has more than three times as many elements as the values in codes that it
      can be recomputed from is recomputed, though a short matrix product, but one, or
      an exponential be in between: the attention matrix of long sequences, from queries
      and keys. These then have 8 bits instead of 2 (see `dafjax.Bits`), which costs
      less than keeping the matrix at 2. Not so with a `codec` of its own.
    - Of what sines and cosines read the phase is compressed: codes of arguments that
      span many periods would tell nothing of a sine.
    - What follows cheaply from the arguments alone is recomputed. So are numbers drawn
      from a random key: they are drawn again, unless that takes longer than the largest
      product. Masks that are drawn are kept as bits.
    - Integers that depend on compressed values, random keys and numbers of fewer than
      16 bits are saved as they are.

    Attributes:
        codec: How floating-point values are packed. `None`: by the `bits` of
            `remat_compress`.
        max_sources: How many compressed values a recomputation may unpack for the
            gradient of an argument.
        min_nbytes: Smaller arrays are saved raw; all iterations of a loop count
            together.

    Example:
        >>> import dafjax, jax
        >>> policy = dafjax.policies.CompressExpensive(dafjax.codecs.Affine(bits=4))
        >>> dafjax.remat_compress(lambda x: x * x, policy=policy)(jax.numpy.float32(2))
        Array(4., dtype=float32)
    """

    codec: AbstractCodec | None = None
    max_sources: int = 3
    min_nbytes: int = 16 * 1024

    def __post_init__(self) -> None:
        _check_codec(self)
        for name, least in (("max_sources", 1), ("min_nbytes", 0)):
            argument = f"CompressExpensive({name}=...)"
            count = as_count(argument, getattr(self, name), least=least)
            object.__setattr__(self, name, count)

    @property
    def is_binding(self) -> bool:
        return False

    def __call__(self, residual: Residual) -> Decision:
        if residual.known:
            return Recompute()
        if residual.draw_cost > 0 and not self._is_small(residual):
            if residual.dtype == jnp.bool_:
                return Compress(Bitmask())
            if residual.draw_cost <= 1:
                return Recompute()
            return Compress(self.codec) if residual.is_floating else Save()
        # Also the sum that probabilities are divided by, so that they are still at
        # most 1: with the exact one a large error of an exponent is a huge one.
        if residual.amplified and self._is_continuous(residual):
            return Recompute()
        rule = rule_of(residual.primitive)
        cheap = rule.is_cheap
        if self._is_small(residual):
            # Of what is as small and as exact, as a view or an inverse of a statistic.
            follows = residual.sources == 0 and (
                residual.reduced_from <= residual.num_elements
            )
            return Recompute() if cheap and follows else Save()
        if not residual.is_floating:
            if cheap and residual.sources == 0:
                return Recompute()
            return Compress(Bitmask()) if residual.dtype == jnp.bool_ else Save()
        if rule.is_reduction(residual.num_elements, residual.reduced_from):
            return Save()
        if self._expands(residual):
            return Recompute()
        most = 1 if residual.steers else self.max_sources
        tame = self._is_continuous(residual) and not residual.divides
        if (cheap and residual.sources == 0) or (tame and residual.sources <= most):
            return Recompute()
        return Compress(self.codec)

    def _is_continuous(self, residual: Residual) -> bool:
        is_complex = jnp.issubdtype(residual.dtype, jnp.complexfloating)
        return rule_of(residual.primitive).is_tame(is_complex=is_complex)

    def _is_small(self, residual: Residual) -> bool:
        return residual.nbytes * residual.copies <= self.min_nbytes

    def _expands(self, residual: Residual) -> bool:
        rule = rule_of(residual.primitive)
        computable = (
            rule.is_tame()
            or rule.is_amplifying()
            or (0 < residual.contracted <= _MOST_CONTRACTED and not residual.multiplied)
        )
        return (
            computable
            and self.codec is None
            and 0 < residual.sources <= self.max_sources
            and residual.num_elements > _EXPANSION * residual.source_elements
        )


@final
@dataclasses.dataclass(frozen=True)
class SaveAll(AbstractPolicy):
    """Saves every residual as it is: plain reverse-mode differentiation."""

    @property
    def is_binding(self) -> bool:
        return False

    def __call__(self, residual: Residual) -> Decision:
        return Recompute() if residual.known else Save()


def _check_codec(policy: "CompressExpensive | CompressDots | CompressNames") -> None:
    if policy.codec is not None and not isinstance(policy.codec, AbstractCodec):
        raise TypeError(
            f"`{type(policy).__name__}(codec=...)` must be a codec or `None`, but got "
            f"`{policy.codec!r}`. Use for example `dafjax.codecs.Affine(bits=2)`."
        )


@final
@dataclasses.dataclass(frozen=True)
class CompressDots(AbstractPolicy):
    """Keeps the outputs of matrix products and convolutions, recomputes the rest.

    The counterpart of `jax.checkpoint_policies.dots_saveable`: one rule, without the
    care of `CompressExpensive` for statistics, masks and chains. Recomputed masks can
    flip and recomputed statistics are off by the noise of the codes.

    Attributes:
        codec: How floating-point values are packed. `None`: by the `bits` of
            `remat_compress`. Others are saved as they are.
    """

    codec: AbstractCodec | None = None

    def __post_init__(self) -> None:
        _check_codec(self)

    def __call__(self, residual: Residual) -> Decision:
        if residual.known or not rule_of(residual.primitive).is_product:
            return Recompute()
        return Compress(self.codec) if residual.is_floating else Save()


@final
@dataclasses.dataclass(frozen=True)
class CompressNames(AbstractPolicy):
    """Keeps values of some names in codes, recomputes everything else.

    The counterpart of `jax.checkpoint_policies.save_only_these_names`. Everything else
    is recomputed from arguments and from these, products included, as in
    `jax.checkpoint`; the names decide how much that is.

    Attributes:
        names: Names that `jax.ad_checkpoint.checkpoint_name` gave, or patterns of them
            or of places in the model, as in `dafjax.Bits`. Or one of these.
        codec: How floating-point values are packed. `None`: by the `bits` of
            `remat_compress`. Booleans are kept as bits, others as they are.

    Example:
        >>> import dafjax, jax, jax.numpy as jnp
        >>> from jax.ad_checkpoint import checkpoint_name
        >>> def loss(w, x):
        ...     for _ in range(3):
        ...         x = checkpoint_name(jnp.sin(x @ w), "block")
        ...     return jnp.sum(x)
        >>> policy = dafjax.policies.CompressNames(("block",))
        >>> w, x = jnp.ones((256, 256)), jnp.ones((256, 256))
        >>> f = dafjax.remat_compress(loss, policy=policy)
        >>> kept = dafjax.saved_residuals(f, w, x).kept
        >>> len([item for item in kept if item.codec is not None])
        2
    """

    names: tuple[str, ...] | str
    codec: AbstractCodec | None = None

    def __post_init__(self) -> None:
        _check_codec(self)
        names = (self.names,) if isinstance(self.names, str) else tuple(self.names)
        if not all(isinstance(name, str) for name in names):
            raise TypeError(
                "`CompressNames(names)` must be a string or strings, but got "
                f"`{self.names!r}`."
            )
        if not names:
            raise ValueError(
                "`CompressNames(names)` must name something, but got none. To keep "
                "nothing use `jax.checkpoint`."
            )
        object.__setattr__(self, "names", names)

    @property
    def patterns(self) -> tuple[str, ...]:
        return tuple(self.names)

    def __call__(self, residual: Residual) -> Decision:
        if residual.known or not any(matches(n, residual.names) for n in self.names):
            return Recompute()
        if residual.is_floating:
            return Compress(self.codec)
        return Compress(Bitmask()) if residual.dtype == jnp.bool_ else Save()


# These functions make a policy, all others are one.
_MAKERS = tuple(
    function
    for name, function in vars(checkpoint_policies).items()
    if name.startswith(("offload_", "save_"))
)


@final
@dataclasses.dataclass(frozen=True)
class SaveSaveable(AbstractPolicy):
    """Saves the values that a policy of `jax.checkpoint` names, exactly.

    `remat_compress(policy=...)` makes one of a policy of `jax.checkpoint_policies`, or
    of a function like these. That policy says which values are saved exactly.
    `jax.checkpoint` recomputes all others. Here `rest` decides about them, so that
    expensive ones are compressed. `checkpoint_policies.nothing_saveable` names nothing:
    it stands for `CompressExpensive()` alone. `checkpoint_policies.everything_saveable`
    stands for `SaveAll()`.

    `jax.checkpoint` moves values that its policy calls `Offloadable` to the memory of
    the host. Here they are saved on the device, and a warning says so.

    Attributes:
        saveable: `saveable(primitive, *avals, **params)` tells whether results of a
            primitive are saved. It must be hashable.
        rest: The policy for all other values.

    Example:
        >>> import dafjax, jax, jax.numpy as jnp
        >>> def loss(w, x):
        ...     return jnp.sum(jnp.tanh(jnp.sin(x @ w)))
        >>> w, x = jnp.ones((256, 256)), jnp.ones((256, 256))
        >>> policy = jax.checkpoint_policies.dots_saveable
        >>> f = dafjax.remat_compress(loss, policy=policy)
        >>> [str(item.codec) for item in dafjax.saved_residuals(f, w, x).kept]
        ['None']
    """

    saveable: Callable[..., Any]
    rest: AbstractPolicy = CompressExpensive()

    def __post_init__(self) -> None:
        if any(self.saveable is maker for maker in _MAKERS):
            raise TypeError(
                f"`SaveSaveable(saveable)` got `{self.saveable!r}`, which makes a "
                "policy. Call it first, for example `save_only_these_names('a')`."
            )
        is_class = inspect.isclass(self.saveable)
        if is_class or not callable(self.saveable):
            raise TypeError(
                "`SaveSaveable(saveable)` must be a function `saveable(primitive, "
                f"*avals, **params)`, but got {'the class ' if is_class else ''}"
                f"`{self.saveable!r}`. Use a policy of `jax.checkpoint_policies`."
            )
        try:
            hash(self.saveable)
        except TypeError:
            raise TypeError(
                "`SaveSaveable(saveable)` must be hashable, but got "
                f"`{self.saveable!r}`. Make it a function or a frozen dataclass."
            ) from None
        if not isinstance(self.rest, AbstractPolicy):
            raise TypeError(
                "`SaveSaveable(rest=...)` must be a policy of `dafjax.policies`, but "
                f"got `{self.rest!r}`. Use `dafjax.policies.CompressExpensive()`."
            )

    @property
    def patterns(self) -> tuple[str, ...]:
        return self.rest.patterns

    def saves_exactly(self, residual: Residual) -> bool:
        # Not `any`: each answer is checked.
        answers = [self._is_saveable(asked) for asked in residual.operations]
        return any(answers) or self.rest.saves_exactly(residual)

    def __call__(self, residual: Residual) -> Decision:
        return Save() if self.saves_exactly(residual) else self.rest(residual)

    def _is_saveable(self, asked: Operation) -> bool:
        returned = self.saveable(asked.primitive, *asked.avals, **asked.params)
        answer = read_answer(returned)
        if answer is None:
            raise TypeError(
                "`remat_compress(policy=...)`: a policy of `jax.checkpoint` must "
                "return a bool, `Saveable`, `Recompute` or `Offloadable(...)`, but "
                f"`{self.saveable!r}` returned `{returned!r}` for `{asked.primitive}`."
            )
        if answer is Answer.OFFLOAD:
            warnings.warn(
                "`remat_compress(policy=...)`: the policy offloads results of "
                f"`{asked.primitive}`: `{returned}`. dafjax saves them on the device. "
                "To keep residuals in the memory of the host, leave out `policy` and "
                "pass `store=dafjax.stores.Host()`, which moves their codes. To save "
                "them on the device without this warning, return `True` for them.",
                stacklevel=2,
            )
        return answer is not Answer.RECOMPUTE


def as_policy(policy: Any, option: str) -> AbstractPolicy:
    """Returns the policy that an option `policy=...` stands for.

    Args:
        policy: A policy, a policy of `jax.checkpoint`, or `None`.
        option: The name of the option in errors.

    Raises:
        TypeError: It is something else.
    """
    if isinstance(policy, AbstractPolicy):
        return policy
    if policy is None or policy is checkpoint_policies.nothing_saveable:
        return CompressExpensive()
    if policy is checkpoint_policies.everything_saveable:
        return SaveAll()
    if callable(policy) and not inspect.isclass(policy):
        return SaveSaveable(policy)
    raise TypeError(
        f"`{option}` must be a policy, a policy of `jax.checkpoint` or `None`, but got "
        f"`{policy!r}` of type `{type(policy).__name__}`. Policies are made by the "
        "classes of `dafjax.policies`, for example "
        "`dafjax.policies.CompressExpensive()`, or are functions as those of "
        "`jax.checkpoint_policies`, for example "
        "`jax.checkpoint_policies.dots_saveable`."
    )
