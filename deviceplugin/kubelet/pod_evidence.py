"""Decides whether a process of a pod can still run, from present and earlier cgroups and pod directories.

All functions are pure.

A place is a directory in which cgroups or directories of pods are listed. The absence of a pod from a place proves that
the pod has ended only if the place would contain the pod. But a place can be wrong or old (`cgroupsPerQOS`,
`cgroupRoot`, `--root-dir` were changed), belong to another kubelet, or be hidden by a mount or a cgroup namespace. So
the rules are: (1) A pod has ended if its cgroup was seen before in a directory that is still listed, and is absent now.
(2) A pod whose cgroup was never seen has ended if pods of this kubelet have run in directories that are listed now, and
no pod runs outside of them. (3) Otherwise the pod's directory decides, which the kubelet removes after the pod was
deleted and has ended. The absence of the pod's directory is a proof if this kubelet's pods have their directories in
the listed place. (4) Otherwise the pod may run.

Pods of another kubelet on this machine (kind, k3d) run in a cgroup tree of their own, and have no directory here.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

HIDDEN: Final[frozenset[str]] = frozenset()
"""The value of `PodsShown.places`, an empty set, for a pod that ran although no visible cgroup contained the pod."""


@dataclass(frozen=True, slots=True)
class PodsShown:
    """Facts about this kubelet's pods, from all reads of cgroups and pod directories until now.

    places: for each pod's UID, the directories in which cgroups of the pod were seen, or HIDDEN. A hidden pod stays
    HIDDEN, because a cgroup that the kubelet creates later for the pod does not contain the pod's earlier processes.
    trusted: the directories of cgroups in which pods of this kubelet have run. roots: the parent directories of this
    kubelet's pod directories. cgroups: whether the visible directories would contain the cgroup of a pod that was never
    seen. directories: whether the visible pod directories are those of this kubelet.
    """

    places: Mapping[str, frozenset[str]] = field(default_factory=dict)
    trusted: frozenset[str] = frozenset()
    roots: frozenset[str] = frozenset()
    cgroups: bool = False
    directories: bool = False

    @property
    def hidden(self) -> frozenset[str]:
        """The UIDs of pods that run, or have run, although the visible cgroups do not contain them."""
        return frozenset(uid for uid, places in self.places.items() if not places)

    def of(self, uids: Collection[str]) -> frozenset[tuple[str, str]]:
        """Return (UID, place) for each place of these pods, for the register; the place of a hidden pod is ""."""
        known = {uid: self.places[uid] for uid in uids if uid in self.places}
        return frozenset((uid, place) for uid, places in known.items() for place in places or {""})

    def hide(self, uids: Collection[str]) -> PodsShown:
        """Return these facts, changed so that the pods `uids` are HIDDEN."""
        if not uids:
            return self
        return replace(self, places={**self.places, **dict.fromkeys(uids, HIDDEN)}, cgroups=False)


SHOWN: Final = PodsShown(cgroups=True, directories=True)
"""The facts if all visible cgroups and pod directories belong to this kubelet."""


def recorded(shown: Collection[tuple[str, str]], boot: str) -> dict[str, frozenset[str]]:
    """Return each pod's places (directories of its cgroups) from the register, without places of another boot."""
    places: dict[str, frozenset[str]] = {}
    for uid, place in shown:
        if place.startswith(f"{boot[:8]}:"):
            places[uid] = places.get(uid, HIDDEN) | {place}
    return places | {uid: HIDDEN for uid, place in shown if not place}


_NEITHER: Final = "neither cgroups nor pod directories are visible"


@dataclass(frozen=True, slots=True)
class PodProcesses:
    """The UIDs of pods with processes at one moment, and the facts about pods from all reads until then (`shown`).

    running: the pods with a process in their cgroup; None if no cgroup tree is visible. directories: the pods with a
    directory; None if no pod directories are visible. empty: the pods whose cgroup has no process. paths: the cgroups
    of each pod. places: for each pod, the parent directories of its cgroups. visible: the directories of cgroups that
    were listed, each with the directory `kubepods` of its tree. root: the parent of the pods' directories, "" if it is
    not visible. earlier: the pods whose processes an earlier read had found when this read began. checkpoint_decides:
    whether a pod counts as ended here if the visible cgroups would not contain it; only the kubelet's checkpoint then
    shows whether the pod has devices.
    """

    running: frozenset[str] | None = None
    directories: frozenset[str] | None = None
    empty: frozenset[str] = frozenset()
    paths: Mapping[str, tuple[str, ...]] = field(default_factory=dict, compare=False, repr=False)
    places: Mapping[str, frozenset[str]] = field(default_factory=dict, compare=False, repr=False)
    visible: Mapping[str, str] = field(default_factory=dict)
    root: str = ""
    earlier: frozenset[str] = field(default=frozenset(), compare=False, repr=False)
    shown: PodsShown = SHOWN
    checkpoint_decides: bool = False

    def may_run(self, pod_uid: str) -> str:
        """Return why a process of this pod may still run, as text; "" if no process can run.

        If the pod's directory is the only evidence, a completed pod counts as running until the directory is removed.
        """
        if self.running is not None and pod_uid in self.running:
            return "processes of its pod run"
        if self.shows(pod_uid) or (self.checkpoint_decides and not self.shown.places.get(pod_uid)):
            return ""
        why = "cgroups are not visible" if self.running is None else "the cgroups do not tell whether its pod runs"
        if self.directories is None:
            return _NEITHER if self.running is None else f"{why}, and pod directories are not visible"
        if pod_uid in self.directories:
            return f"{why}, and its pod's directory exists"
        return "" if self.shown.directories else f"{why}, and the pod directories have shown no pod of this kubelet"

    def has(self, pod_uid: str) -> bool:
        """Return whether a process or the directory of this pod is visible; also True if nothing is visible at all."""
        if self.running is None and self.directories is None:
            return True
        return pod_uid in (self.running or ()) or pod_uid in (self.directories or ())

    def shows(self, pod_uid: str) -> bool:
        """Return whether the visible cgroups would contain a process of this pod, if one ran."""
        places = self.shown.places.get(pod_uid)
        if self.running is None or places is None:
            return self.running is not None and self.shown.cgroups
        return bool(places) and places <= self.visible.keys()

    def is_unknown(self, pod_uid: str) -> bool:
        """Return whether the visible cgroups do not show whether processes of this pod run."""
        return not (self.running is not None and pod_uid in self.running) and not self.shows(pod_uid)

    def is_undecided(self, pod_uid: str) -> bool:
        """Return whether a later read may still show that this pod runs outside of the visible cgroups."""
        return self.running is not None and pod_uid not in self.running and pod_uid not in self.shown.places

    @property
    def whole(self) -> bool:
        """Whether the visible cgroups would contain each pod of this kubelet, including pods without a cgroup yet."""
        return self.running is not None and (
            self.shown.cgroups or (self.shown.directories and self.directories is not None and not self.directories)
        )

    @property
    def candidates(self) -> frozenset[str]:
        """The UIDs of the pods that may have a running process according to cgroups or pod directories."""
        return self.may_be_ours | (frozenset() if self.whole else self.directories or frozenset())

    @property
    def may_be_ours(self) -> frozenset[str]:
        """The UIDs of the running pods, without pods that are certainly another kubelet's.

        A pod is another kubelet's if it has no directory below this kubelet's root, and was seen only in cgroup trees
        in which no pod of this kubelet was seen, while pods of this kubelet were seen in another visible tree. The
        kubelet makes a pod's directory before the sandbox, and keeps the directory of a pod that was deleted by force
        while the runtime lists a running container of the pod (kubelet 1.36, kubelet.go: SyncPod; kubelet_volumes.go:
        cleanupOrphanedPodDirs). A pod that started after the directories were read is not in `earlier`.
        """
        running, directories = self.running or frozenset(), self.directories
        if directories is None or not self.shown.directories or not (absent := running & self.earlier - directories):
            return running
        trees = self._trees(self.shown.trusted)
        theirs = (uid for uid in absent if self.shows(uid) and trees.isdisjoint(self._trees(self.shown.places[uid])))
        return running.difference(theirs if trees else ())

    def _trees(self, places: Collection[str]) -> frozenset[str]:
        return frozenset(self.visible[place] for place in places if place in self.visible)


def shown_after(before: PodsShown, look: PodProcesses, own: str, named: Collection[str]) -> PodsShown:
    """Return the facts about pods after another read of cgroups and pod directories.

    before: the facts before this read. look: the result of this read. own: the UID of the agent's pod, or "". named:
    the UIDs of pods that a checkpoint of this kubelet names.
    """
    of_kubelet = {*named, own} - {""}
    there = look.directories or frozenset()
    roots = before.roots | (frozenset() if there.isdisjoint(of_kubelet) else {look.root})
    directories = look.root in roots
    places = {**before.places, **look.places}
    for uid in before.places.keys() & look.places.keys() - {own}:
        former = before.places[uid]
        places[uid] = former and former | look.places[uid]
    if own and look.running is not None and own not in look.places:
        places[own] = HIDDEN
    if directories and look.directories is not None:  # Pods whose directory is gone have ended.
        places = {uid: where for uid, where in places.items() if uid in look.places or uid in there}
    mine = (look.running or frozenset()) & (of_kubelet | (there if directories else frozenset()))
    trusted = before.trusted.union(*(look.places.get(uid, HIDDEN) for uid in mine))
    cgroups = look.running is not None and not trusted.isdisjoint(look.visible) and all(places.values())
    return PodsShown(places, trusted, roots, cgroups, directories)


def hidden(before: PodProcesses, named: Collection[str], after: PodProcesses) -> frozenset[str]:
    """Return the pods that ran between two reads of the cgroups although neither read found a cgroup of the pod.

    before, after: the results of the two reads. named: the pods in a checkpoint that the kubelet composed between the
    reads, after it had dropped ended pods. The kubelet creates a pod's cgroup before the pod's directory, and keeps the
    cgroup until the pod has ended (kubelet 1.36, kubelet.go: SyncPod, SyncTerminatedPod). So the first read must find
    the cgroup of each pod that has a directory, if the cgroup is visible at all.
    """
    if before.running is None or after.running is None:
        return frozenset()
    known = before.places.keys() | after.places.keys() | after.shown.places.keys()
    return (before.directories or frozenset()) & frozenset(named) - known


def problem(look: PodProcesses, cgroups: str, title: Mapping[str, str]) -> str:
    """Return a message about pods whose cgroups are not visible: the pods, the effects, and the options to set.

    The result is "" if all pods' cgroups are visible. look: the last read of the cgroups. cgroups: the mount point of
    the cgroup file system. title: for each pod UID, the pod's name, if the name is known.
    """
    if look.running is None:
        what = f"no pod cgroups (kubepods) are visible in {cgroups}"
    elif look.shown.hidden:
        pods = ", ".join(title.get(uid, uid) for uid in sorted(look.shown.hidden)[:3])
        what = (
            f"the pod cgroups (kubepods) in {cgroups} are not, or not all, this kubelet's: they do not show pod {pods}"
        )
    else:
        return ""
    if look.checkpoint_decides:
        follows = "a device comes free when the kubelet counts its pod as ended, even if its containers hang"
    elif look.directories is None or not look.shown.directories:
        follows = "no device that such a pod holds comes free; mount the kubelet's root directory, read-only"
    else:
        follows = "a device of such a pod comes free only when the pod is deleted, not when it has completed"
    return (
        f"{what}: {follows}. Have the kubelet make a cgroup for each pod (cgroupsPerQOS: true), and mount all of the "
        "host's cgroup file system, read-only (--cgroup-root)"
    )
