"""`remat_compress` for Flax Linen: a lifted transform, used like `flax.linen.remat`."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar, cast

import jax

from dafjax import _remat_compress
from dafjax._bits import AnyBits, Target as BitsTarget
from dafjax.policies import AbstractPolicy
from dafjax.stores import AbstractStore


try:
    from flax.core import lift
    from flax.core.scope import CollectionFilter, PRNGSequenceFilter
    from flax.linen.transforms import lift_transform
except ModuleNotFoundError as error:
    raise ImportError(
        "`dafjax.linen` needs Flax, which is not installed: `pip install flax`."
    ) from error


Target = TypeVar("Target", bound=Callable[..., Any])


def remat_compress(
    target: Target,
    variables: CollectionFilter = True,
    rngs: PRNGSequenceFilter = True,
    concrete: bool = False,
    prevent_cse: bool = True,
    static_argnums: int | Sequence[int] = (),
    policy: AbstractPolicy | Callable[..., Any] | None = None,
    methods: Sequence[str] | None = None,
    *,
    bits: AnyBits | BitsTarget | None = 2,
    store: AbstractStore | None = None,
    activation_argnums: int | Sequence[int] | None = None,
    rematerialize: bool | Literal["exact"] = False,
    max_parts: int | None = None,
    without_passes: Sequence[str] = (),
    seed: int | jax.Array = 0,
) -> Target:
    """Makes a module save its residuals for the backward pass in a few bits.

    It replaces `flax.linen.remat` and takes the same arguments: use it on the class of
    a block or as a decorator of a method, also below `flax.linen.scan`. Parameters,
    their names, other variables and random numbers are the same as with
    `flax.linen.remat`. `dafjax.remat_compress` says how results and gradients relate to
    those of the plain module.

    The input of a block is mostly the output of the previous block, and nothing else
    keeps it alive. So if the backward pass needs a positional argument, the policy
    decides about it as about any value computed inside. Variables and keyword
    arguments are used unchanged.

    Args:
        target: A class of modules, or a function whose first argument is a module.
        variables: Collections of variables that the target may use. By default all.
        rngs: Random streams that the target may use. By default all.
        concrete: As in `dafjax.remat_compress`: it has no effect.
        prevent_cse: As in `dafjax.remat_compress`: it has no effect.
        static_argnums: Positions of hashable arguments that are not arrays. `self` is
            position 0, so the first argument of a call is 1.
        policy: Decides about each residual, as in `dafjax.remat_compress`; may be a
            policy of `jax.checkpoint`. `None`: `dafjax.policies.CompressExpensive()`.
        methods: Names of the methods to wrap. `None`: `__call__`. For a function, leave
            it out.
        bits: As in `dafjax.remat_compress`. `None` turns dafjax off.
        store: Keeps packed residuals. `None`: `dafjax.stores.Arrays()`.
        activation_argnums: Positions of arguments that nothing else keeps alive,
            counted as in `static_argnums`. `None`: all. Leave out an array that many
            blocks share, such as a mask: uncompressed it is saved once, but packed it
            is saved once per block.
        rematerialize: As in `dafjax.remat_compress`.
        max_parts: As in `dafjax.remat_compress`.
        without_passes: As in `dafjax.remat_compress`.
        seed: Seed of the rounding noise, an integer or a uint32 scalar, traced or not.

    Returns:
        A class of modules with the attributes of `target`, or a function with its
        signature.

    Raises:
        TypeError: An option has a wrong type.
        ValueError: An option has a value outside its set.
        NotImplementedError: As in `dafjax.remat_compress`.
        flax.errors.TransformTargetError: `target` is a module, not a class.

    Example:
        >>> import dafjax.linen, flax.linen as nn, jax, jax.numpy as jnp
        >>> class Block(nn.Module):
        ...     @nn.compact
        ...     def __call__(self, x):
        ...         return x + nn.relu(nn.Dense(x.shape[-1])(x))
        >>> class Model(nn.Module):
        ...     @nn.compact
        ...     def __call__(self, x):
        ...         for _ in range(4):
        ...             x = dafjax.linen.remat_compress(Block, bits=2)()(x)
        ...         return x
        >>> x = jnp.ones((128, 64))
        >>> variables = Model().init(jax.random.key(0), x)
        >>> gradient = jax.grad(lambda v: Model().apply(v, x).mean())(variables)
        >>> gradient["params"]["CheckpointBlock_0"]["Dense_0"]["kernel"].shape
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
        concrete=concrete,
    )
    # Check the options now, not in the first call.
    compress(target)
    _check_positions("static_argnums", static_argnums)
    if activation_argnums is not None:
        compress(target, activation_argnums=activation_argnums)
        _check_positions("activation_argnums", activation_argnums)
    _check_methods(methods)

    # Flax builds module names from the name of this function. `flax.linen.remat` uses
    # the same name, so parameters of one fit the other.
    def checkpoint(scope_function: Callable[..., Any]) -> Callable[..., Any]:
        def lifted(
            make_scope: Callable[..., Any],
            repack: Callable[..., Any],
            variable_groups: Any,
            rng_groups: Any,
            *args: Any,
            **kwargs: Any,
        ) -> Any:
            # The state takes the position of `self`, so positions stay the same.
            def pure(state: Any, *args: Any, **kwargs: Any) -> Any:
                scope = make_scope(*state)
                return scope_function(scope, *args, **kwargs), repack(scope)

            activations = (
                range(1, 1 + len(args))
                if activation_argnums is None
                else activation_argnums
            )
            wrapped = compress(pure, activation_argnums=activations)
            return wrapped((variable_groups, rng_groups), *args, **kwargs)

        return lift.pack(
            lifted,
            (variables,),
            (variables,),
            (rngs,),
            name="remat_compress",
            enable_kwargs=True,
        )

    return cast(Target, lift_transform(checkpoint, target, methods=methods))


def _check_positions(name: str, numbers: int | Sequence[int]) -> None:
    for number in jax.tree.leaves(numbers):
        if number < 1:
            raise ValueError(
                f"`remat_compress({name}=...)` must be positions from 1 on, but got "
                f"{number}. Position 0 is `self`: the first argument of a call is 1."
            )


def _check_methods(methods: Any) -> None:
    is_list = isinstance(methods, (list, tuple))
    if methods is not None and not (
        is_list and all(isinstance(name, str) for name in methods)
    ):
        raise TypeError(
            "`remat_compress(methods=...)` must be None or a list of names of methods, "
            f"but got `{methods!r}`. Write `methods=['__call__']`, for example. For "
            "options that differ between methods, decorate the methods."
        )
