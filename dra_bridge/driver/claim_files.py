"""The CDI files of prepared claims, and the answers to the kubelet that name what is in them."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from deviceplugin import cdi, filewatch
from deviceplugin.backoff import Backoff
from deviceplugin.device import ContainerEdits, EditConflictError
from dra_bridge.driver.claims import ClaimError
from dra_bridge.driver.records import ClaimRecords, Prepared, PreparedDevice, prepared_of
from dra_bridge.driver.served import Group
from dra_bridge.driver.tasks import in_thread

_LOG: Final = logging.getLogger(__name__)

CHECK: Final = 30.0
"""Seconds between two checks for missing CDI files, should the file watch miss every change."""

SETTLE: Final = 0.5
"""Seconds from a change of CDI files to the check for missing ones; many changes make one check."""

_IN_MEMORY: Final = ("/run/", "/var/run/")
_HOLDING: Final = "claim"
_ADMIN: Final = "admin"


class ClaimFiles:
    """The CDI files of one driver's claims. boot: the node's boot; after a reboot devices are set up again."""

    def __init__(self, records: ClaimRecords, directory: str, boot: str) -> None:
        self.boot: Final = boot
        self._records = records
        self._driver = records.driver
        self._store = cdi.Store(records.driver, directory)
        self._quick = os.path.realpath(directory).startswith(_IN_MEMORY)
        """Whether the files are in memory, so that neither writing nor removing one blocks."""

    async def answer(
        self, uid: str, groups: Sequence[Group], edits: Mapping[str, Sequence[ContainerEdits]]
    ) -> Prepared:
        """Make a claim's answer and its CDI file; in a thread if that may block."""
        nodes = (node.host for of_request in edits.values() for one in of_request for node in one.device_nodes)
        if self._quick and all(host.startswith("/dev/") for host in nodes):
            return self._answer(uid, groups, edits)
        return await in_thread(self._answer, uid, groups, edits)

    def _answer(self, uid: str, groups: Sequence[Group], edits: Mapping[str, Sequence[ContainerEdits]]) -> Prepared:
        """Make a claim's answer and its CDI file. Blocks, also for reading device nodes.

        Each request has a CDI device, so that a container gets the edits of its own requests, and each once.
        The request's first device carries it. Its name has the devices, as evidence (R8).
        """
        listed: dict[str, ContainerEdits] = {}
        devices: list[PreparedDevice] = []
        for request, of_request in edits.items():
            try:
                merged = ContainerEdits.merge(of_request)
            except EditConflictError as error:
                raise ClaimError("conflict", f"request {request!r}: {error}") from error
            members = [(group, result) for group in groups if group.request == request for _, result in group.members]
            ids = list(merged.cdi)
            if merged.env or merged.nodes or merged.mounts:
                kind = _ADMIN if all(group.admin for group, _ in members) else _HOLDING
                named = dict.fromkeys(result.device for group, result in members if not group.admin or kind == _ADMIN)
                name = "_".join((kind, uid, request, *named))
                listed[name] = merged
                ids.insert(0, cdi.qualified(self._driver, name))
            for _, result in members:
                devices.append(PreparedDevice(request, result.pool, result.device, tuple(ids), result.share_id or ""))
                ids = []
        if not listed:
            self._store.remove(uid)
            return Prepared(tuple(devices), "", self.boot)
        data = cdi.encode(cdi.build(self._driver, listed))
        self._store.write(uid, data)
        return Prepared(tuple(devices), data.decode(), self.boot)

    async def write(self, uid: str, prepared: Prepared) -> bool:
        """Write a prepared claim's file, under the claim's lock; return False if it was there or is not needed."""
        return bool(prepared.spec) and await in_thread(self._store.write, uid, prepared.spec.encode())

    async def remove(self, uid: str) -> None:
        """Remove a claim's file, under the claim's lock, if it is there."""
        if self._quick:
            self._store.remove(uid)
        else:
            await in_thread(self._store.remove, uid)

    async def claims(self) -> frozenset[str]:
        """Return the UIDs of the claims that have a file."""
        return frozenset(await in_thread(self._store.list))

    def holding(self) -> Iterator[tuple[str, list[str]]]:
        """Yield the claims that have a file, by UID, and the published names of the devices that they hold; blocks."""
        for uid in self._store.list():
            kinds = (name.split("_") for name in self._store.device_names(uid))
            yield uid, [name for kind, *names in kinds if kind == _HOLDING for name in names[2:]]

    async def keep(self) -> None:
        """Write CDI files again soon after they were removed, until cancelled.

        Without its file a container cannot be restarted, and the kubelet prepares a claim only once. Returns when the
        directory was deleted on the host while it is mounted here: this mount shows the deleted one ever after.
        """
        backoff = Backoff(first=1.0, most=60.0)
        with filewatch.shared().watch([os.path.realpath(self._store.directory)]) as watch:
            while not await in_thread(self._store.deleted):
                there = await self.claims()
                missing = [claim.uid for claim in self._records.all() if claim.uid not in there]
                if errors := list(filter(None, await asyncio.gather(*map(self._restore, missing)))):
                    _LOG.warning("%s: CDI files are missing: %s", self._driver, errors[0])
                    await asyncio.sleep(backoff.next())
                    continue
                backoff.reset()
                if await watch.wait(CHECK):
                    await asyncio.sleep(SETTLE)

    async def _restore(self, uid: str) -> str:
        """Write the file of a prepared claim if it is not there; return why it could not be written, or ""."""
        async with self._records.locked(uid):
            known = self._records.get(uid)
            prepared = prepared_of(known) if known is not None else None
            if prepared is None or prepared.boot != self.boot:
                return ""
            try:
                if await self.write(uid, prepared):
                    _LOG.warning("%s: the CDI file of claim %s was removed; it is written again", self._driver, uid)
            except cdi.CdiError as error:
                return str(error)
            return ""
