"""The public names, and the examples in their docstrings."""

import doctest
import importlib
import pkgutil
import subprocess
import sys

import pytest

import dafjax
from tests.helpers import run_python


def public_names(module):
    return {name for name in vars(module) if not name.startswith("_")}


def test_the_top_level_has_these_names():
    modules = {"allocation", "codecs", "config", "policies", "reductions", "stores"}
    modules |= {"report"}
    functions = {"remat_compress", "saved_residuals", "print_saved_residuals"}
    functions |= {"estimate", "fit_batch", "custom_calls"}
    functions |= {"cuda_status", "accumulate", "assess", "explain", "jit"}
    results = {
        "ArrayNoise",
        "Assessment",
        "AverageBits",
        "BatchNoise",
        "Bits",
        "Budget",
        "CudaStatus",
        "NoiseCeiling",
        "NoisyResidual",
        "Plan",
        "Setting",
        "Estimate",
        "StepMemory",
        "FittedBatch",
        "Jit",
        "JitReport",
        "TriedProgram",
    }
    # These are there where a test has imported them: they need Flax.
    names = public_names(dafjax) - {"linen", "nnx"}
    assert names == modules | functions | results


MODULES = [
    info.name
    for info in pkgutil.walk_packages(dafjax.__path__, "dafjax.")
    if not info.name.endswith(("__main__", "._cpu", ".libdafjax_cuda"))
]


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings_run(name):
    module = importlib.import_module(name)
    assert module.__doc__
    assert doctest.testmod(module).failed == 0


def test_remat_compress_has_an_example_that_runs():
    assert doctest.testmod(dafjax._remat_compress).attempted > 0


def test_importing_dafjax_starts_no_backend_and_loads_no_library():
    program = (
        "import dafjax, sys; from jax._src import xla_bridge as b;"
        "assert not b._backends; assert 'dafjax._native._cpu' not in sys.modules"
    )
    run_python(program)


def test_the_doctor_tells_what_is_in_use():
    done = subprocess.run(
        [sys.executable, "-m", "dafjax", "doctor"],
        check=True,
        capture_output=True,
        text=True,
    )
    for part in ("jaxlib", "devices", "_cpu", "XLA FFI", "scalar", "threads"):
        assert part in done.stdout
    for part in ("CUDA library", "CUDA driver", "CUDA in use"):
        assert part in done.stdout
