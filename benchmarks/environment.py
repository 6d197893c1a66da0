"""Where and with what a measurement was made; written into every result."""

import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
import subprocess
from typing import Any

import jax

from dafjax._native import library_status, processor


RESULTS = pathlib.Path(__file__).resolve().parent / "results"

_ROOT = pathlib.Path(__file__).resolve().parent.parent
_PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy")


def describe_environment() -> dict[str, Any]:
    """Returns versions, device, processor, commit, load and date, ready for JSON.

    Call it before measuring: the commit may change meanwhile.
    """
    modified = _git("diff", "--name-only", "HEAD", "--", ":!benchmarks/results")
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": _git("rev-parse", "HEAD"),
        "dirty": bool(modified),
        "modified_files": modified.splitlines(),
        "python": platform.python_version(),
        "packages": {name: importlib.metadata.version(name) for name in _PACKAGES},
        "device": jax.devices()[0].device_kind,
        "cpu_model": processor(),
        "cores": os.cpu_count(),
        "usable_cores": len(os.sched_getaffinity(0)),
        "instruction_set": library_status().instruction_set,
        # Above the number of cores, others were using the machine.
        "load_average": list(os.getloadavg()),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
    }


def write_result(
    path: pathlib.Path, environment: dict[str, Any], result: dict[str, Any]
) -> None:
    """Writes the result of one run, with its environment, as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    end = {"load_average_at_end": list(os.getloadavg())}
    document = {"environment": environment | end, **result}
    # Whoever is stopped while he writes leaves what was there before.
    unfinished = path.with_name(f"{path.name}.unfinished")
    unfinished.write_text(json.dumps(document, indent=1, default=_readable) + "\n")
    unfinished.replace(path)


def _readable(value: Any) -> str:
    """Returns what stands for a value in JSON; of a path, what no machine decides."""
    return value.name if isinstance(value, pathlib.Path) else str(value)


def _git(*arguments: str) -> str:
    completed = subprocess.run(
        ["git", "-C", str(_ROOT), *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    # Outside a checkout there is no commit to name.
    return completed.stdout.strip() if completed.returncode == 0 else "unknown"
