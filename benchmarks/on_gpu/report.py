"""One JSON and a table of what `benchmarks/gpu.sh` has measured.

Example:
    python -m benchmarks.on_gpu.report build/gpu --out benchmarks/results/gpu.json
"""

import dataclasses
import json
import pathlib
from collections.abc import Sequence
from typing import Annotated, Any

import tyro

from benchmarks.environment import RESULTS, describe_environment, write_result
from benchmarks.on_gpu import throughput
from benchmarks.reductions import verdict as verdict_of_reductions
from benchmarks.tables import make_console, make_table


Record = dict[str, Any]

# Files of the parts, and what each part is.
PARTS = {
    "same_bytes": "bytes equal to the CPU's",
    "sanitizer": "compute-sanitizer",
    "throughput": "pack and unpack, of a copy",
    "reductions": "strategies of reductions",
    "cub": "CUB",
    "steps": "training steps",
}
# The most that a step may take, of the plain one's time.
_STEP = 1.10


class NothingMeasuredError(Exception):
    """No part has left a file."""


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of the command line."""

    folder: Annotated[pathlib.Path, tyro.conf.Positional]
    """Where the parts' files are; a part that has none was not measured."""
    out: pathlib.Path = RESULTS / "gpu.json"
    """The file to write."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line."""
    options = tyro.cli(
        Options,
        args=arguments,
        description=__doc__,
        prog="python -m benchmarks.on_gpu.report",
    )
    parts = {name: _read(options.folder / f"{name}.json") for name in PARTS}
    if all(part is None for part in parts.values()):
        raise NothingMeasuredError(
            f"None of {', '.join(PARTS)} has a file in `{options.folder}`: there is "
            f"nothing to write to `{options.out}`."
        )
    rows = [(what, *summary(name, parts[name])) for name, what in PARTS.items()]
    console = make_console()
    console.print(
        make_table(
            "On this device", left=("What", "Measured"), right=("Holds",), rows=rows
        )
    )
    write_result(
        options.out,
        describe_environment(),
        {name: part for name, part in parts.items() if part is not None},
    )
    console.print(f"Written to {options.out}.", markup=False)


def _read(path: pathlib.Path) -> Record | None:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def summary(name: str, part: Record | None) -> tuple[str, str]:
    """Returns a part's figures in words, and whether they are as they must be."""
    if part is None:
        return "not measured", ""
    return _SUMMARIES[name](part)


def _same_bytes(part: Record) -> tuple[str, str]:
    different = len(part["different"])
    total = part["num_cases"]
    return f"{total - different} of {total} cases", "no" if different else "yes"


def _sanitizer(part: Record) -> tuple[str, str]:
    text = ", ".join(f"{tool}: {found}" for tool, found in part["tools"].items())
    return text, "yes" if all(v == "clean" for v in part["tools"].values()) else ""


def _throughput(part: Record) -> tuple[str, str]:
    text, holds = _split(throughput.verdict(part["throughput"]))
    measured = {record["operation"] for record in part["throughput"]}
    missing = [name for name in throughput.CODECS if f"pack {name}" not in measured]
    return text, _of_all(holds, missing)


def _reductions(part: Record) -> tuple[str, str]:
    return _split(verdict_of_reductions(part["reductions"]))


def _cub(part: Record) -> tuple[str, str]:
    slowest = min(row["gigabytes_per_second"] for row in part["cub"])
    fastest = max(row["gigabytes_per_second"] for row in part["cub"])
    return f"minimum and maximum at {slowest:.0f} to {fastest:.0f} GB/s", ""


def _steps(part: Record) -> tuple[str, str]:
    ours = [row for row in part["steps"] if row["method"] == "compress"]
    text = ", ".join(f"{row['network']} {row['ratio']['median']:.3f}" for row in ours)
    holds = all(row["ratio"]["median"] <= _STEP for row in ours)
    measured = {row["network"] for row in ours}
    missing = [name for name in part["options"]["networks"] if name not in measured]
    text = f"time of plain: {text} (<= {_STEP})"
    return text, _of_all("yes" if holds else "no", missing)


def _of_all(holds: str, missing: Sequence[str]) -> str:
    """Returns whether all is as it must be: what is missing may not be."""
    return "in part" if missing and holds == "yes" else holds


def _split(verdict: str) -> tuple[str, str]:
    outcome, _, text = verdict.partition(": ")
    return text, "yes" if outcome == "passed" else "no"


_SUMMARIES = {
    "same_bytes": _same_bytes,
    "sanitizer": _sanitizer,
    "throughput": _throughput,
    "reductions": _reductions,
    "cub": _cub,
    "steps": _steps,
}


if __name__ == "__main__":
    main()
