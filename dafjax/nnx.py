"""`remat_compress` for Flax NNX: used like `flax.nnx.remat`."""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax

from dafjax import _remat_compress
from dafjax._bits import AnyBits, Target
from dafjax.policies import AbstractPolicy
from dafjax.stores import AbstractStore


try:
    from flax import nnx
except ModuleNotFoundError as error:
    raise ImportError(
        "`dafjax.nnx` needs Flax, which is not installed: `pip install flax`."
    ) from error


def remat_compress(
    f: Callable[..., Any] | None = None,
    *,
    policy: AbstractPolicy | Callable[..., Any] | None = None,
    bits: AnyBits | Target | None = 2,
    store: AbstractStore | None = None,
    static_argnums: int | Sequence[int] = (),
    activation_argnums: int | Sequence[int] | None = None,
    rematerialize: bool | Literal["exact"] = False,
    max_parts: int | None = None,
    without_passes: Sequence[str] = (),
    seed: int | jax.Array = 0,
    prevent_cse: bool = True,
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> Callable[..., Any]:
    """Makes a function of modules save its residuals in a few bits.

    It replaces `flax.nnx.remat` and takes the same arguments: use it on a function that
    takes modules or as a decorator of a method, also below `flax.nnx.scan`. Variables
    that the function changes, such as batch statistics and counts of random streams,
    change as with `flax.nnx.remat`; shared variables change once.
    `dafjax.remat_compress` says how results and gradients relate to those of the plain
    function.

    The input of a block is mostly the output of the previous block, and nothing else
    keeps it alive. So if the backward pass needs a positional array argument, the
    policy decides about it as about any value computed inside. Variables, other
    contents of modules, and keyword arguments are used unchanged.

    Args:
        f: The function. Its arguments are pytrees of arrays, modules and other NNX
            objects; its results are pytrees of arrays.
        policy: Decides about each residual, as in `dafjax.remat_compress`; may be a
            policy of `jax.checkpoint`. `None`: `dafjax.policies.CompressExpensive()`.
        bits: As in `dafjax.remat_compress`. `None` turns dafjax off.
        store: Keeps packed residuals. `None`: `dafjax.stores.Arrays()`.
        static_argnums: Positions of hashable arguments that are not arrays. In a method
            `self` is position 0.
        activation_argnums: Positions of arguments whose arrays nothing else keeps
            alive, counted as in `static_argnums`. `None`: all. Leave out an array that
            many blocks share, such as a mask: uncompressed it is saved once, but packed
            it is saved once per block.
        rematerialize: As in `dafjax.remat_compress`.
        max_parts: As in `dafjax.remat_compress`.
        without_passes: As in `dafjax.remat_compress`.
        seed: Seed of the rounding noise, an integer or a uint32 scalar, traced or not.
        prevent_cse: As in `dafjax.remat_compress`: it has no effect.
        graph: Has no effect. In `flax.nnx.remat`, `False` refuses variables that
            modules share; dafjax always accepts them.
        graph_updates: Has no effect. In `flax.nnx.remat`, `False` leaves out variables
            that the function adds to modules; dafjax always adds them.

    Returns:
        A function with the signature of `f`.

    Raises:
        TypeError: An option has a wrong type, or `f` is a class, a module or a method
            of one module.
        ValueError: An option has a value outside its set.

    Example:
        >>> import dafjax.nnx, jax, jax.numpy as jnp
        >>> from flax import nnx
        >>> class Block(nnx.Module):
        ...     def __init__(self, features, rngs):
        ...         self.dense = nnx.Linear(features, features, rngs=rngs)
        ...     @dafjax.nnx.remat_compress(bits=2)
        ...     def __call__(self, x):
        ...         return x + nnx.relu(self.dense(x))
        >>> block = Block(64, nnx.Rngs(0))
        >>> gradient = nnx.grad(lambda block, x: block(x).mean())
        >>> gradient(block, jnp.ones((128, 64))).dense.kernel.shape
        (64, 64)
    """
    compress = functools.partial(
        _remat_compress.remat_compress,
        policy=policy,
        bits=bits,
        store=store,
        static_argnums=static_argnums,
        rematerialize=rematerialize,
        max_parts=max_parts,
        without_passes=without_passes,
        seed=seed,
        prevent_cse=prevent_cse,
    )
    if f is None:
        return functools.partial(
            remat_compress,
            activation_argnums=activation_argnums,
            graph=graph,
            graph_updates=graph_updates,
            **compress.keywords,
        )
    # Check the options now, not in the first call.
    compress(f)
    if activation_argnums is not None:
        compress(f, activation_argnums=activation_argnums)
    _check_function(f)
    for name, value in (("graph", graph), ("graph_updates", graph_updates)):
        if value is not None and not isinstance(value, bool):
            raise TypeError(
                f"`remat_compress({name}=...)` must be a bool or `None`, but got "
                f"`{value!r}`. It has no effect: leave it out."
            )
    return _lift(f, compress, activation_argnums)


def _lift(
    f: Callable[..., Any],
    compress: Callable[..., Callable[..., Any]],
    activation_argnums: int | Sequence[int] | None,
) -> Callable[..., Any]:
    """Lifts a transformation of functions of arrays to functions of modules."""

    @functools.wraps(f)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        leaves, structure = jax.tree.flatten((args, kwargs), is_leaf=_is_node)
        # Split one list, so that variables which modules share are split off once.
        nodes = [leaf for leaf in leaves if _is_node(leaf)]
        graphdef, state = nnx.split(nodes)

        def pure(*args: Any, kwargs: Any, state: Any) -> Any:
            nodes = nnx.merge(graphdef, state)
            before = _values(nodes)
            rest = iter(nodes)
            leaves = [
                next(rest) if leaf is None else leaf
                for leaf in structure.flatten_up_to((args, kwargs))
            ]
            args, kwargs = structure.unflatten(leaves)
            results = f(*args, **kwargs)
            after = _values(nodes)
            # Return only changed variables: parameters stay the caller's arrays.
            changed = {
                path for path, value in after.items() if value is not before.get(path)
            }
            return results, nnx.state(nodes, lambda path, _: path in changed)

        arrays, kwargs = structure.unflatten(
            [None if _is_node(leaf) else leaf for leaf in leaves]
        )
        activations = (
            range(len(args)) if activation_argnums is None else activation_argnums
        )
        results, changes = compress(pure, activation_argnums=activations)(
            *arrays, kwargs=kwargs, state=state
        )
        nnx.update(nodes, changes)
        return results

    return wrapped


def _is_node(x: Any) -> bool:
    return isinstance(x, (nnx.Pytree, nnx.Variable))


def _values(nodes: Sequence[Any]) -> dict[Any, Any]:
    """Returns the value of each variable, by path."""
    return {
        path: leaf.get_value() if isinstance(leaf, nnx.Variable) else leaf
        for path, leaf in nnx.to_flat_state(nnx.state(nodes))
    }


def _check_function(f: Callable[..., Any]) -> None:
    bound_to = getattr(f, "__self__", None)
    if inspect.isclass(f):
        got = f"the class `{f.__name__}`"
    elif isinstance(f, nnx.Module):
        got = f"a module, `{type(f).__name__}(...)`"
    elif isinstance(bound_to, nnx.Module):
        got = f"the method of one module, `{type(bound_to).__name__}(...).{f.__name__}`"
    else:
        return
    raise TypeError(
        "`remat_compress(f)` must be given a function that takes its modules as "
        f"arguments, but got {got}. Wrap the method of the class, "
        "`remat_compress(Block.__call__)(block, x)`, or a function, "
        "`remat_compress(lambda block, x: block(x))(block, x)`."
    )
