"""Transform override: another transform for wrapped functions during a comparison."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias, final

import jax


# Maps a function of flat arguments to another one, as `jax.checkpoint` does.
Transform: TypeAlias = Callable[[Callable[..., Any]], Callable[..., Any]]


@final
class StandIn:
    """A transform that replaces `remat_compress` in wrapped functions; counts calls.

    Each instance is equal only to itself and is part of the keys of JAX's caches. So
    JAX never reuses a trace outside its override, and traces and counts every wrapped
    function again, even if it was traced before.
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
    """Replaces `remat_compress` for wrapped functions within a `with` block.

    Args:
        transform: The replacement. It takes the wrapped function of flat arguments.
    """
    stand_in = StandIn(transform)
    with _STAND_IN(stand_in):
        yield stand_in


# Unlike a `contextvars.ContextVar`, this is part of the keys of JAX's caches.
_STAND_IN = jax.make_user_context(None)


def current_stand_in() -> StandIn | None:
    """Returns the active transform override, if any."""
    return _STAND_IN.value
