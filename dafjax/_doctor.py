"""Prints the state of the installation: `python -m dafjax doctor`."""

import os
import platform
import sys

import jax
import jaxlib.version

from dafjax._native import CudaStatus, LibraryStatus, cuda_status, library_status


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
