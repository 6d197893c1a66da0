"""Weights to adapt where there are none: all of a model, trained on other data."""

import dataclasses

import rich.console

from models.config import TrainConfig
from models.fresh_process import train_in_fresh_process


def with_weights(config: TrainConfig, console: rich.console.Console) -> TrainConfig:
    """Returns the options with weights to start from, if adapters are to be trained.

    Where there are none, a model of the same shape is trained first, with the method of
    the run. A comparison trains it once, with compression, for all of its methods.

    Args:
        config: The options, filled in, with the directory of the run.
        console: Where it says so.

    Raises:
        ValueError: If that training fails, or one with other options is there already;
            its process has printed the reason.
    """
    first = config.pretraining
    if first is None:
        return config
    if config.compare:
        first = dataclasses.replace(first, method="compress", policy="default")
    weights = first.resolved_directory / "weights"
    if not (weights / "model.safetensors").exists():
        console.print(
            f"There are no weights of {config.model} in weights/{config.model}: one of "
            f"size {config.size} is trained on {first.data} first, for "
            f"{first.epochs} epochs.",
            markup=False,
        )
    # If it was interrupted it goes on; if it is finished that is all.
    train_in_fresh_process(dataclasses.replace(first, resume=True))
    return dataclasses.replace(config, weights=weights)
