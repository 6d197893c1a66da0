"""Row blocks against column blocks: signal-to-noise ratio of real residuals.

Both have the same block size, and so the same bytes, but for padding. A figure is the
mean over the arrays of a kind; rounding is stochastic. The models are small and briefly
trained. The last axis is that of channels; of attention probabilities, that of keys.

The rule that the figures give, at 2, 4 and 8 bits alike:

    Use columns for what has channels: inputs and outputs of convolutions, norms and
    matrix products, residual streams. That is 2 to 3 dB (half a bit) at no cost, and
    more the larger the blocks; attention outputs gain most, because positions of a
    sequence are alike. Inputs of convolutions after relu gain 1 dB in blocks of 256 and
    nothing in blocks of 64: many zeros make all ranges alike.
    Use rows where the last axis is no channel, above all for attention probabilities: a
    row of them sums to 1 and a column mixes rows of different peaks, 8 to 14 dB worse.
    Use rows for few rows: blocks of 128 values cost an eighth of a bit more than blocks
    of 256, and gain more than that; of 64, three eighths.

Examples:
    python -m benchmarks.block_layout
    python -m benchmarks.block_layout --bits 2 --block-sizes 64 256
"""

import dataclasses
import pathlib
import statistics
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import rich.table
import tyro

from benchmarks.environment import RESULTS, describe_environment, write_result
from benchmarks.residuals import Values, gpt2_values, resnet_values
from benchmarks.tables import make_console, make_table
from dafjax.codecs import Affine


Record = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of the command line."""

    bits: tuple[int, ...] = (2, 4, 8)
    """Bits of a code."""
    block_sizes: tuple[int, ...] = (64, 256)
    """Elements of a block."""
    width: int = 16
    """Filters of the ResNet's first stage; 64 is the width of the paper."""
    batch: int = 64
    """Images in a step; a GPT-2 step has a sixteenth as many sequences."""
    steps: int = 100
    """Training steps before the values are taken."""
    out: pathlib.Path = RESULTS / "block_layout.json"
    """The file to write."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line."""
    options = tyro.cli(
        Options,
        args=arguments,
        description=__doc__,
        prog="python -m benchmarks.block_layout",
    )
    console = make_console()
    environment = describe_environment()
    values = resnet_values(
        width=options.width, batch=options.batch, steps=options.steps
    ) | gpt2_values(batch=max(1, options.batch // 16), steps=options.steps)
    records = [
        record
        for block_size in options.block_sizes
        for record in measure(values, options.bits, block_size)
    ]
    for block_size in options.block_sizes:
        console.print(_table(block_size, records))
    write_result(
        options.out,
        environment,
        {"options": dataclasses.asdict(options), "layouts": records},
    )
    console.print(f"Written to {options.out}.", markup=False)


def measure(values: Values, bits: Sequence[int], block_size: int) -> list[Record]:
    """Measures both layouts on every kind of values."""
    records = []
    for kind, arrays in values.items():
        for width in bits:
            rows, columns = (
                [_snr(Affine(width, block_size, blocks=blocks), x) for x in arrays]
                for blocks in ("rows", "columns")
            )
            gains = [c - r for r, c in zip(rows, columns, strict=True)]
            size = sum(x.size for x in arrays)
            records.append(
                {
                    "values": kind,
                    "arrays": len(arrays),
                    "bits": width,
                    "block_size": block_size,
                    "snr_db_rows": statistics.fmean(rows),
                    "snr_db_columns": statistics.fmean(columns),
                    "gain_db": statistics.fmean(gains),
                    "least_gain_db": min(gains),
                    "greatest_gain_db": max(gains),
                    **{
                        f"{blocks}_bits_per_element": sum(
                            Affine(width, block_size, blocks=blocks).packed_nbytes(x)
                            for x in arrays
                        )
                        * 8
                        / size
                        for blocks in ("rows", "columns")
                    },
                }
            )
    return records


def _snr(codec: Affine, x: np.ndarray) -> float:
    """Returns the signal-to-noise ratio of a round trip, in decibels."""
    like = jax.ShapeDtypeStruct(x.shape, x.dtype)
    restored = np.asarray(codec.decode(codec.encode(jax.device_put(x)), like))
    signal = np.sum(np.square(x, dtype=np.float64))
    noise = np.sum(np.square(restored.astype(np.float64) - x))
    return float(10 * np.log10(signal / noise))


def _table(block_size: int, records: Sequence[Record]) -> rich.table.Table:
    return make_table(
        f"SNR of row and column blocks of {block_size}, dB",
        left=("Values",),
        right=(
            "Bits",
            "Rows",
            "Columns",
            "Gain",
            "Least .. most",
            "Bits/element rows",
            "columns",
        ),
        rows=[
            (
                record["values"],
                str(record["bits"]),
                f"{record['snr_db_rows']:.1f}",
                f"{record['snr_db_columns']:.1f}",
                f"{record['gain_db']:+.1f}",
                f"{record['least_gain_db']:+.1f} .. {record['greatest_gain_db']:+.1f}",
                f"{record['rows_bits_per_element']:.3f}",
                f"{record['columns_bits_per_element']:.3f}",
            )
            for record in records
            if record["block_size"] == block_size
        ],
    )


if __name__ == "__main__":
    main()
