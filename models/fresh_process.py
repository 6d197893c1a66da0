"""A training run in a process of its own, so that its peak of memory is its own."""

import dataclasses
import os
import pathlib
import subprocess
import sys

from models.config import TrainConfig
from models.run_directory import Record, RunDirectory


_ROOT = pathlib.Path(__file__).resolve().parent.parent


def train_in_fresh_process(config: TrainConfig) -> Record:
    """Trains, or continues what was begun, and returns the result.

    Args:
        config: The run. With `resume` a finished run of the same options is not run
            again, and one that was not begun is begun.

    Raises:
        ValueError: If the run fails; the process has printed the reason.
        KeyboardInterrupt: If it was interrupted.
    """
    directory = RunDirectory(config.resolved_directory)
    if config.resume:
        finished = directory.read_result()
        if finished is not None and _is_of(finished, config):
            return finished
        resume = (directory.path / "config.json").exists()
        config = dataclasses.replace(config, resume=resume)
    path = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")]))
    completed = subprocess.run(
        [sys.executable, "-m", "models.train", *config.to_arguments()],
        env={**os.environ, "PYTHONPATH": path},
        check=False,
    )
    if completed.returncode == 130:
        raise KeyboardInterrupt
    result = directory.read_result()
    if completed.returncode or result is None:
        raise ValueError(
            f"Training with method {config.method} ended with status "
            f"{completed.returncode}; its message stands above."
        )
    return result


def _is_of(result: Record, config: TrainConfig) -> bool:
    """Whether a result is what these options would give."""
    asked_for = {"identity": config.identity(), "epochs": config.epochs}
    return {key: result.get(key) for key in asked_for} == asked_for
