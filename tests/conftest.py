"""Two CPU devices, strict dtype promotion, and a key for every test.

What a process compiles twice it loads the second time: the tests' time is mostly XLA's.
"""

import atexit
import gc
import importlib.metadata
import os
import shutil
import tempfile
import zlib
from collections.abc import Iterator

from packaging.version import Version


# Before JAX is imported: the number of devices is fixed when its backend starts.
os.environ.setdefault("XLA_FLAGS", "")
if "xla_backend_optimization_level" not in os.environ["XLA_FLAGS"]:
    # XLA orders, fuses and places as ever. That LLVM optimizes nothing saves a quarter
    # of the time, and that MLIR writes no fusions, as it always does since jaxlib 0.11,
    # a third of the rest; `make test-optimized` has both. Nor does it pay to cut small
    # programs into modules for LLVM to compile at once: that takes a fifth.
    os.environ["XLA_FLAGS"] += " --xla_backend_optimization_level=0"
    os.environ["XLA_FLAGS"] += " --xla_cpu_parallel_codegen_split_count=1"
    if Version(importlib.metadata.version("jaxlib")) < Version("0.11"):
        os.environ["XLA_FLAGS"] += " --xla_cpu_use_fusion_emitters=false"
os.environ["XLA_FLAGS"] += " --xla_force_host_platform_device_count=2"
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# NumPy's threads wait in a loop for work that is too little for them.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# Each process has a folder of its own, below that of the session: so none meets what
# another is writing, nor what was compiled by other code.
if "PYTEST_XDIST_WORKER" not in os.environ:
    session = tempfile.mkdtemp(prefix="dafjax-compiled-")
    atexit.register(shutil.rmtree, session, ignore_errors=True)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = session
    # Profiles of devices, too, are of this session alone.
    os.environ["XDG_CACHE_HOME"] = session
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
else:
    os.environ["JAX_COMPILATION_CACHE_DIR"] += "/" + os.environ["PYTEST_XDIST_WORKER"]

import jax
import numpy as np
import pytest

from dafjax._plan import planner


jax.config.update("jax_numpy_dtype_promotion", "strict")
# Of the million objects of a process most stay: to look for garbage among them as often
# as Python does takes half a minute.
gc.set_threshold(20_000, 10, 10)


def pytest_collection_finish() -> None:
    """Hides all imported modules from the garbage collector."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def stochastic(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets all stores round stochastically, as page pools do."""
    monkeypatch.setattr(
        planner, "find_one_sided", lambda program: frozenset(range(len(program.avals)))
    )


@pytest.fixture
def key(request: pytest.FixtureRequest) -> jax.Array:
    """A PRNG key that depends on the test's name alone."""
    return jax.random.key(_number(request))


@pytest.fixture
def standard_promotion() -> Iterator[None]:
    """For modules that run Optax, which mixes dtypes on purpose."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """A NumPy generator that depends on the test's name alone."""
    return np.random.default_rng(_number(request))


def _number(request: pytest.FixtureRequest) -> int:
    return zlib.crc32(request.node.name.encode())
