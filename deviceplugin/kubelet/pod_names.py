"""Reads the names of pods from the kubelet's log directories."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Collection
from pathlib import Path
from typing import Final, NamedTuple

from deviceplugin.kubelet.podresources import PodContainer
from deviceplugin.looks import Looks, LookTimeoutError

SHORTLY: Final = 1.0
"""Maximum seconds for a read of the log directories in a thread that reads other evidence too."""


class PodLogs(NamedTuple):
    """The facts from a pod's log directory.

    changed: the time of the directory's last change (Unix seconds); infinite if it cannot be read. containers: the
    names of the containers that the kubelet has begun to start.
    """

    changed: float = math.inf
    containers: tuple[str, ...] = ()


class PodNames:
    """Reads the names of pods with known UIDs from the kubelet's log directories (`<namespace>_<name>_<uid>`)."""

    def __init__(self, directory: Path) -> None:
        self.known: dict[str, tuple[str, str]] = {}
        self.looks: Final = Looks(str(directory))
        self._directory = directory

    async def update(self, uids: Collection[str]) -> None:
        """Read the names of these pods into the attribute `known`, and remove the names of all other pods from it."""
        if not self.known.keys() >= set(uids):
            with contextlib.suppress(LookTimeoutError):
                self.known |= await self.now(uids)
        self.known = {uid: name for uid, name in self.known.items() if uid in uids}

    async def now(self, uids: Collection[str]) -> dict[str, tuple[str, str]]:
        """Return, for each of these UIDs that has a log directory, the pod's (namespace, name).

        Raises LookTimeoutError.
        """
        return await self.looks.at("pod names", self.read, uids, brief=True)

    def read_shortly(self, uids: Collection[str]) -> dict[str, tuple[str, str]]:
        """Return, for each pod UID, (namespace, name); empty if the read takes longer than SHORTLY. Blocks."""
        try:
            return self.looks.within(SHORTLY, "pod names", self.read, uids)
        except LookTimeoutError:
            return {}

    def read(self, uids: Collection[str]) -> dict[str, tuple[str, str]]:
        """Return, for each of these UIDs that has a log directory, the pod's (namespace, name). Blocks."""
        try:
            # Namespaces and names of pods contain no underscore.
            split = [name.split("_") for name in os.listdir(self._directory)]
        except OSError:
            return {}
        return {parts[2]: (parts[0], parts[1]) for parts in split if len(parts) == 3 and parts[2] in uids}

    def pods(self, uids: Collection[str]) -> tuple[PodContainer, ...]:
        """Return these pods, with the names that can be read within SHORTLY seconds. Blocks for at most this time."""
        names = self.read_shortly(uids) if uids else {}
        return tuple(PodContainer(*names.get(uid, ("", "")), uid=uid) for uid in sorted(uids))

    def logs(self, uids: Collection[str]) -> dict[str, PodLogs]:
        """Return, for each of these pod UIDs, the facts from the pod's log directory. Blocks."""
        found = {uid: PodLogs() for uid in uids}
        with contextlib.suppress(OSError), os.scandir(self._directory) as entries:
            for entry in entries:
                if (uid := entry.name.rpartition("_")[2]) in found:
                    with contextlib.suppress(OSError):
                        found[uid] = PodLogs(entry.stat().st_mtime, tuple(os.listdir(entry.path)))
        return found

    def missing(self) -> str:
        """Return why no names of pods can be read, and the consequences; "" if the names can be read."""
        if os.path.isdir(self._directory):
            return ""
        return (
            f"pod log directories are not visible in {self._directory}: pods are shown by their UIDs, "
            "and no claim is unprepared while a pod's processes run; mount them, read-only"
        )
