"""Moves beside pods whose limits DRA serves: no move makes a kubelet restart end pods, unless the move is forced."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from deviceplugin.device import Device
from deviceplugin.register.records import State
from deviceplugin.testing.pods import FakePod
from dra_bridge.node.share import HandoverPolicy
from dra_bridge.testing.node import FakeNode
from tests.dra.agents import AgentOnNode, D, Listed, R, fpgas, on_node
from tests.dra.objects import allocated_claim

PLUGIN, TO_DRA, DRA, TO_PLUGIN = State.PLUGIN, State.TO_DRA, State.DRA, State.TO_PLUGIN


@contextlib.asynccontextmanager
async def offered(node: FakeNode, count: int, **options: Any) -> AsyncIterator[AgentOnNode]:
    """Run an agent whose devices d0, d1 and so on are all for claims."""
    async with on_node(node, fpgas(count, **options)) as here:
        here.ask("all")
        await here.settle(*[DRA] * count)
        yield here


def states(here: AgentOnNode) -> list[str]:
    """Return the states of all devices, sorted."""
    return sorted(one.value for one in here.states.values())


async def started(here: AgentOnNode, name: str, count: int = 1) -> FakePod:
    """Start a pod with limits, and wait until it runs."""
    pod = here.node.start_pod(name, {R: count})
    await asyncio.to_thread(pod.wait_running, 60)
    return pod


def allocate_by_limits(here: AgentOnNode, claim: str, device: str) -> None:
    """Allocate a device to a claim for a pod's limits, as the scheduler does; the claim is not prepared."""
    names = here.bridge.drivers[D].driver.devices.by_name
    name = next(name for name, (_, listed) in names.items() if listed.id == device)
    made = allocated_claim(claim, D, here.node.name, name)
    made["metadata"]["annotations"] = {"resource.kubernetes.io/extended-resource-claim": "true"}
    here.node.server.create(made)


async def test_devices_return_when_no_pod_has_one_through_dra_by_limits(node: FakeNode) -> None:
    """Devices leave the slices at once, and return to the plugin when no pod by limits has a device through DRA.

    After that, a pod with a claim keeps only its own device from returning.
    """
    async with offered(node, 3) as here:
        unchanged = await started(here, "unchanged")
        claims = await here.claimant("claims")
        here.ask("none")
        await here.settle(TO_PLUGIN, TO_PLUGIN, TO_PLUGIN)
        await here.until(lambda: "by limits" in here.waiting.get("d2", ""))
        assert here.waits["d2"].on_holder
        await here.until(lambda: not here.published)
        assert not here.healthy()
        await here.stopped(unchanged)
        await here.until(lambda: states(here) == ["plugin", "plugin", "to-plugin"])
        assert claims.running


async def test_pods_by_limits_that_wait_do_not_keep_devices_from_returning(node: FakeNode) -> None:
    """While devices are to return, a waiting pod with limits gets none through DRA, but later gets them by the plugin.

    One of the four devices is to stay for claims: the device of the pod with a claim does not return.
    """
    async with offered(node, 4) as here:
        unchanged = await started(here, "unchanged", 3)
        claims = await here.claimant("claims")
        pod = node.start_pod("waits", {R: 3})
        here.ask("1")
        await here.settle(TO_PLUGIN, TO_PLUGIN, TO_PLUGIN, TO_PLUGIN)
        await here.until(lambda: not here.published)
        await here.stopped(unchanged)
        await asyncio.to_thread(pod.wait_running, 60)
        assert states(here) == ["dra", "plugin", "plugin", "plugin"]
        assert set(pod.devices[R]) == {name for name, one in here.states.items() if one is PLUGIN}
        assert claims.running


async def test_devices_that_wait_to_return_are_offered_to_claims(node: FakeNode) -> None:
    """With `drain: wait`, devices that are to return are offered to claims while DRA serves a pod's limits."""
    async with offered(node, 2) as here:
        here.bridge.drivers[D].resources[R].policy = HandoverPolicy(drain="wait")
        unchanged = await started(here, "unchanged")
        here.ask("none")
        await here.until(lambda: "a kubelet restart" in here.waiting.get("d1", ""))
        claims = await here.claimant("claims")
        assert here.states == {"d0": DRA, "d1": DRA}
        await here.stopped(unchanged)
        await here.stopped(claims)
        await here.settle(PLUGIN, PLUGIN)


async def test_an_allocation_by_limits_that_is_not_prepared_keeps_devices(node: FakeNode) -> None:
    """A claim that was allocated for a pod's limits and is not prepared yet keeps all devices from returning."""
    async with offered(node, 2) as here:
        allocate_by_limits(here, "late", "d0")
        here.ask("none")
        await here.until(lambda: here.waiting.get("d0") == "claim default/late")
        await here.until(lambda: here.waiting.get("d1", "").startswith("claim default/late (its pod has"))
        node.server.delete("resourceclaims", "late", "default")
        await here.settle(PLUGIN, PLUGIN)


async def test_none_turns_round_before_the_others_have_returned(node: FakeNode) -> None:
    """While a claim for a pod's limits keeps devices from returning, the one that is to be for claims waits, too.

    If it went back to DRA at once, pods with limits could get it through DRA, and the other devices would wait for
    these pods again.
    """
    async with offered(node, 4) as here:
        unchanged = await started(here, "unchanged")
        (held,) = node.devices_of(unchanged)
        allocate_by_limits(here, "late", min({"d0", "d1"} - {held}))
        here.ask("1")
        await here.settle(TO_PLUGIN, TO_PLUGIN, TO_PLUGIN, TO_PLUGIN)
        await here.until(lambda: not here.published)
        await here.stopped(unchanged)
        await here.until(lambda: all("default/late" in here.waiting.get(f"d{n}", "") for n in range(4)))
        await here.settle(TO_PLUGIN, TO_PLUGIN, TO_PLUGIN, TO_PLUGIN)
        node.server.delete("resourceclaims", "late", "default")
        await here.until(lambda: states(here) == ["dra", "plugin", "plugin", "plugin"])


async def test_claims_keep_their_share_beside_pods_by_limits_that_wait(node: FakeNode) -> None:
    """If one of three returning devices is to be for claims, a claim gets it, and waiting pods with limits get two."""
    async with offered(node, 3) as here:
        unchanged = await started(here, "unchanged", 3)
        waiting = [node.start_pod(f"waits-{number}", {R: 1}) for number in range(3)]
        here.ask("1")
        await here.settle(TO_PLUGIN, TO_PLUGIN, TO_PLUGIN)
        await here.until(lambda: not here.published)
        claims = node.start_pod("claims", template={D: 1})
        await here.stopped(unchanged)
        await asyncio.to_thread(claims.wait_running, 60)
        await here.until(lambda: sum(pod.running for pod in waiting) == 2)
        assert states(here) == ["dra", "plugin", "plugin"]


async def test_claims_that_hold_more_than_their_share_keep_it(node: FakeNode) -> None:
    """Two claims have devices but only one is to be for claims: one goes back to DRA, the other waits for its claim."""
    async with offered(node, 3) as here:
        unchanged = await started(here, "unchanged")
        for name in ("c0", "c1"):
            await here.claimant(name)
        here.ask("1")
        await here.settle(TO_PLUGIN, TO_PLUGIN, TO_PLUGIN)
        await here.stopped(unchanged)
        await here.until(lambda: states(here) == ["dra", "plugin", "to-plugin"])
        await here.until(lambda: len(here.published) == 1)


async def test_a_move_to_dra_turns_round_while_a_claim_keeps_another_from_returning(node: FakeNode) -> None:
    """If no device is to be for claims, a move to DRA is reversed once no pod by limits has a device through DRA.

    This is so although a claim keeps another device from returning.
    """
    async with on_node(node, fpgas(3)) as here:
        held = await started(here, "held")
        here.ask("all")
        await here.until(lambda: states(here) == ["dra", "dra", "to-dra"])
        unchanged = await started(here, "unchanged")
        await here.claimant("claims")
        here.ask("none")
        await here.until(lambda: states(here) == ["to-dra", "to-plugin", "to-plugin"])
        await here.stopped(unchanged)
        await here.until(lambda: states(here) == ["plugin", "plugin", "to-plugin"])
        assert held.running


async def test_a_move_that_is_withdrawn_waits_too(node: FakeNode) -> None:
    """A held device's move to DRA is reversed only when no pod by limits has a device through DRA."""
    async with on_node(node, fpgas(2)) as here:
        held = await started(here, "held")
        here.ask("all")
        await here.until(lambda: states(here) == ["dra", "to-dra"])
        unchanged = await started(here, "unchanged")
        here.ask("none")
        await here.until(lambda: states(here) == ["to-dra", "to-plugin"])
        await here.until(lambda: len(here.waiting) == 2)
        assert not here.healthy()
        await here.stopped(unchanged)
        await here.settle(PLUGIN, PLUGIN)
        assert held.running


async def test_what_is_forced_moves_at_once(node: FakeNode, caplog: pytest.LogCaptureFixture) -> None:
    """Forced moves wait neither for pods whose limits DRA serves, nor for pods that a kubelet restart would end.

    The log names the pod that a kubelet restart would end.
    """
    async with offered(node, 4) as here:
        unchanged = await started(here, "unchanged")
        here.ask("1 force")
        await here.until(lambda: len(here.healthy()) == 3)
        handover = here.bridge.drivers[D].resources[R].handover
        assert handover.denied == ()
        younger = await started(here, "younger")
        await here.until(lambda: handover.denied == (younger.uid,))
        assert "a kubelet restart would end pod default/younger" in caplog.text
        here.ask("all")
        # One device may leave, as two are enough for both pods. The other idle one and the held one stay.
        await here.until(lambda: len(here.healthy()) == 2)
        await here.until(lambda: list(here.states.values()).count(PLUGIN) == 2)
        await here.until(lambda: here.waiting.keys() == {name for name, one in here.states.items() if one is PLUGIN})
        here.ask("all force")
        await here.until(lambda: states(here) == ["dra", "dra", "dra", "to-dra"])
        assert younger.running
        await here.stopped(younger)
        await here.settle(DRA, DRA, DRA, DRA)
        await here.until(lambda: handover.denied == ())
        assert unchanged.running


async def test_devices_leave_as_pods_of_the_plugin_side_end(node: FakeNode) -> None:
    """Pods by limits need all four devices of the plugin: one leaves when one plugin pod ends, all when both end.

    Two of the pods have devices of the plugin, and one pod has two devices through DRA.
    """
    async with offered(node, 6) as here:
        unchanged = await started(here, "unchanged", 2)
        here.ask("2 force")
        await here.until(lambda: len(here.healthy()) == 4)
        pods = [await started(here, f"p{number}") for number in range(2)]
        here.ask("all")
        await here.until(lambda: len(here.waiting) == 4)
        assert len(here.healthy()) == 4
        await here.stopped(pods[0])
        await here.until(lambda: len(here.healthy()) == 3)
        await here.until(lambda: list(here.states.values()).count(PLUGIN) == 3)
        await here.stopped(pods[1])
        await here.settle(*[DRA] * 6)
        assert unchanged.running


async def test_shared_devices_count_by_their_ids(node: FakeNode) -> None:
    """Shared devices count by the ids that the kubelet has: two pods need two ids, so one of two devices may leave."""
    async with offered(node, 3, replicas=2) as here:
        await started(here, "unchanged")
        here.ask("1 force")
        await here.until(lambda: len(here.healthy()) == 4)
        younger = await started(here, "younger")
        here.ask("all")
        await here.until(lambda: len(here.healthy()) == 2)
        await here.until(lambda: states(here) == ["dra", "dra", "plugin"])
        await here.until(lambda: len(here.waiting) == 1)
        assert younger.running


async def test_what_moves_along_counts(node: FakeNode) -> None:
    """A device does not leave with its parts until the pod that has a device by limits through DRA has ended."""

    def part(gpu: int, name: str, slices: int) -> Device:
        name, of = f"{name}-{gpu}", f"gpu{gpu}"
        return Device(name, consumes={of: {"slices": slices}}, counters={of: {"slices": 2}})

    wholes = Listed(R, D, *(part(gpu, "w", 2) for gpu in range(3)))
    halves = Listed("example.com/half", D, *(part(gpu, name, 1) for gpu in range(3) for name in "ab"))
    async with on_node(node, wholes, halves) as here:

        def count(state: State) -> int:
            return list(here.states.values()).count(state)

        here.ask("all")
        await here.until(lambda: count(DRA) == 9)
        unchanged = node.start_pod("unchanged", {R: 1})
        await asyncio.to_thread(unchanged.wait_running, 60)
        here.ask("1 force")
        await here.until(lambda: len(here.healthy()) == 6)
        younger = node.start_pod("younger", {R: 1})
        await asyncio.to_thread(younger.wait_running, 60)
        assert younger.devices
        here.ask("all")
        await here.until(lambda: len(here.waiting) == 2)
        assert count(PLUGIN) == 6
        await here.stopped(unchanged)
        await here.until(lambda: count(DRA) == 8)
        assert younger.running
