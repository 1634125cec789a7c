"""A real Prometheus with the example's rules and scrape configuration, for tests on the real node.

Debian's Prometheus is built without service discovery for Kubernetes. So the targets are in a file, with the labels
that the discovery of pods would add. The example's relabelling uses these labels.
"""

from __future__ import annotations

import json
import re
import subprocess
import threading
import urllib.parse
import urllib.request
from collections.abc import Iterable, Mapping
from datetime import datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self

import yaml

from tests.cluster import isolate
from tests.cluster.node import Cluster
from tests.metrics.test_monitoring import EXAMPLES

AGENT = "127.0.0.1:9410"
KUBE_STATE = "127.0.0.1:8081"
SHORTER = {
    r"for: \d+[mh]": "for: 1s",
    r"> 900": "> 3",
    r"15m\b": "15s",
    r"\[(5m|10m|1h|12h)\]": "[20s]",
    r"3 \* 86400": "900",
    r"\[2m\]": "[5s]",
}
"""Replacements of the rules' times by shorter times for tests."""
Series = dict[frozenset[tuple[str, str]], float]


class Prometheus:
    """A Prometheus that scrapes agents, and a `KubeState` if it runs, every second."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        text = (EXAMPLES / "alerts.yaml").read_text()
        for pattern, shorter in SHORTER.items():
            text = re.sub(pattern, shorter, text)
        (self.directory / "alerts.yaml").write_text(text)
        (job,) = yaml.safe_load((EXAMPLES / "prometheus.yaml").read_text())["scrape_configs"]
        del job["scrape_interval"], job["kubernetes_sd_configs"]
        job["file_sd_configs"] = [{"files": ["targets.json"]}]
        config = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": ["alerts.yaml"],
            "scrape_configs": [
                job,
                {"job_name": "kube-state-metrics", "static_configs": [{"targets": [KUBE_STATE]}]},
            ],
        }
        (self.directory / "prometheus.yaml").write_text(yaml.safe_dump(config))
        self.discover((AGENT, isolate.NODE_NAME))
        with (self.directory / "log").open("wb") as log:
            self.process = subprocess.Popen(
                [
                    "prometheus",
                    "--config.file=prometheus.yaml",
                    "--storage.tsdb.path=data",
                    "--web.listen-address=127.0.0.1:9090",
                ],
                cwd=self.directory,
                stdout=log,
                stderr=log,
            )
        return self

    def __exit__(self, *_: object) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def discover(self, *agents: tuple[str, str]) -> None:
        """Set the scraped agents, each by its address and its node's name."""
        found = [
            {
                "targets": [address],
                "labels": {
                    "__meta_kubernetes_pod_label_app_kubernetes_io_name": "dra-bridge",
                    "__meta_kubernetes_pod_container_port_name": "metrics",
                    "__meta_kubernetes_pod_node_name": node,
                },
            }
            for address, node in agents
        ]
        new = self.directory / "targets.new"
        new.write_text(json.dumps(found))
        new.rename(self.directory / "targets.json")

    def get(self, path: str, **query: str) -> Any:
        url = f"http://127.0.0.1:9090/api/v1/{path}?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(url, timeout=10) as answer:
            body = json.load(answer)
        assert body["status"] == "success", body
        return body["data"]

    def query(self, text: str) -> Series:
        """Return the values of an instant query by the series' labels, without the labels that the scrape adds."""
        data = self.get("query", query=text)
        assert data["resultType"] == "vector", data
        drop = ("__name__", "job", "instance", "node")
        return {
            frozenset((name, value) for name, value in one["metric"].items() if name not in drop): float(
                one["value"][1]
            )
            for one in data["result"]
        }

    def value(self, text: str) -> float | None:
        """Return the only value of an instant query; None without a series."""
        found = list(self.query(text).values())
        assert len(found) <= 1, found
        return found[0] if found else None

    def holders(self) -> set[tuple[str, ...]]:
        """Return (resource, device, side, pod, container) of all holders; side: device plugin or DRA."""
        return {
            tuple(dict(labels)[name] for name in ("resource", "device", "side", "pod", "container"))
            for labels, value in self.query("deviceplugin_allocation_info").items()
            if value == 1
        }

    def alerts(self) -> list[dict[str, str]]:
        """Return the labels of the firing alerts."""
        return [one["labels"] for one in self.get("alerts")["alerts"] if one["state"] == "firing"]

    def firing(self) -> set[tuple[str, str]]:
        """Return the firing alerts' names, each with the alert's device or resource."""
        return {(labels["alertname"], labels.get("device") or labels.get("resource") or "") for labels in self.alerts()}

    def told(self, alert: str, label: str) -> set[str]:
        """Return the values that a label has in the firing alerts of a name; an empty set if no such alert fires."""
        return {labels[label] for labels in self.alerts() if labels["alertname"] == alert}

    def evaluated(self) -> datetime:
        """Return the time of the rules' last evaluation."""
        (group,) = self.get("rules")["groups"]
        return datetime.fromisoformat(re.sub(r"(\.\d{6})\d*", r"\1", group["lastEvaluation"]))


class KubeState:
    """Simulates kube-state-metrics 2, which is not built here, for the series of pods and nodes that the rules use.

    Each scrape reads the objects of the API server. `kube_node_info` has only the labels that are always present.
    """

    def __init__(self, cluster: Cluster) -> None:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = "".join(f"{line}\n" for line in kube_state(cluster)).encode()
                self.send_response(200)
                self.send_header("Content-Type", "text/plain; version=0.0.4")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        address, _, port = KUBE_STATE.rpartition(":")
        self._server = ThreadingHTTPServer((address, int(port)), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def kube_state(cluster: Cluster) -> Iterable[str]:
    """Yield the lines of a scrape, as kube-state-metrics prints them (internal/store, pod.go and node.go)."""
    yield "# HELP kube_pod_created [STABLE] Unix creation timestamp"
    yield "# TYPE kube_pod_created gauge"
    for pod in cluster.api.list("Pod"):
        metadata = pod["metadata"]
        created = datetime.fromisoformat(metadata["creationTimestamp"]).timestamp()
        labels = {"namespace": metadata["namespace"], "pod": metadata["name"], "uid": metadata["uid"]}
        yield _sample("kube_pod_created", labels, created)
    yield "# HELP kube_node_info [STABLE] Information about a cluster node."
    yield "# TYPE kube_node_info gauge"
    for node in cluster.api.list("Node"):
        info = node["status"]["nodeInfo"]
        labels = {
            "node": node["metadata"]["name"],
            "kernel_version": info["kernelVersion"],
            "os_image": info["osImage"],
            "container_runtime_version": info["containerRuntimeVersion"],
            "kubelet_version": info["kubeletVersion"],
        }
        yield _sample("kube_node_info", labels, 1)


def _sample(name: str, labels: Mapping[str, str], value: float) -> str:
    return f"{name}{{{','.join(f'{key}={json.dumps(text)}' for key, text in labels.items())}}} {value:.0f}"
