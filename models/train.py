"""Trains a model, by one method of saving memory or by several.

Examples:
    python -m models.train --width 16 --method checkpoint --out runs/first
    python -m models.train --width 16 --method checkpoint --out runs/first --resume
    python -m models.train --width 16 --compare
    python -m models.train roberta-base --lora 8 --data docstrings --method compress
    python -m models.train gpt2-medium --lora 8 --data docstrings --compare
"""

import dataclasses
import pathlib
import sys
import time
from collections.abc import Sequence

import rich.console
import tyro

from models import compare, loop
from models.config import TrainConfig
from models.pretraining import with_weights
from models.setup import set_up


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit status."""
    config = tyro.cli(
        TrainConfig, args=arguments, description=__doc__, prog="python -m models.train"
    )
    console = rich.console.Console()
    try:
        config = with_weights(_with_directory(config.filled()), console)
        if config.compare:
            compare.run(config, console)
        else:
            _train(config, console)
    except KeyboardInterrupt:
        console.print(
            f"Interrupted. Finished epochs are in {config.out}; the same command with "
            f"--out {config.out} --resume continues after them.",
            markup=False,
        )
        return 130  # as a shell reports a process ended by SIGINT
    except (FileNotFoundError, FloatingPointError, ValueError) as error:
        rich.console.Console(stderr=True).print(f"error: {error}", markup=False)
        return 2
    return 0


def _train(config: TrainConfig, console: rich.console.Console) -> None:
    setup = set_up(config)
    result = loop.train(setup, console)
    metric = setup.task.metric
    console.print(
        f"{result['label']}: test {metric.name} {metric.show(result[metric.key])} "
        f"(best {metric.show(result[f'best_{metric.key}'])}, epoch "
        f"{result['best_epoch']}), {result['step_seconds']:.3f} s a step. Written to "
        f"{config.out}.",
        markup=False,
    )


def _with_directory(config: TrainConfig) -> TrainConfig:
    if config.out is not None:
        return config
    kind = "compare" if config.compare else config.method
    name = f"{config.data}-{config.model}-{kind}-{time.strftime('%Y%m%d-%H%M%S')}"
    return dataclasses.replace(config, out=pathlib.Path("runs") / name)


if __name__ == "__main__":
    sys.exit(main())
