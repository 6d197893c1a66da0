"""Is the strategy that `auto` takes the fastest, and what does XLA take?

Least and greatest value, and sum of squares, of rows of several parts: the sizes are
between those that a device's profile is made of. Strategies are timed without what
surrounds a call, in turn. XLA's own reductions are timed as users would call them,
jitted, and so are ours.

Examples:
    python -m benchmarks.reductions
    python -m benchmarks.reductions --rounds 3 --most-log2-elements 17
"""

import dataclasses
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro

from benchmarks.environment import RESULTS, describe_environment, write_result
from benchmarks.harness import Check, Contender, compare
from benchmarks.tables import make_console, make_table
from dafjax import reductions
from dafjax._native import (
    REDUCTIONS,
    STRATEGIES,
    ReductionCase,
    Tuning,
    time_reductions,
    tune_device,
)


Record = dict[str, Any]

# Of the same values from call to call; the others are not for `auto`.
_ORDERED = {"minmax": STRATEGIES, "sum_of_squares": ("parallel", "hybrid")}
_OURS: dict[str, Callable[[jax.Array], Any]] = {
    "minmax": reductions.minmax,
    "sum_of_squares": reductions.sum_of_squares,
}
_OF_XLA: dict[str, Callable[[jax.Array], Any]] = {
    "minmax": lambda x: (jnp.min(x, axis=-1), jnp.max(x, axis=-1)),
    "sum_of_squares": lambda x: jnp.sum(x * x, axis=-1),
}


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of the command line."""

    rounds: int = 31
    """How often each is timed."""
    most_log2_elements: int = 24
    """Of all rows together."""
    num_rows: tuple[int, ...] = (1, 5, 64)
    """Rows."""
    out: pathlib.Path = RESULTS / "reductions.json"
    """The file to write."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line."""
    options = tyro.cli(
        Options,
        args=arguments,
        description=__doc__,
        prog="python -m benchmarks.reductions",
    )
    console = make_console()
    environment = describe_environment()
    tuning = tune_device(jax.devices()[0])
    shapes = [
        (num_rows, 1 << log2_elements)
        for num_rows in options.num_rows
        for log2_elements in range(15, options.most_log2_elements + 1, 2)
        if num_rows << log2_elements <= 1 << options.most_log2_elements
    ]
    records = [
        _measure(tuning, reduction, *shape, options.rounds)
        for reduction in REDUCTIONS
        for shape in shapes
    ]
    console.print(_table(records))
    console.print(verdict(records))
    write_result(
        options.out,
        environment,
        {
            "options": dataclasses.asdict(options),
            "device": tuning.device,
            "reductions": records,
        },
    )
    console.print(f"Written to {options.out}.", markup=False)


def _measure(
    tuning: Tuning, reduction: str, num_rows: int, row_elements: int, rounds: int
) -> Record:
    chosen = tuning.profile.choose(reduction, num_rows, row_elements)
    launches = max(4, min(32, (1 << 20) // (num_rows * row_elements)))
    cases = [
        ReductionCase(reduction, strategy, num_rows, row_elements, launches)
        for strategy in STRATEGIES
    ]
    times = time_reductions(jax.devices()[0], cases, rounds)
    seconds = dict(zip(STRATEGIES, np.median(times, axis=0).tolist(), strict=True))
    best = min(_ORDERED[reduction], key=lambda strategy: seconds[strategy])
    column = STRATEGIES.index
    ratios = times[:, column(chosen)] / times[:, column(best)]
    return {
        "reduction": reduction,
        "rows": num_rows,
        "elements": row_elements,
        "seconds": seconds,
        "auto": chosen,
        "best": best,
        "auto_over_best": float(np.median(ratios)),
        "over_xla": _over_xla(reduction, num_rows, row_elements, rounds),
    }


def _over_xla(reduction: str, num_rows: int, row_elements: int, rounds: int) -> float:
    """Returns the median of our time over XLA's, of jitted calls."""
    shape = (num_rows, row_elements)
    x = jax.random.normal(jax.random.key(0), shape, jnp.float32)
    ours, of_xla = jax.jit(_OURS[reduction]), jax.jit(_OF_XLA[reduction])
    timings = compare(
        {
            "xla": Contender(lambda: of_xla(x), {"values": Check(1e-5)}),
            "ours": Contender(lambda: ours(x), {"values": Check(1e-5)}),
        },
        baseline="xla",
        rounds=rounds,
    )
    return timings["ours"].ratio.median


def verdict(records: Sequence[Record]) -> str:
    """Returns whether `auto` is never more than 5 % slower than the best strategy."""
    worst = max(record["auto_over_best"] for record in records)
    return (
        f"{'passed' if worst <= 1.05 else 'FAILED'}: auto takes at most {worst:.3f} of "
        "the fastest strategy's time (<= 1.05)"
    )


def _table(records: Sequence[Record]) -> Any:
    return make_table(
        "Reductions of float32 rows",
        left=("Reduction", "Rows", "Elements"),
        right=(*(f"{name} us" for name in STRATEGIES), "Auto", "/ best", "/ XLA"),
        rows=[
            (
                record["reduction"],
                str(record["rows"]),
                str(record["elements"]),
                *(f"{record['seconds'][name] * 1e6:.1f}" for name in STRATEGIES),
                record["auto"],
                f"{record['auto_over_best']:.3f}",
                f"{record['over_xla']:.2f}",
            )
            for record in records
        ],
    )


if __name__ == "__main__":
    main()
