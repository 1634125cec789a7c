"""Devices that claims hold through drivers which nobody serves are withheld from pods."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import grpc
import pytest
from deviceplugin.kubelet.allocation_gate import Refusal

from deviceplugin.kubelet.claim_state import PreparedClaim
from deviceplugin.kubelet.orphaned_claims import FRESH, OrphanedClaimGate, OrphanedClaims, only_seen, orphaned
from deviceplugin.naming import device_name, qualifiers
from deviceplugin.testing import FakeKubelet
from deviceplugin.testing import claim_state as written
from deviceplugin.testing.claim_state import DevicesOfClaim, PreparedDevice
from tests.programs import running

R = "example.com/sim"
D = "sim.example.com"
OLD = "old.example.com"


def claim(
    *devices: str, driver: str = D, uid: str = "uid-1", admin: bool = False, others: tuple[str, ...] = ()
) -> DevicesOfClaim:
    """A claim as the kubelet keeps it. others: drivers that have not answered yet."""
    prepared = [
        PreparedDevice(("r",), "node", name, (f"{driver}/claim={'admin' if admin else 'claim'}_{uid}_r_{name}",), None)
        for name in devices
    ]
    return DevicesOfClaim("ml", "train", uid, {driver: prepared, **{other: [] for other in others}}, {"pod-uid"})


def of(root: Path, *served: str) -> OrphanedClaims:
    return OrphanedClaims(root, lambda: served, fresh=0.0)


def held(driver: str = D) -> str:
    return f"claim ml/train through driver {driver}, which is not served here"


def test_claims_of_drivers_that_are_not_served_hold(tmp_path: Path) -> None:
    """Served drivers know their claims themselves; a claim over several drivers counts for each of them."""
    two = claim("a", driver=OLD, others=("new.example.com",))
    two.drivers[D] = list(claim("b").drivers[D])
    written.write(tmp_path, [two])
    claims = of(tmp_path, D)
    assert [claims.holder(R, name, D) for name in ("a", "b", "c")] == [held(OLD), "", ""]
    assert of(tmp_path).holder(R, "b", D) == held(D)


def test_administrative_access_holds_nothing() -> None:
    """Such a claim sees a device; the bridge marks its CDI ids."""
    ids = frozenset({f"{OLD}/claim=admin_uid-1_r_a", f"{OLD}/claim=claim_uid-1_q_b", f"{OLD}/claim=admin_uid-2_r_c"})
    devices = frozenset({("node", name, "") for name in ("a", "b", "c")})
    both = PreparedClaim("uid-1", "ml", "train", frozenset(), {OLD: devices}, ids)
    assert only_seen(both, OLD) == {"a"}
    assert set(orphaned([both])) == {"b", "c"}


def test_what_a_claim_only_sees_of_one_driver_it_may_hold_of_another(tmp_path: Path) -> None:
    """A device is held though the same claim has administrative access to one of that name, or to itself, elsewhere."""
    seen = claim("a", driver=OLD, admin=True)
    seen.drivers[D] = list(claim("a").drivers[D])
    written.write(tmp_path, [seen])
    assert of(tmp_path).holder(R, "a", D) == held()
    seen.drivers = {OLD: [*seen.drivers[OLD], PreparedDevice(("q",), "node", "a", (), None)]}
    written.write(tmp_path, [seen])
    assert of(tmp_path).holder(R, "a", D) == held(OLD)
    seen.drivers[OLD].pop()
    written.write(tmp_path, [seen])
    assert of(tmp_path).holder(R, "a", D) == ""


@pytest.mark.parametrize("qualifier", ["", *qualifiers([R, "example.com/other"]).values()])
@pytest.mark.parametrize("device", ["a", "GPU_0", "a--b"])
def test_devices_are_found_by_their_published_names(tmp_path: Path, device: str, qualifier: str) -> None:
    """A driver of several resources qualifies names; which others it had, nobody knows any more."""
    written.write(tmp_path, [claim(device_name(device, qualifier), driver=OLD)])
    claims = of(tmp_path)
    expected = "" if qualifier == "other" else held(OLD)
    assert claims.holder(R, device, None) == expected
    assert claims.holder(R, "b", None) == ""


def test_two_resources_of_one_driver(tmp_path: Path) -> None:
    """Of two devices with the same id in two resources only the one that the claim names is withheld."""
    words = qualifiers([R, "example.com/other"])
    written.write(tmp_path, [claim(device_name("a", words[R]), driver=OLD)])
    claims = of(tmp_path)
    assert claims.holder(R, "a", None) == held(OLD)
    assert claims.holder("example.com/other", "a", None) == ""


def cdi_file(directory: Path, driver: str, uid: str, **devices: Any) -> None:
    listed = [{"name": name, "containerEdits": {"deviceNodes": [node]}} for name, node in devices.items()]
    spec = {"cdiVersion": "0.5.0", "kind": f"{driver}/claim", "devices": listed}
    (directory / f"{driver}-claim_{uid}.json").write_text(json.dumps(spec))


def test_the_nodes_of_a_claim_are_known_by_its_cdi_file(tmp_path: Path) -> None:
    """By the numbers in it, or those that the nodes have now; served drivers and administrative access do not count."""
    one, two, seen = claim("a", driver=OLD), claim("b", uid="uid-2"), claim("c", driver=OLD, uid="uid-3", admin=True)
    written.write(tmp_path, [one, two, seen])
    number = {"path": "/dev/x", "type": "c", "major": 240, "minor": 3}
    cdi_file(tmp_path, OLD, "uid-1", **{"claim_uid-1_r_a": number, "other": {"path": "/dev/y", "hostPath": "/dev/tty"}})
    cdi_file(tmp_path, D, "uid-2", **{"claim_uid-2_r_b": {"path": "/dev/y", "hostPath": "/dev/tty"}})
    cdi_file(tmp_path, OLD, "uid-3", **{"admin_uid-3_r_c": number})
    expected = {(OLD, "claim ml/train"): frozenset({"char:240:3"})}
    claims = OrphanedClaims(tmp_path, lambda: [D], str(tmp_path), fresh=0.0)
    assert claims.held() == expected
    assert claims.held() is claims.held()
    written.write(tmp_path, [two])
    assert claims.held() == {}
    assert OrphanedClaims(tmp_path, cdi_directory=str(tmp_path)).held() == {
        (D, "claim ml/train"): frozenset({"char:5:0"})
    }


@pytest.mark.parametrize("text", [None, "{", "[]", '{"devices":[{"name":"claim_uid-1_r_a"}]}'])
def test_a_cdi_file_that_tells_nothing(tmp_path: Path, text: str | None) -> None:
    """What the claim holds is known by its published names alone."""
    written.write(tmp_path, [claim("a", driver=OLD)])
    if text is not None:
        (tmp_path / f"{OLD}-claim_uid-1.json").write_text(text)
    claims = OrphanedClaims(tmp_path, lambda: [D], str(tmp_path), fresh=0.0)
    assert claims.held() == {}
    assert claims.holder(R, "a", D) == held(OLD)


def test_an_unreadable_claim_state_ends_no_claim(tmp_path: Path) -> None:
    """What its nodes are stays known."""
    written.write(tmp_path, [claim("a", driver=OLD)])
    cdi_file(tmp_path, OLD, "uid-1", **{"claim_uid-1_r_a": {"path": "/dev/x", "type": "b", "major": 7, "minor": 1}})
    claims = OrphanedClaims(tmp_path, lambda: [D], str(tmp_path), fresh=0.0)
    before = claims.held()
    assert set(before.values()) == {frozenset({"block:7:1"})}
    (tmp_path / written.FILE_NAME).write_text("torn")
    assert claims.held() == before


@pytest.mark.parametrize("damage", ["torn", "empty", "unreadable", "checksum", "dangling"])
def test_a_damaged_claim_state_means_unknown(tmp_path: Path, damage: str) -> None:
    """Unknown counts as held for every device, whether or not its resource names a driver, until it can be read."""
    path = tmp_path / written.FILE_NAME
    written.write(tmp_path, [])
    text = path.read_bytes()
    claims = of(tmp_path)
    assert claims.holder(R, "a", None) == ""
    path.unlink()
    if damage == "unreadable":
        path.mkdir()
    elif damage == "dangling":
        path.symlink_to(path)
    else:
        changed = text.replace(b"DRACheckpoint", b"XXACheckpoint")
        path.write_bytes({"torn": text[:-10], "empty": b"", "checksum": changed}[damage])
    for driver in (None, D):
        reason = claims.holder(R, "a", driver)
        assert reason.startswith("it is not known whether a claim holds it: ")
        assert written.FILE_NAME in reason
    path.rmdir() if damage == "unreadable" else path.unlink()
    written.write(tmp_path, [])
    assert claims.holder(R, "a", D) == ""


@pytest.mark.parametrize(
    ("directory", "driver", "withheld"),
    [
        ("", None, False),  # a node without Dynamic Resource Allocation
        ("plugins/other.example.com", D, False),
        (f"plugins/{D}", D, True),
        ("", D, True),  # the directory that would tell is not mounted
        (f"plugins/{D}", None, False),
    ],
)
def test_a_missing_claim_state(tmp_path: Path, directory: str, driver: str | None, withheld: bool) -> None:
    """It is unknown who holds what where the resource's driver has served before, or that cannot be seen."""
    (tmp_path / directory).mkdir(parents=True, exist_ok=True)
    assert bool(of(tmp_path).holder(R, "a", driver)) == withheld


def test_each_change_of_the_claim_state_is_noticed(tmp_path: Path) -> None:
    """A claim that the kubelet has had unprepared holds nothing; one that appears holds at once."""
    claims = of(tmp_path)
    for devices in ((), ("a",), ("b",), ()):
        before = tmp_path / "before"
        if (tmp_path / written.FILE_NAME).exists():
            os.link(tmp_path / written.FILE_NAME, before)  # the next file has another inode
        written.write(tmp_path, [claim(*devices)] if devices else [])
        before.unlink(missing_ok=True)
        assert [bool(claims.holder(R, name, D)) for name in ("a", "b")] == [name in devices for name in ("a", "b")]


def test_a_list_looks_at_the_claim_state_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Questions in a row are answered from one look at the file, later ones from another."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    written.write(tmp_path, [])
    claims = OrphanedClaims(tmp_path)
    assert claims.holder(R, "a", D) == ""
    written.write(tmp_path, [claim("a")])
    assert claims.holder(R, "a", D) == ""
    now[0] += 2 * FRESH
    assert [claims.holder(R, name, D) for name in ("a", "b")] == [held(), ""]


async def test_the_gate_withholds_and_offers_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What a claim holds is neither offered nor granted, with one line in the log when it begins and one at the end."""
    caplog.set_level("INFO")
    written.write(tmp_path, [claim("a", driver=OLD)])
    claims = of(tmp_path)
    gate = OrphanedClaimGate(lambda resource, device: claims.holder(resource, device, D))
    for _ in range(2):
        assert [gate.offers(R, "a"), gate.offers(R, "b")] == [False, True]
        assert [gate.claimed(R, "a"), gate.claimed(R, "b")] == [True, False]
    assert gate.avoids(R) == ()
    assert set(gate.awaited()) == {(R, "a")}
    await gate.grant(R, ["b"], ["b"])
    with pytest.raises(Refusal, match="device a is withheld: claim ml/train through driver old") as refused:
        await gate.grant(R, ["a::1", "b"], ["a", "b"])
    assert (refused.value.code, refused.value.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "claim")
    os.rename(tmp_path / written.FILE_NAME, tmp_path / "before")
    written.write(tmp_path, [])
    assert gate.offers(R, "a")
    assert not gate.awaited()
    await gate.grant(R, ["a"], ["a"])
    said = [record.getMessage() for record in caplog.records]
    assert said == [
        f"{R}: device a is withheld from pods: {held(OLD)}",
        f"{R}: device a is offered to pods again",
    ]


@pytest.mark.parametrize("own", [False, True], ids=["a file", "an author's own"])
def test_a_plugin_alone_after_a_bridge_keeps_off_its_claims(
    fake_kubelet: FakeKubelet, tmp_path: Path, *, own: bool
) -> None:
    """`deviceplugin run` in place of `dra-bridge run` withholds devices of running claims, whatever the ledger is."""
    plugins = fake_kubelet.root / "plugins" / D
    plugins.mkdir(parents=True)
    (plugins / "ledger.db").write_text("damaged")
    written.write(fake_kubelet.root, [claim("sim-0")])
    if own:
        program = tmp_path / "plugin.py"
        program.write_text(
            "from deviceplugin import run\nfrom deviceplugin.sources.simulated import SimulatedSource\n"
            f"run(SimulatedSource(2, resource={R!r}))\n"
        )
        command = [sys.executable, str(program)]
    else:
        file = tmp_path / "config.yaml"
        file.write_text(f"resources: [{{name: {R}, driver: {D}, devices: [{{simulated: {{count: 2}}}}]}}]\n")
        command = [sys.executable, "-m", "deviceplugin", "run", "--config", str(file)]
    with running([*command, *fake_kubelet.arguments]) as process:
        fake_kubelet.wait_allocatable(R, 1, timeout=30)
        health = {name: device.health for name, device in fake_kubelet.devices(R).items()}
        assert health == {"sim-0": "Unhealthy", "sim-1": "Healthy"}
        assert fake_kubelet.run_pod("p", {R: 1}).device_ids == ("sim-1",)
        written.write(fake_kubelet.root, [])
        fake_kubelet.wait_devices(R, 2, timeout=30)
        process.terminate()
        assert process.wait(30) == 0


async def test_a_grant_looks_at_the_claim_state_again(tmp_path: Path) -> None:
    """A list may be some milliseconds old; what a claim got since then is not given to a pod."""
    claims = OrphanedClaims(tmp_path, cdi_directory=str(tmp_path), fresh=3600.0)
    gate = OrphanedClaimGate(lambda resource, device: claims.holder(resource, device, D), claims.reread)
    written.write(tmp_path, [])
    assert gate.offers(R, "a")
    written.write(tmp_path, [claim("a", driver=OLD)])
    assert gate.offers(R, "a")
    with pytest.raises(Refusal):
        await gate.grant(R, ["a"], ["a"])
