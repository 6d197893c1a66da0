"""Records the plans that are part of a program while it is traced."""

import contextlib
import contextvars
import itertools
from collections.abc import Callable, Iterator
from typing import Any, final

import jax

from dafjax._bits_in_force import AS_PLANNED, putting_in_force
from dafjax._plan.plan import ProgramPlan
from dafjax._trace.tracing import ClosedJaxpr, trace


@final
class PlanRecorder:
    """Collects the plans of the wrapped functions that are traced meanwhile.

    Each traced forward pass is a call with its own name. A search of the program for
    these names finds the forward passes that are part of it: JAX also traces others.
    """

    # Names are never reused, because JAX may return a trace from its cache.
    _NUMBERS = itertools.count()

    def __init__(self) -> None:
        self.plans: dict[str, ProgramPlan] = {}
        # The derivative rules of these functions, and of bodies inside them.
        self.rules: list[Any] = []

    def name(self, plan: ProgramPlan) -> str:
        """Returns the name for one more forward pass of a plan."""
        name = f"dafjax_forward_{next(self._NUMBERS)}"
        self.plans[name] = plan
        return name


@contextlib.contextmanager
def record_plans() -> Iterator[PlanRecorder]:
    """Collects the plans of the wrapped functions that are differentiated meanwhile."""
    recorder = PlanRecorder()
    token = _RECORDER.set(recorder)
    try:
        yield recorder
    finally:
        _RECORDER.reset(token)


def record_gradient(
    fun: Callable[..., Any], args: Any, kwargs: Any
) -> tuple[PlanRecorder, ClosedJaxpr]:
    """Traces a function that is differentiated by all positional arguments.

    Args:
        fun: The function.
        args: Its arguments: arrays, or `jax.ShapeDtypeStruct`s in their place.
        kwargs: Its keyword arguments.

    Returns:
        The recorder, and the traced program.
    """

    def differentiated(args: Any, kwargs: Any) -> Any:
        _, pullback = jax.vjp(lambda args: fun(*args, **kwargs), args)
        return pullback

    leaves, structure = jax.tree.flatten((args, kwargs))
    with record_plans() as recorder, putting_in_force(AS_PLANNED):
        closed, _, _ = trace(
            lambda *leaves: differentiated(*jax.tree.unflatten(structure, leaves)),
            leaves,
        )
    return recorder, closed


_RECORDER: contextvars.ContextVar[PlanRecorder | None] = contextvars.ContextVar(
    "recorder", default=None
)


def current_recorder() -> PlanRecorder | None:
    """Returns the recorder that traced forward passes report to, if there is one."""
    return _RECORDER.get()
