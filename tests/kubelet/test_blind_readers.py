"""What each reader of evidence answers where it does not see this node's pods, and what follows: the table of
docs/architecture.md, cell by cell.

The pod of each cell was granted a device, was deleted by force, and hangs: its process runs, its directory is there.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from deviceplugin import cdi
from deviceplugin.identity import boot_id
from deviceplugin.kubelet import pod_evidence
from deviceplugin.kubelet.cgroups import PodProcesses, PodReader
from deviceplugin.kubelet.checkpoint import FILE_NAME, CheckpointReader, CheckpointVersion
from deviceplugin.kubelet.claim_state import FILE_NAME as CLAIM_STATE
from deviceplugin.kubelet.holders import EvidenceSource, HolderEvidence, holders, unknown
from deviceplugin.kubelet.orphaned_claims import OrphanedClaims
from deviceplugin.kubelet.podresources import PodResources
from deviceplugin.looks import Looks
from deviceplugin.register.copies import AllocationCopies, Copy, copies_in, write
from deviceplugin.register.records import Allocation
from deviceplugin.testing import claim_state
from deviceplugin.testing.cgroups import CgroupTree
from dra_bridge.driver.claim_files import ClaimFileStore
from tests.kubelet import test_orphaned_claims as claims

UID, OTHER, THIRD = "uid-held", "uid-other", "uid-third"
HELD = Allocation(UID, "main", "example.com/r", "a")
NOW = CheckpointVersion(frozenset(), {"example.com/r": frozenset({"a"})})
"""A checkpoint that the kubelet wrote at our request, after it had dropped the pod."""


class BlindNode:
    """A node whose pods' cgroups are in one place, and an agent that looks at another one, or does not."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.root = home / "kubelet"
        (self.root / "pods").mkdir(parents=True)
        self.real = CgroupTree(home / "real")
        self.real.create()
        self.looks_at = self.real.root
        self.agent_root = self.root
        self.believes_checkpoint = False

    def add(self, uid: str, tree: CgroupTree | None = None, *, directory: bool = True) -> None:
        """Start a pod; its cgroup is in the real tree unless another is given."""
        tree = tree or self.real
        tree.add_pod(uid)
        tree.add_container(uid, f"c-{uid}")
        if directory:
            (self.root / "pods" / uid).mkdir()

    def tree(self, name: str) -> CgroupTree:
        """Make another tree, and have the agent look there."""
        made = CgroupTree(self.home / name)
        made.create()
        self.looks_at = made.root
        return made

    def live(self) -> PodReader:
        """Have the agent look while the pod runs, as a scan that requests a checkpoint does."""
        reader = PodReader(self.agent_root, self.looks_at, believe_checkpoint=self.believes_checkpoint)
        before = reader.read({UID})
        after = reader.read({UID})
        reader.hide(after, pod_evidence.hidden(before, {UID}, after))
        return reader

    def end(self) -> None:
        """End the pod: its process and its cgroup go at once."""
        self.real.remove_pod(UID)

    def delete(self) -> None:
        """Have the kubelet remove what is left of a pod that was deleted."""
        shutil.rmtree(self.root / "pods" / UID)


@pytest.fixture
def node(tmp_path: Path) -> BlindNode:
    return BlindNode(tmp_path)


def answer(look: PodProcesses) -> str:
    """Return what follows for the device: held or free."""
    return "held" if holders([HELD], HolderEvidence([NOW], True, look)).held else "free"


Arrange = Callable[[BlindNode], "Callable[[], None] | None"]
"""Puts the agent into a situation; returns what happens after the agent has seen the pod, if anything."""


def right(node: BlindNode) -> None:
    """Nothing is wrong."""


def wrong(node: BlindNode) -> None:
    """There is no `kubepods`, or it is not mounted."""
    node.looks_at = node.home / "elsewhere"
    node.looks_at.mkdir()


def empty(node: BlindNode) -> None:
    """An empty `kubepods` was left by a kubelet with `cgroupsPerQOS: true`."""
    node.tree("left")


def old(node: BlindNode) -> None:
    """Pods that began before the kubelet's setting was changed run on in the former tree."""
    node.add(OTHER, node.tree("former"))


def second(node: BlindNode) -> None:
    """Another kubelet's pods, or another runtime's, fill the tree."""
    node.add(OTHER, node.tree("theirs"), directory=False)


def covered(node: BlindNode) -> Callable[[], None]:
    """A mount with an empty `kubepods` comes over the tree in which the pod was seen."""

    def cover() -> None:
        node.real.root.rename(node.home / "below")
        above = CgroupTree(node.looks_at)
        above.create()

    return cover


def namespace(node: BlindNode) -> None:
    """The agent has a cgroup namespace: its own cgroup is the root that it sees."""
    node.looks_at = node.home / "own"
    (node.looks_at / "init.scope").mkdir(parents=True)
    (node.looks_at / "cgroup.controllers").touch()


def hidepid(node: BlindNode) -> None:
    """Processes of others are not seen, and `cgroup.procs` is empty: of version 1 a container's cgroup counts."""
    node.real = CgroupTree(node.home / "v1", "v1")
    node.real.create()
    node.looks_at = node.real.root


SITUATIONS = [right, wrong, empty, old, second, covered, namespace, hidepid]


def in_cgroups(node: BlindNode, situation: Arrange) -> PodReader:
    later = situation(node)
    node.add(UID)
    if situation is hidepid:
        for procs in node.real.root.rglob("cgroup.procs"):
            procs.write_text("")
    reader = node.live()
    if later is not None:
        later()
    return reader


@pytest.mark.parametrize("situation", SITUATIONS)
def test_cgroups(node: BlindNode, situation: Arrange) -> None:
    """Held while the pod hangs, by its directory where the cgroups do not show it; free when that is gone."""
    reader = in_cgroups(node, situation)
    assert answer(reader.read()) == "held"
    if situation is covered:
        node.real.root = node.home / "below"
    node.end()
    # Where its cgroup would be seen it is free at once; else when it is deleted.
    seen = situation in (right, hidepid)
    look = reader.read()
    assert answer(look) == ("free" if seen else "held")
    assert look.is_unknown(UID) is not seen
    said = pod_evidence.problem(look, "/sys/fs/cgroup", {})
    assert seen or situation is covered or "comes free only when the pod is deleted" in said
    node.delete()
    assert answer(reader.read()) == "free"


@pytest.mark.parametrize("situation", SITUATIONS)
def test_cgroups_with_a_plugin_alone(node: BlindNode, situation: Arrange) -> None:
    """What was seen and cannot be seen now is held; of what was never seen the checkpoint decides, and it is said."""
    node.believes_checkpoint = True
    reader = in_cgroups(node, situation)
    look = reader.read()
    assert answer(look) == ("held" if situation in (right, hidepid, covered) else "free")
    if situation not in (right, hidepid, covered):
        said = pod_evidence.problem(look, "/sys/fs/cgroup", {})
        assert "cgroupsPerQOS" in said
        assert "comes free when the kubelet counts its pod as ended" in said
        evidence = HolderEvidence([NOW], True, look)
        assert unknown([HELD], evidence, asked=True) == {EvidenceSource.CGROUPS}


@pytest.mark.parametrize("situation", SITUATIONS)
def test_cgroups_after_a_restart_of_the_agent(node: BlindNode, situation: Arrange) -> None:
    """What the former agent has seen is in the register: the place of a pod, or that it was hidden."""
    before = in_cgroups(node, situation)
    record = before.shown.of({UID})
    after = PodReader(node.root, node.looks_at, believe_checkpoint=False)
    after.known(pod_evidence.recorded(record, ""))
    assert answer(after.read()) == "held"
    if situation is covered:
        node.real.root = node.home / "below"
    node.end()
    assert answer(after.read()) == ("free" if situation in (right, hidepid) else "held")


@pytest.mark.parametrize("others", [True, False])
def test_a_pod_that_was_never_seen(node: BlindNode, others: bool) -> None:
    """It has ended if other pods of this kubelet run where the agent looks; else its directory counts."""
    if others:
        node.add(OTHER)
    (node.root / "pods" / UID).mkdir()  # it lasted 0.2 s, and is not deleted
    reader = PodReader(node.root, node.looks_at, believe_checkpoint=False)
    reader.read({OTHER})
    reader.read({UID})
    assert answer(reader.read()) == ("free" if others else "held")
    node.delete()
    assert answer(reader.read()) == "free"


def test_a_pod_that_was_hidden_makes_all_others_unknown(node: BlindNode) -> None:
    """Once a pod runs that is not in the tree, no pod that was not seen there itself counts as ended."""
    former = node.tree("former")
    node.add(OTHER, former)
    node.add(UID)
    reader = node.live()
    assert not reader.read().shows(THIRD)
    assert reader.read().shows(OTHER), "it was seen there itself"
    former.remove_pod(OTHER)
    assert not reader.read().may_run(OTHER)


@pytest.mark.parametrize("restart", [False, True])
def test_a_pod_that_was_hidden_stays_so(node: BlindNode, *, restart: bool) -> None:
    """A cgroup that a kubelet with other settings makes for the pod later is empty, and does not have its processes."""
    node.add(OTHER, shown := node.tree("shown"), directory=False)
    node.add(UID)
    reader = node.live()
    assert answer(reader.read()) == "held"
    if restart:
        recorded = pod_evidence.recorded(reader.shown.of([UID]), "")
        reader = PodReader(node.agent_root, node.looks_at, believe_checkpoint=False)
        reader.known(recorded)
    shown.add_pod(UID)
    assert answer(reader.read({UID})) == "held"
    node.delete()
    shown.remove_pod(UID)
    assert answer(reader.read()) == "free"


def test_a_pods_own_cgroup_that_is_covered(node: BlindNode) -> None:
    """An empty directory in the place of a pod's cgroup is no cgroup, and does not tell that the pod has ended."""
    node.add(UID)
    reader = node.live()
    (path,) = reader.read().paths[UID]
    shutil.rmtree(path)
    Path(path).mkdir()
    assert answer(reader.read()) == "held"
    assert reader.containers(UID) is None, "it is not known which containers run"


def root_right(node: BlindNode) -> None:
    """The pods' directories are those of this kubelet."""


def root_wrong(node: BlindNode) -> None:
    """The kubelet's root is not mounted, or is another one."""
    node.agent_root = node.home / "none"


def root_empty(node: BlindNode) -> None:
    """A directory without pods."""
    node.agent_root = node.home / "empty"
    (node.agent_root / "pods").mkdir(parents=True)


def root_of_others(node: BlindNode) -> None:
    """A second kubelet's root, or the one of before `--root-dir` was changed."""
    node.agent_root = node.home / "other"
    (node.agent_root / "pods" / OTHER).mkdir(parents=True)


def root_covered(node: BlindNode) -> Callable[[], None]:
    """A mount comes over the directory in which the pod's was seen."""

    def cover() -> None:
        (node.root / "pods").rename(node.root / "below")
        (node.root / "pods").mkdir()

    return cover


@pytest.mark.parametrize("situation", [root_right, root_wrong, root_empty, root_of_others, root_covered])
def test_pod_directories(node: BlindNode, situation: Arrange) -> None:
    """Without cgroups they decide; where they showed no pod of this kubelet, the device is held, and it is said."""
    wrong(node)
    later = situation(node)
    node.add(UID)
    reader = node.live()
    if later is not None:
        later()
    assert answer(reader.read()) == "held"
    (node.root / ("below" if situation is root_covered else "pods") / UID).rmdir()
    node.end()
    look = reader.read()
    assert answer(look) == ("free" if situation is root_right else "held")
    if situation is not root_right:
        evidence = HolderEvidence([NOW], True, look)
        assert unknown([HELD], evidence, asked=True) == {EvidenceSource.CGROUPS, EvidenceSource.POD_DIRECTORIES}
        assert "mount the kubelet's root directory" in pod_evidence.problem(look, "/sys/fs/cgroup", {})


NOBODY = b'{"Data": {"PodDeviceEntries": [], "RegisteredDevices": {}}, "Checksum": 0}'


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(None, id="wrong place"),
        pytest.param(b"", id="empty"),
        pytest.param(NOBODY, id="old, another kubelet's, or the mount of a single file, which is replaced"),
    ],
)
async def test_checkpoint(tmp_path: Path, text: bytes | None) -> None:
    """One that was not written at our request proves nothing: held, whatever the cgroups say."""
    if text is not None:
        (tmp_path / FILE_NAME).write_bytes(text)
    lists: Any = SimpleNamespace(resend=lambda: True, adopted=lambda resource: False)
    reader = CheckpointReader(tmp_path, lists, lambda: (HELD,), Looks("checkpoint"))
    written, problem = await reader.written(patience=0.05)
    evidence = HolderEvidence(written, bool(written), PodProcesses(frozenset()), problem)
    assert problem
    assert HELD in holders([HELD], evidence).held
    assert unknown([HELD], evidence, asked=True) == {EvidenceSource.CHECKPOINT}


@pytest.mark.parametrize("situation", ["wrong place", "empty", "old", "another agent's"])
def test_copies_of_allocations(tmp_path: Path, situation: str) -> None:
    """They add holders and end none: what is absent from them says nothing."""
    directory = Path(copies_in(str(tmp_path)))
    if situation != "wrong place":
        directory.mkdir(parents=True)
    if situation == "old":
        write(str(directory / "other.json"), Copy("another-boot", 1, ()))
    elif situation == "another agent's":
        write(str(directory / "other.json"), Copy(boot_id(), 1, ()))
    copies = AllocationCopies(tmp_path, tmp_path, "dra-bridge")
    copies.read()
    assert copies.changed() == {}
    assert HELD in holders([HELD], HolderEvidence([NOW], True, PodProcesses(frozenset({UID})))).held


@pytest.mark.parametrize("situation", ["wrong place", "empty", "old", "another kubelet's"])
@pytest.mark.parametrize("visible", [True, False])
def test_claim_state(tmp_path: Path, situation: str, visible: bool) -> None:
    """A claim that it does not name is held while a process of its pods may run, and if it cannot be read at all."""
    claims.file(tmp_path, "a")
    if situation == "empty":
        (tmp_path / CLAIM_STATE).write_bytes(b"")
    elif situation != "wrong place":
        claim_state.write(tmp_path, [] if situation == "old" else [claims.claim("z", uid="uid-9", kind="")])
    of = claims.of(tmp_path, pods=() if visible else None)
    if not visible:
        of.pods = cast("PodReader", SimpleNamespace(read=PodProcesses))
    named = situation in ("old", "another kubelet's")
    held = bool(claims.holder(of, claims.R, "a", None))
    assert held is not (named and visible)
    assert of.unknown() == ({EvidenceSource.CLAIM_STATE} if situation == "empty" else frozenset())


@pytest.mark.parametrize("situation", ["wrong place", "empty", "another's"])
def test_claim_files(tmp_path: Path, situation: str) -> None:
    """A claim that an agent of ours prepared, by the claim state, and that has no file, may hold any device."""
    claim_state.write(tmp_path, [claims.claim("a", kind=f"{cdi.HOLDING}_")])
    if situation == "empty":
        ClaimFileStore(claims.D, str(tmp_path / "cdi")).write("uid-1", b"")
    elif situation == "another's":
        claims.file(tmp_path, "a", uid="uid-2", boot="another")
    found: OrphanedClaims = claims.of(tmp_path)
    assert claims.holder(found, claims.R, "anything", None)
    assert found.unknown() == {EvidenceSource.CLAIM_FILES}


async def test_pod_resources(tmp_path: Path) -> None:
    """Where nobody answers there is no report, and without one no pod counts as dropped; an answer ends no holder."""
    assert await PodResources(tmp_path / "none.sock", timeout=0.5).list() is None
