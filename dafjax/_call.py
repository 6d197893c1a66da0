"""Binds the arguments of a call, and adds causes and remedies to errors of JAX."""

import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, final

import jax


@contextlib.contextmanager
def explained_concretization(traced_for: str) -> Iterator[None]:
    """Adds a remedy to errors about traced arguments that Python needs as values.

    Args:
        traced_for: Purpose of the trace, as JAX's errors name it.
    """
    try:
        yield
    except (
        jax.errors.ConcretizationTypeError,
        jax.errors.TracerIntegerConversionError,
    ) as error:
        # Only for this function, not an inner or outer one; once if wraps are nested.
        if f" for {traced_for}." in str(error):
            _explain(
                error,
                "Name arguments that are not arrays in `static_argnums` or "
                "`static_argnames` of `dafjax.remat_compress`.",
            )
        raise


@contextlib.contextmanager
def explained_forward_mode(fun: Callable[..., Any]) -> Iterator[None]:
    """Adds the name of the function and a remedy to JAX's error about forward mode.

    It misses errors of compiled derivatives and of `jax.linearize`, which are raised
    elsewhere.
    """
    try:
        yield
    except TypeError as error:
        if "forward-mode autodiff" in str(error):
            _explain(
                error,
                f"`{getattr(fun, '__name__', fun)}` is wrapped in "
                "`dafjax.remat_compress`, which supports reverse mode only: "
                "`jax.grad`, `jax.vjp`, `jax.jacrev`. For forward mode use `bits=None` "
                "or `jax.checkpoint`.",
            )
        raise


def _explain(error: Exception, advice: str) -> None:
    if advice not in str(error):
        error.args = (f"{error}\n\n{advice}",)


@final
@dataclasses.dataclass(frozen=True)
class StaticArguments:
    """The static arguments of a function (not arrays), by position and by name."""

    numbers: tuple[int, ...]
    names: tuple[str, ...]


@final
@dataclasses.dataclass(frozen=True)
class Call:
    """One call of a function, without its static arguments.

    Attributes:
        args: The positional arguments; `None` in place of static ones.
        kwargs: The keyword arguments that are not static.
        static: The static arguments: positions and names with their values.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    static: tuple[tuple[int | str, Hashable], ...]

    def leaf_numbers(self, positions: Sequence[int]) -> tuple[int, ...]:
        """Returns the indices of the leaves of the given positional arguments."""
        numbers: list[int] = []
        start = 0
        for position, argument in enumerate(self.args):
            count = len(jax.tree.leaves(argument))
            if position in positions:
                numbers.extend(range(start, start + count))
            start += count
        return tuple(numbers)


def bind(
    fun: Callable[..., Any],
    parameters: Sequence[str],
    static: StaticArguments,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Call:
    """Splits the static arguments off a call, and checks all arguments.

    Args:
        fun: The function, for errors.
        parameters: The result of `positional_parameters(fun)`.
        static: Which arguments are static.
        args: The positional arguments.
        kwargs: The keyword arguments.

    Returns:
        The call.

    Raises:
        ValueError: A static argument is not hashable, or a position is out of range.
        TypeError: Another argument is not a pytree of arrays.
    """
    call = split(parameters, static, args, kwargs)
    for place, value in call.static:
        _check_hashable(fun, place, value)
    _check_arrays(call)
    return call


def split(
    parameters: Sequence[str],
    static: StaticArguments,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Call:
    """Splits the static arguments off a call, as `bind` does, without checks.

    Raises:
        ValueError: A position is out of range.
    """
    found: dict[int | str, Any] = {}
    for name in static.names:
        if name in kwargs:
            found[name] = kwargs[name]
        elif name in parameters[: len(args)]:
            found[parameters.index(name)] = args[parameters.index(name)]
    for number in static.numbers:
        place = number + len(args) if number < 0 else number
        if 0 <= place < len(args):
            found[place] = args[place]
        elif place < 0 or place >= len(parameters):
            raise _out_of_range("static_argnums", number, args)
        elif parameters[place] in kwargs:
            found[parameters[place]] = kwargs[parameters[place]]
    return Call(
        args=tuple(None if n in found else arg for n, arg in enumerate(args)),
        kwargs={name: value for name, value in kwargs.items() if name not in found},
        static=tuple(found.items()),
    )


def positional_parameters(fun: Callable[..., Any]) -> list[str]:
    """Returns the names of the parameters that can be passed by position."""
    try:
        parameters = inspect.signature(fun).parameters.values()
    except (TypeError, ValueError):
        return []
    positional = (
        inspect.Parameter.POSITIONAL_ONLY,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
    )
    return [p.name for p in parameters if p.kind in positional]


def run(
    fun: Callable[..., Any],
    static: tuple[tuple[int | str, Hashable], ...],
    args: Sequence[Any],
    kwargs: dict[str, Any],
) -> Any:
    """Calls a function with the static arguments back in place."""
    args = list(args)
    kwargs = dict(kwargs)
    for place, value in static:
        if isinstance(place, int):
            args[place] = value
        else:
            kwargs[place] = value
    return fun(*args, **kwargs)


@contextlib.contextmanager
def unwritten(fun: Callable[..., Any], arguments: Any) -> Iterator[None]:
    """Raises if the function in the `with` block writes to objects in its arguments.

    These objects are copies of the caller's, rebuilt from their leaves, so anything
    written to them would be lost. Containers are not checked: functions may change them
    for their own purposes, and NNX puts the variables of a state into the module that
    it merges.

    Args:
        fun: The function.
        arguments: The pytree of its arguments.

    Raises:
        ValueError: The function wrote to an object.
    """
    nodes = jax.tree.leaves_with_path(arguments, is_leaf=_is_object)
    objects = [(path, x) for path, x in nodes if not isinstance(x, Mapping)]
    before = [jax.tree.leaves(item) for _, item in objects]
    yield
    for (path, item), leaves in zip(objects, before, strict=True):
        found = jax.tree.leaves_with_path(item)
        pairs = zip(found, leaves, strict=False)
        written = [(*path, *inside) for (inside, leaf), old in pairs if leaf is not old]
        if written or len(found) != len(leaves):
            place = name_of_path((*written, path)[0])
            raise ValueError(
                f"`remat_compress`: `{getattr(fun, '__name__', fun)}` writes to its "
                f"argument `{place}`, and what it writes would be lost. Return it; or, "
                "where a function writes to NNX modules, wrap it by "
                "`dafjax.nnx.remat_compress`."
            )


def name_of_path(path: tuple[Any, ...]) -> str:
    """Formats a path in the pair `(args, kwargs)` for an error message."""
    group = "args" if path[0].idx == 0 else "kwargs"
    return group + jax.tree_util.keystr(path[1:])


def _is_object(item: Any) -> bool:
    """Returns whether a pytree node is neither a built-in container nor a leaf."""
    if isinstance(item, (dict, list, tuple)) or item is None:
        return False
    return not jax.tree_util.all_leaves([item])


def positions(name: str, numbers: Sequence[int], args: Sequence[Any]) -> list[int]:
    """Converts positions of positional arguments to non-negative positions.

    Raises:
        ValueError: A position is out of range. The error names the option `name`.
    """
    for number in numbers:
        if not -len(args) <= number < len(args):
            raise _out_of_range(name, number, args)
    return [number % len(args) for number in numbers]


def _out_of_range(name: str, number: int, args: Sequence[Any]) -> ValueError:
    return ValueError(
        f"`remat_compress({name}=...)` names the argument {number}, but the function "
        f"was called with {len(args)} positional arguments. Pass that argument by "
        "position."
    )


def _check_hashable(fun: Callable[..., Any], place: int | str, value: Any) -> None:
    try:
        hash(value)
    except TypeError:
        raise ValueError(
            f"`remat_compress`: the static argument `{place!r}` of "
            f"`{getattr(fun, '__name__', fun)}` must be hashable, but got `{value!r}` "
            f"of type `{type(value).__name__}`."
        ) from None


def _check_arrays(call: Call) -> None:
    with contextlib.suppress(TypeError):
        for leaf in jax.tree.leaves((call.args, call.kwargs)):
            jax.typeof(leaf)
        return
    # Flattening with paths takes three times as long, so do it only for the error.
    for path, leaf in jax.tree_util.tree_flatten_with_path((call.args, call.kwargs))[0]:
        try:
            jax.typeof(leaf)
        except TypeError:
            raise TypeError(
                "`remat_compress`: arguments must be pytrees of arrays, but "
                f"`{name_of_path(path)}` is `{leaf!r}` of type "
                f"`{type(leaf).__name__}`. "
                "Name arguments that are not arrays in `static_argnums` or "
                "`static_argnames`."
            ) from None
