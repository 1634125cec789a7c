"""A control plane without nodes: a real etcd and kube-apiserver, the manifests, and Nodes that are only objects."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

from deviceplugin import config
from dra_bridge.manifests import Deployment, manifests
from tests.cluster.node import Cluster
from tests.fleet.audit import POLICY, Log

RESOURCE: Final = "example.com/fpga"
DRIVER: Final = "fpga.example.com"
DEVICES: Final = 8
NAMESPACE: Final = "dra-bridge"
AGENTS: Final = f"{NAMESPACE}:dra-bridge"
"""The agents' ServiceAccount."""
CONFIG: Final = {
    "resources": [
        {
            "name": RESOURCE,
            "driver": DRIVER,
            "devices": [{"simulated": {"count": DEVICES}}],
            "dra": {"share": "none"},
        }
    ]
}

_SERIES: Final = re.compile(r"(\w+)(?:\{(.*)\})? (\S+)")
_LABEL: Final = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


class Usage(NamedTuple):
    """Resources used by a process. cpu: seconds so far, with those of its ended children. resident: MB now."""

    cpu: float
    resident: float

    @classmethod
    def of(cls, pid: int) -> Usage:
        """Return the resources used by a process."""
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        resident = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6
        return cls(sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK"), resident)


class ControlPlane(Cluster):
    """etcd and the API server, with default priority and fairness, RBAC and the policies of the manifests.

    etcd sends its progress every 5 s, as kubeadm configures it. No controllers run, unless `start_scheduling` starts
    some. Agents need a controller only for the Lease of a deleted Node, and no run deletes Nodes.
    """

    def __init__(self, version: str | None = None) -> None:
        super().__init__(version)
        self.audit_path = self.logs / "audit.log"
        self.accounts = self.directory / "accounts"

    def start(self, timeout: float = 120.0) -> None:
        """Start etcd and the API server, and apply the manifests."""
        began = time.monotonic()
        self.lay_out()
        policy = self.directory / "audit.json"
        policy.write_text(json.dumps(POLICY))
        server = self.components["kube-apiserver"]
        server.argv += [f"--audit-policy-file={policy}", f"--audit-log-path={self.audit_path}"]
        self.components["etcd"].argv.append("--watch-progress-notify-interval=5s")
        try:
            self.components["etcd"].start()
            self.start_apiserver(timeout)
            self.wait_for(lambda: self.api.get("Namespace", "default"), timeout, "the namespace default")
            self.install()
        except BaseException:
            self.stop()
            raise
        self.started_in = time.monotonic() - began

    def start_scheduling(self) -> None:
        """Start the scheduler, and the controllers of claims, of ServiceAccounts and of objects without an owner."""
        manager = self.components["kube-controller-manager"]
        controllers = ("resourceclaim", "serviceaccount", "garbage-collector")
        manager.argv.append("--controllers=" + ",".join(f"{name}-controller" for name in controllers))
        manager.start()
        self.components["kube-scheduler"].start()

    def install(self, **options: Any) -> None:
        """Apply the objects of the manifests, except the DaemonSet."""
        text = json.dumps(CONFIG)
        objects = manifests(config.parse(text), text, Deployment(**options))
        self.api.apply([body for body in objects if body["kind"] != "DaemonSet"])

    def restart_apiserver(self, downtime: float) -> float:
        """End the API server as an upgrade does, and start it again; return when it was started (Unix seconds).

        The API server waits up to a minute for watches; it is killed after 10 s, as static pods are.
        """
        self.components["kube-apiserver"].stop(signal.SIGTERM, 10.0)
        time.sleep(downtime)
        begun = time.time()
        self.start_apiserver()
        return begun

    @property
    def admin_token(self) -> str:
        """The administrator's token."""
        user = json.loads(self.kubeconfig.read_text())["users"][0]["user"]
        return str(user["token"])

    @property
    def audit(self) -> Log:
        """The audit log of the API server (requests of ServiceAccounts only), read from its beginning."""
        return Log(self.audit_path)

    def add_nodes(self, names: Sequence[str], **annotations: str) -> None:
        """Make Nodes as kubelets report them, and a token for the agent on each."""
        with ThreadPoolExecutor(8) as pool:
            for _ in pool.map(lambda name: self._add_node(name, annotations), names):
                pass

    def _add_node(self, name: str, annotations: Mapping[str, str]) -> None:
        numbers = {RESOURCE: str(DEVICES), "cpu": "8", "memory": "32Gi", "pods": "110"}
        ready = {"type": "Ready", "status": "True", "reason": "KubeletReady"}
        body = {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {"name": name, "labels": {"pool": "fpga"}, "annotations": dict(annotations)},
            "status": {"capacity": numbers, "allocatable": numbers, "conditions": [ready]},
        }
        self.api.create(body)
        self.write_account(name, "dra-bridge", NAMESPACE)

    def write_account(self, node: str, account: str, namespace: str) -> Path:
        """Lay out the files of a ServiceAccount as a pod on a node has them; return the directory."""
        directory = self.accounts / account / node
        directory.mkdir(parents=True)
        token = self.service_account_token(account, namespace, ("Node", node), seconds=7200)
        (directory / "token").write_text(token)
        (directory / "namespace").write_text(namespace)
        (directory / "ca.crt").symlink_to(self.directory / "pki" / "ca.crt")
        return directory

    def series(self, *names: str) -> dict[str, list[tuple[dict[str, str], float]]]:
        """Return series of the API server's metrics by name, each as labels and value."""
        code, text = self.api.raw("GET", "/metrics")
        assert code == 200, code
        found: dict[str, list[tuple[dict[str, str], float]]] = {name: [] for name in names}
        for line in text.decode().splitlines():
            match = _SERIES.match(line)
            if match and match[1] in found:
                found[match[1]].append((dict(_LABEL.findall(match[2] or "")), float(match[3])))
        return found

    def flows(self) -> Flows:
        """Return how many requests API priority and fairness has dispatched, rejected and queued so far."""
        dispatched, rejected, refused, waited = (
            "apiserver_flowcontrol_dispatched_requests_total",
            "apiserver_flowcontrol_rejected_requests_total",
            "apiserver_request_total",
            "apiserver_flowcontrol_request_wait_duration_seconds_bucket",
        )
        series = self.series(dispatched, rejected, refused, waited)

        def by_schema(name: str, sign: Mapping[str, int] | None = None) -> Counter[str]:
            each: Counter[str] = Counter()
            for labels, value in series[name]:
                each[labels.get("flow_schema", "")] += int(value) * (sign or {}).get(labels.get("le", ""), not sign)
            return each

        too_many = sum(value for labels, value in series[refused] if labels.get("code") == "429")
        return Flows(by_schema(dispatched), by_schema(rejected), by_schema(waited, {"+Inf": 1, "0": -1}), int(too_many))

    def usage(self) -> Usage:
        """Return the resources used by the API server."""
        return Usage.of(self.components["kube-apiserver"].pid)


class Flows(NamedTuple):
    """Requests by flow schema. waited: requests that waited in a queue. too_many: answers 429 of all users."""

    dispatched: Counter[str]
    rejected: Counter[str]
    waited: Counter[str]
    too_many: int


@contextmanager
def control_plane() -> Iterator[ControlPlane]:
    """Run a control plane while the context is open."""
    with ControlPlane() as plane:
        yield plane


def names_of(count: int, first: int = 0) -> list[str]:
    """Return this number of node names."""
    return [f"n{number:04}" for number in range(first, first + count)]
