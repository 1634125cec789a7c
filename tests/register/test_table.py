"""The sequences that gave a device twice, withheld it from everybody, or kept it: each row of the table is a test."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Sequence
from fractions import Fraction

import pytest

from deviceplugin.register import rules
from deviceplugin.testing import FakePod, claim_state
from deviceplugin.testing.claim_state import AnsweredDevice, DevicesOfClaim
from dra_bridge.driver import driver, preparation
from dra_bridge.testing.node import FakeNode
from tests.dra.agents import NODE, Listed
from tests.dra.objects import unserved
from tests.register.node import (
    SHARE,
    TOKENS,
    A,
    B,
    D,
    E,
    Here,
    Varying,
    allocated_elsewhere,
    got,
    offering,
    restart_without_register,
    running,
    serving,
    some,
)

SHARES = tuple(str(uuid.UUID(int=number)) for number in range(3))


# A driver's name is taken away, and comes back.


@TOKENS
@pytest.mark.parametrize(("between", "side"), [("", "plugin"), (E, "plugin"), (E, "dra")])
async def test_a_driver_that_is_named_again_gives_no_device_twice(
    node: FakeNode, between: str, side: str, tokens: bool
) -> None:
    """What a pod or a claim got while the resource had another driver, or none, is not given away until that ends."""
    share = "all" if side == "dra" else "none"
    async with offering(node, Listed(A, D, tokens=tokens), share="all") as here:
        await here.serve(Listed(A, between, tokens=tokens), share=share)
        if side == "dra":
            await here.until(lambda: here.sliced(between) == {"d0", "d1"})
            holder = await here.claimant("holder", between)
        else:
            await here.until(lambda: here.healthy() == {"d0", "d1"})
            holder = await here.run("holder", {A: 1})
        (held,) = node.devices_of(holder)
        others = [node.start_pod(name, template={D: 1}) for name in ("p0", "p1")]
        await here.serve(Listed(A, D, tokens=tokens), share="all")
        await here.until(lambda: any(pod.running for pod in others))
        await here.scans()
        assert running(node, held) == {holder.uid}
        assert held not in here.sliced()
        await here.stopped(holder)
        for pod in others:
            await asyncio.to_thread(pod.wait_running, 15)


# A source says another number of replicas.


def part(pod: FakePod) -> Fraction:
    """Return how much of d0 a pod has: the whole, or one of two replicas."""
    (device,) = pod.device_ids
    return {"d0": Fraction(1), "d0::0": Fraction(1, 2), "d0::1": Fraction(1, 2)}.get(device, Fraction(0))


@TOKENS
@some("numbers, both", [((2, 1, 2), True), ((1, 2, 1), False)], [(2, 1, 2), (1, 2, 1)], [False, True])
async def test_another_number_of_replicas_gives_no_device_twice(
    node: FakeNode, numbers: Sequence[int], both: bool, tokens: bool
) -> None:
    """What pods have of it is never more than the whole, whatever the ids were called when they got them."""
    marks: list[str] = []
    async with serving(node, source := Varying(numbers[0], tokens=tokens), both=both) as here:
        await here.until(lambda: len(here.healthy()) == numbers[0])
        pods = [await here.run("holder", {A: 1})]
        for number in numbers[1:]:
            marks.append(f"t{len(marks)}")
            source.vary(number, *marks)
            await here.until(lambda: here.healthy().issuperset(marks))
            await here.scans()
            pods += [await here.run(f"{marks[-1]}-{one}", {A: 1}) for one in range(3)]
            assert sum(part(pod) for pod in pods if pod.running) <= 1
        for pod in pods:
            await here.stopped(pod)
        await here.until(lambda: len(here.healthy() - {*marks}) == numbers[-1])


# The register and the slices are lost, and published names are made anew.


@TOKENS
@SHARE
async def test_a_claim_is_known_again_though_its_device_has_another_name(
    node: FakeNode, share: str, tokens: bool
) -> None:
    """With register and slices lost, and a second resource of the driver, a running claim keeps its device."""
    async with offering(node, Listed(A, D, tokens=tokens), share="all") as here:
        pod = await here.claimant("p")
        (held,) = node.devices_of(pod)
        (idle,) = {"d0", "d1"} - {held}
    await restart_without_register(node, "kept")
    assert not node.server.objects("resourceslices")
    async with serving(node, Listed(A, D, tokens=tokens), Listed(B, D, "b0"), share=share) as here:
        if share == "none":
            await here.until(lambda: idle in here.healthy(A) and here.healthy(B) == {"b0"})
            others = [await here.run(f"p{number}", {A: 1}) for number in range(2)]
        else:
            others = [node.start_pod(f"p{number}", template={D: 1}) for number in range(3)]
            await here.until(lambda: sum(one.running for one in others) >= 2)
        await here.scans()
        assert running(node, held) == {pod.uid}
        for one in (pod, *others):
            await here.stopped(one)
        await here.until(lambda: len(here.healthy(A)) == 2 if share == "none" else len(here.sliced()) == 3)


# A reload comes just after an Allocate.


@TOKENS
@pytest.mark.parametrize("before", ["", E])
async def test_a_reload_just_after_an_allocate_forgets_no_grant(
    node: FakeNode, monkeypatch: pytest.MonkeyPatch, before: str, tokens: bool
) -> None:
    """A driver that is added or renamed before the checkpoint names the container gives its device to no claim."""
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
    """The driver that the config names has a device as soon as its claim has ended, whatever other claims hold."""
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


# A driver that cannot be served.


@SHARE
async def test_a_renamed_driver_that_cannot_be_served_can_be_named_as_before(node: FakeNode, share: str) -> None:
    """When the config is as it was, the resource is served as it was, whether or not the other driver could be."""
    async with serving(node, Listed(A, D), share=share) as here:
        offered = here.healthy if share == "none" else here.sliced
        await here.until(lambda: offered() == {"d0", "d1"})
        with unserved(E):
            await here.serve(Listed(A, E), share=share)
        await here.serve(Listed(A, D), share=share)
        missing = here.agent.register.evidence_missing  # before that the kubelet may have the list from before all this
        await here.until(lambda: not (missing(A, "d0") or missing(A, "d1")))
        await here.until(lambda: offered() == {"d0", "d1"})
        pod = await (here.run("p", {A: 1}) if share == "none" else here.claimant("p"))
        assert pod.running


# Claims share a device.


async def test_claims_share_a_device_no_more_often_than_it_is_offered(
    node: FakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two pods that were deleted by force the containers hang: the API server's next two claims wait for them."""
    monkeypatch.setattr(preparation, "PATIENCE", 0.5)
    async with serving(node, Listed(A, D, "d0", replicas=2), share="all") as here:
        await here.until(lambda: here.sliced() == {"d0"})
        hanging = [await here.claimant(name) for name in ("h0", "h1")]
        for pod in hanging:
            pod.force_delete(hang=True)
        later = [node.start_pod(name, template={D: 1}) for name in ("p0", "p1")]
        await here.until(lambda: here.agent.register.waits.devices == {(A, "d0")})
        await here.scans()
        assert running(node, "d0") == {pod.uid for pod in hanging}
        assert not any(one.running for one in later)
        for pod in hanging:  # each may use the claim of the other, as far as the kubelet tells
            await asyncio.to_thread(pod.end_containers, 15)
            await here.scans()
            assert len(running(node, "d0")) <= 2
        await here.until(lambda: all(one.running for one in later))


LOST = pytest.mark.parametrize("state", ["kept", "lost"], ids=["state-kept", "state-lost"])


@LOST
@pytest.mark.parametrize("sharers", [1, 2])
async def test_without_its_register_a_shared_device_is_given_to_as_many_claims_as_before(
    node: FakeNode, monkeypatch: pytest.MonkeyPatch, sharers: int, state: str
) -> None:
    """A claim that shares it leaves the other part to a second one, and two leave nothing to a third one."""
    monkeypatch.setattr(driver, "MARGIN", 44.0)  # each refused claim would wait for 40 s
    async with serving(node, Listed(A, D, "d0", replicas=2), share="all") as here:
        await here.until(lambda: here.sliced() == {"d0"})
        pods = [await here.claimant(f"p{number}") for number in range(sharers)]
    await restart_without_register(node, state)
    async with serving(node, Listed(A, D, "d0", "d1", replicas=2), share="all") as here:
        await here.until(lambda: "d1" in here.sliced())
        answers = [
            await here.prepare(
                D, here.allocate(f"c{one}", D, "d0", shareID=SHARES[one], consumedCapacity={f"{D}/shares": "1"})
            )
            for one in range(2)
        ]
        assert [not answer for answer in answers] == ([True, False] if sharers == 1 else [False, False]), answers
        assert all(pod.running for pod in pods)


@pytest.mark.parametrize("state", ["kept", "lost", "forgotten"], ids=lambda state: f"state-{state}")
async def test_without_its_register_a_device_that_a_claim_has_alone_is_shared_with_none(
    node: FakeNode, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    """The config may offer it twice by now; who got it when it was whole has all of it, also as a pod that hangs."""
    monkeypatch.setattr(driver, "MARGIN", 44.0)  # each refused claim would wait for 40 s
    async with offering(node, Listed(A, D, "d0"), share="all") as here:
        pod = await here.claimant("p")
    if state == "forgotten":
        pod.force_delete(hang=True)
    await restart_without_register(node, state)
    async with serving(node, Listed(A, D, "d0", "d1", replicas=2), share="all") as here:
        await here.until(lambda: "d1" in here.sliced())
        for number in range(2):
            claim = here.allocate(f"c{number}", D, "d0", shareID=SHARES[number], consumedCapacity={f"{D}/shares": "1"})
            assert await here.prepare(D, claim) != ""
        assert running(node, "d0") == {pod.uid}


# A claim is allocated anew under the same UID.


async def test_a_claim_that_was_allocated_elsewhere_gets_what_it_is_allocated_now(node: FakeNode) -> None:
    """Its new pod waits for the processes of the old one, and so does the claim that owns the device by now."""
    async with offering(node, Listed(A, D), share="all") as here:
        hanging, owner, again = await allocated_elsewhere(here)
        await here.until(lambda: (A, "d0") in here.agent.register.waits.devices)
        await here.scans()
        assert not owner.running
        assert not again.running or got(node, again) == {"d1"}
        await asyncio.to_thread(hanging.end_containers, 15)
        for pod in (owner, again):
            await asyncio.to_thread(pod.wait_running, 15)
        assert got(node, owner) == {"d0"}
        assert got(node, again) == {"d1"}
        # The kubelet adds what is prepared to what it was answered before its restart (ClaimInfo.addDevice, 1.36.3),
        # and a runtime does not start a container of which it cannot resolve each CDI device.
        assert not node.edits_of(again).cdi


# The register and the kubelet's claim state are lost together.


@TOKENS
@SHARE
async def test_without_register_and_claim_state_a_pod_that_hangs_later_keeps_its_device(
    node: FakeNode, share: str, tokens: bool
) -> None:
    """Of two claims whose files are left, that of a pod that ends gives its device back, that of one that hangs not."""
    names = {"d0", "d1"}
    async with serving(node, Listed(A, D, *names, tokens=tokens), share="all") as here:
        await here.until(lambda: here.sliced() == names)
        hanging, ending = [await here.claimant(name) for name in ("hanging", "ending")]
        (held,), (freed,) = node.devices_of(hanging), node.devices_of(ending)
    await restart_without_register(node, "lost")
    async with serving(node, Listed(A, D, *names, tokens=tokens), share=share) as here:
        await asyncio.to_thread(node.dra.wait_registered, D)
        await here.scans()
        hanging.force_delete(hang=True)
        await here.stopped(ending)
        if share == "none":
            await here.until(lambda: freed in here.healthy(), 40)
        await two_more(here, share)
        await here.until(lambda: running(node, freed), 40)
        await here.scans()
        assert running(node, held) == {hanging.uid}


async def two_more(here: Here, share: str) -> list[FakePod]:
    """Start two more pods on the side that has the devices; those for pods run, or have failed."""
    if share == "none":
        return [await here.run(f"p{number}", {A: 1}) for number in range(2)]
    return [here.node.start_pod(f"p{number}", template={D: 1}) for number in range(2)]


# A claim of another vendor's driver, whose device has the name of one of ours.


def claim_of_another_vendor(node: FakeNode) -> None:
    """Have the kubelet know a prepared claim for device 0 of a NIC driver, with that driver's CDI file."""
    nic, uid = "nic.example.org", str(uuid.uuid4())
    device = AnsweredDevice(("r",), NODE, "0", (f"{nic}/claim={uid}-0",), None)
    claim_state.write(node.root, [DevicesOfClaim("default", "nic", uid, {nic: [device]}, {str(uuid.uuid4())})])
    node.cdi.mkdir(parents=True, exist_ok=True)
    edits = {"deviceNodes": [{"path": "/dev/nic0", "type": "c", "major": 240, "minor": 7}]}
    spec = {
        "cdiVersion": "0.5.0",
        "kind": f"{nic}/claim",
        "devices": [{"name": f"{uid}-0", "containerEdits": edits}],
    }
    (node.cdi / f"{nic}-claim_{uid}.json").write_text(json.dumps(spec))


@TOKENS
@pytest.mark.parametrize(("driver", "share"), [("", "none"), (D, "none"), (D, "all")])
async def test_a_claim_of_another_vendor_withholds_nothing_by_its_devices_name(
    node: FakeNode, driver: str, share: str, tokens: bool
) -> None:
    """What other drivers hold is known by its device nodes alone: our device of the same name is other hardware."""
    await asyncio.to_thread(node.stop)
    claim_of_another_vendor(node)
    await asyncio.to_thread(node.start)
    async with serving(node, Listed(A, driver, "0", "1", tokens=tokens), share=share) as here:
        offered = here.sliced if share == "all" else here.healthy
        await here.until(lambda: offered() == {"0", "1"}, 10)


# A pod is rejected after Allocate.


@TOKENS
async def test_a_pod_that_is_rejected_after_allocate_does_not_delay_a_move_for_long(
    node: FakeNode, monkeypatch: pytest.MonkeyPatch, tokens: bool
) -> None:
    """Its device arrives on the other side within 5 s, and some for the move itself."""
    monkeypatch.undo()  # with the agent's own seconds
    async with offering(node, Listed(A, D, "d0", tokens=tokens)) as here:
        node.reject_next_pod()
        pod = await here.run("p", {A: 1})
        assert (pod.phase, pod.reason) == ("Failed", "OutOfcpu")
        await here.serve(Listed(A, D, "d0", tokens=tokens), share="all")
        await here.until(lambda: here.sliced() == {"d0"}, 8)
