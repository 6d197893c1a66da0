"""What several test files share: codecs, descriptions, data, bits, processes."""

import os
import pathlib
import subprocess
import sys
import textwrap
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from dafjax._passes.pipeline import Context, run_passes
from dafjax._plan.plan import ProgramPlan
from dafjax._schedule.schedule import schedule_backward
from dafjax._schedule.steps import Step
from dafjax._schedule.values import parts_in
from dafjax._trace.residuals import Program, differentiate
from dafjax._trace.tracing import ClosedJaxpr
from dafjax.codecs import AbstractCodec, Affine, Bitmask
from dafjax.policies import AbstractPolicy, CompressExpensive
from dafjax.stores import Arrays


# Major and minor version.
JAX_VERSION = tuple(int(part) for part in jax.__version__.split(".")[:2])


def prepared(
    closed: ClosedJaxpr,
    perturbed: Sequence[bool],
    *,
    policy: AbstractPolicy | None = None,
    activations: Collection[int] = (),
) -> Program:
    """Returns a function and its transpose after all passes."""
    context = Context(policy or CompressExpensive(), activations)
    return run_passes(differentiate(closed, perturbed), context)


AFFINE_CODECS: tuple[Affine, ...] = (
    Affine(bits=1, block_size=64),
    Affine(bits=2),
    Affine(bits=3, block_size=512, rounding="nearest"),
    Affine(bits=4, block_size=128, rounding="nearest"),
    Affine(bits=8, block_size=1024),
    Affine(bits=4, block_size=64, blocks="columns"),
)
ALL_CODECS: tuple[AbstractCodec, ...] = (*AFFINE_CODECS, Bitmask())
FLOAT_DTYPES = ("float32", "bfloat16", "float16")

# What values of a row look like.
DATA_KINDS = (
    "normal",
    "relu",
    "offset",
    "not finite",
    "any bits",
    "subnormal",
    "huge",
    "constant",
)


# How XLA:CPU orders a program.
DEFAULT = "CPU_SCHEDULER_TYPE_DEFAULT"
MEMORY_OPTIMIZED = "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"


def slow(*values: Any, **options: Any) -> Any:
    """Returns parameters of a test that is slow with them."""
    return pytest.param(*values, marks=pytest.mark.slow, **options)


ROOT = pathlib.Path(__file__).resolve().parents[1]


def like(x: jax.Array) -> jax.ShapeDtypeStruct:
    """Returns the description of an array."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def example(codec: AbstractCodec, shape: tuple[int, ...], key: jax.Array) -> jax.Array:
    """Returns an array that the codec packs."""
    x = jax.random.normal(key, shape)
    return x > 0.5 if isinstance(codec, Bitmask) else x


def scheduled(plan: ProgramPlan, most: int = 8) -> tuple[Step, ...]:
    """Returns the steps of a backward pass, in so many parts at most."""
    return schedule_backward(plan, parts_in(Arrays(), plan, most))


def temp_nbytes(lowered: jax.stages.Lowered, scheduler: str = DEFAULT) -> int:
    """Returns the temporary bytes of a compiled program."""
    options = {"xla_cpu_scheduler_type": scheduler}
    compiled = lowered.compile(compiler_options=options)
    return compiled.memory_analysis().temp_size_in_bytes


def gradient_nbytes(
    loss: Callable[..., jax.Array], *arguments: Any, scheduler: str = DEFAULT
) -> int:
    """Returns the temporary bytes of a gradient for the first argument."""
    return temp_nbytes(jax.jit(jax.grad(loss)).lower(*arguments), scheduler)


def relative_error(x: jax.Array, exact: jax.Array) -> float:
    """Returns the norm of the difference over the norm of `exact`."""
    dtype = np.complex128 if jnp.iscomplexobj(exact) else np.float64
    x, exact = np.asarray(x, dtype), np.asarray(exact, dtype)
    return float(np.linalg.norm(x - exact) / np.linalg.norm(exact))


def bits_of(x: jax.Array | np.ndarray) -> np.ndarray:
    """Returns the bit patterns of an array, in which NaN equals itself."""
    x = np.asarray(x)
    return x.view({1: np.uint8, 2: np.uint16, 4: np.uint32}[x.dtype.itemsize])


def assert_same_bits(x: jax.Array | np.ndarray, y: jax.Array | np.ndarray) -> None:
    """Fails unless two arrays agree in dtype, shape and every bit."""
    assert np.asarray(x).dtype == np.asarray(y).dtype
    np.testing.assert_array_equal(bits_of(x), bits_of(y))


def hostile_rows(
    rng: np.random.Generator, kind: str, rows: int, size: int, dtype: str
) -> np.ndarray:
    """Returns `[rows, size]` values of one of DATA_KINDS."""
    shape = (rows, size)
    x = rng.standard_normal(shape).astype(np.float32)
    match kind:
        case "normal":
            pass
        case "relu":
            x = np.maximum(x, 0)
        case "offset":
            x = x * np.float32(0.01) + np.float32(1000)
        case "not finite":
            place = rng.random(shape)
            x[place < 0.003] = np.nan
            x[place > 0.997] = np.inf
            x[(place > 0.5) & (place < 0.503)] = -np.inf
        case "any bits":
            x = rng.integers(0, 2**32, shape, dtype=np.uint32).view(np.float32)
        case "subnormal":
            exponent = rng.integers(-149, -90, shape).astype(np.float32)
            x = np.sign(x) * np.exp2(exponent)
        case "huge":
            # Half the range of float32: no difference of two values overflows.
            x = rng.uniform(-1.7e38, 1.7e38, shape)
        case "constant":
            choices = [0.0, -0.0, 1e-40, 3.0, 0.1, -65504.0, 65504.0, 3.4e38, np.nan]
            x = np.repeat(rng.choice(choices, (rows, 1)), size, axis=1)
        case _:
            raise ValueError(f"`kind` must be one of {DATA_KINDS}, not {kind!r}.")
    with np.errstate(over="ignore", invalid="ignore"):
        return x.astype(np.float32).astype(_as_numpy(dtype))


def mixed_rows(rows: int, size: int, dtype: str, seed: int) -> np.ndarray:
    """Returns rows of every kind of data, one kind after another."""
    rng = np.random.default_rng(seed)
    parts = [hostile_rows(rng, kind, rows, size, dtype) for kind in DATA_KINDS]
    return np.stack([parts[i % len(parts)][i] for i in range(rows)])


def storage(x: np.ndarray) -> np.ndarray:
    """Returns what the kernels take: bfloat16 as uint16."""
    return x.view(np.uint16) if x.dtype == ml_dtypes.bfloat16 else x


def _as_numpy(dtype: str) -> np.dtype:
    return np.dtype(ml_dtypes.bfloat16) if dtype == "bfloat16" else np.dtype(dtype)


def run_python(
    program: str, *arguments: str | os.PathLike[str], **environment: str
) -> str:
    """Runs a program in a fresh process; returns what it prints."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
        cwd=ROOT,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def persistent_cache(folder: os.PathLike[str]) -> dict[str, str]:
    """Returns variables by which JAX keeps all that it compiles in a folder."""
    return {
        "JAX_COMPILATION_CACHE_DIR": str(folder),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
