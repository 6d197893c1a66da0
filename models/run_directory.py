"""The files of one run: options, metrics, result."""

import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any


Record = dict[str, Any]


class RunDirectory:
    """A directory that holds one run.

    `config.json` says what was asked for, `metrics.jsonl` has one line per step and
    per epoch, and `result.json` appears when the run is finished.
    """

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path

    def create(self, *, resume: bool) -> None:
        """Makes the directory, or checks that there is a run to resume.

        Raises:
            ValueError: If a new run would overwrite another one.
            FileNotFoundError: If there is no run to resume.
        """
        exists = (self.path / "config.json").exists()
        if resume and not exists:
            raise FileNotFoundError(
                f"`--resume` found no run in `{self.path}` (no config.json there). "
                "Check `--out`, or leave `--resume` out to start a new run."
            )
        if exists and not resume:
            raise ValueError(
                f"`--out` is `{self.path}`, which already holds a run. Pass "
                "`--resume` to continue it, or choose another directory."
            )
        if self.path.exists() and not self.path.is_dir():
            raise ValueError(f"`--out` must be a directory, but `{self.path}` is not.")
        self.path.mkdir(parents=True, exist_ok=True)

    def write_config(self, config: Mapping[str, Any]) -> None:
        """Writes `config.json`; from then on the directory holds a run."""
        self._write("config.json", json.dumps(config, indent=2, default=str) + "\n")

    def append_metrics(self, records: list[Record]) -> None:
        """Adds lines to `metrics.jsonl`."""
        with (self.path / "metrics.jsonl").open("a") as file:
            file.writelines(json.dumps(record) + "\n" for record in records)

    def read_metrics(self) -> list[Record]:
        """Returns the lines of `metrics.jsonl`."""
        path = self.path / "metrics.jsonl"
        if not path.exists():
            return []
        records = []
        for line in path.read_text().splitlines():
            try:
                records.append(json.loads(line))
            except json.JSONDecodeError:
                # A process that was killed leaves at most its last line unfinished.
                break
        return records

    def write_metrics(self, records: list[Record]) -> None:
        """Replaces `metrics.jsonl`."""
        lines = [json.dumps(record) + "\n" for record in records]
        self._write("metrics.jsonl", "".join(lines))

    def keep_metrics_before(self, num_epochs: int) -> None:
        """Drops the lines of epochs that will be run again."""
        kept = [r for r in self.read_metrics() if r["epoch"] <= num_epochs]
        self.write_metrics(kept)

    def write_result(self, result: Record) -> None:
        """Writes `result.json`."""
        self._write("result.json", json.dumps(result, indent=2) + "\n")

    def read_result(self) -> Record | None:
        """Returns the content of `result.json`, or `None` if there is none."""
        path = self.path / "result.json"
        return json.loads(path.read_text()) if path.exists() else None

    def _write(self, name: str, text: str) -> None:
        # Renaming is atomic: a reader sees the old file or the new one.
        temporary = self.path / f".{name}.new"
        temporary.write_text(text)
        os.replace(temporary, self.path / name)
