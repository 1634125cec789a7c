"""What the kubelet says is held: its PodResources service and its device manager's checkpoint.

Allocate carries no pod, and there is no Deallocate. Who holds what is put together from two
witnesses. PodResources `List` shows the containers of active pods, but not init containers that
are not sidecars. The checkpoint shows all containers, but lags towards "held": an ended pod's
entries stay until the device manager next writes it. (Kubelet 1.36.3, podresources and
devicemanager.)

`List` makes the device manager rebuild its books, in which the choice of an Allocate in flight
is not written down yet (kubernetes#137534). So nobody calls it here but through `Quiet`.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

import grpc
import grpc.aio

from deviceplugin.wire import podresources_pb2 as pb
from deviceplugin.wire.podresources_pb2_grpc import PodResourcesListerStub

if TYPE_CHECKING:
    from deviceplugin.wire.podresources_pb2_grpc import PodResourcesListerAsyncStub

__all__ = [
    "CheckpointEntry",
    "CheckpointError",
    "ClaimUse",
    "Holder",
    "Holdings",
    "PodResources",
    "PodResourcesError",
    "Quiet",
    "Released",
    "Report",
    "holdings",
    "read_checkpoint",
    "unix_address",
]

CHECKPOINT: Final = "kubelet_internal_checkpoint"
CHANNEL_OPTIONS: Final = (
    # A socket's path otherwise becomes a percent-encoded authority, which Go servers refuse.
    ("grpc.default_authority", "localhost"),
    ("grpc.max_receive_message_length", 64 * 1024 * 1024),
    ("grpc.use_local_subchannel_pool", 1),
)


def unix_address(path: str | Path) -> str:
    """Return gRPC's name of a socket; in it a percent sign begins a character's code (RFC 3986)."""
    return f"unix:{quote(str(path))}"


class PodResourcesError(Exception):
    """Raised when the kubelet's PodResources service cannot be asked."""


class CheckpointError(Exception):
    """Raised when the device manager's checkpoint cannot be read."""


@dataclass(frozen=True, slots=True, order=True)
class Holder:
    """A container that holds devices. The checkpoint knows pods by UID only."""

    namespace: str = ""
    pod: str = ""
    container: str = ""
    uid: str = ""


@dataclass(frozen=True, slots=True)
class ClaimUse:
    """A container's use of a device through a claim; device: its name in its driver's slice."""

    driver: str
    pool: str
    device: str
    claim: str
    holder: Holder


@dataclass(frozen=True, slots=True)
class Report:
    """One answer of `List`: resource -> device id -> the containers that hold it.

    claims: what containers use through claims, those that the scheduler makes for extended
    resources among them (kubelet feature KubeletPodResourcesDynamicResources, on since 1.34).
    """

    held: Mapping[str, Mapping[str, frozenset[Holder]]]
    claims: frozenset[ClaimUse] = frozenset()

    @property
    def containers(self) -> frozenset[tuple[str, str, str]]:
        """(container, resource, device id) of all that is held."""
        return frozenset(
            (holder.container, resource, name)
            for resource, devices in self.held.items()
            for name, holders in devices.items()
            for holder in holders
        )


@dataclass(frozen=True, slots=True)
class CheckpointEntry:
    """One container's devices of one resource, as the device manager wrote them down."""

    pod_uid: str
    container: str
    resource: str
    devices: frozenset[str]


def parse_list(response: pb.ListPodResourcesResponse) -> Report:
    """Turn an answer of `List` into a report."""
    held: dict[str, dict[str, frozenset[Holder]]] = {}
    claims: set[ClaimUse] = set()
    for pod in response.pod_resources:
        for container in pod.containers:
            holder = Holder(pod.namespace, pod.name, container.name)
            for entry in container.devices:
                devices = held.setdefault(entry.resource_name, {})
                for name in entry.device_ids:
                    devices[name] = devices.get(name, frozenset()) | {holder}
            for used in container.dynamic_resources:
                claims.update(
                    ClaimUse(one.driver_name, one.pool_name, one.device_name, used.claim_name, holder)
                    for one in used.claim_resources
                )
    return Report(held, frozenset(claims))


def parse_checkpoint(text: bytes) -> tuple[CheckpointEntry, ...]:
    """Read the device manager's checkpoint: {"Data": {"PodDeviceEntries": [...]}, "Checksum": n}.

    The checksum is the kubelet's own business (a hash of a Go structure); the file is replaced
    by renaming, so it is whole.

    Raises:
        CheckpointError: it is not such a file.

    """
    try:
        entries = json.loads(text)["Data"]["PodDeviceEntries"] or []
        return tuple(_entry(entry) for entry in entries)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"not a device manager checkpoint: {type(error).__name__}: {error}") from error


def _entry(entry: Mapping[str, Any]) -> CheckpointEntry:
    by_numa = entry["DeviceIDs"] or {}
    devices = frozenset(str(name) for names in by_numa.values() for name in names or ())
    return CheckpointEntry(str(entry["PodUID"]), str(entry["ContainerName"]), str(entry["ResourceName"]), devices)


def read_checkpoint(directory: Path) -> tuple[CheckpointEntry, ...]:
    """Read the checkpoint in the device plugin directory; none there means nothing held.

    Raises:
        CheckpointError: it cannot be read or is not such a file.

    """
    try:
        return parse_checkpoint((directory / CHECKPOINT).read_bytes())
    except FileNotFoundError:
        return ()
    except OSError as error:
        raise CheckpointError(f"{directory / CHECKPOINT}: {error.strerror}") from error


@dataclass(frozen=True, slots=True)
class Holdings:
    """Who holds what at one moment, both witnesses heard: resource -> device id -> containers."""

    held: Mapping[str, Mapping[str, frozenset[Holder]]] = field(default_factory=dict)
    listed: frozenset[tuple[str, str, str]] = frozenset()
    """What `List` ever showed of what is still held or written down: (container, resource, id)."""
    claims: frozenset[ClaimUse] = frozenset()
    """What is used through claims, as `List` says (there is no second witness)."""

    def of(self, resource: str) -> Mapping[str, frozenset[Holder]]:
        """Return the holders by device id of one resource."""
        return self.held.get(resource, {})


def holdings(
    report: Report, checkpoint: Iterable[CheckpointEntry], before: Holdings, ended_pods: frozenset[str]
) -> Holdings:
    """Put both witnesses together.

    Args:
        report: what `List` says now.
        checkpoint: what the checkpoint said, read before `List` was asked.
        before: the holdings known so far; tells what `List` has ever shown.
        ended_pods: UIDs in the checkpoint of which is known otherwise that they are gone.

    Returns:
        The holdings now: all of the report, and those entries of the checkpoint on which the
        report has no say, because it never showed them (init containers) and their pod is not
        known to be gone.

    """
    held = {resource: dict(devices) for resource, devices in report.held.items()}
    now = report.containers
    known = before.listed | now
    written: set[tuple[str, str, str]] = set()
    for entry in checkpoint:
        for name in entry.devices:
            key = (entry.container, entry.resource, name)
            written.add(key)
            if key in known or entry.pod_uid in ended_pods:
                continue
            devices = held.setdefault(entry.resource, {})
            holder = Holder(container=entry.container, uid=entry.pod_uid)
            devices[name] = devices.get(name, frozenset()) | {holder}
    return Holdings(held, frozenset(key for key in known if key in now or key in written), report.claims)


def unlisted(now: Holdings) -> frozenset[tuple[str, str, Holder]]:
    """Return what only the checkpoint says: (resource, device id, holder)."""
    return frozenset(
        (resource, name, holder)
        for resource, devices in now.held.items()
        for name, holders in devices.items()
        for holder in holders
        if holder.uid
    )


def double_held(held: Mapping[str, frozenset[Holder]]) -> dict[str, frozenset[Holder]]:
    """Return the devices that two pods hold at once: the kubelet's own mistake (kubernetes#137534).

    Containers of one pod may share a device: an init container hands its devices on.
    """
    return {
        name: holders
        for name, holders in held.items()
        if len({(holder.namespace, holder.pod) for holder in holders if holder.pod}) > 1
    }


WELL_APART: Final = 4.0
"""Seconds between the two looks after which a grant whose pod never shows up counts as released."""


@dataclass(frozen=True, slots=True)
class Released:
    """What is known of one resource's devices in use, and what has just come free.

    in_use: held as of the last look. granted: given out by an own Allocate and not seen held
    yet, with when a look first missed it. free: what came free with this step.
    """

    in_use: frozenset[str] = frozenset()
    granted: Mapping[str, float | None] = field(default_factory=dict)
    free: frozenset[str] = frozenset()

    def grant(self, ids: Iterable[str]) -> Released:
        """Return what is known after an own Allocate gave out these devices."""
        return Released(self.in_use, {**self.granted, **dict.fromkeys(ids)}, self.free)

    def look(self, held: Iterable[str], at: float) -> Released:
        """Return what is known after a look at `at` (monotonic seconds) at who holds what."""
        holds = frozenset(held)
        missed = {name: at if since is None else since for name, since in self.granted.items() if name not in holds}
        lost = frozenset(name for name, since in missed.items() if at - since >= WELL_APART)
        waiting = {name: since for name, since in missed.items() if name not in lost}
        return Released(holds, waiting, (self.in_use - holds - waiting.keys()) | lost)

    @property
    def busy(self) -> frozenset[str]:
        """Devices that somebody holds or may be about to hold."""
        return self.in_use | self.granted.keys()


class Quiet:
    """Keeps `List` away from allocations in flight; one for the whole process."""

    # The kubelet asks for a preference, chooses, and calls Allocate: one conversation of some ms.
    AFTER_PREFERENCE: Final = 0.5
    # After Allocate it writes down what it gave: again some ms.
    AFTER_ALLOCATE: Final = 0.05

    def __init__(self) -> None:
        self._flying = 0
        self._last = -float("inf")
        self._until = -float("inf")
        self._landed = asyncio.Event()
        self._landed.set()

    @contextmanager
    def busy(self, pause: float = AFTER_ALLOCATE) -> Iterator[None]:
        """Mark an own Allocate or GetPreferredAllocation as in flight, and `pause` seconds after it."""
        self._flying += 1
        self._landed.clear()
        try:
            yield
        finally:
            self._flying -= 1
            self._last = time.monotonic()
            self._until = self._last + pause
            if not self._flying:
                self._landed.set()

    def quiet_since(self, moment: float) -> bool:
        """Return whether nothing was in flight from `moment` (monotonic seconds) until now."""
        return not self._flying and self._last < moment

    async def wait(self) -> None:
        """Wait until nothing is in flight and nothing was for a moment."""
        while True:
            await self._landed.wait()
            rest = self._until - time.monotonic()
            if rest <= 0:
                return
            await asyncio.sleep(rest)


class PodResources:
    """The kubelet's PodResources service on its socket; a fresh channel for each call.

    Calls are seconds apart at the least, and a channel that failed for long is slow to recover.
    """

    def __init__(self, socket: Path, timeout: float = 10.0) -> None:
        self.socket = socket
        self._timeout = timeout

    async def list(self) -> Report:
        """Ask who holds what now.

        Raises:
            PodResourcesError: the kubelet cannot be asked.

        """
        async with self._channel() as channel:
            return parse_list(await self._ask(_stub(channel).List(pb.ListPodResourcesRequest(), timeout=self._timeout)))

    async def allocatable(self) -> Mapping[str, frozenset[str]]:
        """Ask which devices the kubelet would give out: resource -> ids of healthy devices.

        Raises:
            PodResourcesError: the kubelet cannot be asked.

        """
        async with self._channel() as channel:
            call = _stub(channel).GetAllocatableResources(pb.AllocatableResourcesRequest(), timeout=self._timeout)
            answer: pb.AllocatableResourcesResponse = await self._ask(call)
        devices: dict[str, set[str]] = {}
        for entry in answer.devices:
            devices.setdefault(entry.resource_name, set()).update(entry.device_ids)
        return {resource: frozenset(names) for resource, names in devices.items()}

    def _channel(self) -> grpc.aio.Channel:
        return grpc.aio.insecure_channel(unix_address(self.socket), options=CHANNEL_OPTIONS)

    async def _ask(self, call: Any) -> Any:
        try:
            return await call
        except grpc.aio.AioRpcError as error:
            raise PodResourcesError(f"{self.socket}: {error.code().name}: {error.details()}") from error


def _stub(channel: grpc.aio.Channel) -> PodResourcesListerAsyncStub:
    return PodResourcesListerStub(channel)  # type: ignore[return-value]


def ended_pods(kubelet_root: Path, uids: Iterable[str]) -> frozenset[str]:
    """Return those pod UIDs whose directory the kubelet has removed; none if that cannot be seen."""
    pods = kubelet_root / "pods"
    if not pods.is_dir():
        return frozenset()
    return frozenset(uid for uid in uids if uid and "/" not in uid and not os.path.isdir(pods / uid))
