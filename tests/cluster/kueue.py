"""Kueue beside a cluster's own programs. It is not built here: it is found in the directory that PEER_PROGRAMS names.

That directory has the program `kueue` (sigs.k8s.io/kueue/cmd/kueue, 0.19.2), and `kueue-components`, which is the
directory `config/components` of the same module: its CustomResourceDefinitions and webhooks.
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
"""Ports."""
SHADOWED = 'mount --bind "$0" /etc && exec "$@"'
"""Kueue has a directory for a certificate in /etc, and reads nothing else there."""
OWN = ("-kueue-x-k8s-io-", "-batch-v1-job")
"""In the paths of the webhooks that matter here: those of other projects' jobs have no kind in this cluster."""


def missing() -> str:
    """Return what Kueue lacks to run, "" if it can."""
    named = os.environ.get(build.PEER_PROGRAMS)
    if not named:
        return f"{build.PEER_PROGRAMS} names no directory with kueue and kueue-components"
    wanted = (Path(named) / "kueue", Path(named) / "kueue-components" / "crd" / "bases")
    return ", ".join(f"{path} is missing" for path in wanted if not path.exists())


class Kueue:
    """Kueue's controllers as a process, and one queue, `team`, that has all namespaces."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        named = Path(os.environ[build.PEER_PROGRAMS])
        self._program, self._components = named / "kueue", named / "kueue-components"

    @classmethod
    @contextmanager
    def running(cls, cluster: Cluster, configuration: Mapping[str, Any], quotas: Mapping[str, int]) -> Iterator[Self]:
        """Run Kueue with a configuration, and with so many devices of each resource in its queue."""
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
        for end in ("crt", "key"):  # its webhooks are called by the API server's own address
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
            "featureGates": {"VisibilityOnDemand": False},  # it is an aggregated API, with a certificate of its own
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
        """Have the API server call Kueue's webhooks, by its address: there are no Services here."""
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
        """Make a Job of one pod in the queue, as a user does: nothing of it is suspended by hand."""
        template = {"spec": {"restartPolicy": "Never", **pod}}
        spec = {"template": template, "backoffLimit": 0}
        metadata = {"name": name, "namespace": "default", "labels": {"kueue.x-k8s.io/queue-name": "team"}}
        self.cluster.api.create({"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": spec})

    def workload(self, job: str) -> Object:
        """Return the Workload of a Job; an object without a status before there is one."""
        found: Objects = self.cluster.api.list("Workload", "default", f"kueue.x-k8s.io/{VERSION}")
        owned = [one for one in found if any(by["name"] == job for by in one["metadata"].get("ownerReferences", ()))]
        return owned[0] if owned else {}

    def condition(self, job: str, kind: str) -> tuple[str, str]:
        """Return status and message of a condition of a Job's Workload; empty before it has it."""
        conditions = self.workload(job).get("status", {}).get("conditions", [])
        return next(((one["status"], one["message"]) for one in conditions if one["type"] == kind), ("", ""))

    def admitted(self, job: str) -> bool:
        """Return whether a Job is admitted, and its pods may be made."""
        suspended = self.cluster.api.get("Job", job)["spec"].get("suspend")
        return self.condition(job, "Admitted")[0] == "True" and not suspended


def _object(kind: str, name: str, spec: Mapping[str, Any] | None = None) -> Object:
    metadata = {"name": name, **({"namespace": "default"} if kind == "LocalQueue" else {})}
    body = {"apiVersion": f"kueue.x-k8s.io/{VERSION}", "kind": kind, "metadata": metadata}
    return body if spec is None else {**body, "spec": dict(spec)}
