"""Finds which arguments of a call hold the examples of a batch."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, final

import jax
import jax.numpy as jnp
import numpy as np

from dafjax._call import name_of_path


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


def find_examples(
    fun: Callable[..., Any], args: Any, kwargs: Any, in_axes: Any
) -> Arguments:
    """Returns the arguments of a call, with the axes that hold examples.

    Args:
        fun: The function, for errors.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        in_axes: The user's option of `accumulate`.

    Raises:
        TypeError: An axis is no integer.
        ValueError: An axis is out of range, or no number of examples is common to all.
    """
    leaves, structure = jax.tree.flatten((args, kwargs))
    axes = _given_axes(args, kwargs, in_axes)
    pairs = [(x, axis) for x, axis in zip(leaves, axes, strict=True) if _is_array(x)]
    sizes = {x.shape[axis] for x, axis in pairs if axis is not None}
    if len(sizes) != 1:
        raise _no_batch(fun, args, kwargs, axes)
    return Arguments(
        structure, tuple(leaves), tuple(axis for _, axis in pairs), sizes.pop()
    )


def _given_axes(args: Any, kwargs: Any, in_axes: Any) -> list[_Axis]:
    """Returns the axis of examples of each leaf of the arguments."""
    if in_axes is None:
        of_args = [None, *map(_guessed_axes, args[1:])]
    elif isinstance(in_axes, (int, np.integer)):
        of_args = [in_axes] * len(args)
    else:
        of_args = list(in_axes)
    if len(of_args) != len(args):
        raise ValueError(
            "`accumulate(in_axes=...)` must have one entry for each positional "
            f"argument, but got {len(of_args)} entries, `{in_axes!r}`, for "
            f"{len(args)} arguments."
        )
    of_kwargs = {name: _guessed_axes(x) for name, x in kwargs.items()}
    axes: list[_Axis] = []
    for axis, argument in zip(of_args, args, strict=True):
        axes.extend(_axes_of_leaves(axis, argument))
    for name in sorted(kwargs):
        axes.extend(_axes_of_leaves(of_kwargs[name], kwargs[name]))
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


def _axes_of_leaves(axes: Any, argument: Any) -> list[_Axis]:
    """Returns the axis of each leaf, given a pytree of axes that is a prefix."""
    try:
        spread = jax.tree.broadcast(axes, argument, is_leaf=lambda axis: axis is None)
    except ValueError as error:
        raise ValueError(
            f"`accumulate(in_axes=...)`: `{axes!r}` does not fit an argument of the "
            f"structure {jax.tree.structure(argument)}. Give `None`, an axis, or a "
            "pytree of these with the argument's structure."
        ) from error
    of_leaves = jax.tree.structure(argument).flatten_up_to(spread)
    return list(map(_axis_of_leaf, of_leaves, jax.tree.leaves(argument)))


def _axis_of_leaf(axis: Any, leaf: Any) -> _Axis:
    if axis is None or not _is_array(leaf):
        return None
    if not isinstance(axis, (int, np.integer)) or isinstance(axis, bool):
        raise TypeError(
            f"`accumulate(in_axes=...)` must hold integers and `None`, but got "
            f"`{axis!r}`."
        )
    if not -leaf.ndim <= axis < leaf.ndim:
        raise ValueError(
            f"`accumulate(in_axes=...)` names the axis {axis} of an array of shape "
            f"{leaf.shape}."
        )
    return axis % leaf.ndim


def _no_batch(
    fun: Callable[..., Any], args: Any, kwargs: Any, axes: Sequence[_Axis]
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
        f"`accumulate`: the arguments of `{name_of_function(fun)}` that hold "
        f"examples must have one number of examples, but there are {listed}. Say which "
        "axes hold examples: `in_axes=(None, 0)` splits the second of two arguments."
    )
