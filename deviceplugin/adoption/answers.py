"""Converts a vendor plugin's AllocateResponse to edits of a claim's containers. Pure functions.

If several items of a response have the same container path, environment variable or CDI name, the kubelet uses only the
first (kubelet 1.36.3, devicemanager/pod_devices.go: deviceRunContainerOptions). The container runtime reads annotations
whose keys begin with `cdi.k8s.io/` as lists of CDI devices. CDI edits cannot set annotations, so an annotation with any
other key cannot be converted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Final, TypeVar

from google.protobuf.message import DecodeError

from deviceplugin.device import ContainerEdits, DeviceNode, Mount, printable
from deviceplugin.kubelet.given_devices import CDI, GivenDevices, cdi_names
from deviceplugin.wire import deviceplugin_pb2 as pb

_T = TypeVar("_T")

_ALL: Final = "rwm"
"""The permissions of a device node (read, write, mknod) if the response states none. CDI and container runtimes have
the same default."""


class AnswerError(Exception):
    """Raised when a plugin does not respond, or its response has fields that a claim's containers cannot get."""


def edits_of(answer: bytes, dropped: Sequence[str] = ()) -> ContainerEdits:
    """Return the edits in the AllocateResponse for one container.

    dropped: patterns (fnmatch) of the keys of annotations to leave out.

    Raises AnswerError if the bytes are no AllocateResponse for one container, or have fields without equivalent in CDI.
    """
    try:
        (response,) = pb.AllocateResponse.FromString(answer).container_responses
    except (DecodeError, ValueError):
        raise AnswerError("the vendor's plugin's answer to Allocate is not for one container") from None
    for key in sorted(response.annotations):
        if not key.startswith(CDI) and not any(fnmatchcase(key, pattern) for pattern in dropped):
            raise AnswerError(
                f"the vendor's plugin answers with the annotation {printable(key)}, which containers with claims "
                "cannot get; `drop_annotations` under `plugin` leaves it out"
            )
    try:
        nodes = [
            DeviceNode(node.host_path, node.container_path, node.permissions or _ALL)
            for node in _first(response.devices, [node.container_path for node in response.devices])
        ]
        mounts = [
            Mount(mount.host_path, mount.container_path, mount.read_only)
            for mount in _first(response.mounts, [mount.container_path for mount in response.mounts])
        ]
        return ContainerEdits(dict(response.envs), nodes, mounts, cdi=cdi_names(response))
    except (TypeError, ValueError) as error:
        raise AnswerError(f"the vendor's plugin's answer is invalid: {error}") from error


def devices_of(answer: bytes) -> GivenDevices:
    """Return the devices in an AllocateResponse; none if the bytes are no AllocateResponse."""
    try:
        return GivenDevices.of(pb.AllocateResponse.FromString(answer).container_responses)
    except DecodeError:
        return GivenDevices()  # The kubelet cannot decode the response either, so no container gets a device.


def _first(items: Iterable[_T], keys: Iterable[str]) -> Iterator[_T]:
    """Yield the items, but only the first of several items with equal keys. keys: the key of each item."""
    seen = set()
    for key, item in zip(keys, items, strict=True):
        if key not in seen:
            seen.add(key)
            yield item
