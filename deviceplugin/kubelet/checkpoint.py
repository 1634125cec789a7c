"""The device manager's checkpoint: which container of which pod has which device ids.

The kubelet writes it on Allocate and on each ListAndWatch update, and when an endpoint is removed (kubelet
1.36, devicemanager/manager.go: allocateContainerResources, genericDeviceUpdateCallback, markResourceUnhealthy).
It names ended pods until the first write after `UpdateAllocatedDevices`, which PodResources `List` calls and which
does nothing before all of the kubelet's pod sources are ready.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from deviceplugin import looked_at
from deviceplugin.files import FileIdentity, file_identity

FILE_NAME: Final = "kubelet_internal_checkpoint"


class CheckpointError(Exception):
    """Raised when the checkpoint is missing, unreadable or not a checkpoint; nothing is known then."""


class Allocation(NamedTuple):
    """One device id that one container has. device_id: the kubelet's id, a replica's included."""

    pod_uid: str
    container: str
    resource: str
    device_id: str


@dataclass(frozen=True, slots=True)
class CheckpointVersion:
    """One version of the file. registered: healthy ids by resource. responses: the answers to Allocate, in base64."""

    allocations: frozenset[Allocation]
    registered: Mapping[str, frozenset[str]]
    file: FileIdentity | None = None
    responses: Mapping[Allocation, str] = field(default_factory=dict)


def parse(text: bytes, file: FileIdentity | None = None) -> CheckpointVersion:
    """Read `{"Data": {"PodDeviceEntries": [...], "RegisteredDevices": {...}}, "Checksum": n}`.

    The kubelet replaces the file by renaming, so it is whole. The checksum is a hash of Go values, which only the
    kubelet can compute. Raises CheckpointError: it is not such a file.
    """
    try:
        data = msgspec.json.decode(text)["Data"]
        responses: dict[Allocation, str] = {}
        registered: dict[str, frozenset[str]] = {}
        for entry in data["PodDeviceEntries"] or ():
            holder = str(entry["PodUID"]), str(entry["ContainerName"]), str(entry["ResourceName"])
            response = str(entry.get("AllocResp") or "")
            for ids in (entry["DeviceIDs"] or {}).values():  # by NUMA node
                for name in ids or ():
                    responses[Allocation(*holder, str(name))] = response
        for resource, ids in (data["RegisteredDevices"] or {}).items():
            registered[str(resource)] = frozenset(map(str, ids or ()))
    except (msgspec.DecodeError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"not a device manager checkpoint: {type(error).__name__}: {error}") from error
    return CheckpointVersion(frozenset(responses), registered, file, responses)


def identity(directory: Path) -> FileIdentity | None:
    """Return which version of the checkpoint is in the device plugin directory; None if none can be seen."""
    return file_identity(f"{directory}/{FILE_NAME}")  # each Allocate asks: a Path takes longer to make than to look at


def read(directory: Path) -> CheckpointVersion:
    """Read the checkpoint in the device plugin directory. Raises CheckpointError."""
    path = directory / FILE_NAME
    looked_at.at(path)
    try:
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            return parse(file.read(), FileIdentity.of(status))
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error
