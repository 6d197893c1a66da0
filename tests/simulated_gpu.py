"""The handlers of CUDA with simulated kernels, for XLA on the CPU.

As a plugin of pytest (`-p tests.simulated_gpu`) it replaces the custom calls of page
pools and ledgers by these handlers; the environment variable DAFJAX_SIMULATED_GPU names
their library. Tests then run as on a GPU without asynchronous execution.
"""

import ctypes
import os
import pathlib
import subprocess
import sys

import jax
import pytest

from dafjax._native import _cpu, _cuda
from tests.native_build import (
    COMPILER,
    FLAGS,
    SOURCES,
    Build,
    locked,
    run_compiler,
    shared_folder,
)


LIBRARY = "DAFJAX_SIMULATED_GPU"
_FFI = (
    "affine_checks", "bitmask_checks", "checks", "cuda_affine", "cuda_bitmask",
    "cuda_ledger", "cuda_pool", "cuda_reduce", "cuda_tie", "pool_checks",
    "reduction_checks", "reduction_timing", "tied_buffers",
)  # fmt: skip


def built(factory: pytest.TempPathFactory) -> pathlib.Path:
    """Builds the handlers as a library, once for all processes of a session."""
    folder = shared_folder(factory, "native-none")
    target = folder / "libsimulated.so"
    build = Build(folder)
    objects = build.simulator()
    objects += [build.compile(path) for path in sorted(SOURCES.glob("*/*.cu"))]
    with locked(target) as is_missing:
        if is_missing:
            flags = ("-O0", "-DDAFJAX_SIMULATED", "-isystem", jax.ffi.include_dir())
            # XLA's header is compiled once: it takes longer than most sources.
            header = folder / "xla_ffi.h"
            header.write_text('#include "xla/ffi/api/ffi.h"\n')
            run_compiler(
                COMPILER, *FLAGS, *flags, "-x", "c++-header", header,
                "-o", f"{header}.gch",
            )  # fmt: skip
            for name in _FFI:
                source = SOURCES / "ffi" / f"{name}.cc"
                objects.append(build.compile(source, *flags, "-include", header))
            run_compiler(COMPILER, *FLAGS, "-shared", *objects, "-o", target)
    return target


def load(path: os.PathLike[str]) -> ctypes.CDLL:
    """Loads the library."""
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
