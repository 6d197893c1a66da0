"""Formats rows of text as a table with aligned columns."""

from collections.abc import Container, Sequence


def align(rows: Sequence[Sequence[str]], *, right: Container[int]) -> str:
    """Returns the rows as lines, each column as wide as its widest cell.

    Args:
        rows: The rows, header included; all have the same number of cells.
        right: Indices of the columns to align on the right.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if number in right else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )
