"""An agent of one side or of both on the fake node, and what can be seen of it from outside."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, Final

import grpc
import pytest

from deviceplugin.device import ContainerEdits, Device
from deviceplugin.node.agent import Agent
from deviceplugin.source import DeviceSource
from deviceplugin.testing import FakeKubelet, FakePod
from deviceplugin.testing.claim_state import DevicesOfClaim
from deviceplugin.wire import deviceplugin_pb2 as pb
from deviceplugin.wire.deviceplugin_pb2_grpc import DevicePluginStub
from dra_bridge.handover.share import parse_share
from dra_bridge.kube import Cluster
from dra_bridge.node.bridge import Bridge
from dra_bridge.node.options import AGENT, BridgeOptions
from dra_bridge.node.share import HandoverPolicy
from dra_bridge.rollout.fleet import share_patch
from dra_bridge.testing.kubelet import PodError
from dra_bridge.testing.node import FakeNode
from tests.register.files import lose_register

A, B = "example.com/a", "example.com/b"
D, E = "d.example.com", "e.example.com"
NODE: Final = "node"
_SAYS: Final = "DEVICE_"
_OPTIONS: Final = (("grpc.default_authority", "localhost"), ("grpc.use_local_subchannel_pool", 1))
TOKENS = pytest.mark.parametrize(
    "tokens", [pytest.param(False, marks=pytest.mark.explore), True], ids=["names", "tokens"]
)
SHARE = pytest.mark.parametrize("share", ["none", "all"])
BOTH = pytest.mark.parametrize("both", [False, True], ids=["pods", "both"])
PATIENCE: Final = 15.0
"""Seconds for what is to come; a test that waits for a rule's own delay gives more."""


def some(names: str, usual: Sequence[tuple[Any, ...]], *values: Sequence[Any]) -> pytest.MarkDecorator:
    """Parametrize with each combination of the values; `explore` alone looks at those that are not usual."""
    cases = [*itertools.product(*values)]
    assert set(usual) < set(cases)
    explore = pytest.mark.explore
    return pytest.mark.parametrize(
        names, [pytest.param(*case, marks=() if case in usual else explore) for case in cases]
    )


class Listed(DeviceSource):
    """Devices that a test lists. driver: "" for none. tokens: whether it is known what the devices are, beyond ids."""

    def __init__(self, resource: str, driver: str, *names: str, replicas: int = 1, tokens: bool = False) -> None:
        self.resource = resource
        self.driver = driver
        self.replicas = replicas
        self.tokens = tokens
        self.lists: asyncio.Queue[Sequence[Device]] = asyncio.Queue()
        self.list(*(names or ("d0", "d1")))

    def list(self, *names: str, **fields: Any) -> None:
        """Have these devices and no others; fields: further ones of each."""
        self.put(*(self.device(name, **fields) for name in names))

    def put(self, *devices: Device) -> None:
        """Have these devices and no others."""
        self.lists.put_nowait(devices)

    def device(self, name: str, **fields: Any) -> Device:
        """Return a device that says in its container which one it is."""
        identity = {"identity": f"serial:{name}"} if self.tokens else {}
        return Device(name, **{"edits": ContainerEdits({f"{_SAYS}{name}": "1"}), **identity, **fields})

    async def watch(self) -> AsyncIterator[Sequence[Device]]:
        while True:
            yield await self.lists.get()


class Varying(Listed):
    """Devices that are shared as often as the list says that was given last; t0 marks a list as taken."""

    def __init__(self, replicas: int, driver: str = D, *, tokens: bool = False) -> None:
        super().__init__(A, driver, "d0", replicas=2, tokens=tokens)
        self.lists = asyncio.Queue()
        self.vary(replicas)

    def vary(self, replicas: int, *marks: str) -> None:
        """List d0 with this number of replicas; marks: further devices, by which the list is known."""
        self.put(self.device("d0", attributes={"replicas": replicas}), *map(self.device, marks))

    def replicas_of(self, device: Device) -> int:
        return int(device.attributes.get("replicas", 1))


def healthy(node: FakeKubelet, resource: str) -> set[str]:
    """Return the ids that the kubelet would give to pods."""
    return {name for name, one in node.devices(resource).items() if one.health == "Healthy"}


def running(node: FakeNode, device: str) -> set[str]:
    """Return the UIDs of the pods of which a container that has the device, or a replica of it, runs."""
    with node.changed:
        pods = [*node.pods.values(), *node.orphans.values()]
        alive = [pod for pod in pods if any(one.state == "running" for one in pod.all_containers.values())]
        return {pod.uid for pod in alive if device in map(plain, node.devices_of(pod))}


def got(node: FakeNode, pod: FakePod) -> set[str]:
    """Return the devices that the first container of a pod says to have: the kubelet may remember others."""
    return {name.removeprefix(_SAYS) for name in node.edits_of(pod).env if name.startswith(_SAYS)}


def answered(pod: FakePod) -> bool:
    """Return whether a pod runs, or its claims' Prepare has been refused."""
    return pod.running or "NodePrepareResources" in pod.container().message


def plain(name: str) -> str:
    """Return the device of a replica's id, or of a published name; ids of two resources differ here."""
    return name.rpartition("--")[2].partition("::")[0]


class Here:
    """An agent on a node."""

    def __init__(self, node: FakeNode, agent: Agent, bridge: Bridge | None = None) -> None:
        self.node = node
        self.agent = agent
        self.bridge = bridge

    async def serve(self, *sources: DeviceSource, share: str = "none") -> None:
        """Serve these sources instead of those before, as after a change of the config file."""
        by_resource = {source.resource: source for source in sources}
        if self.bridge is None:
            await self.agent.reconfigure(by_resource)
        else:
            await self.bridge.reconfigure(by_resource, policies(sources, share), [])

    def ask(self, driver: str, share: str) -> None:
        """Annotate the Node with the share of a driver."""
        self.node.server.patch("nodes", NODE, share_patch(driver, share))

    def healthy(self, resource: str = A) -> set[str]:
        """Return the ids that the kubelet would give to pods."""
        return healthy(self.node, resource)

    def withheld(self, resource: str = A) -> dict[str, str]:
        """Return why devices are offered to nobody, by id, as the agent's status says it."""
        (status,) = [one for one in self.agent.status().resources if one.resource == resource]
        return {device: one.reason for device, one in status.withheld.items()}

    def sliced(self, driver: str = D) -> set[str]:
        """Return the names of the devices in a driver's slices."""
        slices = [one["spec"] for one in self.node.server.objects("resourceslices") if one["spec"]["driver"] == driver]
        return {device["name"] for one in slices for device in one.get("devices") or ()}

    async def until(self, what: Callable[[], object], timeout: float = PATIENCE) -> None:
        """Wait until something is so."""
        if not await self.soon(what, timeout):
            seen = {name: self.node.devices(name) for name in self.node.resources()}
            slices = {driver: self.sliced(driver) for driver in (D, E)}
            pytest.fail(f"it does not come: devices {seen}, slices {slices}, pods {self.node.pods}")

    async def soon(self, what: Callable[[], object], seconds: float) -> bool:
        """Return whether something is so within some seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not what():  # noqa: ASYNC110  # what is waited for tells nobody
                    await asyncio.sleep(0.01)
        return bool(what())

    async def take(self, resource: str, *ids: str) -> str:
        """Call Allocate as a kubelet whose checkpoint does not name the container yet; return the error, "" if none."""
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

    async def scans(self, count: int = 6) -> None:
        """Wait until the agent has asked the kubelet so many more times who holds what."""
        before = len(self.node.rpcs("List"))
        await self.until(lambda: len(self.node.rpcs("List")) >= before + count)

    async def run(self, name: str, limits: Mapping[str, int], **options: Any) -> FakePod:
        """Start a pod past the scheduler; return it when it runs or has failed."""
        return await asyncio.to_thread(self.node.run_pod, name, limits, check=False, timeout=PATIENCE, **options)

    async def claimant(self, name: str, driver: str = D, **options: Any) -> FakePod:
        """Start a pod with a claim for a device of a driver; return it when it runs."""
        pod = self.node.start_pod(name, **(options or {"template": {driver: 1}}))
        await asyncio.to_thread(pod.wait_running, PATIENCE)
        return pod

    async def stopped(self, pod: FakePod) -> None:
        """Delete a pod and wait until nothing of it runs."""
        await asyncio.to_thread(pod.delete, PATIENCE)

    def allocate(self, name: str, driver: str, device: str, *, pod: str = "q", **result: Any) -> DevicesOfClaim:
        """Make a claim that was allocated a device by its published name, whatever is in the slices."""
        made = self.node.server.create(claim_body(name, driver))
        allocation = {"request": "r", "driver": driver, "pool": NODE, "device": device, **result}
        made["status"] = {
            "allocation": {"devices": {"results": [allocation]}},
            "reservedFor": [{"resource": "pods", "name": pod, "uid": pod}],
        }
        self.node.server.replace(made)
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


def claim_body(name: str, driver: str, **exactly: Any) -> dict[str, Any]:
    """Return a claim for a device of a driver's class."""
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {"devices": {"requests": [{"name": "r", "exactly": {"deviceClassName": driver, **exactly}}]}},
    }


def policies(sources: Sequence[DeviceSource], share: str) -> dict[str, HandoverPolicy]:
    """Return the policies of a config file that gives claims a share of each resource."""
    return {source.resource: HandoverPolicy(parse_share(share)) for source in sources}


@contextlib.asynccontextmanager
async def serving(
    node: FakeNode, *sources: DeviceSource, share: str = "none", both: bool = True, name: str = AGENT
) -> AsyncIterator[Here]:
    """Run an agent until the end of the block. both: with both sides, else for pods alone. name: `--agent-name`."""
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


async def restart_without_register(node: FakeNode, state: str) -> None:
    """Restart the kubelet while no agent runs, and lose the register; state: whether the claim state is lost, too."""
    await asyncio.to_thread(node.stop)
    lose_register(node.root)
    if state != "kept":
        node.damage_claim_state("deleted")
    await asyncio.to_thread(node.start)


async def allocated_elsewhere(here: Here) -> tuple[FakePod, FakePod, FakePod]:
    """Have a claim allocated d1 that was prepared with d0, while its first pod's container hangs.

    Return the pod that hangs, that of the claim that was allocated d0 since, and the new pod of the first claim.
    """
    node = here.node
    node.claim("mine", D)
    hanging = await here.claimant("worker", claims=["mine"])
    assert set(node.devices_of(hanging)) == {"d0"}
    await asyncio.to_thread(node.stop)
    hanging.force_delete(hang=True)
    owner = node.start_pod("owner", template={D: 1})
    again = node.start_pod("worker", claims=["mine"])
    await asyncio.to_thread(node.start)
    await here.until(lambda: all(pod.bound for pod in (owner, again)))
    return hanging, owner, again
