"""A group of nodes on the real API server, each with a fake kubelet, and a real agent with the manifests' rights.

The Nodes are only API objects, so their pods have no containers. Agents, `dra-bridge rollout`, scheduler, controllers
and admission policies are real.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from deviceplugin.config import parse
from deviceplugin.testing import FakeKubelet
from dra_bridge.manifests import Deployment, manifests
from dra_bridge.testing.kubelet import FakeDraKubelet
from tests.autoscaler import Verdict, judge
from tests.cluster.api import ApiError
from tests.cluster.node import Cluster
from tests.programs import ANY_CONFIG

Object = dict[str, Any]
LABEL = "pool"
DEVICES = 4
"""The number of devices of each node, which is also the number of its CPUs."""
HEARTBEAT = 10.0
"""Seconds between two heartbeats of a Node. After 50 s without one, the node controller calls the Node unreachable."""


@dataclass
class GroupNode:
    """One node with its fake kubelet, and its agent, which may be missing."""

    cluster: Cluster
    name: str
    kubelet: FakeKubelet
    dra: FakeDraKubelet
    agent: subprocess.Popen[bytes] | None = None

    def close(self) -> None:
        """End the agent and the kubelet, and remove the Node."""
        if self.agent is not None:
            self.agent.terminate()
            self.agent.wait(30)
        self.dra.stop()
        self.kubelet.close()
        self.cluster.api.delete("Node", self.name)


@dataclass
class Group:
    """Nodes that have one label in common, each with devices of the same driver."""

    cluster: Cluster
    resource: str
    driver: str
    label: str
    config: Path
    nodes: list[GroupNode] = field(default_factory=list)
    _over: threading.Event = field(default_factory=threading.Event)
    _beating: threading.Thread | None = None

    @classmethod
    @contextlib.contextmanager
    def running(
        cls,
        cluster: Cluster,
        resource: str,
        driver: str,
        count: int,
        label: str = "group",
        *,
        agents: int | None = None,
    ) -> Iterator[Self]:
        """Apply the manifests, make `count` nodes, run an agent on each with `share: none`, and wait for the reports.

        agents: the number of nodes with an agent, from the first node on; None for all nodes.
        """
        config = {"resources": [{"name": resource, "driver": driver, "devices": [{"simulated": {"count": DEVICES}}]}]}
        text = json.dumps(config)
        objects = [one for one in manifests(parse(text), text, Deployment()) if one["kind"] != "DaemonSet"]
        cluster.api.apply(objects)
        with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
            file = Path(directory) / "config.yaml"
            file.write_text(text)
            group = cls(cluster, resource, driver, label, file)
            stack.callback(group._stop)
            for number in range(1, count + 1):
                group.nodes.append(node := group._make(f"{label}-{number}"))
                stack.callback(node.close)
            group._beating = threading.Thread(target=group._beat, daemon=True)
            group._beating.start()
            served = group.nodes[:agents]
            for node in served:
                group.start_agent(node)
            for node in served:
                cluster.wait_for(lambda node=node: group.report(node.name), 120, f"the agent of {node.name} reports")  # type: ignore[misc]
            yield group

    def _make(self, name: str) -> GroupNode:
        api = self.cluster.api
        labels = {LABEL: self.label, "kubernetes.io/hostname": name}
        api.create({"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": labels}})
        amounts = {"cpu": str(DEVICES), "memory": "8Gi", "pods": "20", self.resource: str(DEVICES)}
        condition = {"type": "Ready", "status": "True", "reason": "KubeletReady", "message": "as of the test"}
        status = {"capacity": amounts, "allocatable": amounts, "conditions": [condition]}
        api.patch("Node", name, {"status": status}, subresource="status")
        kubelet = FakeKubelet()
        kubelet.start()
        return GroupNode(self.cluster, name, kubelet, FakeDraKubelet(kubelet.root, self._claim).start())

    def _claim(self, namespace: str, name: str) -> Object | None:
        try:
            return self.cluster.api.get("ResourceClaim", name, namespace)
        except ApiError:
            return None

    def _beat(self) -> None:
        """Renew each Node's Lease, as its kubelet would do."""
        while not self._over.wait(HEARTBEAT):
            now = time.strftime("%Y-%m-%dT%H:%M:%S.000000Z", time.gmtime())
            for node in list(self.nodes):
                metadata = {"name": node.name, "namespace": "kube-node-lease"}
                spec = {"holderIdentity": node.name, "leaseDurationSeconds": 40, "renewTime": now}
                kind = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease"}
                with contextlib.suppress(ApiError, OSError):
                    self.cluster.api.apply({**kind, "metadata": metadata, "spec": spec})

    def _stop(self) -> None:
        self._over.set()
        if self._beating is not None:
            self._beating.join(60)

    # Queries of the group's state.

    def report(self, name: str) -> Object:
        """Return the agent's report of the driver in the node's Lease; an empty object before there is a report."""
        try:
            metadata = self.cluster.api.get("Lease", name, Deployment().namespace)["metadata"]
        except ApiError:
            return {}
        text = (metadata.get("annotations") or {}).get(f"{self.driver}/handover")
        return dict(json.loads(text)) if text else {}

    def objects(self) -> list[Object]:
        """Return the group's Nodes from the API server."""
        return [self.cluster.api.get("Node", node.name) for node in self.nodes]

    def annotations(self) -> list[Object]:
        """Return each Node's annotations about the pool and the autoscaler's scale-down."""
        known = ("/dra-pool", "/dra-scale-down", "/scale-down-disabled")
        found = [node["metadata"].get("annotations") or {} for node in self.objects()]
        return [{key: text for key, text in each.items() if key.endswith(known)} for each in found]

    def slices(self) -> dict[str, int]:
        """Return the number of devices in each node's slices, for nodes that have slices."""
        names, counts = {node.name for node in self.nodes}, dict[str, int]()
        for one in self.cluster.api.list("ResourceSlice"):
            if (name := one["spec"].get("nodeName", "")) in names:
                counts[name] = counts.get(name, 0) + len(one["spec"].get("devices") or ())
        return counts

    def verdicts(self) -> list[Verdict]:
        """Return for each node how a model of the cluster autoscaler judges it now."""
        api = self.cluster.api
        slices, claims, pods = api.list("ResourceSlice"), api.list("ResourceClaim"), api.list("Pod")
        return list(judge(self.objects(), slices, claims, pods).values())

    # Changes of the group's state.

    def start_agent(self, node: GroupNode) -> None:
        """Start the agent of a node, with the rights that the manifests give it."""
        kubelet = node.kubelet
        access = self.cluster.service_account_kubeconfig("dra-bridge", "dra-bridge", ("Node", node.name))
        command = [sys.executable, "-m", "dra_bridge", "run", "--config", str(self.config), *ANY_CONFIG]
        command += ["--node-name", node.name, "--kubeconfig", str(access)]
        command += [*kubelet.arguments]
        with (self.cluster.logs / f"agent-{node.name}.log").open("wb") as output:
            node.agent = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)

    def start_pods(self, per_node: Sequence[int], *, claims: bool = False) -> None:
        """Start pods with one CPU and one device each, by `limits` or by claim, and wait until all are bound.

        per_node: the number of pods of each node. On a node without an agent, the fake kubelet does not run the pods.
        """
        template = {"apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaimTemplate"}
        request = {"name": "one", "exactly": {"deviceClassName": self.driver}}
        spec = {"spec": {"devices": {"requests": [request]}}}
        self.cluster.api.apply({**template, "metadata": {"name": "one", "namespace": "default"}, "spec": spec})
        for node, count in zip(self.nodes, per_node, strict=True):
            for number in range(count):
                name = f"{node.name}-{'claim' if claims else 'limit'}-{number}"
                self.cluster.api.apply(self._pod(name, node.name, claims=claims))
                if not claims and node.agent is not None:
                    node.kubelet.run_pod(name, {self.resource: 1})
        names = {node.name for node in self.nodes}

        def bound() -> bool:
            pods = self.cluster.api.list("Pod", "default")
            return sum(pod["spec"].get("nodeName") in names for pod in pods) >= sum(per_node)

        self.cluster.wait_for(bound, 60, "the pods are bound")

    def _pod(self, name: str, node: str, *, claims: bool) -> Object:
        requests = {"cpu": "1", "memory": "1Gi"} | ({} if claims else {self.resource: "1"})
        resources: Object = {"requests": requests, "limits": requests}
        spec: Object = {"nodeSelector": {"kubernetes.io/hostname": node}, "terminationGracePeriodSeconds": 0}
        if claims:
            resources["claims"] = [{"name": "one"}]
            spec["resourceClaims"] = [{"name": "one", "resourceClaimTemplateName": "one"}]
        spec["containers"] = [{"name": "main", "image": "none", "resources": resources}]
        movable = {"cluster-autoscaler.kubernetes.io/safe-to-evict": "true"}  # although the pod has no controller
        metadata = {"name": name, "namespace": "default", "annotations": movable}
        return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}

    def end_pods(self) -> None:
        """Delete all pods; the kubelets end their containers."""
        for pod in self.cluster.api.list("Pod", "default"):
            self.cluster.api.delete("Pod", pod["metadata"]["name"], "default", grace=0)
        for node in self.nodes:
            for fake in list(node.kubelet.pods.values()):
                fake.delete()

    def rollout(self, *arguments: str) -> tuple[int, str]:
        """Run `dra-bridge rollout` over the group; return its exit status and output."""
        return self.run("rollout", "--driver", self.driver, "-l", f"{LABEL}={self.label}", *arguments)

    @contextlib.contextmanager
    def rolling(self, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
        """Run `dra-bridge rollout` over the group while the context is active; kill it at the end if it still runs."""
        command = [
            sys.executable,
            "-m",
            "dra_bridge",
            "rollout",
            "--driver",
            self.driver,
            "-l",
            f"{LABEL}={self.label}",
        ]
        process = subprocess.Popen([*command, *arguments, "--kubeconfig", str(self.cluster.kubeconfig)])
        try:
            yield process
        finally:
            process.kill()
            process.wait(30)

    def run(self, *arguments: str, timeout: float = 240.0) -> tuple[int, str]:
        """Run `dra-bridge` with an administrator's rights; return its exit status and output."""
        command = [sys.executable, "-m", "dra_bridge", *arguments, "--kubeconfig", str(self.cluster.kubeconfig)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
        print(f"--- {arguments}: {done.returncode}\n{done.stdout}{done.stderr}")
        return done.returncode, done.stdout + done.stderr

    def until(self, what: Callable[[], object], text: str, timeout: float = 120.0) -> None:
        """Wait until the condition `what` is true. text: the condition, for the error message."""
        self.cluster.wait_for(what, timeout, text)
