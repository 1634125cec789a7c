"""Formats tables and texts for a terminal or a file, and prints lines."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from deviceplugin.device import printable


class Line(NamedTuple):
    """A line of text. bad: whether the line is about a device that is unhealthy or no longer listed."""

    text: str
    bad: bool = False


def print_lines(lines: Iterable[Line]) -> None:
    """Print lines. A line that is bad is red on a terminal, if the extra `cli` is installed."""
    rich = import_rich() if sys.stdout.isatty() else None
    for text, bad in lines:
        if rich is not None and bad:
            rich.console.Console().print(rich.text.Text(text, style="red"), soft_wrap=True)
        else:
            print(text)


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the rows as lines of text with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def fits(rows: Iterable[str], width: int | None) -> bool:
    """Return whether each of these lines fits the width. width: the number of columns; None for no limit."""
    return width is None or max(map(len, rows)) <= width


def terminal_width() -> int | None:
    """Return the number of columns of the terminal; None if the standard output is no terminal."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def wrapped(texts: Iterable[str], width: int | None, indent: str = "") -> list[Line]:
    """Wrap texts between words. Continuation lines have a deeper indentation."""
    folded = []
    for text in map(printable, texts):
        if width is None or len(indent + text) <= width:
            folded.append(Line(indent + text))
            continue
        first = text[: len(text) - len(text.lstrip())]
        parts = textwrap.wrap(
            text.strip(),
            max(20, width),
            initial_indent=indent + first,
            subsequent_indent=indent + first + "  ",
            break_long_words=False,
            break_on_hyphens=False,
        )
        folded += map(Line, parts)
    return folded


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
    """Return a duration as text, like an age in kubectl: 90s, 5m, 3h, 2d."""
    left = max(0, int(seconds))
    for unit, size, below in (("s", 1, 120), ("m", 60, 120), ("h", 3600, 48)):
        if left < size * below:
            return f"{left // size}{unit}"
    return f"{left // 86400}d"
