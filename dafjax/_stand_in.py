"""What wrapped functions run while a step is traced for a comparison."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias, final

import jax


# Makes of a function of flat arguments another one, as `jax.checkpoint` does.
Transform: TypeAlias = Callable[[Callable[..., Any]], Callable[..., Any]]


@final
class StandIn:
    """What runs in place of the functions that `remat_compress` made, and how often.

    Each is a value of its own, equal to no other. It is part of the keys of JAX's
    caches, so that what is traced with it is never found without it, and that every
    function that is wrapped is traced, and counted, however often it was before.
    """

    def __init__(self, transform: Transform) -> None:
        self._transform = transform
        self.num_calls = 0

    def __call__(self, fun: Callable[..., Any], leaves: Sequence[Any]) -> Any:
        """Runs the transformed function."""
        self.num_calls += 1
        return self._transform(fun)(*leaves)


@contextlib.contextmanager
def standing_in(transform: Transform) -> Iterator[StandIn]:
    """Lets wrapped functions be transformed otherwise than by `remat_compress`.

    Args:
        transform: How. It is given the function that was wrapped, of flat arguments.
    """
    stand_in = StandIn(transform)
    with _STAND_IN(stand_in):
        yield stand_in


# Unlike a `contextvars.ContextVar`, JAX's caches know of it.
_STAND_IN = jax.make_user_context(None)


def current_stand_in() -> StandIn | None:
    """Returns what wrapped functions are to run, if it is not they themselves."""
    return _STAND_IN.value
