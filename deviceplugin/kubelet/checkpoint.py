"""The device manager's checkpoint: which container of which pod has which device ids, and what these were.

The kubelet writes it on Allocate and on each ListAndWatch update, and when an endpoint is removed (kubelet
1.36, devicemanager/manager.go: allocateContainerResources, genericDeviceUpdateCallback, markResourceUnhealthy).
It names ended pods until the first write after `UpdateAllocatedDevices`, which PodResources `List` calls and which
does nothing before all of the kubelet's pod sources are ready.

The kubelet keeps the answer to Allocate with the allocation (`AllocResp`; devicemanager/checkpoint). An annotation in
it says what the granted devices were. The kubelet merges the annotations of several resources, so each has a key of its
own. Answers without it (of other plugins or of another boot) name host paths of device nodes, which are as good as
their numbers now.
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

from deviceplugin import filewatch, looks
from deviceplugin.files import FileIdentity, file_identity
from deviceplugin.identity import UNIDENTIFIED, Tokens, boot_id, identified, numbers_of
from deviceplugin.looks import Looks, LookTimeoutError
from deviceplugin.naming import NamingError, parse_quantity
from deviceplugin.register.question import Wanted
from deviceplugin.register.records import UNKNOWN, Allocation, Amount
from deviceplugin.wire import deviceplugin_pb2 as pb

FILE_NAME: Final = "kubelet_internal_checkpoint"
REWRITE: Final = 1.0
"""Seconds that the kubelet has to write its checkpoint after it was sent a list; some ms are usual."""
NODE_LOOK: Final = 0.5
"""Seconds that a look at device nodes may take that an answer of another plugin names."""
UNHINTED: Final = 0.2
"""Seconds between two looks for it, should no event come: some file systems make none of what others write."""


class CheckpointError(Exception):
    """Raised when the checkpoint is missing, unreadable or not a checkpoint; nothing is known then."""


@dataclass(frozen=True, slots=True)
class CheckpointVersion:
    """One version of the file. registered: healthy ids by resource. responses: the answers to Allocate, in base64."""

    allocations: frozenset[Allocation]
    registered: Mapping[str, frozenset[str]]
    file: FileIdentity | None = None
    responses: Mapping[Allocation, str] = field(default_factory=dict)


def parse(text: bytes, file: FileIdentity | None = None) -> CheckpointVersion:
    """Read `{"Data": {"PodDeviceEntries": [...], "RegisteredDevices": {...}}, "Checksum": n}`.

    The kubelet replaces the file by renaming, so it is whole. The checksum is a hash of Go values, which only the
    kubelet can compute. Raises CheckpointError: it is not such a file.
    """
    try:
        data = msgspec.json.decode(text)["Data"]
        responses: dict[Allocation, str] = {}
        registered: dict[str, frozenset[str]] = {}
        for entry in data["PodDeviceEntries"] or ():
            holder = str(entry["PodUID"]), str(entry["ContainerName"]), str(entry["ResourceName"])
            response = str(entry.get("AllocResp") or "")
            for ids in (entry["DeviceIDs"] or {}).values():  # by NUMA node
                for name in ids or ():
                    responses[Allocation(*holder, str(name))] = response
        for resource, ids in (data["RegisteredDevices"] or {}).items():
            registered[str(resource)] = frozenset(map(str, ids or ()))
    except (msgspec.DecodeError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"not a device manager checkpoint: {type(error).__name__}: {error}") from error
    return CheckpointVersion(frozenset(responses), registered, file, responses)


def identity(directory: Path) -> FileIdentity | None:
    """Return which version of the checkpoint is in the device plugin directory; None if none can be seen."""
    return file_identity(f"{directory}/{FILE_NAME}")  # each Allocate asks: a Path takes longer to make than to look at


def read(directory: Path) -> CheckpointVersion:
    """Read the checkpoint in the device plugin directory. Raises CheckpointError."""
    path = directory / FILE_NAME
    looks.at(path)
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

    The kubelet composes the contents under its lock, but writes the file without the lock. So an older state can
    replace a newer one (kubelet 1.36, devicemanager/manager.go, writeCheckpoint). Each writer has at most one file in
    progress. The writers are the list of each resource, which the file names, and the node's status (GetCapacity).
    Admissions run one after the other, and each has written its file before the next begins. Containers that start
    after the kubelet lost its checkpoint also write, since they get devices again; they are not counted here.

    written: the different files that were seen since the first request; each was followed by another request.
    """
    resources = {resource for version in written for resource in version.registered}
    return len(written) > len(resources) + 1


# The answers to Allocate in it.


def annotation(resource: str) -> str:
    """Return the annotation's key."""
    return f"{resource}.identity"


def annotate(response: pb.ContainerAllocateResponse, resource: str, devices: Mapping[str, Wanted], boot: str) -> None:
    """Have an answer say what the devices are, and how much of each was granted. devices: by the kubelet's id."""
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
    """Return what a device was by the answer to Allocate, as the checkpoint has it. May block for device nodes.

    Without the annotation of this boot its paths tell what it is: with all devices of the answer, and control nodes.
    How much of it was granted is not known without any annotation. numbers: returns the numbers of those of some paths
    that are device nodes.
    """
    of, devices, paths = _decoded(response, resource)
    wanted = devices.get(device_id, Wanted((resource, ""), UNIDENTIFIED, UNKNOWN))
    return wanted if of == boot else wanted._replace(identity=identified(numbers(paths), boot, sure=False))


def nodes_missing(response: str, resource: str, wanted: Wanted, boot: str) -> bool:
    """Return whether an answer of another boot names device nodes none of which was there when it was `granted`."""
    of, _, paths = _decoded(response, resource)
    return of != boot and bool(paths) and not wanted.identity.tokens


def ours(wanted: Wanted) -> bool:
    """Return whether `granted` found that this framework has given a device."""
    return bool(wanted.key[1])


@functools.lru_cache(maxsize=256)
def _decoded(response: str, resource: str) -> tuple[str, Mapping[str, Wanted], tuple[str, ...]]:
    """Return the boot and the devices of the annotation, and the host paths of device nodes."""
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
"""Made here: msgspec 0.22 crashes if several threads are the first to decode a type."""


# Reading it, and having the kubelet write it.


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
        if identity(self._directory) == last.file and not (nodes and missing):
            return last
        return self.read()

    def read(self) -> CheckpointVersion:
        """Read the file now. Blocks. Raises CheckpointError: it cannot be read."""
        now = read(self._directory)
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
            is_newest = last.file is not None and identity(self._directory) == last.file
            self.known = KnownCheckpoint(last if is_newest else checkpoints[-1], grants, missing)

    async def written(self, patience: float | None = None) -> tuple[Sequence[CheckpointVersion], str]:
        """Return current checkpoints, which the kubelet wrote at our request, or the reason why there are none.

        patience: seconds that the kubelet has to write each, by default REWRITE.
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
        if identity(self._directory) == before:
            return None
        with contextlib.suppress(CheckpointError):
            after = read(self._directory)
            return after if after.file != before else None
        return None
