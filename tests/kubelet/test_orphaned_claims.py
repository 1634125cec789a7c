"""Devices that claims hold through a driver that this agent does not serve are withheld from pods."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Collection
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from deviceplugin import cdi
from deviceplugin.exclusion import DeviceConflictError
from deviceplugin.identity import boot_id
from deviceplugin.kubelet.cgroups import PodProcesses, PodReader
from deviceplugin.kubelet.orphaned_claims import ENDING, OrphanedClaims
from deviceplugin.register import claim_files
from deviceplugin.register.claim_files import ClaimFile
from deviceplugin.register.question import Use
from deviceplugin.register.records import Amount, ClaimDevice
from deviceplugin.register.register import Register, RegisterHost
from deviceplugin.register.store import MemoryStore
from deviceplugin.testing import FakeKubelet
from deviceplugin.testing import claim_state as written
from deviceplugin.testing.claim_state import AnsweredDevice, DevicesOfClaim
from dra_bridge.driver.claim_files import ClaimFileStore
from tests.identities import seen_as
from tests.programs import running

R = "example.com/sim"
D = "sim.example.com"
OLD = "old.example.com"


def claim(
    *devices: str, driver: str = D, uid: str = "uid-1", others: tuple[str, ...] = (), kind: str = "claim_"
) -> DevicesOfClaim:
    """Return a claim of the kubelet's claim state. others: drivers without an answer. kind: the start of CDI names."""
    prepared = [
        AnsweredDevice(("r",), "node", name, (cdi.qualified(driver, f"{kind}{uid}_r_{name}"),), None)
        for name in devices
    ]
    return DevicesOfClaim("ml", "train", uid, {driver: prepared, **{other: [] for other in others}}, {"pod-uid"})


def file(
    root: Path, *devices: str | ClaimDevice, driver: str = D, uid: str = "uid-1", boot: str = "b", **more: Any
) -> None:
    """Write a claim file, as an agent does that prepares a claim, with these devices of R."""
    fields = {"namespace": "ml", "name": "train", "boot": boot, "pods": frozenset({"pod-uid"}), **more}
    filed = tuple(one if isinstance(one, ClaimDevice) else ClaimDevice(R, one) for one in devices)
    data = claim_files.encode(ClaimFile(driver=driver, uid=uid, devices=filed, **fields))
    ClaimFileStore(driver, str(root / "cdi")).write(uid, data)


def reader(seen: PodProcesses) -> PodReader:
    """Return a reader of cgroups that sees the pods in `seen` as running."""
    return cast("PodReader", SimpleNamespace(read=lambda: seen))


def of(root: Path, *served: str, pods: Collection[str] | None = ()) -> OrphanedClaims:
    """Return the claims that files below `root` name. pods: the pods whose processes run, or None if not known."""
    seen = PodProcesses(None if pods is None else frozenset(pods))
    return OrphanedClaims(root, served, str(root / "cdi"), reader(seen), "b")


def holder(claims: OrphanedClaims, resource: str, device: str, driver: str | None) -> str:
    """Return which claim holds a device, or why that is unknown, or "". driver: the driver of the device's resource."""
    claims.refresh(frozenset(claims.served))
    found = (use.title for use in claims.uses() if use.key == (resource, device))
    return next(found, "") or claims.problem(driver)


def nodes(claims: OrphanedClaims) -> dict[str, frozenset[str]]:
    """Return the device nodes that claims hold, by the title of the claim."""
    claims.refresh(frozenset(claims.served))
    return {use.title: use.tokens for use in claims.uses() if use.tokens}


def held(driver: str = D) -> str:
    return f"claim ml/train through driver {driver}, which is not served here"


UNKNOWN = "it is not known"


def test_what_claims_of_former_drivers_hold_is_known_by_their_files(tmp_path: Path) -> None:
    """Claims of drivers that this agent does not serve hold the devices in their claim files."""
    file(tmp_path, "a", ClaimDevice("example.com/other", "b"), driver=OLD)
    file(tmp_path, "c", uid="uid-2")
    written.write(tmp_path, [claim("fpga--a", driver=OLD), claim("c", uid="uid-2")])
    claims = of(tmp_path, D)
    assert [holder(claims, R, name, D) for name in ("a", "b", "c")] == [held(OLD), "", ""]
    assert holder(claims, "example.com/other", "b", None) == held(OLD)
    assert holder(of(tmp_path), R, "c", D) == held(D)


def test_what_another_vendors_claim_holds_is_not_known_by_its_name(tmp_path: Path) -> None:
    """Device 0 of another vendor's driver is not device 0 of this resource."""
    written.write(tmp_path, [claim("0", driver="nic.vendor.example", kind="")])
    cdi_file(tmp_path, "nic.vendor.example", "uid-1", **{"uid-1_r_0": {"path": "/dev/tty"}})
    assert [holder(of(tmp_path, *served), R, "0", D) for served in ((), (D,))] == ["", ""]


def test_a_claim_of_our_driver_without_a_file_may_hold_any_device_of_its_resource(tmp_path: Path) -> None:
    """A claim that has no claim file, and no CDI ids from an agent, may hold any device of its driver's resource."""
    written.write(tmp_path, [claim("0", others=("new.example.com",), kind="")])
    cdi_file(tmp_path, D, "uid-1", **{"uid-1_r_0": {"path": "/dev/tty"}})
    assert holder(of(tmp_path), R, "x", D) == f"{UNKNOWN} what claim ml/train through driver {D} holds"
    assert [holder(of(tmp_path), R, "0", driver) for driver in (None, OLD, "new.example.com")] == ["", "", ""]
    assert holder(of(tmp_path, D), R, "0", D) == ""


def test_a_claim_that_we_prepared_and_that_has_no_file_may_hold_any_device(tmp_path: Path) -> None:
    """If a claim was prepared by an agent (seen by its CDI names), and has no claim file, it may hold any device."""
    drivers = (None, D, OLD)
    for driver in (D, "0.example.com"):
        written.write(tmp_path, [claim("0", driver=driver)])
        claims = of(tmp_path)
        directory = tmp_path / "cdi" / "deviceplugin"
        why = f"{UNKNOWN} whether a claim holds it: there is no file of {held(driver)}, in {directory}"
        assert [holder(claims, R, "x", one) for one in drivers] == [why] * 3
        assert claims.lost() == why
        assert not of(tmp_path, driver).lost(), "who serves it asks its own evidence"
        file(tmp_path, "a", driver=driver)
        assert [holder(claims, R, "x", one) for one in drivers] == [""] * 3
        (tmp_path / "cdi" / "deviceplugin" / f"{driver}_uid-1.claim").unlink()
    written.write(tmp_path, [claim("0", kind="admin_")])
    cdi_file(tmp_path, D, "uid-1", **{"admin_uid-1_r_0": {"path": "/dev/tty"}})
    assert not of(tmp_path).lost()


def test_a_file_that_goes_while_the_kubelet_names_its_claim_is_remembered(tmp_path: Path) -> None:
    """A claim whose file is removed holds its device for as long as the claim state names the claim."""
    written.write(tmp_path, [claim("0")])
    file(tmp_path, "a")
    claims = of(tmp_path)
    assert [holder(claims, R, name, None) for name in ("a", "b")] == [held(), ""]
    (tmp_path / "cdi" / "deviceplugin" / f"{D}_uid-1.claim").unlink()
    assert [holder(claims, R, name, None) for name in ("a", "b")] == [held(), ""]
    written.write(tmp_path, [])
    assert [holder(claims, R, name, None) for name in ("a", "b")] == ["", ""]


def test_administrative_access_holds_nothing(tmp_path: Path) -> None:
    """A claim with administrative access to a device holds neither the device nor its nodes."""
    seen = ClaimDevice(R, "a", admin=True, identity=seen_as("b", "char:240:0"))
    file(tmp_path, seen, ClaimDevice(R, "b", identity=seen_as("b", "char:240:1")))
    written.write(tmp_path, [claim("a", "b")])
    claims = of(tmp_path)
    assert [holder(claims, R, name, D) for name in ("a", "b")] == ["", held()]
    assert nodes(claims) == {held(): {"char:240:1"}}


def test_a_renamed_device_is_known_by_what_it_is(tmp_path: Path) -> None:
    """A claim holds the devices that its file names and, if the file is of this boot, the file's nodes and UUIDs."""
    file(tmp_path, ClaimDevice(R, "a", identity=seen_as("b", "char:240:0", "uuid:1")), uid="uid-1")
    file(
        tmp_path,
        ClaimDevice(R, "b", identity=seen_as("before", "char:240:1")),
        uid="uid-2",
        boot="before",
        name="other",
    )
    written.write(tmp_path, [claim("a"), claim("b", uid="uid-2")])
    claims = of(tmp_path)
    assert nodes(claims) == {held(): {"char:240:0", "uuid:1"}}
    assert holder(claims, R, "b", None), "the kubelet will prepare it again"


@pytest.mark.parametrize(
    ("pods", "more", "counts"),
    [
        (["pod-uid"], {}, True),
        (["pod-2"], {}, False),
        ([], {}, False),
        (None, {}, True),  # it is not known which processes run
        ([], {"pods": frozenset()}, True),  # a claim whose pods are not known counts as running
        (["pod-uid"], {"boot": "before"}, False),
        ([], {"boot": "before", "pods": frozenset()}, False),
    ],
)
def test_a_claim_that_the_kubelet_has_forgotten_holds_while_its_processes_run(
    tmp_path: Path, pods: list[str] | None, more: dict[str, Any], counts: bool
) -> None:
    """A claim missing from the claim state holds its device while its pods' processes may run, until a reboot."""
    file(tmp_path, "a", **more)
    written.write(tmp_path, [])
    assert holder(of(tmp_path, pods=pods), R, "a", D) == (held() if counts else "")


def test_the_end_of_forgotten_processes_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every `ENDING` seconds the agent looks for processes of claims that are missing from the claim state."""
    now, looks, pods = [100.0], [0], {"pod-uid"}
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def processes() -> PodProcesses:
        looks[0] += 1
        return PodProcesses(frozenset(pods))

    written.write(tmp_path, [])
    reading = cast("PodReader", SimpleNamespace(read=processes))
    claims = OrphanedClaims(tmp_path, (), str(tmp_path / "cdi"), reading, "b")
    assert (holder(claims, R, "a", D), looks[0]) == ("", 0)
    file(tmp_path, "a")
    for _ in range(3):
        assert (holder(claims, R, "a", D), looks[0]) == (held(), 1)
    pods.clear()
    assert holder(claims, R, "a", D) == held()
    now[0] += ENDING
    assert (holder(claims, R, "a", D), looks[0]) == ("", 2)


def test_a_damaged_file_may_be_of_any_device(tmp_path: Path) -> None:
    """A damaged claim file means that a claim may hold any device, unless this agent serves the file's driver."""
    file(tmp_path, "a", driver=OLD)
    (tmp_path / "cdi" / "deviceplugin" / f"{OLD}_uid-1.claim").write_bytes(b"{")
    for named in ([], [claim("a", driver=OLD)]):
        written.write(tmp_path, named)
        assert holder(of(tmp_path), "example.com/other", "x", None).startswith(f"{UNKNOWN} whether a claim holds it")
        assert holder(of(tmp_path, OLD), R, "a", None) == ""


def test_a_directory_that_cannot_be_read_means_unknown(tmp_path: Path) -> None:
    """If the CDI directory, which has the claim files, cannot be read, it is unknown whether a claim holds a device."""
    written.write(tmp_path, [])
    (tmp_path / "cdi").write_bytes(b"")
    assert holder(of(tmp_path), R, "a", None).startswith(f"{UNKNOWN} whether a claim holds it: ")


def cdi_file(root: Path, driver: str, uid: str, **devices: Any) -> None:
    listed = [{"name": name, "containerEdits": {"deviceNodes": [node]}} for name, node in devices.items()]
    spec = {"cdiVersion": "0.5.0", "kind": f"{driver}/claim", "devices": listed}
    (root / "cdi").mkdir(exist_ok=True)
    (root / "cdi" / f"{driver}-claim_{uid}.json").write_text(json.dumps(spec))


def test_the_nodes_of_another_vendors_claim_are_known_by_its_cdi_file(tmp_path: Path) -> None:
    """The nodes of a claim of a driver that is not served here are read from its CDI file, by number or by path."""
    one, two = claim("a", driver=OLD), claim("b", uid="uid-2")
    written.write(tmp_path, [one, two])
    number = {"path": "/dev/x", "type": "c", "major": 240, "minor": 3}
    cdi_file(tmp_path, OLD, "uid-1", **{"claim_uid-1_r_a": number, "other": {"path": "/dev/y", "hostPath": "/dev/tty"}})
    cdi_file(tmp_path, D, "uid-2", **{"claim_uid-2_r_b": {"path": "/dev/y", "hostPath": "/dev/tty"}})
    expected = {held(OLD): frozenset({"char:240:3"})}
    claims = of(tmp_path, D)
    assert nodes(claims) == expected
    assert claims.uses() is claims.uses()
    written.write(tmp_path, [two])
    assert nodes(claims) == {}
    assert nodes(of(tmp_path)) == {held(): frozenset({"char:5:0"})}


def test_a_claim_with_a_file_of_ours_and_another_drivers_device(tmp_path: Path) -> None:
    """A claim has devices of two drivers: one is known from the agent's claim file, the other from a CDI file."""
    both = claim("a", driver=OLD)
    both.drivers["nic.vendor.example"] = list(claim("n", driver="nic.vendor.example").drivers["nic.vendor.example"])
    written.write(tmp_path, [both])
    file(tmp_path, ClaimDevice(R, "a", identity=seen_as("b", "char:240:1")), driver=OLD)
    for driver, name, minor in ((OLD, "a", 9), ("nic.vendor.example", "n", 2)):
        node = {"path": "/dev/x", "type": "c", "major": 240, "minor": minor}
        cdi_file(tmp_path, driver, "uid-1", **{f"claim_uid-1_r_{name}": node})
    assert nodes(of(tmp_path)) == {
        held(OLD): {"char:240:1"},
        held("nic.vendor.example"): {"char:240:2"},
    }


@pytest.mark.parametrize("text", [None, "{", "[]", '{"devices":[{"name":"claim_uid-1_r_a"}]}'])
def test_a_claim_without_a_cdi_spec_may_hold_any_device(tmp_path: Path, text: str | None) -> None:
    """While no CDI spec has a device of another vendor's claim, the claim may hold any device; its spec ends that."""
    vendor, node = "nic.vendor.example", {"path": "/dev/x", "type": "c", "major": 240, "minor": 3}
    written.write(tmp_path, [claim("a", driver=vendor, kind="")])
    (tmp_path / "cdi").mkdir()
    if text is not None:
        (tmp_path / "cdi" / f"{vendor}-claim_uid-1.json").write_text(text)
    claims = of(tmp_path, D)
    assert nodes(claims) == {}
    places = f"/etc/cdi or /var/run/cdi or {tmp_path / 'cdi'}"
    why = f"no CDI spec in {places} has {vendor}/claim=uid-1_r_a, a device of {held(vendor)}"
    assert claims.lost() == f"{UNKNOWN} whether a claim holds it: {why}"
    cdi_file(tmp_path, vendor, "uid-1", **{"uid-1_r_a": node})
    assert (nodes(claims), claims.lost()) == ({held(vendor): frozenset({"char:240:3"})}, "")


def test_a_claim_keeps_the_nodes_that_its_cdi_spec_has_had(tmp_path: Path) -> None:
    """A claim holds the nodes of a removed or changed CDI spec until the claim state drops it, also after a rename."""
    vendor, path = "nic.vendor.example", tmp_path / "cdi" / "nic.vendor.example-claim_uid-1.json"
    numbers = [{"path": "/dev/x", "type": "c", "major": 240, "minor": minor} for minor in (3, 4)]
    written.write(tmp_path, [claim("a", driver=vendor, kind="")])
    cdi_file(tmp_path, vendor, "uid-1", **{"uid-1_r_a": numbers[0]})
    claims, granted = of(tmp_path, D), {held(vendor): frozenset({"char:240:3"})}
    assert nodes(claims) == granted
    path.unlink()
    assert (nodes(claims), claims.lost()) == (granted, "")
    claims.served = (OLD,)
    assert (nodes(claims), claims.lost()) == (granted, "")
    cdi_file(tmp_path, vendor, "uid-1", **{"uid-1_r_a": numbers[1]})
    assert nodes(claims) == {held(vendor): {"char:240:3", "char:240:4"}}
    written.write(tmp_path, [])
    assert nodes(claims) == {}
    written.write(tmp_path, [claim("a", driver=vendor, kind="")])
    assert nodes(claims) == {held(vendor): {"char:240:4"}}


def test_an_unreadable_claim_state_ends_no_claim(tmp_path: Path) -> None:
    """If the claim state becomes unreadable, the claims that it named still hold their nodes."""
    written.write(tmp_path, [claim("a", driver=OLD)])
    cdi_file(tmp_path, OLD, "uid-1", **{"claim_uid-1_r_a": {"path": "/dev/x", "type": "b", "major": 7, "minor": 1}})
    claims = of(tmp_path, D)
    before = nodes(claims)
    assert set(before.values()) == {frozenset({"block:7:1"})}
    (tmp_path / written.FILE_NAME).write_text("torn")
    assert nodes(claims) == before
    (tmp_path / written.FILE_NAME).unlink()
    assert nodes(claims) == before


@pytest.mark.parametrize("damage", ["torn", "empty", "unreadable", "checksum", "dangling"])
def test_a_damaged_claim_state_means_unknown(tmp_path: Path, damage: str) -> None:
    """A damaged claim state makes every device count as held until it can be read again."""
    path = tmp_path / written.FILE_NAME
    written.write(tmp_path, [])
    text = path.read_bytes()
    claims = of(tmp_path)
    assert holder(claims, R, "a", None) == ""
    path.unlink()
    if damage == "unreadable":
        path.mkdir()
    elif damage == "dangling":
        path.symlink_to(path)
    else:
        changed = text.replace(b"DRACheckpoint", b"XXACheckpoint")
        path.write_bytes({"torn": text[:-10], "empty": b"", "checksum": changed}[damage])
    for driver in (None, D):
        reason = holder(claims, R, "a", driver)
        assert reason.startswith(f"{UNKNOWN} whether a claim holds it: ")
        assert written.FILE_NAME in reason
    path.rmdir() if damage == "unreadable" else path.unlink()
    written.write(tmp_path, [])
    assert holder(claims, R, "a", D) == ""


def test_a_kubelet_without_claim_state_has_the_claims_that_files_name(tmp_path: Path) -> None:
    """Without a claim state, only the claims that have a claim file hold devices."""
    (tmp_path / "plugins" / D).mkdir(parents=True)
    claims = of(tmp_path, pods=[])
    assert holder(claims, R, "a", D) == ""
    file(tmp_path, "a")
    assert [holder(claims, R, name, driver) for name in ("a", "b") for driver in (D, None)] == [held(), held(), "", ""]


def test_each_change_of_the_claim_state_is_noticed(tmp_path: Path) -> None:
    """Each change of the claim state counts at once: new claims hold their devices, and removed claims do not."""
    claims = of(tmp_path)
    file(tmp_path, "a", uid="a")
    file(tmp_path, "b", uid="b")
    for devices in ((), ("a",), ("b",), ()):
        before = tmp_path / "before"
        if (tmp_path / written.FILE_NAME).exists():
            os.link(tmp_path / written.FILE_NAME, before)  # the link keeps the inode: the next file has another
        written.write(tmp_path, [claim(name, uid=name) for name in devices])
        before.unlink(missing_ok=True)
        assert [bool(holder(claims, R, name, D)) for name in ("a", "b")] == [name in devices for name in ("a", "b")]


def test_each_change_of_a_claims_file_is_noticed(tmp_path: Path) -> None:
    """Each change of a claim's file is noticed at once, also if changes follow each other closely."""
    written.write(tmp_path, [claim("a")])
    claims = of(tmp_path)
    now = time.time_ns() + 3600 * 10**9  # a time later than any clock tick of this test
    for name in ("a", "b", "c"):
        file(tmp_path, name)
        os.utime(tmp_path / "cdi", ns=(now, now))
        assert [one for one in ("a", "b", "c") if holder(claims, R, one, None)] == [name]
    os.utime(tmp_path / "cdi", (1.0, 1.0))
    assert holder(claims, R, "c", None)
    file(tmp_path, "a")
    assert [bool(holder(claims, R, name, None)) for name in ("a", "c")] == [True, False]


def register(claims: OrphanedClaims) -> Register:
    """Return a register (the agent's records of holders) that has no holders except these claims."""

    class Host(RegisterHost):
        def foreign_uses(self) -> tuple[Use, ...]:
            return claims.uses()

        async def reread(self, *, checkpoint: bool = True) -> None:
            claims.refresh(frozenset(claims.served))

    return Register(Host(), MemoryStore())


async def test_what_a_claim_holds_is_granted_to_nobody_else(tmp_path: Path) -> None:
    """A device that a claim holds is refused to pods until the claim ends; other devices are granted."""
    written.write(tmp_path, [claim("a", driver=OLD)])
    file(tmp_path, ClaimDevice(R, "a", amount=Amount("1")), driver=OLD)
    asked = register(of(tmp_path))
    await asked.grant(R, {"b": "b"})
    with pytest.raises(DeviceConflictError, match=f"a of {R} is held by claim ml/train through driver old"):
        await asked.grant(R, {"a::1": "a", "c": "c"})
    os.rename(tmp_path / written.FILE_NAME, tmp_path / "before")
    written.write(tmp_path, [])
    await asked.grant(R, {"a": "a"})


@pytest.mark.parametrize("own", [False, True], ids=["a file", "an author's own"])
def test_a_plugin_alone_after_a_bridge_keeps_off_its_claims(
    fake_kubelet: FakeKubelet, tmp_path: Path, *, own: bool
) -> None:
    """`deviceplugin run` after `dra-bridge run` withholds the devices of running claims, also with a damaged ledger."""
    plugins = fake_kubelet.root / "plugins" / D
    plugins.mkdir(parents=True)
    (plugins / "ledger.db").write_text("damaged")
    written.write(fake_kubelet.root, [claim("sim-0")])
    file(tmp_path, "sim-0", boot=boot_id())
    if own:
        program = tmp_path / "plugin.py"
        program.write_text(
            "from deviceplugin import run\nfrom deviceplugin.sources.simulated import SimulatedSource\n"
            f"run(SimulatedSource(2, resource={R!r}))\n"
        )
        command = [sys.executable, str(program)]
    else:
        config = tmp_path / "config.yaml"
        config.write_text(f"resources: [{{name: {R}, driver: {D}, devices: [{{simulated: {{count: 2}}}}]}}]\n")
        command = [sys.executable, "-m", "deviceplugin", "run", "--config", str(config)]
    with running([*command, *fake_kubelet.arguments, "--cdi-dir", str(tmp_path / "cdi")]) as process:
        fake_kubelet.wait_allocatable(R, 1, timeout=30)
        health = {name: device.health for name, device in fake_kubelet.devices(R).items()}
        assert health == {"sim-0": "Unhealthy", "sim-1": "Healthy"}
        assert fake_kubelet.run_pod("p", {R: 1}).device_ids == ("sim-1",)
        written.write(fake_kubelet.root, [])
        fake_kubelet.wait_devices(R, 2, timeout=30)
        process.terminate()
        assert process.wait(30) == 0
