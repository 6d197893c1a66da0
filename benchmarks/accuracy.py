"""Quality of what is trained with and without compression, over several seeds.

ResNet-18 on images, or adapters of a transformer on text of installed packages. All
methods start a seed from the same weights and see the same batches, with the same
dropout. The control rounds to nearest, which is biased: that it falls behind shows that
the comparison can see a bias. *uniform* keeps whatever the backward pass reads in the
same bits, as hooks for saved tensors do; *fixed* has the same bits for all residuals of
the planner, *adaptive* as many on average, allocated as it trains; *auto* has as many
as keep noise a tenth of the batch's. Losses tell them apart where accuracies are
too coarse: of the test split, and of the batches of each epoch. Bounds are one-sided,
95 %, by Student's distribution. Adapters are of weights that are
trained once, with compression.

Examples:
    python -m benchmarks.accuracy
    python -m benchmarks.accuracy --width 4 --epochs 1 --seeds 1
    python -m benchmarks.accuracy --contenders none fixed adaptive --seeds 5 --width 8
        --epochs 3 --out benchmarks/results/accuracy_adaptive.json
    python -m benchmarks.accuracy --model roberta-base --lora 8 --width None
        --epochs 3 --contenders none uniform compress adaptive
        --out benchmarks/results/quality_roberta.json
"""

import dataclasses
import functools
import itertools
import pathlib
import statistics
import tempfile
from collections.abc import Callable, Sequence
from typing import Any, Literal

import rich.console
import rich.table
import scipy.stats
import tyro

import dafjax
from benchmarks.environment import RESULTS, describe_environment, write_result
from benchmarks.tables import make_console, make_table
from benchmarks.uniform_bits import UniformBits
from dafjax.stores import PagePool
from models import loop
from models.config import DataName, ModelName, TrainConfig
from models.pretraining import with_weights
from models.setup import set_up
from models.step import WrapLoss
from models.tasks.task import Metric


Name = Literal[
    *("none", "compress", "control", "uniform", "fixed", "adaptive"),
    *("auto", "bits4", "bits8"),
]
Record = dict[str, Any]

_LOSS_OF_EPOCH = "loss of epoch"

# The options of each contender.
_COMPRESS: Record = {"method": "compress"}
_CONTENDERS: dict[Name, Record] = {
    "none": {"method": "none"},
    "compress": _COMPRESS,
    "control": {**_COMPRESS, "policy": "nearest"},
    "uniform": _COMPRESS,
    "fixed": _COMPRESS,
    "adaptive": _COMPRESS,
    "auto": {**_COMPRESS, "bits": "auto"},
    "bits4": {**_COMPRESS, "bits": 4},
    "bits8": {**_COMPRESS, "bits": 8},
}
# What takes the place of the method's own way to wrap the loss.
_WRAPPINGS: dict[Name, Callable[[int], WrapLoss]] = {
    "uniform": lambda bits: functools.partial(
        dafjax.remat_compress, policy=UniformBits(bits)
    ),
    "fixed": lambda bits: functools.partial(
        dafjax.remat_compress, bits=dafjax.Bits(bits, nonlinear=bits)
    ),
    "adaptive": lambda bits: functools.partial(
        dafjax.remat_compress, bits=dafjax.AverageBits(bits), store=PagePool()
    ),
}


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of the command line."""

    model: ModelName = "resnet18"
    """Architecture and size; a transformer is small without weights."""
    data: DataName | None = None
    """What is learned from; as of `models.train` if not given."""
    examples: int | None = None
    """Training images that the seed chooses; all if not given."""
    lora: int = 0
    """Rank of the adapters; 0: all weights are trained."""
    seeds: int = 3
    """Seeds, from 0 on."""
    width: int | None = 16
    """Filters of a ResNet's first stage; 64 is the width of the paper."""
    epochs: int | None = 12
    """Passes over the training split."""
    bits: int = 2
    """Bits of the compressing methods."""
    contenders: tuple[Name, ...] = ("none", "compress", "control")
    """What is trained; differences are to the first."""
    out: pathlib.Path = RESULTS / "accuracy.json"
    """The file to write."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line."""
    options = tyro.cli(
        Options,
        args=arguments,
        description=__doc__,
        prog="python -m benchmarks.accuracy",
    )
    console = make_console()
    environment = describe_environment()
    with tempfile.TemporaryDirectory() as directory:
        prepared = _prepare(options, pathlib.Path(directory), console)
        runs = [_train(options, prepared, seed) for seed in range(options.seeds)]
    first = runs[0][options.contenders[0]]
    metric = Metric(**first["metric"])
    epochs = [key for key in first if key.startswith(_LOSS_OF_EPOCH)]
    figures = list(dict.fromkeys([metric.key, "test_loss", "final_loss", *epochs]))
    behind = _behind(options, runs, metric)
    pairs = [
        _pair(runs, figure, a, b)
        for b, a in itertools.combinations(options.contenders, 2)
        for figure in figures
    ]
    console.print(_quality_table(options, prepared, runs, metric, behind))
    if len(runs) > 1:
        console.print(_pair_table(pairs))
    write_result(
        options.out,
        environment,
        {
            "options": dataclasses.asdict(options),
            **{
                figure.removeprefix("test_") if figure == metric.key else figure: [
                    {name: run[name][figure] for name in run} for run in runs
                ]
                for figure in figures
            },
            "points": behind,
            "mean_points": {
                name: statistics.fmean(differences)
                for name, differences in behind.items()
            },
            "pairs": pairs,
        },
    )
    console.print(f"Written to {options.out}.", markup=False)


def _prepare(
    options: Options, directory: pathlib.Path, console: rich.console.Console
) -> TrainConfig:
    """Returns what all runs have in common, with the weights of adapters."""
    config = TrainConfig(
        model=options.model,
        data=options.data,
        examples=options.examples,
        lora=options.lora,
        width=options.width if options.model.startswith("resnet") else None,
        epochs=options.epochs,
        bits=options.bits,
        compare=True,
        out=directory,
    )
    return dataclasses.replace(with_weights(config.filled(), console), compare=False)


def _behind(
    options: Options, runs: Sequence[dict[str, Record]], metric: Metric
) -> dict[Name, list[float]]:
    """Returns differences to the first contender, seed by seed.

    Of shares they are in percentage points, of losses in percent of the first's.
    """
    first, *others = options.contenders

    def difference(run: dict[str, Record], name: Name) -> float:
        value, reference = run[name][metric.key], run[first][metric.key]
        return 100 * (value - reference) / (1 if metric.is_share else reference)

    return {name: [difference(run, name) for run in runs] for name in others}


def _train(options: Options, prepared: TrainConfig, seed: int) -> dict[str, Record]:
    """Returns the results of every contender for one seed."""
    results = {}
    for name in options.contenders:
        with tempfile.TemporaryDirectory() as directory:
            config = dataclasses.replace(
                prepared,
                seed=seed,
                out=pathlib.Path(directory) / "run",
                **_CONTENDERS[name],
            )
            setup = set_up(config)
            if name in _WRAPPINGS:
                wrap_loss = _WRAPPINGS[name](options.bits)
                setup = dataclasses.replace(
                    setup,
                    method=dataclasses.replace(setup.method, wrap_loss=wrap_loss),
                )
            results[name] = loop.train(setup, rich.console.Console(quiet=True))
            results[name] |= _losses_of_epochs(setup.directory.read_metrics())
    return results


def _losses_of_epochs(metrics: Sequence[Record]) -> dict[str, float]:
    """Returns the mean loss of the batches of each epoch."""
    losses: dict[int, list[float]] = {}
    for record in metrics:
        if record["kind"] == "step":
            losses.setdefault(record["epoch"], []).append(record["loss"])
    return {f"{_LOSS_OF_EPOCH} {n}": statistics.fmean(x) for n, x in losses.items()}


def _pair(runs: Sequence[dict[str, Record]], figure: str, a: str, b: str) -> Record:
    """Compares two contenders in a figure, seed by seed."""
    differences = [run[a][figure] - run[b][figure] for run in runs]
    count = len(differences)
    spread = statistics.stdev(differences) if count > 1 else float("nan")
    error, mean = spread / count**0.5, statistics.fmean(differences)
    reference = statistics.fmean(run[b][figure] for run in runs)
    return {
        "figure": figure,
        "a": a,
        "b": b,
        "differences": differences,
        "mean": mean,
        "standard_error": error,
        "bounds": [mean + sign * _quantile(count) * error for sign in (-1, 1)],
        "relative": mean / reference if reference else float("nan"),
    }


def _quantile(count: int) -> float:
    """Returns the 95 % quantile of Student's distribution for so many differences."""
    return float(scipy.stats.t.ppf(0.95, count - 1)) if count > 1 else float("nan")


def _quality_table(
    options: Options,
    prepared: TrainConfig,
    runs: Sequence[dict[str, Record]],
    metric: Metric,
    behind: dict[Name, list[float]],
) -> rich.table.Table:
    titles = {
        "none": "none",
        "compress": f"compress, {options.bits} bits",
        "control": "control, to nearest",
        "uniform": f"uniform {options.bits} bits",
        "fixed": f"fixed {options.bits} bits",
        "adaptive": f"adaptive, {options.bits} on average",
        "auto": "auto",
        "bits4": "compress, 4 bits",
        "bits8": "compress, 8 bits",
    }
    rows = [
        (
            str(seed),
            *(metric.show(run[name][metric.key]) for name in options.contenders),
            *(f"{differences[seed]:+.2f}" for differences in behind.values()),
        )
        for seed, run in enumerate(runs)
    ]
    means = [statistics.fmean(differences) for differences in behind.values()]
    empty = ("",) * len(options.contenders)
    shape = f" of width {prepared.width}" if prepared.width else f", {prepared.size}"
    adapters = f", LoRA {prepared.lora}" if prepared.lora else ""
    unit = "Points" if metric.is_share else "Percent"
    return make_table(
        f"{metric.title}, {prepared.data}, {prepared.model}{shape}{adapters}, "
        f"{prepared.epochs} epochs",
        left=("Seed",),
        right=(
            *(titles[name] for name in options.contenders),
            *(f"{unit} of {name}" for name in behind),
        ),
        rows=[*rows, ("mean", *empty, *(f"{mean:+.2f}" for mean in means))],
    )


def _pair_table(pairs: Sequence[Record]) -> rich.table.Table:
    return make_table(
        "Differences, seed by seed",
        left=("Figure", "Of", "To"),
        right=("Mean", "Standard error", "Least", "Most (95 %)", "Relative"),
        rows=[
            (
                pair["figure"],
                pair["a"],
                pair["b"],
                f"{pair['mean']:+.5f}",
                f"{pair['standard_error']:.5f}",
                *(f"{bound:+.5f}" for bound in pair["bounds"]),
                f"{pair['relative']:+.2%}",
            )
            for pair in pairs
        ],
    )


if __name__ == "__main__":
    main()
