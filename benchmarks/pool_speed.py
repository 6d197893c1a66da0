"""What the page pool costs: copies in and out of pages, and its bookkeeping.

Copies go through the pool and through contiguous arrays, in turn, with the same bytes:
a training step's residuals are put one after another and got back from the last to the
first. The arrays are gone through in order, which no allocator of single residuals
does. Both have been through all their memory before they are timed. "All" is as many
residuals of each size. One thread does it, and its processor time counts, so that
others who use the machine count less. What is copied is aligned as XLA's buffers are:
on AMD Zen `memcpy` takes twice as long where source and target are 16 bytes apart in
their pages, as what malloc gives and pages are.

A page operation gives a page to an entry or takes it back. Bookkeeping is Put, Commit,
Get and Unpin of entries that nobody writes, divided by their pages.

Examples:
    python -m benchmarks.pool_speed
    python -m benchmarks.pool_speed --rounds 50 --total-mib 256
"""

import dataclasses
import itertools
import pathlib
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import tyro

from benchmarks.environment import RESULTS, describe_environment, write_result
from benchmarks.harness import Check, Contender, compare
from benchmarks.tables import make_console, make_table
from dafjax._native import _cpu
from dafjax.stores import PagePool


Record = dict[str, Any]

KIB = 1 << 10
MIB = 1 << 20
TILE_BITS = 512
BITS = 2
ALIGNMENT = 64


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of the command line."""

    blobs_kib: tuple[int, ...] = (64, 256, 1024, 4096)
    """Codes of one residual, in KiB."""
    total_mib: int = 128
    """What is put in each round, in MiB of codes."""
    rounds: int = 21
    """How often each way is timed."""
    pages: tuple[int, ...] = (1, 4, 16, 64, 256)
    """Pages of codes of an entry whose bookkeeping is timed."""
    entries: int = 200
    """Entries of an execution whose bookkeeping is timed."""
    out: pathlib.Path = RESULTS / "pool_speed.json"
    """The file to write."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line."""
    options = tyro.cli(
        Options,
        args=arguments,
        description=__doc__,
        prog="python -m benchmarks.pool_speed",
    )
    console = make_console()
    environment = describe_environment()
    mixes = [options.blobs_kib, *((kib,) for kib in options.blobs_kib)]
    copies = [
        measure_copies(
            [kib * KIB for kib in mix], options.total_mib * MIB, options.rounds
        )
        for mix in mixes
    ]
    books = [measure_bookkeeping(n, options.entries) for n in options.pages]
    console.print(_copy_table(copies))
    console.print(_bookkeeping_table(books))
    for line in verdicts(copies, books):
        console.print(line)
    write_result(
        options.out,
        environment,
        {
            "options": dataclasses.asdict(options),
            "copies": copies,
            "bookkeeping": books,
        },
    )
    console.print(f"Written to {options.out}.", markup=False)


def measure_copies(
    blobs_nbytes: Sequence[int], total_nbytes: int, rounds: int
) -> Record:
    """Times puts and gets of residuals, through the pool and through one array."""
    count = max(1, total_nbytes // sum(blobs_nbytes))
    runs = itertools.count(1)
    # To each residual's codes belong a sixteenth as many bytes of metadata.
    rows = [_aligned(n * 17 // 16) for n in blobs_nbytes]
    memories = [np.ones((count, row.size), np.uint8) for row in rows]
    outs = [_aligned(row.size) for row in rows]
    for row in rows:
        row[:] = np.arange(row.size, dtype=np.uint32)

    def contiguous() -> list[np.ndarray]:
        for memory, row, out in zip(memories, rows, outs, strict=True):
            _cpu.copy_through_memory(memory, row, out)
        return outs

    def paged() -> list[np.ndarray]:
        run = next(runs)
        for codes_nbytes, row, out in zip(blobs_nbytes, rows, outs, strict=True):
            codes, metadata = row[:codes_nbytes], row[codes_nbytes:]
            codes_out, metadata_out = out[:codes_nbytes], out[codes_nbytes:]
            pool._pool.copy_through(
                run, count, BITS, codes, metadata, codes_out, metadata_out
            )
        return outs

    with PagePool() as pool:
        check = {"bytes": Check(expected=[row.copy() for row in rows])}
        timings = compare(
            {
                "contiguous": Contender(contiguous, check),
                "page pool": Contender(paged, check),
            },
            baseline="contiguous",
            rounds=rounds,
            clock=time.process_time,
        )
    moved = 2 * count * sum(row.size for row in rows)
    return {
        "blobs_nbytes": list(blobs_nbytes),
        "contiguous_gb_per_s": moved / timings["contiguous"].seconds.median / 1e9,
        "pool_gb_per_s": moved / timings["page pool"].seconds.median / 1e9,
        # The median of the rounds' ratios: drift of the machine hits both.
        "pool_per_contiguous_speed": 1 / timings["page pool"].ratio.median,
        "ratio_mad": timings["page pool"].ratio.mad,
    }


def _aligned(nbytes: int) -> np.ndarray:
    memory = np.zeros(nbytes + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + nbytes]


def measure_bookkeeping(pages: int, entries: int) -> Record:
    """Times Put, Commit, Get and Unpin of entries with so many pages of codes."""
    tiles = pages * 65536 // (TILE_BITS * BITS // 8)
    metadata_nbytes = tiles * 8
    rounds = max(3, 200_000 // (pages * entries))
    best = float("inf")
    with PagePool() as pool:
        for repetition in range(5):
            seconds, operations = pool._pool.time_bookkeeping(
                repetition * rounds, rounds, entries, tiles, BITS, metadata_nbytes
            )
            best = min(best, seconds / operations)
        per_entry = best * operations / (rounds * entries)
    return {
        "pages_of_codes": pages,
        "ns_per_page_operation": best * 1e9,
        "ns_per_entry": per_entry * 1e9,
    }


def verdicts(copies: Sequence[Record], books: Sequence[Record]) -> list[str]:
    """Returns what was asked of the pool, and whether it holds."""
    speed = copies[0]["pool_per_contiguous_speed"]
    most = max(record["ns_per_page_operation"] for record in books)
    return [
        f"{'passed' if passed else 'FAILED'}: {text}"
        for passed, text in (
            (speed >= 0.95, f"{speed:.1%} of contiguous copies, all sizes (>= 95 %)"),
            (most <= 200, f"{most:.0f} ns a page operation (<= 200 ns)"),
        )
    ]


def _copy_table(records: Sequence[Record]):
    return make_table(
        "Puts and gets against copies of contiguous memory",
        left=("Codes",),
        right=("Contiguous, GB/s", "Pool, GB/s", "Pool / contiguous"),
        rows=[
            (
                "All"
                if len(record["blobs_nbytes"]) > 1
                else f"{record['blobs_nbytes'][0] // KIB} KiB",
                f"{record['contiguous_gb_per_s']:.2f}",
                f"{record['pool_gb_per_s']:.2f}",
                f"{record['pool_per_contiguous_speed']:.1%}",
            )
            for record in records
        ],
    )


def _bookkeeping_table(records: Sequence[Record]):
    return make_table(
        "Bookkeeping",
        left=("Pages of codes",),
        right=("ns / page operation", "ns / entry"),
        rows=[
            (
                str(record["pages_of_codes"]),
                f"{record['ns_per_page_operation']:.1f}",
                f"{record['ns_per_entry']:.0f}",
            )
            for record in records
        ],
    )


if __name__ == "__main__":
    main()
