"""Agents for limits and claims: reloads of the config, the wait for a ledger, a ledger that cannot be opened."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence

import pytest

from deviceplugin.device import Device
from deviceplugin.exclusion import DeviceConflictError
from deviceplugin.node.agent import AgentError
from deviceplugin.node.service import Service
from deviceplugin.register.operations import reconcile_evidence
from deviceplugin.register.records import Side
from deviceplugin.register.rules import Evidence
from deviceplugin.source import DeviceSource
from dra_bridge.driver.registrar import RegistrarTiming
from dra_bridge.handover.share import Share
from dra_bridge.node.bridge import Bridge
from dra_bridge.node.device_reconciliation import EvidenceReader
from dra_bridge.node.share import NO_DEVICES, HandoverPolicy
from dra_bridge.testing.node import FakeNode
from dra_bridge.testing.serving import device_class
from tests.dra import agents
from tests.dra.agents import NODE, Listed, healthy, running, sliced
from tests.dra.ledger.samples import DirectLedger
from tests.dra.objects import unserved
from tests.waits import until

A, B = "example.com/a", "example.com/b"
D, E = "d.example.com", "e.example.com"


def bridge(node: FakeNode, *sources: DeviceSource, share: Share = NO_DEVICES) -> Bridge:
    return agents.bridge(node, sources, share)


def held_ledger(bridge: Bridge) -> DirectLedger:
    return DirectLedger(str(bridge.ledger_path))


def unready(bridge: Bridge) -> str:
    """Return why the agent is not ready."""
    return "; ".join(one for each in bridge.agent.providers for one in each.report().unready)


async def test_an_agent_that_stands_by_ends_when_it_is_told_to(
    node: FakeNode, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An agent that waits for the ledger of another agent can be stopped; it has registered no resource."""
    monkeypatch.setattr("dra_bridge.node.bridge.STANDBY", 0.01)
    agent = bridge(node, Listed(A, D))
    with held_ledger(agent):
        async with running(agent):
            await until(lambda: "standing by until the other agent ends" in caplog.text)
            assert "with maxSurge that one stays until this one is ready: set maxSurge to 0" in caplog.text
    assert not node.registrations
    await asyncio.to_thread(lambda: DirectLedger(str(agent.ledger_path)).close())  # the agent does not hold the lock


async def test_a_ledger_that_cannot_be_opened_is_an_error_that_names_it(node: FakeNode) -> None:
    """A ledger that cannot be opened is an error with its path, and with the access that the agent needs."""
    agent = bridge(node, Listed(A, D))
    path = agent.ledger_path
    path.parent.parent.mkdir(parents=True, exist_ok=True)
    path.parent.write_text("a file where the directory should be")
    words = rf"{path}: .*needs write access to {path.parent}, and free space there; into a pod it is mounted by"
    with pytest.raises(AgentError, match=words):
        async with asyncio.timeout(60):
            await agent.run()


async def test_a_reload_that_adds_a_driver_that_cannot_be_served_is_an_error(
    node: FakeNode, caplog: pytest.LogCaptureFixture
) -> None:
    """A reload adds a driver whose sockets cannot be made: log and readiness name the directory and its remedy.

    The other driver's devices are still served.
    """
    agent = bridge(node, Listed(A, D))
    async with running(agent):
        await until(lambda: len(healthy(node, A)) == 2 and not unready(agent))
        with unserved(E):
            await agent.reconfigure({B: Listed(B, E)}, {B: HandoverPolicy(Share(part=1.0))}, [A])
            await until(lambda: str(agent.node.directories.registry) in unready(agent))
        for text in (unready(agent), caplog.text):
            words = "No space left.*manifests that `dra-bridge manifests` prints for this conf"
            assert re.search(rf"cannot serve in {agent.node.directories.registry}: .*{words}", text)
        assert agent.drivers[D].registrar.statistics.registered
        assert len(healthy(node, A)) == 2


async def test_a_reload_while_an_agent_stands_by_is_taken_after_that(
    node: FakeNode, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the config is reloaded while the agent waits for another agent's ledger, each new resource registers once."""
    monkeypatch.setattr("dra_bridge.node.bridge.STANDBY", 0.01)
    agent = bridge(node, Listed(A, D))
    with held_ledger(agent):
        task = asyncio.create_task(agent.run())
        await until(lambda: "standing by" in caplog.text)
        reload = asyncio.create_task(agent.reconfigure({A: Listed(A, D), B: Listed(B, "")}, {}, []))
        await asyncio.sleep(0)
        assert not node.registrations
    async with asyncio.timeout(60):
        await reload
    await until(lambda: all(len(healthy(node, name)) == 2 for name in (A, B)))
    assert sorted(one.resource for one in node.registrations) == [A, B]
    agent.agent.stop()
    async with asyncio.timeout(60):
        await task


async def test_nothing_is_offered_before_its_evidence_was_read(node: FakeNode, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a reload adds a resource, its devices are unhealthy until the agent has read which pods hold them."""
    agent, read, go_on = bridge(node, Listed(A, D)), EvidenceReader.read, asyncio.Event()

    async def late(reader: EvidenceReader, service: Service, devices: Sequence[str]) -> Evidence:
        if service.resource == B:
            await go_on.wait()
        return await read(reader, service, devices)

    monkeypatch.setattr(EvidenceReader, "read", late)
    with held_ledger(agent) as before:
        before.do(reconcile_evidence(B, Evidence(), ["d0"], Side.DRA, 1.0, E))
    async with running(agent):
        await until(lambda: len(healthy(node, A)) == 2)
        await agent.reconfigure({B: Listed(B, E)}, {B: HandoverPolicy(Share(1))}, [A])
        await until(lambda: len(node.devices(B)) == 2)
        assert all(update.healthy == 0 for update in node.updates(B))
        go_on.set()
        await until(lambda: healthy(node, B) == {"d1"})
        assert all(update.healthy < 2 for update in node.updates(B))


async def test_a_dropped_resource_gives_nothing_out_on_its_way_out(node: FakeNode) -> None:
    """Devices of a resource that its driver drops are refused to pods, until a reload serves it without a driver."""
    agent = bridge(node, Listed(A, D))
    async with running(agent):
        await until(lambda: len(healthy(node, A)) == 2)
        agent.drivers[D].drop(A)
        register = agent.agent.register
        assert not register.offers(A, "d0")
        with pytest.raises(DeviceConflictError, match="the holder of device d0 is not known yet"):
            await register.grant(A, {"d0": "d0"})
        await agent.reconfigure({A: Listed(A, "")}, {}, [])
        assert register.offers(A, "d0")
        await agent.reconfigure({}, {}, [])
        assert not agent.drivers[D].resources
        assert not register.offers(A, "d0")


async def test_health_of_a_resource_that_a_reload_adds_is_told_at_once(
    node: FakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a reload adds a resource, the health of its devices reaches the kubelet without waiting for a timer."""
    monkeypatch.setattr("dra_bridge.driver.registrar.RegistrarTiming", lambda: RegistrarTiming(keep_alive=3600))
    agent = bridge(node, Listed(A, D))

    def health() -> list[str]:
        return [node.dra.health(D, NODE, name).health for name in agent.drivers[D].driver.devices.by_name]

    async with running(agent):
        await until(lambda: D in agent.drivers and health() == ["healthy"] * 2)
        await agent.reconfigure({B: Listed(B, D)}, {}, [A])
        await until(lambda: health() == ["healthy"] * 4)


async def test_a_device_that_comes_while_all_ends_begins_nothing(node: FakeNode) -> None:
    """If a source lists its devices anew while the agent ends, no error is raised."""
    agent = bridge(node, Listed(A, D))
    async with running(agent):
        await until(lambda: len(healthy(node, A)) == 2)
        for task in agent.tasks:
            task.cancel()
        await asyncio.sleep(0)
        assert agent.agent.services[A].inventory.publish([Device(name, nodes=["/dev/null"]) for name in ("d0", "d2")])


# A resource whose source has a hook `reset`.


class Reset(Listed):
    """A source with `reset`, which runs at each container's start; counts the calls."""

    def __init__(self, resource: str, driver: str) -> None:
        super().__init__(resource, driver)
        self.calls = 0

    def reset(self, devices: Sequence[Device]) -> None:
        self.calls += 1


async def test_pods_with_limits_through_dra_start_where_the_resource_has_reset(node: FakeNode) -> None:
    """A pod with limits starts through DRA although the source has a hook `reset`, which runs at each pod's start."""
    node.server.create(device_class(A, D))
    source = Reset(A, D)
    agent = bridge(node, source, share=Share(part=1.0))
    async with running(agent):
        await until(lambda: sliced(node, D) == {"d0", "d1"})
        pod = node.start_pod("through-dra", {A: 1})
        await asyncio.to_thread(pod.wait_running, 30)
        assert source.calls == 1
        await asyncio.to_thread(pod.delete)
        await agent.reconfigure({}, {A: HandoverPolicy()}, [A])
        await until(lambda: healthy(node, A) == {"d0", "d1"})
        await asyncio.to_thread(node.run_pod, "plain", {A: 1})
        assert source.calls == 2
