"""Writes the files of prepared claims (a CDI file and the agent's own file), and makes the responses to Prepare."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, TypeVar

import msgspec

from deviceplugin import cdi
from deviceplugin.backoff import Backoff
from deviceplugin.device import ContainerEdits, DeviceNode, EditConflictError
from deviceplugin.identity import UNIDENTIFIED, Identity
from deviceplugin.looks import TIMEOUT, Looks, LookTimeoutError
from deviceplugin.register import claim_files
from deviceplugin.register.claim_files import ClaimFile, encode
from deviceplugin.register.records import Claim, ClaimDevice
from deviceplugin.tasks import ended
from dra_bridge.driver import cdi_files
from dra_bridge.driver.claim_metadata import ClaimMetadata
from dra_bridge.driver.claims import ClaimError, ClaimRef, Reason
from dra_bridge.driver.evidence import Published
from dra_bridge.driver.records import ClaimRecords, Prepared, PreparedDevice, prepared_of
from dra_bridge.driver.served import RequestDevices

_LOG: Final = logging.getLogger(__name__)
_T = TypeVar("_T")

REST: Final = 60.0
"""Maximum seconds until the driver reads the claims' records again, even if the register has reported no change."""
CHECK: Final = 1.0
"""Seconds between two checks for missing files.

The files are not watched, because a watch would report each file that this process itself writes or removes, so that
its threads would be busy while the kubelet waits for the response to the next Prepare.
"""


class ClaimFiles:
    """The files of one driver's claims.

    looks: one thread that reads and writes the directory, so that the steps for a claim keep their order. boot: the id
    of the node's boot; devices that were set up in an earlier boot are set up again. agent: the name of this agent.
    """

    def __init__(self, records: ClaimRecords, directory: str, looks: Looks, boot: str, agent: str) -> None:
        self.boot: Final = boot
        self.looks: Final = looks
        self.reading: Final = Looks(directory)
        """A separate thread for reads of many files, because such a read may take long."""
        self._agent = agent
        self._records = records
        self._driver = records.driver
        self._store = cdi_files.CdiStore(records.driver, directory)
        self._own = cdi_files.ClaimFileStore(records.driver, directory)
        self._metadata = ClaimMetadata(records.driver, directory)

    async def answer(
        self, ref: ClaimRef, made: Sequence[tuple[RequestDevices, ContainerEdits]], pod_claim: str = ""
    ) -> Prepared:
        """Make the response to a claim's Prepare.

        made: for each request and source, its devices and their container edits. pod_claim: see `ClaimAllocation`.

        For each request there is one CDI device, so that a container gets the edits of each of its requests once. In
        the response, only the request's first device has the CDI device's ID. The ID must not depend on the allocation,
        because the kubelet adds a new response to the response that it has stored (kubelet 1.36, cm/dra/claiminfo.go:
        addDevice), and the runtime does not start a container with an unknown CDI device. The spec has the CDI device
        under a second name as well, which contains the names of the devices as evidence of their holder.

        Raises ClaimError if edits contradict each other, CdiError if a device node is missing or the edits cannot be
        written as CDI, LookTimeoutError if the read of a device node hangs.
        """
        uid, metadata = ref.uid, dict[str, str]()
        requests: dict[str, list[tuple[RequestDevices, ContainerEdits]]] = {}
        wanted: dict[Looks, dict[DeviceNode, None]] = {}
        for group, edits in made:
            requests.setdefault(group.request, []).append((group, edits))
            for node in edits.device_nodes:
                wanted.setdefault(group.served.inventory.looks, {})[node] = None
        nodes: dict[DeviceNode, Sequence[dict[str, Any]]] = {}
        for looks, of_resource in wanted.items():
            nodes |= await looks.at("prepare", cdi.described, of_resource, brief=True)
        listed: dict[str, ContainerEdits] = {}
        devices: list[PreparedDevice] = []
        for request, parts in requests.items():
            merged = parts[0][1]
            if len(parts) > 1:
                try:
                    merged = ContainerEdits.merge([edits for _, edits in parts])
                except EditConflictError as error:
                    raise ClaimError(Reason.CONFLICT, f"request {request!r}: {error}") from error
            if text := self._metadata.text(ref, [group for group, _ in parts], pod_claim):
                metadata[request] = text
                merged = ContainerEdits.merge([merged], winner=self._metadata.mount(ref, request, pod_claim))
            ids = list(merged.cdi)
            if merged.env or merged.nodes or merged.mounts:
                of_request = [group for group, _ in parts]
                holding = [group for group in of_request if not group.admin]
                name = "_".join((cdi.HOLDING if holding else cdi.ADMIN, uid, request))
                names = [result.device for group in holding or of_request for _, result in group.members]
                listed[name] = listed["_".join((name, *dict.fromkeys(names)))] = merged
                ids.insert(0, cdi.qualified(self._driver, name))
            for group, _ in parts:
                for _, result in group.members:
                    share = result.share_id or ""
                    devices.append(PreparedDevice(request, result.pool, result.device, tuple(ids), share))
                    ids = []
        spec = cdi_files.encode(cdi_files.build(self._driver, listed, nodes)).decode() if listed else ""
        return Prepared(tuple(devices), spec, self.boot, metadata)

    async def _at(self, function: Callable[..., _T], *arguments: object) -> _T:
        """Call a function that reads or changes files. If this task is cancelled, first wait until the call has ended.

        The wait, which has a time limit, keeps the next call for the claim from changing the claim's files at the same
        time. Raises CdiError, also if the file system hangs.
        """
        if self.looks.hanging:
            raise cdi.CdiError(self.looks.hanging)
        look = self.looks.begin("claim file", function, *arguments)
        # Usually the access has ended by now, and needs no task.
        if self.looks.ended_at_once(look):
            return look.result
        if why := await ended(asyncio.ensure_future(self.looks.late(look, TIMEOUT))):
            raise cdi.CdiError(why)
        return look.result

    async def write(self, claim: Claim, prepared: Prepared | None) -> bool:
        """Write the files of a claim that is in the ledger file; return False if all files existed already.

        The caller has the claim's lock.

        prepared: the claim's Prepare response; None if it is unknown.
        """
        return await self._at(self._write, claim, prepared)

    def _write(self, claim: Claim, prepared: Prepared | None) -> bool:
        written = self._own.write(claim.uid, encode(filed(claim, self.boot, self._agent)))
        if prepared is None:
            return written
        if prepared.metadata:
            written |= self._metadata.write(claim.uid, prepared.metadata)
        spec = cdi_files.without(prepared.spec, prepared.withheld)
        if not spec:
            return self._store.remove(claim.uid) or written
        return self._store.write(claim.uid, spec.encode()) or written

    async def describe(self, uid: str) -> None:
        """Write the agent's file of a claim again from the ledger file's record. The caller needs no lock.

        Nothing is written if the claim has no such file, or no record in the ledger.
        """
        record = self._records.get(uid)
        if record is not None:
            # If this fails, a later call of `write` fails as well, and reports the error.
            with contextlib.suppress(cdi.CdiError):
                await self._at(self._describe, record)

    def _describe(self, record: Claim) -> None:
        if self._own.read(record.uid) is not None:
            self._own.write(record.uid, encode(filed(record, self.boot, self._agent)))

    async def remove(self, uid: str) -> None:
        """Remove a claim's files, if they exist. The caller has the claim's lock."""
        await self._at(self._remove, uid)

    def _remove(self, uid: str) -> None:
        self._store.remove(uid)
        self._metadata.remove(uid)
        self._own.remove(uid)

    async def claims(self) -> frozenset[str]:
        """Return the UIDs of the claims that have a file. Raises LookTimeoutError."""

        def uids() -> frozenset[str]:
            return self._store.list() | self._own.list() | self._metadata.list().keys()

        return await self.looks.at("claim file", uids)

    def read(self) -> list[ClaimFile]:
        """Return the agent's files of this driver's claims; blocks. Raises OSError if the directory cannot be read."""
        return [file for file in claim_files.read_all(self._store.directory) if file.driver == self._driver]

    def path(self, uid: str) -> str:
        """Return the path of the agent's own file of a claim."""
        return self._own.path(uid)

    def holding(self) -> Iterator[Published]:
        """Yield, for each claim, the devices that the claim holds according to its CDI file; blocks."""
        for uid in self._store.list():
            kinds = (name.split("_") for name in self._store.device_names(uid))
            names = [name for kind, *names in kinds if kind == cdi.HOLDING for name in names[2:]]
            yield Published(uid, tuple((name, None) for name in names))

    async def keep(self) -> None:
        """Restore removed files of claims within seconds, until cancelled.

        Without the CDI file, the claim's containers cannot be restarted, because the kubelet prepares a claim only
        once.
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
        """Return the UIDs of the ledger file's claims for which a file is missing."""
        own, specs, metadata = self._own.list(), self._store.list(), self._metadata.list()

        def complete(claim: Claim) -> bool:
            prepared = prepared_of(claim)
            if prepared is None:
                return claim.uid in own
            has_spec = claim.uid in specs or not cdi_files.without(prepared.spec, prepared.withheld)
            files = metadata.get(claim.uid, set())
            return claim.uid in own and has_spec and prepared.metadata.keys() <= files

        return [claim.uid for claim in self._records.all() if not complete(claim)]

    async def _restore(self, uid: str) -> str:
        """Write the missing files of a claim; return why they could not be written, or ""."""
        async with self._records.locked(uid):
            record = self._records.get(uid)
            prepared = prepared_of(record) if record is not None else None
            if record is None or (prepared is not None and prepared.boot != self.boot):
                return ""
            try:
                if await self.write(record, prepared):
                    extra = {"driver": self._driver, "claim": uid}
                    _LOG.warning("a file of claim %s was removed; it is written again", uid, extra=extra)
            except cdi.CdiError as error:
                return str(error)
            return ""


def filed(claim: Claim, boot: str, agent: str) -> ClaimFile:
    """Return the content of the agent's own file of a claim. agent: the name of this agent."""
    devices: list[ClaimDevice] = []
    for device in claim.devices:
        known = device.identity != UNIDENTIFIED
        devices.append(device if known else msgspec.structs.replace(device, identity=Identity(boot)))
    return ClaimFile(
        driver=claim.driver,
        uid=claim.uid,
        agent=agent,
        namespace=claim.namespace,
        name=claim.name,
        boot=boot,
        pods=claim.pods,
        devices=tuple(devices),
    )
