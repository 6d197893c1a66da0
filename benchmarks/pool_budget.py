"""Is the budget of a page pool obeyed, and does the error fall as it grows?

Budgets are those that 1 to 8 bits on average take: codes, scales and minima. The pool
meets them in two ways: *target*, bits are allocated for a target (`dafjax.Budget`), and
*asked*, all residuals ask for 8 bits, and the pool allocates fewer where these do not
fit. What matters is measured by either. Each way is one compiled program for all
budgets.

- Gradients: at weights along an exact training, with the budgets in random order, a
  new one for every execution, so that it goes up and down.
- Training: from the same weights and with the same batches, for some tens of steps.

Examples:
    python -m benchmarks.pool_budget
    python -m benchmarks.pool_budget --networks gpt2 --settings 5 --seeds 1
"""

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any, final

import jax
import numpy as np
import rich.table
import tyro
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

import dafjax
from benchmarks.environment import RESULTS, describe_environment, write_result
from benchmarks.monotony import falls_as_it_grows
from benchmarks.pooled_gradient import PooledGradient, squared_error
from benchmarks.small_networks import (
    Network,
    NetworkName,
    Point,
    Sizes,
    make_network,
)
from benchmarks.tables import make_console, make_table
from dafjax.stores import PagePool


Record = dict[str, Any]

WAYS = ("target", "asked")


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of the command line."""

    networks: tuple[NetworkName, ...] = ("resnet18", "gpt2")
    """What is trained."""
    sizes: Sizes = Sizes(gpt2_layers=2, gpt2_batch=16)  # noqa: RUF009  (frozen)
    """How large they are."""
    settings: int = 20
    """Budgets, from 1 to 8 bits on average, evenly spaced in their logarithm."""
    steps: int = 20
    """Steps of a training."""
    points: int = 4
    """Steps of the exact training whose gradients are compared."""
    seeds: int = 5
    """Weights and batches."""
    train: bool = True
    """Whether the network is also trained with each budget."""
    out: pathlib.Path = RESULTS / "pool_budget.json"
    """The file to write; the plot is beside it."""


class BudgetExceededError(Exception):
    """The pool took more memory than it may."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line."""
    options = tyro.cli(
        Options,
        args=arguments,
        description=__doc__,
        prog="python -m benchmarks.pool_budget",
    )
    console = make_console()
    environment = describe_environment()
    records = {}
    for name in options.networks:
        records[name] = measure(name, options)
        console.print(_table(name, records[name]))
        for line in verdicts(records[name]):
            console.print(line)
    write_result(
        options.out,
        environment,
        {"options": dataclasses.asdict(options), "networks": records},
    )
    plot(records, options.out.with_suffix(".png"))
    console.print(f"Written to {options.out}.", markup=False)


@final
@dataclasses.dataclass(frozen=True)
class Need:
    """What the residuals of a program take.

    Attributes:
        elements: Elements of all codes, padding included.
        metadata_nbytes: Bytes of scales and minima.
    """

    elements: float
    metadata_nbytes: float

    def nbytes(self, bits: float) -> int:
        """Returns the bytes of so many bits on average."""
        return int(self.metadata_nbytes + self.elements * bits / 8)


@final
class Trial:
    """One network's gradient in one pool, whose budget changes.

    Every execution is checked: what the pool had committed is within its budget.
    """

    def __init__(
        self, network: Network, way: str, pool: PagePool, example: Point
    ) -> None:
        """Compiles, and learns what residuals take from executions without a limit."""
        self._pool = pool
        self._way = way
        self._budget: int | None = None
        bits = dafjax.AverageBits(8) if way == "target" else 8
        # What is traced while there is a budget measures importances.
        pool.budget = _AMPLE
        self.gradient = PooledGradient(network.loss, pool, bits=bits)
        self.peaks: dict[int, float] = {}
        self.executions = 0
        jax.block_until_ready(self.gradient(*example.arguments))
        taken = {}
        for bits in (1, 8):
            pool.set_bits("*", bits)
            jax.block_until_ready(self.gradient(*example.arguments))
            taken[bits] = pool.stats().live_nbytes
        pool.set_bits("*", None)
        elements = (taken[8] - taken[1]) * 8 / 7
        self.need = Need(elements, taken[1] - elements / 8)

    def limit(self, nbytes: int | None) -> None:
        """Sets the budget for the next execution on."""
        self._pool.budget = nbytes
        self._budget = nbytes
        if self._way == "target":
            bits = dafjax.AverageBits(8) if nbytes is None else dafjax.Budget(nbytes)
            self._pool.target = bits

    def run(self, setting: int, arguments: Sequence[Any]) -> Any:
        """Computes a gradient, and notes the most that the pool took."""
        output = jax.block_until_ready(self.gradient(*arguments))
        # Within an execution memory is only ever added, up to the limit that holds;
        # what a smaller limit makes free is given back when the execution starts.
        committed = self._pool.stats().committed_nbytes
        self.executions += 1
        if self._budget is not None:
            if committed > self._budget:
                raise BudgetExceededError(
                    f"{self._way} {setting}: {committed} bytes are committed, of "
                    f"{self._budget}."
                )
            ratio = committed / self._budget
            self.peaks[setting] = max(self.peaks.get(setting, 0.0), ratio)
        return output

    def average_bits(self) -> float:
        """Returns the bits of an element in the execution before."""
        codes = self._pool.stats().live_nbytes - self.need.metadata_nbytes
        return 8 * codes / self.need.elements


def measure(name: NetworkName, options: Options) -> Record:
    """Measures one network, with a pool for each way."""
    network = make_network(name, options.sizes)
    exact = [list(network.train(seed, options.steps)) for seed in range(options.seeds)]
    ways = {way: _measure_way(name, network, way, exact, options) for way in WAYS}
    return {
        "exact_losses": [[p.loss for p in points] for points in exact],
        "executions": sum(record["executions"] for record in ways.values()),
        "recompiles": sum(record["recompiles"] for record in ways.values()),
        "ways": {way: record["settings"] for way, record in ways.items()},
        "monotone": {way: record["monotone"] for way, record in ways.items()},
    }


def _measure_way(
    name: str,
    network: Network,
    way: str,
    exact: Sequence[Sequence[Point]],
    options: Options,
) -> Record:
    averages = [float(b) for b in np.geomspace(1, 8, options.settings)]
    with PagePool(name=f"pool_budget {name} {way}") as pool:
        trial = Trial(network, way, pool, exact[0][-1])
        budgets = [trial.need.nbytes(bits) for bits in averages]
        errors, bits = _gradient_errors(trial, budgets, exact, options)
        gaps = [
            _loss_gaps(trial, network, setting, budget, exact, options)
            if options.train
            else [0.0]
            for setting, budget in enumerate(budgets)
        ]
    return {
        "executions": trial.executions,
        "recompiles": trial.gradient.num_traces - 1,
        "settings": [
            {
                "average_bits": averages[i],
                "budget_nbytes": budgets[i],
                "kept_bits": float(np.mean(bits[i])),
                "peak_over_budget": trial.peaks[i],
                "errors": errors[i],
                "error": float(np.mean(errors[i])),
                "loss_gaps": gaps[i],
                "loss_gap": float(np.mean(gaps[i])),
            }
            for i in range(options.settings)
        ],
        "monotone": {
            "error": falls_as_it_grows(budgets, errors),
            **({"loss_gap": falls_as_it_grows(budgets, gaps)} if options.train else {}),
        },
    }


def _gradient_errors(
    trial: Trial,
    budgets: Sequence[int],
    exact: Sequence[Sequence[Point]],
    options: Options,
) -> tuple[list[list[float]], list[list[float]]]:
    """Returns relative errors of gradients, and bits that were kept, by setting."""
    rng = np.random.default_rng(0)
    errors: list[list[float]] = [[] for _ in budgets]
    bits: list[list[float]] = [[] for _ in budgets]
    for points in exact:
        every = max(1, len(points) // options.points)
        for point in points[every - 1 :: every]:
            # So that what the pool knows of importance is of this point.
            trial.limit(None)
            for _ in range(_TO_LEARN):
                trial.run(-1, point.arguments)
            for setting in rng.permutation(len(budgets)):
                trial.limit(budgets[setting])
                _, gradient = trial.run(int(setting), point.arguments)
                squared = float(squared_error(gradient, point.gradient))
                errors[setting].append(squared**0.5)
                bits[setting].append(trial.average_bits())
    return errors, bits


def _loss_gaps(
    trial: Trial,
    network: Network,
    setting: int,
    budget: int,
    exact: Sequence[Sequence[Point]],
    options: Options,
) -> list[float]:
    """Returns, for each seed, how far the last losses are from exact training's."""
    gaps = []
    for seed, points in enumerate(exact):
        trial.limit(budget)
        trained = network.train(
            seed,
            options.steps,
            gradient=lambda *arguments: trial.run(setting, arguments),
        )
        differences = [
            abs(got.loss - want.loss) for got, want in zip(trained, points, strict=True)
        ]
        gaps.append(float(np.mean(differences[-_LAST:])))
    return gaps


# Bytes that no program here takes.
_AMPLE = 1 << 40

# Executions; the pool averages importances over about eight.
_TO_LEARN = 8

# Losses of so many steps make one figure.
_LAST = 5


def verdicts(record: Record) -> list[str]:
    """Returns what was asked of the pool, and whether it holds."""
    most = max(
        row["peak_over_budget"] for rows in record["ways"].values() for row in rows
    )
    checks = [
        (most <= 1, f"at most {most:.4f} of a budget was taken (<= 1)"),
        (record["recompiles"] == 0, f"{record['recompiles']} recompilations (0)"),
    ]
    for way, facts in record["monotone"].items():
        for figure, fact in facts.items():
            what = "gradient error" if figure == "error" else "loss gap"
            checks.append(
                (
                    not fact["rises"] and fact["falls"],
                    f"{way}: {what} rises at {len(fact['rises'])} settings (0), and "
                    f"{'falls' if fact['falls'] else 'does not fall'} from the first "
                    "to the last (falls); rank correlation with the budget "
                    f"{fact['spearman']:.3f}",
                )
            )
    return [f"{'passed' if passed else 'FAILED'}: {text}" for passed, text in checks]


def plot(records: dict[str, Record], path: pathlib.Path) -> None:
    """Draws error of the gradient and of the loss, by budget."""
    figure = Figure(figsize=(10, 4 * len(records)), layout="constrained")
    axes = figure.subplots(len(records), 2, squeeze=False)
    for (name, record), row in zip(records.items(), axes, strict=True):
        for axis, samples, label in (
            (row[0], "errors", "Error of the gradient / its norm"),
            (row[1], "loss_gaps", "Error of the loss"),
        ):
            # They mostly coincide.
            for way, style in zip(WAYS, ("-", "--"), strict=True):
                settings = record["ways"][way]
                table = np.array([r[samples] for r in settings])
                if table.shape[1] < 2:
                    continue
                axis.errorbar(
                    [r["budget_nbytes"] / 1e6 for r in settings],
                    table.mean(axis=1),
                    yerr=np.std(table, axis=1, ddof=1) / table.shape[1] ** 0.5,
                    label=way,
                    linestyle=style,
                    linewidth=1.2,
                    capsize=2,
                )
                axis.legend()
            axis.set(xscale="log", yscale="log", xlabel="Budget (MB)", ylabel=label)
            axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.xaxis.set_major_formatter("{x:g}")
            axis.xaxis.set_minor_formatter("")
            axis.set_title(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def _table(name: str, record: Record) -> rich.table.Table:
    rows = zip(*(record["ways"][way] for way in WAYS), strict=True)
    return make_table(
        f"{name}, {record['executions']} executions: target / asked",
        left=("Bits",),
        right=("Budget MB", "Peak / budget", "Kept bits", "Gradient error", "Loss gap"),
        rows=[
            (
                f"{pair[0]['average_bits']:.2f}",
                f"{pair[0]['budget_nbytes'] / 1e6:.2f}",
                " / ".join(f"{r['peak_over_budget']:.3f}" for r in pair),
                " / ".join(f"{r['kept_bits']:.2f}" for r in pair),
                " / ".join(f"{r['error']:.4f}" for r in pair),
                " / ".join(f"{r['loss_gap']:.4f}" for r in pair),
            )
            for pair in rows
        ],
    )


if __name__ == "__main__":
    main()
