"""Prints tables and words on a terminal or into a file."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any

from deviceplugin.device import printable


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]], red: Sequence[Sequence[str]] = ()) -> None:
    """Print rows as aligned columns. red: which of the rows are red on a terminal."""
    rows, red = ([tuple(map(printable, row)) for row in each] for each in (rows, red))
    wrong = [False, *(row in red for row in rows)]
    print_lines(zip(aligned((header, *rows)), wrong, strict=True))


def print_lines(lines: Iterable[tuple[str, bool]]) -> None:
    """Print lines. A line with True is red on a terminal, if the extra `cli` is installed."""
    rich = import_rich() if sys.stdout.isatty() else None
    for text, red in lines:
        if rich is not None and red:
            rich.console.Console().print(rich.text.Text(text, style="red"), soft_wrap=True)
        else:
            print(text)


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the rows as lines of text with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def import_rich() -> Any:
    """Return the package rich, or None if the extra `cli` is not installed."""
    try:
        import rich.console
        import rich.progress
        import rich.table
        import rich.text
    except ImportError:
        return None
    return rich


def age(seconds: float) -> str:
    """Return a duration in the form that kubectl has for ages: 90s, 5m, 3h, 2d."""
    left = max(0, int(seconds))
    for unit, size, below in (("s", 1, 120), ("m", 60, 120), ("h", 3600, 48)):
        if left < size * below:
            return f"{left // size}{unit}"
    return f"{left // 86400}d"
