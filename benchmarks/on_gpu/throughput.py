"""How fast a device packs and unpacks, against how fast it copies.

Operations of one program, several at a time, so that starting it counts for little.
What custom calls unpack is written; what XLA unpacks in a kernel of its own is changed
there, and then written: as many bytes. Fractions are of bytes read and written in a
second, against a program that copies. The result is written after each codec.

Examples:
    python -m benchmarks.on_gpu.throughput
    python -m benchmarks.on_gpu.throughput --megabytes 1 --rounds 3
"""

import dataclasses
import functools
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro

from benchmarks.environment import RESULTS, describe_environment, write_result
from benchmarks.harness import Check, Contender, Spread, Timing, compare
from benchmarks.tables import make_console, make_table
from dafjax.codecs import AbstractCodec, Affine, Bitmask


Record = dict[str, Any]

_COPY = "copy"
_FUSED = "unpack in XLA's kernel"
_CHANNELS = 512  # of the matrices for column blocks
_NUM_CHECKED = 1 << 20  # elements, which the host looks at
# What pack and unpack take at the least, of what a copy moves.
_GATE = 0.75

CODECS: Mapping[str, AbstractCodec] = {
    **{f"affine{bits}": Affine(bits, 256, "stochastic") for bits in (1, 2, 4, 8)},
    "affine2 nearest": Affine(2, 256, "nearest"),
    "affine2 columns": Affine(2, 256, blocks="columns"),
    "bitmask": Bitmask(),
}


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of the command line."""

    megabytes: int = 256
    """Of the unpacked array, in MiB."""
    at_once: int = 8
    """Operations of a program."""
    rounds: int = 15
    """How often each is timed."""
    out: pathlib.Path = RESULTS / "gpu_throughput.json"
    """The file to write."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line."""
    options = tyro.cli(
        Options,
        args=arguments,
        description=__doc__,
        prog="python -m benchmarks.on_gpu.throughput",
    )
    console = make_console()
    environment = describe_environment()
    records: list[Record] = []
    result = {
        "options": dataclasses.asdict(options),
        "device": jax.devices()[0].device_kind,
        "throughput": records,
    }
    for name, codec in CODECS.items():
        records += _measure(name, codec, options)
        write_result(options.out, environment, result)
    console.print(_table(records))
    console.print(verdict(records))
    console.print(f"Written to {options.out}.", markup=False)


def _measure(name: str, codec: AbstractCodec, options: Options) -> list[Record]:
    nbytes = options.megabytes * 2**20
    floats = jax.random.normal(jax.random.key(0), (nbytes // 4 // _CHANNELS, _CHANNELS))
    x = floats > 0 if isinstance(codec, Bitmask) else floats
    if not (isinstance(codec, Affine) and codec.blocks == "columns"):
        x = x.reshape(1, -1)
    like = jax.ShapeDtypeStruct(x.shape, x.dtype)
    # Each has other values, so that XLA does not compute one for all.
    many = [jnp.roll(x, shift) for shift in range(options.at_once)]
    pack = jax.jit(lambda *many: [codec.encode(x) for x in many])
    unpack = jax.jit(lambda *packed: [codec.decode(p, like) for p in packed])
    # Read by something, so that XLA decodes in the kernel of that.
    read = jax.jit(
        lambda *packed: [_change(codec.decode_fused(p, like)) for p in packed]
    )
    packed = jax.block_until_ready(pack(*many))
    moved = options.at_once * (x.nbytes + codec.packed_nbytes(x))
    # As many bytes are read and written as there are in all arrays.
    copied = 2 * options.at_once * nbytes
    copies = [jnp.roll(floats, shift) for shift in range(options.at_once)]
    copy = jax.jit(lambda *arrays: [a + 1.0 for a in arrays])
    contenders = {
        _COPY: _contender(functools.partial(copy, *copies)),
        f"pack {name}": _contender(functools.partial(pack, *many)),
        f"unpack {name}": _contender(functools.partial(unpack, *packed)),
        f"{_FUSED} {name}": _contender(functools.partial(read, *packed)),
    }
    timings = compare(contenders, baseline=_COPY, rounds=options.rounds)
    return [
        _record(operation, timing, timings[_COPY], moved, copied)
        for operation, timing in timings.items()
        if operation != _COPY
    ]


def _change(x: jax.Array) -> jax.Array:
    return ~x if x.dtype == jnp.bool_ else -x


def _contender(run: Callable[[], Any]) -> Contender:
    expected = np.asarray(_some_of(run()))
    return Contender(run, {"some": Check(extract=_some_of, expected=expected)})


def _some_of(out: Any) -> jax.Array:
    return jax.tree.leaves(out)[0].ravel()[:_NUM_CHECKED]


def _record(
    operation: str, timing: Timing, copy: Timing, moved: int, copied: int
) -> Record:
    fractions = [
        (moved / t) / (copied / c)
        for t, c in zip(timing.samples, copy.samples, strict=True)
    ]
    return {
        "operation": operation,
        "gigabytes_per_second": moved / 1e9 / timing.seconds.median,
        "copy_gigabytes_per_second": copied / 1e9 / copy.seconds.median,
        "fraction_of_copy": dataclasses.asdict(Spread.of(fractions)),
    }


def verdict(records: Sequence[Record]) -> str:
    """Returns whether all custom calls are at enough of the speed of a copy."""
    of_calls = (r for r in records if not r["operation"].startswith(_FUSED))
    slowest = min(of_calls, key=lambda r: r["fraction_of_copy"]["median"])
    fraction = slowest["fraction_of_copy"]["median"]
    return (
        f"{'passed' if fraction >= _GATE else 'FAILED'}: {slowest['operation']} is the "
        f"slowest, at {fraction:.2f} of a copy (>= {_GATE})"
    )


def _table(records: Sequence[Record]) -> Any:
    return make_table(
        "GB/s, read and written",
        left=("Operation",),
        right=("GB/s", "Copy", "This / copy"),
        rows=[
            (
                record["operation"],
                f"{record['gigabytes_per_second']:.0f}",
                f"{record['copy_gigabytes_per_second']:.0f}",
                str(Spread(**record["fraction_of_copy"])),
            )
            for record in records
        ],
    )


if __name__ == "__main__":
    main()
