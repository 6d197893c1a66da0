"""How fast codecs pack and unpack, against how fast memory can be read; their accuracy.

Every operation is timed in turn with a pass that reads as many bytes, so that the
fraction means something on a machine that others use too. GB/s count the bytes of the
unpacked array.

Examples:
    python -m benchmarks.codec_throughput
    python -m benchmarks.codec_throughput --megabytes 1 --rounds 9
"""

import dataclasses
import functools
import pathlib
import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax
import numpy as np
import rich.table
import tyro

from benchmarks.environment import RESULTS, describe_environment, write_result
from benchmarks.harness import Check, Contender, Spread, Timing, compare
from benchmarks.tables import make_console, make_table
from dafjax._native import _cpu, library_status
from dafjax.codecs import AbstractCodec, Affine, Bitmask


_BLOCK_SIZE = 256
_CHANNELS = 512  # of the matrices for column blocks
_SEED = 0
_READ = "read"
_CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}

# The gate: 2-bit stochastic packing of float32 that no cache holds. The goal is 0.90;
# the rest is noise of shared machines.
_GATE_OPERATION = "pack affine2 stochastic"
_GATE_MEGABYTES = 64
_GATE_FRACTION = 0.70

Record = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of the command line."""

    megabytes: tuple[int, ...] = (1, 16, 64)
    """Sizes of the unpacked array, in MiB."""
    threads: tuple[int, ...] = (1, 2)
    """Threads of the kernels when they are called directly."""
    rounds: int = 15
    """Interleaved rounds; at least 9 for a result worth keeping."""
    clock: Literal["wall", "cpu"] = "wall"
    """cpu counts the processor time of this process, for a machine that is busy: it
    does not see waiting, be it for others or for threads."""
    out: pathlib.Path = RESULTS / "codec_throughput.json"
    """The file to write."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line."""
    options = tyro.cli(
        Options,
        args=arguments,
        description=__doc__,
        prog="python -m benchmarks.codec_throughput",
    )
    console = make_console()
    environment = describe_environment()
    accuracy = measure_accuracy()
    console.print(_accuracy_table(accuracy))
    throughput = [r for size in options.megabytes for r in _measure(options, size)]
    console.print(_throughput_table(options, throughput))
    write_result(
        options.out,
        environment,
        {
            "options": dataclasses.asdict(options),
            "accuracy": accuracy,
            "throughput": throughput,
        },
    )
    console.print(f"Written to {options.out}.", markup=False)


def codecs() -> dict[str, AbstractCodec]:
    """Returns what is measured, by name."""
    affine = {
        f"affine{bits} {rounding}": Affine(bits, _BLOCK_SIZE, rounding)
        for bits in (1, 2, 4, 8)
        for rounding in ("stochastic", "nearest")
    }
    columns = {"affine2 columns": Affine(2, _BLOCK_SIZE, blocks="columns")}
    return {**affine, **columns, "bitmask": Bitmask()}


def direct_contenders(nbytes: int, threads: int) -> dict[str, Contender]:
    """Returns the kernels, called without JAX.

    What they must return comes from the scalar kernels, the readable ones.
    """
    floats, mask = _data(nbytes)
    best = library_status().instruction_set
    contenders: dict[str, Contender] = {}
    for name, codec in codecs().items():
        if isinstance(codec, Affine):
            columns = _CHANNELS if codec.blocks == "columns" else 0
            pack = functools.partial(
                _cpu.pack_affine,
                x=floats,
                seed=_SEED,
                bits=codec.bits,
                block_size=codec.block_size,
                stochastic=codec.rounding == "stochastic",
                columns=columns,
            )
            unpack = functools.partial(
                _unpack_affine, floats.size, codec.bits, codec.block_size, columns
            )
        else:
            pack = functools.partial(_cpu.pack_bitmask, x=mask)
            unpack = functools.partial(_unpack_bitmask, mask.size)
        packed = pack("scalar")
        contenders[f"pack {name}"] = Contender(
            functools.partial(pack, best, num_threads=threads),
            {"codes": Check(expected=packed)},
        )
        # Decoding does not depend on the rounding.
        if "nearest" not in name:
            contenders[f"unpack {name.removesuffix(' stochastic')}"] = Contender(
                functools.partial(unpack, packed, best, threads),
                {"values": Check(expected=unpack(packed, "scalar", 1))},
            )
    return contenders


def jitted_contenders(nbytes: int) -> dict[str, Contender]:
    """Returns the codecs as custom calls in jitted functions, on XLA's threads."""
    floats, mask = _data(nbytes)
    contenders: dict[str, Contender] = {}
    for name, codec in codecs().items():
        x = jax.device_put(mask if isinstance(codec, Bitmask) else floats)
        if isinstance(codec, Affine) and codec.blocks == "columns":
            x = x.reshape(-1, _CHANNELS)
        like = jax.ShapeDtypeStruct(x.shape, x.dtype)
        packed = codec.encode(x)
        contenders[f"pack {name}"] = Contender(
            functools.partial(jax.jit(codec.encode), x),
            {"codes": Check(expected=jax.tree.map(np.array, packed))},
        )
        if "nearest" not in name:
            contenders[f"unpack {name.removesuffix(' stochastic')}"] = Contender(
                functools.partial(
                    jax.jit(functools.partial(codec.decode, like=like)), packed
                ),
                {"values": Check(expected=np.array(codec.decode(packed, like)))},
            )
    return contenders


def reading(nbytes: int, threads: int) -> Contender:
    """Returns the pass that reads memory."""
    floats, _ = _data(nbytes)
    total = np.array(floats.sum(dtype=np.float64))
    return Contender(
        functools.partial(_cpu.read_bandwidth_pass, floats, threads),
        {"sum": Check(1e-3, expected=total)},
    )


def _data(nbytes: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns a float32 and a bool array of one row and `nbytes` bytes."""
    rng = np.random.default_rng(0)
    # A mean, so that the sum has few relative errors.
    floats = rng.standard_normal((1, nbytes // 4), np.float32) + np.float32(1)
    mask = rng.integers(2, size=(1, nbytes), dtype=np.uint8).astype(np.bool_)
    return floats, mask


def _unpack_affine(
    size: int,
    bits: int,
    block_size: int,
    columns: int,
    packed: tuple[np.ndarray, ...],
    instruction_set: str,
    threads: int,
) -> np.ndarray:
    return _cpu.unpack_affine(
        instruction_set, *packed, size, bits, block_size, "float32", threads, columns
    )


def _unpack_bitmask(
    size: int, words: np.ndarray, instruction_set: str, threads: int
) -> np.ndarray:
    return _cpu.unpack_bitmask(instruction_set, words, size, threads)


def _measure(options: Options, megabytes: int) -> list[Record]:
    nbytes = megabytes * 2**20
    # (caller, threads that read, contenders)
    callers = [
        (f"{threads} thread{'s' * (threads > 1)}", threads, None)
        for threads in options.threads
    ]
    # XLA has threads of its own; a second reading thread of ours would contend with
    # them, so that what is jitted is set against one.
    callers.append(("jit", 1, jitted_contenders(nbytes)))
    records = []
    for caller, threads, jitted in callers:
        contenders = jitted or direct_contenders(nbytes, threads)
        read = reading(nbytes, threads)
        for name, contender in contenders.items():
            timings = compare(
                {_READ: read, name: contender},
                baseline=_READ,
                rounds=options.rounds,
                clock=_CLOCKS[options.clock],
            )
            records.append(_record(name, timings, megabytes, caller))
    return records


def _record(
    name: str, timings: Mapping[str, Timing], megabytes: int, caller: str
) -> Record:
    pairs = zip(timings[_READ].samples, timings[name].samples, strict=True)
    fraction = Spread.of([read / operation for read, operation in pairs])
    is_gated = name == _GATE_OPERATION and megabytes >= _GATE_MEGABYTES
    gate = None
    if is_gated and caller != "jit":
        gate = "PASS" if fraction.median >= _GATE_FRACTION else "FAIL"
    return {
        "operation": name,
        "megabytes": megabytes,
        "caller": caller,
        "gigabytes_per_second": _speed(timings[name], megabytes),
        "read_gigabytes_per_second": _speed(timings[_READ], megabytes),
        "fraction_of_read": dataclasses.asdict(fraction),
        "gate": gate,
    }


def _speed(timing: Timing, megabytes: int) -> Record:
    nbytes = megabytes * 2**20
    return dataclasses.asdict(Spread.of([nbytes / 1e9 / t for t in timing.samples]))


def measure_accuracy(size: int = 2**20) -> list[Record]:
    """Measures rate and distortion of the codecs on normal and on relu data."""
    normal = np.random.default_rng(0).standard_normal(size, np.float32)
    normal = normal.reshape(-1, _CHANNELS)
    data = {"normal": normal, "relu": np.maximum(normal, 0)}
    return [
        {
            "codec": name,
            "bits_per_element": codec.packed_nbytes(normal) * 8 / size,
            **{f"snr_db_{kind}": _snr(codec, x) for kind, x in data.items()},
        }
        for name, codec in codecs().items()
        if isinstance(codec, Affine)
    ]


def _snr(codec: AbstractCodec, x: np.ndarray) -> float:
    """Returns the signal-to-noise ratio of a round trip, in decibels."""
    like = jax.ShapeDtypeStruct(x.shape, x.dtype)
    restored = np.asarray(codec.decode(codec.encode(jax.device_put(x)), like))
    signal = np.sum(np.square(x, dtype=np.float64))
    noise = np.sum(np.square(restored.astype(np.float64) - x))
    return float(10 * np.log10(signal / noise))


def _accuracy_table(records: Sequence[Record]) -> rich.table.Table:
    return make_table(
        f"Rate and distortion, blocks of {_BLOCK_SIZE}",
        left=("Codec",),
        right=("Bits per element", "SNR normal dB", "SNR relu dB"),
        rows=[
            (
                record["codec"],
                f"{record['bits_per_element']:.3f}",
                f"{record['snr_db_normal']:.1f}",
                f"{record['snr_db_relu']:.1f}",
            )
            for record in records
        ],
    )


def _throughput_table(options: Options, records: Sequence[Record]) -> rich.table.Table:
    """Returns one row for an operation and a size, and a column for each caller."""
    callers = list(dict.fromkeys(record["caller"] for record in records))
    by_row: dict[tuple[str, int], dict[str, Record]] = {}
    for record in records:
        row = by_row.setdefault((record["operation"], record["megabytes"]), {})
        row[record["caller"]] = record
    rows = []
    for (operation, megabytes), row in by_row.items():
        gates = [record["gate"] for record in row.values() if record["gate"]]
        cells = [_cell(row[caller]) for caller in callers]
        rows.append((operation, str(megabytes), *cells, " ".join(gates)))
    return make_table(
        f"GB/s and fraction of read bandwidth, {options.clock} time, "
        f"{options.rounds} rounds",
        left=("Operation",),
        right=("MiB", *callers, f"Gate {_GATE_FRACTION:.2f}"),
        rows=rows,
    )


def _cell(record: Record) -> str:
    fraction = Spread(**record["fraction_of_read"])
    return f"{record['gigabytes_per_second']['median']:.1f}  {fraction}"


if __name__ == "__main__":
    main()
