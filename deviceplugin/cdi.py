"""CDI specs (tags.cncf.io/container-device-interface 1.0) of claims. The container runtime applies them to containers.

A file is renamed into place but not synced. The agent writes it again from the ledger at each start, so an empty or
missing file is replaced after a power failure. On most nodes, /var/run is in memory.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, ClassVar, Final

import msgspec

from deviceplugin import files, looked_at
from deviceplugin.device import ContainerEdits, DeviceNode

DIRECTORY: Final = "/var/run/cdi"
"""The directory in which runtimes look for specs that do not survive a reboot."""
CLASS: Final = "claim"
"""The class in the kind of a CDI device. The vendor in the kind is the driver's name."""
HOLDING: Final = "claim"
ADMIN: Final = "admin"
"""Prefixes of a claim's CDI device names, `claim_<claim UID>_<request>`. `admin` stands for administrative access
alone."""
UID: Final = re.compile(r"[A-Za-z0-9]([A-Za-z0-9-]{0,62}[A-Za-z0-9])?")
"""The form of a claim's UID, which is a part of its file's name."""
_VENDOR: Final = re.compile(r"[A-Za-z]([A-Za-z0-9_.-]*[A-Za-z0-9])?")
_NAME: Final = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.:-]*[A-Za-z0-9])?")
_MAX_NODES: Final = 1024


class CdiError(ValueError):
    """Raised when edits cannot be expressed in CDI, or a file cannot be written."""


def vendor_of(driver: str) -> str:
    """Return the vendor in a driver's kind: the driver's name, with a letter in front if needed.

    Raises CdiError if the name cannot be a vendor.
    """
    vendor = driver if driver[:1].isalpha() else f"dra.{driver}"
    if not _VENDOR.fullmatch(vendor):
        raise CdiError(f"the driver's name {driver!r} cannot be a CDI vendor")
    return vendor


def qualified(driver: str, device: str) -> str:
    """Return the fully qualified name of a CDI device of this driver's claims."""
    return f"{vendor_of(driver)}/{CLASS}={device}"


def file_of(name: str, uid: str) -> tuple[str, str]:
    """Return the file of a claim that has a CDI device, and the device's short name.

    The CDI library's convention determines the file.
    """
    kind, _, device = name.partition("=")
    return f"{kind.replace('/', '-')}_{uid}.json", device


def described(nodes: Iterable[DeviceNode]) -> dict[DeviceNode, tuple[dict[str, Any], ...]]:
    """Return the entries of these device nodes in a CDI spec. Blocks. Raises CdiError if one is missing on the host."""
    return {node: tuple(_nodes(node)) for node in nodes}


def build(
    driver: str,
    devices: Mapping[str, ContainerEdits],
    nodes: Mapping[DeviceNode, Sequence[dict[str, Any]]] | None = None,
) -> dict[str, Any]:
    """Return a CDI spec, valid and of the lowest version that its content allows.

    devices: edits by the CDI device's name, at least one and none of them empty. Their annotations are left out. nodes:
    their device nodes, as `described` returns them; without it, the function reads the nodes, which blocks. Raises
    CdiError if a name, path or variable is not allowed, or a node is missing on the host.

    Host paths of device nodes are resolved here, because runtimes refuse a symbolic link (containerd#12060). A
    container sees the requested path. A directory stands for the device nodes in it. If a spec has device numbers, a
    runtime does not look at the host path (container-device-interface 1.0, container-edits_unix.go: fillMissingInfo).
    So a container that starts again gets the same number, even if the path leads to another device by then.
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
    """Return a spec as the bytes of its file. Raises CdiError if a text is not Unicode."""
    try:
        return msgspec.json.encode(spec)
    except (UnicodeEncodeError, msgspec.MsgspecError) as error:
        raise CdiError(f"cannot be written as JSON: {error}") from error


def version(devices: list[dict[str, Any]]) -> str:
    """Return the lowest version of the CDI spec that has all the fields of this one.

    0.3.0 is the first version. 0.5.0 added host paths of nodes and names that begin with a digit. The additions of
    0.4.0, 0.6.0 and 0.7.0 (a mount's type, annotations, dots in the class, RDT, groups) are never written here.
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
        contents["env"] = [f"{name}={_text(value, name)}" for name, value in edits.env.items()]
    if nodes := {inside["path"]: inside for node in edits.device_nodes for inside in described[node]}:
        contents["deviceNodes"] = list(nodes.values())
    if edits.mounts:
        contents["mounts"] = [
            {
                "hostPath": _text(mount.host, "a mount"),
                "containerPath": _text(mount.container, "a mount"),
                # The runtime mounts the plugin side's mounts with the same options (CRI mounts of containerd).
                "options": ["rbind", "rprivate", "ro" if mount.readonly else "rw"],
            }
            for mount in edits.mounts
        ]
    return contents


def _text(value: str, what: str) -> str:
    if "\0" in value:
        raise CdiError(f"{what}: {value!r} contains a NUL character")
    return value


def _nodes(node: DeviceNode) -> Iterator[dict[str, Any]]:
    _text(node.path, "a device node")
    looked_at.at(node.host)
    try:
        host = os.path.realpath(node.host, strict=True)
        status = os.stat(host)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise CdiError(f"device node {node.host}: {reason}") from error
    if stat.S_ISDIR(status.st_mode):
        nodes = list(islice(_within(host, node), _MAX_NODES + 1))
        if not nodes:
            raise CdiError(f"device node {node.host}: a directory without device nodes")
        if len(nodes) > _MAX_NODES:
            raise CdiError(f"device node {node.host}: more than {_MAX_NODES} device nodes in it")
        yield from nodes
    elif _is_node(status.st_mode):
        yield _node(host, status, node.path, node.permissions)
    else:
        raise CdiError(f"device node {node.host}: neither a device node nor a directory of device nodes")


def _within(directory: str, node: DeviceNode) -> Iterator[dict[str, Any]]:
    for host in (os.path.join(root, name) for root, _, names in os.walk(directory) for name in sorted(names)):
        with contextlib.suppress(OSError):  # The node was removed meanwhile.
            if _is_node((status := os.lstat(host)).st_mode):
                inside = os.path.join(node.path, os.path.relpath(host, directory))
                yield _node(host, status, inside, node.permissions)


def _is_node(mode: int) -> bool:
    return stat.S_ISCHR(mode) or stat.S_ISBLK(mode) or stat.S_ISFIFO(mode)


def _node(host: str, status: os.stat_result, path: str, permissions: str) -> dict[str, Any]:
    node: dict[str, Any] = {"path": path}
    if host != path:
        node["hostPath"] = host
    if not stat.S_ISFIFO(status.st_mode):
        node["type"] = "b" if stat.S_ISBLK(status.st_mode) else "c"
        node |= {"major": os.major(status.st_rdev), "minor": os.minor(status.st_rdev)}
    return {**node, "permissions": "".join(letter for letter in "rwm" if letter in permissions)}


def own_directory(directory: str) -> str:
    """Return the directory of this project's other files that last until the next boot. It is below that of CDI specs.

    The directory of CDI specs is mounted, and in memory on most nodes. Runtimes do not look into directories below it.
    In the directory of the specs itself, each of these files would cost time: when any file there is renamed or
    removed, containerd reads all specs again (container-device-interface 1.1, pkg/cdi/cache.go: watch), while the
    kubelet waits for the agent's answer.
    """
    return os.path.join(directory, "deviceplugin")


def is_deleted(directory: str) -> bool:
    """Return whether a directory was deleted while it is mounted here, so that nothing can be written. Blocks."""
    try:
        return looked_at.stat(directory).st_nlink == 0
    except OSError:
        return False


class CdiStore:
    """The CDI files of one driver's claims. Thread-safe; blocks.

    Raises CdiError if the driver cannot be a CDI vendor.
    """

    SUFFIX: ClassVar = ".json"

    def __init__(self, driver: str, directory: str = DIRECTORY) -> None:
        self.directory: Final = directory
        self._prefix = f"{vendor_of(driver)}-{CLASS}_"
        self._run: Final = os.urandom(8).hex()
        """Part of the names of this store's drafts. An agent that crashed has left the drafts without it."""

    def path(self, uid: str) -> str:
        """Return the path of a claim's file. Raises CdiError if the UID is not that of a claim."""
        if not UID.fullmatch(uid):
            raise CdiError(f"{uid!r} is not the UID of a claim")
        return os.path.join(self.directory, f"{self._prefix}{uid}{self.SUFFIX}")

    def write(self, uid: str, data: bytes) -> bool:
        """Write a claim's file atomically; return False if it has these bytes already. Raises CdiError."""
        path = self.path(uid)
        looked_at.at(path)
        if self.read(uid) == data:
            return False
        # Runtimes read only *.json and *.yaml, and no file whose name begins with a dot. The draft is in the same
        # directory, because containerd notices a rename from there, but not a file that comes from another directory.
        draft = os.path.join(self.directory, f".{self._prefix}{uid}.{self._run}.{os.urandom(8).hex()}")
        try:
            os.makedirs(self.directory, mode=0o755, exist_ok=True)
            files.put(path, data, draft, 0o644)
        except OSError as error:
            raise CdiError(f"cannot write {path}: {error.strerror}") from error
        return True

    def read(self, uid: str) -> bytes | None:
        """Return the bytes of a claim's file, None if there is none."""
        try:
            with open(self.path(uid), "rb") as file:
                return file.read()
        except OSError:
            return None

    def remove(self, uid: str) -> bool:
        """Remove a claim's file; return False if there was none. Raises CdiError if it cannot be removed."""
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
        """Return the names of the CDI devices in a claim's file; an empty result if it cannot be read."""
        try:
            return tuple(str(device["name"]) for device in msgspec.json.decode(self.read(uid) or b"")["devices"])
        except (msgspec.DecodeError, LookupError, TypeError):
            return ()
