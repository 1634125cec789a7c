"""The start of an agent that serves limits and claims, until it offers devices."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import threading
import time
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from deviceplugin.device import Device, Health
from deviceplugin.kubelet.claim_state import PreparedClaim
from deviceplugin.node.agent import AgentError
from deviceplugin.register.operations import reconcile_evidence
from deviceplugin.register.records import Side, State
from deviceplugin.register.rules import ClaimEvidence, Evidence
from dra_bridge.driver.driver import Driver
from dra_bridge.handover.share import Share, parse_requested
from dra_bridge.node import device_reconciliation, node_object, slice_feed
from dra_bridge.node.bridge import Bridge
from dra_bridge.node.device_reconciliation import DeviceReconciler
from dra_bridge.node.node_object import NodeWatch
from dra_bridge.node.resource import ResourceRuntime
from dra_bridge.rollout import progress
from dra_bridge.testing.node import FakeNode
from tests.dra import agents
from tests.dra.agents import NODE, D, R, fpgas
from tests.dra.ledger.samples import DirectLedger
from tests.waits import until

LEDGER = "plugins/dra-bridge/register.db"


def running(node: FakeNode, share: Share, **options: Any) -> contextlib.AbstractAsyncContextManager[Bridge]:
    return agents.running(agents.bridge(node, [fpgas(2)], share, **options))


def states(bridge: Bridge) -> dict[str, State]:
    return {name: record.state for name, record in bridge.drivers[D].async_ledger.snapshot.of(R).items()}


def reconciled(bridge: Bridge) -> set[tuple[str, str]]:
    return bridge.drivers[D].devices.context.evidence.reconciled


def claims(bridge: Bridge) -> set[str]:
    return {claim.title for claim in bridge.drivers[D].async_ledger.snapshot.claims.values()}


async def moved(bridge: Bridge, state: State) -> None:
    await until(lambda: D in bridge.drivers and set(states(bridge).values()) == {state}, "all to move")


async def test_a_lost_ledger_is_rebuilt_before_files_are_swept(node: FakeNode) -> None:
    """After a loss of the ledger, a running pod's claim keeps its device and CDI file, and its name is found again."""
    cdi = node.cdi
    async with running(node, Share(part=1.0)) as bridge:
        await moved(bridge, State.DRA)
        pod = await asyncio.to_thread(lambda: node.start_pod("train", template={D: 1}).wait_running(20))
        (device,) = node.devices_of(pod)
        title = f"default/{node.claims_of(pod)[0]}"
        assert claims(bridge) == {title}
        path = bridge.ledger_path
    for suffix in ("", "-wal"):
        Path(f"{path}{suffix}").unlink(missing_ok=True)
    files = sorted(cdi.glob("*.json"))
    async with running(node, Share(0)) as bridge:
        await until(lambda: D in bridge.drivers and len(states(bridge)) == 2, "the evidence to be reconciled")
        assert states(bridge)[device] in {State.DRA, State.TO_PLUGIN}
        await until(lambda: claims(bridge) == {title}, "the claim to be known by name")
        assert sorted(cdi.glob("*.json")) == files
        await asyncio.to_thread(pod.delete, 20)
        await moved(bridge, State.PLUGIN)
        assert list(cdi.glob("*.json")) == []


async def test_a_claim_that_ends_while_evidence_is_read_stays_ended(
    node: FakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a claim is unprepared while the starting agent reads what claims hold, the claim gets no device back."""
    async with running(node, Share(part=1.0)) as bridge:
        await moved(bridge, State.DRA)
        pod = await asyncio.to_thread(lambda: node.start_pod("train", template={D: 1}).wait_running(20))
    read, go_on = threading.Event(), threading.Event()
    claim_evidence = Driver.claim_evidence

    def late(driver: Driver, prepared: Iterable[PreparedClaim], resource: str) -> list[ClaimEvidence]:
        found = claim_evidence(driver, prepared, resource)
        read.set()
        assert go_on.wait(60)
        return found

    monkeypatch.setattr(Driver, "claim_evidence", late)
    async with running(node, Share(part=1.0)) as bridge:
        try:
            assert await asyncio.to_thread(read.wait, 60)
            assert len(claims(bridge)) == 1
            await asyncio.to_thread(pod.delete, 60)
            assert claims(bridge) == set()
        finally:
            go_on.set()
        await bridge.drivers[D].resources[R].reconciled.wait()
        assert claims(bridge) == set()
        for again in [node.start_pod(name, template={D: 1}) for name in ("p0", "p1")]:
            await asyncio.to_thread(again.wait_running, 60)


async def test_a_wiped_cdi_directory_is_filled_again(node: FakeNode) -> None:
    """If the CDI directory is removed, the files of prepared claims are soon written again."""
    cdi = node.cdi
    async with running(node, Share(part=1.0)) as bridge:
        await moved(bridge, State.DRA)
        await asyncio.to_thread(lambda: node.start_pod("train", template={D: 1}).wait_running(20))
        files = {path.name: path.read_bytes() for path in cdi.glob("*.json")}
        assert len(files) == 1
        shutil.rmtree(cdi)
        await until(lambda: {path.name for path in cdi.glob("*.json")} == files.keys(), "the file")
        assert {path.name: path.read_bytes() for path in cdi.glob("*.json")} == files


async def test_a_running_agent_renews_the_device_number_of_a_claim(
    node: FakeNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the device in a port gets another device number, the CDI file of its claim soon has this number."""
    monkeypatch.setattr("dra_bridge.driver.renewal.CHECK", 0.05)
    link = tmp_path / "by-path" / "x"
    link.parent.mkdir()
    link.symlink_to("/dev/tty")
    device = Device("d0", nodes=[str(link)])
    source = agents.Listed(R, D, device)
    async with agents.on_node(node, source) as here:
        here.ask("all")
        await here.settle(State.DRA)
        await here.claimant("train")
        (file,) = node.cdi.glob("*.json")
        assert '"hostPath":"/dev/tty"' in file.read_text()
        link.unlink()
        link.symlink_to("/dev/ptmx")
        source.list(device)
        await here.until(lambda: '"hostPath":"/dev/ptmx"' in file.read_text())


async def test_an_agent_ends_when_its_mount_shows_a_deleted_cdi_directory(
    node: FakeNode, caplog: pytest.LogCaptureFixture
) -> None:
    """The agent ends if its CDI mount (here an open descriptor) shows a directory that was deleted on the host."""
    cdi = node.cdi
    cdi.mkdir()
    mounted = os.open(cdi, os.O_RDONLY)
    try:
        async with running(node, Share(part=1.0), cdi=Path(f"/proc/self/fd/{mounted}")) as bridge:
            await moved(bridge, State.DRA)
            await asyncio.to_thread(lambda: node.start_pod("train", template={D: 1}).wait_running(20))
            assert len(list(cdi.glob("*.json"))) == 1
            shutil.rmtree(cdi)
            async with asyncio.timeout(20):
                await bridge.agent.stopping()
        assert "was deleted on the host while it is mounted here" in caplog.text
    finally:
        os.close(mounted)


async def test_a_ledger_that_lost_its_end_is_corrected_and_alarm_raised(
    node: FakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If an old ledger has a pod's device as one for claims, the device is quarantined with an Event and in no slice.

    A check then finds that the pod holds it.
    """
    monkeypatch.setattr(device_reconciliation, "RESOLVE", 3600.0)  # the test calls the check itself
    async with running(node, Share(0)) as bridge:
        await moved(bridge, State.PLUGIN)
        pod = await asyncio.to_thread(lambda: node.start_pod("train", {R: 1}).wait_running(20))
        (device,) = node.devices_of(pod)
        path = bridge.ledger_path
    Path(path).unlink()
    with DirectLedger(str(path)) as made:  # as if all records that came later had been lost
        made.do(reconcile_evidence(R, Evidence(), ["d0", "d1"], Side.DRA, 1.0, D))
    async with running(node, Share(part=1.0)) as bridge:
        # A scan or the reconciliation finds the conflict; a reconciliation after a scan resolves it at once.
        await until(
            lambda: "DeviceQuarantined" in {event["reason"] for event in node.server.objects("events")}, "the Event"
        )
        body = json.dumps([one["spec"].get("devices", []) for one in node.server.objects()])
        assert f'"{device}"' not in body
        await until(bridge.drivers[D].resources[R].reconciled.is_set, "the kubelet to show its checkpoint")
        await bridge.drivers[D].devices.resolve()
        assert states(bridge)[device] in {State.PLUGIN, State.TO_DRA}, "the pod holds it, and nobody else does"
        assert bridge.drivers[D].async_ledger.snapshot.allocations_on(R, (device,)), "the ledger has the pod"
        await asyncio.to_thread(pod.delete, 20)
        await moved(bridge, State.DRA)


async def test_a_checkpoint_that_shows_an_ended_pod_alarms_nobody(node: FakeNode) -> None:
    """If a checkpoint still shows an ended pod, that pod's device, which is now for claims, is not quarantined."""
    async with running(node, Share(0)) as bridge:
        await moved(bridge, State.PLUGIN)
        pod = await asyncio.to_thread(lambda: node.start_pod("train", {R: 1}).wait_running(20))
        checkpoint = node.device_plugin_dir / "kubelet_internal_checkpoint"
        stale = checkpoint.read_bytes()
        await asyncio.to_thread(pod.delete, 20)
        bridge.drivers[D].read_share({f"{D}/dra-share": "all"}, "")
        await moved(bridge, State.DRA)
    checkpoint.write_bytes(stale)
    async with running(node, Share(part=1.0)) as bridge:
        await until(
            lambda: D in bridge.drivers and len(bridge.drivers[D].devices.context.evidence.reconciled) == 2,
            "all doubt to be gone",
        )
        assert set(states(bridge).values()) == {State.DRA}


async def test_no_slice_has_a_device_before_its_evidence_was_reconciled(
    node: FakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device whose holder is uncertain is in no slice until that is resolved; another device is published."""
    reconcile, doubt = DeviceReconciler.reconcile, True

    async def doubting(self: DeviceReconciler, one: ResourceRuntime, devices: Sequence[str]) -> tuple[str, ...]:
        left = {"d1"} if doubt else set()
        return (*await reconcile(self, one, [device for device in devices if device not in left]), *left)

    def published() -> set[str]:
        return {device["name"] for one in node.server.objects() for device in one["spec"].get("devices") or ()}

    monkeypatch.setattr(DeviceReconciler, "reconcile", doubting)
    monkeypatch.setattr(slice_feed, "FIRST", 0.1)
    path = node.root / LEDGER
    with DirectLedger(str(path)) as made:
        made.do(reconcile_evidence(R, Evidence(), ["d0", "d1"], Side.DRA, 1.0, D))
    async with running(node, Share(part=1.0)) as bridge:
        await until(lambda: published() == {"d0"}, "the slice")
        assert reconciled(bridge) == {(R, "d0")}
        doubt = False
        await until(lambda: published() == {"d0", "d1"}, "the other device")


async def test_nothing_moves_before_the_node_was_read(
    node: FakeNode, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Until the Node is read, no device moves.

    Then its annotation, not the config, sets how many devices are for claims.
    """
    follow, back = NodeWatch.run, asyncio.Event()

    async def later(self: NodeWatch) -> None:
        await back.wait()
        await follow(self)

    monkeypatch.setattr(NodeWatch, "run", later)
    monkeypatch.setattr(node_object, "NODE_READ", 0.1)
    annotate(node, "none")
    path = node.root / LEDGER
    with DirectLedger(str(path)) as made:
        made.do(reconcile_evidence(R, Evidence(), ["d0", "d1"], Side.PLUGIN, 1.0, D))
    async with running(node, Share(part=1.0)) as bridge:
        await until(lambda: "no device moves until its annotations are known" in caplog.text, "the warning")
        await asyncio.to_thread(node.run_pod, "p", {R: 1})
        back.set()
        await until(lambda: bridge.drivers[D].resources[R].handover.share == Share(0), "what the Node asks for")
        await moved(bridge, State.PLUGIN)
        assert bridge.drivers[D].resources[R].handover.statistics.begun.total() == 0


def annotate(node: FakeNode, share: str) -> None:
    """Request by the Node's annotation how many devices are for claims (the share)."""
    body = node.server.get("nodes", NODE)
    body["metadata"].setdefault("annotations", {})[f"{D}/dra-share"] = share
    node.server.replace(body)


async def test_an_invalid_share_keeps_the_last_valid_one_over_a_restart(
    node: FakeNode, caplog: pytest.LogCaptureFixture
) -> None:
    """An invalid share (devices for claims) is logged once; the last valid one still counts, also after a restart."""
    annotate(node, "all")
    async with running(node, Share(0)) as bridge:
        await moved(bridge, State.DRA)
        annotate(node, "most")
        await until(lambda: "'most' is not a share" in caplog.text, "the error")
        body = node.server.get("nodes", NODE)
        body["metadata"]["annotations"]["other"] = "changed"
        node.server.replace(body)
        await until(lambda: "other" in (bridge.node.watch.annotations or ()), "the change to be seen")
        assert caplog.text.count("'most' is not a share") == 1
        assert bridge.drivers[D].resources[R].handover.share == Share(part=1.0)
    async with running(node, Share(0)) as bridge:
        await until(lambda: caplog.text.count("'most' is not a share; ") == 2, "the error of the new agent")
        assert "the previous share all stays" in caplog.text
        await until(lambda: D in bridge.drivers and R in bridge.drivers[D].resources, "the resource to be served")
        assert bridge.drivers[D].resources[R].handover.share == Share(part=1.0)
        assert set(states(bridge).values()) == {State.DRA}


async def test_the_log_names_the_claim_that_has_a_broken_device(
    node: FakeNode, caplog: pytest.LogCaptureFixture
) -> None:
    """If a claimed device becomes unhealthy, the log names the claim."""
    async with running(node, Share(part=1.0)) as bridge:
        await moved(bridge, State.DRA)
        pod = await asyncio.to_thread(lambda: node.start_pod("train", template={D: 1}).wait_running(20))
        (device,) = node.devices_of(pod)
        service = bridge.agent.services[R]
        listed = service.inventory.snapshot.devices.values()
        broken = [one.with_health(Health.UNHEALTHY, "XID 79") if one.id == device else one for one in listed]
        service.inventory.publish(broken)
        (claim,) = claims(bridge)
        assert f"device {device} is unhealthy: XID 79; claim {claim} has it" in caplog.text


def made_anew(body: dict[str, Any]) -> dict[str, Any]:
    """Return a new Node of this name without annotations, as after a repair by the cloud provider."""
    lost = ("annotations", "uid", "resourceVersion")
    return {**body, "metadata": {key: value for key, value in body["metadata"].items() if key not in lost}}


@pytest.mark.parametrize("share", ["all", "all force"])
async def test_the_share_outlasts_the_node_object(node: FakeNode, caplog: pytest.LogCaptureFixture, share: str) -> None:
    """The share (the devices for claims) stays if the Node is deleted, or recreated without the annotation for it.

    It survives a restart of the agent. If the annotation is removed from the same Node, the config's share counts.
    """
    annotate(node, share)
    async with running(node, Share(0)) as bridge:
        await moved(bridge, State.DRA)
        handover = bridge.drivers[D].resources[R].handover
        body = node.server.get("nodes", NODE)
        node.server.delete("nodes", NODE)
        await until(lambda: "the Node object node is gone; the requested share stays" in caplog.text, "the warning")
        assert handover.share == parse_requested(share)
        node.server.create(made_anew(body))
        stays = f"the Node was recreated without the annotation {D}/dra-share; the previous share {share} stays"
        await until(lambda: stays in caplog.text, "the other warning")
        leases = partial(node.server.objects, "leases")
        await until(lambda: (told := progress.read(D, leases())) is not None and told.kept == share, "the report")
        assert handover.share == parse_requested(share)
    async with running(node, Share(0)) as bridge:
        await until(lambda: caplog.text.count(stays) == 2, "the warning of the new agent")
        assert set(states(bridge).values()) == {State.DRA}
        annotate(node, share)
        await until(lambda: "dra-share" in str(bridge.node.watch.annotations), "the annotation to be seen")
        body = node.server.get("nodes", NODE)
        del body["metadata"]["annotations"]
        node.server.replace(body)
        await moved(bridge, State.PLUGIN)
        node.server.delete("nodes", NODE)
        node.server.create(made_anew(body))
        uid = node.server.get("nodes", NODE)["metadata"]["uid"]
        await until(lambda: bridge.node.watch.uid == uid, "the other Node")
        assert bridge.drivers[D].resources[R].handover.share == Share(0)
        assert caplog.text.count(stays) == 2


async def test_an_agent_whose_ledger_is_removed_ends_and_the_next_one_knows_the_holders(node: FakeNode) -> None:
    """An agent whose ledger is removed ends with an error; the next agent learns from files what the pod holds."""
    bridge = agents.bridge(node, [fpgas(2)], Share(0))
    task = asyncio.create_task(bridge.run())
    await moved(bridge, State.PLUGIN)
    pod = await asyncio.to_thread(lambda: node.start_pod("train", {R: 1}).wait_running(20))
    (device,) = node.devices_of(pod)
    for suffix in ("", "-wal"):
        Path(f"{bridge.ledger_path}{suffix}").unlink()
    annotate(node, "all")
    with pytest.raises(AgentError, match="the ledger was lost"):
        await asyncio.wait_for(task, 30)
    async with running(node, Share(0)) as after:
        await until(lambda: D in after.drivers and states(after).get(device) is State.TO_DRA, "the held one to wait")
        await until(lambda: State.DRA in states(after).values(), "the idle one to move")
        assert states(after)[device] is State.TO_DRA


# Moves and the publication of slices at the start.


async def test_nothing_moves_before_karpenter_has_initialized_the_node(node: FakeNode) -> None:
    """Before Karpenter has initialized a node, its devices serve pods with limits; then they move to DRA.

    Meanwhile the agent publishes an empty pool, because Karpenter's option for DRA waits for a complete pool.
    """
    node.server.patch("nodes", NODE, {"metadata": {"labels": {"karpenter.sh/nodepool": "fpgas"}}})
    async with running(node, Share(part=1.0)) as bridge:
        await until(lambda: D in bridge.drivers and len(reconciled(bridge)) == 2, "the devices to be known")
        await until(lambda: len(agents.healthy(node, R)) == 2, "the kubelet to have the devices")
        await until(lambda: len(node.server.objects()) == 1, "an empty pool")
        assert not node.server.objects()[0]["spec"].get("devices")
        reads = len(node.server.requests("GET", "/nodes"))
        assert set(states(bridge).values()) == {State.PLUGIN}
        pod = await asyncio.to_thread(node.run_pod, "first", {R: 1})
        assert set(states(bridge).values()) == {State.PLUGIN}
        await asyncio.to_thread(pod.delete, 20)
        assert len(node.server.requests("GET", "/nodes")) == reads
        initialized = {"karpenter.sh/nodepool": "fpgas", "karpenter.sh/initialized": "true"}
        node.server.patch("nodes", NODE, {"metadata": {"labels": initialized}})
        await moved(bridge, State.DRA)


async def test_a_lease_that_is_lost_is_written_again(node: FakeNode) -> None:
    """The Lease with the node's report is restored after a deletion or a change, and owned by the present Node."""

    def leases() -> list[dict[str, Any]]:
        return node.server.objects("leases")

    def report() -> str:
        return "".join((one["metadata"].get("annotations") or {}).get(f"{D}/handover", "") for one in leases())

    async with running(node, Share(0)):
        await until(lambda: '"plugin":2' in report(), "the devices to be reported")
        (lease,) = leases()
        assert (lease["metadata"]["namespace"], lease["metadata"]["name"]) == ("dra-bridge", NODE)
        assert [one["uid"] for one in lease["metadata"]["ownerReferences"]] == [
            node.server.get("nodes", NODE)["metadata"]["uid"]
        ]
        assert not node.server.objects("resourceslices")
        node.server.delete("leases", NODE, "dra-bridge")
        await until(report, "it to be written again")
        node.server.patch(
            "leases", NODE, {"metadata": {"annotations": {f"{D}/handover": "{}", "x": "y"}}}, "dra-bridge"
        )
        await until(lambda: '"plugin":2' in report(), "it to be put right")
        assert leases()[0]["metadata"]["annotations"]["x"] == "y"
        body = node.server.get("nodes", NODE)
        node.server.delete("nodes", NODE)
        node.server.create({**body, "metadata": {"name": NODE}})
        uid = node.server.get("nodes", NODE)["metadata"]["uid"]
        await until(lambda: leases()[0]["metadata"]["ownerReferences"][0]["uid"] == uid, "it to belong to the new Node")
        writes = [one for one in node.server.writes if "/leases" in one.path]
        assert len(writes) < 8


@pytest.mark.parametrize("former", [False, True])
async def test_a_pool_is_published_where_a_rollout_asks_for_it(node: FakeNode, former: bool) -> None:
    """If no device is for claims, a slice is published only while the Node's annotation `dra-pool` asks for it.

    former: an earlier agent has left slices.
    """
    if former:  # an earlier agent leaves its slice
        async with running(node, Share(part=1.0)) as bridge:
            await moved(bridge, State.DRA)
            await until(lambda: node.server.objects("resourceslices"), "the slice")
    async with running(node, Share(0)) as bridge:
        await moved(bridge, State.PLUGIN)
        await until(lambda: not node.server.objects("resourceslices"), "no slice to be there")
        slices = partial(node.server.objects, "resourceslices")
        for value, there in (("publish", True), (None, False), ("publish", True)):
            node.server.patch("nodes", NODE, {"metadata": {"annotations": {f"{D}/dra-pool": value}}})
            await until(lambda there=there: bool(slices()) is there, f"a slice: {there}")  # type: ignore[misc]
        (body,) = node.server.objects("resourceslices")
        assert not body["spec"].get("devices")


async def test_a_start_with_its_ledger_reads_each_list_once_and_writes_nothing(node: FakeNode) -> None:
    """If the ledger exists, the start lists Node, Lease and two selections of slices once each, and writes nothing."""
    async with running(node, Share(part=1.0)) as bridge:
        await moved(bridge, State.DRA)
        await until(lambda: node.server.objects("resourceslices"), "the slice")
    node.server.forget_log()
    async with running(node, Share(part=1.0)) as bridge:
        await moved(bridge, State.DRA)
        await until(lambda: bridge.publisher.observed(D, time.monotonic()).accepted, "the slices to be accepted")
        asked = [one for one in node.server.requests("GET") if not one.watch and "fieldSelector" in one.query]
        listed = sorted((one.path.rpartition("/")[2], one.query["fieldSelector"]) for one in asked)
        assert listed == [
            ("leases", f"metadata.name={NODE}"),
            ("nodes", f"metadata.name={NODE}"),
            ("resourceslices", f"spec.driver={D},spec.nodeName="),
            ("resourceslices", f"spec.nodeName={NODE}"),
        ]
        assert not node.server.requests("GET", "/resourceclaims")
        assert not node.server.writes
