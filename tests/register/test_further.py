"""After further changes of the config, lost files and restarts, no device has two holders, and none is lost."""

from __future__ import annotations

import asyncio
import threading
import uuid
from collections.abc import AsyncIterator, Sequence

import pytest

from deviceplugin.device import ContainerEdits, Device
from deviceplugin.kubelet.podresources import PodResources, PodResourcesReport
from deviceplugin.register import rules
from deviceplugin.source import DeviceSource
from deviceplugin.testing import FakePod
from dra_bridge.driver import driver
from dra_bridge.node import slice_feed
from dra_bridge.testing.node import FakeNode
from dra_bridge.testing.serving import device_class
from tests.dra.agents import Listed
from tests.dra.objects import unserved
from tests.register.node import (
    BOTH,
    SHARE,
    TOKENS,
    A,
    B,
    D,
    E,
    Here,
    got,
    offering,
    policies,
    restart_without_register,
    running,
    serving,
)

# Drivers that are added, renamed, or cannot be served.


class Slow(Listed):
    """A source whose hook `prepare` waits until a test sets `end`."""

    def __init__(self, driver: str) -> None:
        super().__init__(A, driver)
        self.began = asyncio.Event()
        self.end = asyncio.Event()

    async def prepare(self, devices: Sequence[Device], config: object) -> None:
        self.began.set()
        await self.end.wait()


@SHARE
async def test_a_prepare_in_flight_keeps_its_device_when_the_driver_is_renamed(node: FakeNode, share: str) -> None:
    """If a reload renames the driver during a Prepare, only the claim of this Prepare gets the device."""
    async with serving(node, source := Slow(D), share="all") as here:
        await here.until(lambda: here.sliced() == {"d0", "d1"})
        pod = node.start_pod("p", template={D: 1})
        await asyncio.wait_for(source.began.wait(), 15)
        (claim,) = node.server.objects("resourceclaims")
        (held,) = [one["device"] for one in claim["status"]["allocation"]["devices"]["results"]]
        (idle,) = {"d0", "d1"} - {held}
        await here.serve(Listed(A, E), share=share)
        if share == "none":
            await here.until(lambda: idle in here.healthy())
            others = [await here.run(f"p{number}", {A: 1}) for number in range(2)]
        else:
            others = [node.start_pod(f"p{number}", template={E: 1}) for number in range(2)]
            await here.until(lambda: running(node, idle))
        source.end.set()
        await asyncio.to_thread(pod.wait_running, 15)
        await here.scans()
        assert running(node, held) == {pod.uid}
        for one in (pod, *others):
            await here.stopped(one)


@TOKENS
@pytest.mark.parametrize("before", ["", E])
async def test_a_reload_just_after_an_allocate_forgets_no_grant(
    node: FakeNode, monkeypatch: pytest.MonkeyPatch, before: str, tokens: bool
) -> None:
    """If a reload sets a driver before the checkpoint names a grant's container, no claim gets the granted device."""
    monkeypatch.setattr(rules, "WELL_APART", 3600.0)
    async with serving(node, Listed(A, before, tokens=tokens)) as here:
        await here.until(lambda: here.healthy() == {"d0", "d1"})
        await here.take(A, "d0")
        await here.serve(Listed(A, D, tokens=tokens), share="all")
        await here.until(lambda: "d1" in here.sliced())
        await here.scans()
        assert here.sliced() == {"d1"}
        assert await here.prepare(D, here.allocate("c", D, "d0")) != ""
        node.remove_claim("c")
        monkeypatch.setattr(rules, "WELL_APART", 0.0)
        await here.until(lambda: here.sliced() == {"d0", "d1"})


async def test_devices_leave_a_former_driver_one_by_one(node: FakeNode) -> None:
    """After a rename of the driver each device moves to the new driver when its own claim has ended."""
    async with offering(node, Listed(A, D), share="all") as here:
        pods = [await here.claimant(name) for name in ("p0", "p1")]
        held = [set(node.devices_of(pod)) for pod in pods]
        await here.serve(Listed(A, E), share="all")
        await here.until(lambda: not here.sliced())
        await here.scans()
        assert not here.sliced(E)
        await here.stopped(pods[0])
        await here.until(lambda: here.sliced(E) == held[0])
        await here.stopped(pods[1])
        await here.until(lambda: here.sliced(E) == {"d0", "d1"})


async def by_limits(here: Here, name: str) -> FakePod:
    """Run a pod with a limit of one device, which it gets through DRA."""
    pod = here.node.start_pod(name, {A: 1})
    await asyncio.to_thread(pod.wait_running, 15)
    return pod


async def test_devices_of_pods_by_limits_leave_a_former_driver_one_by_one(node: FakeNode) -> None:
    """After a rename of the driver, a device can go to the new driver while pods have other devices through DRA.

    Meanwhile the device plugin does not show the device, since a kubelet restart would then end younger pods.
    """
    node.server.create(device_class(A, D))
    async with offering(node, Listed(A, D), share="all") as here:
        pods = [await by_limits(here, name) for name in ("p0", "p1")]
        held = [set(node.devices_of(pod)) for pod in pods]
        node.server.create(device_class(A, E))
        await here.serve(Listed(A, E), share="all")
        await here.stopped(pods[0])
        new = await by_limits(here, "new")
        assert set(node.devices_of(new)) == held[0]
        assert not here.healthy()
        await here.stopped(pods[1])
        await here.until(lambda: here.sliced(E) == {"d0", "d1"})
        assert new.running


@SHARE
async def test_what_waits_at_a_former_driver_is_reported(
    node: FakeNode, monkeypatch: pytest.MonkeyPatch, share: str
) -> None:
    """The new driver's report names the claim for whose end a device of the former driver waits.

    A free device waits too, if it is to go to the device plugin, or while a claim has it allocated.
    """
    monkeypatch.setattr(slice_feed, "HOLDERS", 0.1)
    node.server.create(device_class(A, D))
    async with offering(node, Listed(A, D), share="all") as here:
        pod = await by_limits(here, "p")
        (held,) = node.devices_of(pod)
        (idle,) = {"d0", "d1"} - {held}
        if share == "all":
            claim = here.allocate("c", D, idle)
        await here.serve(Listed(A, E), share=share)
        here.driver = E
        waits_for = {held: "claim default/p-", idle: "claim default/c" if share == "all" else "claim default/p-"}
        await here.until(
            lambda: (
                waits_for.keys() == here.told.keys()
                and all(here.told[name].waits.startswith(what) for name, what in waits_for.items())
            )
        )
        await here.scans()
        assert not here.sliced(E)
        assert not here.healthy()
        if share == "all":
            assert await here.prepare(D, claim) == ""
            assert await here.unprepare(D, claim) == ""
            node.remove_claim("c")
            await here.until(lambda: here.sliced(E) == {idle})
        await here.stopped(pod)
        await here.until(lambda: (here.sliced(E) if share == "all" else here.healthy()) == {"d0", "d1"})


@SHARE
async def test_a_renamed_driver_that_cannot_be_served_can_be_named_as_before(node: FakeNode, share: str) -> None:
    """If a driver is renamed to one that cannot be served, and back, its devices are offered as before."""
    async with serving(node, Listed(A, D), share=share) as here:
        offered = here.healthy if share == "none" else here.sliced
        await here.until(lambda: offered() == {"d0", "d1"})
        with unserved(E):
            await here.serve(Listed(A, E), share=share)
        await here.serve(Listed(A, D), share=share)
        missing = here.agent.register.evidence_missing  # until holders are known, the kubelet may have the first list
        await here.until(lambda: not (missing(A, "d0") or missing(A, "d1")))
        await here.until(lambda: offered() == {"d0", "d1"})
        pod = await (here.run("p", {A: 1}) if share == "none" else here.claimant("p"))
        assert pod.running


# Containers that restart in place.


async def hold(here: Here) -> FakePod:
    """Run a pod that gets d0, and wait for scans that see the pod."""
    await here.until(lambda: "d0" in here.healthy())
    pod = await here.run("p", {A: 1})
    assert pod.device_ids == ("d0",)
    await here.scans()
    return pod


async def lost_checkpoint(here: Here, *, devices: int = 1) -> None:
    """Restart the kubelet without its checkpoint, and wait until the kubelet has the devices again."""
    await asyncio.to_thread(here.node.stop)
    here.node.damage_checkpoint("deleted")
    await asyncio.to_thread(here.node.start)
    await here.until(lambda: len(here.node.devices(A)) == devices)
    await here.scans()


@BOTH
@pytest.mark.parametrize("what", ["beside", "no link"])
async def test_a_container_that_may_run_keeps_what_the_lost_checkpoint_had(
    node: FakeNode, both: bool, what: str
) -> None:
    """After a loss of the checkpoint, the end of one container frees no device that another of its pod may hold."""
    async with serving(node, Listed(A, D, "d0"), both=both) as here:
        await here.until(here.healthy)
        containers = {"has": {A: 1}, "beside": {}}
        pod = await asyncio.to_thread(node.run_pod, "p", containers=containers, timeout=15)
        await here.scans()  # a scan has found the container of the grant
        await lost_checkpoint(here)
        ends = pod.container("beside" if what == "beside" else "has")
        if what == "no link":
            for link in node.container_logs.iterdir():
                link.unlink()
        pod.crash_container(ends.name)
        await here.scans()
        for number in range(2):
            # While the kubelet counts the pod, d0 stays offered until the kubelet chooses d0 for another pod.
            assert here.healthy() == (set() if number else {"d0"})
            assert not (await here.run(f"other{number}", {A: 1})).running
            await here.scans()
        assert running(node, "d0") == {pod.uid}


@BOTH
async def test_a_device_of_a_container_that_ended_after_the_checkpoint_was_lost_goes_to_one_pod(
    node: FakeNode, both: bool
) -> None:
    """After a loss of the checkpoint, a device whose container ends goes to the next pod, and to no second one."""
    async with serving(node, Listed(A, D, "d0"), both=both) as here:
        pod = await hold(here)
        await lost_checkpoint(here)
        pod.crash_container()
        await here.until(lambda: here.healthy() == {"d0"})
        other = await here.run("other", {A: 1})
        assert other.running
        await here.scans()
        await lost_checkpoint(here)
        pod.container().held_down = False
        third = await here.run("third", {A: 1})
        assert not third.running
        assert running(node, "d0") == {other.uid}
        await here.stopped(other)
        await asyncio.to_thread(pod.restart_container, timeout=15)
        await here.scans()
        await lost_checkpoint(here)
        assert not (await here.run("fourth", {A: 1})).running
        assert running(node, "d0") == {pod.uid}


# Device ids that look like those of replicas.


@BOTH
async def test_an_id_that_looks_like_a_replicas_is_another_device(node: FakeNode, both: bool) -> None:
    """If a pod has a replica of d0, and another device gets the replica's id, still only one pod has d0."""
    async with serving(node, Listed(A, D, "d0", replicas=2), both=both) as here:
        await here.until(lambda: here.healthy() == {"d0::0", "d0::1"})
        first = await here.run("p", {A: 1})
        (name,) = first.device_ids
        await here.scans()
        await here.serve(Listed(A, D, "d0", name))
        await here.scans(12)
        others = [await here.run(f"q{number}", {A: 1}) for number in range(2)]
        assert [got(node, one) for one in (first, *others) if one.running].count({"d0"}) == 1


# PodResources `List` gives no answer.


async def test_pods_that_the_kubelet_could_not_list_for_a_while_keep_no_claims_device(
    node: FakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a claim ends while PodResources `List` gives no answer, its device goes to the next claim afterwards."""
    monkeypatch.setattr("dra_bridge.driver.preparation.PATIENCE", 1.0)
    monkeypatch.setattr("dra_bridge.node.claim_checks.RECONCILE", 1.0)
    monkeypatch.setattr("dra_bridge.node.claim_checks.NOTICE", 0.1)
    silent, answered_list = threading.Event(), PodResources.list

    async def answers(pod_resources: PodResources) -> PodResourcesReport | None:
        return None if silent.is_set() else await answered_list(pod_resources)

    monkeypatch.setattr(PodResources, "list", answers)
    async with offering(node, Listed(A, D, "d0"), share="all") as here:
        silent.set()
        pod = await here.claimant("c0")
        await here.run("bystander", {})
        await asyncio.to_thread(pod.delete, 30)
        silent.clear()
        after = node.start_pod("next", template={D: 1})
        await here.until(lambda: after.running, 30)


# A claim that is allocated again under the same UID.


async def test_a_claim_that_was_allocated_elsewhere_gets_what_it_is_allocated_now(node: FakeNode) -> None:
    """A claim whose former pod hangs on d0 gets d1 for a new pod; d0's next claim waits until the former pod ends."""
    async with offering(node, Listed(A, D), share="all") as here:
        node.claim("mine", D)
        hanging = await here.claimant("worker", claims=["mine"])
        assert set(node.devices_of(hanging)) == {"d0"}
        await asyncio.to_thread(node.stop)
        hanging.force_delete(hang=True)
        owner = node.start_pod("owner", template={D: 1})
        again = node.start_pod("worker", claims=["mine"])
        await asyncio.to_thread(node.start)
        await here.until(lambda: (A, "d0") in here.agent.register.waits.devices)
        await here.scans()
        assert not owner.running
        await asyncio.to_thread(hanging.end_containers, 15)
        for pod in (owner, again):
            await asyncio.to_thread(pod.wait_running, 15)
        assert (got(node, owner), got(node, again)) == ({"d0"}, {"d1"})


# Lost records of holders, and records without a claim's device.


@pytest.mark.parametrize("state", ["kept", "lost", "forgotten"], ids=lambda state: f"state-{state}")
async def test_without_its_register_a_device_that_a_claim_has_alone_is_shared_with_none(
    node: FakeNode, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    """A claim has a whole device when the agent's records are lost and replicas are added: other claims are refused.

    state: what became of the kubelet's claim state; "forgotten": the pod was deleted by force and hangs.
    """
    monkeypatch.setattr(driver, "MARGIN", 44.0)  # else each refused claim waits for 40 s
    async with offering(node, Listed(A, D, "d0"), share="all") as here:
        pod = await here.claimant("p")
    if state == "forgotten":
        pod.force_delete(hang=True)
    await restart_without_register(node, state)
    async with serving(node, Listed(A, D, "d0", "d1", replicas=2), share="all") as here:
        await here.until(lambda: "d1" in here.sliced())
        for number in range(2):
            claim = here.allocate(
                f"c{number}", D, "d0", shareID=str(uuid.UUID(int=number)), consumedCapacity={f"{D}/shares": "1"}
            )
            assert await here.prepare(D, claim) != ""
        assert running(node, "d0") == {pod.uid}


async def test_a_claim_that_was_allocated_keeps_its_device_though_the_register_is_not_empty(node: FakeNode) -> None:
    """A device that is allocated to a claim, and that is new to the register, is kept for the claim, not for pods."""
    async with offering(node, Listed(A, D, "d1")) as here:
        await here.run("p", {A: 1})
        here.allocate("mine", D, "d0")
    async with serving(node, Listed(A, D, "d0", "d1")) as here:
        assert here.bridge is not None
        drivers = here.bridge.drivers
        await here.until(
            lambda: D in drivers and "claim default/mine" in str(drivers[D].resources[A].handover.waiting.get("d0"))
        )
        assert "d0" not in here.healthy()


# Sources that bring child sources.


class Parent(Listed):
    """A source with a driver and a child source."""

    driver = D

    def __init__(self) -> None:
        super().__init__(A, D, "d0")

    async def child_sources(self) -> AsyncIterator[Sequence[DeviceSource]]:
        yield [Child()]


class Child(DeviceSource):
    """A child source with the same driver as its parent."""

    resource = B
    driver = D

    async def watch(self) -> AsyncIterator[Sequence[Device]]:
        yield [Device("b0", edits=ContainerEdits({"DEVICE_b0": "1"}))]


@SHARE
async def test_a_child_source_with_a_driver_is_offered_on_its_side(node: FakeNode, share: str) -> None:
    """The devices of a child source are offered to limits or to claims, as the Node's annotation requests."""
    async with serving(node, Parent()) as here:
        await here.until(lambda: here.healthy(A) and here.healthy(B))
        here.ask(share, D)
        if share == "none":
            await here.until(lambda: here.healthy(A) == {"d0"} and here.healthy(B) == {"b0"})
            assert (await here.run("p", {B: 1})).running
        else:
            await here.until(lambda: len(here.sliced()) == 2)
            pods = [await here.claimant(f"p{number}") for number in range(2)]
            assert running(node, "b0") < {pod.uid for pod in pods}


async def test_a_childs_devices_stay_on_their_side_when_something_else_is_reloaded(node: FakeNode) -> None:
    """After a reload of another resource, a child source's devices still have the policy of its parent."""
    parent = Parent()
    async with serving(node, parent, share="all") as here:
        await here.until(lambda: len(here.sliced()) == 2)
        assert here.bridge is not None
        new = Listed("example.com/c", "", "z0")
        await here.bridge.reconfigure({new.resource: new}, policies([parent, new], "all"), [A])
        await here.until(lambda: here.healthy(new.resource) == {"z0"})
        await here.scans()
        assert len(here.sliced()) == 2
        assert here.bridge.drivers[D].resources[B].policy == here.bridge.drivers[D].resources[A].policy
