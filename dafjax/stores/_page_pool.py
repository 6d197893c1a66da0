"""A pool of pages as a store: control, limits and statistics."""

import itertools
import types
from typing import Any, Self, final

from dafjax._native import make_pool
from dafjax._nbytes import parse_nbytes, readable
from dafjax.stores._growth import AdaptiveGrowth, Growth
from dafjax.stores._pool_stats import UNLIMITED, PoolStats, pool_stats


@final
class PagePool:
    """Keeps packed residuals in pages of 64 KiB, within a budget set at run time.

    Bits are run-time data: neither a new budget nor other bits compile anything anew.
    When the budget leaves no room, the least important residual loses its last plane
    (8, 4, 2, 1 bit, at the end its block means), and the step goes on.

    Residuals live until the execution that put them is over; their pages are then
    reused. A gradient that is computed in another execution than its forward pass may
    find its residuals gone, and says so: `StaleHandle`.

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
            name: What compiled programs find it by; by default from the order in which
                pools are made.

        Raises:
            ValueError: An argument is out of range, or a pool in use has the name.
            LibraryError: The compiled library is missing or does not fit jaxlib.
        """
        if (
            isinstance(executions_in_flight, bool)
            or not isinstance(executions_in_flight, int)
            or not 1 <= executions_in_flight <= _MOST_IN_FLIGHT
        ):
            raise ValueError(
                f"`executions_in_flight` must be an integer from 1 to "
                f"{_MOST_IN_FLIGHT}, but got {executions_in_flight!r}."
            )
        if not isinstance(growth, Growth):
            raise TypeError(
                "`growth` must be `AdaptiveGrowth(...)` or `FixedGrowth(...)`, but got "
                f"`{growth!r}`."
            )
        adaptive = isinstance(growth, AdaptiveGrowth)
        self._name = f"pool {next(_NUMBERS)}" if name is None else name
        self._growth = growth
        self._executions_in_flight = executions_in_flight
        self._pool: Any = make_pool(
            self._name,
            budget=None if budget is None else parse_nbytes("budget", budget),
            growth_share=growth.share if adaptive else None,
            growth_nbytes=None if adaptive else parse_nbytes("nbytes", growth.nbytes),
            executions_in_flight=executions_in_flight,
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
        self._pool.budget = (
            UNLIMITED if budget is None else parse_nbytes("budget", budget)
        )

    def set_bits(self, site: int, bits: int | None) -> None:
        """Sets the bits of a site's codes, from the next execution on.

        Args:
            site: Its number, as in `stats().sites`.
            bits: 1, 2, 4 or 8, never more than the codec's; None for the codec's.

        Raises:
            ValueError: `bits` is none of these.
        """
        if bits not in (None, 1, 2, 4, 8):
            raise ValueError(
                f"`bits` must be 1, 2, 4, 8 or None (the codec's), but got {bits!r}."
            )
        self._pool.set_bits(site, bits or 0)

    def collect(self) -> None:
        """Frees what executions left that are over; gives memory back to the system."""
        self._pool.collect()

    def stats(self) -> PoolStats:
        """Returns a consistent snapshot, also while programs run."""
        return pool_stats(self._pool.stats())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: types.TracebackType | None,
    ) -> None:
        # Nothing is in flight that the block waited for: all executions are over.
        self._pool.collect_all()

    # A pool is its name: programs with equal ones are equal, and no two are in use.
    def __eq__(self, other: object) -> bool:
        return isinstance(other, PagePool) and other._name == self._name

    def __hash__(self) -> int:
        return hash((PagePool, self._name))

    def __repr__(self) -> str:
        budget = self.budget
        shown = "None" if budget is None else f'"{readable(budget)}"'
        return f"PagePool({shown}, name={self._name!r})"


_MOST_IN_FLIGHT = 64
_NUMBERS = itertools.count()
