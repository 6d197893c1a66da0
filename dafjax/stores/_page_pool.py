"""A pool of pages as a store: control, limits and statistics."""

import dataclasses
import fnmatch
import itertools
import types
from collections.abc import Sequence
from typing import Any, NoReturn, Self, final

import numpy as np

from dafjax._native import StaleHandle, make_pool, pool_hash, pool_note
from dafjax._nbytes import parse_nbytes, readable
from dafjax._numbers import as_count, shown
from dafjax._targets import AverageBits, Budget, NoiseCeiling, Target, as_number
from dafjax._typing import Array, ArrayTree, Like
from dafjax.codecs import AbstractCodec, Affine
from dafjax.stores._abstract import AbstractStore
from dafjax.stores._growth import AdaptiveGrowth, Growth
from dafjax.stores._pool_stats import UNLIMITED, PoolStats, pool_stats
from dafjax.stores._pooled_affine import PooledAffine


@final
class PagePool(AbstractStore):
    """Keeps packed residuals in pages of 64 KiB, within a budget set at run time.

    Bits are run-time data: neither a new budget nor other bits compile anything anew.
    When the budget leaves no room, the least important residual loses its last plane
    (8, 4, 2, 1 bit, at the end its block means), and the step goes on. Residuals whose
    codec has 8 bits lose theirs after all others. From the next step on, as far as
    importances are known, bits are given out so that all fit, at most those that are
    asked for. Importances are measured by programs that are traced while the pool has a
    budget or a target; to others, residuals of the same size matter alike.

    Residuals live until the execution that put them is over; their pages are then
    reused. A gradient that is computed in another execution than its forward pass may
    find its residuals gone, and says so: `StaleHandle`. `collect` frees them earlier:
    as soon as the backward pass has read them.

    Residuals in affine codes of 1, 2, 4 or 8 bits wait in the pool, as one entry each,
    or one for each of the parts in which a backward pass on CPUs reads them. They have
    the bits of their codec, unless others are set (`set_bits`) or allocated (`target`):
    then 8 at most. All others (bit masks, the places of maxima, what is kept as it is,
    codes of 3 bits, and what `lasting_only` leaves out) are ordinary arrays of the
    program, as in `Arrays()`; `sites` names those that are in the pool. Programs that
    XLA divides among devices are refused, and so are other platforms than CPUs and,
    where dafjax was built with CUDA, NVIDIA GPUs.

    A pool serves either programs for CPUs or those for one GPU. On a GPU the pages are
    in pinned memory of the host, and only compressed bytes cross the bus. It runs
    behind the host, so that measured importances count an execution late or so; and a
    load that finds its residual gone gives NaN, and the pool's next call raises
    `StaleHandle`.

    A pool is known to compiled programs by its name, so that a program that is cached
    on disk finds the pool of that name in another process.

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
            budget: The most memory that it takes, in bytes or as text (`"64MiB"`); None
                for as much as the system has.
            growth: How it grows: `AdaptiveGrowth` or `FixedGrowth`.
            executions_in_flight: An execution is over when so many newer ones have
                started on its device. More than 1 where several threads dispatch, or
                where a backward pass is an execution of its own.
            backward_once: Whether residuals are freed, and their memory given back, as
                soon as the backward pass is done with them. Then the pool is all but
                empty when XLA needs the most, and a loop over micro-batches in one
                program needs the pool of one. A second backward pass of the same
                forward pass, as by calling a pullback twice, fails and says so. For
                CPUs only.
            lasting_only: Whether residuals that wait only while the function needs far
                less memory than at its peak, as those of the late layers of a
                convolutional network, are arrays of the program: XLA has memory for
                them then, and a step needs less in all. They have the bits of their
                codec, are not counted in the budget, and there can be no target. Wrap
                the loss, and run it once for each backward pass: there are none of a
                function whose results are together more than half as large as the
                largest value in it, or in a loop inside of it; in a loop round it that
                is differentiated they are stacked.
            packer: Who packs residuals of programs on a GPU: `"gpu"`; `"cpu"`, which
                packs what the GPU has quantized while that goes on, where both share
                memory, as on a Jetson; or `"auto"`, the one with which executions take
                less time. It is tried on GPUs that share the host's memory; on others
                the GPU packs.
            name: What compiled programs find it by; by default from the order in which
                pools are made.

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
        self._growth = growth
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
        """What compiled programs find the pool by."""
        return self._name

    @property
    def budget(self) -> int | None:
        """Bytes that the pool takes at most; None for as many as the system has.

        May be set at any time, also as text. It holds from the next execution on that
        puts anything: residuals then lose planes until they fit, and pages go back to
        the system. Nothing is compiled anew.
        """
        return None if self._pool.budget == UNLIMITED else self._pool.budget

    @budget.setter
    def budget(self, budget: int | str | None) -> None:
        self._pool.budget = UNLIMITED if budget is None else _parse_budget(budget)

    @property
    def target(self) -> Target | None:
        """What bits are allocated for; None for nothing: residuals have their codecs'.

        May be set at any time, and holds from the next execution on that puts anything.
        Only programs that were traced while there was a target measure what allocation
        needs to know: `dafjax.remat_compress(bits=dafjax.AverageBits(...))` sets it.
        Always None with `lasting_only`.
        """
        return self._target

    @target.setter
    def target(self, target: Target | None) -> None:
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
        # Importances name what is evicted, too.
        matters = self._target is not None or self.budget is not None
        return codec.affine if matters and isinstance(codec, PooledAffine) else None

    def squared_range(self, codec: AbstractCodec, packed: ArrayTree) -> None:
        # Found when the residual is put.
        del codec, packed

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
        if not isinstance(wanted, Affine) or wanted.bits == 3:
            return wanted
        number = pool_hash(site)
        self._sites[number] = site
        if wanted.is_dithered:
            # Noise cannot be subtracted from codes that have lost planes.
            wanted = dataclasses.replace(wanted, rounding="stochastic")
        return PooledAffine(
            wanted, pool=self._hash, site=number, reads=reads, num_parts=num_parts
        )

    def put(self, packed: ArrayTree) -> ArrayTree:
        return packed

    def get(self, handle: ArrayTree) -> ArrayTree:
        return handle

    @property
    def sites(self) -> tuple[str, ...]:
        """Names of the residuals that traced programs put here."""
        return tuple(self._sites.values())

    def set_bits(self, sites: str, bits: int | None) -> None:
        """Sets the bits of some sites' codes, from the next execution on.

        Args:
            sites: A name of `sites`, or a pattern for some, as `"*/conv1/*"`.
            bits: 1, 2, 4 or 8; None for what is allocated, or the codec's.

        Raises:
            TypeError: `sites` is no text.
            ValueError: `bits` is none of these, or no site has such a name.
        """
        if not isinstance(sites, str):
            raise TypeError(
                "`sites` must be the name of a residual, or a pattern for some, as "
                f'`"*/conv1/*"`, but got `{shown(sites)}`.'
            )
        is_integer = isinstance(bits, (int, np.integer)) and not isinstance(bits, bool)
        if bits is not None and not (is_integer and bits in (1, 2, 4, 8)):
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
        """Frees residuals that are done with; gives memory back to the system.

        Done with are those that a backward pass has read as often as it does, and those
        of executions that are over. Call it between steps, when the results are there
        (`jax.block_until_ready`): nothing is left then. Residuals that have yet to be
        read stay, as those of a pullback (`jax.vjp`) that has not been called, and so
        does what a backward pass reads only in part, because `jax.jit` leaves out what
        no result needs: until the execution is over.

        Earlier calls are safe too: a step that still runs keeps what it has yet to
        read. Only a backward pass that runs again, as by a second call of a pullback,
        finds nothing after that, and says so: `StaleHandle` (from a program on a CPU, a
        `jax.errors.JaxRuntimeError` that tells it). Call the pullback as often as
        needed first.

        On a GPU it waits until that has done what it was told.

        Raises:
            StaleHandle: A load on a GPU has found its residual gone since the pool was
                last used.
        """
        self._pool.collect()

    def stats(self) -> PoolStats:
        """Returns a consistent snapshot, also while programs run."""
        return pool_stats(self._pool.stats(), self._sites)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: types.TracebackType | None,
    ) -> None:
        # Nothing is in flight that the block waited for: all executions are over.
        try:
            self._pool.collect_all()
        except StaleHandle:
            # What the block raised says more.
            if error is None:
                raise

    # A pool is its name: programs with equal ones are equal, and no two are in use.
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
