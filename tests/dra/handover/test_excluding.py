"""Devices that are the same hardware, or parts of one thing, through both sides of the embedded node."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from deviceplugin.device import Device
from deviceplugin.kubelet.status import Withheld
from deviceplugin.register import operations
from deviceplugin.register.records import RecordKey, State
from deviceplugin.source import DeviceSource
from dra_bridge.driver import ClaimError, ClaimRef
from dra_bridge.node.bridge import Bridge
from dra_bridge.rollout.fleet import share_patch
from dra_bridge.testing.node import FakeNode
from tests.dra import agents
from tests.dra.agents import running, until

A, B = "example.com/whole", "example.com/half"
D, E = "gpu.example.com", "other.example.com"
NODE = "node"


class Listed(DeviceSource):
    """Devices that a test lists."""

    def __init__(self, resource: str, driver: str, *devices: Device) -> None:
        self.resource, self.driver = resource, driver
        self._lists: asyncio.Queue[Sequence[Device]] = asyncio.Queue()
        self.list(*devices)

    def list(self, *devices: Device) -> None:
        self._lists.put_nowait(devices)

    async def watch(self) -> AsyncIterator[Sequence[Device]]:
        while True:
            yield await self._lists.get()


class World:
    """An agent on a node."""

    def __init__(self, node: FakeNode, bridge: Bridge) -> None:
        self.node = node
        self.bridge = bridge

    def ask(self, driver: str, share: str) -> None:
        node = self.node.server.get("nodes", NODE)
        node["metadata"].setdefault("annotations", {}).update(share_patch(driver, share)["metadata"]["annotations"])
        self.node.server.replace(node)

    @property
    def states(self) -> dict[str, State]:
        """The devices of all drivers by id."""
        return {
            name: record.state
            for bridge in self.bridge.drivers.values()
            for (_, name), record in sorted(bridge.async_ledger.snapshot.devices.items())
        }

    @property
    def healthy(self) -> set[str]:
        devices = [(name, one) for resource in (A, B) for name, one in self.node.devices(resource).items()]
        return {name for name, one in devices if one.health == "Healthy"}

    @property
    def published(self) -> set[str]:
        """The devices in slices by id."""
        slices = self.node.server.objects("resourceslices")
        names = {device["name"] for one in slices for device in one["spec"].get("devices") or ()}
        return {one for one, name in self.names.items() if name in names}

    @property
    def names(self) -> dict[str, str]:
        """Published names by device."""
        drivers = self.bridge.drivers.values()
        return {device.id: name for bridge in drivers for name, (_, device) in bridge.driver.devices.by_name.items()}

    async def until(self, what: Callable[[], bool]) -> None:
        await until(what, lambda: f"{self.states}, healthy {self.healthy}, published {self.published}")


@contextlib.asynccontextmanager
async def world(node: FakeNode, tmp_path: Path, *sources: Listed) -> AsyncIterator[World]:
    async with running(agents.bridge(node, sources, cdi=tmp_path / "cdi")) as bridge:
        yield World(node, bridge)


def part(name: str, slices: int) -> Device:
    return Device(name, consumes={"gpu": {"slices": slices}}, counters={"gpu": {"slices": 2}})


def parts() -> tuple[Listed, Listed]:
    """A whole device, and its halves as another resource of the same driver."""
    return Listed(A, D, part("w", 2)), Listed(B, D, part("h0", 1), part("h1", 1))


async def settle(here: World, state: State) -> None:
    await here.until(lambda: here.states == dict.fromkeys(("h0", "h1", "w"), state))


async def test_parts_of_one_device_move_together(node: FakeNode, tmp_path: Path) -> None:
    """Across the resources of a driver all parts follow one, and none is offered before all have arrived."""
    async with world(node, tmp_path, *parts()) as here:
        await here.until(lambda: here.healthy == {"w", "h0", "h1"})
        pod = await asyncio.to_thread(node.run_pod, "p", {B: 1})
        (held,) = pod.devices[B]
        here.ask(D, "1")
        await here.until(lambda: sorted(state.value for state in here.states.values()) == ["dra", "dra", "to-dra"])
        assert here.states[held] is State.TO_DRA
        assert not here.published & {"w", "h0", "h1"}
        assert not here.healthy
        await asyncio.to_thread(pod.delete, 60)
        await settle(here, State.DRA)
        await here.until(lambda: len(here.published) == 3)
        here.ask(D, "none")
        await settle(here, State.PLUGIN)
        await here.until(lambda: here.healthy == {"w", "h0", "h1"})


async def test_a_claim_that_comes_for_a_part_has_all_of_them_move(node: FakeNode, tmp_path: Path) -> None:
    """It is prepared at a later try, and the others are offered nowhere until it ends."""
    async with world(node, tmp_path, *parts()) as here:
        await here.until(lambda: here.healthy == {"w", "h0", "h1"})
        claim = allocated(here, D, "h1")
        assert isinstance(await prepare(here, D, claim), ClaimError)
        await here.until(lambda: here.states["h1"].prepares)
        answers: list[object] = []
        while not answers or isinstance(answers[-1], ClaimError):
            answers.append(await prepare(here, D, claim))
            assert "moved" in str(answers[-1]) or not isinstance(answers[-1], ClaimError)
        await here.until(lambda: here.states == {"h0": State.PLUGIN, "h1": State.TO_PLUGIN, "w": State.PLUGIN})
        assert not here.healthy
        await here.bridge.drivers[D].driver.unprepare([claim])
        here.node.server.delete("resourceclaims", "c", "default")
        await settle(here, State.PLUGIN)
        await here.until(lambda: here.healthy == {"w", "h0", "h1"})


async def test_a_claim_is_decided_with_what_moves_along(
    node: FakeNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ledger is told which devices would follow, of the other resource, too."""
    told: list[object] = []
    reserve = operations.reserve

    def spied(*of: Any, along: Collection[RecordKey] = (), **more: Any) -> Any:
        told.append(along)
        return reserve(*of, along=along, **more)

    monkeypatch.setattr(operations, "reserve", spied)
    async with world(node, tmp_path, *parts()) as here:
        await here.until(lambda: here.healthy == {"w", "h0", "h1"})
        assert isinstance(await prepare(here, D, allocated(here, D, "h1")), ClaimError)
        assert told == [{(A, "w"), (B, "h0"), (B, "h1")}]


async def test_a_device_of_two_drivers_has_one_holder(node: FakeNode, tmp_path: Path) -> None:
    """While they are on different sides neither is offered; while a pod holds one, claims for the other are refused."""
    async with world(
        node, tmp_path, Listed(A, D, Device("one", identity="x")), Listed(B, E, Device("two", identity="x"))
    ) as here:
        await here.until(lambda: here.healthy == {"one", "two"})
        here.ask(E, "all")
        await here.until(lambda: here.states.get("two") is State.DRA and not here.healthy)
        assert not here.published & {"one", "two"}
        reason = f"overlaps two of {B}, which is for claims"
        advice = "; give both resources the share none, or both the share all"
        withheld = {"one": Withheld("excluded", reason + advice)}
        await here.until(lambda: here.bridge.agent.services[A].status().withheld == withheld)
        here.ask(E, "none")
        await here.until(lambda: here.healthy == {"one", "two"})
        pod = await asyncio.to_thread(node.run_pod, "p", {A: 1})
        await here.until(lambda: here.healthy == {"one"})
        here.ask(E, "all")
        await here.until(lambda: here.states["two"] is State.DRA)
        assert "the same hardware" in str(await prepare(here, E, allocated(here, E, "two")))
        await asyncio.to_thread(pod.delete, 60)


def allocated(here: World, driver: str, device: str) -> ClaimRef:
    """Make a claim that was allocated a device, whatever is in the slices."""
    found = here.node.server.create(
        {
            "apiVersion": "resource.k8s.io/v1",
            "kind": "ResourceClaim",
            "metadata": {"name": "c", "namespace": "default"},
            "spec": {"devices": {"requests": [{"name": "r", "exactly": {"deviceClassName": driver}}]}},
        }
    )
    result: Mapping[str, str] = {"request": "r", "driver": driver, "pool": NODE, "device": here.names[device]}
    found["status"] = {
        "allocation": {"devices": {"results": [result]}},
        "reservedFor": [{"resource": "pods", "name": "q", "uid": "q"}],
    }
    here.node.server.replace(found)
    return ClaimRef("default", "c", found["metadata"]["uid"])


async def prepare(here: World, driver: str, claim: ClaimRef) -> object:
    return (await here.bridge.drivers[driver].driver.prepare([claim]))[claim.uid]


async def test_an_agent_that_starts_after_a_link_was_replaced_knows_the_holder(node: FakeNode, tmp_path: Path) -> None:
    """The ledger knows what the pod's device is, though its id is not listed any more."""
    text = f"new of {A} and old of {A}, which counts as held, are the same hardware"
    async with world(node, tmp_path, Listed(A, D, Device("old", identity="x"))) as here:
        await here.until(lambda: here.healthy == {"old"})
        pod = await asyncio.to_thread(node.run_pod, "p", {A: 1})
        await here.until(lambda: bool(here.bridge.drivers[D].async_ledger.snapshot.allocations))
    async with world(node, tmp_path, Listed(A, D, Device("new", identity="x"), Device("third", identity="y"))) as here:
        await here.until(lambda: here.healthy == {"third"})
        assert here.bridge.agent.register.evidence_missing(A, "new") == ""
        assert here.bridge.agent.register.last_withheld(A) == {"new": f"{text} (x)"}
        await asyncio.to_thread(pod.delete, 60)
        await here.until(lambda: here.healthy == {"new", "third"})


async def test_an_id_that_stands_for_another_thing_after_a_restart_is_withheld(node: FakeNode, tmp_path: Path) -> None:
    """What the claim's device is now, and what it was, is given to nobody until the claim ends."""
    async with world(node, tmp_path, Listed(A, D, Device("a", identity="x"))) as here:
        here.ask(D, "all")
        await here.until(lambda: here.published == {"a"})
        pod = node.start_pod("c", template={D: 1})
        await asyncio.to_thread(pod.wait_running, 60)
    changed = Listed(A, D, Device("a", identity="y"), Device("b", identity="x"), Device("c", identity="z"))
    async with world(node, tmp_path, changed) as here:
        await here.until(lambda: here.published == {"c"})
        await asyncio.to_thread(pod.delete, 60)
        await here.until(lambda: here.published == {"a", "b", "c"})


async def test_a_resource_of_another_name_knows_who_holds_its_devices(node: FakeNode, tmp_path: Path) -> None:
    """The ledger knows what the pods of the former resource got; when they have ended nothing is withheld any more."""
    async with world(node, tmp_path, Listed(A, D, Device("a", identity="x"))) as here:
        await here.until(lambda: here.healthy == {"a"})
        pod = await asyncio.to_thread(node.run_pod, "p", {A: 1})
        await here.until(
            lambda: any(hold.holders for hold in here.bridge.drivers[D].async_ledger.snapshot.allocations.values())
        )
    async with world(node, tmp_path, Listed(B, D, Device("a", identity="x"), Device("b", identity="y"))) as here:
        await here.until(lambda: here.healthy == {"b"})
        await asyncio.to_thread(pod.delete, 60)
        await here.until(lambda: here.healthy == {"a", "b"})
