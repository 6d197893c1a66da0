"""Which plans are part of a program that is being traced."""

import contextlib
import contextvars
import itertools
from collections.abc import Iterator
from typing import final

from dafjax._plan.plan import ProgramPlan


@final
class PlanRecorder:
    """Collects the plans of the wrapped functions that are traced meanwhile.

    Every forward pass traced is a call of a name of its own, so that a program can be
    searched for those that are part of it: JAX also traces some that are not.
    """

    # Names are never used again: JAX may hand out a trace that it made before.
    _NUMBERS = itertools.count()

    def __init__(self) -> None:
        self.plans: dict[str, ProgramPlan] = {}

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
