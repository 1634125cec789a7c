"""Reads whether a process of a pod may still run, from pods' cgroups, or from pod directories if no cgroup is visible.

The kubelet creates a pod's cgroup before the pod's sandbox and removes the cgroup after the pod has terminated (kubelet
1.36, cm/pod_container_manager_linux.go). The cgroup lies below a directory `kubepods` (cgroupfs driver:
`kubepods/burstable/pod<uid>`; systemd driver:
`kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod<uid, - as _>.slice`). The directory `kubepods` may
itself lie below the kubelet's cgroup root.

A directory `kubepods` may belong to another kubelet, or be left from an earlier configuration. So
`deviceplugin.kubelet.pod_evidence` decides whether the absence of a pod's cgroup shows that the pod has ended.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final, NamedTuple

from deviceplugin import looked_at
from deviceplugin.kubelet import pod_evidence
from deviceplugin.kubelet.pod_evidence import PodProcesses as PodProcesses
from deviceplugin.kubelet.pod_evidence import PodsShown

_SYSTEMD: Final = re.compile(r"(?:.*-)?pod(.+)\.slice")
_KUBEPODS: Final = re.compile(r"(?:.*-)?kubepods(?:\.slice)?")
_ETC_HOSTS: Final = re.compile(r".*/pods/([^/]+)/etc-hosts")
_DEPTH: Final = 6
"""Maximum depth below the cgroup file system's mount point at which a directory `kubepods` is found."""
TREES: Final = 0.3
"""Seconds after a search for `kubepods` trees until the next search; until then only the known trees are read, which is
faster.

No holder is missed for lack of a search. A kubelet that is restarted with another `kubepods` tree needs more time than
this to start a pod there, process the pod's deletion by force, and allocate the pod's device again.
"""


class ContainerCgroup(NamedTuple):
    """A cgroup of a container or sandbox, below its pod's cgroup, that has a process.

    made: the time at which this cgroup was created or last changed (Unix seconds).
    """

    name: str
    made: float


class PodReader:
    """Finds out, from cgroups and pod directories, which pods may have running processes. Methods block the thread.

    cgroups: the path of the host's `/sys/fs/cgroup`. believe_checkpoint: whether a pod also counts as ended if its
    cgroup would not be visible here, so that only the kubelet's checkpoint shows whether the pod has devices. True is
    safe only on a node without claims, because then only the kubelet allocates devices. boot: the id of the node's
    boot, which becomes a part of each recorded id of a cgroup's directory.
    """

    def __init__(self, kubelet_root: Path, cgroups: Path, *, believe_checkpoint: bool, boot: str = "") -> None:
        self.own_pod: Final = own_pod(kubelet_root)
        self.kubelet_root: Final = kubelet_root
        self.cgroups: Final = cgroups
        self._believe_checkpoint = believe_checkpoint
        self._boot = boot
        self._cgroups_seen = False
        self.seen: Mapping[str, float] = {}
        """For each pod UID, the time (monotonic seconds) of the first read in the present unbroken series of reads that
        found processes in the pod's cgroup."""
        self.shown = PodsShown()
        """The facts about pods after the last call of `read`. Each call updates these facts and returns them in
        `PodProcesses`."""
        self._looking = threading.Lock()
        self._last = PodProcesses()
        self._trees: Sequence[str] = ()
        self._searched = -math.inf
        """The time of the last search for `kubepods` trees (monotonic seconds)."""

    def read(self, named: Collection[str] = ()) -> PodProcesses:
        """Return the pods that have processes now. named: the UIDs of pods that a checkpoint of this kubelet names."""
        look = self._look(named)
        if look.running is not None:
            self._cgroups_seen = True
        elif self._cgroups_seen:
            return PodProcesses()  # Cgroups were visible at an earlier read, but cannot be read now.
        return look

    def _look(self, named: Collection[str]) -> PodProcesses:
        earlier = frozenset(self.seen)
        # Pod directories are read first, because the kubelet creates a pod's cgroup before the pod's directory.
        directories, root = read_directories(self.kubelet_root), self._root()
        with self._looking:
            now, before = time.monotonic(), self.seen
            if now - self._searched >= TREES or not all(map(os.path.isdir, self._trees)):
                self._trees, self._searched = cgroup_trees(self.cgroups), now
            look = pod_cgroups(self._trees, self._boot) or PodProcesses()
            if look.running is None:
                self._searched = -math.inf
            else:
                self.seen = {uid: before.get(uid, now) for uid in look.running}
            look = replace(
                look,
                directories=directories,
                root=root,
                earlier=earlier,
                checkpoint_decides=self._believe_checkpoint,
            )
            self.shown = pod_evidence.shown_after(self.shown, look, self.own_pod, named)
            self._last = replace(look, shown=self.shown)
            return self._last

    def known(self, places: Mapping[str, frozenset[str]]) -> None:
        """Add places (parent directories of pods' cgroups) that an earlier agent process has recorded.

        places: for each pod UID, the pod's places.
        """
        with self._looking:
            self.shown = replace(self.shown, places={**places, **self.shown.places})

    def hide(self, look: PodProcesses, uids: Collection[str]) -> PodProcesses:
        """Record that these pods run although no visible cgroup contains them.

        Return a copy of `look` (the result of a read) in which these pods are hidden too.
        """
        with self._looking:
            self.shown = self.shown.hide(uids)
            return replace(look, shown=look.shown.hide(uids))

    @property
    def is_in_kubelets_root(self) -> bool:
        """Whether `kubelet_root` is known to be the kubelet's root, and is still the same directory."""
        return self._last.root in self.shown.roots

    def answered(self) -> None:
        """Record that `kubelet_root` is the kubelet's root, because the kubelet answers at a socket below it."""
        with self._looking:
            self.shown = replace(self.shown, roots=self.shown.roots | ({self._root()} - {""}))

    def _root(self) -> str:
        with contextlib.suppress(OSError):
            return place_of(str(self.kubelet_root / "pods"), self._boot)
        return ""

    def may_exist(self, pod_uid: str) -> bool:
        """Return False if the pod's cgroups that the last read found are all gone now, else True.

        This method only calls `stat`, and reads no file.
        """
        look = self._last
        paths, places = look.paths.get(pod_uid), look.places.get(pod_uid, frozenset())
        return paths is None or not all(_is_gone(path, places, self._boot) for path in paths)

    def containers(self, pod_uid: str) -> list[ContainerCgroup] | None:
        """Return those cgroups of a pod's containers and sandbox that have processes; None if they are not known.

        Raises OSError if a subtree cannot be read.
        """
        levels = (pods for tree in _trees(str(self.cgroups)) for _, pods in _levels(tree))
        paths = [path for pods in levels for uid, path in pods if uid == pod_uid]
        if not paths or any(_text(path, "cgroup.procs") != "" for path in paths):
            return None  # The cgroups are invisible or covered by a mount, or a process is in the pod's own cgroup.
        below = [directory for path in paths for directory in _subdirectories(path)]
        return [ContainerCgroup(name, os.stat(path).st_ctime) for name, path in below if _populated(path)]

    def running(self) -> PodProcesses:
        """Return the pods that have processes now, as `read`. Raises OSError if the cgroups can no longer be read."""
        look = self._look(())
        if look.running is None and self._cgroups_seen:
            raise OSError(f"pod cgroups in {self.cgroups} cannot be read now")
        self._cgroups_seen = look.running is not None
        return look


def pod_cgroups(trees: Sequence[str], boot: str = "") -> PodProcesses | None:
    """Return the pods with and without a process in their cgroup; None if no `kubepods` tree is visible."""
    running: set[str] = set()
    paths: dict[str, tuple[str, ...]] = {}
    places: dict[str, frozenset[str]] = {}
    visible: dict[str, str] = {}
    try:
        for tree in trees:
            top = ""
            for directory, pods in _levels(tree):
                try:
                    place = place_of(directory, boot)
                except FileNotFoundError:  # `directory` was removed after it was listed, with its cgroups.
                    continue
                visible[place] = top = top or place
                for uid, path in pods:
                    if uid not in running and _populated(path):
                        running.add(uid)
                    paths[uid] = (*paths.get(uid, ()), path)
                    places[uid] = places.get(uid, frozenset()) | {place}
    except OSError:  # A subtree cannot be read.
        return None
    if not trees:
        return None
    return PodProcesses(frozenset(running), None, frozenset(paths.keys() - running), paths, places, visible)


def place_of(directory: str, boot: str) -> str:
    """Return a text that identifies a directory within this boot of the node. Raises OSError."""
    status = os.stat(directory)
    return f"{boot[:8]}:{status.st_dev}:{status.st_ino}"


def cgroup_trees(root: Path) -> list[str]:
    """Return the paths of all directories `kubepods`; empty if a subtree of `root` cannot be read.

    With cgroup v1, only one hierarchy is searched: `pids`, or else the first hierarchy that has a directory `kubepods`.
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


def _levels(tree: str) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Yield (directory, pods) for each of the directories in a `kubepods` tree where pods' cgroups may lie.

    These directories are the tree's root and the directories of the QoS classes. `pods` is a list of (UID, path of the
    pod's cgroup).
    """
    pods: list[tuple[str, str]] = []
    classes: list[str] = []
    for name, path in _subdirectories(tree):
        if (uid := _pod_of(name)) is not None:
            pods.append((uid, path))
        elif "burstable" in name or "besteffort" in name:
            classes.append(path)
    yield tree, pods
    for path in classes:
        yield from _levels(path)


def _pod_of(name: str) -> str | None:
    if (match := _SYSTEMD.fullmatch(name)) is not None:
        return match[1].replace("_", "-")
    return name.removeprefix("pod") if name.startswith("pod") else None


def _is_gone(path: str, places: Collection[str], boot: str) -> bool:
    """Return whether a pod's cgroup was removed: `path` does not exist, and its parent directory is in `places`."""
    try:
        os.stat(path)
    except FileNotFoundError:
        with contextlib.suppress(OSError):
            return place_of(os.path.dirname(path), boot) in places
    except OSError:
        pass
    return False


def _populated(path: str) -> bool:
    """Return whether a process is in a pod's cgroup or in a cgroup below it; True if the files cannot be read.

    Cgroup version 2 has the file cgroup.events. In version 1, the controller `pids` counts the processes of the whole
    subtree. Other controllers of version 1 have only the file cgroup.procs, which leaves out processes of other PID
    namespaces (cgroup-v1.c: pidlist_array_load), so an agent in a container sees no processes of other pods there. With
    such a controller, a pod counts as running while a container's cgroup exists, although the runtime sometimes fails
    to remove the cgroup after its last process.
    """
    try:
        if (events := _text(path, "cgroup.events")) is not None:
            return "populated 0" not in events
        if (count := _text(path, "pids.current")) is not None:
            return count.strip() != "0"
        if (processes := _text(path, "cgroup.procs")) is None:
            return os.path.isdir(path)  # cgroup.procs was removed with its cgroup, or a mount covers the cgroup.
        if processes:
            return True
    except OSError:
        return os.path.isdir(path)
    return bool(_subdirectories(path))


def _text(directory: str, name: str) -> str | None:
    try:
        with open(os.path.join(directory, name), encoding="ascii") as file:
            return file.read()
    except FileNotFoundError:  # The cgroup is gone, or has no such file.
        return None


def _subdirectories(directory: str) -> list[tuple[str, str]]:
    try:
        with os.scandir(directory) as entries:
            return [(entry.name, entry.path) for entry in entries if entry.is_dir(follow_symlinks=False)]
    except FileNotFoundError:  # The directory does not exist any more.
        return []


def read_directories(kubelet_root: Path) -> frozenset[str] | None:
    """Return the UIDs of pods with a directory under the kubelet's root; None if the directories are unreadable."""
    looked_at.at(kubelet_root / "pods")
    try:
        return frozenset(os.listdir(kubelet_root / "pods"))
    except OSError:
        return None


def own_pod(kubelet_root: Path, mounts: str = "/proc/self/mountinfo") -> str:
    """Return the UID of the pod in which this process runs; "" if this kubelet has no such pod.

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
