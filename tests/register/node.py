"""An agent on the fake node, which serves limits or also claims, and what a test can see of it from outside."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any, Final

import grpc
import pytest

from deviceplugin.device import Device
from deviceplugin.node.agent import Agent
from deviceplugin.source import DeviceSource
from deviceplugin.testing import FakePod
from deviceplugin.wire import deviceplugin_pb2 as pb
from deviceplugin.wire.deviceplugin_pb2_grpc import DevicePluginStub
from dra_bridge.handover.share import parse_share
from dra_bridge.kube import Cluster
from dra_bridge.node.bridge import Bridge
from dra_bridge.node.options import AGENT, BridgeOptions
from dra_bridge.node.share import HandoverPolicy
from dra_bridge.testing.node import FakeNode
from tests.dra.agents import NODE, SAYS, AgentOnNode, Listed, sliced

A, B = "example.com/a", "example.com/b"
D, E = "d.example.com", "e.example.com"
_OPTIONS: Final = (("grpc.default_authority", "localhost"), ("grpc.use_local_subchannel_pool", 1))
TOKENS = pytest.mark.parametrize(
    "tokens", [pytest.param(False, marks=pytest.mark.explore), True], ids=["names", "tokens"]
)
SHARE = pytest.mark.parametrize("share", ["none", "all"])
BOTH = pytest.mark.parametrize("both", [False, True], ids=["pods", "both"])
PATIENCE: Final = 15.0
"""The seconds for which `until` waits, if a test gives no other limit."""


def some(names: str, usual: Sequence[tuple[Any, ...]], *values: Sequence[Any]) -> pytest.MarkDecorator:
    """Parametrize with each combination of the values; unusual combinations run with the marker `explore` only."""
    cases = [*itertools.product(*values)]
    assert set(usual) < set(cases)
    explore = pytest.mark.explore
    return pytest.mark.parametrize(
        names, [pytest.param(*case, marks=() if case in usual else explore) for case in cases]
    )


class Varying(Listed):
    """A source with a device d0, whose number of replicas a test can change."""

    def __init__(self, replicas: int, driver: str = D, *, tokens: bool = False) -> None:
        super().__init__(A, driver, "d0", replicas=2, tokens=tokens)
        self.lists = asyncio.Queue()
        self.vary(replicas)

    def vary(self, replicas: int, *marks: str) -> None:
        """List d0 with this number of replicas. marks: further devices, to see that the agent has the list."""
        self.list(self.device("d0", attributes={"replicas": replicas}), *map(self.device, marks))

    def replicas_of(self, device: Device) -> int:
        return int(device.attributes.get("replicas", 1))


def running(node: FakeNode, device: str) -> set[str]:
    """Return the UIDs of the pods with a running container that have the device or a replica of the device."""
    with node.changed:
        pods = [*node.pods.values(), *node.orphans.values()]
        alive = [pod for pod in pods if any(one.state == "running" for one in pod.all_containers.values())]
        return {pod.uid for pod in alive if device in map(plain, node.devices_of(pod))}


def got(node: FakeNode, pod: FakePod) -> set[str]:
    """Return the devices of a pod's first container according to its variables; the kubelet's records may differ."""
    return {name.removeprefix(SAYS) for name in node.edits_of(pod).env if name.startswith(SAYS)}


def plain(name: str) -> str:
    """Return the name of the device behind a replica's id or a published name."""
    return name.rpartition("--")[2].partition("::")[0]


class Here(AgentOnNode):
    """An agent that serves limits or also claims, and whose config can change; waits have a short limit."""

    resource = A
    driver = D

    async def serve(self, *sources: DeviceSource, share: str = "none") -> None:
        """Have the agent serve these sources instead of the former ones, as after a change of the config file."""
        by_resource = {source.resource: source for source in sources}
        if self._bridge is None:
            await self.agent.reconfigure(by_resource)
        else:
            await self._bridge.reconfigure(by_resource, policies(sources, share), [])

    def healthy(self, resource: str = A) -> set[str]:
        return super().healthy(resource)

    def withheld(self, resource: str = A) -> dict[str, str]:
        """Return the reason for each withheld device, by id, as in the agent's status."""
        (status,) = [one for one in self.agent.status().resources if one.resource == resource]
        return {device: one.reason for device, one in status.withheld.items()}

    def sliced(self, driver: str = D) -> set[str]:
        """Return the names of the devices in a driver's ResourceSlices."""
        return sliced(self.node, driver)

    async def until(self, what: Callable[[], object], timeout: float = PATIENCE) -> None:
        await super().until(what, timeout)

    async def soon(self, what: Callable[[], object], seconds: float) -> bool:
        """Return whether a condition becomes true within `seconds`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not what():  # noqa: ASYNC110  # noqa: ASYNC110  # the condition has no event
                    await asyncio.sleep(0.01)
        return bool(what())

    async def take(self, resource: str, *ids: str) -> str:
        """Call Allocate as a kubelet whose checkpoint does not name the container yet. Return the error or ""."""
        endpoint = next(one.endpoint for one in reversed(self.node.registrations) if one.resource == resource)
        request = pb.AllocateRequest(container_requests=[pb.ContainerAllocateRequest(devices_ids=ids)])

        def call() -> str:
            with grpc.insecure_channel(f"unix:{self.node.device_plugin_dir / endpoint}", options=_OPTIONS) as channel:
                try:
                    DevicePluginStub(channel).Allocate(request, timeout=PATIENCE)
                except grpc.RpcError as error:
                    return str(error)
            return ""

        return await asyncio.to_thread(call)


def policies(sources: Sequence[DeviceSource], share: str) -> dict[str, HandoverPolicy]:
    """Return policies as a config file has them: `share` of each source's devices is for claims."""
    return {source.resource: HandoverPolicy(parse_share(share)) for source in sources}


@contextlib.asynccontextmanager
async def serving(
    node: FakeNode, *sources: DeviceSource, share: str = "none", both: bool = True, name: str = AGENT
) -> AsyncIterator[Here]:
    """Run an agent until the end of the block. both: it serves claims beside limits. name: `--agent-name`."""
    if both:
        bridge = Bridge(
            sources,
            policies(sources, share),
            BridgeOptions(node.paths, ":0", Cluster.from_server(node.server.url), NODE, agent_name=name),
            period=0.05,
        )
        here, work = Here(node, bridge.agent, bridge), bridge.run
    else:
        agent = Agent(sources, node.paths, report_holders=True, period=0.05)
        here, work = Here(node, agent), agent.run
    task = asyncio.create_task(work())
    try:
        yield here
    finally:
        here.agent.stop()
        async with asyncio.timeout(30):
            await task


@contextlib.asynccontextmanager
async def offering(
    node: FakeNode, source: DeviceSource, *, share: str = "none", both: bool = True, name: str = AGENT
) -> AsyncIterator[Here]:
    """Run an agent, and wait until all devices of A are offered: to claims if `share` is "all", else to limits."""
    async with serving(node, source, share=share, both=both, name=name) as here:
        inventory = here.agent.services[A].inventory
        await here.until(
            lambda: (here.sliced() if share == "all" else here.healthy()) == {*inventory.snapshot.devices} != set()
        )
        yield here


def registers(root: Path) -> list[Path]:
    """Return the files of agents' records of holders below the kubelet's root directory, without lock files."""
    files = [path for name in ("*/ledger.db*", "dra-bridge/register.db*") for path in root.glob(f"plugins/{name}")]
    return [path for path in files if path.suffix != ".lock"]


def lose_register(root: Path) -> None:
    """Delete the agents' records of holders below the kubelet's root directory while no agent runs; lock files stay."""
    for path in registers(root):
        path.unlink()


async def restart_without_register(node: FakeNode, state: str) -> None:
    """Restart the kubelet while no agent runs, without the register and, if `state` is not "kept", the claim state."""
    await asyncio.to_thread(node.stop)
    lose_register(node.root)
    if state != "kept":
        node.damage_claim_state("deleted")
    await asyncio.to_thread(node.start)
