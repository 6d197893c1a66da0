"""Reports: what is saved of a function, and its program at each stage.

A plan prints as a table and is saved as a file; `explain` prints programs as text.
"""

import dataclasses
import difflib
import functools
import json
import os
import pathlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal, final, get_args

import jax
import jax.numpy as jnp

from dafjax._numbers import align, readable
from dafjax._passes.pipeline import PASSES
from dafjax._plan.plan import Kept, ProgramPlan, place_of, record_gradient
from dafjax._rules import Stages
from dafjax._schedule.instructions import listing
from dafjax._trace.residuals import (
    Program,
    equation_text,
    program_lines,
    value_text,
)
from dafjax._trace.tracing import count_calls
from dafjax.codecs import Affine, Bitmask
from dafjax.policies import (
    AbstractPolicy,
    Compress,
    Decision,
    Recompute,
    Residual,
    Save,
)


@final
@dataclasses.dataclass(frozen=True)
class Plan(AbstractPolicy):
    """The residuals that functions wrapped by `remat_compress` store.

    `saved_residuals` makes a plan; it prints as a table. A plan is also a policy. If
    the same function is wrapped with it, that function stores the same values in the
    same codes, whatever its other options or the version of dafjax would choose.

    Attributes:
        kept: The values stored for the backward pass.
        counts: Copies of each of them: one for each iteration of a `scan`.
        spare: The stored values of functions that JAX traced on its way to the gradient
            but that are not part of it. They are traced again when the plan is used.
        programs: Hashes of all traced functions.

    Example:
        >>> import dafjax, jax.numpy as jnp
        >>> def loss(w, x):
        ...     return jnp.sum(jnp.sin(x @ w))
        >>> w, x = jnp.ones((256, 256)), jnp.ones((256, 256))
        >>> plan = dafjax.saved_residuals(dafjax.remat_compress(loss), w, x)
        >>> planned = dafjax.remat_compress(loss, policy=plan)
        >>> dafjax.saved_residuals(planned, w, x) == plan
        True
    """

    kept: tuple[Kept, ...]
    counts: tuple[int, ...]
    spare: tuple[Kept, ...]
    programs: tuple[str, ...]

    @property
    def is_of_one_program(self) -> bool:
        return True

    def __call__(self, residual: Residual) -> Decision:
        if residual.program not in self.programs:
            raise ValueError(
                f"`policy=` is a plan of {len(self.programs)} functions, but none "
                "of them is the one that is differentiated here: other shapes, other "
                "arguments that are differentiated, another version of JAX, or another "
                "function. Make the plan with `dafjax.saved_residuals` from the same "
                "call."
            )
        return self._decisions.get((residual.program, residual.number), Recompute())

    @functools.cached_property
    def _decisions(self) -> dict[tuple[str, int], Decision]:
        return {
            (
                item.program,
                item.value if item.stands_for is None else item.stands_for,
            ): (Save() if item.codec is None else Compress(item.codec))
            for item in (*self.kept, *self.spare)
        }

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the plan to a JSON file."""
        content = {
            "format": _FORMAT,
            "programs": self.programs,
            "kept": [{**_to_json(item), "count": n} for item, n in self._counted()],
            "spare": [_to_json(item) for item in self.spare],
        }
        text = json.dumps(content, indent=1)
        pathlib.Path(path).write_text(text + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Plan":
        """Reads a file that `save` wrote.

        Raises:
            ValueError: The file is not a plan.
        """
        try:
            content = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
            if content["format"] != _FORMAT:
                raise ValueError(f"its format is {content['format']!r}, not {_FORMAT}")
            return cls(
                kept=tuple(map(_from_json, content["kept"])),
                counts=tuple(int(row["count"]) for row in content["kept"]),
                spare=tuple(map(_from_json, content["spare"])),
                programs=tuple(map(str, content["programs"])),
            )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"`Plan.load`: `{path}` is not a plan that `Plan.save` wrote: "
                f"{type(error).__name__}: {error}."
            ) from error

    @property
    def raw_nbytes(self) -> int:
        """Bytes of the stored values as plain arrays."""
        return sum(item.raw_nbytes * n for item, n in self._counted())

    @property
    def stored_nbytes(self) -> int:
        """Bytes of the stored values as they are stored."""
        return sum(item.stored_nbytes * n for item, n in self._counted())

    def _counted(self) -> Iterator[tuple[Kept, int]]:
        return zip(self.kept, self.counts, strict=True)

    def __str__(self) -> str:
        header = ("name", "value", "decision", "raw", "stored", "source")
        rows = [_row(item, n) for item, n in self._counted()]
        total = f"{sum(self.counts)} residuals"
        ratio = self.raw_nbytes / self.stored_nbytes if self.stored_nbytes else 1.0
        summary = (
            total,
            "",
            f"{ratio:.1f}x smaller",
            readable(self.raw_nbytes),
            readable(self.stored_nbytes),
            "",
        )
        right = {header.index("raw"), header.index("stored")}
        return align([header, *rows, summary], right=right)


def saved_residuals(fun: Callable[..., Any], *args: Any, **kwargs: Any) -> Plan:
    """Lists the residuals that wrapped functions store for differentiation.

    It computes nothing. Every argument counts as differentiated; close over those that
    are not. It sees only functions that are traced anew: pass a function whose inner
    `jax.jit`s have not been differentiated before.

    Args:
        fun: A function made by `remat_compress`, or one that calls such functions.
        *args: Its arguments: arrays, or `jax.ShapeDtypeStruct`s in their place.
        **kwargs: Its keyword arguments.

    Returns:
        The plan: all stored values.

    Raises:
        ValueError: `fun` stores no residual through `remat_compress`.

    Example:
        >>> import dafjax, jax.numpy as jnp
        >>> def loss(w, x):
        ...     return jnp.sum(jnp.sin(x @ w))
        >>> policy = dafjax.policies.CompressExpensive()
        >>> f = dafjax.remat_compress(loss, policy=policy)
        >>> w, x = jnp.ones((256, 256)), jnp.ones((256, 256))
        >>> dafjax.saved_residuals(lambda w: f(w, x), w).stored_nbytes
        34304
    """
    recorder, closed = record_gradient(fun, args, kwargs)
    calls = count_calls(closed)
    if not any(calls[name] for name in recorder.plans):
        raise ValueError(
            f"`saved_residuals(fun)`: `{getattr(fun, '__name__', fun)!s}` calls no "
            "function wrapped by `remat_compress` (or one with `bits=None`). Wrap it "
            "first: `saved_residuals(remat_compress(fun), *args)`."
        )
    counted: list[tuple[Kept, int]] = []
    spare: list[Kept] = []
    for name, plan in recorder.plans.items():
        for item in plan.kept:
            if item.is_packed:
                continue
            if calls[name]:
                counted.append((item, calls[name]))
            else:
                spare.append(item)
    _check_decided_once(recorder.plans.values())
    return Plan(
        kept=tuple(item for item, _ in counted),
        counts=tuple(n for _, n in counted),
        spare=tuple(spare),
        programs=tuple(plan.fingerprint for plan in recorder.plans.values()),
    )


def _check_decided_once(plans: Iterable[ProgramPlan]) -> None:
    """Raises an error if two functions with the same hash store different codes."""
    seen: dict[str, tuple[Kept, ...]] = {}
    for plan in plans:
        if seen.setdefault(plan.fingerprint, plan.kept) != plan.kept:
            raise NotImplementedError(
                "`saved_residuals(fun)`: two functions in `fun` are equal, but wrapped "
                "with different options, so that a plan cannot tell them apart. List "
                "them one by one, or give their parts names with `jax.named_scope`."
            )


def print_saved_residuals(fun: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Prints the list of `saved_residuals`: one line for each residual, and totals.

    A line has the place in the model, shape and dtype, the decision, the raw and the
    stored bytes, and the user's line that makes the value.

    Args:
        fun: A function made by `remat_compress`, or one that calls such functions.
        *args: Its arguments: arrays, or `jax.ShapeDtypeStruct`s in their place.
        **kwargs: Its keyword arguments.

    Raises:
        ValueError: `fun` stores no residual through `remat_compress`.
    """
    print(saved_residuals(fun, *args, **kwargs))


_FORMAT = 1
_AS_THEY_ARE = (*("program", "value", "name", "primitive", "source", "is_packed"),)
# Codecs by their names in a file.
_CODECS: dict[str, type[Affine | Bitmask]] = {"Affine": Affine, "Bitmask": Bitmask}


def _to_json(item: Kept) -> dict[str, Any]:
    codec = None
    if item.codec is not None:
        name = type(item.codec).__name__
        if not isinstance(item.codec, Affine | Bitmask):
            raise TypeError(
                f"`Plan.save` writes plans with the codecs {', '.join(_CODECS)}, but "
                f"got `{item.codec!r}`."
            )
        codec = {"name": name, **dataclasses.asdict(item.codec)}
    return {
        **{name: getattr(item, name) for name in _AS_THEY_ARE},
        "stands_for": item.stands_for,
        "shape": item.shape,
        "dtype": str(item.dtype),
        "codec": codec,
    }


def _from_json(row: Mapping[str, Any]) -> Kept:
    options = row["codec"]
    codec = None
    if options is not None:
        codec = _CODECS[options["name"]](
            **{name: value for name, value in options.items() if name != "name"}
        )
    return Kept(
        **{name: row[name] for name in _AS_THEY_ARE},
        shape=tuple(row["shape"]),
        dtype=_dtype(row["dtype"]),
        codec=codec,
        # Plans of version 0.1 do not have it.
        stands_for=row.get("stands_for"),
    )


def _dtype(name: str) -> Any:
    """Returns the dtype of a name, including random keys, which NumPy does not know."""
    if not name.startswith("key<"):
        return jnp.dtype(name)
    for impl in ("threefry2x32", "rbg", "unsafe_rbg"):
        key = jax.eval_shape(functools.partial(jax.random.key, 0, impl=impl))
        if str(key.dtype) == name:
            return key.dtype
    raise ValueError(f"there are no random keys of dtype {name}")


def _row(item: Kept, count: int) -> tuple[str, ...]:
    dtype = getattr(item.dtype, "name", str(item.dtype))
    times = "" if count == 1 else f" x {count}"
    return (
        place_of(item),
        f"{dtype}[{','.join(map(str, item.shape))}]{times}",
        "save" if item.codec is None else f"compress {item.codec}",
        readable(item.raw_nbytes * count),
        readable(item.stored_nbytes * count),
        # For an installed package, the part that names the package.
        item.source.rpartition("site-packages/")[2],
    )


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
        >>> def squares(w, x):
        ...     return jnp.sum(jnp.sin(x @ w) ** 2)
        >>> policy = dafjax.policies.CompressExpensive()
        >>> loss = dafjax.remat_compress(squares, policy=policy)
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
        before, program = program, item.run(program, stages.context)
        changed = _changed_lines(before, program)
        yield f"{item.name}: {item.reason}"
        yield from (f"  {line}" for line in changed or ["no change"])


def _changed_lines(before: Program, after: Program) -> list[str]:
    old, new = (list(program_lines(program)) for program in (before, after))
    # If the program was differentiated anew, values have other numbers.
    is_new = set(before.forward).isdisjoint(after.forward)
    keys = [
        [_NUMBER.sub("%", x) for x in lines] if is_new else lines
        for lines in (old, new)
    ]
    matcher = difflib.SequenceMatcher(None, *keys, autojunk=False)
    changed = []
    for _, a, b, c, d in (c for c in matcher.get_opcodes() if c[0] != "equal"):
        changed += [f"-{line}" for line in old[a:b]] + [f"+{line}" for line in new[c:d]]
    return changed


_NUMBER = re.compile(r"%[0-9]+")


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
