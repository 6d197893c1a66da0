"""A pool of pages as a store: its codec, control, limits and statistics."""

import dataclasses
import fnmatch
import itertools
import math
import types
from collections.abc import Sequence
from typing import Any, NoReturn, Self, final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dafjax._bits import (
    LADDER,
    AverageBits,
    BatchNoise,
    Budget,
    NoiseCeiling,
    Target,
    as_number,
)
from dafjax._native import (
    StaleHandle,
    make_pool,
    pool_get,
    pool_hash,
    pool_note,
    pool_put,
)
from dafjax._numbers import Array, Like, as_count, parse_nbytes, readable, shown
from dafjax.codecs import AbstractCodec, Affine
from dafjax.codecs._abstract import from_rows, to_rows
from dafjax.codecs._affine import as_seed
from dafjax.stores._abstract import AbstractStore
from dafjax.stores._pool_stats import (
    UNLIMITED,
    AdaptiveGrowth,
    Growth,
    PoolStats,
    pool_stats,
)


@final
@dataclasses.dataclass(frozen=True)
class PooledAffine(AbstractCodec):
    """Encodes an array as `affine` does, but into a page pool that chooses the bits.

    Args:
        affine: The code. Its bits apply unless others are set or allocated in the pool.
        pool: Hash of the pool's name.
        site: Hash of the residual id.
        reads: How often one backward pass decodes the array; 0 if unknown.
        num_parts: The most chunks of the batch axis. Each chunk is a separate pool
            entry, provided that every row is packed separately and the planes of a
            chunk fill pages.
    """

    affine: Affine
    pool: int
    site: int
    reads: int = 0
    num_parts: int = 1

    @property
    def is_exact(self) -> bool:
        return False

    def encode(self, x: Array, *, seed: int | Array = 0) -> Array:
        like = jax.ShapeDtypeStruct(x.shape, x.dtype)
        self.check(like)
        rows, format = self.affine.rows_and_format(x.shape)
        count, size = _as_matrix(rows)
        parts = self._parts_of(like)
        return pool_put(
            lax.reshape(to_rows(x, rows), (parts, count // parts, size)),
            as_seed(seed),
            pool=self.pool,
            site=self.site,
            format=format,
            max_bits=_MAX_BITS,
        )

    def decode(
        self, packed: Array, like: Like, *, after: tuple[Array, ...] = ()
    ) -> Array:
        self.check(like)
        rows, format = self.affine.rows_and_format(like.shape)
        count, size = _as_matrix(rows)
        unpacked = pool_get(
            packed,
            *after,
            pool=self.pool,
            rows=(count // packed.shape[0], size),
            dtype=jnp.dtype(like.dtype),
            format=format,
            reads=self.reads,
        )
        return from_rows(lax.reshape(unpacked, rows), like)

    def packed_nbytes(self, like: Like) -> int:
        """Returns the bytes of the handles; bytes in the pool depend on the run."""
        self.check(like)
        return 16 * self._parts_of(like)

    def packs_parts(self, like: Like, count: int) -> bool:
        return self._parts_of(like) % count == 0

    def check(self, like: Like) -> None:
        self.affine.check(like)

    def _parts_of(self, like: Like) -> int:
        counts = range(self.num_parts, 1, -1)
        for count in (c for c in counts if self.num_parts % c == 0):
            fills_pages = math.prod(like.shape) >= count * _NUM_ELEMENTS_OF_PAGE
            if fills_pages and self.affine.packs_parts(like, count):
                return count
        return 1


# The most bits that the pool may set or allocate.
_MAX_BITS = 8
# A page of 64 KiB holds one bit of this many elements.
_NUM_ELEMENTS_OF_PAGE = 8 * 65536


def _as_matrix(rows: tuple[int, ...]) -> tuple[int, int]:
    *count, size = rows
    return (count[0] if count else 1, size)


@final
class PagePool(AbstractStore):
    """Keeps packed residuals in pages of 64 KiB, within a budget set at run time.

    Bits are run-time data: a new budget or new bits need no recompilation. When a
    residual does not fit the budget, the least sensitive residual loses its last bit
    plane (8, 4, 2, 1 bit, at last only its group means remain), and the step goes on.
    Residuals whose codec has 8 bits lose planes after all others. From the next step
    on, the pool allocates bits so that all residuals fit, at most the requested bits
    each, as far as it knows their sensitivities. Programs measure sensitivities if
    the pool has a budget or a target while they are traced. Without measurements the
    pool treats residuals of equal size as equally sensitive.

    A residual lives until the execution that stored it is over; then the pool reuses
    its pages. A backward pass that runs in a later execution than its forward pass may
    find its residuals gone, and raises `StaleHandle`. `collect` frees residuals
    earlier, as soon as the backward pass has read them.

    The pool stores residuals in affine codes of 1, 2, 4 or 8 bits. Each is one entry,
    or one entry per chunk if a backward pass on CPUs reads it in chunks. A residual
    has the bits of its codec, unless others are set (`set_bits`) or allocated
    (`target`); then 8 at most. All other residuals stay ordinary arrays of the
    program, as in `Arrays()`: bit masks, argmax indices of max-pooling, uncompressed
    residuals, codes of 3 bits, and residuals that `lasting_only` leaves out. `sites`
    lists the residuals in the pool. The pool serves CPUs and, if dafjax was built with
    CUDA, NVIDIA GPUs. It refuses other platforms, and programs that XLA divides among
    devices.

    A pool serves either CPU programs or the programs of one GPU. On a GPU the pages
    are in pinned host memory, and only compressed bytes cross the bus. The GPU runs
    behind the host, so measured sensitivities take effect about one execution late. A
    load on a GPU that finds its residual gone returns NaN, and the pool's next call
    raises `StaleHandle`.

    Compiled programs find a pool by its name. So a program that is cached on disk
    finds the pool of that name in another process.

    Example:
        >>> import dafjax
        >>> with dafjax.stores.PagePool("64MiB", name="example") as pool:
        ...     pool.budget = "32MiB"
        ...     pool.stats().live_entries
        0
    """

    def __init__(
        self,
        budget: int | str | None = None,
        *,
        growth: Growth = AdaptiveGrowth(),  # noqa: B008  (frozen)
        executions_in_flight: int = 1,
        backward_once: bool = False,
        lasting_only: bool = False,
        packer: str = "auto",
        name: str | None = None,
    ) -> None:
        """Makes an empty pool.

        Args:
            budget: The most memory that the pool takes, in bytes or as text
                (`"64MiB"`); None for no limit but the system's memory.
            growth: How the pool grows: `AdaptiveGrowth` or `FixedGrowth`.
            executions_in_flight: An execution is over when this many newer executions
                have started on its device. Use more than 1 if several threads
                dispatch, or if forward and backward pass are separate executions.
            backward_once: Whether to free residuals, and give their memory back, as
                soon as the backward pass has read them. Then the pool is all but empty
                when XLA needs the most memory, and a loop over micro-batches in one
                program needs the pool memory of one micro-batch. A second backward
                pass of the same forward pass, for example a second call of a pullback,
                raises an error. For CPUs only.
            lasting_only: Whether to store long-lived residuals only. Short-lived
                residuals are saved only while the function needs far less memory than
                at its peak, as in the late layers of a convolutional network. They
                then stay arrays of the program: XLA has memory to spare at that time,
                and a step needs less memory in all. They keep the bits of their codec
                and do not count towards the budget, and the pool cannot have a target.
                Wrap the loss, and run it once per backward pass. A function has no
                short-lived residuals if its results together are more than half as
                large as its largest value; neither has a loop inside the function. A
                differentiated loop around the function stacks them.
            packer: Which processor packs residuals of GPU programs: `"gpu"`, `"cpu"` or
                `"auto"`. `"cpu"` is for GPUs that share the host's memory, as on a
                Jetson: the CPU packs codes that the GPU has quantized, while the GPU
                goes on. `"auto"` tries both on such GPUs and takes the one with shorter
                executions; on other GPUs the GPU packs.
            name: The name that compiled programs use to find the pool; by default it
                counts the pools in the order of their creation.

        Raises:
            TypeError: An argument has a wrong type.
            ValueError: An argument is out of range, or a pool in use has the name.
            LibraryError: The compiled library is missing or does not fit jaxlib.
        """
        executions_in_flight = as_count(
            "executions_in_flight",
            executions_in_flight,
            least=1,
            most=_MOST_IN_FLIGHT,
            remedy="It is how many executions overlap: 1 where one thread dispatches.",
        )
        _check_flag("backward_once", backward_once)
        _check_flag("lasting_only", lasting_only)
        if not isinstance(packer, str) or packer not in _PACKERS:
            raise ValueError(
                f"`packer` must be one of {', '.join(map(repr, _PACKERS))}, but got "
                f"{shown(packer)}."
            )
        if not isinstance(growth, Growth):
            raise TypeError(
                "`growth` must be `AdaptiveGrowth(...)` or `FixedGrowth(...)`, but got "
                f"`{growth!r}`."
            )
        adaptive = isinstance(growth, AdaptiveGrowth)
        self._name = f"pool {next(_NUMBERS)}" if name is None else _checked_name(name)
        self._hash = pool_hash(self._name)
        self._sites: dict[int, str] = {}
        self._target: Target | None = None
        self._executions_in_flight = executions_in_flight
        self._lasting_only = lasting_only
        self._pool: Any = make_pool(
            self._name,
            budget=None if budget is None else _parse_budget(budget),
            growth_share=growth.share if adaptive else None,
            growth_nbytes=None if adaptive else parse_nbytes("growth", growth.nbytes),
            executions_in_flight=executions_in_flight,
            backward_once=backward_once,
            packer=packer,
        )

    @property
    def name(self) -> str:
        """The name that compiled programs use to find the pool."""
        return self._name

    @property
    def budget(self) -> int | None:
        """The most bytes that the pool takes; None for no limit.

        May be set at any time, also as text. A new budget holds from the next execution
        that stores a residual: residuals then lose planes until they fit, and pages go
        back to the system. Nothing is recompiled.
        """
        return None if self._pool.budget == UNLIMITED else self._pool.budget

    @budget.setter
    def budget(self, budget: int | str | None) -> None:
        self._pool.budget = UNLIMITED if budget is None else _parse_budget(budget)

    @property
    def target(self) -> Target | None:
        """The target of the bit allocation; None to keep the bits of the codecs.

        May be set at any time; it holds from the next execution that stores a residual.
        Allocation needs sensitivities, and only programs that are traced while the pool
        has a target or a budget measure them. The target is set by
        `dafjax.remat_compress(bits=dafjax.AverageBits(...))`, too. Always None with
        `lasting_only`.
        """
        return self._target

    @target.setter
    def target(self, target: Target | None) -> None:
        if isinstance(target, BatchNoise):
            raise NotImplementedError(
                f'`target` must not be `{target!r}` (`bits="auto"`) here: it takes '
                "`dafjax.jit` to measure the noise of a batch, for "
                "`dafjax.stores.Arrays()` and `Host()`. Give a page pool "
                "`dafjax.NoiseCeiling(...)` or a budget."
            )
        if target is not None and not isinstance(
            target, (AverageBits, Budget, NoiseCeiling)
        ):
            raise TypeError(
                "`target` must be `dafjax.AverageBits(...)`, `dafjax.Budget(...)`, "
                f"`dafjax.NoiseCeiling(...)` or None, but got `{target!r}`."
            )
        if target is not None and self._lasting_only:
            raise ValueError(
                f"`target` must be None here, but got `{target!r}`: {_FIXED_BITS} Make "
                "the pool without `lasting_only`."
            )
        self._target = target
        self._pool.set_target(*as_number(target))

    @property
    def takes_brief(self) -> bool:
        return not self._lasting_only

    def allocate_for(self, target: Target) -> "PagePool":
        if self._lasting_only:
            raise ValueError(
                f"`remat_compress(bits={target!r}, store=...)`: {_FIXED_BITS} Give "
                "`bits` as a number, or make the pool without `lasting_only`."
            )
        if self._target is not None and self._target != target:
            raise ValueError(
                f"`remat_compress(bits={target!r}, store=...)`: the pool allocates for "
                f"`{self._target!r}` already. A pool has one target for all that it "
                "holds: use a pool for each, or set `pool.target`."
            )
        self.target = target
        return self

    def measured_code(self, codec: AbstractCodec) -> Affine | None:
        # Sensitivities also decide which residual loses planes.
        matters = self._target is not None or self.budget is not None
        return codec.affine if matters and isinstance(codec, PooledAffine) else None

    def note(
        self,
        sensitivities: Array,
        codecs: Sequence[AbstractCodec],
        likes: Sequence[Like],
        after: Array,
    ) -> Array:
        del likes
        sites = tuple(c.site for c in codecs if isinstance(c, PooledAffine))
        return pool_note(sensitivities, after, pool=self._hash, sites=sites)

    def codec(
        self, wanted: AbstractCodec, *, site: str, reads: int = 0, num_parts: int = 1
    ) -> AbstractCodec:
        if not isinstance(wanted, Affine) or wanted.bits not in LADDER:
            return wanted
        number = pool_hash(site)
        self._sites[number] = site
        if wanted.is_dithered:
            # Noise cannot be subtracted from codes that have lost planes.
            wanted = dataclasses.replace(wanted, rounding="stochastic")
        return PooledAffine(
            wanted, pool=self._hash, site=number, reads=reads, num_parts=num_parts
        )

    @property
    def sites(self) -> tuple[str, ...]:
        """The ids of the residuals that traced programs store in this pool."""
        return tuple(self._sites.values())

    def set_bits(self, sites: str, bits: int | None) -> None:
        """Sets the bits of some residuals' codes, from the next execution on.

        Args:
            sites: A residual id from `sites`, or a pattern such as `"*/conv1/*"`.
            bits: 1, 2, 4 or 8; None for the allocated bits, or else the codec's.

        Raises:
            TypeError: `sites` is not a string.
            ValueError: `bits` has another value, or `sites` matches no residual.
        """
        if not isinstance(sites, str):
            raise TypeError(
                "`sites` must be the name of a residual, or a pattern for some, as "
                f'`"*/conv1/*"`, but got `{shown(sites)}`.'
            )
        is_integer = isinstance(bits, (int, np.integer)) and not isinstance(bits, bool)
        if bits is not None and not (is_integer and bits in LADDER):
            raise ValueError(
                "`bits` must be 1, 2, 4, 8 or None (the codec's), but got "
                f"{shown(bits)}."
            )
        found = [n for n, name in self._sites.items() if _matches(name, sites)]
        if not found:
            known = ", ".join(repr(name) for name in self._sites) or "none yet"
            left_out = ""
            if self._lasting_only:
                left_out = " What `lasting_only` leaves in arrays is not among them."
            raise ValueError(
                f"`sites` must be the name of a residual that a program puts into this "
                f"pool, or a pattern for some, but got {sites!r}. There are {known}; "
                f"they are known when the program has been traced.{left_out}"
            )
        for number in found:
            self._pool.set_bits(number, 0 if bits is None else int(bits))

    def collect(self) -> None:
        """Frees residuals after their last use, and gives memory back to the system.

        Frees a residual if a backward pass has made all its reads of it, or if its
        execution is over. Call it between steps, once the results are ready
        (`jax.block_until_ready`). The pool is then empty, except for two kinds of
        residuals, which stay until their execution is over: residuals not yet read,
        for example of a pullback (`jax.vjp`) that has not been called; and residuals
        that the backward pass reads only in part, because `jax.jit` drops computations
        that no result needs.

        Earlier calls are safe too: a running step keeps the residuals that it has yet
        to read. Only a repeated backward pass, such as a second call of a pullback,
        fails after `collect`, with `StaleHandle` (a program on a CPU raises a
        `jax.errors.JaxRuntimeError` that says so). Call the pullback as often as needed
        before.

        On a GPU it waits until the GPU has finished its queued work.

        Raises:
            StaleHandle: A load on a GPU has found its residual gone since the pool was
                last used.
        """
        self._pool.collect()

    def stats(self) -> PoolStats:
        """Returns a consistent snapshot, even while programs run."""
        return pool_stats(self._pool.stats(), self._sites)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: types.TracebackType | None,
    ) -> None:
        # The block has waited for its executions, so treat all executions as over.
        try:
            self._pool.collect_all()
        except StaleHandle:
            # The error of the `with` block says more.
            if error is None:
                raise

    # The name identifies a pool: compiled programs refer to it by name, and no two
    # pools in use share a name.
    def __eq__(self, other: object) -> bool:
        return isinstance(other, PagePool) and other._name == self._name

    def __hash__(self) -> int:
        return hash((PagePool, self._name))

    # For `copy` and every protocol of `pickle`.
    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "A `dafjax.stores.PagePool` cannot be copied or pickled: it owns memory of "
            "this process, and compiled programs find it by its name. Pass the pool "
            "itself; in another process, make one with "
            f"`dafjax.stores.PagePool(..., name={self._name!r})`."
        )

    def __repr__(self) -> str:
        budget = self.budget
        shown = "None" if budget is None else f'"{readable(budget)}"'
        lasting_only = ", lasting_only=True" if self._lasting_only else ""
        return f"PagePool({shown}{lasting_only}, name={self._name!r})"


def _parse_budget(budget: int | str) -> int:
    return parse_nbytes("budget", budget, remedy="`None` is for no limit.")


def _checked_name(name: object) -> str:
    if not isinstance(name, str):
        raise TypeError(
            f"`name` must be text or None, but got `{shown(name)}` of type "
            f"`{type(name).__name__}`."
        )
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"`name` must be text that UTF-8 can encode, but got {shown(name)}. Leave "
            "out lone surrogates."
        ) from error
    return name


def _check_flag(argument: str, value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError(
            f"`{argument}` must be True or False, but got `{shown(value)}`."
        )


def _matches(name: str, pattern: str) -> bool:
    return name == pattern or fnmatch.fnmatchcase(name, pattern)


_FIXED_BITS = (
    "what a `PagePool(lasting_only=True)` leaves in arrays has fixed bits, and its "
    "noise is not measured."
)
_MOST_IN_FLIGHT = 64
_PACKERS = ("auto", "gpu", "cpu")
_NUMBERS = itertools.count()
