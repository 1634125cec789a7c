"""Runs Kueue in a test's cluster. Kueue is not built here; PEER_PROGRAMS has to name a directory with the program.

The directory contains the program `kueue` (sigs.k8s.io/kueue/cmd/kueue, 0.19.2), and `kueue-components`, a copy of the
directory `config/components` of the same module, with its CustomResourceDefinitions and webhooks.
"""

from __future__ import annotations

import os
import shutil
import urllib.error
import urllib.request
from base64 import b64encode
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import yaml

from tests.cluster import build
from tests.cluster.api import Object, Objects
from tests.cluster.node import Cluster, Component

VERSION = "v1beta2"
HEALTH, WEBHOOKS = 18081, 19443
"""The ports of Kueue's health checks and of its webhooks."""
SHADOWED = 'mount --bind "$0" /etc && exec "$@"'
"""A shell script that mounts another directory over /etc. Kueue reads nothing in /etc except its certificate."""
OWN = ("-kueue-x-k8s-io-", "-batch-v1-job")
"""Parts of the paths of webhooks that are installed. Other webhooks are for kinds that this cluster lacks."""


def missing() -> str:
    """Return why Kueue cannot run; "" if it can."""
    named = os.environ.get(build.PEER_PROGRAMS)
    if not named:
        return f"{build.PEER_PROGRAMS} names no directory with kueue and kueue-components"
    wanted = (Path(named) / "kueue", Path(named) / "kueue-components" / "crd" / "bases")
    return ", ".join(f"{path} is missing" for path in wanted if not path.exists())


class Kueue:
    """Kueue's controllers as a process, with one queue, `team`, which accepts jobs of all namespaces."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        named = Path(os.environ[build.PEER_PROGRAMS])
        self._program, self._components = named / "kueue", named / "kueue-components"

    @classmethod
    @contextmanager
    def running(cls, cluster: Cluster, configuration: Mapping[str, Any], quotas: Mapping[str, int]) -> Iterator[Self]:
        """Run Kueue with this configuration. quotas: the number of devices of each resource in the queue."""
        kueue = cls(cluster)
        process = kueue._start(configuration)
        try:
            cluster.wait_for(lambda: not process.running or kueue._ready(), 120, "Kueue is ready")
            assert process.running, process.tail()
            kueue._hook()
            flavor = {"name": "any", "resources": [{"name": key, "nominalQuota": n} for key, n in quotas.items()]}
            groups = [{"coveredResources": list(quotas), "flavors": [flavor]}]
            cluster.api.apply(
                [
                    _object("ResourceFlavor", "any"),
                    _object("ClusterQueue", "all", {"namespaceSelector": {}, "resourceGroups": groups}),
                    _object("LocalQueue", "team", {"clusterQueue": "all"}),
                ]
            )
            yield kueue
        finally:
            process.stop()
            print(process.tail(60))

    def _start(self, configuration: Mapping[str, Any]) -> Component:
        api, directory = self.cluster.api, self.cluster.directory
        api.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "kueue-system"}})
        definitions = [
            one
            for path in sorted((self._components / "crd" / "bases").glob("*.yaml"))
            for one in yaml.load_all(path.read_bytes(), yaml.CSafeLoader)
            if one
        ]
        for one in definitions:
            api.create(one)
        names = [one["spec"]["names"]["plural"] for one in definitions]
        self.cluster.wait_for(
            lambda: {"workloads", *names} <= {r.plural for r in api.resources()}, 60, "CRDs are served"
        )
        etc = directory / "kueue-etc"
        certificates = etc / "kueue" / "metrics" / "certs"
        certificates.mkdir(parents=True)
        for end in ("crt", "key"):  # the webhooks have the API server's address, so its certificate is valid for them
            shutil.copy(directory / "pki" / f"apiserver.{end}", certificates / f"tls.{end}")
        file = directory / "kueue.yaml"
        own = {
            "namespace": "kueue-system",
            "internalCertManagement": {"enable": False},
            "health": {"healthProbeBindAddress": f"127.0.0.1:{HEALTH}"},
            "metrics": {"bindAddress": "0"},
            "webhook": {"port": WEBHOOKS, "certDir": "/etc/kueue/metrics/certs"},
            "leaderElection": {"leaderElect": False},
            "integrations": {"frameworks": ["batch/job"]},
            "featureGates": {"VisibilityOnDemand": False},  # this aggregated API needs another certificate
        }
        file.write_text(yaml.safe_dump({**configuration, **own}))
        run = [str(self._program), f"--config={file}", f"--kubeconfig={self.cluster.kubeconfig}"]
        command = ["unshare", "--mount", "sh", "-c", SHADOWED, str(etc), *run]
        process = Component("kueue", command, self.cluster.logs / "kueue.log", directory)
        process.start()
        return process

    def _ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{HEALTH}/readyz", timeout=5) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def _hook(self) -> None:
        """Install Kueue's webhooks, with the process's address instead of a Service, which this cluster lacks."""
        bundle = b64encode((self.cluster.directory / "pki" / "ca.crt").read_bytes()).decode()
        text = (self._components / "webhook" / "manifests.yaml").read_bytes()
        for one in yaml.load_all(text, yaml.CSafeLoader):
            hooks = []
            for hook in one["webhooks"]:
                path = hook["clientConfig"]["service"]["path"]
                if any(word in path for word in OWN):
                    client = {"url": f"https://127.0.0.1:{WEBHOOKS}{path}", "caBundle": bundle}
                    hooks.append({**hook, "clientConfig": client})
            assert hooks
            self.cluster.api.create({**one, "webhooks": hooks})

    def job(self, name: str, pod: Mapping[str, Any]) -> None:
        """Create a Job of one pod in the queue, as a user does, without `suspend`."""
        template = {"spec": {"restartPolicy": "Never", **pod}}
        spec = {"template": template, "backoffLimit": 0}
        metadata = {"name": name, "namespace": "default", "labels": {"kueue.x-k8s.io/queue-name": "team"}}
        self.cluster.api.create({"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": spec})

    def workload(self, job: str) -> Object:
        """Return the Workload of a Job; an empty object before there is a Workload."""
        found: Objects = self.cluster.api.list("Workload", "default", f"kueue.x-k8s.io/{VERSION}")
        owned = [one for one in found if any(by["name"] == job for by in one["metadata"].get("ownerReferences", ()))]
        return owned[0] if owned else {}

    def condition(self, job: str, kind: str) -> tuple[str, str]:
        """Return status and message of a condition of a Job's Workload; two empty strings without the condition."""
        conditions = self.workload(job).get("status", {}).get("conditions", [])
        return next(((one["status"], one["message"]) for one in conditions if one["type"] == kind), ("", ""))

    def admitted(self, job: str) -> bool:
        """Return whether a Job is admitted and not suspended."""
        suspended = self.cluster.api.get("Job", job)["spec"].get("suspend")
        return self.condition(job, "Admitted")[0] == "True" and not suspended


def _object(kind: str, name: str, spec: Mapping[str, Any] | None = None) -> Object:
    metadata = {"name": name, **({"namespace": "default"} if kind == "LocalQueue" else {})}
    body = {"apiVersion": f"kueue.x-k8s.io/{VERSION}", "kind": kind, "metadata": metadata}
    return body if spec is None else {**body, "spec": dict(spec)}
