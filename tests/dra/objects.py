"""Kubernetes objects that tests of agents need, and drivers whose sockets cannot be made."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

from dra_bridge.driver import Registrar

__all__ = ["allocated_claim", "claim_body", "device_class", "node_body", "unserved"]


def device_class(driver: str) -> dict[str, Any]:
    """Return a DeviceClass for all devices of a driver; the class has the driver's name."""
    spec = {"selectors": [{"cel": {"expression": f'device.driver == "{driver}"'}}]}
    return {"apiVersion": "resource.k8s.io/v1", "kind": "DeviceClass", "metadata": {"name": driver}, "spec": spec}


def node_body(
    name: str, *, labels: Mapping[str, str] | None = None, annotations: Mapping[str, str] | None = None, **status: Any
) -> dict[str, Any]:
    """Return a Node. status: its fields."""
    given = {"labels": labels, "annotations": annotations}
    metadata = {"name": name} | {field: dict(value) for field, value in given.items() if value is not None}
    return {"apiVersion": "v1", "kind": "Node", "metadata": metadata, "status": status}


def claim_body(name: str, driver: str, **exactly: Any) -> dict[str, Any]:
    """Return a claim for a device of a driver's class. exactly: further fields of its request."""
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {"devices": {"requests": [{"name": "r", "exactly": {"deviceClassName": driver, **exactly}}]}},
    }


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
