"""Finds, checks and registers the compiled library of custom calls, once."""

import dataclasses
import functools
import importlib
import importlib.util
import pathlib
import re
from types import ModuleType

import jax


_MODULE = "dafjax._native._cpu"
# The remedy for a library that does not fit jaxlib.
REBUILD = (
    "Rebuild it against the installed jaxlib with "
    "`pip install --no-build-isolation --force-reinstall --no-deps dafjax` "
    "(in a source tree: `pip install --no-build-isolation -e .`)."
)


class LibraryError(ImportError):
    """The compiled library is missing, does not load or does not fit jaxlib."""


@dataclasses.dataclass(frozen=True)
class LibraryStatus:
    """The state of the compiled library; `python -m dafjax doctor` prints it.

    Attributes:
        path: The library file, or None if it is missing.
        built_ffi_api: (major, minor) FFI version that the library was built against.
        jaxlib_ffi_api: (major, minor) FFI version of the installed jaxlib.
        instruction_sets: Instruction sets that this processor can run, best first.
        instruction_set: The instruction set that the custom calls use.
        error: Why the library cannot be used, or None if it can.
    """

    path: str | None = None
    built_ffi_api: tuple[int, int] | None = None
    jaxlib_ffi_api: tuple[int, int] | None = None
    instruction_sets: tuple[str, ...] = ()
    instruction_set: str | None = None
    error: str | None = None


@functools.cache
def register() -> None:
    """Registers the custom calls with XLA's CPU client, once per process.

    Handlers built against newer FFI headers than jaxlib's would stop the CPU backend,
    so it raises `LibraryError` before.
    """
    library = load()
    check_api_version(_built_api(library), jaxlib_ffi_api())
    for name, handler in library.handlers().items():
        jax.ffi.register_ffi_target(name, handler, platform="cpu")


def load() -> ModuleType:
    """Imports the extension module; raises `LibraryError` if it cannot."""
    if importlib.util.find_spec(_MODULE) is None:
        raise LibraryError(
            f"The compiled library `{_MODULE}` is missing, but dafjax needs it to run "
            f"on a CPU. {REBUILD}"
        )
    try:
        return importlib.import_module(_MODULE)
    except ImportError as error:
        raise LibraryError(
            f"The compiled library `{_MODULE}` does not load: {error}. {REBUILD}"
        ) from error


def check_api_version(
    built: tuple[int, int], runtime: tuple[int, int], name: str = _MODULE
) -> None:
    """Raises LibraryError if handlers built for `built` cannot run in `runtime`."""
    if built > runtime:
        raise LibraryError(
            f"The compiled library `{name}` was built against XLA's FFI API "
            f"{dotted(built)}, but the installed jaxlib has {dotted(runtime)} and "
            f"runs handlers of its own version and older. {REBUILD}"
        )


def jaxlib_ffi_api() -> tuple[int, int]:
    """Reads the (major, minor) FFI API version of the installed jaxlib's headers."""
    header = pathlib.Path(jax.ffi.include_dir()) / "xla" / "ffi" / "api" / "c_api.h"
    try:
        text = header.read_text(encoding="utf-8")
    except OSError as error:
        raise LibraryError(
            f"The header `{header}` of jaxlib cannot be read: {error}. "
            "Reinstall jaxlib."
        ) from error
    found = dict(re.findall(r"#define XLA_FFI_API_(MAJOR|MINOR)\s+(\d+)", text))
    if found.keys() != {"MAJOR", "MINOR"}:
        raise LibraryError(
            f"The header `{header}` does not state XLA's FFI API version. Reinstall "
            "jaxlib."
        )
    return int(found["MAJOR"]), int(found["MINOR"])


def library_status() -> LibraryStatus:
    """Describes the compiled library. Never raises and registers nothing."""
    status = LibraryStatus()
    # Each step adds its findings, so an error keeps the earlier findings.
    try:
        spec = importlib.util.find_spec(_MODULE)
        status = dataclasses.replace(status, path=spec.origin if spec else None)
        status = dataclasses.replace(status, jaxlib_ffi_api=jaxlib_ffi_api())
        library = load()
        status = dataclasses.replace(
            status,
            built_ffi_api=_built_api(library),
            instruction_sets=tuple(library.instruction_sets()),
            instruction_set=library.instruction_set(),
        )
        check_api_version(_built_api(library), jaxlib_ffi_api())
    except Exception as error:  # A report must survive whatever is wrong.
        return dataclasses.replace(status, error=f"{type(error).__name__}: {error}")
    return status


def _built_api(library: ModuleType) -> tuple[int, int]:
    major, minor = library.ffi_api_version()
    return int(major), int(minor)


def dotted(version: tuple[int, int]) -> str:
    """Writes a version as text."""
    return f"{version[0]}.{version[1]}"
