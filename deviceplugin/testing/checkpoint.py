"""Reads and writes the device manager's checkpoint file, byte for byte as the kubelet does.

`device-plugins/kubelet_internal_checkpoint` states which container holds which devices, and which devices were healthy
at the last write. The checksum is FNV-1a (32 bits) over a dump of the Go values. So a real kubelet accepts a file from
this module, and this module accepts a real kubelet's file. Source of the facts: kubelet 1.36.3,
pkg/kubelet/cm/devicemanager/checkpoint, and a Go program that wrote the samples in the tests.
"""

from __future__ import annotations

import base64
import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from deviceplugin.files import put
from deviceplugin.kubelet.checkpoint import FILE_NAME

__all__ = ["FILE_NAME", "Checkpoint", "CorruptCheckpointError", "PodDevicesEntry"]

_ESCAPES: Final = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}


def go_json(document: Any) -> str:
    """Return a document as JSON, as Go's encoding/json writes it."""
    text = json.dumps(document, separators=(",", ":"), ensure_ascii=False)
    for char, escape in _ESCAPES.items():
        text = text.replace(char, escape)
    return text


def replace_file(path: Path, blob: bytes) -> None:
    """Replace a file atomically, by a rename of a hidden file beside it, as the kubelet does."""
    put(str(path), blob, str(path.with_name(f".{secrets.token_hex(8)}")), 0o600)


class CorruptCheckpointError(ValueError):
    """Raised when a checkpoint's checksum does not match its content."""


@dataclass(frozen=True, slots=True)
class PodDevicesEntry:
    """The devices of one resource that one container holds.

    device_ids: device ids by NUMA node; -1 stands for devices without a node. alloc_resp: the serialized
    ContainerAllocateResponse, which the kubelet uses again when the container restarts. None stands for Go's nil, which
    gives another checksum than an empty value.
    """

    pod_uid: str
    container: str
    resource: str
    device_ids: Mapping[int, Sequence[str] | None] | None
    alloc_resp: bytes | None


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The content of a checkpoint file. registered: the ids of healthy devices, by resource."""

    entries: Sequence[PodDevicesEntry] | None = None
    registered: Mapping[str, Sequence[str] | None] | None = field(default_factory=dict)

    @property
    def checksum(self) -> int:
        """The checksum of this content."""
        return _fnv1a(self._dump().encode())

    def to_json(self) -> bytes:
        """Return the content of the file as bytes."""
        entries = None
        if self.entries is not None:
            entries = [
                {
                    "PodUID": e.pod_uid,
                    "ContainerName": e.container,
                    "ResourceName": e.resource,
                    "DeviceIDs": None
                    if e.device_ids is None
                    else {key: e.device_ids[int(key)] for key in sorted(map(str, e.device_ids))},
                    "AllocResp": None if e.alloc_resp is None else base64.b64encode(e.alloc_resp).decode(),
                }
                for e in self.entries
            ]
        registered = None if self.registered is None else dict(sorted(self.registered.items()))
        document = {"Data": {"PodDeviceEntries": entries, "RegisteredDevices": registered}, "Checksum": self.checksum}
        return go_json(document).encode()

    @classmethod
    def from_json(cls, blob: bytes | str) -> Checkpoint:
        """Parse the content of a checkpoint file.

        Raises:
            CorruptCheckpointError: the checksum does not match.
            ValueError: the content is no checkpoint.
        """
        document = json.loads(blob)
        try:
            data = document["Data"]
            checkpoint = cls(_entries(data["PodDeviceEntries"]), data["RegisteredDevices"])
            expected = document["Checksum"]
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a device manager checkpoint: {error!r}") from error
        if checkpoint.checksum != expected:
            raise CorruptCheckpointError(f"the checksum is {expected}, the contents say {checkpoint.checksum}")
        return checkpoint

    def write(self, path: Path) -> None:
        """Replace the file atomically, by a rename of a hidden file beside it, as the kubelet does."""
        replace_file(path, self.to_json())

    def _dump(self) -> str:
        entries = "<nil>"
        if self.entries is not None:
            entries = "[" + " ".join(_dump_entry(e) for e in self.entries) + "]"
        registered = "<nil>"
        if self.registered is not None:
            registered = "map[" + " ".join(f"{k}:{_dump_list(v)}" for k, v in sorted(self.registered.items())) + "]"
        return (
            f"(checkpoint.checkpointData){{PodDeviceEntries:([]checkpoint.PodDevicesEntry){entries} "
            f"RegisteredDevices:(map[string][]string){registered}}}"
        )


def _entries(raw: Any) -> list[PodDevicesEntry] | None:
    if raw is None:
        return None
    return [
        PodDevicesEntry(
            e["PodUID"],
            e["ContainerName"],
            e["ResourceName"],
            None if e["DeviceIDs"] is None else {int(node): ids for node, ids in e["DeviceIDs"].items()},
            None if e["AllocResp"] is None else base64.b64decode(e["AllocResp"]),
        )
        for e in raw
    ]


def _dump_entry(entry: PodDevicesEntry) -> str:
    devices = "<nil>"
    if entry.device_ids is not None:
        devices = "map[" + " ".join(f"{k}:{_dump_list(v)}" for k, v in sorted(entry.device_ids.items())) + "]"
    response = None if entry.alloc_resp is None else [str(byte) for byte in entry.alloc_resp]
    return (
        f"{{PodUID:(string){entry.pod_uid} ContainerName:(string){entry.container} "
        f"ResourceName:(string){entry.resource} DeviceIDs:(checkpoint.DevicesPerNUMA){devices} "
        f"AllocResp:([]uint8){_dump_list(response)}}}"
    )


def _dump_list(values: Sequence[str] | None) -> str:
    return "<nil>" if values is None else "[" + " ".join(values) + "]"


def _fnv1a(data: bytes) -> int:
    value = 0x811C9DC5
    for byte in data:
        value = (value ^ byte) * 0x01000193 & 0xFFFFFFFF
    return value
