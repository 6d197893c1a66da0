"""How fast a device packs and unpacks, against how fast it copies.

Operations of one program, several at a time, and programs one behind the other, so
that starting them counts for little. What custom calls unpack is written; what XLA
unpacks in a kernel of its own is changed there, and then written: as many bytes.
Fractions are of bytes read and written in a second, against a copy: the faster one of a
kernel that changes what it copies, and of the driver's. The result is written after
each codec.

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

_COPIES = ("copy", "copy by the driver")
_FUSED = "unpack in XLA's kernel"
_CHANNELS = 512  # of the matrices for column blocks
_NUM_CHECKED = 1 << 20  # elements, which the host looks at
# What pack and unpack take at the least, of what a copy moves.
_GATE = 0.75

# And what they take.
CODECS: Mapping[str, tuple[AbstractCodec, str]] = {
    **{
        f"affine{bits}": (Affine(bits, 256, "stochastic"), "float32")
        for bits in (1, 2, 4, 8)
    },
    "affine2 nearest": (Affine(2, 256, "nearest"), "float32"),
    "affine2 columns": (Affine(2, 256, blocks="columns"), "float32"),
    "affine2 bfloat16": (Affine(2, 256, "stochastic"), "bfloat16"),
    "affine2 columns bfloat16": (Affine(2, 256, blocks="columns"), "bfloat16"),
    "bitmask": (Bitmask(), "bool"),
}


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of the command line."""

    megabytes: int = 256
    """Of the unpacked array, in MiB."""
    at_once: int = 8
    """Operations of a program."""
    programs: int = 8
    """Programs that are started before one is waited for."""
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
    for name, (codec, dtype) in CODECS.items():
        records += _measure(name, codec, dtype, options)
        write_result(options.out, environment, result)
    console.print(_table(records))
    console.print(verdict(records))
    console.print(f"Written to {options.out}.", markup=False)


def _measure(
    name: str, codec: AbstractCodec, dtype: str, options: Options
) -> list[Record]:
    nbytes = options.megabytes * 2**20
    key = jax.random.key(0)
    rows = (nbytes // 4 // _CHANNELS, _CHANNELS)
    floats = jax.random.normal(key, rows)
    # As many bytes, of more elements.
    more = (rows[0] * 4 // jnp.dtype(dtype).itemsize, _CHANNELS)
    x = jax.random.normal(key, more, jnp.float32)
    x = x > 0 if dtype == "bool" else x.astype(dtype)
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
    copy_by_driver = jax.jit(lambda *arrays: [jnp.copy(a) for a in arrays])
    runs = {
        _COPIES[0]: functools.partial(copy, *copies),
        _COPIES[1]: functools.partial(copy_by_driver, *copies),
        f"pack {name}": functools.partial(pack, *many),
        f"unpack {name}": functools.partial(unpack, *packed),
        f"{_FUSED} {name}": functools.partial(read, *packed),
    }
    contenders = {
        operation: _contender(run, options.programs) for operation, run in runs.items()
    }
    timings = compare(contenders, baseline=_COPIES[0], rounds=options.rounds)
    fastest = min(_COPIES, key=lambda name: timings[name].seconds.median)
    moved, copied = options.programs * moved, options.programs * copied
    return [
        _record(operation, timing, timings[fastest], moved, copied)
        for operation, timing in timings.items()
        if operation not in _COPIES
    ]


def _change(x: jax.Array) -> jax.Array:
    return ~x if x.dtype == jnp.bool_ else -x


def _contender(run: Callable[[], Any], times: int) -> Contender:
    expected = np.asarray(_some_of(run()))

    def run_often() -> Any:
        # What the others return is given back before the last one is started.
        for _ in range(times - 1):
            run()
        return run()

    return Contender(run_often, {"some": Check(extract=_some_of, expected=expected)})


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
