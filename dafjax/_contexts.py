"""Settings that hold while functions are traced inside a `with` block.

They are a transform in place of `remat_compress`, for comparisons; the options that
`dafjax.jit` chose; the mode of the wrapped function that is traced; a list of the
wrapped functions that a trace calls; and the active bit allocation.
"""

import contextlib
import dataclasses
import enum
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, final

import jax


class Mode(enum.Enum):
    """The residuals that a wrapped function stores for its backward pass."""

    # Those of JAX: the function runs as it is (`bits=None`).
    PLAIN = enum.auto()
    # Codes of residuals.
    CODES = enum.auto()
    # Codes of the values between segments, which the backward pass computes again
    # (`rematerialize=True`).
    RERUN = enum.auto()
    # The values between such segments, as they are (`rematerialize="exact"`).
    EXACT = enum.auto()

    @property
    def has_segments(self) -> bool:
        """Whether the backward pass computes segments of the function again."""
        return self in (Mode.RERUN, Mode.EXACT)

    @property
    def without_segments(self) -> "Mode":
        """The mode with as little noise that has no segments."""
        return {Mode.RERUN: Mode.CODES, Mode.EXACT: Mode.PLAIN}.get(self, self)

    def text(self, bits: int | None) -> str:
        """Returns the mode as options of `remat_compress`.

        Args:
            bits: Bits of a code, where there are codes.
        """
        again = ", rematerialize=True" if self is Mode.RERUN else ""
        texts = {Mode.PLAIN: "plain", Mode.EXACT: 'rematerialize="exact"'}
        return texts.get(self, f"bits={bits}{again}")


# Maps a function of flat arguments to another one, as `jax.checkpoint` does.
Transform: TypeAlias = Callable[[Callable[..., Any]], Callable[..., Any]]


@final
class StandIn:
    """A transform that replaces `remat_compress` in wrapped functions; counts calls.

    Each instance is equal only to itself and is part of the keys of JAX's caches. So
    JAX never reuses a trace outside its override, and traces and counts every wrapped
    function again, even if it was traced before.
    """

    def __init__(self, transform: Transform) -> None:
        self._transform = transform
        self.num_calls = 0

    def __call__(self, fun: Callable[..., Any], leaves: Sequence[Any]) -> Any:
        """Runs the transformed function."""
        self.num_calls += 1
        return self._transform(fun)(*leaves)


@contextlib.contextmanager
def standing_in(transform: Transform) -> Iterator[StandIn]:
    """Replaces `remat_compress` for wrapped functions within a `with` block.

    Args:
        transform: The replacement. It takes the wrapped function of flat arguments.
    """
    stand_in = StandIn(transform)
    with _STAND_IN(stand_in):
        yield stand_in


# Unlike a `contextvars.ContextVar`, this is part of the keys of JAX's caches.
_STAND_IN = jax.make_user_context(None)


def current_stand_in() -> StandIn | None:
    """Returns the active transform override, if any."""
    return _STAND_IN.value


@final
class Choice:
    """Options of wrapped functions that `dafjax.jit` tries; counts their calls.

    Calls inside of other wrapped functions do not count: the outermost decides. Each
    instance is equal only to itself, and is part of the keys of JAX's caches.

    Attributes:
        mode: The residuals that functions store.
        bits: Bits of a code, where there are codes.
        microbatches: How many microbatches `accumulate("auto")` takes.
        num_calls: How many wrapped functions were traced with these options, or with
            others because their own options exclude these.
        num_others: How many were traced with others.
        others: The options of these functions, as text, by name.
        batches: The numbers of examples that functions of `accumulate("auto")` split.
    """

    def __init__(
        self, mode: Mode, bits: int | None = None, microbatches: int = 1
    ) -> None:
        self.mode = mode
        self.bits = bits
        self.microbatches = microbatches
        self.num_calls = 0
        self.num_others = 0
        self.others: dict[str, str] = {}
        self.batches: list[int] = []

    def __str__(self) -> str:
        split = f", microbatches={self.microbatches}" if self.microbatches > 1 else ""
        return f"{self.mode.text(self.bits)}{split}"

    @property
    def is_excluded(self) -> bool:
        """Whether all functions that were traced got other options."""
        return 0 < self.num_calls == self.num_others

    def count(self, name: str, *, excluded: bool) -> None:
        """Counts a call of a wrapped function.

        Args:
            name: The function.
            excluded: Whether its own options exclude that segments are computed again.
        """
        self.num_calls += 1
        if excluded:
            self.num_others += 1
            self.others[name] = self.mode.without_segments.text(self.bits)


@contextlib.contextmanager
def choosing(choice: Choice | None) -> Iterator[None]:
    """Gives these options to wrapped functions within a `with` block, if any."""
    with _CHOICE(choice):
        yield


# Unlike a `contextvars.ContextVar`, it is part of the keys of JAX's caches.
_CHOICE: Any = jax.make_user_context(None)


def current_choice() -> Choice | None:
    """Returns the options that wrapped functions get, if any."""
    return _CHOICE.value


@contextlib.contextmanager
def inside(mode: Mode) -> Iterator[None]:
    """Tells functions called within a `with` block that a wrapped one calls them.

    Args:
        mode: The mode of the wrapped function.
    """
    with _OUTER(mode):
        yield


# Unlike a `contextvars.ContextVar`, it is part of the keys of JAX's caches.
_OUTER: Any = jax.make_user_context(None)


def outer_mode() -> Mode | None:
    """Returns the mode of the wrapped function that is traced, if one is."""
    return _OUTER.value


@final
class WrapList:
    """Lists the wrapped functions that a trace calls.

    Each instance is equal only to itself, and is part of the keys of JAX's caches.

    Attributes:
        opens: Whether the functions themselves are traced, without the wrapper.
        found: For each call, how the function was wrapped, and its results.
    """

    def __init__(self, *, opens: bool) -> None:
        self.opens = opens
        self.found: list[tuple[Transform, Sequence[Any]]] = []

    @property
    def of_scalars(self) -> list[Transform]:
        """How functions were wrapped that return a scalar, as a loss does."""
        return [
            wrap for wrap, results in self.found if any(x.ndim == 0 for x in results)
        ]


@contextlib.contextmanager
def listing_wraps(*, opens: bool) -> Iterator[WrapList]:
    """Lists the wrapped functions that are called within a `with` block."""
    wraps = WrapList(opens=opens)
    with _WRAPS(wraps):
        yield wraps


# Unlike a `contextvars.ContextVar`, it is part of the keys of JAX's caches.
_WRAPS: Any = jax.make_user_context(None)


def current_wraps() -> WrapList | None:
    """Returns the active list of wrapped functions, if any."""
    return _WRAPS.value


@final
class BitsInForce:
    """Bits of the residuals of one traced program.

    Each instance is equal only to itself, and is part of the keys of JAX's caches. So a
    trace made with it is never reused without it: other bits mean another trace, even
    of inner functions that `jax.jit` wraps.

    Attributes:
        ledger: Hash of the name of the ledger that backward passes report to.
        bits: Bits by the hash of the residual's name. A missing residual has its
            planned bits.
        needs_batches: Whether a trace had residuals with the target `BatchNoise`, which
            another program measures.
    """

    def __init__(self, ledger: int, bits: Mapping[int, int]) -> None:
        self.ledger = ledger
        self.bits = bits
        self.needs_batches = False


# For programs that are inspected and never run; this ledger does not exist.
AS_PLANNED = BitsInForce(0, {})


@contextlib.contextmanager
def putting_in_force(bits: BitsInForce) -> Iterator[None]:
    """Gives these bits to functions that are traced inside the context."""
    with _IN_FORCE(bits):
        yield


# Unlike a `contextvars.ContextVar`, it is part of the keys of JAX's caches.
_IN_FORCE: Any = jax.make_user_context(None)


def bits_in_force() -> BitsInForce | None:
    """Returns the bits allocated for the program being traced, if any."""
    return _IN_FORCE.value


@final
@dataclasses.dataclass(frozen=True)
class BatchMeasurement:
    """Makes functions with the target `BatchNoise` measure.

    Attributes:
        ledger: Hash of the name of the ledger that the noise of the batch is added to.
        has_begun: Whether the function that is traced measures already.
    """

    ledger: int
    has_begun: bool = False


@contextlib.contextmanager
def measuring_batches(measurement: BatchMeasurement | None) -> Iterator[None]:
    """Makes functions with the target `BatchNoise` measure within a `with` block."""
    with _BATCHES(measurement):
        yield


# Unlike a `contextvars.ContextVar`, it is part of the keys of JAX's caches.
_BATCHES: Any = jax.make_user_context(None)


def batch_measurement() -> BatchMeasurement | None:
    """Returns how the noise of batches is measured, if it is."""
    return _BATCHES.value
