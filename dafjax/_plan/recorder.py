"""Records the plans that are part of a program while it is traced."""

import contextlib
import contextvars
import itertools
from collections.abc import Iterator
from typing import Any, final

from dafjax._plan.plan import ProgramPlan


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


_RECORDER: contextvars.ContextVar[PlanRecorder | None] = contextvars.ContextVar(
    "recorder", default=None
)


def current_recorder() -> PlanRecorder | None:
    """Returns the recorder that traced forward passes report to, if there is one."""
    return _RECORDER.get()
