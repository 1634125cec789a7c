"""The copy that an agent with a ledger keeps of its allocations: `<agent>.allocations` in `cdi.own_directory`.

Without ledger and checkpoint nothing else names the pods of the plugin side. The directory is in memory on most nodes;
a copy of another boot says nothing.
"""

from __future__ import annotations

import os
from typing import Final

import msgspec

from deviceplugin import cdi, files
from deviceplugin.register.records import AllocationRecord

SUFFIX: Final = ".allocations"


class Copy(msgspec.Struct, frozen=True):
    """Copied allocations. boot: the node's boot in which they were made. sequence: the register's at that time."""

    boot: str
    sequence: int
    allocations: tuple[AllocationRecord, ...]


def path(directory: str, agent: str) -> str:
    """Return where the copy of an agent lies. directory: of the CDI specs."""
    return os.path.join(cdi.own_directory(directory), f"{agent}{SUFFIX}")


def write(path: str, copy: Copy) -> None:
    """Put a copy into place. Raises OSError."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    files.put(path, msgspec.json.encode(copy), f"{path}.new", 0o600)


def read(path: str) -> Copy | None:
    """Read a copy; None if there is none. Raises OSError or msgspec.MsgspecError: it cannot be read."""
    try:
        with open(path, "rb") as file:
            return msgspec.json.decode(file.read(), type=Copy)
    except FileNotFoundError:
        return None
