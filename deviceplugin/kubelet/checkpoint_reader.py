"""Reads the kubelet's checkpoint, and has the kubelet write it when a newer one is needed.

A list of devices that is sent once more makes the kubelet write it (kubelet 1.36, devicemanager/manager.go). That is
asked for several times in a row, because a file may be older than the one that it replaces (`holders.shows_present`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

from deviceplugin import filewatch
from deviceplugin.exclusion import Key
from deviceplugin.files import FileIdentity
from deviceplugin.kubelet import checkpoint, holders
from deviceplugin.kubelet.checkpoint import Allocation, Checkpoint, CheckpointError
from deviceplugin.kubelet.granted import Granted, granted

REWRITE: Final = 1.0
"""Seconds that the kubelet has to write its checkpoint after it was sent a list; some ms are usual."""


class CheckpointReader:
    """Reads the kubelet's checkpoint, has it written anew, and remembers what devices were when they were granted.

    request: sends the list of devices once more; returns whether the kubelet listens to any resource.
    known: returns the allocations that count as held; what their devices were is remembered.
    """

    def __init__(
        self, directory: Path, request: Callable[[], bool], boot: str, known: Callable[[], Iterable[Allocation]]
    ) -> None:
        self.last = Checkpoint(frozenset(), {})
        self.grants: Mapping[Allocation, tuple[str, Granted]] = {}
        """What the devices of allocations were, with the answer to Allocate that says so."""
        self._directory = directory
        self._request = request
        self._boot = boot
        self._known = known
        self._allocated: tuple[tuple[object, ...], Mapping[Key, Granted]] = ((), {})

    def current(self) -> Checkpoint | None:
        """Return what was read last if the file is still the same, else None."""
        last = self.last
        return last if checkpoint.identity(self._directory) == last.file else None

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

    def allocated(self, held: Collection[Allocation]) -> Mapping[Key, Granted]:
        """Return what devices were that count as held, by (resource, device id); the same object until it changes.

        held: by the last scan. What the last checkpoint names besides was allocated since.
        """
        of = held, self.last, self.grants  # read once: `take` may run in a thread
        if [id(one) for one in self._allocated[0]] != [id(one) for one in of]:
            found: dict[Key, Granted] = {}
            _, last, grants = of
            for one in last.allocations.union(held):
                key, grant = (one.resource, one.device_id), grants.get(one, ("", Granted()))[1]
                before = found.get(key, Granted(shared=True))
                found[key] = Granted(before.tokens | grant.tokens, before.shared and grant.shared)
            self._allocated = of, self._allocated[1] if found == self._allocated[1] else found
        return self._allocated[1]

    async def written(self) -> tuple[Sequence[Checkpoint], str]:
        """Return checkpoints written at our request, which show what is allocated now, or why there are none."""
        written: list[Checkpoint] = []
        last, problem = checkpoint.identity(self._directory), ""
        while not (problem or holders.shows_present(written)):
            if not self._request():
                problem = "the kubelet does not listen to this plugin, so it cannot be asked to write its checkpoint"
            elif (after := await self._rewritten(last)) is None:
                problem = "the kubelet has not written its checkpoint since it was asked to"
            else:
                written.append(after)
                last = after.file
        return written, problem

    async def _rewritten(self, before: FileIdentity | None) -> Checkpoint | None:
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
