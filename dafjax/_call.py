"""One call of a wrapped function: its static arguments apart, the others checked."""

import dataclasses
import inspect
from collections.abc import Callable, Hashable, Sequence
from typing import Any, final

import jax
import numpy as np

_ARRAY_TYPES = (jax.Array, np.ndarray, np.generic, bool, int, float, complex)


@final
@dataclasses.dataclass(frozen=True)
class StaticArguments:
    """Which arguments of a function are not arrays."""

    numbers: tuple[int, ...]
    names: tuple[str, ...]


@final
@dataclasses.dataclass(frozen=True)
class Call:
    """One call of a function, static arguments taken out.

    Attributes:
        args: The positional arguments; `None` where static.
        kwargs: The keyword arguments that are not static.
        static: The static arguments: positions and names with their values.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    static: tuple[tuple[int | str, Hashable], ...]

    def run(self, fun: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Calls the function with the static arguments back in place."""
        args = list(args)
        kwargs = dict(kwargs)
        for place, value in self.static:
            if isinstance(place, int):
                args[place] = value
            else:
                kwargs[place] = value
        return fun(*args, **kwargs)


def bind(
    fun: Callable[..., Any], static: StaticArguments, args: tuple[Any, ...], kwargs: Any
) -> Call:
    numbers = normalized(static.numbers, len(args))
    found: dict[int | str, Any] = {n: args[n] for n in numbers if n < len(args)}
    found.update((name, kwargs[name]) for name in static.names if name in kwargs)
    names = _parameter_names(fun)
    for name in static.names:
        if name in names and name not in kwargs and names.index(name) < len(args):
            found[names.index(name)] = args[names.index(name)]
    for place, value in found.items():
        try:
            hash(value)
        except TypeError:
            raise ValueError(
                f"`remat_compress`: the static argument `{place!r}` of "
                f"`{_name(fun)}` must be hashable, but got `{value!r}` of type "
                f"`{type(value).__name__}`."
            ) from None
    return Call(
        args=tuple(None if n in found else arg for n, arg in enumerate(args)),
        kwargs={name: value for name, value in kwargs.items() if name not in found},
        static=tuple(found.items()),
    )


def _name(fun: Callable[..., Any]) -> str:
    return getattr(fun, "__name__", repr(fun))


def _parameter_names(fun: Callable[..., Any]) -> list[str]:
    try:
        parameters = inspect.signature(fun).parameters.values()
    except (TypeError, ValueError):
        return []
    positional = (
        inspect.Parameter.POSITIONAL_ONLY,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
    )
    return [p.name for p in parameters if p.kind in positional]


def normalized(numbers: Sequence[int], count: int) -> tuple[int, ...]:
    return tuple(n + count if n < 0 else n for n in numbers)


def leaf_numbers(call: Call, positions: Sequence[int]) -> tuple[int, ...]:
    """Returns the numbers of the leaves that belong to some positional arguments."""
    numbers: list[int] = []
    start = 0
    for position, argument in enumerate(call.args):
        count = len(jax.tree.leaves(argument))
        if position in positions:
            numbers.extend(range(start, start + count))
        start += count
    return tuple(numbers)


def _holds_objects(leaf: Any) -> bool:
    return isinstance(leaf, np.ndarray) and leaf.dtype.hasobject


def check_arrays(call: Call) -> None:
    for path, leaf in jax.tree_util.tree_flatten_with_path((call.args, call.kwargs))[0]:
        if isinstance(leaf, _ARRAY_TYPES) and not _holds_objects(leaf):
            continue
        where = jax.tree_util.keystr(path[1:])
        group = "args" if path[0].idx == 0 else "kwargs"
        raise TypeError(
            f"`remat_compress`: arguments must be pytrees of arrays, but "
            f"`{group}{where}` is `{leaf!r}` of type `{type(leaf).__name__}`. Name "
            "arguments that are not arrays in `static_argnums` or `static_argnames`."
        )
