"""Reads the kubelet's checkpoint, and has the kubelet write it when a newer one is needed.

A list of devices that is sent once more makes the kubelet write it (kubelet 1.36, devicemanager/manager.go). That is
asked for several times in a row, because a file may be older than the one that it replaces (`holders.shows_present`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

from deviceplugin import filewatch
from deviceplugin.kubelet import checkpoint, holders
from deviceplugin.kubelet.checkpoint import Allocation, Checkpoint, CheckpointError, FileIdentity
from deviceplugin.kubelet.granted import Granted, granted

REWRITE: Final = 1.0
"""Seconds that the kubelet has to write its checkpoint after it was sent a list; some ms are usual."""


class CheckpointReader:
    """Reads the kubelet's checkpoint, has it written anew, and remembers what devices it says were granted.

    Args:
        directory: the device plugin directory.
        request: sends the list of devices once more; returns whether the kubelet listens to any resource.
        boot: what tells one boot of the node from another.
        known: returns the allocations that count as held; what their devices were is remembered.

    Attributes:
        last: the checkpoint that was read last.
        grants: what the devices of allocations were, with the answer to Allocate that says so.

    """

    def __init__(
        self, directory: Path, request: Callable[[], bool], boot: str, known: Callable[[], Iterable[Allocation]]
    ) -> None:
        self.last = Checkpoint(frozenset(), {})
        self.grants: Mapping[Allocation, tuple[str, Granted]] = {}
        self._directory = directory
        self._request = request
        self._boot = boot
        self._known = known

    @property
    def changed(self) -> bool:
        """Whether the file is another one than was read last."""
        return checkpoint.identity(self._directory) != self.last.file

    def read(self) -> Checkpoint:
        """Read the file now. Blocks. Raises CheckpointError: it cannot be read."""
        now = checkpoint.read(self._directory)
        self.take([now])
        return now

    def take(self, checkpoints: Sequence[Checkpoint]) -> None:
        """Remember the last of these checkpoints, and what they say of granted devices. May block for device nodes."""
        kept = frozenset(self._known()).union(*(one.allocations for one in checkpoints))
        grants = {one: grant for one, grant in self.grants.items() if one in kept}
        for allocation, response in (item for one in checkpoints for item in one.responses.items()):
            if allocation not in grants or grants[allocation][0] != response:
                grants[allocation] = response, granted(response, *allocation[2:], self._boot)
        self.last, self.grants = checkpoints[-1], grants

    async def written(self) -> tuple[Sequence[Checkpoint], str]:
        """Return checkpoints that the kubelet wrote at our request, and why that was not possible, "" if it was.

        If it was, they show what is allocated now.
        """
        written: list[Checkpoint] = []
        last = checkpoint.identity(self._directory)
        while not holders.shows_present(written):
            if not self._request():
                return (
                    written,
                    "the kubelet does not listen to this plugin, so it cannot be asked to write its checkpoint",
                )
            if (after := await self._rewritten(last)) is None:
                return written, "the kubelet has not written its checkpoint since it was asked to"
            written.append(after)
            last = after.file
        return written, ""

    async def _rewritten(self, before: FileIdentity) -> Checkpoint | None:
        """Wait until the checkpoint is another file than before; None if it is not in time."""
        with filewatch.shared().watch([str(self._directory)]) as watch:
            until = time.monotonic() + REWRITE
            while (rest := until - time.monotonic()) > 0:
                try:
                    after = await asyncio.to_thread(checkpoint.read, self._directory)
                except CheckpointError:
                    after = None
                if after is not None and after.file != before:
                    return after
                await watch.wait(rest)
        return None
