"""Compares implementations: first their answers, then their time, round by round."""

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, final

import jax
import numpy as np


ArrayTree = Any


class WrongAnswerError(Exception):
    """A contender's answer is not what it must be, so that its time means nothing."""


def itself(output: ArrayTree) -> ArrayTree:
    """Returns the output as it is."""
    return output


def relative_error(actual: ArrayTree, expected: ArrayTree) -> float:
    """Returns `|actual - expected| / |expected|`, Euclidean, over all leaves."""
    squares = [
        (np.sum((a - e) ** 2), np.sum(e**2)) for a, e in _pairs(actual, expected)
    ]
    return _quotient(sum(s for s, _ in squares), sum(n for _, n in squares)) ** 0.5


def projection_error(actual: ArrayTree, expected: ArrayTree) -> float:
    """Returns `|<actual - expected, expected>| / |expected|^2`, over all leaves.

    It is one for an answer of zero and small for an unbiased one of many dimensions,
    however noisy.
    """
    products = [
        (np.sum((a - e) * e), np.sum(e**2)) for a, e in _pairs(actual, expected)
    ]
    return _quotient(abs(sum(p for p, _ in products)), sum(n for _, n in products))


@final
@dataclasses.dataclass(frozen=True)
class Check:
    """What must hold of a contender's first output.

    Attributes:
        tolerance: The largest error.
        extract: Takes from the output what is checked.
        expected: What it must be; `None`: what the baseline's output gives.
        error: Measures the error.
    """

    tolerance: float = 0.0
    _: dataclasses.KW_ONLY
    extract: Callable[[ArrayTree], ArrayTree] = itself
    expected: ArrayTree = None
    error: Callable[[ArrayTree, ArrayTree], float] = relative_error


@final
@dataclasses.dataclass(frozen=True)
class Contender:
    """One implementation.

    Attributes:
        run: Called in every round; returns arrays. What it calls is compiled already
            or compiles in its first call, which is not timed.
        checks: What must hold before it is timed, by name; at least one.
    """

    run: Callable[[], ArrayTree]
    checks: Mapping[str, Check]


@final
@dataclasses.dataclass(frozen=True)
class Spread:
    """Median and median absolute deviation of the rounds."""

    median: float
    mad: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> "Spread":
        """Summarizes samples, one of each round."""
        median = statistics.median(samples)
        return cls(median, statistics.median(abs(x - median) for x in samples))

    def __str__(self) -> str:
        return f"{self.median:.2f} ±{self.mad:.2f}"


@final
@dataclasses.dataclass(frozen=True)
class Timing:
    """What was measured of one contender.

    Attributes:
        seconds: The time of a run.
        ratio: Its time divided by the baseline's in the same round.
        samples: The seconds of every round.
        errors: Errors of its answer, by the names of the checks.
        joules: The energy of a run, if it was measured.
    """

    seconds: Spread
    ratio: Spread
    samples: tuple[float, ...]
    errors: Mapping[str, float]
    joules: Spread | None = None


class Meter(Protocol):
    """Tells the energy that was used between two times of the clock."""

    def joules(self, start: float, end: float) -> float:
        """Returns joules; `start` and `end` are seconds of the harness's clock."""
        ...


def compare(
    contenders: Mapping[str, Contender],
    *,
    baseline: str,
    rounds: int,
    clock: Callable[[], float] = time.perf_counter,
    meter: Meter | None = None,
) -> dict[str, Timing]:
    """Checks every contender's answer, then times all of them in turn.

    Rounds are interleaved, so that drift of the machine hits all alike, and each starts
    with another contender, so that none always runs after the same one.

    Args:
        contenders: What is compared, by name.
        baseline: The name that ratios are to.
        rounds: How often each is timed.
        clock: Returns seconds.
        meter: Measures energy, if given.

    Returns:
        The timings, by name.

    Raises:
        WrongAnswerError: An answer is off by more than its tolerance. Nothing is timed.
        ValueError: The baseline is not a contender, or there is no round.
    """
    if baseline not in contenders:
        raise ValueError(
            f"`baseline` must be one of {', '.join(contenders)}, but got {baseline!r}."
        )
    if rounds < 1:
        raise ValueError(f"`rounds` must be at least 1, but got {rounds}.")
    errors = _check_answers(contenders, baseline)
    runs: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
    order = list(contenders)
    for _ in range(rounds):
        for name in order:
            start = clock()
            jax.block_until_ready(contenders[name].run())
            runs[name].append((start, clock()))
        order.append(order.pop(0))
    samples = {
        name: [end - start for start, end in times] for name, times in runs.items()
    }
    return {
        name: Timing(
            seconds=Spread.of(times),
            ratio=Spread.of(
                [t / b for t, b in zip(times, samples[baseline], strict=True)]
            ),
            samples=tuple(times),
            errors=errors[name],
            joules=Spread.of([meter.joules(*run) for run in runs[name]])
            if meter is not None
            else None,
        )
        for name, times in samples.items()
    }


def _check_answers(
    contenders: Mapping[str, Contender], baseline: str
) -> dict[str, dict[str, float]]:
    # The baseline's answers are extracted as each contender's checks ask, before
    # another run may reuse its buffers.
    output = jax.block_until_ready(contenders[baseline].run())
    references = {
        (name, key): _to_host(check.extract(output))
        for name, contender in contenders.items()
        for key, check in contender.checks.items()
        if check.expected is None
    }
    errors: dict[str, dict[str, float]] = {}
    for name, contender in contenders.items():
        if not contender.checks:
            raise ValueError(f"`checks` of {name} must not be empty.")
        if name != baseline:
            output = jax.block_until_ready(contender.run())
        errors[name] = {}
        for key, check in contender.checks.items():
            expected = references.get((name, key), check.expected)
            error = check.error(_to_host(check.extract(output)), expected)
            # Negated, so that NaN fails.
            if not error <= check.tolerance:
                raise WrongAnswerError(
                    f"{name}: the error {error:.3g} of its {key} is above the "
                    f"tolerance {check.tolerance:.3g}. Nothing was timed."
                )
            errors[name][key] = error
    return errors


def _to_host(tree: ArrayTree) -> ArrayTree:
    return jax.tree.map(np.array, tree)


def _pairs(
    actual: ArrayTree, expected: ArrayTree
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields leaves of both in float64; those of different trees are infinitely off."""
    shapes = [jax.tree.map(np.shape, tree) for tree in (actual, expected)]
    if shapes[0] != shapes[1]:
        yield np.array(np.inf), np.array(1.0)
        return
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        yield np.asarray(a, np.float64), np.asarray(e, np.float64)


def _quotient(error: float, norm: float) -> float:
    if norm == 0:
        return 0.0 if error == 0 else float("inf")
    return float(error / norm)
