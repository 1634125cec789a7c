"""Makes names, file paths and device-node entries for CDI specs (tags.cncf.io/container-device-interface 1.0)."""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, Final

from deviceplugin import looked_at
from deviceplugin.device import DeviceNode

DIRECTORY: Final = "/var/run/cdi"
"""The directory in which container runtimes search for CDI specs. On most nodes, a reboot empties the directory."""
CLASS: Final = "claim"
"""The kind of a claim's CDI device is `<vendor>/claim`. The vendor is made from the driver's name."""
HOLDING: Final = "claim"
ADMIN: Final = "admin"
"""The prefix of the name of a CDI device for a request with administrative access. The prefix for a request that holds
devices is HOLDING, as in `claim_<claim UID>_<request>`."""
UID: Final = re.compile(r"[A-Za-z0-9]([A-Za-z0-9-]{0,62}[A-Za-z0-9])?")
"""Matches a valid UID of a claim. An invalid UID is refused, because the name of the claim's CDI file contains it."""
_VENDOR: Final = re.compile(r"[A-Za-z]([A-Za-z0-9_.-]*[A-Za-z0-9])?")
_MAX_NODES: Final = 1024


class CdiError(ValueError):
    """Raised when edits cannot be expressed in CDI, or a CDI file cannot be written."""


def vendor_of(driver: str) -> str:
    """Return the vendor for a driver's CDI kind: the driver's name, after `dra.` if the name begins with no letter.

    Raises CdiError if the name cannot be a vendor.
    """
    vendor = driver if driver[:1].isalpha() else f"dra.{driver}"
    if not _VENDOR.fullmatch(vendor):
        raise CdiError(f"the driver's name {driver!r} cannot be a CDI vendor")
    return vendor


def qualified(driver: str, device: str) -> str:
    """Return the fully qualified name of a CDI device of this driver's claims. device: the device's short name."""
    return f"{vendor_of(driver)}/{CLASS}={device}"


def described(nodes: Iterable[DeviceNode]) -> dict[DeviceNode, tuple[dict[str, Any], ...]]:
    """Return, for each device node, its entries in a CDI spec. Blocks. Raises CdiError if the host lacks a node."""
    return {node: tuple(_nodes(node)) for node in nodes}


def checked_text(value: str, what: str) -> str:
    """Return `value`; raise CdiError if it has a NUL, which is invalid in CDI specs.

    what: the value's name in messages.
    """
    if "\0" in value:
        raise CdiError(f"{what}: {value!r} contains a NUL character")
    return value


def _nodes(node: DeviceNode) -> Iterator[dict[str, Any]]:
    checked_text(node.path, "a device node")
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
        with contextlib.suppress(OSError):  # The node was removed after the directory was listed.
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
    """Return the path of a subdirectory of the directory of CDI specs, for files that must be kept until the next boot.

    The directory of CDI specs is mounted into the agent's container, and is in memory on most nodes. Container runtimes
    do not read its subdirectories. The files are not in the directory of CDI specs itself, because containerd reads all
    specs again whenever a file there is renamed or removed (container-device-interface 1.1, pkg/cdi/cache.go: watch),
    which would delay the agent's response to the kubelet.
    """
    return os.path.join(directory, "deviceplugin")
