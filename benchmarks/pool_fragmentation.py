"""How much memory the page pool takes for what it holds, step after step.

A step puts one residual of a random size, of random bits. Executions overlap, as those
of several devices do: their residuals lie side by side, and those of one execution go
together, when its device starts the next one. What is taken from the system beyond what
lives is lost: in pages to rounding, in a heap to holes. After a warm-up nothing more
should be taken.

The pool is compared with malloc (by resident memory) and with best fit. A second pool
has half of the memory that the residuals need, so that they lose planes. Growth by a
share of demand is compared with DAF's steps of 100 MB.

Examples:
    python -m benchmarks.pool_fragmentation
    python -m benchmarks.pool_fragmentation --steps 10000 --overlap 4
"""

import dataclasses
import itertools
import pathlib
import resource
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tyro
from matplotlib.figure import Figure

from benchmarks.allocators import Allocator, BestFit, Malloc
from benchmarks.environment import RESULTS, describe_environment, write_result
from benchmarks.tables import make_console, make_table
from dafjax.stores import AdaptiveGrowth, FixedGrowth, PagePool


Record = dict[str, Any]

MIB = 1 << 20
TILE = 512
BLOCK = 256
GROWTHS = {"adaptive": AdaptiveGrowth(), "100 MB": FixedGrowth("100MB")}


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of the command line."""

    steps: int = 100_000
    """Residuals that are put."""
    overlap: int = 16
    """Executions that overlap, each of another device."""
    live_mib: int = 96
    """The most that lives at once, in MiB of codes, scales and minima."""
    least: int = 1 << 14
    """Elements of the smallest residual."""
    most: int = 1 << 22
    """Elements of the largest; sizes are log-uniform."""
    warm_up: float = 0.1
    """The share of steps that is not judged."""
    every: int = 100
    """Steps from one record to the next."""
    demands_mib: tuple[int, ...] = (10, 50, 125, 260, 500)
    """What growth is measured with, in MiB that are needed at once."""
    out: pathlib.Path = RESULTS / "pool_fragmentation.json"
    """The file to write; the plot is beside it."""


@dataclasses.dataclass(frozen=True)
class Step:
    """One put."""

    device: int
    run: int
    tiles: int
    bits: int

    @property
    def codes_nbytes(self) -> int:
        """Bytes of the planes."""
        return self.tiles * TILE * self.bits // 8

    @property
    def metadata_nbytes(self) -> int:
        """Bytes of bfloat16 scales and minima."""
        return self.tiles * TILE // BLOCK * 4

    @property
    def nbytes(self) -> int:
        """All of it."""
        return self.codes_nbytes + self.metadata_nbytes


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line."""
    options = tyro.cli(
        Options,
        args=arguments,
        description=__doc__,
        prog="python -m benchmarks.pool_fragmentation",
    )
    console = make_console()
    environment = describe_environment()
    steps = list(make_steps(options))
    budget = options.live_mib * MIB // 2
    every = options.every
    curves = {
        "page pool": run_pool(steps, every, budget=None),
        "page pool, half the memory": run_pool(steps, every, budget=budget),
        "best fit": run_allocator(steps, every, BestFit()),
        "malloc": run_allocator(steps, every, Malloc()),
    }
    records = [summarize(name, c, options.warm_up) for name, c in curves.items()]
    growths = [
        measure_growth(name, demand)
        for demand in options.demands_mib
        for name in GROWTHS
    ]
    console.print(_table(records))
    console.print(_growth_table(growths))
    for line in verdicts(records[0]):
        console.print(line)
    write_result(
        options.out,
        environment,
        {
            "options": dataclasses.asdict(options),
            "allocators": records,
            "growth": growths,
        },
    )
    plot(curves, options.every, options.out.with_suffix(".png"))
    console.print(f"Written to {options.out}.", markup=False)


def make_steps(options: Options) -> Iterator[Step]:
    """Yields puts of overlapping executions.

    Devices put at random. When that would be more than may live, the device whose
    execution has put the most starts another one.
    """
    rng = np.random.default_rng(0)
    low, high = np.log(options.least), np.log(options.most)
    live = [0] * options.overlap
    runs = [0] * options.overlap
    for _ in range(options.steps):
        tiles = max(1, int(np.exp(rng.uniform(low, high))) // TILE)
        device = int(rng.integers(options.overlap))
        step = Step(device, runs[device], tiles, int(rng.choice([1, 2, 4, 8])))
        if sum(live) + step.nbytes > options.live_mib * MIB:
            device = max(range(options.overlap), key=live.__getitem__)
            runs[device] += 1
            live[device] = 0
            step = dataclasses.replace(step, device=device, run=runs[device])
        live[device] += step.nbytes
        yield step


def run_pool(steps: Sequence[Step], every: int, *, budget: int | None) -> list[Record]:
    """Puts all residuals into a page pool; returns a record for every so many steps."""
    codes = np.ones(max(step.codes_nbytes for step in steps), np.uint8)
    start = resident_nbytes()
    curve = []
    with PagePool(budget) as pool:
        for number, step in enumerate(steps, start=1):
            pool._pool.put(
                step.run,
                step.device,
                number % 100,
                step.bits,
                codes[: step.codes_nbytes],
                codes[: step.metadata_nbytes],
            )
            if number % every:
                continue
            stats = pool.stats()
            curve.append(
                {
                    "live_nbytes": stats.live_nbytes,
                    "held_nbytes": stats.committed_nbytes,
                    "resident_nbytes": resident_nbytes() - start,
                    "utilization": stats.utilization,
                    "growths": stats.growths,
                    "degraded_nbytes": stats.degraded_nbytes,
                }
            )
    return curve


def run_allocator(
    steps: Sequence[Step], every: int, allocator: Allocator
) -> list[Record]:
    """Puts all residuals into stretches; returns a record for every so many steps."""
    start = resident_nbytes()
    curve = []
    growths = 0
    live = 0
    held = 0
    # Of each device: its run, and what that has put.
    runs: dict[int, tuple[int, list[tuple[int, int]]]] = {}
    for number, step in enumerate(steps, start=1):
        run, stretches = runs.get(step.device, (step.run, []))
        if run != step.run:
            for address, nbytes in stretches:
                allocator.free(address)
                live -= nbytes
            stretches = []
        stretches.append((allocator.allocate(step.nbytes), step.nbytes))
        live += step.nbytes
        runs[step.device] = (step.run, stretches)
        if number % every:
            continue
        resident = resident_nbytes() - start
        known = allocator.held_nbytes()
        before, held = held, resident if known is None else known
        growths += held > before
        curve.append(
            {
                "live_nbytes": live,
                "held_nbytes": held,
                "resident_nbytes": resident,
                "utilization": live / held if held > 0 else 1.0,
                "growths": growths,
                "degraded_nbytes": 0,
            }
        )
    for _, stretches in runs.values():
        for address, _ in stretches:
            allocator.free(address)
    return curve


def summarize(name: str, curve: Sequence[Record], warm_up: float) -> Record:
    """Returns what holds after the warm-up."""
    first = min(len(curve) - 1, max(2, int(warm_up * len(curve))))
    judged = curve[first:]
    held = [record["held_nbytes"] for record in judged]
    resident = [record["resident_nbytes"] for record in judged]
    utilization = [record["utilization"] for record in judged]
    return {
        "allocator": name,
        "records": len(curve),
        "live_nbytes": max(record["live_nbytes"] for record in judged),
        "held_nbytes": max(held),
        "held_per_live": max(held) / max(r["live_nbytes"] for r in judged),
        "utilization_mean": float(np.mean(utilization)),
        "utilization_least": min(utilization),
        "growths_after_warm_up": judged[-1]["growths"] - judged[0]["growths"],
        "resident_drift_nbytes": max(resident) - resident[0],
        "degraded_nbytes": judged[-1]["degraded_nbytes"],
    }


def measure_growth(name: str, demand_mib: int) -> Record:
    """Fills a pool with residuals of 1 MiB and returns how it grew."""
    nbytes = MIB
    codes = np.zeros(nbytes, np.uint8)
    with PagePool(growth=GROWTHS[name]) as pool:
        for site in range(demand_mib * MIB // nbytes):
            pool._pool.put(1, 0, site, 2, codes, codes[: nbytes // 64])
        stats = pool.stats()
    return {
        "growth": name,
        "needed_nbytes": stats.pages_used * stats.page_nbytes,
        "held_nbytes": stats.committed_nbytes,
        "held_per_needed": stats.committed_nbytes
        / (stats.pages_used * stats.page_nbytes),
        "growths": stats.growths,
    }


def resident_nbytes() -> int:
    """Returns the resident memory of this process."""
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def verdicts(record: Record) -> list[str]:
    """Returns what was asked of the pool, and whether it holds."""
    drift = record["resident_drift_nbytes"]
    return [
        f"{'passed' if passed else 'FAILED'}: {text}"
        for passed, text in (
            (
                record["utilization_mean"] >= 0.97,
                f"utilization {record['utilization_mean']:.2%} (>= 97 %; the least "
                f"{record['utilization_least']:.2%})",
            ),
            (
                record["growths_after_warm_up"] == 0,
                f"{record['growths_after_warm_up']} growths after the warm-up (0)",
            ),
            (
                drift <= 16 * MIB,
                f"{drift / MIB:.1f} MiB of resident drift (<= 16 MiB)",
            ),
        )
    ]


def plot(curves: dict[str, Sequence[Record]], every: int, path: pathlib.Path) -> None:
    """Draws what is taken, and that for each byte that ever lived at once, by step."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    held_axes, live_axes = figure.subplots(1, 2)
    for name, curve in curves.items():
        steps = [every * (i + 1) for i in range(len(curve))]
        held = [record["held_nbytes"] / MIB for record in curve]
        most_live = itertools.accumulate((r["live_nbytes"] for r in curve), max)
        ratio = [h * MIB / live for h, live in zip(held, most_live, strict=True)]
        held_axes.plot(steps, held, label=name, linewidth=1.2)
        live_axes.plot(steps, ratio, label=name, linewidth=1.2)
    held_axes.set(xlabel="Step", ylabel="Memory taken (MiB)", ylim=(0, None))
    live_axes.set(
        xlabel="Step",
        ylabel="Memory taken / the most that lived so far",
        ylim=(0.9, 1.6),
    )
    held_axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def _table(records: Sequence[Record]):
    return make_table(
        "Memory for residuals that come and go",
        left=("Allocator",),
        right=("Live, MiB", "Taken, MiB", "Taken / live", "Used", "Growths", "Drift"),
        rows=[
            (
                record["allocator"],
                f"{record['live_nbytes'] / MIB:.1f}",
                f"{record['held_nbytes'] / MIB:.1f}",
                f"{record['held_per_live']:.3f}",
                f"{record['utilization_mean']:.2%}",
                str(record["growths_after_warm_up"]),
                f"{record['resident_drift_nbytes'] / MIB:.1f}",
            )
            for record in records
        ],
    )


def _growth_table(records: Sequence[Record]):
    return make_table(
        "Growth of a pool that is filled",
        left=("Growth",),
        right=("Needed, MiB", "Taken, MiB", "Taken / needed", "Growths"),
        rows=[
            (
                record["growth"],
                f"{record['needed_nbytes'] / MIB:.1f}",
                f"{record['held_nbytes'] / MIB:.1f}",
                f"{record['held_per_needed']:.3f}",
                str(record["growths"]),
            )
            for record in records
        ],
    )


if __name__ == "__main__":
    main()
