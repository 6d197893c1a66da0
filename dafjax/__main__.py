"""`python -m dafjax doctor`: what is installed, what is found, what is in use."""

import argparse
import os
import platform
import sys

import jax
import jaxlib.version

from dafjax._native import LibraryStatus, library_status


def main() -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m dafjax", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser(
        "doctor", help="print versions, devices, the library found, and what it uses"
    )
    parser.parse_args()
    return doctor()


def doctor() -> int:
    """Prints the state of the installation; returns 0 if it can be used."""
    status = library_status()
    facts = [
        ("python", f"{platform.python_version()} on {platform.machine()}"),
        ("jax", f"{jax.__version__}, jaxlib {jaxlib.version.__version__}"),
        ("devices", ", ".join(map(str, jax.devices()))),
        *_library_facts(status),
        ("threads", f"{len(os.sched_getaffinity(0))} (XLA's own pool)"),
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


def _version(version: tuple[int, int] | None) -> str:
    return "unknown" if version is None else ".".join(map(str, version))


if __name__ == "__main__":
    sys.exit(main())
