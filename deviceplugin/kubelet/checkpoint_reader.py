"""Reads the kubelet's checkpoint, makes the kubelet write it, and keeps what the devices of allocations were."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple, Protocol

from deviceplugin import filewatch
from deviceplugin.files import FileIdentity
from deviceplugin.identity import Tokens, boot_id, numbers_of
from deviceplugin.kubelet import checkpoint, holders
from deviceplugin.kubelet.checkpoint import Allocation, CheckpointError, CheckpointVersion
from deviceplugin.kubelet.granted import granted, nodes_missing
from deviceplugin.looks import Looks, LookTimeoutError
from deviceplugin.register.question import Wanted

REWRITE: Final = 1.0
"""Seconds that the kubelet has to write its checkpoint after it was sent a list; some ms are usual."""
NODE_LOOK: Final = 0.5
"""Seconds that a look at device nodes may take that an answer of another plugin names."""
UNHINTED: Final = 0.2
"""Seconds between two looks for it, should no event come: some file systems make none of what others write."""


class DeviceLists(Protocol):
    """The device lists that this process sends to the kubelet (`deviceplugin.node.agent.Agent`)."""

    def resend(self) -> bool:
        """Send the lists once more; return whether the kubelet receives the list of any resource."""

    def adopted(self, resource: str) -> bool:
        """Return whether a vendor's plugin answers Allocate for a resource."""


class KnownCheckpoint(NamedTuple):
    """What is known from the checkpoints that were read.

    last: the one that was read last. grants: what the devices of allocations were, with the answer to Allocate that
    says so. missing_nodes: allocations of an earlier boot of whose device nodes none was there; each reading looks for
    them.
    """

    last: CheckpointVersion = CheckpointVersion(frozenset(), {})
    grants: Mapping[Allocation, tuple[str, Wanted]] = {}
    missing_nodes: frozenset[Allocation] = frozenset()


class CheckpointReader:
    """Reads the kubelet's checkpoint, makes the kubelet write it, and keeps the identities of granted devices.

    A device list that is sent again makes the kubelet write the checkpoint (kubelet 1.36, devicemanager/manager.go).
    known: returns the allocations that count as held; what their devices were is remembered. What is in the answers of
    adopted resources says nothing, since control nodes recur in all of them.

    Several threads read at a time. What is known is one value, which `take` alone replaces, for one reading after the
    other; all others see the value before or the one after.
    """

    def __init__(
        self, directory: Path, lists: DeviceLists, known: Callable[[], Iterable[Allocation]], looks: Looks
    ) -> None:
        self.known = KnownCheckpoint()
        self._taking = threading.Lock()
        self._directory = directory
        self._lists = lists
        self._held = known
        self._looks = looks
        self._node_looks = Looks("device nodes in answers of other plugins", threads=2)

    def _numbers(self, paths: Iterable[str]) -> Tokens:
        """Return the numbers of device nodes; those that do not answer are looked at again at the next reading."""
        try:
            return self._node_looks.within(NODE_LOOK, "answer", numbers_of, paths)
        except LookTimeoutError:
            return frozenset()

    def newest(self, *, nodes: bool = False) -> CheckpointVersion:
        """Return what the file has now, without reading it if it has not changed. Blocks. Raises CheckpointError.

        nodes: look again for device nodes that were missing.
        """
        last, _, missing = self.known
        if checkpoint.identity(self._directory) == last.file and not (nodes and missing):
            return last
        return self.read()

    def read(self) -> CheckpointVersion:
        """Read the file now. Blocks. Raises CheckpointError: it cannot be read."""
        now = checkpoint.read(self._directory)
        self.take([now])
        return now

    def take(self, checkpoints: Sequence[CheckpointVersion]) -> None:
        """Keep the last of these checkpoints, and the identities of granted devices. May block for device nodes."""
        with self._taking:
            last, before, missing = self.known
            kept = frozenset(self._held()).union(*(version.allocations for version in checkpoints))
            grants = {allocation: grant for allocation, grant in before.items() if allocation in kept}
            answers = {allocation: response for file in checkpoints for allocation, response in file.responses.items()}
            for allocation, response in answers.items():
                if self._lists.adopted(allocation.resource):
                    grants.pop(allocation, None)
                elif grants.get(allocation, ("",))[0] != response or allocation in missing:
                    grants[allocation] = response, granted(response, *allocation[2:], boot_id(), self._numbers)
            missing = frozenset(
                allocation
                for allocation, (response, what) in grants.items()
                if nodes_missing(response, allocation.resource, what, boot_id())
            )
            # Another thread may have read a newer one since.
            is_newest = last.file is not None and checkpoint.identity(self._directory) == last.file
            self.known = KnownCheckpoint(last if is_newest else checkpoints[-1], grants, missing)

    async def written(self, patience: float | None = None) -> tuple[Sequence[CheckpointVersion], str]:
        """Return current checkpoints, which the kubelet wrote at our request, or the reason why there are none.

        patience: seconds that the kubelet has to write each, by default REWRITE.
        """
        written: list[CheckpointVersion] = []
        last = await self._looks.at("checkpoint", checkpoint.identity, self._directory, brief=True)
        with filewatch.shared().watch([str(self._directory)]) as watch:
            while not holders.shows_present(written):
                if not self._lists.resend():
                    why = "the kubelet does not listen to this plugin, so it cannot be asked to write its checkpoint"
                    return (), why
                if (after := await self._rewritten(watch, last, REWRITE if patience is None else patience)) is None:
                    return (), "the kubelet has not written its checkpoint since it was asked to"
                written.append(after)
                last = after.file
        return written, ""

    async def _rewritten(
        self, watch: filewatch.Watch, before: FileIdentity | None, patience: float
    ) -> CheckpointVersion | None:
        """Wait until the kubelet has replaced the checkpoint file; None if it does not in time."""
        until = time.monotonic() + patience
        while True:
            if (after := await self._looks.at("checkpoint", self._newer, before)) is not None:
                return after
            if (rest := until - time.monotonic()) <= 0:
                return None
            await watch.wait(min(rest, UNHINTED), unwatched=filewatch.SOON)

    def _newer(self, before: FileIdentity | None) -> CheckpointVersion | None:
        """Return the checkpoint if it is another file than before, and can be read."""
        if checkpoint.identity(self._directory) == before:
            return None
        with contextlib.suppress(CheckpointError):
            after = checkpoint.read(self._directory)
            return after if after.file != before else None
        return None
