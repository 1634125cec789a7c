"""Writes the files of prepared claims: CDI specs for the container runtime, the agent's claim files, device metadata.

The agent renames a complete file into place, but does not sync it to the disk. At each start, the agent writes all
files again from the ledger file. A power failure may have emptied or removed files, and on most nodes /var/run is in
memory, so a reboot removes the files there.

The device metadata (KEP-5304) of a request is in the directory of the agent's claim files
(`deviceplugin.register.claim_files`). The agent writes the metadata before the CDI file that mounts the metadata, and
removes the metadata after this CDI file.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Final, TypeVar

import msgspec

from deviceplugin import cdi, device_metadata, files, looked_at
from deviceplugin.backoff import Backoff
from deviceplugin.cdi import CLASS, DIRECTORY, UID, CdiError, checked_text, described, own_directory, vendor_of
from deviceplugin.device import ContainerEdits, DeviceNode, EditConflictError, Mount
from deviceplugin.identity import UNIDENTIFIED, Identity
from deviceplugin.looks import TIMEOUT, Looks, LookTimeoutError
from deviceplugin.register import claim_files
from deviceplugin.register.claim_files import ClaimFile
from deviceplugin.register.records import Claim, ClaimDevice
from deviceplugin.tasks import ended
from dra_bridge.driver.claim_devices import RequestDevices
from dra_bridge.driver.claims import ClaimError, ClaimRecords, ClaimRef, Prepared, PreparedDevice, Reason, prepared_of
from dra_bridge.driver.evidence import Published

_LOG: Final = logging.getLogger(__name__)
_T = TypeVar("_T")
_NAME: Final = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.:-]*[A-Za-z0-9])?")

REST: Final = 60.0
"""Maximum seconds until the driver reads the claims' records again, even if the register has reported no change."""
CHECK: Final = 1.0
"""Seconds between two checks for missing files.

The files are not watched, because a watch would report each file that this process itself writes or removes. These
reports would keep threads busy while the kubelet waits for the response to the next Prepare.
"""


def build(
    driver: str,
    devices: Mapping[str, ContainerEdits],
    nodes: Mapping[DeviceNode, Sequence[dict[str, Any]]] | None = None,
) -> dict[str, Any]:
    """Return a valid CDI spec with these devices, in the lowest CDI version that has all fields of the spec.

    devices: for the name of each CDI device, its edits, which must not be empty. At least one device is needed.
    Annotations in the edits are not written. nodes: the spec's entries for the edits' device nodes, as `described`
    returns them; None to read the nodes here, which blocks. Raises CdiError if a name, path or environment variable is
    not allowed, or a node is missing on the host.

    `described` resolves the host paths of device nodes, because runtimes refuse a symbolic link (containerd#12060).
    Inside the container, the device node has the path that the edits state. In the edits, the path of a directory
    stands for all device nodes in the directory. If an entry has device numbers, a runtime does not read the host path
    (container-device-interface 1.0, container-edits_unix.go: fillMissingInfo). So a restarted container gets the same
    device number, even if the path then leads to another device.
    """
    if not devices:
        raise CdiError("a CDI spec needs a device")
    listed = []
    for name, edits in devices.items():
        if not _NAME.fullmatch(name):
            raise CdiError(f"{name!r} cannot be the name of a CDI device")
        contents = _edits(edits, described(edits.device_nodes) if nodes is None else nodes)
        if not contents:
            raise CdiError(f"the CDI device {name} would be empty")
        listed.append({"name": name, "containerEdits": contents})
    return {"cdiVersion": version(listed), "kind": f"{vendor_of(driver)}/{CLASS}", "devices": listed}


def encode(spec: Mapping[str, Any]) -> bytes:
    """Return a CDI spec as JSON, the content of its file. Raises CdiError if a text is not Unicode."""
    try:
        return msgspec.json.encode(spec)
    except (UnicodeEncodeError, msgspec.MsgspecError) as error:
        raise CdiError(f"the CDI spec cannot be written as JSON: {error}") from error


def request_of(name: str) -> str:
    """Return the claim's request to which a CDI device belongs. name: the device's name, see `ClaimFiles.answer`."""
    return name.split("_")[2]


def without(spec: str, requests: Collection[str]) -> str:
    """Return a claim's CDI spec without the CDI devices of some requests; "" if no CDI device remains.

    The runtime does not create a container that needs a missing CDI device. The runtime ignores a file without CDI
    devices, or with an empty CDI device.
    """
    if not requests or not spec:
        return spec
    decoded = msgspec.json.decode(spec)
    decoded["devices"] = [device for device in decoded["devices"] if request_of(device["name"]) not in requests]
    return encode(decoded).decode() if decoded["devices"] else ""


def version(devices: list[dict[str, Any]]) -> str:
    """Return the lowest version of the CDI specification that has all the fields of these CDI devices.

    0.3.0 is the first version. 0.5.0 added device nodes with a host path, and names that begin with a digit. This agent
    never writes the additions of 0.4.0, 0.6.0 and 0.7.0 (a mount's type, annotations, dots in the class, RDT, groups).
    """
    newer = any(
        not device["name"][0].isalpha()
        or any("hostPath" in node for node in device["containerEdits"].get("deviceNodes", ()))
        for device in devices
    )
    return "0.5.0" if newer else "0.3.0"


def _edits(edits: ContainerEdits, described: Mapping[DeviceNode, Sequence[dict[str, Any]]]) -> dict[str, Any]:
    contents: dict[str, Any] = {}
    if edits.env:
        if wrong := [name for name in edits.env if "\0" in name]:
            raise CdiError(f"{wrong[0]!r} cannot be the name of an environment variable")
        contents["env"] = [f"{name}={checked_text(value, name)}" for name, value in edits.env.items()]
    if nodes := {inside["path"]: inside for node in edits.device_nodes for inside in described[node]}:
        contents["deviceNodes"] = list(nodes.values())
    if edits.mounts:
        contents["mounts"] = [
            {
                "hostPath": checked_text(mount.host, "a mount"),
                "containerPath": checked_text(mount.container, "a mount"),
                # containerd uses the same options for the mounts of a device plugin (CRI mounts).
                "options": ["rbind", "rprivate", "ro" if mount.readonly else "rw"],
            }
            for mount in edits.mounts
        ]
    return contents


def is_deleted(directory: str) -> bool:
    """Return whether a mounted directory was deleted on the host, so that no file can be created there. Blocks."""
    try:
        return looked_at.stat(directory).st_nlink == 0
    except OSError:
        return False


class CdiStore:
    """The CDI files of one driver's claims. The methods are thread-safe and block.

    Raises CdiError if the driver's name cannot be the name of a CDI vendor.
    """

    SUFFIX: ClassVar = ".json"

    def __init__(self, driver: str, directory: str = DIRECTORY) -> None:
        self.directory: Final = directory
        self._prefix = f"{vendor_of(driver)}-{CLASS}_"
        self._run: Final = os.urandom(8).hex()
        """A random text in the names of this store's drafts (temporary files). A draft without this text is from an
        agent that crashed."""

    def path(self, uid: str) -> str:
        """Return the path of a claim's file. Raises CdiError if `uid` is not the UID of a claim."""
        if not UID.fullmatch(uid):
            raise CdiError(f"{uid!r} is not the UID of a claim")
        return os.path.join(self.directory, f"{self._prefix}{uid}{self.SUFFIX}")

    def write(self, uid: str, data: bytes) -> bool:
        """Write a claim's file atomically; return False if it has these bytes already. Raises CdiError."""
        path = self.path(uid)
        # Runtimes read only *.json and *.yaml, and no file whose name begins with a dot. The temporary file is in the
        # same directory, because containerd notices a rename within the directory, but not one from another directory.
        draft = os.path.join(self.directory, f".{self._prefix}{uid}.{self._run}.{os.urandom(8).hex()}")
        try:
            return files.put_changed(path, data, draft, 0o644)
        except OSError as error:
            raise CdiError(f"cannot write {path}: {error.strerror}") from error

    def read(self, uid: str) -> bytes | None:
        """Return the bytes of a claim's file, None if the file cannot be read."""
        try:
            with open(self.path(uid), "rb") as file:
                return file.read()
        except OSError:
            return None

    def remove(self, uid: str) -> bool:
        """Remove a claim's file; return False if there was no file. Raises CdiError if the file cannot be removed."""
        path = self.path(uid)
        looked_at.at(path)
        try:
            os.remove(path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError as error:
            raise CdiError(f"cannot remove {path}: {error.strerror}") from error
        return True

    def list(self) -> frozenset[str]:
        """Return the UIDs of the claims that have a file. Also removes the drafts that a crash has left."""
        looked_at.at(self.directory)
        try:
            names = os.listdir(self.directory)
        except OSError:
            return frozenset()
        uids = set()
        for name in names:
            if name.startswith(f".{self._prefix}") and f".{self._run}." not in name:
                with contextlib.suppress(OSError):
                    os.remove(os.path.join(self.directory, name))
            elif name.startswith(self._prefix) and name.endswith(self.SUFFIX):
                uid = name[len(self._prefix) : -len(self.SUFFIX)]
                if UID.fullmatch(uid):
                    uids.add(uid)
        return frozenset(uids)

    def device_names(self, uid: str) -> tuple[str, ...]:
        """Return the names of the CDI devices in a claim's file; an empty result if the file cannot be read."""
        try:
            return tuple(str(device["name"]) for device in msgspec.json.decode(self.read(uid) or b"")["devices"])
        except (msgspec.DecodeError, LookupError, TypeError):
            return ()


class ClaimFileStore(CdiStore):
    """The agent's claim files (`ClaimFile`) of one driver's claims, in a directory below the directory of CDI specs."""

    SUFFIX = claim_files.SUFFIX

    def __init__(self, driver: str, directory: str = DIRECTORY) -> None:
        super().__init__(driver, own_directory(directory))
        self._prefix = f"{driver}_"


class ClaimMetadata:
    """The metadata files of one driver's claims. directory: the directory of CDI specs."""

    def __init__(self, driver: str, directory: str) -> None:
        self._driver = driver
        self._directory = own_directory(directory)
        self._file: Final = re.compile(
            rf"{re.escape(driver)}_(?P<uid>{UID.pattern})_(?P<request>[a-z0-9-]+)\.metadata(\.[0-9a-f]+)?"
        )

    def path(self, uid: str, request: str) -> str:
        """Return the path of a request's file on the host."""
        return f"{self._directory}/{self._driver}_{uid}_{request}.metadata"

    def text(self, ref: ClaimRef, groups: Sequence[RequestDevices], pod_claim: str) -> str:
        """Return the content of a request's metadata file; "" if no resource of the request's devices has metadata."""
        devices, name = dict[str, device_metadata.Described](), ""
        for group in groups:
            for device, result in group.members if group.served.source.metadata else ():
                attributes = device_metadata.described(group.served.source.resource, device)
                one = {"driver": self._driver, "pool": result.pool, "name": result.device, "attributes": attributes}
                devices[result.device], name = one, result.request
        if not devices:
            return ""
        about = {"name": ref.name, "namespace": ref.namespace, "uid": ref.uid}
        return device_metadata.stream(about, name, list(devices.values()), pod_claim).decode()

    def mount(self, ref: ClaimRef, request: str, pod_claim: str) -> ContainerEdits:
        """Return the container edits that mount a request's metadata file."""
        inside = device_metadata.claim_path(self._driver, ref.name, request, pod_claim)
        return ContainerEdits(mounts=[Mount(self.path(ref.uid, request), inside, readonly=True)])

    def write(self, uid: str, texts: Mapping[str, str]) -> bool:
        """Write a claim's metadata files; return whether a file was missing before. Blocks. Raises CdiError.

        texts: for each request, the content of its metadata file.
        """
        written = False
        for request, text in texts.items():
            try:
                written |= device_metadata.write(self.path(uid, request), text.encode())
            except OSError as error:
                raise CdiError(f"cannot write {self.path(uid, request)}: {error.strerror}") from error
        return written

    def remove(self, uid: str) -> None:
        """Remove a claim's metadata files, if they exist. Blocks. Raises CdiError."""
        for name, of in self._names().items():
            if of[0] == uid:
                try:
                    with contextlib.suppress(FileNotFoundError):
                        os.remove(f"{self._directory}/{name}")
                except OSError as error:
                    raise CdiError(f"cannot remove {self._directory}/{name}: {error.strerror}") from error

    def list(self) -> dict[str, set[str]]:
        """Return, for each claim UID, the requests that have a metadata file. Blocks."""
        found: dict[str, set[str]] = {}
        for uid, request in self._names().values():
            found.setdefault(uid, set()).add(request)
        return found

    def _names(self) -> dict[str, tuple[str, str]]:
        """Return, for the name of each metadata file or draft (left by a crash), the claim's UID and the request."""
        try:
            names = os.listdir(self._directory)
        except OSError:
            return {}
        return {name: (match["uid"], match["request"]) for name in names if (match := self._file.fullmatch(name))}


class ClaimFiles:
    """The files of one driver's claims.

    looks: one thread that reads and writes the directory, so that operations on a claim's files keep their order. boot:
    the id of the node's boot; devices that were set up in an earlier boot are set up again. agent: the name of this
    agent.
    """

    def __init__(self, records: ClaimRecords, directory: str, looks: Looks, boot: str, agent: str) -> None:
        self.boot: Final = boot
        self.looks: Final = looks
        self.reading: Final = Looks(directory)
        """A separate thread for reads of many files, because such a read may take long."""
        self._agent = agent
        self._records = records
        self._driver = records.driver
        self._store = CdiStore(records.driver, directory)
        self._own = ClaimFileStore(records.driver, directory)
        self._metadata = ClaimMetadata(records.driver, directory)

    async def answer(
        self, ref: ClaimRef, made: Sequence[tuple[RequestDevices, ContainerEdits]], pod_claim: str = ""
    ) -> Prepared:
        """Make the response to a claim's Prepare.

        made: for each request and source, the request's devices from this source, and the container edits for these
        devices. pod_claim: see `ClaimAllocation`.

        For each request there is one CDI device, so that a container gets the edits of each of its requests once. In
        the response, only the request's first device has the CDI device's ID. The ID must not depend on the allocation,
        because the kubelet adds a new response to the response that it has stored (kubelet 1.36, cm/dra/claiminfo.go:
        addDevice), and the runtime does not start a container with an unknown CDI device. The spec also has the CDI
        device under a second name. This name contains the names of the devices, so that the file is evidence of the
        devices that the claim holds.

        Raises ClaimError if edits contradict each other, CdiError if a device node is missing or the edits cannot be
        written as CDI, LookTimeoutError if the read of a device node hangs.
        """
        uid, metadata = ref.uid, dict[str, str]()
        requests: dict[str, tuple[list[RequestDevices], list[ContainerEdits]]] = {}
        wanted: dict[Looks, dict[DeviceNode, None]] = {}
        for group, edits in made:
            of_request, parts = requests.setdefault(group.request, ([], []))
            of_request.append(group)
            parts.append(edits)
            for node in edits.device_nodes:
                wanted.setdefault(group.served.inventory.looks, {})[node] = None
        nodes: dict[DeviceNode, Sequence[dict[str, Any]]] = {}
        for looks, of_resource in wanted.items():
            nodes |= await looks.at("prepare", described, of_resource, brief=True)
        listed: dict[str, ContainerEdits] = {}
        devices: list[PreparedDevice] = []
        for request, (of_request, parts) in requests.items():
            merged = parts[0]
            if len(parts) > 1:
                try:
                    merged = ContainerEdits.merge(parts)
                except EditConflictError as error:
                    raise ClaimError(Reason.CONFLICT, f"request {request!r}: {error}") from error
            if text := self._metadata.text(ref, of_request, pod_claim):
                metadata[request] = text
                merged = ContainerEdits.merge([merged], winner=self._metadata.mount(ref, request, pod_claim))
            ids = list(merged.cdi)
            if merged.env or merged.nodes or merged.mounts:
                holding = [group for group in of_request if not group.admin]
                name = "_".join((cdi.HOLDING if holding else cdi.ADMIN, uid, request))
                names = [result.device for group in holding or of_request for _, result in group.members]
                listed[name] = listed["_".join((name, *dict.fromkeys(names)))] = merged
                ids.insert(0, cdi.qualified(self._driver, name))
            for group in of_request:
                for _, result in group.members:
                    share = result.share_id or ""
                    devices.append(PreparedDevice(request, result.pool, result.device, tuple(ids), share))
                    ids = []
        spec = encode(build(self._driver, listed, nodes)).decode() if listed else ""
        return Prepared(tuple(devices), spec, self.boot, metadata)

    async def _at(self, function: Callable[..., _T], *arguments: object) -> _T:
        """Call a function that reads or changes files, and return its result.

        If the calling task is cancelled, the cancellation takes effect only after the call has ended, or after
        `TIMEOUT` seconds. Otherwise the next call for the claim could change the claim's files at the same time. Raises
        CdiError, also if the file system hangs.
        """
        if self.looks.hanging:
            raise CdiError(self.looks.hanging)
        look = self.looks.begin("claim file", function, *arguments)
        # Usually the call has ended by now, and no task is needed to wait for it.
        if self.looks.ended_at_once(look):
            return look.result
        if why := await ended(asyncio.ensure_future(self.looks.late(look, TIMEOUT))):
            raise CdiError(why)
        return look.result

    async def write(self, claim: Claim, prepared: Prepared | None) -> bool:
        """Write the files of a claim that is in the ledger file; return False if all files existed already.

        The caller has the claim's lock.

        prepared: the claim's Prepare response; None if it is unknown.
        """
        return await self._at(self._write, claim, prepared)

    def _write(self, claim: Claim, prepared: Prepared | None) -> bool:
        written = self._own.write(claim.uid, claim_files.encode(filed(claim, self.boot, self._agent)))
        if prepared is None:
            return written
        if prepared.metadata:
            written |= self._metadata.write(claim.uid, prepared.metadata)
        spec = without(prepared.spec, prepared.withheld)
        if not spec:
            return self._store.remove(claim.uid) or written
        return self._store.write(claim.uid, spec.encode()) or written

    async def describe(self, uid: str) -> None:
        """Write the agent's file of a claim again from the ledger file's record. The caller needs no lock.

        Nothing is written if the claim has no such file, or no record in the ledger.
        """
        record = self._records.get(uid)
        if record is not None:
            # An error is not reported here, because a later call of `write` fails as well and reports it.
            with contextlib.suppress(CdiError):
                await self._at(self._describe, record)

    def _describe(self, record: Claim) -> None:
        if self._own.read(record.uid) is not None:
            self._own.write(record.uid, claim_files.encode(filed(record, self.boot, self._agent)))

    async def remove(self, uid: str) -> None:
        """Remove a claim's files, if they exist. The caller has the claim's lock."""
        await self._at(self._remove, uid)

    def _remove(self, uid: str) -> None:
        self._store.remove(uid)
        self._metadata.remove(uid)
        self._own.remove(uid)

    async def claims(self) -> frozenset[str]:
        """Return the UIDs of the claims that have a file. Raises LookTimeoutError if the file system hangs."""

        def uids() -> frozenset[str]:
            return self._store.list() | self._own.list() | self._metadata.list().keys()

        return await self.looks.at("claim file", uids)

    def read(self) -> list[ClaimFile]:
        """Return the agent's files of this driver's claims; blocks. Raises OSError if the directory cannot be read."""
        return [file for file in claim_files.read_all(self._own.directory) if file.driver == self._driver]

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
        """Return the UIDs of the claims in the ledger file that lack one of their files."""
        own, specs, metadata = self._own.list(), self._store.list(), self._metadata.list()

        def complete(claim: Claim) -> bool:
            prepared = prepared_of(claim)
            if prepared is None:
                return claim.uid in own
            has_spec = claim.uid in specs or not without(prepared.spec, prepared.withheld)
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
            except CdiError as error:
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
