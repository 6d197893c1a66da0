"""Compares custom calls on a GPU with those on the CPU, byte for byte.

It compares codes, decoded values and reductions; the decoder that XLA fuses into its
consumers; and the values that page pools return, whichever device packs them. It also
checks that notes of importances arrive. Several cases are compiled at a time.

Without a GPU, `jax.numpy` stands in for it, so that a difference still shows.

Examples:
    python -m benchmarks.on_gpu.same_bytes
    python -m benchmarks.on_gpu.same_bytes --every 8 --out same_bytes.json
"""

import dataclasses
import functools
import itertools
import os
import pathlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np
import tyro

from benchmarks.environment import RESULTS, describe_environment, write_result
from benchmarks.tables import make_console
from dafjax._native import (
    Format,
    _cuda,
    _reference as reference,
    ledger_note,
    make_ledger,
    minmax,
    pack_affine,
    pack_bitmask,
    pool_get,
    pool_hash,
    pool_put,
    unpack_affine,
    unpack_affine_fused,
    unpack_bitmask,
    unpack_bitmask_fused,
)
from dafjax._native._reduce import minmax_reference
from dafjax.stores import PagePool


ArrayTree = Any

_SIZES = (1584, 48 * 341, 48 * 1367)
_SEED = 7


@final
@dataclasses.dataclass(frozen=True)
class Case:
    """A computation on both devices.

    Attributes:
        name: Its name in the report.
        on_cpu: Computes the expected result on the CPU.
        on_gpu: Computes the result on the GPU.
        stand_in: `on_gpu` without custom calls, for machines without a GPU.
        operands: The arguments of all three.
    """

    name: str
    on_cpu: Callable[..., ArrayTree]
    on_gpu: Callable[..., ArrayTree]
    stand_in: Callable[..., ArrayTree]
    operands: tuple[jax.Array, ...]


class DifferentBytesError(Exception):
    """A custom call returns other bytes on the GPU than on the CPU."""


class NoCustomCallsError(Exception):
    """The machine has a GPU, but dafjax has no custom calls for it."""


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of the command line."""

    every: int = 1
    """Compares only every n-th case."""
    out: pathlib.Path = RESULTS / "gpu_same_bytes.json"
    """The file to write."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line."""
    options = tyro.cli(
        Options,
        args=arguments,
        description=__doc__,
        prog="python -m benchmarks.on_gpu.same_bytes",
    )
    environment = describe_environment()
    device = jax.devices()[0]
    if device.platform == "gpu" and not _cuda.register():
        raise NoCustomCallsError(
            "dafjax was built without CUDA, so this GPU runs `jax.numpy`: there is "
            "nothing to compare. `python -m dafjax doctor` tells how to build it."
        )
    compared = list(itertools.islice(cases(), 0, None, options.every))
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        same = list(threads.map(functools.partial(_is_same, device), compared))
    names = [case.name for case in compared]
    different = [name for name, is_same in zip(names, same, strict=True) if not is_same]
    names.append(_NOTES)
    if not notes_arrive(device):
        different.append(_NOTES)
    result = {
        "options": dataclasses.asdict(options),
        "device": device.device_kind,
        "against": "jax.numpy" if device.platform == "cpu" else "the CPU",
        "num_cases": len(names),
        "different": different,
    }
    write_result(options.out, environment, result)
    make_console().print(
        f"{len(names) - len(different)} of {len(names)} cases have the same bytes on "
        f"{device.device_kind} as {result['against']} makes.",
        markup=False,
    )
    if different:
        raise DifferentBytesError(
            f"{len(different)} of {len(names)} cases differ: "
            f"{', '.join(different[:9])}."
        )


def cases() -> Iterator[Case]:
    """Yields all cases, affine codes first."""
    grid = itertools.product(
        ("float32", "bfloat16", "float16"),
        (1, 2, 3, 4, 8),
        (64, 256, 1024),
        (0, 48),
        (False, True),
    )
    for number, (dtype, bits, block_size, columns, stochastic) in enumerate(grid):
        x = values(_SIZES[number % len(_SIZES)], dtype)
        format = Format(bits, block_size, columns, stochastic)
        round_trip = functools.partial(_round_trip, format=format)
        yield Case(
            f"affine {dtype} {bits} {block_size} {columns} {stochastic} {x.shape[-1]}",
            round_trip,
            round_trip,
            functools.partial(_plain_round_trip, format=format),
            (x, jnp.uint32(_SEED)),
        )
    for size in (0, 3, 515, 70_001):
        mask = values(size, "float32") > 0
        yield Case(
            f"bitmask {size}",
            _bitmask_round_trip,
            _bitmask_round_trip,
            _plain_bitmask,
            (mask,),
        )
    for dtype, size in itertools.product(
        ("float32", "bfloat16", "float16"), (0, 63, 9000, 600_001)
    ):
        for strategy in ("parallel", "atomic", "hybrid"):
            # Results are float32: XLA:GPU converts NaN to other bits than XLA:CPU.
            extremes = functools.partial(minmax, strategy=strategy)
            yield Case(
                f"minmax {dtype} {size} {strategy}",
                extremes,
                extremes,
                _plain_minmax,
                (values(size, dtype),),
            )
    yield from _cases_of_pools()


def _cases_of_pools() -> Iterator[Case]:
    grid = itertools.product(("gpu", "cpu"), (0, 48), (1, 2, 4, 8))
    for number, (packer, columns, bits) in enumerate(grid):
        dtype = ("float32", "bfloat16", "float16")[number % 3]
        x = values(_SIZES[number % len(_SIZES)], dtype)
        name = f"pool {packer} {dtype} {bits} {columns} {x.shape[-1]}"
        format = Format(bits, 256, columns)
        through_pool = functools.partial(
            _through_pool, pool=PagePool(packer=packer, name=name), format=format
        )
        yield Case(
            name,
            functools.partial(_decoded, format=format),
            through_pool,
            through_pool,
            (x, jnp.uint32(_SEED)),
        )


def values(size: int, dtype: str) -> jax.Array:
    """Returns rows `[7, size]`; kernels treat each row differently."""
    rng = np.random.default_rng(size)
    rows = rng.standard_normal((7, size)).astype(np.float32)
    rows[1] *= 1e-30
    rows[2] = 3.5
    rows[3] = np.where(rng.random(size) < 0.01, np.nan, rows[3])
    rows[4] = np.where(rng.random(size) < 0.01, np.inf, np.maximum(rows[4], 0))
    rows[5] = np.where(rng.random(size) < 0.5, -0.0, 1e-40)
    # Half of this number is subnormal.
    rows[6] = 1.3e-38
    return jnp.asarray(rows).astype(dtype)


def _round_trip(x: jax.Array, seed: jax.Array, *, format: Format) -> ArrayTree:
    packed = pack_affine(x, seed, format=format)
    code: Any = {"size": x.shape[-1], "dtype": x.dtype, "format": format}
    fused = unpack_affine_fused(*packed, shape=x.shape, **code)
    return packed, unpack_affine(*packed, **code), fused


def _plain_round_trip(x: jax.Array, seed: jax.Array, *, format: Format) -> ArrayTree:
    packed = reference.pack_affine(x, seed, format=format)
    size, dtype = x.shape[-1], x.dtype
    unpacked = reference.unpack_affine(*packed, size=size, dtype=dtype, format=format)
    # The fused decoder would differ: XLA:CPU flushes its subnormal values.
    return packed, unpacked, unpacked


def _decoded(x: jax.Array, seed: jax.Array, *, format: Format) -> jax.Array:
    packed = pack_affine(x, seed, format=format)
    return unpack_affine(*packed, size=x.shape[-1], dtype=x.dtype, format=format)


def _through_pool(
    x: jax.Array, seed: jax.Array, *, pool: PagePool, format: Format
) -> jax.Array:
    code: Any = {"pool": pool_hash(pool.name), "format": format}
    handle = pool_put(x, seed, site=0, max_bits=8, **code)
    return pool_get(handle, rows=x.shape, dtype=x.dtype, **code)


def _bitmask_round_trip(mask: jax.Array) -> ArrayTree:
    words = pack_bitmask(mask)
    size, shape = mask.shape[-1], mask.shape
    fused = unpack_bitmask_fused(words, shape=shape, size=size)
    return words, unpack_bitmask(words, size=size), fused


def _plain_bitmask(mask: jax.Array) -> ArrayTree:
    words = reference.pack_bitmask(mask)
    size, shape = mask.shape[-1], mask.shape
    fused = reference.unpack_bitmask(words, shape=shape, size=size)
    return words, reference.unpack_bitmask(words, size=size), fused


def _plain_minmax(x: jax.Array) -> ArrayTree:
    minimum, maximum, _ = minmax_reference(x, strategy="parallel")
    return minimum, maximum


def notes_arrive(device: jax.Device) -> bool:
    """Returns whether a ledger receives all notes of a device."""
    ledger = make_ledger(_NOTES, (1, 2))
    note = jax.jit(
        functools.partial(
            ledger_note, ledger=pool_hash(_NOTES), sites=(1, 2), facts=(1, 2)
        )
    )
    rows = [
        jax.device_put(jnp.full((count, 3), number, jnp.float32), device)
        for number, count in ((1, 1), (2, 900), (1, 30))
    ]
    # All notes are in flight at once.
    jax.block_until_ready([note(some) for _ in range(9) for some in rows])
    taken = ledger.take()
    sums = (*taken["importances"].values(), taken["gradient_energy"])
    return sums == 3 * (9 * (1 + 2 * 900 + 30),)


# Also the name of the ledger.
_NOTES = "notes of importances"


def _is_same(device: jax.Device, case: Case) -> bool:
    cpu = jax.devices("cpu")[0]
    expected = jax.jit(case.on_cpu)(*jax.device_put(case.operands, cpu))
    chosen = case.stand_in if device.platform == "cpu" else case.on_gpu
    actual = jax.jit(chosen)(*jax.device_put(case.operands, device))
    return all(
        np.asarray(a).tobytes() == np.asarray(b).tobytes()
        for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True)
    )


if __name__ == "__main__":
    main()
