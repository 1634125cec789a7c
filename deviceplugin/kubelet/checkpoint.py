"""The device manager's checkpoint: the device ids of each container, and the devices that they stood for.

The kubelet writes it on Allocate and on each ListAndWatch update, and when an endpoint is removed (kubelet 1.36,
devicemanager/manager.go: allocateContainerResources, genericDeviceUpdateCallback, markResourceUnhealthy). It names
ended pods until the first write after `UpdateAllocatedDevices`. PodResources `List` calls that function, which does
nothing before all of the kubelet's pod sources are ready.

The kubelet keeps the answer to Allocate with the allocation (`AllocResp`; devicemanager/checkpoint). An annotation in
it identifies the granted devices. The kubelet merges the annotations of several resources, so each resource has its own
key. Answers without the annotation (of other plugins or of another boot) name host paths of device nodes. The present
numbers of these paths count.
"""

from __future__ import annotations

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

from deviceplugin import filewatch, looked_at
from deviceplugin.files import FileIdentity, file_identity
from deviceplugin.identity import UNIDENTIFIED, Tokens, boot_id, identified, numbers_of
from deviceplugin.looks import Looks, LookTimeoutError
from deviceplugin.naming import NamingError, parse_quantity
from deviceplugin.register.question import Wanted
from deviceplugin.register.records import UNKNOWN, Allocation, Amount
from deviceplugin.wire import deviceplugin_pb2 as pb

FILE_NAME: Final = "kubelet_internal_checkpoint"
REWRITE: Final = 1.0
"""Seconds in which the kubelet should write its checkpoint after it got a list. It usually takes some milliseconds."""
NODE_LOOK: Final = 0.5
"""Seconds for a look at device nodes in another plugin's answer."""
UNHINTED: Final = 0.2
"""Seconds between two looks for a new checkpoint without an event. Some file systems cause no events of other writers.
"""


class CheckpointError(Exception):
    """Raised when the checkpoint is missing, unreadable or not a checkpoint. Then no allocation is known."""


@dataclass(frozen=True, slots=True)
class CheckpointVersion:
    """One version of the file. registered: healthy ids by resource. responses: the answers to Allocate, in base64."""

    allocations: frozenset[Allocation]
    registered: Mapping[str, frozenset[str]]
    file: FileIdentity | None = None
    responses: Mapping[Allocation, str] = field(default_factory=dict)


def parse(text: bytes, file: FileIdentity | None = None) -> CheckpointVersion:
    """Read `{"Data": {"PodDeviceEntries": [...], "RegisteredDevices": {...}}, "Checksum": n}`.

    The kubelet replaces the file by a rename, so it is complete. The checksum is a hash of Go values, which only the
    kubelet can compute. Raises CheckpointError if the text is not a checkpoint.
    """
    try:
        data = msgspec.json.decode(text)["Data"]
        responses: dict[Allocation, str] = {}
        registered: dict[str, frozenset[str]] = {}
        for entry in data["PodDeviceEntries"] or ():
            holder = str(entry["PodUID"]), str(entry["ContainerName"]), str(entry["ResourceName"])
            response = str(entry.get("AllocResp") or "")
            for ids in (entry["DeviceIDs"] or {}).values():  # By NUMA node.
                for name in ids or ():
                    responses[Allocation(*holder, str(name))] = response
        for resource, ids in (data["RegisteredDevices"] or {}).items():
            registered[str(resource)] = frozenset(map(str, ids or ()))
    except (msgspec.DecodeError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"not a device manager checkpoint: {type(error).__name__}: {error}") from error
    return CheckpointVersion(frozenset(responses), registered, file, responses)


def identity(directory: Path) -> FileIdentity | None:
    """Return the identity of the checkpoint file in the device plugin directory; None if it cannot be read."""
    # Each Allocate calls this function, and to construct a Path takes longer than the look.
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
    """Return whether the kubelet composed at least one of these files after the first request.

    The kubelet composes the content under its lock, but writes the file without the lock. So an older state can replace
    a newer one (kubelet 1.36, devicemanager/manager.go, writeCheckpoint). Each writer writes at most one file at a
    time. The writers are the list of each resource, which the file names, and the node's status (GetCapacity).
    Admissions run one after another, and each has written its file before the next begins. Containers that start after
    the kubelet lost its checkpoint also cause writes, because they get devices again; they are not counted here.

    written: the different files that were seen since the first request; each was followed by another request.
    """
    resources = {resource for version in written for resource in version.registered}
    return len(written) > len(resources) + 1


# The answers to Allocate in the checkpoint.


def annotation(resource: str) -> str:
    """Return the key of a resource's annotation."""
    return f"{resource}.identity"


def annotate(response: pb.ContainerAllocateResponse, resource: str, devices: Mapping[str, Wanted], boot: str) -> None:
    """Add the annotation to an answer: the identities and amounts of the granted devices.

    devices: by the kubelet's id.
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
    text = json.dumps({"boot": boot, "devices": by_id}, separators=(",", ":"))
    response.annotations[annotation(resource)] = text


def granted(
    response: str,
    resource: str,
    device_id: str,
    boot: str,
    numbers: Callable[[Iterable[str]], Tokens] = numbers_of,
) -> Wanted:
    """Return a device's identity and amount from the answer to Allocate in the checkpoint. May block for device nodes.

    Without an annotation of this boot, the identity consists of the answer's paths: those of all its devices, and of
    control nodes. Without any annotation, the amount is not known. numbers: returns the device numbers of those paths
    that are device nodes.
    """
    of, devices, paths = _decoded(response, resource)
    wanted = devices.get(device_id, Wanted((resource, ""), UNIDENTIFIED, UNKNOWN))
    return wanted if of == boot else wanted._replace(identity=identified(numbers(paths), boot, sure=False))


def nodes_missing(response: str, resource: str, wanted: Wanted, boot: str) -> bool:
    """Return whether an answer of another boot names device nodes, none of which existed when it was `granted`."""
    of, _, paths = _decoded(response, resource)
    return of != boot and bool(paths) and not wanted.identity.tokens


def ours(wanted: Wanted) -> bool:
    """Return whether this framework has granted the device, by the result of `granted`."""
    return bool(wanted.key[1])


@functools.lru_cache(maxsize=256)
def _decoded(response: str, resource: str) -> tuple[str, Mapping[str, Wanted], tuple[str, ...]]:
    """Return the boot and the devices in the annotation, and the answer's host paths of device nodes."""
    try:
        message = pb.ContainerAllocateResponse.FromString(base64.b64decode(response))
    except (ValueError, DecodeError):
        return "", {}, ()
    paths = tuple(map(attrgetter("host_path"), message.devices))
    devices: dict[str, Wanted] = {}
    try:
        value = _DECODER.decode(message.annotations.get(annotation(resource), ""))
        for name, device in value.devices.items():
            for _, _, quantity in device.takes:
                parse_quantity(quantity)
            amount = Amount(device.part, device.takes, device.scope)
            devices[name] = Wanted((resource, device.device), identified(device.tokens, value.boot), amount)
    except (msgspec.MsgspecError, NamingError):
        return "", {}, paths
    return value.boot, devices, paths


class _GrantedDevice(msgspec.Struct, frozen=True):
    device: str
    tokens: frozenset[str] = frozenset()
    part: str = ""
    takes: tuple[tuple[str, str, str], ...] = ()
    scope: str = ""


class _Annotation(msgspec.Struct, frozen=True):
    boot: str
    devices: dict[str, _GrantedDevice]


_DECODER: Final = msgspec.json.Decoder(_Annotation)
"""It is made here, because msgspec 0.22 crashes if several threads decode a type for the first time."""


# Read the checkpoint, and make the kubelet write it.


class DeviceLists(Protocol):
    """The device lists that this process sends to the kubelet (`deviceplugin.node.agent.Agent`)."""

    def resend(self) -> bool:
        """Send the lists again; return whether the kubelet receives the list of any resource."""

    def adopted(self, resource: str) -> bool:
        """Return whether a vendor's plugin answers Allocate for a resource."""


class KnownCheckpoint(NamedTuple):
    """The facts from the checkpoints that were read.

    last: the newest of these checkpoints. grants: by allocation, the identity and amount of its device, with the answer
    to Allocate that they come from. missing_nodes: allocations of an earlier boot whose device nodes were all missing;
    each reading looks for the nodes again.
    """

    last: CheckpointVersion = CheckpointVersion(frozenset(), {})
    grants: Mapping[Allocation, tuple[str, Wanted]] = {}
    missing_nodes: frozenset[Allocation] = frozenset()


class CheckpointReader:
    """Reads the kubelet's checkpoint, makes the kubelet write it, and keeps the identities of granted devices.

    A device list that is sent again makes the kubelet write the checkpoint (kubelet 1.36, devicemanager/manager.go).
    known: returns the allocations that count as held; the identities of their devices are remembered. Answers of
    adopted resources identify no device, because all of them contain control nodes.

    Several threads read at the same time. The known facts are one value, which only `take` replaces, for one reading
    after another. All other threads see either the former value or the new one.
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
        """Return the numbers of device nodes. Nodes that do not answer are looked at again at the next reading."""
        try:
            return self._node_looks.within(NODE_LOOK, "answer", numbers_of, paths)
        except LookTimeoutError:
            return frozenset()

    def newest(self, *, nodes: bool = False) -> CheckpointVersion:
        """Return the file's present content. It is read only if it has changed. Blocks. Raises CheckpointError.

        nodes: whether to look again for missing device nodes.
        """
        last, _, missing = self.known
        if identity(self._directory) == last.file and not (nodes and missing):
            return last
        return self.read()

    def read(self) -> CheckpointVersion:
        """Read the file now. Blocks. Raises CheckpointError if it cannot be read."""
        now = read(self._directory)
        self.take([now])
        return now

    def take(self, checkpoints: Sequence[CheckpointVersion]) -> None:
        """Store the last of these checkpoints, and the identities of granted devices. May block for device nodes."""
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
            # Another thread may have read a newer checkpoint since.
            is_newest = last.file is not None and identity(self._directory) == last.file
            self.known = KnownCheckpoint(last if is_newest else checkpoints[-1], grants, missing)

    async def written(self, patience: float | None = None) -> tuple[Sequence[CheckpointVersion], str]:
        """Return checkpoints that the kubelet wrote at the agent's request, or the reason why there are none.

        patience: seconds in which the kubelet should write each, by default REWRITE.
        """
        written: list[CheckpointVersion] = []
        last = await self._looks.at("checkpoint", identity, self._directory, brief=True)
        with filewatch.shared().watch([str(self._directory)]) as watch:
            while not shows_present(written):
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
        """Wait until the kubelet has replaced the checkpoint file; None if it does not do so in time."""
        until = time.monotonic() + patience
        while True:
            if (after := await self._looks.at("checkpoint", self._newer, before)) is not None:
                return after
            if (rest := until - time.monotonic()) <= 0:
                return None
            await watch.wait(min(rest, UNHINTED), unwatched=filewatch.SOON)

    def _newer(self, before: FileIdentity | None) -> CheckpointVersion | None:
        """Return the checkpoint if its file is not `before`, and can be read."""
        if identity(self._directory) == before:
            return None
        with contextlib.suppress(CheckpointError):
            after = read(self._directory)
            return after if after.file != before else None
        return None
