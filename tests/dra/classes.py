"""DeviceClasses as users of the drivers in these tests have them."""

from __future__ import annotations

from typing import Any

__all__ = ["device_class"]


def device_class(driver: str) -> dict[str, Any]:
    """Return a class of all devices of a driver, called like it; `dra_bridge.testing.serving` has a resource's."""
    spec = {"selectors": [{"cel": {"expression": f'device.driver == "{driver}"'}}]}
    return {"apiVersion": "resource.k8s.io/v1", "kind": "DeviceClass", "metadata": {"name": driver}, "spec": spec}
