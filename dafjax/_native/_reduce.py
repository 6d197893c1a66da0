"""Reductions of rows to their least and greatest value or sum of squares.

The strategy of a reduction is chosen on each device, from times that are measured on
first use and stored in files.
"""

import concurrent.futures
import dataclasses
import functools
import hashlib
import json
import math
import os
import pathlib
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np
import platformdirs
from jax.extend.core import Primitive

from dafjax._native import _cuda, _library
from dafjax._native._codes import DTYPES, check_dtype
from dafjax._native._cuda import describe
from dafjax._native._primitive import (
    CustomCall,
    DivisionRule,
    batch_rows,
    divide_rows,
    make_primitive,
    refuse_derivatives,
    retyped,
    rows_like,
)
from dafjax._numbers import Array, Device, Static


# In the order of `Strategy` in xla_ffi/format/reduction.h, which has the sizes, too.
STRATEGIES = ("parallel", "atomic", "hybrid")
_LEAST_PART_ELEMENTS = 8192
_MOST_PARTS = 1024
_STATE_WORDS, _PART_WORDS = 4, 2


def num_parts(row_elements: int) -> int:
    """Returns the number of parts into which a reduction splits a row."""
    return min(max(-(-row_elements // _LEAST_PART_ELEMENTS), 1), _MOST_PARTS)


def scratch_words(row_elements: int) -> int:
    """Returns the number of scratch uint32 that the reduction of a row needs."""
    return _STATE_WORDS + _PART_WORDS * num_parts(row_elements)


# In the order of `Reduction` in xla_ffi/format/reduction.h.
REDUCTIONS = ("minmax", "sum_of_squares")


@dataclasses.dataclass(frozen=True)
class ReductionCase:
    """A reduction of float32 `[num_rows, row_elements]` to be timed.

    Attributes:
        reduction: One of `REDUCTIONS`.
        strategy: One of `STRATEGIES`.
        num_rows: Rows.
        row_elements: Elements of a row.
        num_launches: Number of launches that are timed together. The reported time is
            the time of one.
    """

    reduction: str
    strategy: str
    num_rows: int
    row_elements: int
    num_launches: int


def time_reductions(
    device: Device, cases: Sequence[ReductionCase], num_rounds: int
) -> np.ndarray:
    """Times reductions on a device; each round runs all cases in turn.

    It may be called while another program is traced or lowered. Returns seconds of one
    launch, float32 `[num_rounds, len(cases)]`.
    """
    # Another thread does not inherit this thread's contexts: meshes, transfer guards.
    with concurrent.futures.ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(_time, device, tuple(cases), num_rounds).result()


def _time(
    device: Device, cases: Sequence[ReductionCase], num_rounds: int
) -> np.ndarray:
    if device.platform == "cpu":
        _library.register()
    else:
        _cuda.register()
    num_values = max(case.num_rows * case.row_elements for case in cases)
    num_words = max(case.num_rows * scratch_words(case.row_elements) for case in cases)
    num_rows = max(case.num_rows for case in cases)
    call = jax.ffi.ffi_call(
        "dafjax_time_reductions",
        (
            jax.ShapeDtypeStruct((num_rounds, len(cases)), jnp.float32),
            jax.ShapeDtypeStruct((num_words,), jnp.uint32),
            jax.ShapeDtypeStruct((num_rows,), jnp.float32),
            jax.ShapeDtypeStruct((num_rows,), jnp.float32),
        ),
    )
    timed = [
        (
            REDUCTIONS.index(case.reduction),
            STRATEGIES.index(case.strategy),
            case.num_rows,
            case.row_elements,
            case.num_launches,
        )
        for case in cases
    ]
    timed = np.array(timed, np.int64).reshape(-1)
    # Any normal values will do: neither zero nor subnormal.
    x = jax.device_put(np.linspace(1, 2, num_values, dtype=np.float32), device)
    return np.asarray(jax.jit(lambda x: call(x, timed=timed)[0])(x))


# Maps cases and a number of rounds to seconds, `[num_rounds, number of cases]`.
Timer = Callable[[Sequence[ReductionCase], int], np.ndarray]

# (rows, elements per row); every row has several parts. The arrays have at most 16 MiB:
# above that, all strategies take as long as reading the array.
GRID = tuple(
    (num_rows, 1 << log2_elements)
    for num_rows in (1, 16, 256)
    for log2_elements in range(14, 23, 2)
    if num_rows << log2_elements <= 1 << 22
)
# "atomic" is no candidate for sums, because its last bits may differ between calls.
_CANDIDATES = {"minmax": STRATEGIES, "sum_of_squares": ("parallel", "hybrid")}
# Another strategy must be faster than "parallel" by more than this factor, because
# "parallel" needs neither state nor atomics.
_NOTICEABLE = 1.03
_NUM_ROUNDS = 7
# Elements of all launches that are timed together. They take about 0.1 ms, far more
# than waiting for the device and reading the clock.
_ELEMENTS_AT_ONCE = 1 << 20
_MOST_LAUNCHES = 32


@final
@dataclasses.dataclass(frozen=True)
class Profile:
    """How long the strategies of reductions take on a device.

    Attributes:
        times: By (reduction, rows, elements of a row), seconds by strategy.
    """

    times: Mapping[tuple[str, int, int], Mapping[str, float]]

    def choose(self, reduction: str, num_rows: int, row_elements: int) -> str:
        """Returns the fastest strategy at the nearest measured point.

        The distance is the sum of the absolute logarithms of the ratios of `num_rows`
        and `row_elements`. A row of one part needs no second step, so `"parallel"`.
        """
        if num_parts(row_elements) == 1 or num_rows == 0:
            return "parallel"
        nearest = min(
            (key for key in self.times if key[0] == reduction),
            key=lambda key: (
                abs(math.log(key[1] / num_rows)) + abs(math.log(key[2] / row_elements))
            ),
        )
        return fastest(self.times[nearest])


def fastest(seconds: Mapping[str, float]) -> str:
    """Returns the fastest strategy; `"parallel"` if it is at most 3 % slower."""
    best = min(seconds, key=lambda strategy: seconds[strategy])
    return "parallel" if seconds["parallel"] <= _NOTICEABLE * seconds[best] else best


def measure(timer: Timer) -> Profile:
    """Times all candidates on `GRID`, in about 0.3 s."""
    cases = [
        ReductionCase(reduction, strategy, *shape, _num_launches(*shape))
        for reduction in REDUCTIONS
        for shape in GRID
        for strategy in _CANDIDATES[reduction]
    ]
    # Disturbances only make a round longer, so take the minimum.
    seconds = np.min(timer(cases, _NUM_ROUNDS), axis=0)
    times: dict[tuple[str, int, int], dict[str, float]] = {}
    for case, least in zip(cases, seconds, strict=True):
        key = (case.reduction, case.num_rows, case.row_elements)
        times.setdefault(key, {})[case.strategy] = float(least)
    return Profile(times)


def _num_launches(num_rows: int, row_elements: int) -> int:
    wanted = _ELEMENTS_AT_ONCE // (num_rows * row_elements)
    return min(max(wanted, 4), _MOST_LAUNCHES)


@dataclasses.dataclass(frozen=True)
class Tuning:
    """A device's profile and its origin.

    Attributes:
        device: The facts about the device; a profile holds only for equal facts.
        profile: The device's profile.
        path: The file that stores the profile.
        measured: Whether the profile was measured now, or loaded from the file.
    """

    device: dict[str, str]
    profile: Profile
    path: pathlib.Path
    measured: bool


def profile_for(platform_name: str) -> Profile | None:
    """Returns the profile of the first device of a platform.

    None if this process has no such device: a program may be compiled for another
    machine.
    """
    try:
        device = jax.local_devices(backend=platform_name)[0]
    except RuntimeError:
        return None
    return _profile_of(device)


@functools.cache
def _profile_of(device: Device) -> Profile:
    return tune_device(device).profile


def tune_device(device: Device, *, redo: bool = False) -> Tuning:
    """Loads a device's profile, or measures and stores it; always measures to redo."""
    described = describe(device)
    path = _path_of(described)
    profile = None if redo else load(path, described)
    if profile is not None:
        return Tuning(described, profile, path, measured=False)
    profile = measure(functools.partial(time_reductions, device))
    try:
        save(path, described, profile)
    except OSError as error:
        warnings.warn(
            f"The profile of {device.device_kind} cannot be kept in `{path}`: {error}. "
            "Every process measures it anew, in some 0.3 s. Make the folder writable, "
            "or set XDG_CACHE_HOME to one that is.",
            stacklevel=2,
        )
    return Tuning(described, profile, path, measured=True)


def _path_of(described: dict[str, str]) -> pathlib.Path:
    text = json.dumps(described, sort_keys=True)
    name = hashlib.sha256(text.encode()).hexdigest()[:16]
    return platformdirs.user_cache_path("dafjax") / f"reductions-{name}.json"


def save(path: pathlib.Path, described: dict[str, str], profile: Profile) -> None:
    """Writes a profile atomically, because other processes may use it, too."""
    times = [
        {"reduction": reduction, "rows": rows, "elements": elements, "seconds": seconds}
        for (reduction, rows, elements), seconds in profile.times.items()
    ]
    record = {"device": described, "times": times}
    path.parent.mkdir(parents=True, exist_ok=True)
    file, name = tempfile.mkstemp(dir=path.parent, prefix=path.stem)
    with open(file, "w", encoding="utf-8") as stream:
        json.dump(record, stream, indent=1)
    os.replace(name, path)


def load(path: pathlib.Path, described: dict[str, str]) -> Profile | None:
    """Reads a profile; None if the file is unreadable or is for another device."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        if record["device"] != described:
            return None
        return Profile(
            {
                (row["reduction"], row["rows"], row["elements"]): dict(row["seconds"])
                for row in record["times"]
            }
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def minmax(x: Array, *, strategy: str) -> tuple[Array, Array]:
    """Returns least and greatest value of rows `[*batch, n]` as float32 `[*batch]`."""
    minimum, maximum, _ = minmax_p.bind(x, strategy=strategy)
    return minimum, maximum


def sum_of_squares(x: Array, *, strategy: str) -> Array:
    """Returns the sums of squares of rows `[*batch, n]` as float32 `[*batch]`."""
    return sum_of_squares_p.bind(x, strategy=strategy)[0]


_CHOICES = (*STRATEGIES, "auto")


def _abstract_eval(name: str, num_results: int) -> Callable[..., tuple[Any, ...]]:
    def abstract_eval(x: Any, *, strategy: str) -> tuple[Any, ...]:
        if strategy not in _CHOICES:
            raise ValueError(
                f"{name}: `strategy` must be one of {_CHOICES}, not {strategy!r}."
            )
        check_dtype(name, "x", x.dtype, DTYPES)
        if x.ndim < 1:
            raise ValueError(f"{name}: `x` must have rows, but it is a scalar.")
        scratch = rows_like(x, scratch_words(x.shape[-1]), jnp.dtype(jnp.uint32))
        float32 = jnp.dtype(jnp.float32)
        batch = x.ndim - 1
        result = retyped(x, x.shape[:-1], batch, dtype=float32, weak_type=False)
        return (*(num_results * [result]), scratch)

    return abstract_eval


def minmax_reference(x: Array, *, strategy: str) -> tuple[Array, ...]:
    del strategy
    wide = _flushed(x)
    # XLA:CPU's min and max may drop NaN (xla_cpu_enable_fast_min_max).
    has_nan = jnp.any(jnp.isnan(wide), axis=-1)
    minimum = jnp.min(wide, axis=-1, initial=np.inf)
    maximum = jnp.max(wide, axis=-1, initial=-np.inf)
    # Adding 0 turns -0 into +0.
    minimum, maximum = (
        jnp.where(has_nan, jnp.float32(jnp.nan), value + 0.0)
        for value in (minimum, maximum)
    )
    return minimum, maximum, _no_scratch(x)


def _sum_of_squares_reference(x: Array, *, strategy: str) -> tuple[Array, ...]:
    del strategy
    return jnp.sum(jnp.square(_flushed(x)), axis=-1), _no_scratch(x)


def _flushed(x: Array) -> Array:
    wide = x.astype(jnp.float32)
    return jnp.where(jnp.abs(wide) < jnp.finfo(jnp.float32).tiny, 0.0, wide)


def _no_scratch(x: Array) -> Array:
    return jnp.zeros((*x.shape[:-1], scratch_words(x.shape[-1])), jnp.uint32)


def _attributes(*, strategy: str) -> dict[str, Any]:
    return {"strategy": np.int64(STRATEGIES.index(strategy))}


def _resolve(reduction: str) -> Callable[..., dict[str, Static]]:
    """Returns a function that resolves the strategy `"auto"` for a platform."""

    def resolve(platform: str, x: Any, *, strategy: str) -> dict[str, Static]:
        if strategy != "auto":
            return {"strategy": strategy}
        *batch, n = x.shape
        if num_parts(n) == 1:
            return {"strategy": "parallel"}
        profile = profile_for(platform)
        if profile is None:
            return {"strategy": "parallel" if platform == "cpu" else "hybrid"}
        return {"strategy": profile.choose(reduction, math.prod(batch), n)}

    return resolve


def _make(
    name: str, num_results: int, reference: Callable[..., tuple[Array, ...]]
) -> Primitive:
    def divide(x: Any, **_: Any) -> DivisionRule:
        return divide_rows(x, ("n",), (*[""] * num_results, "w"))

    primitive = make_primitive(
        f"dafjax_{name}",
        abstract_eval=_abstract_eval(name, num_results),
        reference=reference,
        multiple_results=True,
        call=CustomCall(f"dafjax_{name}", divide, _attributes, _resolve(name)),
    )
    batch_rows(primitive, lambda **_: 1)
    refuse_derivatives(
        primitive,
        1,
        f"`dafjax.reductions.{name}` has no derivative: it measures values. Pass "
        "`jax.lax.stop_gradient(x)`, or use `jax.numpy` for a value that is "
        "differentiated.",
    )
    return primitive


minmax_p = _make("minmax", 2, minmax_reference)
sum_of_squares_p = _make("sum_of_squares", 1, _sum_of_squares_reference)
