"""Finds ended containers of running pods, from the kubelet's links to container logs, and from cgroups.

A kubelet that has lost its checkpoint calls Allocate again before it restarts a container, and the call does not name
the container. So a container counts as having no device any more if it has ended and the checkpoint does not name it.

When a container has started, the kubelet creates the link `<pod>_<namespace>_<container>-<container id>.log`, which
leads to `<pod logs>/<namespace>_<pod>_<uid>/<container>/<n>.log`. The kubelet keeps the last ended instance of a
container, and removes the link together with the instance (kubelet 1.36, kuberuntime_container.go: startContainer,
legacy.go, kuberuntime_gc.go). A cgroup without a link belongs to the pod's sandbox, to a container that is just
starting, or to one whose link does not have the whole id. A sandbox's cgroup is older than the pod's links.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from deviceplugin import looked_at
from deviceplugin.kubelet.cgroups import ContainerCgroup, PodReader
from deviceplugin.register.records import Allocation, AllocationRecord, RecordKey

_ID_END: Final = re.compile(r"([0-9a-f]{64})\.log")
"""Matches the end of a log link's name, with a whole container id. The ids of containerd (2.1,
internal/cri/util/id.go), CRI-O and cri-dockerd have this form."""

STARTING: Final = 300.0
"""Seconds after which a container's start has succeeded or failed. The kubelet waits 2 minutes for the runtime to
create the container, and 2 minutes for the runtime to start it (KubeletConfiguration.runtimeRequestTimeout)."""

Starts = Mapping[str, Mapping[str, int]]
"""For each pod (UID) and container (name), how often the kubelet has begun to start the container."""


class LogLink(NamedTuple):
    """The link to the log of a container that has started.

    id: the runtime's id of the container. made: the time at which the link was created (Unix seconds).
    """

    pod_uid: str
    container: str
    id: str
    made: float


def log_links(directory: Path, pods: Collection[str]) -> list[LogLink]:
    """Return the log links of these pods' containers. Blocks. Raises OSError if `directory` is unreadable.

    The kubelet cuts `<pod>_<namespace>_<container>-<container id>` after 251 characters (kubelet 1.36, legacy.go:
    logSymlink). A name without the whole id is left out, because its end may be text from the names of the pod and its
    container.
    """
    links = []
    with os.scandir(directory) as entries:
        for entry in entries:
            try:
                *_, logs, container, _ = os.readlink(entry.path).split("/")
                namespace, pod, uid = logs.split("_")
                begin = f"{pod}_{namespace}_{container}-"
                end = _ID_END.fullmatch(entry.name, len(begin)) if entry.name.startswith(begin) else None
                if uid in pods and end is not None:
                    links.append(LogLink(uid, container, end[1], entry.stat(follow_symlinks=False).st_mtime))
            except (OSError, ValueError):
                continue  # The link was removed after the listing, or was not created by the kubelet.
    return links


def _container_of(cgroup: ContainerCgroup, links: Iterable[LogLink]) -> str | None:
    """Return the name of the container to which `cgroup` belongs; None for a sandbox, or a starting container."""
    return next((link.container for link in links if link.id in cgroup.name), None)


def has_ended(container: str, links: Iterable[LogLink], running: Iterable[ContainerCgroup]) -> bool:
    """Return whether no process of a container can run.

    links, running: the log links, and the cgroups with processes, of the pod's containers. The result is False for a
    container without a log link, because the container may have just started.
    """
    links = tuple(links)
    last = max((link.made for link in links if link.container == container), default=None)
    if last is None:
        return False
    for cgroup in running:
        of = _container_of(cgroup, links)
        if (cgroup.made >= last) if of is None else (of == container):
            return False
    return True


def ended(containers: Collection[tuple[str, str]], pods: PodReader, directory: Path) -> frozenset[tuple[str, str]]:
    """Return the containers, each as (pod UID, name), that have certainly ended. Blocks."""
    uids = {uid for uid, _ in containers}
    if not uids:
        return frozenset()
    try:
        links = log_links(directory, uids)
        running = {uid: pods.containers(uid) for uid in uids}
    except OSError:
        return frozenset()  # The log links cannot be read, so no container counts as ended.
    over = set()
    for uid, name in containers:
        cgroups = running[uid]
        if cgroups is not None and has_ended(name, (link for link in links if link.pod_uid == uid), cgroups):
            over.add((uid, name))
    return frozenset(over)


class _StartsBegun(NamedTuple):
    """How often the kubelet has begun to start a container, and the time of the last beginning (Unix seconds)."""

    times: int
    last: float


def _begun(kubelet_root: Path, pod_uid: str) -> dict[str, _StartsBegun]:
    """Return, for each container that the kubelet has begun to start, the number and last time of these starts. Blocks.

    Raises OSError. Before the kubelet asks the runtime to create a container, it makes a file for the termination
    message in `pods/<uid>/containers/<container>`. The kubelet removes these files with the pod's directory (kubelet
    1.36, kuberuntime_container.go: makeMounts).
    """
    begun: dict[str, _StartsBegun] = {}
    directory = kubelet_root / "pods" / pod_uid / "containers"
    looked_at.at(directory)
    if not directory.exists() and directory.parent.is_dir():
        return begun  # The pod has no directory `containers`, so the kubelet has started no container yet.
    for name in os.listdir(directory):
        # A directory's modification time changes when a file is made in it, not when a container writes to a file.
        last = os.stat(directory / name).st_mtime
        begun[name] = _StartsBegun(len(os.listdir(directory / name)), last)
    return begun


def restarted(
    before: Mapping[str, int],
    begun: Mapping[str, _StartsBegun],
    links: Iterable[LogLink],
    running: Iterable[ContainerCgroup] | None,
    waited: float,
) -> bool:
    """Return whether all of a pod's containers that the kubelet began to start before a given time have ended.

    before: how often the kubelet had begun to start each container before that time. begun, links, running: the present
    starts, log links and cgroups of the pod's containers; running is None if the cgroups are not visible. waited: the
    seconds since that time, or a smaller number.

    The kubelet starts the containers of a pod one after the other, and begins to start a container again only when it
    has ended (kubelet 1.36, pod_workers.go; kuberuntime_manager.go: SyncPod). If the kubelet has
    not begun to start a container again, the container has ended under two conditions: its last start has succeeded or
    failed, and no cgroup with processes can belong to it.
    """
    links = tuple(links)
    by_cgroup = {cgroup: _container_of(cgroup, links) for cgroup in running or ()}
    for name, times in before.items():
        now = begun.get(name)
        if now is None or now.times < times:
            return False
        if now.times > times:
            continue
        linked = any(link.container == name and link.made >= now.last for link in links)  # The last start succeeded.
        over = linked or waited >= STARTING or any(other.last > now.last for other in begun.values())
        unlinked = (one for one, of in by_cgroup.items() if of is None and not linked)
        own = name in by_cgroup.values() or any(one.made >= now.last for one in unlinked)
        if running is None or own or not over:
            return False
    return True


class ContainerStarts:
    """Finds out whether the containers of pods have restarted. directory: the directory of links to container logs."""

    def __init__(self, pods: PodReader, directory: Path) -> None:
        self._pods = pods
        self._directory = directory

    def read(self, pods: Collection[str]) -> Starts:
        """Return how often the kubelet has begun to start each container of these pods. Blocks. Raises OSError."""
        root = self._pods.kubelet_root
        return {uid: {name: begun.times for name, begun in _begun(root, uid).items()} for uid in pods}

    def restarted(self, before: Starts, pods: Collection[str], waited: float = 0.0) -> bool:
        """Return whether all containers of these pods that the kubelet began to start before a time have ended. Blocks.

        before: the result of `read` at that time. Pods without an entry in `before` are newer, and are not checked.
        waited: the seconds since that time, or a smaller number. If files or cgroups cannot be read, the result is
        False.
        """
        links: Sequence[LogLink] = ()
        with contextlib.suppress(OSError):
            links = log_links(self._directory, pods)
        try:
            for uid in before.keys() & pods:
                begun, cgroups = _begun(self._pods.kubelet_root, uid), self._pods.containers(uid)
                mine = [link for link in links if link.pod_uid == uid]
                if not restarted(before[uid], begun, mine, cgroups, waited):
                    return False
        except OSError:
            return False
        return True


class LostAllocations:
    """Finds allocations that the kubelet has lost, and whose containers have ended. Thread-safe.

    directory: the directory of the links to container logs.
    """

    def __init__(self, pods: PodReader, directory: Path) -> None:
        self._pods = pods
        self._directory = directory
        self._noting = threading.Lock()
        self._noted: Mapping[Allocation, int | None] = {}
        """For each lost allocation whose container has ended: the sequence number of the id's record when the end was
        found."""

    def ended(
        self,
        lost: Collection[Allocation],
        named: Collection[RecordKey],
        records: Mapping[RecordKey, AllocationRecord],
    ) -> frozenset[Allocation]:
        """Return those of the lost allocations whose containers have ended. Blocks.

        An allocation of an ended container stays in the result until a checkpoint names the allocation again, because
        the kubelet calls Allocate before it starts the container again. If the last grant of the allocation's id is in
        no checkpoint yet, this grant may be for the ended container, so the allocation is left out.

        lost: allocations of running pods that no checkpoint names. named: the ids that checkpoints name. records: the
        register's records.
        """
        with self._noting:
            noted = {holder: sequence for holder, sequence in self._noted.items() if holder in lost}
            unnoted = [holder for holder in lost if holder not in noted]
            over = ended({holder[:2] for holder in unnoted}, self._pods, self._directory)
            for holder in unnoted:
                if holder[:2] in over:
                    noted[holder] = records[holder[2:]].sequence if holder[2:] in records else None
            self._noted = noted

        def applies(holder: Allocation) -> bool:
            record = records.get(holder[2:])
            return record is None or record.sequence == noted[holder] or not record.pending or holder[2:] in named

        return frozenset(filter(applies, noted))
