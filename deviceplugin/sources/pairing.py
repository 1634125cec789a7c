"""Groups the matches of several globs: finds the paths that form one device. Pure functions.

If sysfs shows the hardware of paths, paths of the same USB device or PCI function form a device. Other paths form a
device if the wildcards of their globs match the same text (a1 and b1), or if each glob has exactly one match. A path
that is in no complete group belongs to no device. A complete group has one path for each glob that is not optional. The
order of paths decides only between paths of the same hardware.
"""

from __future__ import annotations

import enum
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from deviceplugin.device import some

SHOWN: Final = 5  # Maximum number of paths in a sentence for the log.


class PairedBy(enum.Enum):
    """The reason why several paths form one device. The value is a text for messages."""

    HARDWARE = "the device in sysfs"
    TEXT = "the text of the wildcards"
    ALONE = "being the only ones"


@dataclass(frozen=True, slots=True)
class Part:
    """A path that a glob matches.

    hardware: the sysfs directory of the path's USB device or PCI function, "" if sysfs shows neither. text: the text in
    the path that each wildcard of the glob matches.
    """

    path: str
    hardware: str = ""
    text: tuple[str, ...] = ()


Group = tuple[Part | None, ...]
"""The paths of one device: one path for each glob, or None for a missing optional path."""


@dataclass(slots=True)
class Pairing:
    """The groups of paths that form devices, with the reason for each group. left: the paths that are in no group."""

    groups: list[tuple[Group, PairedBy]] = field(default_factory=list)
    left: list[Part] = field(default_factory=list)

    def notes(self) -> Iterator[str]:
        """Yield sentences for the log: why paths form devices, and which paths are in no group."""
        for how in PairedBy:
            firsts = [next(part for part in group if part is not None) for group, by in self.groups if by is how]
            if firsts:
                named = [
                    f"{first.path} ({os.path.basename(first.hardware)})" if first.hardware else first.path
                    for first in firsts
                ]
                yield f"paired by {how.value}: {some(named, SHOWN)}"
        if self.left:
            names = some([part.path for part in self.left], SHOWN)
            yield f"left out, since nothing shows which parts belong together: {names}"


def paired(columns: Sequence[Sequence[Part]], optional: Sequence[bool] = ()) -> Pairing:
    """Return the groups of paths that form devices. columns: for each glob, the paths that it matches.

    optional: for each glob, whether it may match nothing.
    """
    needed = [not (at < len(optional) and optional[at]) for at in range(len(columns))]
    rest, pairing = [list(column) for column in columns], Pairing()
    for how in PairedBy:
        if how is PairedBy.ALONE and pairing.groups:
            break
        for group in list(_GROUPS[how](rest, needed)):
            pairing.groups.append((group, how))
            for column, part in zip(rest, group, strict=True):
                if part is not None:
                    column.remove(part)
    pairing.left = [part for column in rest for part in column]
    return pairing


def _by_hardware(columns: Sequence[Sequence[Part]], needed: Sequence[bool]) -> Iterator[Group]:
    """Yield the paths of each USB device or PCI function as a group.

    If the globs match several paths of the same hardware, paths with the same wildcard text form a group. If the texts
    differ, and each glob has the same number of matches, the first matches of the globs form a group, the second
    matches form the next group, and so on.
    """
    for hardware in dict.fromkeys(part.hardware for part in _first(columns, needed) if part.hardware):
        own = [[part for part in column if part.hardware == hardware] for column in columns]
        there = [column for column in own if column]
        by_text = [group for group in _by_text(own, needed) if sum(part is not None for part in group) == len(there)]
        counts = {len(column) for column, must in zip(own, needed, strict=True) if must or column}
        if len(counts) > 1 or counts == {len(by_text)}:
            yield from by_text
        else:
            for at in range(max(counts)):
                yield tuple(column[at] if column else None for column in own)


def _by_text(columns: Sequence[Sequence[Part]], needed: Sequence[bool]) -> Iterator[Group]:
    """Yield the groups of paths whose wildcards match the same text."""
    by_text = [{part.text: part for part in column if part.text} for column in columns]
    for text in dict.fromkeys(part.text for part in _first(columns, needed) if part.text):
        group = tuple(parts.get(text) for parts in by_text)
        if _is_whole(group, needed):
            yield group


def _alone(columns: Sequence[Sequence[Part]], needed: Sequence[bool]) -> Iterator[Group]:
    """Yield one group of all paths if no glob has more than one match."""
    if all(len(column) <= 1 for column in columns):
        group = tuple(column[0] if column else None for column in columns)
        named = not any(part.text for part in group if part is not None)
        if _is_whole(group, needed, named=named):
            yield group


def _is_whole(group: Group, needed: Sequence[bool], *, named: bool = False) -> bool:
    """Return whether all needed paths exist, and sysfs does not show different hardware for the paths.

    named: whether the globs have no wildcards. The author of the config file has then named the paths of one device,
    which may be of different hardware.
    """
    whole = all(part is not None for part, must in zip(group, needed, strict=True) if must)
    hardware = {part.hardware for part in group if part is not None and part.hardware}
    return whole and any(part is not None for part in group) and (named or len(hardware) <= 1)


def _first(columns: Sequence[Sequence[Part]], needed: Sequence[bool]) -> Iterable[Part]:
    """Return the matches of the first glob that is not optional."""
    return columns[list(needed).index(True)]


_GROUPS: Final = {PairedBy.HARDWARE: _by_hardware, PairedBy.TEXT: _by_text, PairedBy.ALONE: _alone}
