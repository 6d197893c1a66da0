"""Finished epochs on disk: saved atomically with Orbax, restored bit for bit."""

import pathlib
from collections.abc import Mapping
from typing import Any, TypeVar

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import preservation_policy


Tree = TypeVar("Tree")

_NUM_LATEST = 2


class Checkpoints:
    """The checkpoints of one run, each named by the number of finished epochs.

    The latest are kept, and the best. Orbax writes into a temporary folder and renames
    it when all is written. A checkpoint is thus whole or absent, whenever the process
    ends.
    """

    def __init__(
        self, directory: pathlib.Path, *, higher_is_better: bool = True
    ) -> None:
        """Opens or makes a folder of checkpoints.

        Args:
            directory: The folder of the run; checkpoints are in one below it.
            higher_is_better: Which scores that `save` is given are better.
        """
        self._directory = directory / "checkpoints"
        best = preservation_policy.BestN(
            get_metric_fn=lambda metrics: metrics["score"],
            reverse=not higher_is_better,
            n=1,
        )
        policy = preservation_policy.AnyPreservationPolicy(
            [preservation_policy.LatestN(_NUM_LATEST), best]
        )
        self._manager = ocp.CheckpointManager(
            self._directory.absolute(),
            options=ocp.CheckpointManagerOptions(
                best_fn=lambda metrics: metrics["score"],
                best_mode="max" if higher_is_better else "min",
                preservation_policy=policy,
                enable_async_checkpointing=False,
            ),
        )

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *unused: object) -> None:
        self._manager.close()

    def latest(self) -> int | None:
        """Returns the largest number of finished epochs on disk, or `None`."""
        return self._manager.latest_step()

    def best(self) -> int | None:
        """Returns the number of epochs after which the score was best, or `None`."""
        return self._manager.best_step()

    def save(
        self,
        num_epochs: int,
        state: Any,
        identity: Mapping[str, Any],
        score: float = 0.0,
    ) -> None:
        """Saves the state after `num_epochs`; returns when it is on disk."""
        self._manager.save(
            num_epochs,
            args=ocp.args.Composite(
                state=ocp.args.StandardSave(state),
                run=ocp.args.JsonSave(dict(identity)),
            ),
            metrics={"score": score},
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
