"""What other agents of the node say that pods hold: the copies of their allocations (`register.copies`).

No checkpoint names a pod any more that was deleted by force. If it hangs, only the agent that gave it a device knows
it: one with another `--agent-name`, or `dra-bridge run` before `deviceplugin run`. The copy of an agent that runs
follows what it grants and takes back; that of one that has ended stays until the next boot.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from deviceplugin import cdi
from deviceplugin.files import FileIdentity, file_identity
from deviceplugin.identity import boot_id
from deviceplugin.kubelet.checkpoint import Allocation
from deviceplugin.register import copies
from deviceplugin.register.question import Wanted

_LOG: Final = logging.getLogger(__name__)


class AllocationCopies:
    """The copies below a directory of CDI specs, without that of the agent `own`."""

    def __init__(self, directory: Path, own: str = "") -> None:
        self._directory = Path(cdi.own_directory(str(directory)))
        self._own = f"{own}{copies.SUFFIX}"
        self._read: dict[str, FileIdentity] = {}

    def changed(self) -> Mapping[Allocation, Wanted]:
        """Return what the copies name that are new or have changed since the last call. May block.

        A grant whose container was not named when the agent ended has no holder in a copy; the checkpoint names it.
        """
        try:
            names = os.listdir(self._directory)
        except OSError:
            return {}
        copied: dict[Allocation, Wanted] = {}
        for name in names:
            if name.endswith(copies.SUFFIX) and name != self._own:
                file = file_identity(self._directory / name)
                if file is not None and file != self._read.get(name):
                    self._read[name] = file
                    copied |= _allocations(self._directory / name)
        return copied


def _allocations(path: Path) -> Mapping[Allocation, Wanted]:
    try:
        copy = copies.read(str(path))
    except (OSError, msgspec.MsgspecError) as error:
        _LOG.warning("the copy %s of another agent's allocations cannot be read: %s", path, error)
        return {}
    if copy is None or copy.boot != boot_id():
        return {}
    return {
        Allocation(*holder, record.resource, record.device_id): Wanted(
            (record.resource, record.device), record.identity, record.amount
        )
        for record in copy.allocations
        for holder in record.holders
    }
