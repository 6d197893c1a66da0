"""Finished epochs on disk: saved atomically with Orbax, restored bit for bit."""

import pathlib
from collections.abc import Mapping
from typing import Any, TypeVar

import jax
import orbax.checkpoint as ocp


Tree = TypeVar("Tree")

_NUM_KEPT = 2


class Checkpoints:
    """The checkpoints of one run, each named by the number of finished epochs.

    Orbax writes into a temporary folder and renames it when all is written. A
    checkpoint is thus whole or absent, whenever the process ends.
    """

    def __init__(self, directory: pathlib.Path) -> None:
        self._directory = directory / "checkpoints"
        self._manager = ocp.CheckpointManager(
            self._directory.absolute(),
            options=ocp.CheckpointManagerOptions(
                max_to_keep=_NUM_KEPT, enable_async_checkpointing=False
            ),
        )

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *unused: object) -> None:
        self._manager.close()

    def latest(self) -> int | None:
        """Returns the largest number of finished epochs on disk, or `None`."""
        return self._manager.latest_step()

    def save(self, num_epochs: int, state: Any, identity: Mapping[str, Any]) -> None:
        """Saves the state after `num_epochs`; returns when it is on disk."""
        self._manager.save(
            num_epochs,
            args=ocp.args.Composite(
                state=ocp.args.StandardSave(state),
                run=ocp.args.JsonSave(dict(identity)),
            ),
        )
        self._manager.wait_until_finished()

    def identity(self, num_epochs: int) -> dict[str, Any]:
        """Returns the options of the run that wrote a checkpoint."""
        restored = self._restore(num_epochs, run=ocp.args.JsonRestore())
        return restored["run"]

    def restore(self, num_epochs: int, like: Tree) -> Tree:
        """Returns the state after `num_epochs`.

        Args:
            num_epochs: A number that `latest` returned.
            like: A state of the same structure, shapes, dtypes and placement.

        Raises:
            ValueError: If the checkpoint cannot be read.
        """
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
        restored = self._restore(num_epochs, state=ocp.args.StandardRestore(abstract))
        return restored["state"]

    def _restore(self, num_epochs: int, **items: Any) -> Any:
        try:
            return self._manager.restore(num_epochs, args=ocp.args.Composite(**items))
        except Exception as error:  # Orbax raises many types for a damaged folder
            folder = self._directory / str(num_epochs)
            reason = str(error).partition("\n")[0]  # Orbax goes on for pages
            raise ValueError(
                f"The checkpoint `{folder}` cannot be read. Delete this folder to "
                "resume from the one before it, if there is one; the reason was: "
                f"{type(error).__name__}: {reason}"
            ) from error
