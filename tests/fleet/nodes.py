"""One process with many nodes: an embedded kubelet and a real agent each, in one event loop.

``python -m tests.fleet.nodes ACCOUNTS KUBECONFIG PERIOD`` reads orders from standard input, one JSON object per line,
and answers each order by one line.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import resource
import shutil
import sys
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, cast

from deviceplugin.config import parse
from deviceplugin.sources import ConfiguredSource
from deviceplugin.testing.pods import FakePod
from dra_bridge.kube import Cluster
from dra_bridge.kube.api import Object
from dra_bridge.kube.auth import from_server
from dra_bridge.node.bridge import Bridge
from dra_bridge.node.options import BridgeOptions
from dra_bridge.node.share import policies_of
from dra_bridge.testing.apiserver import FakeApiServer
from dra_bridge.testing.node import FakeNode
from tests.cluster.api import Api, ApiError
from tests.cluster.node import KUBELET_DIRECTORY
from tests.fleet.plane import CONFIG, NAMESPACE
from tests.fleet.real_pods import ClaimsOfPods, RealPods

_LOG: Final = logging.getLogger(__name__)
ROOTS: Final = KUBELET_DIRECTORY / "f"
"""The path is short, as paths of sockets have at most 107 characters."""
THREADS: Final = 64
OF_KUBELETS: Final = {"cpu", "memory", "pods", "ephemeral-storage"}


class Server:
    """The API of the fake API server that `FakeNode` uses, on top of the real API server.

    The claims of a node's pods are kept here as well, as no other client writes them.
    """

    def __init__(self, api: Api, node: str) -> None:
        self._api = api
        self._node = node
        self._claims: dict[tuple[str, str], Object] = {}
        self._real: set[tuple[str, str]] = set()
        """Namespace and name of the claims that the real scheduler allocates and the real controller releases."""
        self._classes: list[Object] = []
        self._changed = threading.Condition()

    def wake(self) -> None:
        """Let the embedded scheduler look for pods."""
        with self._changed:
            self._changed.notify_all()

    def wait_changed(self, seen: int, timeout: float) -> int:
        """Wait until a pod comes, or for at least 1 s: then the scheduler looks for free devices again."""
        with self._changed:
            self._changed.wait(max(timeout, 1.0))
        return seen + 1

    def objects(self, plural: str = "resourceslices") -> list[Object]:
        """Return the objects of this node."""
        if plural == "resourceclaims":
            return list(self._claims.values())
        if plural == "deviceclasses":
            self._classes = self._classes or self._listed("DeviceClass")
            return self._classes
        return self._listed("ResourceSlice", field_selector=f"spec.nodeName={self._node}")

    def _listed(self, kind: str, **selectors: str) -> list[Object]:
        version = "resource.k8s.io/v1"
        items = self._api.list(kind, None, version, **selectors)
        return [{"apiVersion": version, "kind": kind, **item} for item in items]

    def get(self, plural: str, name: str, namespace: str = "") -> Object:
        """Return an object. Raises KeyError if there is none."""
        if plural == "resourceclaims":
            return self._claims[namespace, name]
        try:
            node = self._api.get("Node", name, api_version="v1")
        except ApiError as error:
            raise KeyError(name) from error
        for numbers in (node["status"].get("capacity") or {}, node["status"].get("allocatable") or {}):
            for name in OF_KUBELETS & numbers.keys():
                del numbers[name]  # The embedded kubelet would remove these resources from the Node.
        return node

    def create(self, body: Object) -> Object:
        """Create a claim with the status of the body."""
        return self.replace({**self._api.create(body), "status": body.get("status") or {}})

    def adopt(self, claim: Object) -> None:
        """Add a claim that the real scheduler has allocated."""
        key = claim["metadata"]["namespace"], claim["metadata"]["name"]
        self._claims[key] = {"apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim", **claim}
        self._real.add(key)

    def release(self, name: str, namespace: str) -> None:
        """Remove a claim of the real scheduler."""
        self._claims.pop((namespace, name), None)
        self._real.discard((namespace, name))

    def replace(self, body: Object) -> Object:
        """Write the status of a claim."""
        kind, name, namespace = body["kind"], body["metadata"]["name"], body["metadata"]["namespace"]
        if (namespace, name) in self._real:
            self._claims[namespace, name] = body
            return body
        path = self._api.resource(kind, body["apiVersion"]).path(name, namespace)
        claim = self._api.request("PUT", f"{path}/status", body)
        self._claims[namespace, name] = claim
        return claim

    def delete(self, plural: str, name: str, namespace: str = "") -> None:
        """Delete a claim or a slice."""
        kind = "ResourceClaim" if plural == "resourceclaims" else "ResourceSlice"
        self._api.delete(kind, name, namespace or "default", "resource.k8s.io/v1")
        self._claims.pop((namespace, name), None)

    def patch(self, _plural: str, name: str, patch: Object, namespace: str = "", subresource: str = "") -> Object:
        """Patch a Node."""
        return self._api.patch("Node", name, patch, namespace, subresource, "v1")


class Nodes:
    """The nodes of this process: kubelets, with or without agents."""

    def __init__(self, accounts: Path, api: Api, period: float) -> None:
        self.accounts = accounts
        self.api = api
        self.period = period
        self.nodes: dict[str, FakeNode] = {}
        self.bridges: dict[str, Bridge] = {}
        self.pods: dict[str, FakePod] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._real: RealPods | None = None
        self._following: asyncio.Task[None] | None = None

    async def kubelets(self, names: list[str], status_period: float | None = None) -> None:
        """Start kubelets."""
        for name in names:
            root = ROOTS / name
            root.mkdir(parents=True)
            server = cast("FakeApiServer", Server(self.api, name))
            node = FakeNode(server, name, root, status_period=status_period, socket_period=1.0)
            await asyncio.to_thread(node.start)
            self.nodes[name] = node

    async def start(self, names: list[str], interval: float, status_period: float | None = None) -> list[float]:
        """Start nodes with agents, one per interval; return the seconds of each start."""
        took = []
        for name in names:
            began = time.monotonic()
            await self.kubelets([name], status_period)
            self.agent(name)
            took.append(time.monotonic() - began)
            await asyncio.sleep(max(0.0, interval - took[-1]))
        return took

    def agent(self, name: str) -> None:
        """Start the agent of a node."""
        config = parse(json.dumps(CONFIG))
        cluster = Cluster.from_environment(account=self.accounts / "dra-bridge" / name)
        options = BridgeOptions(self.nodes[name].paths, None, cluster, name, namespace=NAMESPACE)
        sources = [ConfiguredSource(one) for one in config.resources]
        bridge = self.bridges[name] = Bridge(sources, policies_of(config), options, period=self.period)
        self._tasks[name] = asyncio.create_task(bridge.run())

    async def pod(self, name: str, node: str, **wants: Any) -> str:
        """Start a pod."""
        here = self.nodes[node]
        self.pods[name] = await asyncio.to_thread(here.start_pod, name, **wants)
        cast("Server", here.server).wake()
        return self.pods[name].uid

    async def running(self, name: str, timeout: float) -> float:
        """Wait until a pod runs; return the seconds of the wait."""
        began = time.monotonic()
        await asyncio.to_thread(self.pods[name].wait_running, timeout)
        return time.monotonic() - began

    async def delete(self, name: str, timeout: float) -> None:
        """Delete a pod and wait until it is gone."""
        await asyncio.to_thread(self.pods.pop(name).delete, timeout)

    async def follow_pods(self, namespace: str) -> None:
        """Run the pods that the real scheduler binds to nodes of this process, from now on."""
        ca = str(self.accounts / "ca.crt")
        url = f"https://{self.api.host}:{self.api.port}"
        cluster = Cluster(lambda: from_server(url, token_file=self.accounts / "admin", ca_file=ca))
        nodes = {name: (node, cast("ClaimsOfPods", node.server)) for name, node in self.nodes.items()}
        self._real = RealPods(self.api, cluster, nodes)
        self._following = asyncio.create_task(self._real.run(namespace))

    async def pods_found(self) -> dict[str, Any]:
        """Return the figures of the pods that `follow_pods` has run."""
        assert self._real is not None
        return await asyncio.to_thread(self._real.found)

    async def failed(self) -> list[str]:
        """Return the agents that have ended."""
        return [f"{name}: {task.exception()!r}" for name, task in self._tasks.items() if task.done()]

    async def states(self) -> Mapping[str, Any]:
        """Return the number of this process's pods by phase."""
        phases: dict[str, int] = {}
        for pod in self.pods.values():
            phases[pod.phase] = phases.get(pod.phase, 0) + 1
        return phases

    async def stop(self) -> None:
        """End all agents and kubelets."""
        if self._following is not None:
            self._following.cancel()
        for bridge in self.bridges.values():
            bridge.agent.stop()
        if self._tasks:
            await asyncio.wait(self._tasks.values(), timeout=60)
        for node in self.nodes.values():
            await asyncio.to_thread(node.close)


async def serve(nodes: Nodes) -> None:
    """Execute orders until the input ends, each in a task of its own."""
    loop = asyncio.get_running_loop()
    loop.set_default_executor(ThreadPoolExecutor(THREADS))
    reader = asyncio.StreamReader(limit=2**24)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    tasks: set[asyncio.Task[None]] = set()

    async def carry_out(order: dict[str, Any]) -> None:
        answer: dict[str, Any] = {"order": order.pop("order")}
        try:
            answer["result"] = await getattr(nodes, order.pop("do"))(**order)
        except Exception as error:
            _LOG.exception("order %s", answer["order"])
            answer["error"] = f"{type(error).__name__}: {error}"
        print(json.dumps(answer), flush=True)

    while line := await reader.readline():
        task = asyncio.create_task(carry_out(json.loads(line)))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    await nodes.stop()


def main(arguments: list[str]) -> None:
    """Run the process."""
    accounts, address, period = arguments
    directory = Path(accounts)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    threading.stack_size(256 * 1024)
    sys.setswitchinterval(0.002)
    host, _, port = address.partition(":")
    token = (directory / "admin").read_text()
    api = Api(host, int(port), token, str(directory / "ca.crt"))
    nodes = Nodes(directory, api, float(period))
    try:
        with contextlib.suppress(KeyboardInterrupt):
            asyncio.run(serve(nodes))
    finally:
        for name in nodes.nodes:
            shutil.rmtree(ROOTS / name, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1:])
