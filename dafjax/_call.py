"""The arguments of a call: binds them, and finds those that hold examples of a batch.

It also adds causes and remedies to errors of JAX.
"""

import contextlib
import dataclasses
import functools
import inspect
import itertools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, final

import jax
import jax.numpy as jnp
import numpy as np


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


# How a leaf of the arguments is split: an axis of examples, or `None`.
_Axis: TypeAlias = int | None


@final
@dataclasses.dataclass(frozen=True, eq=False)
class Arguments:
    """The arguments of a call.

    Attributes:
        structure: The structure of the positional and keyword arguments.
        leaves: Their leaves: arrays, and others.
        axes: For each array, the axis that holds the examples, if one does.
        size: How many examples there are.
    """

    structure: Any
    leaves: tuple[Any, ...]
    axes: tuple[_Axis, ...]
    size: int

    @property
    def arrays(self) -> list[Any]:
        """The leaves that are arrays."""
        return [leaf for leaf in self.leaves if _is_array(leaf)]

    def avals(self, size: int) -> list[Any]:
        """Returns shapes and dtypes of the arrays, for a number of examples."""
        return [
            jax.typeof(x) if axis is None else _resized(x, axis, size)
            for x, axis in zip(self.arrays, self.axes, strict=True)
        ]

    @property
    def num_shards(self) -> int:
        """Among how many devices the examples are divided."""
        found = 1
        for x, axis in zip(self.arrays, self.axes, strict=True):
            sharding = getattr(x, "sharding", None)
            if axis is not None and sharding is not None:
                found = max(found, x.shape[axis] // sharding.shard_shape(x.shape)[axis])
        return found

    def resized(self, size: int) -> tuple[Any, Any]:
        """Returns the arguments, with shapes in place of arrays of examples."""
        rest = iter(self.axes)
        leaves = []
        for leaf in self.leaves:
            axis = next(rest) if _is_array(leaf) else None
            if axis is not None:
                resized = _resized(leaf, axis, size)
                leaf = resized.update(sharding=getattr(leaf, "sharding", None))
            leaves.append(leaf)
        return jax.tree.unflatten(self.structure, leaves)

    def apply(self, fun: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a function of these arguments as a function of the arrays."""

        def of_arrays(*arrays: Any) -> Any:
            rest = iter(arrays)
            leaves = [next(rest) if _is_array(x) else x for x in self.leaves]
            args, kwargs = jax.tree.unflatten(self.structure, leaves)
            return fun(*args, **kwargs)

        return of_arrays


def name_of_function(fun: Any) -> str:
    """Returns the name of a function, also where some of its arguments are bound."""
    while isinstance(fun, functools.partial):
        fun = fun.func
    return getattr(fun, "__name__", type(fun).__name__)


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct))


def _resized(x: Any, axis: int, size: int) -> Any:
    shape = list(x.shape)
    shape[axis] = size
    return jax.ShapeDtypeStruct(tuple(shape), x.dtype)


def is_key(x: Any) -> bool:
    """Returns whether an array may hold keys of random numbers."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return True
    return x.dtype == jnp.uint32 and tuple(x.shape[-1:]) in ((2,), (4,))


def folded(key: Any, number: Any) -> Any:
    """Returns keys for a part of a batch; there may be many, typed or not."""
    is_typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    fold = jax.random.fold_in
    for _ in range(key.ndim - (not is_typed)):
        fold = jax.vmap(fold, (0, None))
    return fold(key, number)


def find_examples(
    fun: Callable[..., Any],
    args: Any,
    kwargs: Any,
    in_axes: Any,
    *,
    option: str = "accumulate",
) -> Arguments:
    """Returns the arguments of a call, with the axes that hold examples.

    Args:
        fun: The function, for errors.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        in_axes: The user's option of that name.
        option: Whose option it is, for errors.

    Raises:
        TypeError: An axis is no integer.
        ValueError: An axis is out of range, or no number of examples is common to all.
    """
    leaves, structure = jax.tree.flatten((args, kwargs))
    axes = _given_axes(args, kwargs, in_axes, option)
    pairs = [(x, axis) for x, axis in zip(leaves, axes, strict=True) if _is_array(x)]
    sizes = {x.shape[axis] for x, axis in pairs if axis is not None}
    if len(sizes) != 1:
        raise _no_batch(fun, args, kwargs, axes, option)
    return Arguments(
        structure, tuple(leaves), tuple(axis for _, axis in pairs), sizes.pop()
    )


def _given_axes(args: Any, kwargs: Any, in_axes: Any, option: str) -> list[_Axis]:
    """Returns the axis of examples of each leaf of the arguments."""
    if in_axes is None:
        of_args = [None, *map(_guessed_axes, args[1:])]
    elif isinstance(in_axes, (int, np.integer)):
        of_args = [in_axes] * len(args)
    else:
        of_args = list(in_axes)
    if len(of_args) != len(args):
        raise ValueError(
            f"`{option}(in_axes=...)` must have one entry for each positional "
            f"argument, but got {len(of_args)} entries, `{in_axes!r}`, for "
            f"{len(args)} arguments."
        )
    of_kwargs = {name: _guessed_axes(x) for name, x in kwargs.items()}
    axes: list[_Axis] = []
    for axis, argument in zip(of_args, args, strict=True):
        axes.extend(_axes_of_leaves(axis, argument, option))
    for name in sorted(kwargs):
        axes.extend(_axes_of_leaves(of_kwargs[name], kwargs[name], option))
    return axes


def _guessed_axes(argument: Any) -> Any:
    """Returns 0 for all arrays of an argument if their first axes have one length.

    Scalars and keys hold no examples.
    """
    leaves = jax.tree.leaves(argument)
    holds = [_is_array(x) and x.shape and not is_key(x) for x in leaves]
    lengths = {x.shape[0] for x in itertools.compress(leaves, holds)}
    if len(lengths) != 1:
        return None
    axes = [0 if found else None for found in holds]
    return jax.tree.unflatten(jax.tree.structure(argument), axes)


def _axes_of_leaves(axes: Any, argument: Any, option: str) -> list[_Axis]:
    """Returns the axis of each leaf, given a pytree of axes that is a prefix."""
    try:
        spread = jax.tree.broadcast(axes, argument, is_leaf=lambda axis: axis is None)
    except ValueError as error:
        raise ValueError(
            f"`{option}(in_axes=...)`: `{axes!r}` does not fit an argument of the "
            f"structure {jax.tree.structure(argument)}. Give `None`, an axis, or a "
            "pytree of these with the argument's structure."
        ) from error
    of_leaves = jax.tree.structure(argument).flatten_up_to(spread)
    leaves = jax.tree.leaves(argument)
    return list(map(_axis_of_leaf, of_leaves, leaves, itertools.repeat(option)))


def _axis_of_leaf(axis: Any, leaf: Any, option: str) -> _Axis:
    if axis is None or not _is_array(leaf):
        return None
    if not isinstance(axis, (int, np.integer)) or isinstance(axis, bool):
        raise TypeError(
            f"`{option}(in_axes=...)` must hold integers and `None`, but got "
            f"`{axis!r}`."
        )
    if not -leaf.ndim <= axis < leaf.ndim:
        raise ValueError(
            f"`{option}(in_axes=...)` names the axis {axis} of an array of shape "
            f"{leaf.shape}."
        )
    return axis % leaf.ndim


def _no_batch(
    fun: Callable[..., Any],
    args: Any,
    kwargs: Any,
    axes: Sequence[_Axis],
    option: str,
) -> ValueError:
    found = [
        f"{name_of_path(path)}: {x.shape}"
        for (path, x), axis in zip(
            jax.tree.leaves_with_path((args, kwargs)), axes, strict=True
        )
        if axis is not None
    ]
    listed = ", ".join(found) or "none"
    return ValueError(
        f"`{option}`: the arguments of `{name_of_function(fun)}` that hold "
        f"examples must have one number of examples, but there are {listed}. Say which "
        "axes hold examples: `in_axes=(None, 0)` splits the second of two arguments."
    )
