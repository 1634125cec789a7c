"""Reads the kubelet's device manager checkpoint: the device ids of each container, and the devices granted for the ids.

The kubelet writes its checkpoint on Allocate, on each ListAndWatch update, and when a plugin disconnects (kubelet 1.36,
devicemanager/manager.go: allocateContainerResources, genericDeviceUpdateCallback, markResourceUnhealthy). The
checkpoint names ended pods until the first write after the kubelet's function `UpdateAllocatedDevices` has run.
PodResources `List` calls this function, which does nothing before all of the kubelet's pod sources are ready.

The checkpoint contains the plugin's AllocateResponse with each allocation (`AllocResp`; devicemanager/checkpoint). The
agent adds an annotation to its responses that identifies the granted devices. The kubelet merges the annotations of
several resources, so each resource has its own annotation key. Responses of other plugins have no such annotation. For
responses of other plugins, and for responses of an earlier boot, the agent reads the present device numbers of the host
paths and CDI devices in the response. The responses of an adopted resource, which a vendor's plugin serves, identify no
device, because all of them contain the same control nodes. They only show which device nodes the containers can open.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import functools
import json
import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Final, NamedTuple, Protocol

import msgspec
from google.protobuf.message import DecodeError

from deviceplugin import cdi_specs, looked_at
from deviceplugin.backoff import Backoff
from deviceplugin.files import FileIdentity, file_identity
from deviceplugin.identity import UNIDENTIFIED, Identity, Tokens, boot_id, identified
from deviceplugin.kubelet.given_devices import GivenDevices
from deviceplugin.kubelet.paths import Paths
from deviceplugin.looks import Looks, LookTimeoutError
from deviceplugin.naming import NamingError, parse_quantity
from deviceplugin.register.question import Wanted
from deviceplugin.register.records import UNKNOWN, Allocation, Amount
from deviceplugin.wire import deviceplugin_pb2 as pb

FILE_NAME: Final = "kubelet_internal_checkpoint"
REWRITE: Final = 1.0
"""Maximum seconds to wait for the kubelet's new checkpoint after a device list was sent. The kubelet usually writes it
within milliseconds."""
NODE_LOOK: Final = 0.5
"""Maximum seconds to wait for a stat of the device nodes that another plugin's AllocateResponse names."""
FIRST_READ: Final = 0.01
"""Maximum seconds from the sending of a device list to the first check for a new checkpoint file."""
LAST_READ: Final = 0.1
"""Maximum seconds between two checks for a new checkpoint file."""


class CheckpointError(Exception):
    """Raised when the checkpoint is missing, unreadable or damaged, so that the kubelet's allocations are unknown."""


@dataclass(frozen=True, slots=True)
class CheckpointVersion:
    """The content of one checkpoint file.

    registered: for each resource, the device ids that the kubelet counts as healthy. file: the identity of the file.
    responses: for each allocation, its AllocateResponse in base64.
    """

    allocations: frozenset[Allocation]
    registered: Mapping[str, frozenset[str]]
    file: FileIdentity | None = None
    responses: Mapping[Allocation, str] = field(default_factory=dict)


def parse(text: bytes, file: FileIdentity | None = None) -> CheckpointVersion:
    """Parse a checkpoint: `{"Data": {"PodDeviceEntries": [...], "RegisteredDevices": {...}}, "Checksum": n}`.

    The kubelet replaces the file by a rename, so a read returns the complete text. The checksum is not verified: it is
    a hash of Go values, which only the kubelet can compute. Raises CheckpointError if the text is not a checkpoint.
    """
    try:
        data = msgspec.json.decode(text)["Data"]
        responses: dict[Allocation, str] = {}
        registered: dict[str, frozenset[str]] = {}
        for entry in data["PodDeviceEntries"] or ():
            holder = str(entry["PodUID"]), str(entry["ContainerName"]), str(entry["ResourceName"])
            response = str(entry.get("AllocResp") or "")
            for ids in (entry["DeviceIDs"] or {}).values():  # The mapping's keys are NUMA nodes.
                for name in ids or ():
                    responses[Allocation(*holder, str(name))] = response
        for resource, ids in (data["RegisteredDevices"] or {}).items():
            registered[str(resource)] = frozenset(map(str, ids or ()))
    except (msgspec.DecodeError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"the file is not a device manager checkpoint: {type(error).__name__}: {error}"
        ) from error
    return CheckpointVersion(frozenset(responses), registered, file, responses)


def identity(directory: Path) -> FileIdentity | None:
    """Return the identity of the checkpoint file in the device plugin directory; None if it cannot be read."""
    # The path is a text, because each Allocate calls this function, and constructing a Path takes longer than the stat.
    return file_identity(f"{directory}/{FILE_NAME}")


def read(directory: Path) -> CheckpointVersion:
    """Read the checkpoint in the device plugin directory. Raises CheckpointError."""
    path = directory / FILE_NAME
    looked_at.at(path)
    try:
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            return parse(file.read(), FileIdentity.of(status))
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error


def shows_present(written: Collection[CheckpointVersion]) -> bool:
    """Return whether the kubelet composed at least one of these checkpoints after the agent's first request.

    The kubelet composes the content under its lock, but writes the file without the lock. So a checkpoint with an older
    state can replace a newer one (kubelet 1.36, devicemanager/manager.go, writeCheckpoint). Each writer writes one file
    at a time, so there are at most as many late writes as writers, and one more file is certainly new. The writers are
    the ListAndWatch handler of each resource that the file names, and the node's status (GetCapacity). A pod admission
    is no late writer, because it has written its file before the next admission begins. If the kubelet has lost its
    checkpoint, it allocates devices to starting containers again, and writes a file each time; these writes are not
    counted here.

    written: the different checkpoint files since the first request. After each file, the agent has requested another.
    """
    resources = {resource for version in written for resource in version.registered}
    return len(written) > len(resources) + 1


# The next functions write and read the annotations of AllocateResponses in the checkpoint.


def annotation(resource: str) -> str:
    """Return the annotation key under which an AllocateResponse identifies the devices of a resource."""
    return f"{resource}.identity"


def annotate(
    response: pb.ContainerAllocateResponse, resource: str, devices: Mapping[str, Wanted], boot: str, since: float
) -> None:
    """Add an annotation with the identities and amounts of the granted devices to an AllocateResponse.

    devices: for each kubelet device id, the granted device. since: the time of the grant (Unix seconds), which
    identifies the grant. The kubelet's checkpoint contains each response with the container that got it.
    """
    by_id: dict[str, object] = {}
    for device_id, wanted in devices.items():
        by_id[device_id] = {
            "device": wanted.key[1],
            "tokens": sorted(wanted.identity.tokens),
            "part": wanted.amount.part,
            "takes": wanted.amount.takes,
            "scope": wanted.amount.scope,
        }
    text = json.dumps({"boot": boot, "since": since, "devices": by_id}, separators=(",", ":"))
    response.annotations[annotation(resource)] = text


def granted(
    response: str,
    resource: str,
    device_id: str,
    boot: str,
    tokens: Callable[[GivenDevices], Tokens] = GivenDevices.tokens,
) -> Wanted:
    """Return a device's identity and amount from the AllocateResponse in the checkpoint.

    Blocks while it stats device nodes. If the response has no annotation of this boot, the identity consists of all
    devices in the response: the devices of all ids of the container, and control nodes. Without any annotation, the
    amount is not known. tokens: a function that returns the present tokens of devices in a response.
    """
    of, devices, message = _decoded(response, resource)
    wanted = devices.get(device_id, Wanted((resource, ""), UNIDENTIFIED, UNKNOWN))
    return (
        wanted
        if of == boot
        else wanted._replace(identity=identified(tokens(GivenDevices.of([message])), boot, sure=False))
    )


def opened(
    response: str, resource: str, boot: str, tokens: Callable[[GivenDevices], Tokens] = GivenDevices.tokens
) -> Wanted:
    """Return the grant in a vendor's AllocateResponse for an adopted resource; only the identity's `reached` is known.

    Blocks while it stats device nodes. tokens: as in `granted`.
    """
    _, _, message = _decoded(response, resource)
    nodes = tokens(given) if any(given := GivenDevices.of([message])) else frozenset[str]()
    return Wanted((resource, ""), Identity(boot, reached=nodes) if nodes else UNIDENTIFIED, UNKNOWN)


def nodes_missing(response: str, resource: str, wanted: Wanted, boot: str) -> bool:
    """Return whether an AllocateResponse of another boot names devices, but `wanted` has none of them.

    For an adopted resource, return whether `wanted` has less tokens than the response has devices.
    """
    of, _, message = _decoded(response, resource)
    if of == boot or wanted.identity.tokens:
        return False
    return len(wanted.identity.reached) < sum(map(len, GivenDevices.of([message])))


def ours(wanted: Wanted) -> bool:
    """Return whether an agent of this framework granted the device. wanted: the result of `granted` for the device."""
    return bool(wanted.key[1])


@functools.lru_cache(maxsize=256)
def _decoded(response: str, resource: str) -> tuple[str, Mapping[str, Wanted], pb.ContainerAllocateResponse]:
    """Return the boot id and the devices in a response's annotation, and the response; an empty one if undecodable."""
    try:
        message = pb.ContainerAllocateResponse.FromString(base64.b64decode(response))
    except (ValueError, DecodeError):
        return "", {}, pb.ContainerAllocateResponse()
    devices: dict[str, Wanted] = {}
    # The nodes of CDI devices are not in the response.
    hosts = map(attrgetter("host_path"), (*message.devices, *message.mounts))
    opened = None if message.cdi_devices else frozenset(hosts)
    try:
        value = _DECODER.decode(message.annotations.get(annotation(resource), ""))
        for name, device in value.devices.items():
            for _, _, quantity in device.takes:
                parse_quantity(quantity)
            amount = Amount(device.part, device.takes, device.scope)
            its = identified(device.tokens, value.boot)
            devices[name] = Wanted((resource, device.device), its, amount, value.since, opened)
    except (msgspec.MsgspecError, NamingError):
        return "", {}, message
    return value.boot, devices, message


class _GrantedDevice(msgspec.Struct, frozen=True):
    device: str
    tokens: frozenset[str] = frozenset()
    part: str = ""
    takes: tuple[tuple[str, str, str], ...] = ()
    scope: str = ""


class _Annotation(msgspec.Struct, frozen=True):
    boot: str
    devices: dict[str, _GrantedDevice]
    since: float = 0.0


_DECODER: Final = msgspec.json.Decoder(_Annotation)
"""The decoder is made at import, because msgspec 0.22 crashes if several threads first use a type at the same time."""


# The next classes make the kubelet write its checkpoint, and read the checkpoint.


class DeviceLists(Protocol):
    """The operations on device lists that a checkpoint reader needs (`deviceplugin.node.agent.Agent` has them)."""

    def resend(self) -> bool:
        """Send all device lists to the kubelet again. Return whether a ListAndWatch stream of any resource is open."""

    def adopted(self, resource: str) -> bool:
        """Return whether a vendor's plugin handles the Allocates of a resource."""


class KnownCheckpoint(NamedTuple):
    """The facts from the read checkpoints that the agent keeps in memory.

    last: the newest checkpoint that was read. grants: for each allocation, the AllocateResponse, and the device's
    identity and amount from it. missing_nodes: the allocations of an earlier boot whose device nodes were all missing;
    each read of the checkpoint checks these nodes again. adopted: the adopted resources among those of `grants`.
    """

    last: CheckpointVersion = CheckpointVersion(frozenset(), {})
    grants: Mapping[Allocation, tuple[str, Wanted]] = {}
    missing_nodes: frozenset[Allocation] = frozenset()
    adopted: frozenset[str] = frozenset()


class CheckpointReader:
    """Reads the kubelet's checkpoint, makes the kubelet write it, and remembers the identities of granted devices.

    The agent makes the kubelet write its checkpoint by sending a device list again (kubelet 1.36,
    devicemanager/manager.go). The argument `known` is a function that returns the allocations that count as held; the
    identities of their devices stay in memory.

    Several threads may read at the same time: the attribute `known` is one immutable value, which only `take` replaces,
    under a lock.
    """

    def __init__(
        self, paths: Paths, lists: DeviceLists, known: Callable[[], Iterable[Allocation]], looks: Looks
    ) -> None:
        self.known = KnownCheckpoint()
        self._taking = threading.Lock()
        self._directory = paths.plugins
        self._cdi_directories = cdi_specs.directories(paths.cdi_dir)
        self._lists = lists
        self._held = known
        self._looks = looks
        self._node_looks = Looks("device nodes in answers of other plugins", threads=2)

    def _tokens(self, given: GivenDevices) -> Tokens:
        """Return the tokens of devices; empty if a read hangs. The next read of the checkpoint repeats this read."""
        try:
            return self._node_looks.within(NODE_LOOK, "answer", given.tokens, self._cdi_directories)
        except LookTimeoutError:
            return frozenset()

    def newest(self, *, nodes: bool = False) -> CheckpointVersion:
        """Return the checkpoint file's present content; read the file only if it has changed. Blocks.

        nodes: whether to stat device nodes again that were missing before. Raises CheckpointError.
        """
        last, missing = self.known.last, self.known.missing_nodes
        if identity(self._directory) == last.file and not (nodes and missing):
            return last
        return self.read()

    def read(self) -> CheckpointVersion:
        """Read the checkpoint file now. Blocks. Raises CheckpointError if the file cannot be read."""
        now = read(self._directory)
        self.take([now])
        return now

    def take(self, checkpoints: Sequence[CheckpointVersion]) -> None:
        """Remember the last of `checkpoints`, and the identities of the granted devices in all of them.

        Blocks while it stats device nodes.
        """
        with self._taking:
            last, before, missing, were_adopted = self.known
            kept = frozenset(self._held()).union(*(version.allocations for version in checkpoints))
            grants = dict(before)
            for allocation in before.keys() - kept:
                del grants[allocation]
            adopted = frozenset(filter(self._lists.adopted, set(map(attrgetter("resource"), kept))))
            again = missing if adopted == were_adopted else kept
            for file in checkpoints:
                for allocation, response in file.responses.items():
                    if grants.get(allocation, ("",))[0] == response and allocation not in again:
                        continue
                    resource, name = allocation[2:]
                    if resource in adopted:
                        grants[allocation] = response, opened(response, resource, boot_id(), self._tokens)
                    else:
                        grants[allocation] = response, granted(response, resource, name, boot_id(), self._tokens)
            missing = frozenset(
                allocation
                for allocation, (response, what) in grants.items()
                if nodes_missing(response, allocation.resource, what, boot_id())
            )
            # Another thread may have stored a newer checkpoint since `known` was read.
            is_newest = last.file is not None and identity(self._directory) == last.file
            self.known = KnownCheckpoint(last if is_newest else checkpoints[-1], grants, missing, adopted)

    async def written(self, patience: float | None = None) -> tuple[Sequence[CheckpointVersion], str]:
        """Request checkpoints from the kubelet until `shows_present` is true for them. Return (checkpoints, "").

        If the kubelet does not write a checkpoint, return ((), the reason). patience: seconds to wait for each
        checkpoint, by default REWRITE.
        """
        written: list[CheckpointVersion] = []
        last = await self._looks.at("checkpoint", identity, self._directory, brief=True)
        while not shows_present(written):
            if not self._lists.resend():
                return (), "the kubelet does not listen to this plugin, so it cannot be asked to write its checkpoint"
            if (after := await self._rewritten(last, REWRITE if patience is None else patience)) is None:
                return (), "the kubelet has not written its checkpoint since it was asked to"
            written.append(after)
            last = after.file
        return written, ""

    async def _rewritten(self, before: FileIdentity | None, patience: float) -> CheckpointVersion | None:
        """Wait for the kubelet's next checkpoint file; return None if there is none after `patience` seconds.

        The kubelet writes the file some milliseconds after it has got a device list. So the file is read again and
        again: file events would wake this process for the kubelet's temporary files as well.
        """
        until, pauses = time.monotonic() + patience, Backoff(first=FIRST_READ, most=LAST_READ)
        while (rest := until - time.monotonic()) > 0:
            await asyncio.sleep(min(rest, pauses.next()))
            if (after := await self._looks.at("checkpoint", self._newer, before, brief=True)) is not None:
                return after
        return None

    def _newer(self, before: FileIdentity | None) -> CheckpointVersion | None:
        """Return the checkpoint if it is readable and its file is not the file `before`; otherwise None."""
        if identity(self._directory) == before:
            return None
        with contextlib.suppress(CheckpointError):
            after = read(self._directory)
            return after if after.file != before else None
        return None
