"""The agent as device plugin and DRA driver on the real node, with exactly the rights that its manifests give it.

The agent reaches the API server as in its DaemonSet: by the files of a pod's service account and the address of the
cluster's service.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, Self

import grpc

from deviceplugin import config
from deviceplugin.naming import class_name
from dra_bridge.manifests import Deployment, manifests
from dra_bridge.wire import dra_v1_pb2 as v1
from dra_bridge.wire import dra_v1_pb2_grpc as v1_grpc
from dra_bridge.wire import dra_v1beta1_pb2 as v1beta1
from dra_bridge.wire import dra_v1beta1_pb2_grpc as v1beta1_grpc
from tests.cluster import isolate
from tests.cluster.api import ApiError
from tests.cluster.node import PLUGINS_REGISTRY, Cluster, ClusterError, ClusterTimeout, Pod, remove_ledger
from tests.programs import ANY_CONFIG

__all__ = ["Bridge", "ClaimPod"]

Object = dict[str, Any]
SERVICE_ACCOUNT = Path("/run/secrets/kubernetes.io/serviceaccount")
_RUNS = itertools.count()


class ClaimPod(Pod):
    """A pod with claims. The kubelet repeats a failed preparation after 10 s, or when the pod changes."""

    def wait_running(self, timeout: float = 120.0) -> Pod:
        """Wait until all containers of the pod run; after each failed preparation, change the pod for a retry."""
        seen = 0
        deadline = time.monotonic() + timeout
        while True:
            try:
                return super().wait_running(min(4.0, max(0.1, deadline - time.monotonic())))
            except ClusterTimeout:
                if time.monotonic() >= deadline:
                    raise
                with contextlib.suppress(ApiError, OSError):
                    seen = self.retry(seen)

    def retry(self, seen: int = 0) -> int:
        """Change the pod if more than `seen` preparations of its claims have failed; return the number of failures."""
        failures = sum(e.get("count") or 1 for e in self.events() if e.get("reason") == "FailedPrepareDynamicResources")
        if failures > seen:
            self.cluster.api.patch("pod", self.name, {"metadata": {"annotations": {"retry": str(failures)}}})
        return max(failures, seen)


class Bridge:
    """A `dra-bridge run` process with its config file, and queries of its state for tests."""

    def __init__(
        self,
        cluster: Cluster,
        directory: Path,
        resources: Sequence[Mapping[str, Any]],
        script: str = "",
        *,
        claim_status: bool = False,
        node_status: bool = True,
    ) -> None:
        self.cluster = cluster
        self.claim_status = claim_status
        self.node_status = node_status
        self.directory = directory
        self.config = directory / "config.yaml"
        self.resources = [dict(resource) for resource in resources]
        self.process: subprocess.Popen[bytes] | None = None
        self.former: list[subprocess.Popen[bytes]] = []
        self._logs: list[Path] = []
        self.script = directory / "agent.py" if script else None
        if self.script is not None:
            self.script.write_text(script)
        self.write()
        self._install()

    @classmethod
    @contextmanager
    def running(
        cls,
        cluster: Cluster,
        *resources: Mapping[str, Any],
        script: str = "",
        claim_status: bool = False,
        node_status: bool = True,
    ) -> Iterator[Self]:
        """Install and start the agent; at the end delete all pods, then end the agent.

        script: a Python program that runs an agent with the same resources and drivers, instead of `dra-bridge run`.
        claim_status: whether the agent writes the status of claims, and has this right.
        node_status: whether the agent has the right to write the Node's status.
        """
        directory = Path(tempfile.mkdtemp(dir=isolate.DEVICES))
        bridge = cls(cluster, directory, resources, script, claim_status=claim_status, node_status=node_status)
        try:
            bridge.start()
            bridge.wait_registered()
            bridge.wait_reported()
            yield bridge
        finally:
            try:
                cluster.end_pods("default")
            finally:
                bridge.stop_former()
                bridge.stop()
                # The next test must not read the allocatable number that this test's agent left in the Node's status.
                with contextlib.suppress(ClusterError):
                    names = [str(resource["name"]) for resource in bridge.resources]
                    cluster.wait_for(lambda: not any(map(cluster.allocatable, names)), 20.0, "nothing is allocatable")
                remove_ledger()
                for log in bridge._logs:
                    print(f"--- {log.name}\n{log.read_text(errors='replace')}")
                shutil.rmtree(directory, ignore_errors=True)

    @property
    def drivers(self) -> list[str]:
        """The names of the config's drivers."""
        return sorted({str(resource["driver"]) for resource in self.resources if "driver" in resource})

    def _is_ending(self, namespace: str) -> bool:
        """Return whether the namespace of a former agent, with its Lease, is still being deleted."""
        try:
            return "deletionTimestamp" in self.cluster.api.get("Namespace", namespace)["metadata"]
        except ApiError as error:
            if error.code != 404:
                raise
            return False

    def _install(self) -> None:
        """Apply the manifests without the DaemonSet, and write the files of the agent's service account."""
        text = self.config.read_text()
        how = Deployment(
            version=self.version, extended_resource=self.cluster.minor >= 34, claim_status=self.claim_status
        )
        objects = manifests(config.parse(text, str(self.config)), text, how)
        objects = [body for body in objects if body["kind"] != "DaemonSet"]
        for role in (body for body in objects if body["kind"] == "ClusterRole" and not self.node_status):
            role["rules"] = [rule for rule in role["rules"] if rule["resources"] != ["nodes/status"]]
        self.cluster.wait_for(lambda: not self._is_ending(how.namespace), 60.0, "the former namespace has gone")
        self.cluster.api.apply(objects)
        self.classes = {
            str(resource["name"]): class_name(str(resource["name"]), str(resource["driver"]))
            for resource in self.resources
            if "driver" in resource
        }
        if not os.path.ismount(SERVICE_ACCOUNT):
            SERVICE_ACCOUNT.mkdir(parents=True, exist_ok=True)
            subprocess.run(["mount", "-t", "tmpfs", "serviceaccount", str(SERVICE_ACCOUNT)], check=True)
        (SERVICE_ACCOUNT / "namespace").write_text(how.namespace)
        shutil.copy(self.cluster.directory / "pki" / "ca.crt", SERVICE_ACCOUNT / "ca.crt")
        self.renew_token()

    def renew_token(self, seconds: int = 3600) -> None:
        """Write a new token, bound to the current Node object; a token of a deleted Node object is refused."""
        how = Deployment()
        token = self.cluster.service_account_token(how.name, how.namespace, ("Node", self.cluster.node_name), seconds)
        (SERVICE_ACCOUNT / "token").write_text(token)

    @property
    def version(self) -> Literal["v1", "v1beta2", "v1beta1"]:
        """The version of resource.k8s.io that the agent and the tests use on this cluster."""
        if self.cluster.minor >= 34:
            return "v1"
        return "v1beta2" if self.cluster.minor == 33 else "v1beta1"

    @property
    def api_version(self) -> str:
        """The group resource.k8s.io with the version that the agent uses, such as resource.k8s.io/v1."""
        return f"resource.k8s.io/{self.version}"

    def write(self) -> None:
        """Write the config file with `resources`."""
        new = self.config.with_suffix(".new")
        new.write_text(json.dumps({"resources": self.resources}))
        new.replace(self.config)

    def share(self, share: str | int, resource: int = 0) -> None:
        """Write the config file with another `share` of a resource, which is the number of its devices for claims."""
        self.resources[resource] = {**self.resources[resource], "dra": {"share": share}}
        self.write()

    def command(self) -> list[str]:
        """Return the command line of the agent, without the options that `start` adds for every agent."""
        if self.script is not None:
            return [sys.executable, str(self.script)]
        return [sys.executable, "-m", "dra_bridge", "run", "--config", str(self.config), *ANY_CONFIG]

    def start(self, *arguments: str) -> None:
        """Start the agent."""
        log = self.cluster.logs / f"dra-bridge-{next(_RUNS)}.log"
        self._logs.append(log)
        command = [*self.command(), "--log-level", "debug", "--node-name", self.cluster.node_name, *arguments]
        command += ["--cgroup-root", str(isolate.POD_CGROUPS)]
        command += ["--claim-status"] if self.claim_status else []
        there = {"KUBERNETES_SERVICE_HOST": isolate.SERVICE_IP, "KUBERNETES_SERVICE_PORT": "443"}
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, **there}
            )

    def start_another(self) -> None:
        """Start a second agent beside the running one, as a rolling update does; `stop_former` ends the first."""
        assert self.process is not None
        self.former.append(self.process)
        self.start()

    def stop_former(self) -> None:
        """End all agents except the one that was started last."""
        while self.former:
            process = self.former.pop()
            process.terminate()
            process.wait(20)

    def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        """End the agent."""
        process, self.process = self.process, None
        if process is not None:
            process.send_signal(number)
            process.wait(20)

    def kill(self) -> None:
        """Kill the agent, as a crash does."""
        self.stop(signal.SIGKILL)

    def log(self) -> str:
        """Return the agent's log since its last start."""
        return self._logs[-1].read_text(errors="replace")

    def logs(self) -> str:
        """Return the logs of all starts of the agent."""
        return "".join(log.read_text(errors="replace") for log in self._logs)

    def call(self, method: Literal["Prepare", "Unprepare"], name: str, uid: str) -> str:
        """Call the driver as the kubelet does, for one claim; return the error in the response, or "" without one."""
        wire, stub = (v1, v1_grpc) if self.cluster.minor >= 34 else (v1beta1, v1beta1_grpc)
        (driver,) = self.drivers
        (socket,) = PLUGINS_REGISTRY.glob(f"{driver}-*")
        with grpc.insecure_channel(f"unix:{socket}", (("grpc.default_authority", "localhost"),)) as channel:
            request = getattr(wire, f"Node{method}ResourcesRequest")()
            request.claims.add(namespace="default", name=name, uid=uid)
            answer = getattr(stub.DRAPluginStub(channel), f"Node{method}Resources")(request, timeout=45)
        return str(answer.claims[uid].error)

    def rss(self) -> int:
        """Return the agent's resident memory in KiB."""
        assert self.process is not None
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.split("VmRSS:")[1].split()[0])

    # State that other clients see.

    def wait_registered(self, *, resources: bool = True) -> None:
        """Wait until the kubelet has accepted the registrations of drivers and resources.

        Until then the kubelet refuses pods with limits, even if the Node still has a former agent's devices. resources:
        False if another process serves the resources.
        """
        lines = [f"driver {driver} is registered with the kubelet" for driver in self.drivers]
        lines += [f"{resource['name']}: the kubelet listens" for resource in self.resources if resources]
        for line in lines:
            self.cluster.wait_for(
                lambda line=line: line in self.log(),  # type: ignore[misc]
                120.0,  # an agent's start takes a second, and much longer on a busy machine
                line,
            )

    def lease(self) -> Object:
        """Return the agent's Lease for the node; an object without annotations if there is no Lease yet."""
        try:
            return self.cluster.api.get("Lease", self.cluster.node_name, Deployment().namespace)
        except ApiError as error:
            if error.code != 404:
                raise
            return {"metadata": {}}

    def report(self, driver: str | None = None) -> Object:
        """Return the report on a driver in the node's Lease; an empty object if there is no report yet."""
        text = (self.lease()["metadata"].get("annotations") or {}).get(f"{driver or self.drivers[0]}/handover")
        return dict(json.loads(text)) if text else {}

    def wait_reported(self) -> None:
        """Wait until the agent reports on each driver, except drivers of adopted plugins, which may register later."""
        adopting = {one.get("driver") for one in self.resources if any("plugin" in of for of in one.get("devices", ()))}
        for driver in set(self.drivers) - adopting:
            self.cluster.wait_for(lambda driver=driver: self.report(driver), 30.0, f"{driver} is reported")  # type: ignore[misc]

    def slices(self, driver: str | None = None) -> list[Object]:
        """Return the node's slices of a driver."""
        wanted = driver or self.drivers[0]
        return [
            one
            for one in self.cluster.api.list("ResourceSlice", api_version=self.api_version)
            if one["spec"]["driver"] == wanted
        ]

    def offered(self, driver: str | None = None) -> dict[str, Object]:
        """Return the devices of all slices by name; v1beta1's fields in `basic` are added to the device's fields."""
        return {
            device["name"]: {**device, **device.get("basic", {})}
            for one in self.slices(driver)
            for device in one["spec"].get("devices") or ()
        }

    def wait_offered(self, count: int, driver: str | None = None, timeout: float = 30.0) -> dict[str, Object]:
        """Wait until the slices have exactly `count` devices without a taint; return all devices in the slices."""

        def right() -> bool:
            return sum(not device.get("taints") for device in self.offered(driver).values()) == count

        self.cluster.wait_for(right, timeout, f"{count} devices are offered")
        return self.offered(driver)

    def claim_spec(
        self, *requests: Object, constraints: Sequence[Object] = (), config: Sequence[Object] = ()
    ) -> Object:
        """Return a claim's spec for this cluster's version; the arguments have the form of v1 (with `exactly`)."""
        fitted = []
        for request in requests:
            exactly = request.get("exactly")
            if self.version == "v1beta1" and exactly is not None:
                fitted.append({"name": request["name"], **exactly})
            else:
                fitted.append(request)
        devices: Object = {"requests": fitted}
        if constraints:
            devices["constraints"] = list(constraints)
        if config:
            devices["config"] = list(config)
        return {"devices": devices}

    def one(self, name: str = "one", *, resource: str | None = None, **exactly: Any) -> Object:
        """Return a request for one device; `exactly` adds or replaces fields."""
        device_class = self.classes[resource or str(self.resources[0]["name"])]
        return {"name": name, "exactly": {"deviceClassName": device_class, **exactly}}

    def claim(self, name: str, *requests: Object, **more: Any) -> Object:
        """Create a ResourceClaim, by default with a request for one device."""
        body = {
            "apiVersion": self.api_version,
            "kind": "ResourceClaim",
            "metadata": {"name": name, "namespace": "default"},
            "spec": self.claim_spec(*(requests or (self.one(),)), **more),
        }
        (made,) = self.cluster.api.apply(body)
        return made

    def template(self, name: str, *requests: Object, **more: Any) -> None:
        """Create a ResourceClaimTemplate, by default with a request for one device."""
        body = {
            "apiVersion": self.api_version,
            "kind": "ResourceClaimTemplate",
            "metadata": {"name": name, "namespace": "default"},
            "spec": {"spec": self.claim_spec(*(requests or (self.one(),)), **more)},
        }
        self.cluster.api.apply(body)

    def get_claim(self, name: str) -> Object:
        """Return the current object of a claim."""
        return self.cluster.api.get("ResourceClaim", name, api_version=self.api_version)

    def allocated(self, name: str) -> list[str]:
        """Return the names of the devices in a claim's allocation."""
        status = self.get_claim(name).get("status") or {}
        results = ((status.get("allocation") or {}).get("devices") or {}).get("results") or []
        return [result["device"] for result in results]

    def pod(self, name: str, claims: Mapping[str, Any], **more: Any) -> ClaimPod:
        """Start a pod with claims. claims: for each name in `resourceClaims`, a claim or a template."""
        return ClaimPod(self.cluster, self.cluster.start_pod(name, claims=claims, **more).object)

    def wait_event(self, pod: Pod, words: str, timeout: float = 30.0) -> str:
        """Wait for an Event about a pod with these words in the message; return the message."""

        def found() -> str:
            return next((str(e["message"]) for e in pod.events() if words in str(e.get("message"))), "")

        return self.cluster.wait_for(found, timeout, f"an event of {pod.name} with {words!r}")


def env_of(pod: Pod, container: str | None = None) -> dict[str, str]:
    """Return a container's environment."""
    lines = pod.exec(["env"], container).splitlines()
    return dict(line.split("=", 1) for line in lines if "=" in line)


def seconds_until(cluster: Cluster, predicate: Any, timeout: float, what: str) -> float:
    """Wait until the predicate is true; return the seconds that this took."""
    began = time.monotonic()
    cluster.wait_for(predicate, timeout, what)
    return time.monotonic() - began
