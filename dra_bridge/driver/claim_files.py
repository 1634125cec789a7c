"""The files of prepared claims, their CDI files and our own, and the answers to the kubelet that name CDI devices."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, TypeVar

from deviceplugin import cdi, claim_files
from deviceplugin.backoff import Backoff
from deviceplugin.device import ContainerEdits, EditConflictError
from deviceplugin.register.records import Claim
from deviceplugin.tasks import in_thread
from dra_bridge.driver.claim_devices import filed
from dra_bridge.driver.claims import ClaimError
from dra_bridge.driver.evidence import Published
from dra_bridge.driver.records import ClaimRecords, Prepared, PreparedDevice, prepared_of
from dra_bridge.driver.served import RequestDevices

_LOG: Final = logging.getLogger(__name__)
_T = TypeVar("_T")

CHECK: Final = 1.0
"""Seconds between two checks for missing files.

A file watch would notice each file that this process itself writes or removes, and its threads then work while the
kubelet waits for the answer to the next Prepare.
"""

_IN_MEMORY: Final = ("/run/", "/var/run/")


class ClaimFiles:
    """The files of one driver's claims.

    boot: the node's boot; after a reboot devices are set up again. agent: the name of this one.
    """

    def __init__(self, records: ClaimRecords, directory: str, boot: str, agent: str) -> None:
        self.boot: Final = boot
        self._agent = agent
        self._records = records
        self._driver = records.driver
        self._store = cdi.CdiStore(records.driver, directory)
        self._own = claim_files.ClaimFileStore(records.driver, directory)
        self._changing = threading.Lock()
        """Held while a claim's own file is removed, or written again without the claim's lock."""
        self._quick = os.path.realpath(directory).startswith(_IN_MEMORY)
        """Whether the files are in memory, so that neither writing nor removing one blocks."""

    async def answer(
        self, claim: Claim, groups: Sequence[RequestDevices], edits: Mapping[str, Sequence[ContainerEdits]]
    ) -> Prepared:
        """Make a claim's answer and its files; in a thread if that may block."""
        nodes = (
            node.host
            for of_request in edits.values()
            for container_edits in of_request
            for node in container_edits.device_nodes
        )
        if self._quick and all(host.startswith("/dev/") for host in nodes):
            return self._answer(claim, groups, edits)
        return await in_thread(self._answer, claim, groups, edits)

    def _answer(
        self, claim: Claim, groups: Sequence[RequestDevices], edits: Mapping[str, Sequence[ContainerEdits]]
    ) -> Prepared:
        """Make a claim's answer and its files. Blocks, also for reading device nodes.

        Each request has a CDI device, so that a container gets the edits of its own requests, and each once.
        The request's first device carries it. It is called the same whatever the claim is allocated: to an answer that
        the kubelet kept it adds the next one (kubelet 1.36, cm/dra/claiminfo.go: addDevice), and a runtime starts no
        container of which it does not know a CDI device. A second name has the devices, as evidence.
        """
        uid = claim.uid
        self._own.write(uid, self._filed(claim))
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
                kind = cdi.ADMIN if all(group.admin for group, _ in members) else cdi.HOLDING
                holds = [result.device for group, result in members if not group.admin or kind == cdi.ADMIN]
                name = "_".join((kind, uid, request))
                listed[name] = listed["_".join((name, *dict.fromkeys(holds)))] = merged
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

    def _filed(self, claim: Claim) -> bytes:
        return claim_files.encode(filed(claim, self.boot, self._agent))

    async def write(self, claim: Claim) -> bool:
        """Write the files of a claim of the ledger, under the claim's lock; return False if all were there."""
        prepared = prepared_of(claim)
        return await in_thread(self._write, claim, prepared.spec if prepared is not None else "")

    def _write(self, claim: Claim, spec: str) -> bool:
        written = self._own.write(claim.uid, self._filed(claim))
        return (bool(spec) and self._store.write(claim.uid, spec.encode())) or written

    async def describe(self, uid: str) -> None:
        """Have a claim's own file, if it is there, say what the ledger says by now. Needs no lock."""
        record = self._records.get(uid)
        if record is not None:
            await self._change(self._describe, record)

    def _describe(self, record: Claim) -> None:
        with self._changing, contextlib.suppress(cdi.CdiError):  # `write` is called again, and reports it
            if self._own.read(record.uid) is not None:
                self._own.write(record.uid, self._filed(record))

    async def remove(self, uid: str) -> None:
        """Remove a claim's files, under the claim's lock, as far as they are there."""
        await self._change(self._remove, uid)

    def _remove(self, uid: str) -> None:
        self._store.remove(uid)
        with self._changing:
            self._own.remove(uid)

    async def _change(self, change: Callable[[_T], None], what: _T) -> None:
        if self._quick:
            change(what)
        else:
            await in_thread(change, what)

    async def claims(self) -> frozenset[str]:
        """Return the UIDs of the claims that have a file."""
        return await in_thread(lambda: self._store.list() | self._own.list())

    def read(self) -> list[claim_files.ClaimFile]:
        """Read the own files of this driver's claims; blocks. Raises OSError: the directory cannot be read."""
        return [file for file in claim_files.read_all(self._store.directory) if file.driver == self._driver]

    def path(self, uid: str) -> str:
        """Return the path of a claim's own file."""
        return self._own.path(uid)

    def holding(self) -> Iterator[Published]:
        """Yield what CDI files say that claims hold; blocks."""
        for uid in self._store.list():
            kinds = (name.split("_") for name in self._store.device_names(uid))
            names = [name for kind, *names in kinds if kind == cdi.HOLDING for name in names[2:]]
            yield Published(uid, tuple((name, None) for name in names))

    async def keep(self) -> None:
        """Write files again soon after they were removed, until cancelled.

        Without its file a container cannot be restarted, and the kubelet prepares a claim only once. Returns when the
        directory was deleted on the host while it is mounted here: this mount shows the deleted one ever after.
        """
        backoff = Backoff(first=1.0, most=60.0)
        while not await in_thread(self._store.deleted):
            missing = await in_thread(self._missing)
            if errors := list(filter(None, await asyncio.gather(*map(self._restore, missing)))):
                _LOG.warning("CDI files are missing: %s", errors[0], extra={"driver": self._driver})
                await asyncio.sleep(backoff.next())
                continue
            backoff.reset()
            await asyncio.sleep(CHECK)

    def _missing(self) -> list[str]:
        """Return the claims of the ledger that lack a file."""
        own, specs = self._own.list(), self._store.list()

        def complete(claim: Claim) -> bool:
            prepared = None if claim.uid in specs else prepared_of(claim)
            return claim.uid in own and not (prepared is not None and prepared.spec)

        return [claim.uid for claim in self._records.all() if not complete(claim)]

    async def _restore(self, uid: str) -> str:
        """Write the files of a claim that are not there; return why they could not be written, or ""."""
        async with self._records.locked(uid):
            record = self._records.get(uid)
            prepared = prepared_of(record) if record is not None else None
            if record is None or (prepared is not None and prepared.boot != self.boot):
                return ""
            try:
                if await self.write(record):
                    extra = {"driver": self._driver, "claim": uid}
                    _LOG.warning("a file of claim %s was removed; it is written again", uid, extra=extra)
            except cdi.CdiError as error:
                return str(error)
            return ""
