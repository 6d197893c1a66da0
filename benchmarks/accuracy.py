"""Test accuracy with and without compression, on the digits, over several seeds.

All methods start a seed from the same weights and see the same batches. The control
rounds to nearest, which is biased: that it falls behind shows that the comparison can
see a bias. *fixed* has the same bits for all residuals, *adaptive* as many on average,
allocated as it trains; losses tell them apart where accuracies are too coarse.

Examples:
    python -m benchmarks.accuracy
    python -m benchmarks.accuracy --width 4 --epochs 1 --seeds 1
    python -m benchmarks.accuracy --contenders none fixed adaptive --seeds 5 --width 8
        --epochs 6 --out benchmarks/results/accuracy_adaptive.json
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
import tyro

import dafjax
from benchmarks.environment import RESULTS, describe_environment, write_result
from benchmarks.tables import make_console, make_table
from dafjax.stores import PagePool
from models import loop
from models.config import TrainConfig
from models.setup import set_up
from models.step import WrapLoss


Name = Literal["none", "compress", "control", "fixed", "adaptive"]
Record = dict[str, Any]

# The method and the policy of each contender.
_CONTENDERS: dict[Name, tuple[Literal["none", "compress"], str]] = {
    "none": ("none", "default"),
    "compress": ("compress", "default"),
    "control": ("compress", "nearest"),
    "fixed": ("compress", "default"),
    "adaptive": ("compress", "default"),
}
# What takes the place of the method's own way to wrap the loss.
_WRAPPINGS: dict[Name, Callable[[int], WrapLoss]] = {
    "fixed": lambda bits: functools.partial(
        dafjax.remat_compress, bits=dafjax.Bits(bits, nonlinear=bits)
    ),
    "adaptive": lambda bits: functools.partial(
        dafjax.remat_compress, bits=dafjax.AverageBits(bits), store=PagePool()
    ),
}
# Of the result of a run.
_FIGURES = ("test_accuracy", "test_loss", "final_loss")


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of the command line."""

    seeds: int = 3
    """Seeds, from 0 on."""
    width: int = 16
    """Filters of the first stage; 64 is the width of the paper."""
    epochs: int = 12
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
    runs = [_train(options, seed) for seed in range(options.seeds)]
    first, *others = options.contenders
    points = {
        name: [
            100 * (run[name]["test_accuracy"] - run[first]["test_accuracy"])
            for run in runs
        ]
        for name in others
    }
    pairs = [
        _pair(runs, figure, a, b)
        for b, a in itertools.combinations(options.contenders, 2)
        for figure in _FIGURES
    ]
    console.print(_accuracy_table(options, runs, points))
    if len(runs) > 1:
        console.print(_pair_table(pairs))
    write_result(
        options.out,
        environment,
        {
            "options": dataclasses.asdict(options),
            **{
                figure.removeprefix("test_") if figure == "test_accuracy" else figure: [
                    {name: run[name][figure] for name in run} for run in runs
                ]
                for figure in _FIGURES
            },
            "points": points,
            "mean_points": {
                name: statistics.fmean(differences)
                for name, differences in points.items()
            },
            "pairs": pairs,
        },
    )
    console.print(f"Written to {options.out}.", markup=False)


def _train(options: Options, seed: int) -> dict[str, dict[str, float]]:
    """Returns the figures of every contender for one seed."""
    figures = {}
    for name in options.contenders:
        method, policy = _CONTENDERS[name]
        with tempfile.TemporaryDirectory() as directory:
            config = TrainConfig(
                method=method,
                policy=policy,
                seed=seed,
                width=options.width,
                epochs=options.epochs,
                bits=options.bits,
                out=pathlib.Path(directory) / "run",
            )
            setup = set_up(config)
            if name in _WRAPPINGS:
                wrap_loss = _WRAPPINGS[name](options.bits)
                setup = dataclasses.replace(
                    setup,
                    method=dataclasses.replace(setup.method, wrap_loss=wrap_loss),
                )
            result = loop.train(setup, rich.console.Console(quiet=True))
            figures[name] = {figure: result[figure] for figure in _FIGURES}
    return figures


def _pair(
    runs: Sequence[dict[str, dict[str, float]]], figure: str, a: str, b: str
) -> Record:
    """Compares two contenders in a figure, seed by seed."""
    differences = [run[a][figure] - run[b][figure] for run in runs]
    several = len(differences) > 1
    spread = statistics.stdev(differences) if several else float("nan")
    return {
        "figure": figure,
        "a": a,
        "b": b,
        "differences": differences,
        "mean": statistics.fmean(differences),
        "standard_error": spread / len(differences) ** 0.5,
    }


def _accuracy_table(
    options: Options,
    runs: Sequence[dict[str, dict[str, float]]],
    points: dict[Name, list[float]],
) -> rich.table.Table:
    titles = {
        "none": "none",
        "compress": f"compress, {options.bits} bits",
        "control": "control, to nearest",
        "fixed": f"fixed {options.bits} bits",
        "adaptive": f"adaptive, {options.bits} on average",
    }
    rows = [
        (
            str(seed),
            *(f"{run[name]['test_accuracy']:.2%}" for name in options.contenders),
            *(f"{differences[seed]:+.2f}" for differences in points.values()),
        )
        for seed, run in enumerate(runs)
    ]
    means = [statistics.fmean(differences) for differences in points.values()]
    empty = ("",) * len(options.contenders)
    return make_table(
        f"Test accuracy on the digits, ResNet-18 of width {options.width}, "
        f"{options.epochs} epochs",
        left=("Seed",),
        right=(
            *(titles[name] for name in options.contenders),
            *(f"Points of {name}" for name in points),
        ),
        rows=[*rows, ("mean", *empty, *(f"{mean:+.2f}" for mean in means))],
    )


def _pair_table(pairs: Sequence[Record]) -> rich.table.Table:
    return make_table(
        "Differences, seed by seed",
        left=("Figure", "Of", "To"),
        right=("Mean", "Standard error"),
        rows=[
            (
                pair["figure"],
                pair["a"],
                pair["b"],
                f"{pair['mean']:+.5f}",
                f"{pair['standard_error']:.5f}",
            )
            for pair in pairs
        ],
    )


if __name__ == "__main__":
    main()
