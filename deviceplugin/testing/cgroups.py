"""The pod cgroups of the fake node, in the layout of the kubelet and the container runtime.

Source of the facts: kubelet 1.36.3, pkg/kubelet/cm (qos_container_manager_linux.go,
pod_container_manager_linux.go, cgroup_manager_linux.go); containerd 2.1 for the names of container
cgroups; the kernel's documentation of cgroup v2 for `cgroup.events`.
"""

from __future__ import annotations

import itertools
import os
import shutil
from pathlib import Path
from typing import Final, Literal

__all__ = ["CgroupLayout", "CgroupTree"]

CgroupLayout = Literal["v2", "v2-systemd", "v1", "v1-systemd"]
"""The cgroup version of the kernel, with `-systemd` if the kubelet's cgroup driver is systemd instead of cgroupfs."""

V1_CONTROLLERS: Final = ("cpu,cpuacct", "memory", "pids", "systemd")
_EVENTS: Final = "cgroup.events"
_PROCS: Final = "cgroup.procs"


class CgroupTree:
    """A cgroup filesystem with the pods of one node, all of the QoS class BestEffort.

    A directory appears and disappears with its files in one step, as in the kernel. Not thread-safe.
    """

    def __init__(self, root: Path, layout: CgroupLayout = "v2") -> None:
        self.root = root
        self._v2 = layout in ("v2", "v2-systemd")
        self._systemd = layout in ("v1-systemd", "v2-systemd")
        self._containers: dict[str, set[str]] = {}
        self._pids = itertools.count(1000)
        self._numbers = itertools.count()

    def create(self) -> None:
        """Create the root and the cgroups of the QoS classes (QOSContainerManager.Start)."""
        for mount in self._mounts():
            mount.mkdir(parents=True, exist_ok=True)
            (mount / _PROCS).touch()
            if self._v2:
                (mount / "cgroup.controllers").write_text("cpuset cpu io memory pids\n")
            for names in (("kubepods",), ("kubepods", "besteffort"), ("kubepods", "burstable")):
                self._add(mount / self._path(*names))

    def pod(self, uid: str) -> list[Path]:
        """Return the directories of a pod's cgroup: one with cgroup v2, one for each controller with cgroup v1."""
        return [mount / self._path("kubepods", "besteffort", f"pod{uid}") for mount in self._mounts()]

    def container(self, uid: str, container: str) -> list[Path]:
        """Return the cgroup directories of a pod's container or sandbox with this id."""
        name = f"cri-containerd-{container}.scope" if self._systemd else container
        return [path / name for path in self.pod(uid)]

    def add_pod(self, uid: str) -> None:
        """Create a pod's cgroup without processes, unless the cgroup exists (podContainerManagerImpl.EnsureExists)."""
        if uid not in self._containers:
            for path in self.pod(uid):
                self._add(path)
            self._containers[uid] = set()

    def add_container(self, uid: str, container: str) -> None:
        """Create a container's cgroup with one process in it."""
        pid = next(self._pids)
        for path in self.container(uid, container):
            self._add(path, pid)
        self._containers[uid].add(container)
        self._update_events(uid)

    def remove_container(self, uid: str, container: str) -> None:
        """End a container's process and remove its cgroup. The pod's cgroup stays."""
        if container in self._containers.get(uid, ()):
            for path in self.container(uid, container):
                self._remove(path)
            self._containers[uid].discard(container)
            self._update_events(uid)

    def remove_containers(self, uid: str) -> None:
        """End all processes of a pod and remove their cgroups. The pod's own cgroup stays."""
        for container in list(self._containers.get(uid, ())):
            self.remove_container(uid, container)

    def remove_pod(self, uid: str) -> None:
        """Remove a pod's cgroup, if there is one, and all cgroups below it (podContainerManagerImpl.Destroy)."""
        if uid in self._containers:
            self.remove_containers(uid)
            for path in self.pod(uid):
                self._remove(path)
            del self._containers[uid]

    def _mounts(self) -> list[Path]:
        return [self.root] if self._v2 else [self.root / controller for controller in V1_CONTROLLERS]

    def _path(self, *names: str) -> Path:
        """Return a cgroup's path.

        With the systemd driver, the path consists of slices, each named after all slices above it (ToSystemd).
        """
        if not self._systemd:
            return Path(*names)
        escaped = [name.replace("-", "_") for name in names]
        return Path(*(f"{'-'.join(escaped[: depth + 1])}.slice" for depth in range(len(escaped))))

    def _update_events(self, uid: str) -> None:
        """Update cgroup.events of a pod's cgroup and of its parents: whether they have processes (cgroup v2)."""
        if not self._v2:
            return
        (pod,) = self.pod(uid)
        anywhere = any(self._containers.values())
        for path, populated in (
            (pod, bool(self._containers[uid])),
            (pod.parent, anywhere),
            (pod.parent.parent, anywhere),
        ):
            # Inode and length stay the same, so a concurrent reader sees either the old or the new state.
            descriptor = os.open(path / _EVENTS, os.O_WRONLY)
            try:
                os.pwrite(descriptor, _events(populated), 0)
            finally:
                os.close(descriptor)

    def _add(self, path: Path, pid: int | None = None) -> None:
        if path.exists():
            return
        staged = self._staged()
        staged.mkdir(parents=True)
        (staged / _PROCS).write_text("" if pid is None else f"{pid}\n")
        if self._v2:
            (staged / _EVENTS).write_bytes(_events(pid is not None))
        staged.rename(path)

    def _remove(self, path: Path) -> None:
        staged = self._staged()
        staged.parent.mkdir(exist_ok=True)
        path.rename(staged)
        shutil.rmtree(staged)

    def _staged(self) -> Path:
        return self.root.with_name(f".{self.root.name}") / str(next(self._numbers))


def _events(populated: bool) -> bytes:
    return b"populated %d\nfrozen 0\n" % populated
