"""Time spent packing and unpacking in one step: custom calls against plain jax.numpy.

Takes the residuals that dafjax packs in a ResNet-18 step, by their shapes, and packs
and unpacks all of them, with dafjax and with the codec one would write first.

Examples:
    python -m benchmarks.quantizer_cost
    python -m benchmarks.quantizer_cost --batch 8 --rounds 5
"""

import dataclasses
import functools
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import tyro

from benchmarks import naive_codec
from benchmarks.environment import RESULTS, describe_environment, write_result
from benchmarks.harness import Check, Contender, Spread, compare
from benchmarks.methods import make_method
from benchmarks.tables import make_console, make_table
from benchmarks.training import Workload
from dafjax.codecs import AbstractCodec, Affine, Bitmask


_BITS = 2
_NEEDED_SPEEDUP = 10.0

# Two bits are coarse: normal data come back with a noise of 0.78 of their norm.
_VALUES_TOLERANCE = 0.9

ArrayTree = Any


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of the command line."""

    batch: int = 64
    """Images in the step."""
    width: int = 64
    """Filters of the first stage."""
    rounds: int = 9
    """Interleaved rounds."""
    out: pathlib.Path = RESULTS / "quantizer_cost.json"
    """The file to write."""


@dataclasses.dataclass(frozen=True)
class Item:
    """One residual that is packed."""

    like: jax.ShapeDtypeStruct
    codec: AbstractCodec


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line."""
    options = tyro.cli(
        Options,
        args=arguments,
        description=__doc__,
        prog="python -m benchmarks.quantizer_cost",
    )
    console = make_console()
    environment = describe_environment()
    items = packed_residuals(options)
    nbytes = sum(item.like.size * item.like.dtype.itemsize for item in items)
    timings = compare(contenders(items), baseline="dafjax", rounds=options.rounds)
    speedup = timings["jax.numpy"].ratio
    gate = "PASS" if speedup.median >= _NEEDED_SPEEDUP else "FAIL"
    console.print(
        make_table(
            f"Packing and unpacking of one step, batch {options.batch}: {len(items)} "
            f"residuals, {nbytes / 1e6:.1f} MB",
            left=("Codec",),
            right=("Milliseconds", "GB/s", "Time / dafjax", f"{_NEEDED_SPEEDUP:.0f}x"),
            rows=[
                (
                    name,
                    str(Spread.of([1e3 * t for t in timing.samples])),
                    f"{nbytes / 1e9 / timing.seconds.median:.2f}",
                    str(timing.ratio),
                    gate if name == "jax.numpy" else "",
                )
                for name, timing in timings.items()
            ],
        )
    )
    write_result(
        options.out,
        environment,
        {
            "options": dataclasses.asdict(options),
            "num_residuals": len(items),
            "raw_nbytes": nbytes,
            "timings": {k: dataclasses.asdict(v) for k, v in timings.items()},
            "gate": gate,
        },
    )
    console.print(f"Written to {options.out}.", markup=False)


def packed_residuals(options: Options) -> list[Item]:
    """Lists what dafjax packs in a step."""
    method = make_method("compress", bits=_BITS)
    saved = Workload(method, options.batch, options.width).saved_residuals()
    return [
        Item(jax.ShapeDtypeStruct(kept.shape, kept.dtype), kept.codec)
        for kept, count in zip(saved.kept, saved.counts, strict=True)
        if kept.codec is not None
        for _ in range(count)
    ]


def contenders(items: Sequence[Item]) -> dict[str, Contender]:
    """Returns the two ways to pack and unpack random data of these shapes."""
    arrays = [_random(index, item) for index, item in enumerate(items)]
    values = [x for x in arrays if x.dtype != np.bool_]
    masks = [x for x in arrays if x.dtype == np.bool_]
    checks = {
        "values": Check(_VALUES_TOLERANCE, extract=_values, expected=values),
        "masks": Check(extract=_masks, expected=masks),
    }
    on_device = jax.device_put(arrays)
    ways = {"dafjax": _with_dafjax, "jax.numpy": _with_numpy}
    return {
        name: Contender(_round_trip(items, way, on_device), checks)
        for name, way in ways.items()
    }


def _round_trip(items: Sequence[Item], way: Any, arrays: Sequence[jax.Array]) -> Any:
    # Packing and unpacking are two programs, as the forward and the backward pass are
    # apart: in one, XLA would fuse them and skip the packed bytes.
    packers, unpackers = zip(
        *(way(i, item) for i, item in enumerate(items)), strict=True
    )
    pack = jax.jit(lambda xs: [f(x) for f, x in zip(packers, xs, strict=True)])
    unpack = jax.jit(lambda ps: [f(p) for f, p in zip(unpackers, ps, strict=True)])
    return lambda: unpack(pack(arrays))


def _with_dafjax(index: int, item: Item) -> tuple[Any, Any]:
    return (
        functools.partial(item.codec.encode, seed=index),
        functools.partial(item.codec.decode, like=item.like),
    )


def _with_numpy(index: int, item: Item) -> tuple[Any, Any]:
    if isinstance(item.codec, Bitmask):
        return (
            naive_codec.pack_mask,
            functools.partial(naive_codec.unpack_mask, like=item.like),
        )
    # What a user writes first has groups of consecutive elements, whatever ours has.
    if item.codec not in (Affine(bits=_BITS), Affine(bits=_BITS, blocks="columns")):
        raise ValueError(f"There is no plain version of {item.codec}.")
    return (
        functools.partial(naive_codec.pack, key=jax.random.key(index)),
        functools.partial(naive_codec.unpack, like=item.like),
    )


def _random(seed: int, item: Item) -> np.ndarray:
    values = np.random.default_rng(seed).standard_normal(item.like.shape, np.float32)
    return values > 0 if item.like.dtype == np.bool_ else values


def _values(arrays: Sequence[jax.Array]) -> list[jax.Array]:
    return [x for x in arrays if x.dtype != np.bool_]


def _masks(arrays: Sequence[jax.Array]) -> list[jax.Array]:
    return [x for x in arrays if x.dtype == np.bool_]


if __name__ == "__main__":
    main()
