"""Whether one container of a pod has ended, by its cgroups and the links to its logs."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from deviceplugin.kubelet.cgroups import ContainerCgroup, PodReader
from deviceplugin.kubelet.containers import STARTING, ContainerStarts, LogLink, ended, has_ended, log_links
from deviceplugin.testing.cgroups import CgroupLayout, CgroupTree

UID = "5f0a3b1e-8d1c-4a52-9a63-0d7f3f1f2b11"
SANDBOX, FIRST, SECOND = ("a" * 64, "b" * 64, "c" * 64)


def link(container: str, name: str, made: float) -> LogLink:
    return LogLink(UID, container, name, made)


def cgroup(name: str, made: float) -> ContainerCgroup:
    return ContainerCgroup(f"cri-containerd-{name}.scope", made)


@pytest.mark.parametrize(
    ("links", "running", "over"),
    [
        ([], [], False),
        ([], [cgroup(SANDBOX, 1)], False),
        ([link("other", FIRST, 3)], [cgroup(SANDBOX, 1)], False),
        ([link("c", FIRST, 3)], [cgroup(SANDBOX, 1), cgroup(FIRST, 2)], False),
        ([link("c", FIRST, 3)], [cgroup(SANDBOX, 1)], True),
        ([link("c", FIRST, 3)], [], True),
        ([link("c", FIRST, 3), link("other", SECOND, 3)], [cgroup(SANDBOX, 1), cgroup(SECOND, 4)], True),
        # A container that starts now has no log link yet.
        ([link("c", FIRST, 3)], [cgroup(SANDBOX, 1), cgroup(SECOND, 5)], False),
        ([link("c", FIRST, 3), link("c", SECOND, 6)], [cgroup(SANDBOX, 1), cgroup(SECOND, 5)], False),
        ([link("c", FIRST, 3), link("c", SECOND, 6)], [cgroup(SANDBOX, 1)], True),
        # The sandbox was made again: a cgroup newer than the container's log link may be that container's.
        ([link("c", FIRST, 3)], [cgroup(SANDBOX, 4)], False),
    ],
)
def test_a_container_has_ended_if_no_cgroup_can_be_its_own(
    links: list[LogLink], running: list[ContainerCgroup], over: bool
) -> None:
    """A container counts as ended if it has a log link and its pod has no cgroup that may be the container's."""
    assert has_ended("c", links, running) is over


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    made = tmp_path / "containers"
    made.mkdir()
    target = Path(f"/var/log/pods/ns_some-pod_{UID}/c-1/0.log")
    (made / f"some-pod_ns_c-1-{FIRST}.log").symlink_to(target)
    (made / f"other_ns_c-1-{SECOND}.log").symlink_to(f"/var/log/pods/ns_other_{'0' * 36}/c-1/0.log")
    (made / f"no-link_ns_c-1-{SECOND}.log").touch()
    (made / "of-somebody-else").symlink_to(target)
    (made / f"some-pod_ns_c-{SECOND}.log").symlink_to(target)
    (made / f"some-pod_ns_c-1-{SECOND[:63]}.log").symlink_to(target)
    (made / f"some-pod_ns_c-1-{SECOND}.log.1").symlink_to(target)
    return made


def test_links_say_pod_container_and_id(logs: Path) -> None:
    """A log link's name has the names of pod and container, also with hyphens, and the container's whole id."""
    (found,) = log_links(logs, {UID})
    assert found[:3] == (UID, "c-1", FIRST)
    assert found.made == (logs / f"some-pod_ns_c-1-{FIRST}.log").lstat().st_mtime


@pytest.mark.parametrize(
    ("pod", "container"),
    [
        ("p" * 210, "c" * 20 + "-0123456789abcdef"),  # The id is cut off.
        ("p" * 210, "c" * 19 + "-0123456789abcdef"),  # Only the hyphen before the id remains.
        ("p" * 190, "c-1"),  # The first characters of the id remain.
        ("p" * 173, "c" * 10),  # The id lacks one character.
    ],
)
def test_a_link_without_the_whole_id_proves_nothing(tmp_path: Path, pod: str, container: str) -> None:
    """A running container whose log link's name is cut counts neither as ended nor as restarted."""
    logs, begun = tmp_path / "containers", tmp_path / "pods" / UID / "containers" / container
    logs.mkdir()
    begun.mkdir(parents=True)
    tree = CgroupTree(tmp_path / "cgroup", "v2")
    tree.create()
    tree.add_pod(UID)
    tree.add_container(UID, FIRST)
    pods = PodReader(tmp_path, tree.root, believe_checkpoint=False)
    starts = ContainerStarts(pods, logs)
    (made,) = (one.made for one in pods.containers(UID) or ())
    begin(begun, "1", made - 1.0)
    before = starts.read([UID])
    name = f"{pod}_ns_{container}-{FIRST}"[:251] + ".log"
    assert len(name) == 255
    (logs / name).symlink_to(f"/var/log/pods/ns_{pod}_{UID}/{container}/0.log")
    os.utime(logs / name, (made + 1.0, made + 1.0), follow_symlinks=False)
    assert log_links(logs, {UID}) == []
    assert ended({(UID, container)}, pods, logs) == set()
    assert not starts.restarted(before, [UID], waited=STARTING)


@pytest.mark.parametrize("layout", ["v2", "v2-systemd", "v1", "v1-systemd"])
def test_a_container_ends_with_its_processes(layout: CgroupLayout, logs: Path, tmp_path: Path) -> None:
    """A container with a log link has ended when its cgroup is gone and no cgroup of its pod is newer than the link."""
    tree = CgroupTree(tmp_path / "cgroup", layout)
    tree.create()
    pods = PodReader(tmp_path, tree.root, believe_checkpoint=False)
    asked = {(UID, "c-1"), (UID, "other")}
    assert ended(asked, pods, logs) == set(), "there is no cgroup of the pod"
    tree.add_pod(UID)
    tree.add_container(UID, FIRST)
    assert ended(asked, pods, logs) == set()
    tree.remove_container(UID, FIRST)
    assert ended(asked, pods, logs) == {(UID, "c-1")}
    assert ended(asked, pods, tmp_path / "none") == set()
    tree.add_container(UID, SECOND)
    assert ended(asked, pods, logs) == set(), "the cgroup is newer than the link"


@pytest.fixture
def begun(tmp_path: Path) -> Path:
    """Make the directory with one file for each start of container c-1 of a pod."""
    made = tmp_path / "pods" / UID / "containers" / "c-1"
    made.mkdir(parents=True)
    return made


def begin(directory: Path, name: str, at: float) -> None:
    (directory / name).touch()
    os.utime(directory, (at, at))


def test_a_container_has_restarted_when_the_kubelet_begins_to_start_it_again(
    begun: Path, logs: Path, tmp_path: Path
) -> None:
    """A container counts as restarted once the kubelet has begun another start of it, also without visible cgroups."""
    starts = ContainerStarts(PodReader(tmp_path, tmp_path / "none", believe_checkpoint=False), logs)
    begin(begun, "1", 100.0)
    before = starts.read([UID])
    assert before == {UID: {"c-1": 1}}
    assert not starts.restarted(before, [UID])
    assert starts.restarted(before, []), "the pod has ended"
    assert starts.restarted({}, [UID]), "the pod has come later"
    begin(begun, "2", 200.0)
    assert starts.restarted(before, [UID])
    (begun.parent / "c-2").mkdir()
    begin(begun.parent / "c-2", "1", 200.0)
    assert starts.restarted(before, [UID]), "the kubelet had not begun to start it"
    assert not starts.restarted({UID: {"c-1": 1, "c-2": 1}}, [UID])
    assert not starts.restarted({UID: {"c-1": 1, "c-3": 1}}, [UID]), "its directory is gone"


def test_a_container_that_has_ended_need_not_restart(begun: Path, logs: Path, tmp_path: Path) -> None:
    """A container without processes has ended if its log link, another container's later start or time shows it."""
    tree = CgroupTree(tmp_path / "cgroup", "v2")
    tree.create()
    tree.add_pod(UID)
    tree.add_container(UID, FIRST)
    starts = ContainerStarts(PodReader(tmp_path, tree.root, believe_checkpoint=False), logs)
    made = (logs / f"some-pod_ns_c-1-{FIRST}.log").lstat().st_mtime
    begin(begun, "1", made - 1.0)
    before = starts.read([UID])
    assert not starts.restarted(before, [UID]), "it runs"
    tree.remove_container(UID, FIRST)
    assert starts.restarted(before, [UID])
    tree.add_container(UID, SANDBOX)
    assert starts.restarted(before, [UID]), "its cgroup has the id of its link"
    tree.remove_container(UID, SANDBOX)
    os.utime(begun, (made + 1.0, made + 1.0))
    assert not starts.restarted(before, [UID]), "the kubelet may be starting it"
    assert starts.restarted(before, [UID], waited=STARTING)
    (begun.parent / "c-2").mkdir()
    begin(begun.parent / "c-2", "1", made + 2.0)
    assert starts.restarted(before, [UID])
    shutil.rmtree(logs)
    assert starts.restarted(before, [UID])
    tree.add_container(UID, SECOND)
    os.utime(begun, (made - 1.0, made - 1.0))
    assert not starts.restarted(before, [UID]), "without a link, this can be its cgroup"


def test_a_pod_without_containers_has_no_starts(logs: Path, tmp_path: Path) -> None:
    """A pod whose directory has no containers has no container starts; without a directory its starts are unknown."""
    starts = ContainerStarts(PodReader(tmp_path, tmp_path, believe_checkpoint=False), logs)
    with pytest.raises(OSError, match="containers"):
        starts.read([UID])
    (tmp_path / "pods" / UID).mkdir(parents=True)
    assert starts.read([UID]) == {UID: {}}
