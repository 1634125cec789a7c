"""The files of prepared claims, their CDI files and our own, and the answers to the kubelet that name CDI devices."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeVar

from deviceplugin import cdi, claim_files
from deviceplugin.backoff import Backoff
from deviceplugin.device import ContainerEdits, DeviceNode, EditConflictError
from deviceplugin.looks import Looks, LookTimeoutError
from deviceplugin.register.records import Claim
from deviceplugin.tasks import ended
from dra_bridge.driver.claim_devices import filed
from dra_bridge.driver.claims import ClaimError
from dra_bridge.driver.evidence import Published
from dra_bridge.driver.records import ClaimRecords, Prepared, PreparedDevice, prepared_of
from dra_bridge.driver.served import RequestDevices

_LOG: Final = logging.getLogger(__name__)
_T = TypeVar("_T")

REST: Final = 60.0
"""Seconds after which it is looked whether there are claims, should no change of the register tell."""
CHECK: Final = 1.0
"""Seconds between two checks for missing files.

A file watch would notice each file that this process itself writes or removes, and its threads then work while the
kubelet waits for the answer to the next Prepare.
"""


class ClaimFiles:
    """The files of one driver's claims.

    looks: at the directory; it has one thread, so that what is done for a claim is done in this order. boot: the node's
    boot; after a reboot devices are set up again. agent: the name of this one.
    """

    def __init__(self, records: ClaimRecords, directory: str, looks: Looks, boot: str, agent: str) -> None:
        self.boot: Final = boot
        self.looks: Final = looks
        self.reading: Final = Looks(directory)
        """Looks that read many files, and so may take long."""
        self._agent = agent
        self._records = records
        self._driver = records.driver
        self._store = cdi.CdiStore(records.driver, directory)
        self._own = claim_files.ClaimFileStore(records.driver, directory)

    async def answer(
        self, claim: Claim, groups: Sequence[RequestDevices], edits: Mapping[str, Sequence[ContainerEdits]]
    ) -> Prepared:
        """Make a claim's answer and its files.

        Raises ClaimError: edits contradict each other; CdiError: a node is not there, or a file cannot be written;
        LookTimeoutError: a node does not answer.
        """
        owners = {
            node.host: group.served.inventory.looks
            for group in groups
            for device, _ in group.members
            for node in device.container_edits.device_nodes
        }
        by_looks: dict[Looks, dict[DeviceNode, None]] = {}
        for node in (node for of in edits.values() for each in of for node in each.device_nodes):
            looks = owners.get(node.host, groups[0].served.inventory.looks)  # else it is of a hook's edits
            by_looks.setdefault(looks, {})[node] = None
        nodes: dict[DeviceNode, Sequence[dict[str, Any]]] = {}
        for looks, own in by_looks.items():
            nodes |= await looks.at("prepare", cdi.described, own, brief=True)
        return await self._at(self._answer, claim, groups, edits, nodes)

    async def _at(self, function: Callable[..., _T], *arguments: object) -> _T:
        """Read or change files; if this task is cancelled meanwhile, raise that when the call has ended, or is overdue.

        The next call for a claim must not work on its file at the same time. Raises CdiError, also where the file
        system does not answer.
        """
        try:
            return await ended(asyncio.ensure_future(self.looks.at("claim file", function, *arguments, brief=True)))
        except LookTimeoutError as error:
            raise cdi.CdiError(str(error)) from error

    def _answer(
        self,
        claim: Claim,
        groups: Sequence[RequestDevices],
        edits: Mapping[str, Sequence[ContainerEdits]],
        nodes: Mapping[DeviceNode, Sequence[dict[str, Any]]],
    ) -> Prepared:
        """Make a claim's answer and its files. Blocks.

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
        data = cdi.encode(cdi.build(self._driver, listed, nodes))
        self._store.write(uid, data)
        return Prepared(tuple(devices), data.decode(), self.boot)

    def _filed(self, claim: Claim) -> bytes:
        return claim_files.encode(filed(claim, self.boot, self._agent))

    async def write(self, claim: Claim) -> bool:
        """Write the files of a claim of the ledger, under the claim's lock; return False if all were there."""
        prepared = prepared_of(claim)
        return await self._at(self._write, claim, prepared.spec if prepared is not None else "")

    def _write(self, claim: Claim, spec: str) -> bool:
        written = self._own.write(claim.uid, self._filed(claim))
        return (bool(spec) and self._store.write(claim.uid, spec.encode())) or written

    async def describe(self, uid: str) -> None:
        """Have a claim's own file, if it is there, say what the ledger says by now. Needs no lock."""
        record = self._records.get(uid)
        if record is not None:
            with contextlib.suppress(cdi.CdiError):  # `write` is called again, and reports it
                await self._at(self._describe, record)

    def _describe(self, record: Claim) -> None:
        if self._own.read(record.uid) is not None:
            self._own.write(record.uid, self._filed(record))

    async def remove(self, uid: str) -> None:
        """Remove a claim's files, under the claim's lock, as far as they are there."""
        await self._at(self._remove, uid)

    def _remove(self, uid: str) -> None:
        self._store.remove(uid)
        self._own.remove(uid)

    async def claims(self) -> frozenset[str]:
        """Return the UIDs of the claims that have a file. Raises LookTimeoutError."""
        return await self.looks.at("claim file", lambda: self._store.list() | self._own.list())

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

        Without its file a container cannot be restarted, and the kubelet prepares a claim only once.
        """
        backoff = Backoff(first=1.0, most=60.0)
        while True:
            changes = self._records.ledger.changes
            count = changes.count
            if not self._records.all():
                await changes.after(count, REST)
                continue
            try:
                missing = await self.looks.at("claim file", self._missing)
                errors = list(filter(None, await asyncio.gather(*map(self._restore, missing))))
            except LookTimeoutError as error:
                errors = [str(error)]
            if errors:
                _LOG.warning("CDI files are missing: %s", errors[0], extra={"driver": self._driver})
                await asyncio.sleep(backoff.next())
            else:
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
