"""Devices that are paths: what a glob matches, or the n-th matches of several globs together.

A symlink is resolved on the host, and the alias is kept as the container's path and as the device's name:
/dev/serial/by-id/... is the same port tomorrow, /dev/ttyUSB0 is not. A plain file, a socket or a pipe is mounted, as
runtimes take only device nodes as devices. A directory is left out.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import stat
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import translate
from typing import Final

from deviceplugin import identity
from deviceplugin.device import NO_EDITS, ContainerEdits, Device, DeviceNode, Mount
from deviceplugin.sources.scanned import Scan, ScannedSource
from deviceplugin.sources.sysfs import numa_node_above
from deviceplugin.topology import natural

_LOG: Final = logging.getLogger(__name__)
LONGEST_ID: Final = 52
"""Characters of an id; leaves room for a replica's number within the kubelet's 63."""
_UNKNOWN: Final = -1
"""Stands for the inode of a path whose directory was not read."""
_MAGIC: Final = re.compile(r"[*?[]")
_SURROGATE: Final = re.compile("[\ud800-\udfff]")
_PLAIN: Final = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9_.]|-(?!-))*(?<![-_.])")
_HASHED: Final = re.compile(r".*-[0-9a-f]{8}")


def device_id(path: str) -> str:
    """Return the id of the device at this path: readable, 52 characters at the most, never that of another path.

    /dev/ttyUSB0 is ttyUSB0, /dev/snd/pcmC0D0c is snd--pcmC0D0c. A name that is longer, or has other characters, is
    shortened and ends in a hash.
    """
    inside = path.removeprefix("/dev/")
    steps = inside.strip("/").split("/")
    name = "--".join(steps)
    if inside != path and len(name) <= LONGEST_ID and all(map(_PLAIN.fullmatch, steps)) and not _HASHED.fullmatch(name):
        return name
    digest = hashlib.sha256(os.fsencode(path)).hexdigest()[:8]
    # Long names differ more in their ends than in their beginnings.
    readable = re.sub(r"[^A-Za-z0-9_.]+", "-", name)[-(LONGEST_ID - 9) :].strip("-_.")
    return f"{readable or 'x'}-{digest}"


def numa_of(mode: int, rdev: int, sysfs: str = "/sys") -> int | None:
    """Return the NUMA node of the hardware of a node with this st_mode and st_rdev; None if sysfs names none."""
    if not (stat.S_ISCHR(mode) or stat.S_ISBLK(mode)):
        return None
    kind = "char" if stat.S_ISCHR(mode) else "block"
    root = os.path.realpath(sysfs)
    directory = os.path.realpath(f"{root}/dev/{kind}/{os.major(rdev)}:{os.minor(rdev)}")
    return numa_node_above(directory, f"{root}/devices/")


@dataclass(frozen=True, slots=True)
class _Match:
    """A path that a glob matches, and what it led to at the last scan.

    real: its directory, resolved. entry: its inode as the directory lists it. seen: a hash of its status.
    directories: those of its chain of symlinks. identity: its token (`deviceplugin.identity`).
    """

    alias: str
    host: str
    real: str
    entry: int
    seen: int
    mode: int
    numa: int | None
    directories: tuple[str, ...]
    identity: str = ""

    def edits(self, permissions: str) -> tuple[tuple[DeviceNode, ...], tuple[Mount, ...]]:
        """Return what gives it to a container."""
        if stat.S_ISCHR(self.mode) or stat.S_ISBLK(self.mode):
            container = "" if self.alias == self.host else self.alias
            return (DeviceNode(self.host, container, permissions),), ()
        return (), (Mount(self.host, self.alias, readonly="w" not in permissions),)


@dataclass(slots=True)
class _PathScan(Scan):
    """A scan under way: what it has read already is not read twice."""

    thorough: bool = True
    matches: dict[str, _Match] = field(default_factory=dict)
    real: dict[str, str] = field(default_factory=dict)
    numa: dict[tuple[int, int], int | None] = field(default_factory=dict)

    def resolve(self, directory: str) -> str:
        """Return a directory's real path, and add the directories to watch in which a change of it would show."""
        real = self.real.get(directory)
        if real is None:
            real = self.real[directory] = sys.intern(os.path.realpath(directory))
            if real != directory:
                self.directories.add(real)
                while directory != "/":
                    if os.path.islink(directory):
                        self.directories.add(os.path.dirname(directory))
                    directory = os.path.dirname(directory)
        return real

    def follow(self, link: str) -> tuple[str, tuple[str, ...]]:
        """Return what a chain of symlinks leads to, and the directories in which it lies."""
        directories = []
        for _ in range(40):  # as many as the kernel follows
            directory, name = os.path.split(link)
            directory = self.resolve(directory)
            directories.append(directory)
            link = os.path.join(directory, name)
            try:
                link = os.path.normpath(os.path.join(directory, os.readlink(link)))
            except OSError:
                break
        return link, tuple(directories)


class PathSource(ScannedSource):
    """Each path that a glob matches is a device.

    Args:
        glob: an absolute path; `*`, `?` and `[abc]` match within one directory. `GroupSource` takes several.
        permissions, resource, rescan: as of `ScannedSource`.
        sysfs: the directory of sysfs.

    """

    def __init__(
        self,
        glob: str | Sequence[str],
        *,
        permissions: str = "rw",
        resource: str = "",
        sysfs: str = "/sys",
        rescan: float = 30.0,
    ) -> None:
        super().__init__(permissions, resource, rescan)
        self.globs = (glob,) if isinstance(glob, str) else tuple(glob)
        for one in self.globs:
            if not one.startswith("/"):
                raise ValueError(f"a glob of devices must be an absolute path, not {one!r}")
        self._sysfs = sysfs
        self._matches: Mapping[str, _Match] = {}
        self._devices: Mapping[str, tuple[tuple[_Match, ...], Device]] = {}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(repr, self.globs))})"

    def _directories(self) -> list[str]:
        """Return the first directory that each glob reads."""
        wild = ((glob, _MAGIC.search(glob)) for glob in self.globs)
        return [os.path.dirname(glob[: first.start()] if first else glob) or "/" for glob, first in wild]

    def _scan(self, thorough: bool = True) -> Scan:
        """Scan once.

        Unless thorough, a path that its directory lists with the same inode as before is taken as unchanged. Where
        inodes are not used again (devtmpfs) it is.
        """
        scan = _PathScan(thorough=thorough)
        devices: dict[str, tuple[tuple[_Match, ...], Device]] = {}
        for matches in self._groups(scan):
            alias = matches[0].alias
            known = self._devices.get(alias)
            if known is None or known[0] != matches:
                known = matches, self._device(matches)
            devices[alias] = known
            scan.devices.append(known[1])
        self._matches, self._devices = scan.matches, devices
        return scan

    def _groups(self, scan: _PathScan) -> Iterable[tuple[_Match, ...]]:
        """Return, for each device, the paths that make it."""
        return [(match,) for match in self._matching(self.globs[0], scan)]

    def _device(self, matches: tuple[_Match, ...]) -> Device:
        edits = [match.edits(self.permissions) for match in matches]
        mounts = [mount for _, mounts in edits for mount in mounts]
        numa = sorted({match.numa for match in matches if match.numa is not None})
        return Device(
            device_id(matches[0].alias),
            nodes=[node for nodes, _ in edits for node in nodes],
            numa=numa[0] if len(numa) == 1 else (tuple(numa) or None),
            edits=ContainerEdits(mounts=mounts) if mounts else NO_EDITS,
            identity=matches[0].identity,
        )

    def _matching(self, glob: str, scan: _PathScan) -> list[_Match]:
        """Return what a glob matches now, in natural order: 2 before 10."""
        found: dict[str, _Match] = {}
        known = {} if scan.thorough else self._matches
        directories = False
        for base, entries in _expand(glob, scan):
            real = scan.resolve(base or "/")
            for alias, is_link, entry in entries:
                match = known.get(alias)
                if match is None or match.entry != entry or entry == _UNKNOWN or is_link or match.real != real:
                    match = scan.matches.get(alias) or self._match(alias, real, entry, scan, is_link=is_link)
                    if match is None:
                        continue
                    if match.directories:
                        scan.directories.update(match.directories)
                    if stat.S_ISDIR(match.mode):
                        directories = True
                        _LOG.debug("%s is a directory, not a device; left out", alias)
                        continue
                found[alias] = match
        scan.matches.update(found)
        if directories and not found:
            scan.notes.append(f"{glob} matches a directory, which is not a device; name what lies in it: {glob}/*")
        elif not found:
            scan.notes.append(f"{glob} matches nothing now; what is plugged in later is found")
        return [found[alias] for alias in sorted(found, key=natural)]

    def _match(self, alias: str, real: str, entry: int, scan: _PathScan, *, is_link: bool) -> _Match | None:
        try:
            target = os.readlink(alias) if is_link else ""
            status = os.stat(alias)
        except OSError as error:
            if is_link:
                scan.directories.update(scan.follow(alias)[1])
            _LOG.debug("%s is left out: %s", alias, error.strerror)
            return None
        mode = status.st_mode
        seen = hash((mode, status.st_rdev, status.st_ino, status.st_dev, status.st_ctime_ns, target, real))
        known = self._matches.get(alias)
        if known is not None and known.seen == seen and known.entry == entry:
            return known
        numbers = (stat.S_IFMT(mode), status.st_rdev)
        if numbers not in scan.numa:
            scan.numa[numbers] = numa_of(mode, status.st_rdev, self._sysfs)
        if is_link:
            host, directories = scan.follow(alias)
        else:
            host, directories = os.path.join(real, os.path.basename(alias)), ()
        return _Match(alias, host, real, entry, seen, mode, scan.numa[numbers], directories, identity.token(status))


class GroupSource(PathSource):
    """The n-th matches of several globs together are one device, named after the first.

    Paths that were put together stay together while all of them are there. Where the globs match unequal numbers,
    paths whose wildcards match the same text (video1 and audio1) belong together, and the rest is left out.
    """

    _together: Sequence[tuple[str, ...]] = ()

    def _groups(self, scan: _PathScan) -> Iterable[tuple[_Match, ...]]:
        columns = [{match.alias: match for match in self._matching(glob, scan)} for glob in self.globs]
        counts = [len(column) for column in columns]
        groups = [
            tuple(columns[index][alias] for index, alias in enumerate(aliases))
            for aliases in self._together
            if all(alias in columns[index] for index, alias in enumerate(aliases))
        ]
        taken = [{group[index].alias for group in groups} for index in range(len(columns))]
        rest = [
            [match for alias, match in column.items() if alias not in used]
            for column, used in zip(columns, taken, strict=True)
        ]
        if len(set(counts)) > 1:
            groups += self._same_text(rest)
            if all(counts):
                spare = ", ".join(f"{count} of {glob}" for count, glob in zip(counts, self.globs, strict=True))
                scan.notes.append(f"unequal numbers of parts ({spare}); what is left over is left out")
        groups += zip(*rest, strict=False)
        groups.sort(key=lambda group: natural(group[0].alias))
        self._together = [tuple(match.alias for match in group) for group in groups]
        return groups

    def _same_text(self, rest: list[list[_Match]]) -> Iterator[tuple[_Match, ...]]:
        """Remove from `rest`, and yield, the paths whose wildcards match the same text."""
        by_text: list[dict[tuple[str, ...], _Match]] = []
        for glob, column in zip(self.globs, rest, strict=True):
            pattern = _captures(glob)
            found = ((pattern.fullmatch(match.alias), match) for match in column)
            by_text.append({text.groups(): match for text, match in found if text is not None})
        for text, first in list(by_text[0].items()):
            if text and all(text in column for column in by_text):
                group = (first, *(column[text] for column in by_text[1:]))
                for column, match in zip(rest, group, strict=True):
                    column.remove(match)
                yield group


def _expand(glob: str, scan: _PathScan) -> Iterator[tuple[str, Iterable[tuple[str, bool, int]]]]:
    """Yield by directory the paths that an absolute glob matches, as glob.glob does: path, is a symlink, inode.

    The directories that were read are added to `scan.directories`. The path of a glob without wildcards need not exist.
    """
    *steps, last = glob.strip("/").split("/")
    bases = [""]
    for step in steps:
        if _MAGIC.search(step):
            bases = [entry.path for base in bases for entry in _entries(base, step, scan) if entry.is_dir()]
        else:
            bases = [f"{base}/{step}" for base in bases]
    for base in bases:
        if _MAGIC.search(last):
            yield base, [(entry.path, entry.is_symlink(), entry.inode()) for entry in _entries(base, last, scan)]
        else:
            scan.directories.add(base or "/")
            path = f"{base}/{last}"
            yield base, [(path, os.path.islink(path), _UNKNOWN)]


def _entries(base: str, step: str, scan: _PathScan) -> list[os.DirEntry[str]]:
    fits = re.compile(translate(step)).match
    hidden = step.startswith(".")
    found: list[os.DirEntry[str]] = []
    try:
        with os.scandir(base or "/") as entries:
            found = [entry for entry in entries if fits(entry.name) and (hidden or entry.name[0] != ".")]
    except NotADirectoryError:
        return []
    except FileNotFoundError:
        pass
    except OSError as error:
        scan.notes.append(f"{base or '/'} cannot be read: {error.strerror}")
    scan.directories.add(base or "/")
    # The kubelet needs UTF-8, and a file's name may be any bytes: those that are no UTF-8 are surrogates here.
    return [entry for entry in found if entry.name.isascii() or not _SURROGATE.search(entry.name)]


def _captures(glob: str) -> re.Pattern[str]:
    """Return a pattern whose groups are what the wildcards of a glob match."""
    parts = re.split(r"(\*|\?|\[[!^]?\]?[^]/]*\])", glob)
    wild = (
        ("([^/]*)" if part == "*" else "([^/])") if index % 2 else re.escape(part) for index, part in enumerate(parts)
    )
    return re.compile("".join(wild), re.DOTALL)
