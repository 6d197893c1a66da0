"""Tables of results, wide enough when the output is a file."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import rich.box
import rich.console
import rich.table

from benchmarks.harness import Timing


def make_console() -> rich.console.Console:
    """Returns a console for tables; 120 columns where there is no terminal."""
    console = rich.console.Console()
    return console if console.is_terminal else rich.console.Console(width=120)


def make_table(
    title: str,
    *,
    left: Sequence[str],
    right: Sequence[str],
    rows: Iterable[Sequence[str]],
) -> rich.table.Table:
    """Returns a table.

    Args:
        title: Above it.
        left: Titles of the first columns, aligned to the left.
        right: Titles of the others, aligned to the right.
        rows: As many cells each as there are columns.
    """
    table = rich.table.Table(title=title, box=rich.box.SIMPLE_HEAD)
    for name in left:
        table.add_column(name, no_wrap=True)
    for name in right:
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


def make_time_table(
    title: str, labels: Mapping[str, str], timings: Mapping[str, Timing]
) -> rich.table.Table:
    """Returns a table of the times and the gradient errors of methods.

    Args:
        title: Above it.
        labels: The first cell of a method's row, by the method's name.
        timings: What was measured, by the method's name.
    """
    measured = {name: timing.joules for name, timing in timings.items()}
    has_joules = all(joules is not None for joules in measured.values())
    return make_table(
        title,
        left=("Method",),
        right=(
            "Seconds",
            "This / plain",
            *(("Joules",) if has_joules else ()),
            "Gradient error",
            "Along the gradient",
        ),
        rows=[
            (
                labels[name],
                str(timing.seconds),
                str(timing.ratio),
                *((str(measured[name]),) if has_joules else ()),
                f"{timing.errors['gradient']:.2g}",
                f"{timing.errors['projection']:.2g}",
            )
            for name, timing in timings.items()
        ],
    )


def make_rss_table(
    title: str, records: Sequence[Mapping[str, Any]]
) -> rich.table.Table:
    """Returns a table of the resident memory that a step adds.

    Args:
        title: Above it.
        records: `peak_rss.PeakRss` of each method as a dict, with `label`, `added` and
            `planned`; ratios are to the first.
    """
    return make_table(
        title,
        left=("Method",),
        right=("Added MB", "Compiled MB", "Added / compiled", "Plain / this"),
        rows=[
            (
                record["label"],
                f"{record['added'] / 1e6:.1f}",
                f"{record['planned'] / 1e6:.1f}",
                f"{record['added'] / record['planned']:.2f}",
                f"{records[0]['added'] / record['added']:.2f}x",
            )
            for record in records
        ],
    )
