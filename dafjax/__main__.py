"""Shows how dafjax is installed here, and how fast its reductions are.

`python -m dafjax doctor` prints versions, devices, the compiled library and what it
uses. `python -m dafjax tune` prints the measured times of reductions and the choices
made from them.
"""

import argparse
import os
import platform
import sys

import jax
import jaxlib.version

from dafjax._native import (
    STRATEGIES,
    CudaStatus,
    LibraryStatus,
    Tuning,
    cuda_status,
    fastest,
    library_status,
    tune_device,
)
from dafjax._numbers import align


def doctor() -> int:
    """Prints the state of the installation; returns 0 if it can be used."""
    status = library_status()
    facts = [
        ("python", f"{platform.python_version()} on {platform.machine()}"),
        ("jax", f"{jax.__version__}, jaxlib {jaxlib.version.__version__}"),
        ("devices", ", ".join(map(str, jax.devices()))),
        *_library_facts(status),
        ("threads", f"{len(os.sched_getaffinity(0))} (XLA's own pool)"),
        *_cuda_facts(cuda_status()),
    ]
    for name, value in facts:
        print(f"{name:16} {value}")
    if status.error is not None:
        print(f"\nThe library cannot be used.\n{status.error}", file=sys.stderr)
        return 1
    return 0


def _library_facts(status: LibraryStatus) -> list[tuple[str, str]]:
    return [
        ("library", status.path or "not found"),
        ("XLA FFI version", _version(status.built_ffi_api) + " built against"),
        ("", _version(status.jaxlib_ffi_api) + " of jaxlib"),
        ("instructions", status.instruction_set or "none"),
        ("", "can run " + (", ".join(status.instruction_sets) or "none")),
    ]


def _cuda_facts(status: CudaStatus) -> list[tuple[str, str]]:
    facts = [("CUDA library", status.path or "not built")]
    if status.path is not None:
        facts += [
            ("", "for " + " ".join(status.architectures)),
            ("", f"runtime {_version(status.runtime_version)}"),
        ]
    driver = status.driver_version
    facts.append(("CUDA driver", "none found" if driver is None else _version(driver)))
    facts.append(("CUDA plugin", ", ".join(status.plugins) or "none of JAX installed"))
    for device in status.devices:
        memory = "the host's memory" if device.integrated else "memory of its own"
        facts.append(("GPU", f"{device.name}, {_version(device.capability)}, {memory}"))
    facts.append(("CUDA in use", status.problem or "yes, where JAX runs on a GPU"))
    if status.remedy is not None:
        facts.append(("", status.remedy))
    return facts + [("warning", warning) for warning in status.warnings]


def _version(version: tuple[int, int] | None) -> str:
    return "unknown" if version is None else ".".join(map(str, version))


Row = tuple[str, ...]


def tune(*, redo: bool = False) -> int:
    """Prints the profiles of this machine's devices; returns 0.

    Args:
        redo: Whether to measure even if stored profiles exist.
    """
    for backend in ("cpu", "cuda"):
        try:
            device = jax.local_devices(backend=backend)[0]
        except RuntimeError:
            continue
        print(_describe(tune_device(device, redo=redo)))
    return 0


def _describe(tuning: Tuning) -> str:
    facts = ", ".join(f"{k} {v}" for k, v in tuning.device.items() if v)
    header: Row = ("reduction", "rows", "elements", *STRATEGIES, "auto")
    rows: list[Row] = [header]
    for (reduction, num_rows, row_elements), seconds in tuning.profile.times.items():
        times = [
            f"{seconds[name] * 1e6:.1f} us" if name in seconds else ""
            for name in STRATEGIES
        ]
        shape = (str(num_rows), str(row_elements))
        rows.append((reduction, *shape, *times, fastest(seconds)))
    source = "measured now" if tuning.measured else "measured before"
    table = align(rows, right=range(1, 6))
    return f"{facts}\n{source}, kept in {tuning.path}\n\n{table}\n"


def main() -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m dafjax", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser(
        "doctor", help="print versions, devices, the library found, and what it uses"
    )
    of_tune = commands.add_parser(
        "tune",
        help="print how long reductions take here, and which strategies they use",
    )
    of_tune.add_argument(
        "--redo", action="store_true", help="measure anew what was measured before"
    )
    options = parser.parse_args()
    return doctor() if options.command == "doctor" else tune(redo=options.redo)


if __name__ == "__main__":
    sys.exit(main())
