"""Devices that are paths: what a glob matches, or the n-th matches of several globs together.

A symlink is resolved on the host, and the alias is kept as the container's path and as the device's
name: /dev/serial/by-id/... is the same port tomorrow, /dev/ttyUSB0 is not. A device node is given to
containers as one; a plain file, a socket or a pipe is mounted (runtimes take only device nodes as
devices); a directory is not a device and is left out.
"""

from __future__ import annotations

import asyncio
import bisect
import hashlib
import logging
import os
import random
import re
import stat
import sys
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import translate
from typing import Final

from deviceplugin import filewatch, hooks, identity
from deviceplugin.device import NO_EDITS, ContainerEdits, Device, DeviceNode, Mount
from deviceplugin.source import DeviceSource

__all__ = ["GroupSource", "PathSource", "device_id", "numa_of"]

_LOG: Final = logging.getLogger(__name__)

LONGEST_ID: Final = 52
"""Characters of an id; leaves room for a replica's number within the kubelet's 63."""
RESCAN: Final = 30.0
"""Seconds, give or take a fifth, after which is looked again without any hint."""
SCAN_TIMEOUT: Final = 60.0
"""Seconds after which a look is given up (a network file system that hangs)."""
MAX_PAUSE: Final = 0.5
"""Seconds between looks under a storm of hints that change nothing."""

_UNKNOWN: Final = -1
"""Stands for the inode of a path whose directory was not read."""

_MAGIC: Final = re.compile(r"[*?[]")
_NUMBERS: Final = re.compile(r"([0-9]+)")
_PLAIN: Final = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9_.]|-(?!-))*(?<![-_.])")
_HASHED: Final = re.compile(r".*-[0-9a-f]{8}")


def device_id(path: str) -> str:
    """Return the id of the device at this path: readable, 52 characters at the most, never that of another path.

    /dev/ttyUSB0 is ttyUSB0, /dev/snd/pcmC0D0c is snd--pcmC0D0c; what does not fit or is not plain
    is shortened and ends in a hash.
    """
    inside = path.removeprefix("/dev/")
    steps = inside.strip("/").split("/")
    name = "--".join(steps)
    if inside != path and len(name) <= LONGEST_ID and all(map(_PLAIN.fullmatch, steps)) and not _HASHED.fullmatch(name):
        return name
    digest = hashlib.sha256(os.fsencode(path)).hexdigest()[:8]
    # The end of a long name tells more than its beginning.
    readable = re.sub(r"[^A-Za-z0-9_.]+", "-", name)[-(LONGEST_ID - 9) :].strip("-_.")
    return f"{readable or 'x'}-{digest}"


def numa_of(mode: int, rdev: int, sysfs: str = "/sys") -> int | None:
    """Return the NUMA node that a device node's hardware is close to, None if sysfs does not say.

    mode, rdev: st_mode and st_rdev of the node. The nearest ancestor in sysfs that names a node
    counts; -1 there means that it does not know.
    """
    if not (stat.S_ISCHR(mode) or stat.S_ISBLK(mode)):
        return None
    kind = "char" if stat.S_ISCHR(mode) else "block"
    root = os.path.realpath(sysfs)
    place = os.path.realpath(f"{root}/dev/{kind}/{os.major(rdev)}:{os.minor(rdev)}")
    while place.startswith(f"{root}/devices/"):
        try:
            with open(f"{place}/numa_node", encoding="ascii") as stream:
                node = int(stream.read())
        except (OSError, ValueError):
            node = -1
        if node >= 0:
            return node
        place = os.path.dirname(place)
    return None


@dataclass(frozen=True, slots=True)
class _Match:
    """A path that a glob matches, and what it led to when last looked at.

    real: the directory it is really in. entry: the inode that this directory names for it.
    seen: a hash of what stat says. directories: those that the chain of its symlinks runs through.
    identity: what it is, whatever its path (`deviceplugin.identity`).
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
class _Look:
    """One look at the file system."""

    thorough: bool
    devices: list[Device] = field(default_factory=list)
    directories: set[str] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)
    matches: dict[str, _Match] = field(default_factory=dict)
    real: dict[str, str] = field(default_factory=dict)
    numa: dict[tuple[int, int], int | None] = field(default_factory=dict)

    def resolve(self, directory: str) -> str:
        """Return where a directory really is; where its being elsewhere would show is watched from now on."""
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


class _WatchedPaths(DeviceSource):
    """What sources of paths have in common: looking, watching, looking again."""

    def __init__(
        self,
        globs: Sequence[str],
        *,
        permissions: str = "rw",
        resource: str = "",
        sysfs: str = "/sys",
        rescan: float = RESCAN,
    ) -> None:
        for glob in globs:
            if not glob.startswith("/"):
                raise ValueError(f"a glob of devices must be an absolute path, not {glob!r}")
        self.globs = tuple(globs)
        self.permissions = permissions
        self.notes: tuple[str, ...] = ()
        if resource:
            self.resource = resource
        self._sysfs = sysfs
        self._rescan = rescan
        self._matches: Mapping[str, _Match] = {}
        self._orders: dict[str, list[str]] = {}
        self._devices: Mapping[str, tuple[tuple[_Match, ...], Device]] = {}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(repr, self.globs))})"

    def look(self) -> list[Device]:
        """Return the devices that are there now; blocks."""
        return self._look().devices

    async def watch(self) -> AsyncIterator[Sequence[Device]]:
        """Yield the devices now and whenever one comes, goes, or leads elsewhere."""
        watched = {_first_directory(glob) for glob in self.globs}
        listed: list[Device] | None = None
        hinted = thorough = True
        pause = 0.0
        with filewatch.shared().watch(watched) as watch:
            while True:
                began = time.monotonic()
                look = await hooks.call(
                    f"looking for {', '.join(self.globs)}", self._look, thorough, timeout=SCAN_TIMEOUT
                )
                took = time.monotonic() - began
                self._say(look.notes)
                fresh = look.directories - watched
                if look.directories != watched:
                    watched = look.directories
                    watch.set(watched)
                if look.devices != listed:
                    listed = look.devices
                    yield listed
                    pause = 0.0
                elif hinted:
                    pause = min(MAX_PAUSE, max(took, 2 * pause))
                thorough = False
                if fresh:  # something may have changed there before it was watched
                    continue
                if pause:
                    # A directory full of other people's churn must not keep a CPU busy.
                    await asyncio.sleep(pause)
                hinted = await watch.wait(self._rescan * random.uniform(0.8, 1.2))  # noqa: S311  # no secret
                if not hinted:
                    thorough, pause = True, 0.0

    def _look(self, thorough: bool = True) -> _Look:
        """Look at the file system once.

        Not thorough, a path that its directory names with the inode that it had before is taken to
        be what it was; where inodes are not used again (devtmpfs) that is a fact.
        """
        look = _Look(thorough)
        groups = self._groups(look)
        devices: dict[str, tuple[tuple[_Match, ...], Device]] = {}
        for matches in groups:
            alias = matches[0].alias
            known = self._devices.get(alias)
            if known is None or known[0] != matches:
                known = matches, self._device(matches)
            devices[alias] = known
            look.devices.append(known[1])
        self._matches, self._devices = look.matches, devices
        return look

    def _groups(self, look: _Look) -> Iterable[tuple[_Match, ...]]:
        raise NotImplementedError

    def _device(self, matches: tuple[_Match, ...]) -> Device:
        nodes: list[DeviceNode] = []
        mounts: list[Mount] = []
        for match in matches:
            some_nodes, some_mounts = match.edits(self.permissions)
            nodes += some_nodes
            mounts += some_mounts
        numa = sorted({match.numa for match in matches if match.numa is not None})
        return Device(
            device_id(matches[0].alias),
            nodes=nodes,
            numa=numa[0] if len(numa) == 1 else (tuple(numa) or None),
            edits=ContainerEdits(mounts=mounts) if mounts else NO_EDITS,
            identity=matches[0].identity,
        )

    def _matching(self, glob: str, look: _Look) -> list[_Match]:
        """Return what a glob matches now, in the order of people: 2 before 10."""
        found: dict[str, _Match] = {}
        known = {} if look.thorough else self._matches
        skipped = 0
        for base, entries in _expand(glob, look):
            real = look.resolve(base or "/")
            for alias, is_link, entry in entries:
                match = known.get(alias)
                if match is None or match.entry != entry or entry == _UNKNOWN or is_link or match.real != real:
                    match = look.matches.get(alias) or self._match(alias, real, entry, look, is_link=is_link)
                    if match is None:
                        continue
                    if match.directories:
                        look.directories.update(match.directories)
                    if stat.S_ISDIR(match.mode):
                        skipped += 1
                        _LOG.debug("%s is a directory, not a device; left out", alias)
                        continue
                found[alias] = match
        look.matches.update(found)
        if skipped and not found:
            look.notes.append(f"{glob} matches a directory, which is not a device; name what lies in it: {glob}/*")
        elif not found:
            look.notes.append(f"{glob} matches nothing now; what is plugged in later is found")
        order = self._orders[glob] = _ordered(self._orders.get(glob, []), found)
        return [found[alias] for alias in order]

    def _match(self, alias: str, real: str, entry: int, look: _Look, *, is_link: bool) -> _Match | None:
        try:
            target = os.readlink(alias) if is_link else ""
            status = os.stat(alias)
        except OSError as error:
            if is_link:
                look.directories.update(look.follow(alias)[1])
            _LOG.debug("%s is left out: %s", alias, error.strerror)
            return None
        mode = status.st_mode
        seen = hash((mode, status.st_rdev, status.st_ino, status.st_dev, status.st_ctime_ns, target, real))
        known = self._matches.get(alias)
        if known is not None and known.seen == seen and known.entry == entry:
            return known
        numbers = (stat.S_IFMT(mode), status.st_rdev)
        if numbers not in look.numa:
            look.numa[numbers] = numa_of(mode, status.st_rdev, self._sysfs)
        if is_link:
            host, directories = look.follow(alias)
        else:
            host, directories = os.path.join(real, os.path.basename(alias)), ()
        if host == alias:
            host = alias  # one string for both
        return _Match(alias, host, real, entry, seen, mode, look.numa[numbers], directories, identity.token(status))

    def _say(self, notes: list[str]) -> None:
        """Log what is new about the globs, each once."""
        for note in notes:
            if note not in self.notes:
                _LOG.info("%s", note)
        self.notes = tuple(notes)


class PathSource(_WatchedPaths):
    """Each path that a glob matches is a device.

    Args:
        glob: an absolute path; `*`, `?` and `[abc]` match within one directory.
        permissions: what a container may do with the node, of r, w and m.
        resource: the resource's name, where the source is used by itself.
        sysfs: where sysfs is.
        rescan: seconds after which is looked again without any hint.

    """

    def __init__(
        self,
        glob: str,
        *,
        permissions: str = "rw",
        resource: str = "",
        sysfs: str = "/sys",
        rescan: float = RESCAN,
    ) -> None:
        super().__init__((glob,), permissions=permissions, resource=resource, sysfs=sysfs, rescan=rescan)

    def _groups(self, look: _Look) -> Iterable[tuple[_Match, ...]]:
        return [(match,) for match in self._matching(self.globs[0], look)]


class GroupSource(_WatchedPaths):
    """The n-th matches of several globs together are one device, named after the first.

    What once was put together stays together while all of it is there. Where the globs match
    unequal numbers, paths whose wildcards stand for the same text (video1 and audio1) belong
    together, and what is left over is left out.
    """

    def __init__(
        self,
        globs: Sequence[str],
        *,
        permissions: str = "rw",
        resource: str = "",
        sysfs: str = "/sys",
        rescan: float = RESCAN,
    ) -> None:
        super().__init__(globs, permissions=permissions, resource=resource, sysfs=sysfs, rescan=rescan)
        self._patterns = [_captures(glob) for glob in self.globs]
        self._together: Mapping[str, tuple[str, ...]] = {}

    def _groups(self, look: _Look) -> Iterable[tuple[_Match, ...]]:
        columns = [{match.alias: match for match in self._matching(glob, look)} for glob in self.globs]
        counts = [len(column) for column in columns]
        groups = [
            tuple(columns[index][alias] for index, alias in enumerate(aliases))
            for aliases in self._together.values()
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
                look.notes.append(f"unequal numbers of parts ({spare}); what is left over is left out")
        groups += zip(*rest, strict=False)
        groups.sort(key=lambda group: _order(group[0].alias))
        self._together = {group[0].alias: tuple(match.alias for match in group) for group in groups}
        return groups

    def _same_text(self, rest: list[list[_Match]]) -> Iterator[tuple[_Match, ...]]:
        """Take out of `rest` what belongs together by what the wildcards stand for."""
        by_text: list[dict[tuple[str, ...], _Match]] = []
        for pattern, column in zip(self._patterns, rest, strict=True):
            found = ((pattern.fullmatch(match.alias), match) for match in column)
            by_text.append({text.groups(): match for text, match in found if text is not None})
        for text, first in list(by_text[0].items()):
            if text and all(text in column for column in by_text):
                group = (first, *(column[text] for column in by_text[1:]))
                for column, match in zip(rest, group, strict=True):
                    column.remove(match)
                yield group


def _expand(glob: str, look: _Look) -> Iterator[tuple[str, Iterable[tuple[str, bool, int]]]]:
    """Yield by directory what an absolute glob matches, as glob.glob does, whether it is a symlink, and its inode.

    The directories that it runs through go to `look.directories`. What a glob without wildcards
    names need not be there.
    """
    *steps, last = glob.strip("/").split("/")
    bases = [""]
    for step in steps:
        if _MAGIC.search(step):
            bases = [entry.path for base in bases for entry in _entries(base, step, look) if entry.is_dir()]
        else:
            bases = [f"{base}/{step}" for base in bases]
    for base in bases:
        if _MAGIC.search(last):
            yield base, [(entry.path, entry.is_symlink(), entry.inode()) for entry in _entries(base, last, look)]
        else:
            look.directories.add(base or "/")
            path = f"{base}/{last}"
            yield base, [(path, os.path.islink(path), _UNKNOWN)]


def _entries(base: str, step: str, look: _Look) -> list[os.DirEntry[str]]:
    fits = re.compile(translate(step)).match
    hidden = step.startswith(".")
    try:
        with os.scandir(base or "/") as entries:
            found = [entry for entry in entries if fits(entry.name) and (hidden or entry.name[0] != ".")]
    except NotADirectoryError:
        return []
    except FileNotFoundError:
        look.directories.add(base or "/")
        return []
    except OSError as error:
        look.directories.add(base or "/")
        look.notes.append(f"{base or '/'} cannot be read: {error.strerror}")
        return []
    look.directories.add(base or "/")
    return [entry for entry in found if entry.name.isascii() or _is_text(entry.name)]


def _is_text(name: str) -> bool:
    """Whether a name can be said to the kubelet at all; a file's name may be any bytes."""
    try:
        name.encode()
    except UnicodeEncodeError:
        _LOG.debug("%r is left out: its name is not UTF-8", name)
        return False
    return True


def _first_directory(glob: str) -> str:
    """Return the directory that a glob looks into first."""
    first = _MAGIC.search(glob)
    return os.path.dirname(glob[: first.start()] if first else glob) or "/"


def _ordered(before: list[str], now: Mapping[str, object]) -> list[str]:
    """Return these paths in the order of people; most of them are in order already."""
    order = [alias for alias in before if alias in now]
    new = now.keys() - set(order)
    if len(new) > 100:
        return sorted(now, key=_order)
    for alias in new:
        bisect.insort(order, alias, key=_order)
    return order


def _order(path: str) -> tuple[str | int, ...]:
    return tuple(int(part) if index % 2 else part for index, part in enumerate(_NUMBERS.split(path)))


def _captures(glob: str) -> re.Pattern[str]:
    """Return a pattern whose groups are what the wildcards of a glob stand for."""
    parts = re.split(r"(\*|\?|\[[!^]?\]?[^]/]*\])", glob)
    wild = (
        ("([^/]*)" if part == "*" else "([^/])") if index % 2 else re.escape(part) for index, part in enumerate(parts)
    )
    return re.compile("".join(wild), re.DOTALL)
