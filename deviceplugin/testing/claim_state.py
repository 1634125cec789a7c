"""Reads and writes the kubelet's claim state file, byte for byte as the kubelet does.

`dra_manager_state` in the kubelet's root directory names the claims that the kubelet counts as prepared, or is about to
prepare. For each claim, the file has the pods that use the claim, and the devices in the drivers' responses. Source of
the facts: kubelet 1.36.3, pkg/kubelet/cm/dra/state (checkpoint.go, checkpointer.go, state.go) and claiminfo.go, and a
Go program that wrote the samples in the tests.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deviceplugin.kubelet.claim_state import FILE_NAME
from deviceplugin.testing.checkpoint import CorruptCheckpointError, go_json, replace_file

__all__ = ["FILE_NAME", "AnsweredDevice", "DevicesOfClaim", "from_json", "read_or_create", "to_json", "write"]


@dataclass(frozen=True, slots=True)
class AnsweredDevice:
    """A device in a driver's response to NodePrepareResources. share: the share ID, or None."""

    requests: tuple[str, ...]
    pool: str
    device: str
    cdi_ids: tuple[str, ...]
    share: str | None


@dataclass(slots=True)
class DevicesOfClaim:
    """The kubelet's record of a claim (ClaimInfo).

    prepared: whether the present run of the kubelet prepared the claim; not in the file.
    """

    namespace: str
    name: str
    uid: str
    drivers: dict[str, list[AnsweredDevice]]
    pods: set[str] = field(default_factory=set)
    prepared: bool = False


def to_json(claims: Iterable[DevicesOfClaim] | None) -> bytes:
    """Return the file's content. claims: None stands for Go's nil, which the kubelet writes at its first start."""
    listed = None if claims is None else [_claim(claim) for claim in claims]
    data = go_json(
        {"kind": "DRACheckpoint", "apiVersion": "checkpoint.dra.kubelet.k8s.io/v1", "ClaimInfoStateList": listed}
    )
    return go_json({"Data": data, "Checksum": zlib.crc32(data.encode())}).encode()


def from_json(blob: bytes | str) -> list[DevicesOfClaim]:
    """Parse the content of a claim state file.

    Raises:
        CorruptCheckpointError: the checksum does not match.
        ValueError: the content is no claim state.
    """
    try:
        document = json.loads(blob)
        data, expected = document["Data"], document["Checksum"]
        if zlib.crc32(data.encode()) != expected:
            raise CorruptCheckpointError(f"the checksum of the claim state is not {expected}")
        return [_read(entry) for entry in json.loads(data)["ClaimInfoStateList"] or ()]
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not a claim state: {error!r}") from error


def read_or_create(root: Path) -> list[DevicesOfClaim]:
    """Read the claim state file in a kubelet's root directory; create it if it is missing (checkpointer.GetOrCreate).

    Raises:
        CorruptCheckpointError, ValueError: the file is damaged; a kubelet does not start then.
    """
    try:
        return from_json((root / FILE_NAME).read_bytes())
    except FileNotFoundError:
        replace_file(root / FILE_NAME, to_json(None))
        return []


def write(root: Path, claims: Iterable[DevicesOfClaim]) -> None:
    """Replace the claim state file of a kubelet atomically (claimInfoCache.syncToCheckpoint)."""
    replace_file(root / FILE_NAME, to_json(claims))


def _claim(claim: DevicesOfClaim) -> dict[str, Any]:
    return {
        "ClaimUID": claim.uid,
        "ClaimName": claim.name,
        "Namespace": claim.namespace,
        "PodUIDs": {uid: {} for uid in sorted(claim.pods)},
        "DriverState": {
            driver: {"Devices": [_device(device) for device in devices] or None}
            for driver, devices in sorted(claim.drivers.items())
        },
    }


def _device(device: AnsweredDevice) -> dict[str, Any]:
    return {
        "PoolName": device.pool,
        "DeviceName": device.device,
        "ShareID": device.share,
        "RequestNames": list(device.requests) or None,
        "CDIDeviceIDs": list(device.cdi_ids) or None,
    }


def _read(entry: dict[str, Any]) -> DevicesOfClaim:
    drivers = {
        driver: [
            AnsweredDevice(
                tuple(device["RequestNames"] or ()),
                device["PoolName"],
                device["DeviceName"],
                tuple(device["CDIDeviceIDs"] or ()),
                device["ShareID"],
            )
            for device in state["Devices"] or ()
        ]
        for driver, state in (entry["DriverState"] or {}).items()
    }
    return DevicesOfClaim(
        entry["Namespace"], entry["ClaimName"], entry["ClaimUID"], drivers, set(entry["PodUIDs"] or ())
    )
