"""How the agent finds which pods have running processes, from pod cgroups of every layout and pod directories."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from deviceplugin.kubelet.cgroups import PodProcesses, cgroup_trees, own_pod, pod_cgroups, read_directories
from deviceplugin.testing.cgroups import CgroupLayout, CgroupTree

U1 = "5f0a3b1e-8d1c-4a52-9a63-0d7f3f1f2b11"
U2 = "7c1d4e9a-2b7f-4f63-8a3e-54a9d0f7c222"
STATIC = "b3f1c0ffee00aa11bb22cc33dd44ee55"
"""The UID of a static pod is a hash without hyphens."""
LAYOUTS: list[CgroupLayout] = ["v2", "v2-systemd", "v1", "v1-systemd"]


def running(root: Path) -> set[str] | None:
    if (found := pod_cgroups(cgroup_trees(root))) is None:
        return None
    assert found.running is not None
    return set(found.running)


@pytest.fixture(params=LAYOUTS)
def tree(request: pytest.FixtureRequest, tmp_path: Path) -> CgroupTree:
    made = CgroupTree(tmp_path / "cgroup", request.param)
    made.create()
    return made


def test_a_pod_runs_from_its_first_process_to_its_last(tree: CgroupTree) -> None:
    """In each layout of cgroups a pod counts as running while one of its cgroups has a process."""
    assert running(tree.root) == set()
    tree.add_pod(U1)
    tree.add_pod(STATIC)
    assert running(tree.root) == set()
    tree.add_container(U1, "c1")
    tree.add_container(U1, "c2")
    tree.add_container(STATIC, "c3")
    assert running(tree.root) == {U1, STATIC}
    tree.remove_container(U1, "c1")
    assert running(tree.root) == {U1, STATIC}
    tree.remove_containers(U1)
    assert running(tree.root) == {STATIC}
    tree.remove_pod(STATIC)
    assert running(tree.root) == set()


def test_a_static_pod_may_choose_its_uid(tmp_path: Path) -> None:
    """The UID of a static pod may be any name from its manifest, also one with dots; the pod's cgroup is found."""
    made(tmp_path / "kubepods" / "besteffort" / "podslow.1", populated=True)
    (tmp_path / "cgroup.controllers").touch()
    assert running(tmp_path) == {"slow.1"}


def made(path: Path, *, populated: bool, version: int = 2) -> None:
    """Make a cgroup directory and its parent directories."""
    path.mkdir(parents=True)
    if version == 2:
        (path / "cgroup.events").write_text(f"populated {int(populated)}\nfrozen 0\n")
    (path / "cgroup.procs").write_text("1234\n" if populated else "")


@pytest.mark.parametrize(
    ("path", "uid"),
    [
        # Guaranteed pods are directly below kubepods. On a node of kind, kubepods is below another cgroup.
        (f"kubepods/pod{U1}", U1),
        (f"kubepods/burstable/pod{U1}", U1),
        (f"kubelet/kubepods/besteffort/pod{U1}", U1),
        (f"system.slice/docker-abc.scope/kubelet/kubepods/pod{STATIC}", STATIC),
        (f"kubepods.slice/kubepods-pod{U1.replace('-', '_')}.slice", U1),
        (f"kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{U1.replace('-', '_')}.slice", U1),
        (f"kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod{STATIC}.slice", STATIC),
        (
            "kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-burstable.slice/"
            f"kubelet-kubepods-burstable-pod{U1.replace('-', '_')}.slice",
            U1,
        ),
    ],
)
def test_where_pods_lie(tmp_path: Path, path: str, uid: str) -> None:
    """A pod of any quality of service class is found, wherever the kubelet's cgroup root is."""
    (tmp_path / "cgroup.controllers").touch()
    made(tmp_path / path, populated=True)
    assert running(tmp_path) == {uid}


def test_only_pods_of_kubepods_count(tmp_path: Path) -> None:
    """Only cgroups below kubepods count as pods, not a container or another cgroup with the name of a pod."""
    (tmp_path / "cgroup.controllers").touch()
    made(tmp_path / "user.slice" / f"pod{U1}", populated=True)
    assert running(tmp_path) is None
    made(tmp_path / "kubepods" / f"pod{U2}", populated=False)
    made(tmp_path / "kubepods" / f"pod{U2}" / f"pod{U1}", populated=True)
    assert running(tmp_path) == set()


def test_of_version_1_the_first_hierarchy_with_pods_counts(tmp_path: Path) -> None:
    """In cgroup version 1 the first hierarchy with kubepods counts; a process in a child cgroup is one of the pod."""
    (tmp_path / "cpuset").mkdir()
    made(tmp_path / "memory" / "kubepods" / f"pod{U1}", populated=False, version=1)
    made(tmp_path / "memory" / "kubepods" / f"pod{U2}", populated=False, version=1)
    made(tmp_path / "memory" / "kubepods" / f"pod{U2}" / "c" / "init.scope", populated=True, version=1)
    assert running(tmp_path) == {U2}


def test_of_version_2_the_events_file_counts(tmp_path: Path) -> None:
    """In cgroup version 2 `cgroup.events` shows whether a pod runs, as it covers the cgroups of all its containers."""
    (tmp_path / "cgroup.controllers").touch()
    for uid, populated in ((U1, True), (U2, False)):
        made(tmp_path / "kubepods" / f"pod{uid}", populated=populated)
        (tmp_path / "kubepods" / f"pod{uid}" / "cgroup.procs").write_text("")
    assert running(tmp_path) == {U1}


def test_no_tree_is_not_an_empty_tree(tmp_path: Path) -> None:
    """Without a kubepods directory it is not known which pods run."""
    assert running(tmp_path / "missing") is None
    assert running(tmp_path) is None
    (tmp_path / "cgroup.controllers").touch()
    (tmp_path / "system.slice").mkdir()
    assert running(tmp_path) is None


def test_of_version_1_a_containers_cgroup_counts_as_a_process(tmp_path: Path) -> None:
    """In cgroup version 1 an empty container cgroup counts as running, as processes may be hidden by PID namespaces."""
    made(tmp_path / "memory" / "kubepods" / f"pod{U1}", populated=False, version=1)
    made(tmp_path / "memory" / "kubepods" / f"pod{U1}" / "container", populated=False, version=1)
    made(tmp_path / "memory" / "kubepods" / f"pod{U2}", populated=False, version=1)
    assert running(tmp_path) == {U1}


def test_of_version_1_the_controller_pids_counts_all_processes(tmp_path: Path) -> None:
    """In cgroup version 1 the pids controller counts hidden processes as well; a pod with the count 0 does not run."""
    made(tmp_path / "blkio" / "kubepods" / f"pod{U1}" / "left", populated=False, version=1)
    for uid, count in ((U1, 0), (U2, 2)):
        made(tmp_path / "pids" / "kubepods" / f"pod{uid}" / "container", populated=False, version=1)
        (tmp_path / "pids" / "kubepods" / f"pod{uid}" / "pids.current").write_text(f"{count}\n")
    assert running(tmp_path) == {U2}


def test_the_agents_own_pod_is_found_by_its_hosts_file(tmp_path: Path) -> None:
    """The agent finds its own pod by its mounted /etc/hosts, if the kubelet's root has a directory of that pod."""
    mounts = tmp_path / "mountinfo"
    assert own_pod(tmp_path, str(mounts)) == ""
    rest = "rw,relatime - ext4 /dev/vda1 rw\n"
    mounts.write_text(
        f"600 590 8:1 /lib/kubelet/pods/{U2}/etc-hosts /other {rest}"
        f"601 590 8:1 /lib/kubelet/pods/{U1}/etc-hosts /etc/hosts {rest}"
        f"602 590 8:1 /etc/resolv.conf /etc/resolv.conf {rest}"
    )
    assert own_pod(tmp_path, str(mounts)) == ""
    for uid in (U1, U2):
        (tmp_path / "pods" / uid).mkdir(parents=True)
    assert own_pod(tmp_path, str(mounts)) == U1


@pytest.mark.parametrize("name", ["kubepods", "kubepods/burstable"])
def test_a_tree_that_cannot_be_listed_tells_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """If a directory of pod cgroups cannot be listed, it is unknown which pods run; a missing directory is no error."""
    (tmp_path / "cgroup.controllers").touch()
    made(tmp_path / "kubepods" / f"pod{U1}", populated=True)
    made(tmp_path / "kubepods" / "burstable", populated=True)
    error: OSError = PermissionError(13, "Permission denied")
    real = os.scandir

    def scandir(path: str) -> Iterator[os.DirEntry[str]]:
        if path == str(tmp_path / name):
            raise error
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    assert running(tmp_path) is None
    error = FileNotFoundError(2, "No such file or directory")
    assert running(tmp_path) == (set() if name == "kubepods" else {U1})


@pytest.mark.parametrize("name", ["cgroup.events", "cgroup.procs"])
def test_a_cgroup_that_cannot_be_read_counts_as_running(tmp_path: Path, name: str) -> None:
    """A pod whose cgroup cannot be read counts as running."""
    (tmp_path / "cgroup.controllers").touch()
    (tmp_path / "kubepods" / f"pod{U1}" / name).mkdir(parents=True)
    assert running(tmp_path) == {U1}


def test_pod_directories(tmp_path: Path) -> None:
    """Pod directories have the pods' UIDs as names; without the `pods` directory it is not known which pods exist."""
    assert read_directories(tmp_path) is None
    (tmp_path / "pods").mkdir()
    assert read_directories(tmp_path) == frozenset()
    (tmp_path / "pods" / U1).mkdir()
    assert read_directories(tmp_path) == frozenset({U1})


@pytest.mark.parametrize(
    ("seen", "reason"),
    [
        (PodProcesses(frozenset({U1})), "processes of its pod run"),
        (PodProcesses(frozenset({U2})), ""),
        (PodProcesses(frozenset(), frozenset({U1})), ""),
        (PodProcesses(None, frozenset({U1})), "cgroups are not visible, and its pod's directory exists"),
        (PodProcesses(None, frozenset({U2})), ""),
        (PodProcesses(), "neither cgroups nor pod directories are visible"),
    ],
)
def test_whether_a_pod_may_run(seen: PodProcesses, reason: str) -> None:
    """Cgroups decide whether a pod may run; without cgroups its directory does; without both any pod may run."""
    assert seen.may_run(U1) == reason
