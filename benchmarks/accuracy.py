"""Test accuracy with and without compression, on the digits, over several seeds.

All methods start a seed from the same weights and see the same batches. The control
rounds to nearest, which is biased: that it falls behind shows that the comparison can
see a bias.

Examples:
    python -m benchmarks.accuracy
    python -m benchmarks.accuracy --width 4 --epochs 1 --seeds 1
"""

import dataclasses
import pathlib
import statistics
import tempfile
from collections.abc import Sequence
from typing import Any

import rich.console
import tyro

from benchmarks.environment import RESULTS, describe_environment, write_result
from benchmarks.tables import make_console, make_table
from models import loop
from models.config import TrainConfig
from models.setup import set_up


# The method and the policy of each contender.
_CONTENDERS = {
    "none": ("none", "default"),
    "compress": ("compress", "default"),
    "control": ("compress", "nearest"),
}

Record = dict[str, Any]


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
    """Bits of the compressing method."""
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
    points = {
        name: [100 * (run[name] - run["none"]) for run in runs]
        for name in ("compress", "control")
    }
    means = {
        name: statistics.fmean(differences) for name, differences in points.items()
    }
    rows = [
        (
            str(seed),
            *(f"{run[name]:.2%}" for name in _CONTENDERS),
            *(f"{differences[seed]:+.2f}" for differences in points.values()),
        )
        for seed, run in enumerate(runs)
    ]
    console.print(
        make_table(
            f"Test accuracy on the digits, ResNet-18 of width {options.width}, "
            f"{options.epochs} epochs",
            left=("Seed",),
            right=(
                *("none", f"compress, {options.bits} bits", "control, to nearest"),
                *("Points", "Of the control"),
            ),
            rows=[*rows, ("mean", "", "", "", *(f"{m:+.2f}" for m in means.values()))],
        )
    )
    write_result(
        options.out,
        environment,
        {
            "options": dataclasses.asdict(options),
            "accuracy": runs,
            "points": points,
            "mean_points": means,
        },
    )
    console.print(f"Written to {options.out}.", markup=False)


def _train(options: Options, seed: int) -> dict[str, float]:
    """Returns the test accuracy of every contender for one seed."""
    accuracy = {}
    for name, (method, policy) in _CONTENDERS.items():
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
            quiet = rich.console.Console(quiet=True)
            accuracy[name] = loop.train(set_up(config), quiet)["test_accuracy"]
    return accuracy


if __name__ == "__main__":
    main()
