"""Defines a source that lists devices by their paths: each match of a glob is a device.

With several globs, matches that belong together form a device (`pairing`). If the matched path is a symlink, the
device's id is made from the link's path, because /dev/serial/by-id/... always leads to the same USB stick, but
/dev/ttyUSB0 does not. The container runtime resolves the symlink each time that it creates a container (containerd 2.1,
internal/cri/opts/spec_linux_opts.go: WithDevices; CRI-O, internal/factory/container/device_linux.go:
specAddContainerConfigDevices), so a restarted container gets the link's new target. No runtime resolves a symlink in a
CDI file (`dra_bridge.driver.claim_files`). A plain file, a socket or a pipe is mounted into the container, because
runtimes accept only device nodes as devices. A directory is no device.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import translate
from typing import Final

from deviceplugin import identity, looked_at
from deviceplugin.config.types import PartConfig
from deviceplugin.device import NO_EDITS, ContainerEdits, Device, DeviceNode, Mount, natural
from deviceplugin.sources.pairing import Part, paired
from deviceplugin.sources.scanned import Scan, ScannedSource
from deviceplugin.sysfs import ROOT, device_above, directory_of, numa_node_above

_LOG: Final = logging.getLogger(__name__)
LONGEST_ID: Final = 52
"""Maximum characters of a device's id, so that the id of a replica (with a suffix) has at most the kubelet's 63
characters."""
_MAGIC: Final = re.compile(r"[*?[]")
_WILDCARD: Final = re.compile(r"(\*|\?|\[!?\]?[^]/]*\])")
_SURROGATE: Final = re.compile("[\ud800-\udfff]")
_PLAIN: Final = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9_.]|-(?!-))*(?<![-_.])")
_HASHED: Final = re.compile(r".*-[0-9a-f]{8}")


def device_id(path: str) -> str:
    """Return the id of the device at this path: readable, at most 52 characters, and different for each path.

    The id of /dev/ttyUSB0 is ttyUSB0, the id of /dev/snd/pcmC0D0c is snd--pcmC0D0c. The id ends with a hash if the path
    is outside of /dev, is too long, or contains characters that are not allowed in ids. If the path is too long, the id
    lacks the directories and the middle of the file name.
    """
    inside = path.removeprefix("/dev/")
    steps = inside.strip("/").split("/")
    name = "--".join(steps)
    if inside != path and len(name) <= LONGEST_ID and all(map(_PLAIN.fullmatch, steps)) and not _HASHED.fullmatch(name):
        return name
    most = LONGEST_ID - 9
    readable = plain_text(name)
    if len(readable) > most:
        readable = shortened(plain_text(steps[-1].removeprefix("usb-")), most)
    return f"{readable or 'x'}-{digest(path)}"


def digest(text: str) -> str:
    """Return the hash of a text for the end of a shortened id: eight hexadecimal digits."""
    return hashlib.sha256(os.fsencode(text)).hexdigest()[:8]


def plain_text(text: str) -> str:
    """Return a text with hyphens in place of the characters that are not allowed in ids."""
    return re.sub(r"[^A-Za-z0-9_.]+", "-", text).strip("-_.")


def shortened(text: str, most: int) -> str:
    """Return a text of at most `most` characters: the middle of a longer text is removed.

    The middle is removed, because a link name of udev begins with the maker and the product, and ends with the serial
    number and the interface.
    """
    if len(text) <= most:
        return text
    end = text[-most * 3 // 5 :]
    # The kept beginning and end are cut to whole words, if this removes less than half of them.
    if words := re.match(rf".{{,{len(end) // 2}}}?[-_.](.+)", end):
        end = words[1]
    begin = text[: most - len(end) - 1]
    words = re.match(rf"(.{{{len(begin) // 2},}})[-_.]", begin)
    return f"{words[1] if words else begin}-{end}"


def filled(text: str, device: str, name: str, path: str = "") -> str:
    """Return a text of the config with the placeholders {id}, {name} and {path} replaced by the arguments."""
    return text.replace("{id}", device).replace("{name}", name).replace("{path}", path)


def _directory(mode: int, rdev: int, root: str) -> str | None:
    """Return the sysfs directory of a device node with this st_mode and st_rdev; None if it is no device node."""
    if not (stat.S_ISCHR(mode) or stat.S_ISBLK(mode)):
        return None
    return directory_of("char" if stat.S_ISCHR(mode) else "block", f"{os.major(rdev)}:{os.minor(rdev)}", root)


def numa_of(mode: int, rdev: int, sysfs: str = ROOT) -> int | None:
    """Return the NUMA node of a device node with this st_mode and st_rdev; None if sysfs shows none."""
    root = os.path.realpath(sysfs)
    directory = _directory(mode, rdev, root)
    return numa_node_above(directory, f"{root}/devices/") if directory is not None else None


def hardware_of(mode: int, rdev: int, sysfs: str = ROOT) -> str:
    """Return the sysfs directory of a device node's USB device or PCI function; "" if sysfs shows neither."""
    directory = _directory(mode, rdev, sysfs)
    return (device_above(directory) or "") if directory is not None else ""


@dataclass(frozen=True, slots=True)
class _Match:
    """A path that a glob matches (`alias`), and the target of this path (`host`) at the last scan.

    seen: a hash of the target's status. identity: the target's identity token. hardware: the sysfs directory of the
    target's USB device or PCI function, "" if there is none. container: the configured path in the container; "" if it
    is the same as `alias`.
    """

    alias: str
    host: str
    seen: int
    mode: int
    numa: int | None
    identity: str
    hardware: str = ""
    container: str = ""


@dataclass(slots=True)
class _PathScan(Scan):
    """A running scan. real: for each directory that was resolved in this scan, its path without symlinks."""

    real: dict[str, str] = field(default_factory=dict)

    def resolve(self, directory: str) -> str:
        """Return a directory's path without symlinks.

        Add each directory whose change can change the result to `directories`.
        """
        real = self.real.get(directory)
        if real is None:
            looked_at.at(directory)
            real = self.real[directory] = os.path.realpath(directory)
            if real != directory:
                self.directories.add(real)
                while directory != "/":
                    if os.path.islink(directory):
                        self.directories.add(os.path.dirname(directory))
                    directory = os.path.dirname(directory)
        return real

    def follow(self, path: str) -> str:
        """Return the target of a path after all symlinks.

        Add each directory whose change can change the result to `directories`.
        """
        for _ in range(40):  # The kernel also follows at most 40 symlinks.
            directory, name = os.path.split(path)
            directory = self.resolve(directory)
            self.directories.add(directory)
            path = os.path.join(directory, name)
            try:
                path = os.path.normpath(os.path.join(directory, os.readlink(path)))
            except OSError:  # The path is no symlink, or does not exist.
                break
        return path


class PathSource(ScannedSource):
    """Lists each match of a glob as a device. With several globs, matches are grouped to devices (`pairing`).

    A device's id is made from its first path. With several globs, a path that is in no complete group belongs to no
    device. A complete group has one match of each glob that is not optional.

    parts: globs of absolute paths; a `PartConfig` instead of a glob can set another path in the container, or mark a
    path as optional. `*`, `?` and `[abc]` match within one directory. sysfs: the directory where sysfs is mounted.
    permissions, resource, rescan: see `ScannedSource`.
    """

    def __init__(
        self,
        *parts: str | PartConfig,
        permissions: str = "rw",
        resource: str = "",
        sysfs: str = "/sys",
        rescan: float = 30.0,
    ) -> None:
        super().__init__(permissions, resource, rescan)
        made = [PartConfig(path=part) if isinstance(part, str) else part for part in parts]
        self._parts = sorted(made, key=lambda part: part.optional)
        """The globs for the paths of a device. The first glob is not optional, because its match gives the device's id.
        """
        self.globs = tuple(part.path for part in self._parts)
        for glob in self.globs:
            if not glob.startswith("/"):
                raise ValueError(f"a glob of devices must be an absolute path, not {glob!r}")
            if any(part.startswith("[^") for part in _WILDCARD.findall(glob)):
                raise ValueError(f"a glob of devices has [! for any other character, not [^: {glob!r}")
        self._sysfs = sysfs
        self._devices: dict[tuple[_Match, ...], Device] = {}
        """The devices of the last scan. The key of each device is the tuple of its paths."""

    def __repr__(self) -> str:
        return f"PathSource({', '.join(map(repr, self.globs))})"

    def _scan(self) -> Scan:
        scan = _PathScan()
        groups = self._groups(scan)
        self._devices = {matches: self._devices.get(matches) or self._device(matches) for matches in groups}
        scan.devices = list(self._devices.values())
        scan.seen = tuple(match.seen for matches in groups for match in matches)
        return scan

    def _groups(self, scan: _PathScan) -> list[tuple[_Match, ...]]:
        """Return a list of devices, each as a tuple of its paths."""
        before = {match.alias: match for matches in self._devices for match in matches}
        columns = [self._matching(part, scan, before) for part in self._parts]
        if len(columns) == 1:
            return [(match,) for match in columns[0].values()]
        matched = [
            [Part(match.alias, match.hardware, _text(glob, match.alias)) for match in column.values()]
            for glob, column in zip(self.globs, columns, strict=True)
        ]
        pairing = paired(matched, [part.optional for part in self._parts])
        scan.notes += pairing.notes()
        by_alias = {alias: match for column in columns for alias, match in column.items()}
        groups = [tuple(by_alias[part.path] for part in group if part is not None) for group, _ in pairing.groups]
        return sorted(groups, key=lambda group: natural(group[0].alias))

    def _device(self, matches: tuple[_Match, ...]) -> Device:
        nodes, mounts, named = [], [], device_id(matches[0].alias)
        for match in matches:
            inside = filled(match.container, named, os.path.basename(match.alias)) or match.alias
            if stat.S_ISCHR(match.mode) or stat.S_ISBLK(match.mode):
                target = "" if match.alias == match.host else match.host
                container = "" if inside == match.alias else inside
                nodes.append(DeviceNode(match.alias, container, self.permissions, target))
            else:
                mounts.append(Mount(match.host, inside, readonly="w" not in self.permissions))
        numa = sorted({match.numa for match in matches if match.numa is not None})
        return Device(
            named,
            nodes=nodes,
            numa=numa[0] if len(numa) == 1 else (tuple(numa) or None),
            edits=ContainerEdits(mounts=mounts) if mounts else NO_EDITS,
            identity=matches[0].identity,
        )

    def _matching(self, part: PartConfig, scan: _PathScan, before: Mapping[str, _Match]) -> dict[str, _Match]:
        """Return a `_Match` for each path that a glob matches now, in the natural order of the paths (2 before 10)."""
        glob, inside = part.path, part.container or ""
        matches = [self._match(alias, inside, scan, before.get(alias)) for alias in _expand(glob, scan)]
        by_alias = {match.alias: match for match in matches if match is not None and not stat.S_ISDIR(match.mode)}
        if not by_alias and any(matches):
            scan.notes.append(f"{glob} matches a directory, which is not a device; name what lies in it: {glob}/*")
        elif not by_alias and not part.optional:
            scan.notes.append(f"{glob} matches nothing now; what is plugged in later is found")
        return {alias: by_alias[alias] for alias in sorted(by_alias, key=natural)}

    def _match(self, alias: str, container: str, scan: _PathScan, before: _Match | None) -> _Match | None:
        """Return the `_Match` of a path: `before` if nothing has changed; None if the path has no target."""
        host = scan.follow(alias)
        try:
            status = looked_at.stat(alias)
        except OSError as error:
            _LOG.debug("%s is left out: %s", alias, error.strerror)
            return None
        mode = status.st_mode
        if stat.S_ISDIR(mode):
            _LOG.debug("%s is a directory, not a device; left out", alias)
        seen = hash((mode, status.st_rdev, status.st_ino, status.st_dev, status.st_ctime_ns))
        if before is not None and (before.host, before.seen) == (host, seen):
            return before
        numa = numa_of(mode, status.st_rdev, self._sysfs)
        hardware = hardware_of(mode, status.st_rdev, self._sysfs) if len(self.globs) > 1 else ""
        return _Match(alias, host, seen, mode, numa, identity.token(status), hardware, container)


def _expand(glob: str, scan: _PathScan) -> list[str]:
    """Return the paths that an absolute glob matches. A path without wildcards is returned even if it does not exist.

    All directories that this function reads are added to `scan.directories`.
    """
    *steps, last = glob.strip("/").split("/")
    bases = [""]
    for step in steps:
        if _MAGIC.search(step):
            bases = [entry.path for base in bases for entry in _entries(base, step, scan) if os.path.isdir(entry)]
        else:
            bases = [f"{base}/{step}" for base in bases]
    for base in bases:
        scan.resolve(base or "/")
    if _MAGIC.search(last):
        return [entry.path for base in bases for entry in _entries(base, last, scan)]
    scan.directories.update(base or "/" for base in bases)
    return [f"{base}/{last}" for base in bases]


def _entries(base: str, step: str, scan: _PathScan) -> list[os.DirEntry[str]]:
    fits = re.compile(translate(step)).match
    hidden = step.startswith(".")
    listed: list[os.DirEntry[str]] = []
    looked_at.at(base or "/")
    try:
        with os.scandir(base or "/") as entries:
            listed = [entry for entry in entries if fits(entry.name) and (hidden or entry.name[0] != ".")]
    except NotADirectoryError:
        return []
    except FileNotFoundError:
        pass
    except OSError as error:
        scan.notes.append(f"{base or '/'} cannot be read: {error.strerror}")
    scan.directories.add(base or "/")
    # File names that are not UTF-8 (Python represents them with surrogates) are left out: the kubelet requires UTF-8.
    return [entry for entry in listed if entry.name.isascii() or not _SURROGATE.search(entry.name)]


def _text(glob: str, path: str) -> tuple[str, ...]:
    """Return the texts in a path that the wildcards of a glob match."""
    found = _captures(glob).fullmatch(path)
    return found.groups() if found is not None else ()


@functools.cache
def _captures(glob: str) -> re.Pattern[str]:
    """Convert a glob to a regular expression that has a group for each wildcard."""
    parts = _WILDCARD.split(glob)
    wild = (
        ("([^/]*)" if part == "*" else "([^/])") if index % 2 else re.escape(part) for index, part in enumerate(parts)
    )
    return re.compile("".join(wild), re.DOTALL)
