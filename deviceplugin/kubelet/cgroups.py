"""Whether a process of a pod can still run: pod cgroups, and pod directories where cgroups cannot be seen.

The kubelet makes a pod's cgroup before the pod's sandbox and removes it after the pod has terminated (kubelet
1.36, cm/pod_container_manager_linux.go). The cgroup lies below a directory `kubepods` (cgroupfs driver:
`kubepods/burstable/pod<uid>`; systemd driver: `kubepods.slice/kubepods-burstable.slice/
kubepods-burstable-pod<uid, - as _>.slice`), which may itself lie below the kubelet's cgroup root.

A tree may belong to another kubelet, or be unused (cgroupsPerQOS or cgroupRoot were changed). An agent in a pod of its
kubelet checks that: the tree must contain its own pod.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

_SYSTEMD: Final = re.compile(r"(?:.*-)?pod(.+)\.slice")
_KUBEPODS: Final = re.compile(r"(?:.*-)?kubepods(?:\.slice)?")
_ETC_HOSTS: Final = re.compile(r".*/pods/([^/]+)/etc-hosts")
_DEPTH: Final = 6
"""Levels below the cgroup file system in which `kubepods` is searched."""
TREES: Final = 0.3
"""Seconds for which trees that were found are not searched again, which takes longer than reading them.

A kubelet that comes with another tree takes longer to start a pod there, to have it deleted by force, and to give its
device away again.
"""


@dataclass(frozen=True, slots=True)
class PodProcesses:
    """The pods with processes at one moment, by UID.

    running: pods with a process in their cgroup; None if no cgroup tree of this kubelet is visible. directories: pods
    with a directory; None if these are not visible. empty: pods whose cgroup has no process. paths: each pod's cgroups.
    """

    running: frozenset[str] | None = None
    directories: frozenset[str] | None = None
    empty: frozenset[str] = frozenset()
    paths: Mapping[str, tuple[str, ...]] = field(default_factory=dict, compare=False, repr=False)

    def may_run(self, pod_uid: str) -> str:
        """Return why a process of this pod may still run, as text; "" if none can.

        Without cgroups a pod counts as running while its directory exists. That does not distinguish a completed pod
        from a pod that was deleted by force and still runs.
        """
        if self.running is not None:
            return "processes of its pod run" if pod_uid in self.running else ""
        if self.directories is not None:
            return "cgroups are not visible, and its pod's directory exists" if pod_uid in self.directories else ""
        return "neither cgroups nor pod directories are visible"


class ContainerCgroup(NamedTuple):
    """A cgroup below a pod's with a process in it. made: when it was made, or changed last, in Unix seconds."""

    name: str
    made: float


class PodReader:
    """Reads which pods' processes may run: from cgroups, or from pod directories if no cgroups are visible. Blocks.

    cgroups: the host's `/sys/fs/cgroup`. believe_checkpoint: without visible cgroups no pod counts as running. A device
    plugin alone may do so: the kubelet itself gives its devices away by the checkpoint and no other evidence.
    """

    def __init__(self, kubelet_root: Path, cgroups: Path, *, believe_checkpoint: bool) -> None:
        self.own_pod: Final = own_pod(kubelet_root)
        self.kubelet_root: Final = kubelet_root
        self._cgroups = cgroups
        self._believe_checkpoint = believe_checkpoint
        self._cgroups_seen = False
        self.seen: Mapping[str, float] = {}
        """Since when each pod that runs has been seen to run (monotonic seconds), by UID."""
        self._paths: Mapping[str, tuple[str, ...]] = {}
        self._trees: Sequence[str] = ()
        self._searched = -math.inf
        """When the trees were searched (monotonic seconds)."""

    def read(self) -> PodProcesses:
        """Return the pods with processes now."""
        if (seen := self._read_cgroups()) is not None:
            self._cgroups_seen = True
            return seen
        if self._cgroups_seen:
            return PodProcesses()  # they are there, and cannot be read now
        if self._believe_checkpoint:
            return PodProcesses(frozenset())
        return PodProcesses(None, read_directories(self.kubelet_root))

    def in_cgroups(self) -> frozenset[str] | None:
        """Return the UIDs of pods with a process in their cgroup; None if no cgroups are visible."""
        seen = self._read_cgroups()
        return None if seen is None else seen.running

    def _read_cgroups(self) -> PodProcesses | None:
        now, before = time.monotonic(), self.seen
        if now - self._searched >= TREES or not all(map(os.path.isdir, self._trees)):
            self._trees, self._searched = cgroup_trees(self._cgroups), now
        seen = pod_cgroups(self._trees, self.own_pod)
        if seen is None:
            self._searched = -math.inf
        if seen is not None and seen.running is not None:
            self.seen = {uid: before.get(uid, now) for uid in seen.running}
        self._paths = seen.paths if seen is not None else {}
        return seen

    def may_exist(self, pod_uid: str) -> bool:
        """Return whether a pod may have a cgroup; quick. It has none if its last known cgroups are gone."""
        paths = self._paths.get(pod_uid)
        return paths is None or not all(map(_is_gone, paths))

    def containers(self, pod_uid: str) -> list[ContainerCgroup] | None:
        """Return the cgroups of a pod's containers and sandbox that have processes; None if they cannot be told.

        Raises OSError: a part of the tree cannot be read.
        """
        paths = [path for tree in _trees(str(self._cgroups)) for uid, path in _pods(tree) if uid == pod_uid]
        if not paths or any(_text(path, "cgroup.procs") for path in paths):
            return None  # not visible, or a process is in none of them
        below = [directory for path in paths for directory in _subdirectories(path)]
        return [ContainerCgroup(name, os.stat(path).st_ctime) for name, path in below if _populated(path)]

    def running(self) -> frozenset[str]:
        """Return `in_cgroups`, or no pod. Raises OSError: cgroups were visible before, and cannot be read now."""
        running = self.in_cgroups()
        if running is None and self._cgroups_seen:
            raise OSError(f"pod cgroups in {self._cgroups} cannot be read now")
        self._cgroups_seen = running is not None
        return running or frozenset()

    def missing(self) -> str:
        """Return what cannot be read of this node's pods, and the consequences, for the log; "" if nothing."""
        if self.in_cgroups() is not None:
            return ""
        what = f"no pod cgroups (kubepods) of this kubelet are visible in {self._cgroups}"
        if self._believe_checkpoint:
            return f"{what}: a device comes free when the kubelet counts its pod as ended, even if its containers hang"
        if read_directories(self.kubelet_root) is not None:
            return f"{what}: a device comes free only when its pod is deleted, not when it has completed"
        return (
            f"{what}, nor pod directories in {self.kubelet_root / 'pods'}: "
            "no device that a pod holds ever comes free; mount either, read-only"
        )


def pod_cgroups(trees: Sequence[str], own: str = "") -> PodProcesses | None:
    """Return the pods with and without a process in their cgroup; None if invisible. own: our pod's UID or ""."""
    runs: dict[str, bool] = {}
    paths: dict[str, tuple[str, ...]] = {}
    try:
        for tree in trees:
            for uid, path in _pods(tree):
                runs[uid] = runs.get(uid, False) or _populated(path)
                paths[uid] = (*paths.get(uid, ()), path)
    except OSError:  # a part of the tree cannot be read
        return None
    if not trees or (own and not runs.get(own)):
        return None
    running = frozenset(uid for uid, populated in runs.items() if populated)
    return PodProcesses(running, empty=frozenset(runs.keys() - running), paths=paths)


def cgroup_trees(root: Path) -> list[str]:
    """Return the directories `kubepods`; of cgroup v1 those of the hierarchy `pids`, or the first that has any.

    There are none if a part of the tree cannot be read.
    """
    with contextlib.suppress(OSError):
        return _trees(str(root))
    return []


def _trees(root: str) -> list[str]:
    if os.path.exists(os.path.join(root, "cgroup.controllers")):
        return _kubepods(root)
    hierarchies = sorted(_subdirectories(root), key=lambda named: (named[0] != "pids", named))
    return next((trees for _, path in hierarchies if (trees := _kubepods(path))), [])


def _kubepods(root: str) -> list[str]:
    trees: list[str] = []
    level = [root]
    for _ in range(_DEPTH):
        below: list[str] = []
        for directory in level:
            for name, path in _subdirectories(directory):
                (trees if _KUBEPODS.fullmatch(name) else below).append(path)
        level = below
    return trees


def _pods(directory: str) -> Iterator[tuple[str, str]]:
    """Yield UID and path of the pod cgroups in a `kubepods` tree: on its first level, or in a QoS class."""
    for name, path in _subdirectories(directory):
        if (match := _SYSTEMD.fullmatch(name)) is not None:
            yield match[1].replace("_", "-"), path
        elif name.startswith("pod"):
            yield name.removeprefix("pod"), path
        elif "burstable" in name or "besteffort" in name:
            yield from _pods(path)


def _is_gone(path: str) -> bool:
    """Return whether a cgroup was removed: it does not exist, and its parent does."""
    try:
        os.stat(path)
    except FileNotFoundError:
        return os.path.isdir(os.path.dirname(path))
    except OSError:
        return False
    return False


def _populated(path: str) -> bool:
    """Return whether a pod's cgroup has a process in it or below it; True if that cannot be read.

    Version 2 has cgroup.events. In version 1 the controller `pids` counts the processes of the whole subtree. Another
    controller has only cgroup.procs, which leaves out processes of other PID namespaces (cgroup-v1.c:
    pidlist_array_load), so an agent in a container sees none of other pods there. So a container's cgroup counts
    there, although the runtime sometimes fails to remove it after its last process.
    """
    try:
        if (events := _text(path, "cgroup.events")) is not None:
            return "populated 0" not in events
        if (count := _text(path, "pids.current")) is not None:
            return count.strip() != "0"
        if _text(path, "cgroup.procs"):
            return True
    except OSError:
        return os.path.isdir(path)
    return bool(_subdirectories(path))


def _text(directory: str, name: str) -> str | None:
    try:
        with open(os.path.join(directory, name), encoding="ascii") as file:
            return file.read()
    except FileNotFoundError:  # the cgroup is gone, or has no such file
        return None


def _subdirectories(directory: str) -> list[tuple[str, str]]:
    try:
        with os.scandir(directory) as entries:
            return [(entry.name, entry.path) for entry in entries if entry.is_dir(follow_symlinks=False)]
    except FileNotFoundError:  # it has just been removed
        return []


def read_directories(kubelet_root: Path) -> frozenset[str] | None:
    """Return the UIDs of pods with a directory under the kubelet's root; None if that is invisible."""
    try:
        return frozenset(os.listdir(kubelet_root / "pods"))
    except OSError:
        return None


def own_pod(kubelet_root: Path, mounts: str = "/proc/self/mountinfo") -> str:
    """Return the UID of this process's pod; "" if it is in no pod of this kubelet.

    The kubelet mounts `<root>/pods/<uid>/etc-hosts` into each container (kubelet 1.36, kubelet_pods.go: makeMounts).
    """
    try:
        with open(mounts, encoding="utf-8", errors="surrogateescape") as file:
            lines = [line.split(" ") for line in file]
    except OSError:
        return ""
    for fields in lines:
        match = _ETC_HOSTS.fullmatch(fields[3]) if len(fields) > 4 and fields[4] == "/etc/hosts" else None
        if match is not None and os.path.isdir(kubelet_root / "pods" / match[1]):
            return match[1]
    return ""
