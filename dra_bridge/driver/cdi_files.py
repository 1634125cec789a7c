"""The files of prepared claims: CDI specs, which the container runtime reads, and the agent's own claim files.

The agent renames a complete file into place, but does not sync it to the disk. At each start, the agent writes all
files again from the ledger file, because a power failure may have emptied or removed files. On most nodes, /var/run is
in memory.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar, Final

import msgspec

from deviceplugin import files, looked_at
from deviceplugin.cdi import CLASS, DIRECTORY, UID, CdiError, checked_text, described, own_directory, vendor_of
from deviceplugin.device import ContainerEdits, DeviceNode
from deviceplugin.register import claim_files

_NAME: Final = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.:-]*[A-Za-z0-9])?")


def build(
    driver: str,
    devices: Mapping[str, ContainerEdits],
    nodes: Mapping[DeviceNode, Sequence[dict[str, Any]]] | None = None,
) -> dict[str, Any]:
    """Return a valid CDI spec with these devices, in the lowest CDI version that has all fields of the spec.

    devices: for each CDI device's name, its edits, which must not be empty; at least one device. Annotations in the
    edits are not written. nodes: the spec's entries for the edits' device nodes, as `described` returns them; None to
    read the nodes here, which blocks. Raises CdiError if a name, path or environment variable is not allowed, or a node
    is missing on the host.

    `described` resolves the host paths of device nodes, because runtimes refuse a symbolic link (containerd#12060). The
    container has the node at the requested path. A path of a directory stands for all device nodes in the directory. If
    an entry has device numbers, a runtime does not read the host path (container-device-interface 1.0,
    container-edits_unix.go: fillMissingInfo). So a restarted container gets the same device number, even if the path
    then leads to another device.
    """
    if not devices:
        raise CdiError("a CDI spec needs a device")
    listed = []
    for name, edits in devices.items():
        if not _NAME.fullmatch(name):
            raise CdiError(f"{name!r} cannot be the name of a CDI device")
        contents = _edits(edits, described(edits.device_nodes) if nodes is None else nodes)
        if not contents:
            raise CdiError(f"the CDI device {name} would be empty")
        listed.append({"name": name, "containerEdits": contents})
    return {"cdiVersion": version(listed), "kind": f"{vendor_of(driver)}/{CLASS}", "devices": listed}


def encode(spec: Mapping[str, Any]) -> bytes:
    """Return a CDI spec as JSON, the content of its file. Raises CdiError if a text is not Unicode."""
    try:
        return msgspec.json.encode(spec)
    except (UnicodeEncodeError, msgspec.MsgspecError) as error:
        raise CdiError(f"cannot be written as JSON: {error}") from error


def request_of(name: str) -> str:
    """Return the claim's request for which a CDI device is. name: the CDI device's name, see `ClaimFiles.answer`."""
    return name.split("_")[2]


def without(spec: str, requests: Collection[str]) -> str:
    """Return a claim's CDI spec without the CDI devices of some requests; "" if none remain.

    The runtime does not create a container that needs a missing CDI device. The runtime ignores a file without CDI
    devices, or with an empty CDI device.
    """
    if not requests or not spec:
        return spec
    decoded = msgspec.json.decode(spec)
    decoded["devices"] = [device for device in decoded["devices"] if request_of(device["name"]) not in requests]
    return encode(decoded).decode() if decoded["devices"] else ""


def version(devices: list[dict[str, Any]]) -> str:
    """Return the lowest version of the CDI specification that has all the fields of these CDI devices.

    0.3.0 is the first version. 0.5.0 added device nodes with a host path, and names that begin with a digit. This agent
    never writes the additions of 0.4.0, 0.6.0 and 0.7.0 (a mount's type, annotations, dots in the class, RDT, groups).
    """
    newer = any(
        not device["name"][0].isalpha()
        or any("hostPath" in node for node in device["containerEdits"].get("deviceNodes", ()))
        for device in devices
    )
    return "0.5.0" if newer else "0.3.0"


def _edits(edits: ContainerEdits, described: Mapping[DeviceNode, Sequence[dict[str, Any]]]) -> dict[str, Any]:
    contents: dict[str, Any] = {}
    if edits.env:
        if wrong := [name for name in edits.env if "\0" in name]:
            raise CdiError(f"{wrong[0]!r} cannot be the name of an environment variable")
        contents["env"] = [f"{name}={checked_text(value, name)}" for name, value in edits.env.items()]
    if nodes := {inside["path"]: inside for node in edits.device_nodes for inside in described[node]}:
        contents["deviceNodes"] = list(nodes.values())
    if edits.mounts:
        contents["mounts"] = [
            {
                "hostPath": checked_text(mount.host, "a mount"),
                "containerPath": checked_text(mount.container, "a mount"),
                # For a device plugin's mounts, the runtime uses the same options (CRI mounts of containerd).
                "options": ["rbind", "rprivate", "ro" if mount.readonly else "rw"],
            }
            for mount in edits.mounts
        ]
    return contents


def is_deleted(directory: str) -> bool:
    """Return whether a mounted directory was deleted on the host, so that no file can be created there. Blocks."""
    try:
        return looked_at.stat(directory).st_nlink == 0
    except OSError:
        return False


class CdiStore:
    """The CDI files of one driver's claims. Thread-safe; the methods block.

    Raises CdiError if the driver's name cannot be the name of a CDI vendor.
    """

    SUFFIX: ClassVar = ".json"

    def __init__(self, driver: str, directory: str = DIRECTORY) -> None:
        self.directory: Final = directory
        self._prefix = f"{vendor_of(driver)}-{CLASS}_"
        self._run: Final = os.urandom(8).hex()
        """A random text in the names of this store's draft files. Drafts without this text are from an agent that
        crashed."""

    def path(self, uid: str) -> str:
        """Return the path of a claim's file. Raises CdiError if the text is not the UID of a claim."""
        if not UID.fullmatch(uid):
            raise CdiError(f"{uid!r} is not the UID of a claim")
        return os.path.join(self.directory, f"{self._prefix}{uid}{self.SUFFIX}")

    def write(self, uid: str, data: bytes) -> bool:
        """Write a claim's file atomically; return False if the file has these bytes already. Raises CdiError."""
        path = self.path(uid)
        # Runtimes read only *.json and *.yaml, and no file whose name begins with a dot. The draft is in the same
        # directory, because containerd notices a rename within the directory, but not one from another directory.
        draft = os.path.join(self.directory, f".{self._prefix}{uid}.{self._run}.{os.urandom(8).hex()}")
        try:
            return files.put_changed(path, data, draft, 0o644)
        except OSError as error:
            raise CdiError(f"cannot write {path}: {error.strerror}") from error

    def read(self, uid: str) -> bytes | None:
        """Return the bytes of a claim's file, None if the file cannot be read."""
        try:
            with open(self.path(uid), "rb") as file:
                return file.read()
        except OSError:
            return None

    def remove(self, uid: str) -> bool:
        """Remove a claim's file; return False if there was no file. Raises CdiError if the file cannot be removed."""
        path = self.path(uid)
        looked_at.at(path)
        try:
            os.remove(path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError as error:
            raise CdiError(f"cannot remove {path}: {error.strerror}") from error
        return True

    def list(self) -> frozenset[str]:
        """Return the UIDs of the claims that have a file. Remove drafts that a crash has left."""
        looked_at.at(self.directory)
        try:
            names = os.listdir(self.directory)
        except OSError:
            return frozenset()
        uids = set()
        for name in names:
            if name.startswith(f".{self._prefix}") and f".{self._run}." not in name:
                with contextlib.suppress(OSError):
                    os.remove(os.path.join(self.directory, name))
            elif name.startswith(self._prefix) and name.endswith(self.SUFFIX):
                uid = name[len(self._prefix) : -len(self.SUFFIX)]
                if UID.fullmatch(uid):
                    uids.add(uid)
        return frozenset(uids)

    def device_names(self, uid: str) -> tuple[str, ...]:
        """Return the names of the CDI devices in a claim's file; an empty result if the file cannot be read."""
        try:
            return tuple(str(device["name"]) for device in msgspec.json.decode(self.read(uid) or b"")["devices"])
        except (msgspec.DecodeError, LookupError, TypeError):
            return ()


class ClaimFileStore(CdiStore):
    """The agent's own files of one driver's claims, in a directory below the directory of CDI specs."""

    SUFFIX = claim_files.SUFFIX

    def __init__(self, driver: str, directory: str = DIRECTORY) -> None:
        super().__init__(driver, own_directory(directory))
        self._prefix = f"{driver}_"
