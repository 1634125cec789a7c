"""Writes the files in which a container's programs read about the container's devices (device metadata, KEP-5304).

A file has one JSON object for each version of the format, the newest version first. The content of all objects is the
same. A reader uses the first object whose version it supports (dynamic-resource-allocation 0.37, api/metadata and
kubeletplugin/metadata.go).

For a claim, each request has a file that names the devices of the request. For pods with `limits`, each device has a
file of its own, which is written at the device's first Allocate. This file is kept until the node's next boot, because
the kubelet mounts it again whenever the container restarts.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec

from deviceplugin import cdi, files
from deviceplugin.device import AttributeValue, ContainerEdits, Device, Mount, Version
from deviceplugin.naming import EXTENDED_RESOURCE, NUMA_NODE, NamingError, canonical_resource, check_attribute

Described = dict[str, Any]
"""A JSON object in a metadata file."""

VERSIONS: Final = ("v1beta1", "v1alpha1")
"""Each metadata file is written in these versions of the format, the newest first. Kubernetes 1.36 supports only
v1alpha1."""
DIRECTORY: Final = "/var/run/kubernetes.io/dra-device-attributes"
"""The directory in containers that contains the device metadata files."""
BY_LIMITS: Final = "extendedresources"
"""The subdirectory of DIRECTORY for devices that containers get by `limits`, for which Kubernetes defines no files."""


def attribute(value: AttributeValue) -> Described:
    """Return an attribute's value as in ResourceSlices and metadata files, such as {"int": 1}."""
    if isinstance(value, bool):
        return {"bool": value}
    if isinstance(value, int):
        return {"int": value}
    return {"version": str(value)} if isinstance(value, Version) else {"string": value}


def numa_attribute(nodes: Sequence[int]) -> Described:
    """Return the value of the attribute `NUMA_NODE` of a device with these NUMA nodes."""
    return {"int": nodes[0]} if len(nodes) == 1 else {"ints": list(nodes)}


def described(resource: str, device: Device) -> Described:
    """Return a device's attributes for its metadata file, without attributes that the Kubernetes API would refuse."""
    attributes = {EXTENDED_RESOURCE: attribute(canonical_resource(resource))}
    for name, value in device.attributes.items():
        with contextlib.suppress(NamingError):  # The slices' publisher reports the invalid attribute.
            check_attribute(name, value)
            attributes[name] = attribute(value)
    if device.numa_nodes:
        attributes[NUMA_NODE] = numa_attribute(device.numa_nodes)
    return attributes


def stream(about: Mapping[str, Any], request: str, devices: Sequence[Described], pod_claim: str = "") -> bytes:
    """Return the content of a metadata file.

    about: the name, namespace and uid of the claim; empty if there is no claim. request: the request's name, with the
    subrequest. devices: for each device, its driver, pool, name and attributes. pod_claim: the claim's name in the pod,
    if the claim was made from a template.
    """
    body: Described = {"metadata": {**about, "generation": 1}}
    if pod_claim:
        body["podClaimName"] = pod_claim
    body["requests"] = [{"name": request, "devices": list(devices)}]
    versions = ({"kind": "DeviceMetadata", "apiVersion": f"metadata.resource.k8s.io/{one}"} for one in VERSIONS)
    return b"".join(msgspec.json.encode(kind | body) + b"\n" for kind in versions)


def claim_path(driver: str, claim: str, request: str, pod_claim: str = "") -> str:
    """Return the path in containers of a request's metadata file. request: the request's name, without subrequest."""
    kind, name = ("resourceclaimtemplates", pod_claim) if pod_claim else ("resourceclaims", claim)
    return f"{DIRECTORY}/{kind}/{name}/{request}/{driver}-metadata.json"


def by_limits(
    directory: str, resource: str, driver: str, pool: str, named: Iterable[tuple[str, Device]]
) -> ContainerEdits:
    """Write the metadata files of devices that a container gets by `limits`; return edits that mount the files. Blocks.

    Raises OSError. directory: the directory of CDI specs. driver: the DRA driver, or the domain of a resource without a
    driver. named: pairs of a published name and the device.
    """
    own, mounts = cdi.own_directory(directory), []
    for name, device in named:
        one = {"driver": driver, "pool": pool, "name": name, "attributes": described(resource, device)}
        host = f"{own}/{hashlib.sha256(f'{resource} {device.id}'.encode()).hexdigest()[:16]}.device-metadata"
        write(host, stream({}, resource, [one]))
        mounts.append(Mount(host, f"{DIRECTORY}/{BY_LIMITS}/{resource}/{name}/{driver}-metadata.json", readonly=True))
    return ContainerEdits(mounts=mounts)


def write(path: str, data: bytes) -> bool:
    """Write a file atomically, unless it already has these bytes; return whether it was written. Blocks.

    Raises OSError.
    """
    return files.put_changed(path, data, f"{path}.{os.urandom(8).hex()}", 0o644)
