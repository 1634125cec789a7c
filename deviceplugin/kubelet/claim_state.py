"""Reads the kubelet's own record of prepared claims: `<kubelet root>/dra_manager_state`.

The file contains each claim from the kubelet's first NodePrepareResources call until the claim is unprepared. The
kubelet writes the file before and after NodePrepareResources and after NodeUnprepareResources (kubelet 1.36,
cm/dra/manager.go). The file exists from the kubelet's first start on. Until the response to NodePrepareResources, the
file names the claim without devices.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec

from deviceplugin import looked_at

FILE_NAME: Final = "dra_manager_state"


class ClaimStateError(Exception):
    """Raised when the kubelet's claim state is unreadable or damaged, so that the prepared claims are unknown."""


class ClaimStateMissingError(ClaimStateError):
    """Raised when the claim state is missing: the kubelet has no Dynamic Resource Allocation, or the file was lost."""


@dataclass(frozen=True, slots=True)
class PreparedClaim:
    """A claim that the kubelet counts as prepared.

    The fields `devices`, `cdi_ids` and `requests` come from the drivers' responses to NodePrepareResources. devices:
    for each driver, (pool, device name, share ID or "") of each device. cdi_ids: for each driver, the names of the CDI
    devices. requests: (driver, request name, device name) of each device; the request name is "" if the driver gave
    none.
    """

    uid: str
    namespace: str
    name: str
    pod_uids: frozenset[str]
    devices: Mapping[str, frozenset[tuple[str, str, str]]]
    cdi_ids: Mapping[str, frozenset[str]] = field(default_factory=dict)
    requests: frozenset[tuple[str, str, str]] = frozenset()

    @property
    def title(self) -> str:
        """The claim's namespace and name, for messages."""
        return f"{self.namespace}/{self.name}"


def parse(text: bytes) -> tuple[PreparedClaim, ...]:
    """Parse a claim state: `{"Data": JSON, "Checksum": crc32 of Data}`. Raises ClaimStateError.

    The format is that of kubelet 1.36, dra/state/checkpoint.go.
    """
    try:
        outer = msgspec.json.decode(text)
        data = outer["Data"]
        if zlib.crc32(data.encode()) != outer["Checksum"]:
            raise ClaimStateError("the claim state's checksum does not match the content")
        return tuple(map(_claim, msgspec.json.decode(data)["ClaimInfoStateList"] or ()))
    except (msgspec.DecodeError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ClaimStateError(f"the file is not the kubelet's claim state: {type(error).__name__}: {error}") from error


def _claim(entry: Mapping[str, Any]) -> PreparedClaim:
    devices: dict[str, frozenset[tuple[str, str, str]]] = {}
    cdi_ids: dict[str, frozenset[str]] = {}
    requests: set[tuple[str, str, str]] = set()
    for driver, state in (entry["DriverState"] or {}).items():
        own: set[tuple[str, str, str]] = set()
        named: set[str] = set()
        for device in state["Devices"] or ():
            name = str(device["DeviceName"])
            own.add((str(device["PoolName"]), name, str(device.get("ShareID") or "")))
            named.update(map(str, device.get("CDIDeviceIDs") or ()))
            for request in device.get("RequestNames") or ("",):
                requests.add((str(driver), str(request), name))
        devices[str(driver)], cdi_ids[str(driver)] = frozenset(own), frozenset(named)
    return PreparedClaim(
        str(entry["ClaimUID"]),
        str(entry["Namespace"]),
        str(entry["ClaimName"]),
        frozenset(map(str, entry["PodUIDs"] or ())),
        devices,
        cdi_ids,
        frozenset(requests),
    )


def read(kubelet_root: Path) -> tuple[PreparedClaim, ...]:
    """Read the kubelet's claim state. Raises ClaimStateMissingError or ClaimStateError."""
    path = kubelet_root / FILE_NAME
    looked_at.at(path)
    try:
        return parse(path.read_bytes())
    except FileNotFoundError as error:
        raise ClaimStateMissingError(f"{path}: {error.strerror}") from error
    except OSError as error:
        raise ClaimStateError(f"{path}: {error.strerror}") from error
    except ClaimStateError as error:
        raise ClaimStateError(f"{path}: {error}") from error
