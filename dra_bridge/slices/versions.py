"""ResourceSlices in the versions of resource.k8s.io; within this package they are as v1 has them."""

from __future__ import annotations

from dra_bridge.kube import Object

__all__ = ["in_version", "neutral"]


def in_version(body: Object, version: str) -> Object:
    """Return a slice of resource.k8s.io/v1 in another version: v1beta2 is the same, v1beta1 wraps each device."""
    group = f"resource.k8s.io/{version}"
    if version == "v1beta1" and "devices" in body["spec"]:
        devices = [
            {"name": device["name"], "basic": {key: value for key, value in device.items() if key != "name"}}
            for device in body["spec"]["devices"]
        ]
        body = {**body, "spec": {**body["spec"], "devices": devices}}
    return {**body, "apiVersion": group, "kind": "ResourceSlice"}


def neutral(body: Object) -> Object:
    """Return a slice of any version as resource.k8s.io/v1 has it."""
    spec = body.get("spec") or {}
    devices = spec.get("devices") or []
    if any("basic" in device for device in devices):
        flat = [{"name": device["name"], **(device.get("basic") or {})} for device in devices]
        body = {**body, "spec": {**spec, "devices": flat}}
    return body
