"""The handlers of CUDA with simulated kernels, for XLA on the CPU.

As a plugin of pytest (`-p tests.simulated_gpu`) it has page pools and ledgers served by
them, from the library that the environment variable DAFJAX_SIMULATED_GPU names: tests
of these then run as on a GPU that does at once what it is told.
"""

import ctypes
import fcntl
import os
import pathlib
import subprocess
import sys

import jax
import pytest

from dafjax._native import _cpu, _cuda


LIBRARY = "DAFJAX_SIMULATED_GPU"
SOURCES = pathlib.Path(__file__).resolve().parents[1] / "xla_ffi"
_FFI = (
    "affine_checks", "bitmask_checks", "checks", "cuda_affine", "cuda_bitmask",
    "cuda_ledger", "cuda_pool", "cuda_reduce", "cuda_tie", "pool_checks",
    "reduction_checks", "reduction_timing", "tied_buffers",
)  # fmt: skip


def built(factory: pytest.TempPathFactory) -> pathlib.Path:
    """Builds the handlers as a library, once for all processes of a session."""
    folder = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    target = folder / "libsimulated.so"
    with open(folder / "libsimulated.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            _build(target)
    return target


def _build(target: pathlib.Path) -> None:
    sources = [SOURCES / "ffi" / f"{name}.cc" for name in _FFI]
    for pattern in ("simulator/*.cc", "*/*.cu"):
        sources += SOURCES.glob(pattern)
    compiler = (
        os.environ.get("CXX", "c++"), "-std=c++17", "-O0", "-Wall", "-Wextra",
        "-Werror", "-fPIC", "-fvisibility=hidden", "-pthread", "-ffp-contract=off",
        "-fno-strict-aliasing", "-DDAFJAX_SIMULATED", f"-I{SOURCES}",
        "-isystem", jax.ffi.include_dir(),
    )  # fmt: skip
    # XLA's header is read once: it takes longer than most sources.
    header = target.with_name("xla_ffi.h")
    header.write_text('#include "xla/ffi/api/ffi.h"\n')
    run_compiler(*compiler, "-x", "c++-header", header, "-o", f"{header}.gch")
    run_compiler(
        *compiler, "-shared", "-include", header, "-x", "c++", *sources, "-o", target
    )


def run_compiler(*command: str | os.PathLike[str]) -> None:
    """Runs a command; what it says is the error if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def load(path: os.PathLike[str]) -> ctypes.CDLL:
    """Loads what was built."""
    library = ctypes.CDLL(os.fspath(path))
    _cuda.connect(library)
    return library


def run_tests(library: pathlib.Path, *arguments: str) -> None:
    """Runs pytest in another process, where this is a plugin and the library serves."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider",
         "-p", "tests.simulated_gpu", *arguments],
        capture_output=True, text=True, check=False, cwd=SOURCES.parent,
        env={**os.environ, LIBRARY: str(library)},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-5000:]


def serve(library: ctypes.CDLL) -> None:
    """Has the custom calls of page pools and ledgers on the CPU served by the library.

    Before any program is compiled, for the rest of the process.
    """
    of_cpu = _cpu.handlers()
    served = [n for n in _cuda.HANDLERS if "pool" in n or "ledger" in n]
    for name in served:
        function = _cuda.HANDLERS[name]
        handler = jax.ffi.pycapsule(getattr(library, function))
        jax.ffi.register_ffi_target(name, handler, platform="cpu")
    _cpu.handlers = lambda: {k: v for k, v in of_cpu.items() if k not in served}


if LIBRARY in os.environ:
    serve(load(os.environ[LIBRARY]))
