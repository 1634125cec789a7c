"""Agents that run in a test's event loop on the fake node, and observations of these agents from outside."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from deviceplugin.device import ContainerEdits, Device
from deviceplugin.node.agent import Agent
from deviceplugin.register.records import RegisterSnapshot, State
from deviceplugin.register.rules import MoveWait
from deviceplugin.source import DeviceSource
from deviceplugin.testing import FakeKubelet, FakePod
from deviceplugin.testing.claim_state import DevicesOfClaim
from dra_bridge.handover.share import Share
from dra_bridge.kube import Cluster
from dra_bridge.node.bridge import Bridge
from dra_bridge.node.options import BridgeOptions
from dra_bridge.node.share import NO_DEVICES, HandoverPolicy
from dra_bridge.rollout.fleet import share_patch
from dra_bridge.rollout.progress import DeviceProgress, read
from dra_bridge.testing.apiserver import FakeApiServer
from dra_bridge.testing.kubelet import PodError
from dra_bridge.testing.node import FakeNode
from dra_bridge.testing.serving import device_class as class_of_resource
from tests.dra.objects import allocated_claim, device_class
from tests.waits import PATIENCE, until

NODE: Final = "node"
R, D = "example.com/fpga", "fpga.example.com"
"""The resource and the driver of tests that have one of each."""
SAYS: Final = "DEVICE_"
"""The prefix of the environment variables that show a container's devices; a device's id follows the prefix."""


class Listed(DeviceSource):
    """A source whose devices a test lists, by id or as Device objects; it starts with d0 and d1 if none are given.

    driver: "" for a source without a DRA driver. tokens: whether devices that are listed by id have a serial number as
    their identity.
    """

    def __init__(
        self, resource: str, driver: str, *devices: Device | str, replicas: int = 1, tokens: bool = False
    ) -> None:
        self.resource = resource
        self.driver = driver
        self.replicas = replicas
        self.tokens = tokens
        self.lists: asyncio.Queue[Sequence[Device]] = asyncio.Queue()
        self.list(*(devices or ("d0", "d1")))

    def list(self, *devices: Device | str, **fields: Any) -> None:
        """List these devices and no others. fields: further fields of the devices that are given by id."""
        self.lists.put_nowait([one if isinstance(one, Device) else self.device(one, **fields) for one in devices])

    def device(self, name: str, **fields: Any) -> Device:
        """Return a device. Its container gets a variable with the device's id in its name."""
        identity = {"identity": f"serial:{name}"} if self.tokens else {}
        return Device(name, **{"edits": ContainerEdits({f"{SAYS}{name}": "1"}), **identity, **fields})

    async def watch(self) -> AsyncIterator[Sequence[Device]]:
        while True:
            yield await self.lists.get()


def fpgas(count: int, replicas: int = 1) -> Listed:
    """Return a source of the devices d0, d1 and so on of resource R and driver D."""
    return Listed(R, D, *(f"d{number}" for number in range(count)), replicas=replicas)


def healthy(node: FakeKubelet, *resources: str) -> set[str]:
    """Return the ids of the devices that are healthy for the kubelet, of the named resources or of all resources."""
    listed = [(name, one) for resource in resources or node.resources() for name, one in node.devices(resource).items()]
    return {name for name, one in listed if one.health == "Healthy"}


def sliced(node: FakeNode, driver: str = "") -> set[str]:
    """Return the published names of the devices in the slices of a driver; with "" as driver, in all slices."""
    specs = [one["spec"] for one in node.server.objects("resourceslices")]
    return {device["name"] for one in specs if driver in ("", one["driver"]) for device in one.get("devices") or ()}


class AgentOnNode:
    """An agent on a node. bridge: None if the agent serves devices by limits only, not by claims."""

    resource = R
    driver = D
    """The resource and the driver that methods use if a test names none."""

    def __init__(self, node: FakeNode, agent: Agent, bridge: Bridge | None = None) -> None:
        self.node = node
        self.agent = agent
        self._bridge = bridge

    @property
    def bridge(self) -> Bridge:
        """The agent as a Bridge, which serves limits and claims; an error if the agent serves limits only."""
        assert self._bridge is not None
        return self._bridge

    def ask(self, share: str, driver: str = "") -> None:
        """Set the Node's annotation that requests how many of a driver's devices are for claims (the share)."""
        self.node.server.patch("nodes", NODE, share_patch(driver or self.driver, share))

    @property
    def recorded(self) -> RegisterSnapshot:
        """The records of the agent's ledger; no records before the agent serves a driver."""
        return next((one.async_ledger.snapshot for one in self.bridge.drivers.values()), RegisterSnapshot())

    @property
    def states(self) -> dict[str, State]:
        """The state of each device in the ledger, by device id."""
        return {name: record.state for (_, name), record in sorted(self.recorded.devices.items())}

    @property
    def claims(self) -> set[str]:
        """Namespace and name of each claim in the agent's ledger."""
        return {claim.title for claim in self.recorded.claims.values()}

    @property
    def names(self) -> dict[str, str]:
        """The published name of each device, by device id."""
        drivers = self.bridge.drivers.values()
        return {device.id: name for one in drivers for name, (_, device) in one.driver.devices.by_name.items()}

    @property
    def published(self) -> set[str]:
        """The devices in slices, by id, or by their published name if no driver knows the id."""
        ids = {name: device for device, name in self.names.items()}
        return {ids.get(name, name) for name in sliced(self.node)}

    @property
    def told(self) -> dict[str, DeviceProgress]:
        """The entry of each device of the resource in the report that the agent writes to its Lease, by device id."""
        found = read(self.driver, self.node.server.objects("leases"))
        return dict(found.resources[self.resource].devices) if found is not None else {}

    @property
    def waits(self) -> dict[str, MoveWait]:
        """Why moves of devices between limits and claims wait, by device id."""
        resources = [one for driver in self.bridge.drivers.values() for one in driver.resources.values()]
        return {device: wait for one in resources for device, wait in one.handover.waiting.items()}

    @property
    def waiting(self) -> dict[str, str]:
        """Why moves of devices wait, as text, by device id."""
        return {device: wait.text for device, wait in self.waits.items()}

    def healthy(self, resource: str = "") -> set[str]:
        """Return the ids of the devices that are healthy for the kubelet, of one resource or of all resources."""
        return healthy(self.node, *[resource] * bool(resource))

    async def until(self, what: Callable[[], object], timeout: float = PATIENCE) -> None:
        """Wait until the condition is true."""
        await until(what, self._said, timeout)

    def _said(self) -> str:
        of_bridge = f"{self.states}, waiting {self.waiting}, " if self._bridge is not None else ""
        return f"{of_bridge}healthy {self.healthy()}, published {sliced(self.node)}, pods {self.node.pods}"

    async def settle(self, *states: State) -> None:
        """Wait until the devices, in the order of their ids, have these states."""
        await self.until(lambda: tuple(self.states.values()) == states)

    async def scans(self, count: int = 5) -> None:
        """Wait until the agent has scanned this many more times for pods that hold devices."""
        seen: set[float] = set()

        def enough() -> bool:
            seen.add(self.agent.tracker.snapshot.at)
            return len(seen) > count

        await self.until(enough)

    async def listening(self) -> None:
        """Wait until a restarted kubelet has the plugin's devices and the agent has then scanned for their holders."""
        endpoint = self.agent.services[self.resource].endpoint
        await self.until(lambda: endpoint.streams.shown() is not None and bool(self.node.devices(self.resource)))
        await self.scans()

    async def run(self, name: str, limits: Mapping[str, int], **options: Any) -> FakePod:
        """Start a pod without the scheduler; return it when it runs or has failed."""
        return await asyncio.to_thread(self.node.run_pod, name, limits, check=False, timeout=PATIENCE, **options)

    async def claimant(self, name: str, driver: str = "", **options: Any) -> FakePod:
        """Start a pod with a claim for a device of a driver; return it when it runs."""
        pod = self.node.start_pod(name, **(options or {"template": {driver or self.driver: 1}}))
        await asyncio.to_thread(pod.wait_running, PATIENCE)
        return pod

    async def stopped(self, pod: FakePod) -> None:
        """Delete a pod and wait until none of its containers runs."""
        await asyncio.to_thread(pod.delete, PATIENCE)

    def allocate(self, name: str, driver: str, device: str, *, pod: str = "q", **result: Any) -> DevicesOfClaim:
        """Make a claim with an allocated device, given by its published name, even if no slice has the device."""
        made = self.node.server.create(allocated_claim(name, driver, NODE, device, pod, **result))
        return DevicesOfClaim("default", name, made["metadata"]["uid"], {driver: []})

    async def prepare(self, driver: str, claim: DevicesOfClaim) -> str:
        """Have a claim prepared as the kubelet does; return the error, "" if there is none."""
        return await self._call(driver, "NodePrepareResources", claim)

    async def unprepare(self, driver: str, claim: DevicesOfClaim) -> str:
        """Have a claim unprepared as the kubelet does; return the error, "" if there is none."""
        return await self._call(driver, "NodeUnprepareResources", claim)

    async def _call(self, driver: str, method: str, claim: DevicesOfClaim) -> str:
        await asyncio.to_thread(self.node.dra.wait_registered, driver)
        try:
            answers = await asyncio.to_thread(self.node.dra.call, driver, method, [claim])
        except PodError as error:
            return str(error)
        return str(answers[claim.uid].error)


def bridge(
    node: FakeNode,
    sources: Sequence[DeviceSource],
    share: Share = NO_DEVICES,
    *,
    claim_status: bool = False,
    cdi: Path | None = None,
    period: float = 0.05,
    **options: Any,
) -> Bridge:
    """Return an agent that scans often for holders of devices.

    share: how many devices of each resource are for claims. cdi: by default the node's CDI directory.
    """
    paths = replace(node.paths, cdi_dir=cdi or node.cdi)
    return Bridge(
        sources,
        {source.resource: HandoverPolicy(share) for source in sources},
        BridgeOptions(paths, None, Cluster.from_server(node.server.url), node.name, claim_status),
        period=period,
        **options,
    )


@contextlib.contextmanager
def fake_node(**options: Any) -> Iterator[FakeNode]:
    """Run a fake node. It has a DeviceClass for resource R, and one for all devices of each driver that tests use."""
    with FakeApiServer() as server:
        server.create(class_of_resource(R, D))
        for driver in ("d.example.com", "e.example.com", "gpu.example.com", "other.example.com"):
            server.create(device_class(driver))
        with FakeNode(server, NODE, **options) as node:
            yield node


@contextlib.asynccontextmanager
async def running(bridge: Bridge) -> AsyncIterator[Bridge]:
    """Run an agent until the end of the block; the agent must end when it is stopped."""
    task = asyncio.create_task(bridge.run())
    try:
        yield bridge
    finally:
        bridge.agent.stop()
        async with asyncio.timeout(60):
            await task


@contextlib.asynccontextmanager
async def on_node(node: FakeNode, *sources: DeviceSource, offered: bool = True) -> AsyncIterator[AgentOnNode]:
    """Run an agent for limits and claims until the block ends. offered: wait until the kubelet has a healthy device."""
    async with running(bridge(node, sources)) as made:
        here = AgentOnNode(node, made.agent, made)
        drivers = {source.driver for source in sources}
        await here.until(lambda: here.healthy() if offered else drivers <= made.drivers.keys())
        yield here
