"""Whether a device counts as held if the agent cannot see this node's pods: the table of docs/architecture.md.

In most tests a pod that has a device was deleted by force and hangs: its process runs, and its directory exists.
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
from deviceplugin.kubelet.paths import Paths
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
"""A checkpoint that the kubelet wrote at the agent's request, after it had removed the entry of the deleted pod."""


class BlindNode:
    """A node whose pods' cgroups are in one tree, and an agent that may look at another tree."""

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
        """Start a pod with a cgroup in the real tree, unless another tree is given."""
        tree = tree or self.real
        tree.add_pod(uid)
        tree.add_container(uid, f"c-{uid}")
        if directory:
            (self.root / "pods" / uid).mkdir()

    def tree(self, name: str) -> CgroupTree:
        """Make another cgroup tree; from now on the agent reads this tree."""
        made = CgroupTree(self.home / name)
        made.create()
        self.looks_at = made.root
        return made

    def live(self) -> PodReader:
        """Have the agent read cgroups and pod directories while the pod runs; return the agent's reader."""
        reader = PodReader(self.agent_root, self.looks_at, believe_checkpoint=self.believes_checkpoint)
        before = reader.read({UID})
        after = reader.read({UID})
        reader.hide(after, pod_evidence.hidden(before, {UID}, after))
        return reader

    def end(self) -> None:
        """End the pod: its process and its cgroup are gone at once."""
        self.real.remove_pod(UID)

    def delete(self) -> None:
        """Have the kubelet remove the directory of the deleted pod."""
        shutil.rmtree(self.root / "pods" / UID)


@pytest.fixture
def node(tmp_path: Path) -> BlindNode:
    return BlindNode(tmp_path)


def answer(look: PodProcesses) -> str:
    """Return whether the device counts as held or free."""
    return "held" if holders([HELD], HolderEvidence([NOW], True, look)).held else "free"


Arrange = Callable[[BlindNode], "Callable[[], None] | None"]
"""Prepares a situation; may return a function that changes it after the agent has seen the pod."""


def right(node: BlindNode) -> None:
    """The agent sees the cgroups of all pods."""


def wrong(node: BlindNode) -> None:
    """The agent's cgroup tree has no `kubepods` directory, for example because the host's tree is not mounted."""
    node.looks_at = node.home / "elsewhere"
    node.looks_at.mkdir()


def empty(node: BlindNode) -> None:
    """The agent sees only an empty `kubepods`, which a kubelet with `cgroupsPerQOS: true` has left."""
    node.tree("left")


def old(node: BlindNode) -> None:
    """The agent sees a former tree, in which pods from before a change of the kubelet's settings still run."""
    node.add(OTHER, node.tree("former"))


def second(node: BlindNode) -> None:
    """The agent sees a tree with the pods of another kubelet or runtime."""
    node.add(OTHER, node.tree("theirs"), directory=False)


def covered(node: BlindNode) -> Callable[[], None]:
    """After the agent has seen the pod, a mount with an empty `kubepods` covers the cgroup tree."""

    def cover() -> None:
        node.real.root.rename(node.home / "below")
        above = CgroupTree(node.looks_at)
        above.create()

    return cover


def namespace(node: BlindNode) -> None:
    """The agent has a cgroup namespace of its own, so the root of its cgroup tree is its own cgroup."""
    node.looks_at = node.home / "own"
    (node.looks_at / "init.scope").mkdir(parents=True)
    (node.looks_at / "cgroup.controllers").touch()


def hidepid(node: BlindNode) -> None:
    """The agent sees no other users' processes (`cgroup.procs` is empty), but it sees containers' cgroups (v1)."""
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
    """A hanging pod holds its device. If its cgroup is not visible, only the end of its directory frees the device."""
    reader = in_cgroups(node, situation)
    assert answer(reader.read()) == "held"
    if situation is covered:
        node.real.root = node.home / "below"
    node.end()
    # If the pod's cgroup is visible, the end of the cgroup frees the device at once; else the pod's deletion does.
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
    """Without DRA, a pod whose cgroup was seen still holds its device; for other pods the checkpoint decides."""
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
    """A restarted agent knows from its saved records whether it has seen the pod's cgroup, and decides as before."""
    before = in_cgroups(node, situation)
    record = before.shown.of({UID})
    after = PodReader(node.root, node.looks_at, believe_checkpoint=False)
    after.known(pod_evidence.recorded(record, ""))
    assert answer(after.read()) == "held"
    if situation is covered:
        node.real.root = node.home / "below"
    node.end()
    assert answer(after.read()) == ("free" if situation in (right, hidepid) else "held")


KIND = "docker/0123/kubelet"


@pytest.mark.parametrize(
    ("what", "theirs"),
    [
        ("runs in its own tree", True),
        ("runs in a tree of another class of service of this kubelet", False),
        ("has a directory below this kubelet's root", False),
        ("this kubelet's directories are not visible", False),
        ("no pod of this kubelet was seen", False),
        ("a pod of this kubelet was seen in its tree", False),
        ("started after the directories were read", False),
    ],
)
def test_pods_of_another_kubelet(node: BlindNode, what: str, theirs: bool) -> None:
    """A pod of another kubelet (kind) uses nothing of this node if its cgroup tree and lack of a directory show it."""
    tree = CgroupTree(node.real.root / KIND)
    tree.create()
    for file in node.real.root.glob(f"{KIND.split('/')[0]}/**/cgroup.controllers"):
        file.unlink()
    if what == "this kubelet's directories are not visible":
        node.agent_root = node.home / "none"
    if what == "runs in a tree of another class of service of this kubelet":
        pod = node.real.root / "kubepods" / f"pod{OTHER}"
        pod.mkdir()
        (pod / "cgroup.events").write_text("populated 1\n")
    else:
        node.add(OTHER, tree, directory=what == "has a directory below this kubelet's root")
    if what == "a pod of this kubelet was seen in its tree":
        node.add(THIRD, tree)
    if what != "no pod of this kubelet was seen":
        node.add(UID)
    reader = PodReader(node.agent_root, node.looks_at, believe_checkpoint=False)
    reader.read({UID, THIRD})
    if what == "started after the directories were read":
        reader.seen = {UID: 0.0}
    look = reader.read()
    assert OTHER in (look.running or ())
    assert (OTHER not in look.may_be_ours) is theirs
    assert (UID in look.may_be_ours) is (UID in (look.running or ()))
    node.end()
    node.add(UID + "-next")
    assert look.may_run(OTHER), "the rule ends no holder"


@pytest.mark.parametrize("others", [True, False])
def test_a_pod_that_was_never_seen(node: BlindNode, others: bool) -> None:
    """A pod with a cgroup never seen has ended if other pods' cgroups are visible, else once its directory is gone."""
    if others:
        node.add(OTHER)
    (node.root / "pods" / UID).mkdir()  # the pod ran for 0.2 s, and its directory is left
    reader = PodReader(node.root, node.looks_at, believe_checkpoint=False)
    reader.read({OTHER})
    reader.read({UID})
    assert answer(reader.read()) == ("free" if others else "held")
    node.delete()
    assert answer(reader.read()) == "free"


def test_a_pod_that_was_hidden_makes_all_others_unknown(node: BlindNode) -> None:
    """If a running pod is not in the cgroup tree, other pods count as ended only if they were seen in that tree."""
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
    """A pod that the agent could not see gets a visible, empty cgroup: the pod holds its device until deleted."""
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
    """An empty directory in place of a pod's cgroup does not prove the pod's end: the pod still holds its device."""
    node.add(UID)
    reader = node.live()
    (path,) = reader.read().paths[UID]
    shutil.rmtree(path)
    Path(path).mkdir()
    assert answer(reader.read()) == "held"
    assert reader.containers(UID) is None, "it is not known which containers run"


def root_right(node: BlindNode) -> None:
    """The kubelet's root that the agent sees has the directories of this kubelet's pods."""


def root_wrong(node: BlindNode) -> None:
    """The kubelet's root does not exist where the agent looks for it."""
    node.agent_root = node.home / "none"


def root_empty(node: BlindNode) -> None:
    """The kubelet's root that the agent sees has an empty `pods` directory."""
    node.agent_root = node.home / "empty"
    (node.agent_root / "pods").mkdir(parents=True)


def root_of_others(node: BlindNode) -> None:
    """The agent sees the root of another kubelet, or the root that the kubelet had before a change of `--root-dir`."""
    node.agent_root = node.home / "other"
    (node.agent_root / "pods" / OTHER).mkdir(parents=True)


def root_covered(node: BlindNode) -> Callable[[], None]:
    """After the agent has seen the pod's directory, an empty `pods` directory covers that of the kubelet."""

    def cover() -> None:
        (node.root / "pods").rename(node.root / "below")
        (node.root / "pods").mkdir()

    return cover


@pytest.mark.parametrize("situation", [root_right, root_wrong, root_empty, root_of_others, root_covered])
def test_pod_directories(node: BlindNode, situation: Arrange) -> None:
    """Without cgroups the end of a pod's directory frees the device, if the agent sees this kubelet's directories."""
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
    """A checkpoint that was not written at the agent's request proves nothing: the device counts as held."""
    if text is not None:
        (tmp_path / FILE_NAME).write_bytes(text)
    lists: Any = SimpleNamespace(resend=lambda: True, adopted=lambda resource: False)
    reader = CheckpointReader(Paths(device_plugin_dir=tmp_path), lists, lambda: (HELD,), Looks("checkpoint"))
    written, problem = await reader.written(patience=0.05)
    evidence = HolderEvidence(written, bool(written), PodProcesses(frozenset()), problem)
    assert problem
    assert HELD in holders([HELD], evidence).held
    assert unknown([HELD], evidence, asked=True) == {EvidenceSource.CHECKPOINT}


@pytest.mark.parametrize("situation", ["wrong place", "empty", "old", "another agent's"])
def test_copies_of_allocations(tmp_path: Path, situation: str) -> None:
    """An allocation counts as held even if other agents' copies of the allocations do not name it."""
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
    """A claim missing from the claim state holds its device while its pods may run, or if the state is unreadable."""
    claims.file(tmp_path, "a")
    if situation == "empty":
        (tmp_path / CLAIM_STATE).write_bytes(b"")
    elif situation != "wrong place":
        claim_state.write(tmp_path, [] if situation == "old" else [claims.claim("z", uid="uid-9", kind="")])
        claims.cdi_file(tmp_path, claims.D, "uid-9", **{"uid-9_r_z": {"path": "/dev/tty"}})
    of = claims.of(tmp_path, pods=() if visible else None)
    if not visible:
        of.pods = cast("PodReader", SimpleNamespace(read=PodProcesses))
    named = situation in ("old", "another kubelet's")
    held = bool(claims.holder(of, claims.R, "a", None))
    assert held is not (named and visible)
    assert of.unknown() == ({EvidenceSource.CLAIM_STATE} if situation == "empty" else frozenset())


@pytest.mark.parametrize("situation", ["wrong place", "empty", "another's"])
def test_claim_files(tmp_path: Path, situation: str) -> None:
    """A claim whose CDI names show that an agent prepared it may hold any device if its file is missing."""
    claim_state.write(tmp_path, [claims.claim("a", kind=f"{cdi.HOLDING}_")])
    if situation == "empty":
        ClaimFileStore(claims.D, str(tmp_path / "cdi")).write("uid-1", b"")
    elif situation == "another's":
        claims.file(tmp_path, "a", uid="uid-2", boot="another")
    found: OrphanedClaims = claims.of(tmp_path)
    assert claims.holder(found, claims.R, "anything", None)
    assert found.unknown() == {EvidenceSource.CLAIM_FILES}


@pytest.mark.parametrize("situation", ["wrong place", "empty", "another's"])
def test_cdi_files_of_other_vendors(tmp_path: Path, situation: str) -> None:
    """A claim of another vendor's driver may hold any device while no CDI spec has the claim's CDI device."""
    claim_state.write(tmp_path, [claims.claim("a", driver="nic.vendor.example", kind="")])
    claims.cdi_file(tmp_path, "nic.vendor.example", "uid-2", **{"uid-2_r_a": {"path": "/dev/tty"}})
    if situation == "empty":
        (tmp_path / "cdi" / "nic.vendor.example-claim_uid-1.json").write_bytes(b"")
    elif situation == "wrong place":
        shutil.rmtree(tmp_path / "cdi")
    found: OrphanedClaims = claims.of(tmp_path)
    assert claims.holder(found, claims.R, "anything", None)
    assert found.unknown() == {EvidenceSource.CLAIM_FILES}


async def test_pod_resources(tmp_path: Path) -> None:
    """If the kubelet's PodResources service cannot be reached, `list` returns None."""
    assert await PodResources(tmp_path / "none.sock", timeout=0.5).list() is None
