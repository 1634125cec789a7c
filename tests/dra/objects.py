"""Kubernetes objects that tests of agents need, and drivers whose sockets cannot be made."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

from dra_bridge.driver import Registrar

__all__ = ["allocated_claim", "body", "claim_body", "device_class", "node_body", "unserved"]

VERSIONS = {
    **dict.fromkeys(("DaemonSet", "Deployment", "ReplicaSet", "StatefulSet"), "apps/v1"),
    **dict.fromkeys(("CronJob", "Job"), "batch/v1"),
    **dict.fromkeys(("DeviceClass", "ResourceClaim", "ResourceClaimTemplate", "ResourceSlice"), "resource.k8s.io/v1"),
    "ClusterRoleBinding": "rbac.authorization.k8s.io/v1",
    "Lease": "coordination.k8s.io/v1",
    "PriorityClass": "scheduling.k8s.io/v1",
}
"""The API version of each kind; that of the other kinds is v1."""


def body(
    kind: str, name: str, namespace: str = "", *, meta: Mapping[str, Any] | None = None, **fields: Any
) -> dict[str, Any]:
    """Return an object. meta: further fields of its metadata; fields: its other fields."""
    metadata = {"name": name} | ({"namespace": namespace} if namespace else {}) | dict(meta or {})
    return {"apiVersion": VERSIONS.get(kind, "v1"), "kind": kind, "metadata": metadata, **fields}


def device_class(driver: str) -> dict[str, Any]:
    """Return a DeviceClass for all devices of a driver; the class has the driver's name."""
    selector = {"cel": {"expression": f'device.driver == "{driver}"'}}
    return body("DeviceClass", driver, spec={"selectors": [selector]})


def node_body(
    name: str, *, labels: Mapping[str, str] | None = None, annotations: Mapping[str, str] | None = None, **status: Any
) -> dict[str, Any]:
    """Return a Node. status: its fields."""
    given = {"labels": labels, "annotations": annotations}
    meta = {field: dict(value) for field, value in given.items() if value is not None}
    return body("Node", name, meta=meta, status=status)


def claim_body(name: str, driver: str, **exactly: Any) -> dict[str, Any]:
    """Return a claim for a device of a driver's class. exactly: further fields of its request."""
    request = {"name": "r", "exactly": {"deviceClassName": driver, **exactly}}
    return body("ResourceClaim", name, "default", spec={"devices": {"requests": [request]}})


def allocated_claim(name: str, driver: str, pool: str, device: str, *pods: str, **result: Any) -> dict[str, Any]:
    """Return a claim that was allocated a device, for these pods. result: further fields of the allocation."""
    allocated = {"request": "r", "driver": driver, "pool": pool, "device": device, **result}
    status: dict[str, Any] = {"allocation": {"devices": {"results": [allocated]}}}
    if pods:
        status["reservedFor"] = [{"resource": "pods", "name": pod, "uid": pod} for pod in pods]
    return {**claim_body(name, driver), "status": status}


@contextlib.contextmanager
def unserved(driver: str) -> Iterator[None]:
    """Let each attempt to make a socket of this driver fail."""
    bind = Registrar.bind

    async def refuse(self: Registrar, server: Any, path: Path) -> None:
        if self.driver.name == driver:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        await bind(self, server, path)

    with patch.object(Registrar, "bind", refuse):
        yield
