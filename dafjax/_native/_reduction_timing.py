"""Measures how long reductions take on a device, for each strategy."""

import concurrent.futures
import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from dafjax._native import _cuda_library, _library
from dafjax._native._reduction_shapes import STRATEGIES, scratch_words
from dafjax._typing import Device


# In the order of `Reduction` in xla_ffi/format/reduction.h.
REDUCTIONS = ("minmax", "sum_of_squares")


@dataclasses.dataclass(frozen=True)
class ReductionCase:
    """A reduction of float32 `[num_rows, row_elements]` to be timed.

    Attributes:
        reduction: One of `REDUCTIONS`.
        strategy: One of `STRATEGIES`.
        num_rows: Rows.
        row_elements: Elements of a row.
        num_launches: Number of launches that are timed together. The reported time is
            the time of one.
    """

    reduction: str
    strategy: str
    num_rows: int
    row_elements: int
    num_launches: int


def time_reductions(
    device: Device, cases: Sequence[ReductionCase], num_rounds: int
) -> np.ndarray:
    """Times reductions on a device. Each round runs all cases in turn.

    It waits for the device. It may be called while another program is traced or
    lowered.

    Returns:
        Seconds of one launch, float32 `[num_rounds, len(cases)]`.
    """
    # Another thread does not inherit this thread's contexts: meshes, transfer guards.
    with concurrent.futures.ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(_time, device, tuple(cases), num_rounds).result()


def _time(
    device: Device, cases: Sequence[ReductionCase], num_rounds: int
) -> np.ndarray:
    if device.platform == "cpu":
        _library.register()
    else:
        _cuda_library.register()
    num_values = max(case.num_rows * case.row_elements for case in cases)
    num_words = max(case.num_rows * scratch_words(case.row_elements) for case in cases)
    num_rows = max(case.num_rows for case in cases)
    call = jax.ffi.ffi_call(
        "dafjax_time_reductions",
        (
            jax.ShapeDtypeStruct((num_rounds, len(cases)), jnp.float32),
            jax.ShapeDtypeStruct((num_words,), jnp.uint32),
            jax.ShapeDtypeStruct((num_rows,), jnp.float32),
            jax.ShapeDtypeStruct((num_rows,), jnp.float32),
        ),
    )
    timed = np.array([_numbers(case) for case in cases], np.int64).reshape(-1)
    # Any normal values will do: neither zero nor subnormal.
    x = jax.device_put(np.linspace(1, 2, num_values, dtype=np.float32), device)
    return np.asarray(jax.jit(lambda x: call(x, timed=timed)[0])(x))


def _numbers(case: ReductionCase) -> tuple[int, int, int, int, int]:
    return (
        REDUCTIONS.index(case.reduction),
        STRATEGIES.index(case.strategy),
        case.num_rows,
        case.row_elements,
        case.num_launches,
    )
