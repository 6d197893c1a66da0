"""`explain`: prints the program of a wrapped function at each stage, as text."""

import difflib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, get_args

from dafjax._nbytes import readable
from dafjax._passes.pipeline import PASSES
from dafjax._plan.plan import Kept, ProgramPlan
from dafjax._plan.recorder import record_gradient
from dafjax._rules import Stages
from dafjax._schedule.instructions import listing
from dafjax._trace.text import equation_text, program_lines, value_text


Stage = Literal["program", "passes", "plan", "schedule"]


def explain(
    fun: Callable[..., Any], *args: Any, stage: Stage = "plan", **kwargs: Any
) -> None:
    """Prints what becomes of a wrapped function, as text to read.

    It computes nothing. Every argument counts as differentiated; close over those that
    are not. A value is printed as `%7 float32[8,64]`; after `#` come its place in the
    model and the user's line.

    Args:
        fun: A function made by `remat_compress`, or one that calls such functions.
        *args: Its arguments: arrays, or `jax.ShapeDtypeStruct`s in their place.
        stage: The stage to print. `"program"`: the forward and the backward pass as JAX
            differentiates them. `"passes"`: the rewrites in order, and the lines that
            each one changes. `"plan"`: saved residuals with their bits, and recomputed
            values. `"schedule"`: the instructions of the backward pass on CPUs, with
            barriers, unpacked residuals and chunks of the batch.
        **kwargs: Its keyword arguments.

    Raises:
        ValueError: `stage` is none of these, or `fun` calls no function wrapped by
            `remat_compress`.

    Example:
        >>> import dafjax, jax.numpy as jnp
        >>> loss = dafjax.remat_compress(lambda w, x: jnp.sum(jnp.sin(x @ w) ** 2))
        >>> w, x = jnp.ones((256, 256)), jnp.ones((512, 256))
        >>> dafjax.explain(lambda w: loss(w, x), w)  # doctest: +ELLIPSIS
        function 1
        save %14 float32[512,256]: 4 bits, rows of 256, dithered, 67.0 KiB of ...
        recompute %6 float32[512,256] = mul 2.0 %3 ...
    """
    if stage not in get_args(Stage):
        raise ValueError(
            f"`explain(stage=...)` must be one of {get_args(Stage)}, but got {stage!r}."
        )

    recorder, _ = record_gradient(fun, args, kwargs)
    rules = list(dict.fromkeys(recorder.rules))
    if not rules:
        raise ValueError(
            f"`explain(fun)`: `{getattr(fun, '__name__', fun)!s}` calls no function "
            "wrapped by `remat_compress` (or one with `bits=None`). Wrap it first: "
            "`explain(remat_compress(fun), *args)`."
        )
    for number, rule in enumerate(rules, start=1):
        stages: Stages | None = rule.stages
        if stages is None:
            print(f"function {number}: nothing to compress, it runs as JAX has it")
            continue
        runs = "" if stages.iterations == 1 else f", runs {stages.iterations} times"
        print(f"function {number}{runs}")
        print("\n".join(_LINES[stage](stages)))


def _of_program(stages: Stages) -> Iterator[str]:
    yield from program_lines(stages.traced)


def _of_passes(stages: Stages) -> Iterator[str]:
    program = stages.traced
    for item in PASSES:
        if item.name in stages.options.without_passes:
            yield f"{item.name}: left out"
            continue
        before = list(program_lines(program))
        program = item.run(program, stages.context)
        changed = [
            line
            for line in difflib.unified_diff(
                before, list(program_lines(program)), n=0, lineterm=""
            )
            if not line.startswith(("---", "+++", "@@"))
        ]
        yield f"{item.name}: {item.reason}"
        yield from (f"  {line}" for line in changed or ["no change"])


def _of_plan(stages: Stages) -> Iterator[str]:
    plan = stages.plan
    for item in plan.kept:
        yield f"save {_saved(plan, item)}"
    for value in plan.arguments:
        yield f"read argument {value_text(plan.program, value)}"
    for eqn in dict.fromkeys(plan.recomputed[v] for v in sorted(plan.recomputed)):
        yield f"recompute {equation_text(plan.program, eqn)}"


def _saved(plan: ProgramPlan, item: Kept) -> str:
    how = "as it is" if item.codec is None else str(item.codec)
    nbytes = readable(item.stored_nbytes)
    if item.codec is not None:
        nbytes += f" of {readable(item.raw_nbytes)}"
    place = " ".join(filter(None, (item.name, item.primitive, item.source)))
    return f"{value_text(plan.program, item.value)}: {how}, {nbytes}  # {place}"


def _of_schedule(stages: Stages) -> Iterator[str]:
    yield listing(stages.instructions, stages.plan.program)


_LINES: Mapping[str, Callable[[Stages], Iterator[str]]] = {
    "program": _of_program,
    "passes": _of_passes,
    "plan": _of_plan,
    "schedule": _of_schedule,
}
