"""Policies: rules that save, compress or recompute each residual."""

import abc
import dataclasses
import inspect
import warnings
from collections.abc import Callable
from typing import Any, TypeAlias, final

import jax.numpy as jnp
from jax import checkpoint_policies

from dafjax import config
from dafjax._bits import matches
from dafjax._numbers import as_count
from dafjax._trace.graph import Answer, Operation as Operation, read_answer
from dafjax._trace.rules import rule_of
from dafjax.codecs import AbstractCodec, Bitmask


@final
@dataclasses.dataclass(frozen=True)
class Save:
    """Saves a residual as it is."""


@final
@dataclasses.dataclass(frozen=True)
class Compress:
    """Saves a residual in codes.

    Attributes:
        codec: The codec that packs it. `None` stands for the codec that
            `remat_compress` makes from its `bits`.
    """

    codec: AbstractCodec | None = None


@final
@dataclasses.dataclass(frozen=True)
class Recompute:
    """Saves nothing: the backward pass recomputes the residual."""


Decision: TypeAlias = Save | Compress | Recompute


def is_inexact(decision: Decision) -> bool:
    """Returns whether a decision stores a value in codes with an error."""
    return isinstance(decision, Compress) and (
        decision.codec is None or not decision.codec.is_exact
    )


@final
@dataclasses.dataclass(frozen=True)
class Residual:
    """Description of a forward value that the backward pass could use.

    Attributes:
        shape: Its shape.
        dtype: Its dtype.
        primitive: The primitive that makes it, or `"argument"`.
        reduced_from: Number of elements of the largest operand of that primitive.
        known: Whether it follows from arguments and constants by cheap operations
            alone.
        draw_cost: Time to draw it again from a random key, as a multiple of the time of
            the largest product; 0 if it does not follow from keys by drawing and cheap
            operations.
        sources: How many values in inexact codes must be unpacked to recompute it; 0
            if recomputing gives the exact value.
        source_elements: Total number of elements of these values.
        amplified: Whether recomputing its operands takes an exponential, or a similar
            function, of values in codes.
        divides: Whether it divides by a value recomputed from codes, which may be 0, or
            reads a sum of a weighted mean that is recomputed from codes.
        contracted: Number of products that are summed for one element; 0 unless a
            matrix product makes it.
        multiplied: Whether recomputing its operands takes a matrix product.
        steers: Whether it enters a cotangent that is later multiplied with other
            residuals, and not only the gradients of arguments.
        copies: How many copies are stored at the same time: one for each iteration of a
            loop.
        names: Its names: from `jax.ad_checkpoint.checkpoint_name`, its place in the
            model, the parts of that place between slashes, and its name in listings.
        program: Hash of the traced function that makes it.
        number: Its number in that function.
        operations: The operations that name it with
            `jax.ad_checkpoint.checkpoint_name`, and the operation that makes it. Empty
            if dafjax makes the value itself.
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
        """Number of elements."""
        count = 1
        for length in self.shape:
            count *= length
        return count

    @property
    def nbytes(self) -> int:
        """Bytes as a plain array; 0 for dtypes without a size, such as keys."""
        return self.num_elements * getattr(self.dtype, "itemsize", 0)

    @property
    def is_floating(self) -> bool:
        """Whether it can be stored in codes for real numbers.

        float16, bfloat16 and float32 are stored as they are, float64 as float32, and
        complex numbers as two arrays of float32, with a separate scale.
        """
        return self.dtype in CODED_DTYPES or self.dtype in _WIDE_DTYPES


class AbstractPolicy(abc.ABC):
    """A rule that maps the description of a residual to a decision.

    Policies are frozen, hashable data, so they can be keys of the trace cache.
    """

    @property
    def is_binding(self) -> bool:
        """Whether its decisions also hold for a function if it packs nothing there.

        If not, JAX differentiates such a function as usual.
        """
        return True

    @property
    def is_of_one_program(self) -> bool:
        """Whether it knows one traced function, and not the segments of that."""
        return False

    @property
    def patterns(self) -> tuple[str, ...]:
        """Patterns that should match names in the function."""
        return ()

    def saves_exactly(self, residual: Residual) -> bool:
        """Tells whether the user asks for a residual by name or by operation.

        dafjax then saves it, even if it could recompute the residual in a better way.

        Args:
            residual: Its description.
        """
        del residual
        return False

    @abc.abstractmethod
    def __call__(self, residual: Residual) -> Decision:
        """Decides whether to save, compress or recompute a residual.

        Args:
            residual: Its description.

        Returns:
            `Save()`, `Compress(codec)` or `Recompute()`.
        """


CODED_DTYPES = frozenset(
    jnp.dtype(dtype) for dtype in (jnp.float16, jnp.bfloat16, jnp.float32)
)
_WIDE_DTYPES = frozenset(
    jnp.dtype(dtype) for dtype in ("float64", "complex64", "complex128")
)


@final
@dataclasses.dataclass(frozen=True)
class CompressExpensive(AbstractPolicy):
    """Saves values that are expensive to recompute in codes, and recomputes the rest.

    - Outputs of matrix products, convolutions and other expensive operations are
      compressed. Elementwise chains are recomputed from the unpacked values, except
      where that could amplify a small error, as `exp` does: those values are compressed
      too.
    - Small arrays and the small results of reductions (the statistics of norms) are
      saved as they are. Recomputing statistics from codes costs accuracy (a prototype
      of ResNet-18 on digits lost 2.3 points at 2 bits).
    - Boolean arrays (comparison masks, argmax indices of max-pooling) are stored as
      exact bits.
    - If recomputing a value would unpack more than `max_sources` compressed values, it
      is compressed itself, so that chains stay short. The output of a residual
      connection after another one is such a value. For a value that steers (see
      `Residual`) the limit is one. Otherwise the noise of a code would be multiplied
      with itself where another value from the same code is used, and the mean of the
      square of a noise is not 0. (A small ResNet at 2 bits with a mean-square loss: a
      bias of 0.44 of the gradient's norm without that rule, 0.05 with it.)
    - A value with more than three times as many elements as its compressed sources is
      recomputed from them, even through an exponential or one short matrix product. An
      example is the attention matrix of long sequences, from queries and keys. The
      sources then have 8 bits instead of 2 (see `dafjax.Bits`), which takes less memory
      than storing the matrix at 2. This rule is off if the policy has a `codec`.
    - For sines and cosines the range-reduced argument is compressed: codes of arguments
      that span many periods would say nothing about the sine.
    - Values that follow cheaply from the arguments alone are recomputed. Numbers drawn
      from a random key are drawn again, unless that takes longer than the largest
      product. Random masks are stored as bits.
    - Integers that depend on compressed values, random keys, and numbers of fewer than
      16 bits are saved as they are.

    Attributes:
        codec: The codec for floating-point values. `None`: the codec that
            `remat_compress` makes from its `bits`.
        max_sources: Maximum number of compressed values that a recomputation for the
            gradient of an argument may unpack.
        min_nbytes: Arrays of at most this many bytes are saved raw. All iterations of a
            loop count together.

    Example:
        >>> import dafjax, jax
        >>> policy = dafjax.policies.CompressExpensive(dafjax.codecs.Affine(bits=4))
        >>> dafjax.remat_compress(lambda x: x * x, policy=policy)(jax.numpy.float32(2))
        Array(4., dtype=float32)
    """

    codec: AbstractCodec | None = None
    max_sources: int = 3
    min_nbytes: int = config.SMALL_NBYTES

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
        # This includes the sum that divides probabilities, so that these stay at most
        # 1. With the exact sum, a large error of an exponent would become a huge one.
        if residual.amplified and self._is_continuous(residual):
            return Recompute()
        rule = rule_of(residual.primitive)
        cheap = rule.is_cheap
        if self._is_small(residual):
            # It follows from exact values of at most its size, such as a view or the
            # inverse of a statistic.
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
            or (
                0 < residual.contracted <= config.MOST_CONTRACTED
                and not residual.multiplied
            )
        )
        return (
            computable
            and self.codec is None
            and 0 < residual.sources <= self.max_sources
            and residual.num_elements > config.EXPANSION * residual.source_elements
        )


@final
@dataclasses.dataclass(frozen=True)
class SaveAll(AbstractPolicy):
    """Saves every residual as it is, like plain reverse-mode differentiation."""

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
    """Compresses outputs of matrix products and convolutions, recomputes the rest.

    It is the counterpart of `jax.checkpoint_policies.dots_saveable`: one rule, without
    the special cases of `CompressExpensive` for statistics, masks and chains.
    Recomputed masks can flip, and recomputed statistics have the noise of the codes.

    Attributes:
        codec: The codec for floating-point values. `None`: the codec that
            `remat_compress` makes from its `bits`. Other values are saved as they are.
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
    """Compresses values with given names, recomputes everything else.

    It is the counterpart of `jax.checkpoint_policies.save_only_these_names`. As in
    `jax.checkpoint`, everything else, products included, is recomputed from these
    values and from the arguments. The names decide how much that is.

    Attributes:
        names: One or more names given by `jax.ad_checkpoint.checkpoint_name`, or
            patterns for such names or for places in the model, as in `dafjax.Bits`.
        codec: The codec for floating-point values. `None`: the codec that
            `remat_compress` makes from its `bits`. Booleans are stored as bits, other
            values as they are.

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


# These functions return a policy; all others of that module are policies.
_MAKERS = tuple(
    function
    for name, function in vars(checkpoint_policies).items()
    if name.startswith(("offload_", "save_"))
)


@final
@dataclasses.dataclass(frozen=True)
class SaveSaveable(AbstractPolicy):
    """Saves exactly the values that a policy of `jax.checkpoint` selects.

    `remat_compress(policy=...)` makes one from a policy of `jax.checkpoint_policies`,
    or from a function like these. That policy says which values are saved exactly.
    `jax.checkpoint` recomputes all others. Here `rest` decides about them, so that
    expensive ones are compressed. `checkpoint_policies.nothing_saveable` selects
    nothing and stands for `CompressExpensive()` alone.
    `checkpoint_policies.everything_saveable` stands for `SaveAll()`.

    `jax.checkpoint` moves values that its policy calls `Offloadable` to host memory.
    Here they are saved on the device, and a warning says so.

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
        # A list, since a lazy `any` would leave later answers unchecked.
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
    """Returns the policy for the argument of an option `policy=...`.

    Args:
        policy: A policy, a policy of `jax.checkpoint`, or `None`.
        option: Name of the option in errors.

    Raises:
        TypeError: `policy` is something else.
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
