"""Prints tables and words on a terminal or into a file."""

from __future__ import annotations

import itertools
import shutil
import sys
from collections.abc import Iterable, Sequence
from typing import Any, Final

from deviceplugin.device import printable

NARROW: Final = 12
"""Minimum width of a folded column of a table, in characters."""


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]], red: Sequence[Sequence[str]] = ()) -> None:
    """Print rows as aligned columns. On a terminal, cells are folded so that the table fits.

    red: which of the rows are red on a terminal.
    """
    rows, red = ([tuple(map(printable, row)) for row in each] for each in (rows, red))
    lines: list[tuple[str, ...]] = []
    wrong: list[bool] = []
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    for row, folded in zip((tuple(header), *rows), fitted((header, *rows), width), strict=True):
        lines += folded
        wrong += [row in red] * len(folded)
    print_lines(zip(aligned(lines), wrong, strict=True))


def print_lines(lines: Iterable[tuple[str, bool]]) -> None:
    """Print lines, each given as (text, red). Red lines are red on a terminal if the extra `cli` is installed."""
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


def fitted(rows: Sequence[Sequence[str]], width: int | None) -> list[list[tuple[str, ...]]]:
    """Return each row as one or more lines of cells. The widest columns are folded until the table fits into the width.

    width: in characters; None for no limit. No column becomes narrower than NARROW.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    while width is not None and sum(widths) + 2 * (len(widths) - 1) > width and max(widths) > NARROW:
        widths[widths.index(max(widths))] -= 1
    lines: list[list[tuple[str, ...]]] = []
    for row in rows:
        folded = [_folded(cell, limit) for cell, limit in zip(row, widths, strict=True)]
        lines.append(list(itertools.zip_longest(*folded, fillvalue="")))
    return lines


def _folded(text: str, width: int) -> list[str]:
    """Return a text as lines, broken after a separator where that is possible."""
    lines = []
    while len(text) > width:
        at = max((text.rfind(mark, 0, width) + 1 for mark in " ,/.-_:"), default=0)
        at = at if at > width // 3 else width
        lines.append(text[:at].rstrip())
        text = text[at:]
    return [*lines, text]


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
