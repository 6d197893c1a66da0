"""What wrapped functions keep for the backward pass, as a table."""

import dataclasses
import re
from collections.abc import Callable, Iterator
from typing import Any, final

import jax

from dafjax._graph import count_calls, trace
from dafjax._nbytes import readable
from dafjax._plan import Kept
from dafjax._recorder import record_plans
from dafjax._table import align


@final
@dataclasses.dataclass(frozen=True)
class SavedResiduals:
    """What is kept of the functions that `remat_compress` wraps.

    Attributes:
        kept: The values that wait for the backward pass.
        counts: How often each of them is kept: once for each iteration of a `scan`.
    """

    kept: tuple[Kept, ...]
    counts: tuple[int, ...]

    @property
    def raw_nbytes(self) -> int:
        """Bytes the kept values have as ordinary arrays."""
        return sum(item.raw_nbytes * n for item, n in self._counted())

    @property
    def stored_nbytes(self) -> int:
        """Bytes they take while they wait."""
        return sum(item.stored_nbytes * n for item, n in self._counted())

    def _counted(self) -> Iterator[tuple[Kept, int]]:
        return zip(self.kept, self.counts, strict=True)

    def __str__(self) -> str:
        header = ("name", "value", "decision", "raw", "stored", "source")
        rows = [_row(item, n) for item, n in self._counted()]
        total = f"{sum(self.counts)} residuals"
        ratio = self.raw_nbytes / self.stored_nbytes if self.stored_nbytes else 1.0
        summary = (
            total,
            "",
            f"{ratio:.1f}x smaller",
            readable(self.raw_nbytes),
            readable(self.stored_nbytes),
            "",
        )
        right = {header.index("raw"), header.index("stored")}
        return align([header, *rows, summary], right=right)


def saved_residuals(
    fun: Callable[..., Any], *args: Any, **kwargs: Any
) -> SavedResiduals:
    """Lists what wrapped functions keep when a function is differentiated.

    Nothing is computed. Every argument counts as differentiated; close over those that
    are not. Only what is traced anew is seen: pass a function whose inner `jax.jit`s
    have not been differentiated before.

    Args:
        fun: A function made by `remat_compress`, or one that calls such functions.
        *args: Its arguments: arrays, or `jax.ShapeDtypeStruct`s in their place.
        **kwargs: Its keyword arguments.

    Returns:
        What is kept.

    Raises:
        ValueError: `fun` keeps nothing by way of `remat_compress`.

    Example:
        >>> import dafjax, jax.numpy as jnp
        >>> f = dafjax.remat_compress(lambda w, x: jnp.sum(jnp.sin(x @ w)))
        >>> w, x = jnp.ones((256, 256)), jnp.ones((256, 256))
        >>> dafjax.saved_residuals(lambda w: f(w, x), w).stored_nbytes
        17408
    """

    def differentiated(args: Any, kwargs: Any) -> Any:
        _, pullback = jax.vjp(lambda args: fun(*args, **kwargs), args)
        return pullback

    leaves, structure = jax.tree.flatten((args, kwargs))
    with record_plans() as recorder:
        closed, _, _ = trace(
            lambda *leaves: differentiated(*jax.tree.unflatten(structure, leaves)),
            leaves,
        )
    calls = count_calls(closed)
    plans = {name: plan for name, plan in recorder.plans.items() if calls[name]}
    if not plans:
        raise ValueError(
            f"`saved_residuals(fun)`: `{getattr(fun, '__name__', fun)!s}` calls no "
            "function wrapped by `remat_compress` (or one with `bits=None`). Wrap it "
            "first: `saved_residuals(remat_compress(fun), *args)`."
        )
    counted = [
        (k, calls[name])
        for name, plan in plans.items()
        for k in plan.kept
        if not k.is_packed
    ]
    return SavedResiduals(
        kept=tuple(kept for kept, _ in counted), counts=tuple(n for _, n in counted)
    )


def print_saved_residuals(fun: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Prints what `saved_residuals` lists: one line for each residual, and totals.

    A line has the place in the model, shape and dtype, what was decided, bytes raw and
    stored, and the user's line that made the value.

    Args:
        fun: A function made by `remat_compress`, or one that calls such functions.
        *args: Its arguments: arrays, or `jax.ShapeDtypeStruct`s in their place.
        **kwargs: Its keyword arguments.

    Raises:
        ValueError: `fun` keeps nothing by way of `remat_compress`.
    """
    print(saved_residuals(fun, *args, **kwargs))


def _row(item: Kept, count: int) -> tuple[str, ...]:
    dtype = getattr(item.dtype, "name", str(item.dtype))
    times = "" if count == 1 else f" x {count}"
    return (
        _place(item),
        f"{dtype}[{','.join(map(str, item.shape))}]{times}",
        "save" if item.codec is None else f"compress {item.codec}",
        readable(item.raw_nbytes * count),
        readable(item.stored_nbytes * count),
        # Of an installed package, the part that tells which.
        item.source.rpartition("site-packages/")[2],
    )


def _place(item: Kept) -> str:
    """Returns the place in the model, without the names of transformations."""
    name = item.name
    while (plain := re.sub(r"\b\w+\(([^()]*)\)", r"\1", name)) != name:
        name = plain
    return "/".join(part for part in (*name.split("/"), item.primitive) if part)
