"""The claims' door of one DRA driver: prepare and unprepare, for the kubelet's v1 and v1beta1.

One implementation (`Driver`), two thin adapters (`add_to_server`). A claim's way through
`prepare`: fetch it, check that it is the one meant and allocated here, find its devices, decode
its parameters, ask the ledger (R2), call the source's hooks, write the CDI file, record, answer.
Everything that is only looking and deciding is a pure function above the class.

Order and crashes. The ledger's record comes last and carries the whole answer and the CDI spec:
what is in it was set up completely, and a restart answers the same and can write the file again.
Before the hooks the devices are reserved, on disk if the source has a `prepare` hook (its traces
must be undone after a crash), else in memory. So a claim costs one fsync, with such a hook two,
and an unprepare one. Unprepare works in the opposite order: hook, file, record.

A late Prepare leaves nothing behind (nvidia k8s-dra-driver-gpu#1162): calls for one claim wait
for each other, an Unprepare ends the Prepares of its claim that are still under way, and a Prepare
for a claim that is gone, deallocated or reserved for no pod is refused.

A container that is given several requests of one driver gets the edits of each; where they speak
of the same variable, the runtime takes the last. The kubelet does not tell a driver which
container wants what, so this cannot be settled here as the plugin door does.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import re
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any, Final, NamedTuple, Protocol, TypeVar

import grpc
import grpc.aio
import msgspec

from deviceplugin import cdi, filewatch, hooks, naming
from deviceplugin.device import ContainerEdits, Device, EditConflictError, Health
from deviceplugin.identity import boot_id
from deviceplugin.inventory import GONE, Inventory
from deviceplugin.kubelet import holders
from deviceplugin.kubelet.cgroups import PodProcesses
from deviceplugin.kubelet.claim_state import ClaimStateError, PreparedClaim
from deviceplugin.kubelet.exclusion_guard import ConflictError, ExclusionGuard
from deviceplugin.kubelet.orphaned_claims import only_seen
from deviceplugin.kubelet.registration import Backoff
from deviceplugin.source import DeviceSource
from dra_bridge import ledger
from dra_bridge.kube import client as cluster
from dra_bridge.ledger import AsyncLedger, Claim, ClaimDevice, ClaimEvidence, LedgerError, Refused
from dra_bridge.wire import (
    dra_v1_pb2,
    dra_v1_pb2_grpc,
    dra_v1beta1_pb2,
    dra_v1beta1_pb2_grpc,
)

__all__ = [
    "Allocation",
    "ClaimError",
    "ClaimRef",
    "Claims",
    "ClusterClaims",
    "Driver",
    "Prepared",
    "PreparedDevice",
    "Reconciled",
    "RunningPods",
    "Served",
    "Statistics",
    "add_to_server",
    "decoded_config",
    "parse_allocation",
]

_LOG: Final = logging.getLogger(__name__)
_T = TypeVar("_T")

DEADLINE: Final = 30.0
"""Seconds for one claim; the kubelet gives a call 45 (kubelet 1.36, cm/dra/plugin)."""

PATIENCE: Final = 40.0
"""Seconds for a call: also for what undoes a claim that failed at its deadline, whose hooks may hang, too."""

LOOK: Final = 30.0
"""Seconds between two looks for missing CDI files, should every hint be lost."""

SETTLE: Final = 0.5
"""Seconds from a hint that CDI files changed to the look for missing ones; many hints make one look."""

_UID: Final = re.compile(r"[A-Za-z0-9]([A-Za-z0-9-]{0,62}[A-Za-z0-9])?")
_SUBDOMAIN: Final = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
_MAX_MESSAGE: Final = 1000
_PLACE: Final = re.compile(r"`\$\.([^`.\[]+)")
"""How msgspec names a field: at `$.field`."""


class ClaimError(Exception):
    """Raised when a claim cannot be prepared or unprepared; the text is for `kubectl describe pod`.

    reason: one word, for counting.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class ClaimRef(NamedTuple):
    """What the kubelet says of a claim."""

    namespace: str
    name: str
    uid: str

    @property
    def title(self) -> str:
        """Namespace and name, for messages."""
        return f"{self.namespace}/{self.name}"


class Claims(Protocol):
    """What a driver needs of the API server."""

    async def get_claim(self, namespace: str, name: str) -> Mapping[str, Any] | None:
        """Return a ResourceClaim as the API server has it now, None if there is none.

        Raises whatever it likes where that cannot be learned; the claim gets it as its error.
        """

    async def set_devices(self, claim: ClaimRef, driver: str, devices: Sequence[Mapping[str, Any]]) -> None:
        """Write this driver's entries of the claim's `status.devices`; others' stay. Best effort."""

    async def claim_event(self, claim: ClaimRef, reason: str, message: str) -> None:
        """Write a warning Event about the claim. Best effort."""


class ClusterClaims:
    """`Claims` by way of the API client. node: this node's name, for events."""

    def __init__(self, api: cluster.Cluster, node: str) -> None:
        self._api = api
        self._node = node
        self._status_refused = ""

    async def get_claim(self, namespace: str, name: str) -> Mapping[str, Any] | None:
        """Return a ResourceClaim, None if there is none."""
        try:
            return await self._api.get(cluster.RESOURCE_CLAIMS, name, namespace)
        except cluster.NotFoundError:
            return None

    async def set_devices(self, claim: ClaimRef, driver: str, devices: Sequence[Mapping[str, Any]]) -> None:
        """Write this driver's entries of `status.devices`, until the server drops or refuses them."""
        if self._status_refused:
            return
        for _ in range(3):
            now = await self.get_claim(claim.namespace, claim.name)
            if now is None or now["metadata"]["uid"] != claim.uid:
                return
            others = [entry for entry in now.get("status", {}).get("devices") or () if entry["driver"] != driver]
            patch = {
                "metadata": {"uid": claim.uid, "resourceVersion": now["metadata"]["resourceVersion"]},
                "status": {"devices": [*others, *devices]},
            }
            try:
                made = await self._api.patch_status(cluster.RESOURCE_CLAIMS, claim.name, patch, claim.namespace)
            except cluster.ConflictError:
                continue
            except cluster.ForbiddenError as error:
                self._refused(str(error))
            else:
                if not (made.get("status") or {}).get("devices"):
                    self._refused("the server drops them (DRAResourceClaimDeviceStatus is off)")
            return

    def _refused(self, why: str) -> None:
        self._status_refused = why
        _LOG.info("claims get no conditions in status.devices from here on: %s", why)

    async def claim_event(self, claim: ClaimRef, reason: str, message: str) -> None:
        """Write a warning Event about the claim."""
        regarding = {
            "apiVersion": await self._api.api_version(cluster.RESOURCE_CLAIMS),
            "kind": "ResourceClaim",
            "metadata": {"namespace": claim.namespace, "name": claim.name, "uid": claim.uid},
        }
        await self._api.event(regarding, reason, message, node=self._node)


class Served(NamedTuple):
    """One resource that the driver serves: who makes its devices, and the live set of them."""

    source: DeviceSource
    inventory: Inventory


class RunningPods(NamedTuple):
    """The pods whose processes run, by UID.

    unlisted: those of which it is not known which claims they use. The kubelet did not list them when their processes
    were seen to run, and it forgets the claims of a pod that was deleted by force.
    """

    running: frozenset[str] = frozenset()
    unlisted: frozenset[str] = frozenset()


async def _no_pods() -> RunningPods:
    return RunningPods()


class PreparedDevice(msgspec.Struct, frozen=True, omit_defaults=True):
    """One device of an answer to the kubelet. request: without the subrequest."""

    request: str
    pool: str
    device: str
    cdi_ids: tuple[str, ...] = ()
    share: str = ""


class Prepared(msgspec.Struct, frozen=True, omit_defaults=True):
    """A claim's answer as the ledger keeps it. spec: the CDI file's text, "" if there is none to write."""

    devices: tuple[PreparedDevice, ...]
    spec: str = ""
    boot: str = ""


@dataclass(frozen=True, slots=True)
class Statistics:
    """What a driver has done so far; counters only grow. Seconds are sums over finished claims."""

    prepared: int = 0
    prepared_again: int = 0
    prepare_failures: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    prepare_seconds: float = 0.0
    unprepared: int = 0
    unprepare_failures: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    unprepare_seconds: float = 0.0
    hook_seconds: float = 0.0
    api_seconds: float = 0.0
    in_flight: int = 0


@dataclass(frozen=True, slots=True)
class Reconciled:
    """What a look at the API server led to, by claim UID (files: by claim UID, too).

    unknown: could not be asked about; they stay as they are.
    """

    unprepared: tuple[str, ...] = ()
    reopened: tuple[str, ...] = ()
    rewritten: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()


# ---------------------------------------------------------------- looking at a claim, pure


class _Meta(msgspec.Struct):
    uid: str = ""
    name: str = ""


class Result(msgspec.Struct, frozen=True, rename="camel"):
    """One allocated device (resource.k8s.io, DeviceRequestAllocationResult; the same in v1beta1 to v1)."""

    request: str
    driver: str
    pool: str
    device: str
    admin_access: bool | None = None
    share_id: str | None = msgspec.field(default=None, name="shareID")
    tolerations: list[dict[str, Any]] | None = None


class _Opaque(msgspec.Struct, frozen=True):
    driver: str
    parameters: Any = None


class Config(msgspec.Struct, frozen=True):
    """One piece of configuration (resource.k8s.io, DeviceAllocationConfiguration)."""

    source: str = ""
    requests: list[str] | None = None
    opaque: _Opaque | None = None


class _Devices(msgspec.Struct):
    results: list[Result] | None = None
    config: list[Config] | None = None


class _Allocation(msgspec.Struct):
    devices: _Devices | None = None


class _User(msgspec.Struct, rename="camel"):
    resource: str = ""
    uid: str = ""
    api_group: str = ""


class _Status(msgspec.Struct, rename="camel"):
    allocation: _Allocation | None = None
    reserved_for: list[_User] | None = None


class _Claim(msgspec.Struct):
    metadata: _Meta
    status: _Status | None = None


@dataclass(frozen=True, slots=True)
class Allocation:
    """What a claim has of one driver on one node.

    config: this driver's only, class before claim. reserved: for a pod or something else. pods: UIDs of these pods.
    """

    results: tuple[Result, ...]
    config: tuple[Config, ...]
    reserved: bool
    pods: frozenset[str] = frozenset()


def parse_allocation(claim: Mapping[str, Any] | None, ref: ClaimRef, driver: str, pool: str) -> Allocation:
    """Return what the claim has of this driver on this node.

    Raises:
        ClaimError: it is gone, another one, not allocated, or allocated elsewhere.

    """
    if claim is None:
        raise ClaimError("gone", f"claim {ref.title} does not exist any more")
    try:
        parsed = msgspec.convert(claim, _Claim)
    except msgspec.ValidationError as error:
        raise ClaimError("malformed", f"claim {ref.title} is not understood: {error}") from error
    if parsed.metadata.uid != ref.uid:
        raise ClaimError(
            "replaced", f"claim {ref.title} is another one by now: its UID is {parsed.metadata.uid}, not {ref.uid}"
        )
    allocation = parsed.status.allocation if parsed.status else None
    if allocation is None or parsed.status is None:
        raise ClaimError("unallocated", f"claim {ref.title} is not allocated")
    devices = allocation.devices or _Devices()
    results = tuple(result for result in devices.results or () if result.driver == driver)
    if not results:
        raise ClaimError("foreign", f"the allocation of claim {ref.title} names no device of driver {driver}")
    for result in results:
        if result.pool != pool:
            raise ClaimError(
                "foreign",
                f"device {result.device!r} of request {result.request!r} is in pool {result.pool!r}, "
                f"this node's is {pool!r}",
            )
    ours = [config for config in devices.config or () if config.opaque is not None and config.opaque.driver == driver]
    # Within each of the two the API server keeps the author's order.
    ordered = sorted(ours, key=lambda config: config.source != "FromClass")
    users = parsed.status.reserved_for or ()
    pods = frozenset(user.uid for user in users if user.resource == "pods" and not user.api_group and user.uid)
    return Allocation(results, tuple(ordered), bool(users), pods)


def decoded_config(config_type: type[_T] | None, config: Sequence[Config], request: str) -> _T | None:
    """Return the parameters of one request, decoded strictly.

    Objects are laid over each other, fields of the claim over fields of the class. `apiVersion`
    and `kind` may be there or not; any other field that the type does not know is an error.

    Args:
        config_type: the author's type, None if the driver takes no parameters.
        config: this driver's, class before claim.
        request: the request as the allocation names it, with its subrequest ("gpu/big").

    Raises:
        ClaimError: an unknown field, a wrong type, a value that is refused, or no parameters at
            all where some are needed. The message names the field.

    """
    main = request.partition("/")[0]
    merged: dict[str, Any] = {}
    origin = "no parameters"
    origins: dict[str, str] = {}
    for piece in config:
        if piece.requests and request not in piece.requests and main not in piece.requests:
            continue
        origin = "parameters of the class" if piece.source == "FromClass" else "parameters of the claim"
        parameters = piece.opaque.parameters if piece.opaque else None
        if config_type is None:
            raise ClaimError("config", f"request {request!r}: {origin}: this driver takes none")
        if not isinstance(parameters, Mapping):
            raise ClaimError("config", f"request {request!r}: {origin} must be an object, not {parameters!r:.60}")
        merged.update(parameters)
        origins.update(dict.fromkeys(parameters, origin))
        _convert(config_type, parameters, request, origin, partly=True)
    if config_type is None:
        return None
    converted: _T = _convert(config_type, merged, request, origin, origins)
    return converted


def _convert(
    config_type: Any,
    value: Mapping[str, Any],
    request: str,
    origin: str,
    origins: Mapping[str, str] = MappingProxyType({}),
    *,
    partly: bool = False,
) -> Any:
    """Convert parameters, or only see whether all fields are known (partly).

    origin: what they are, for people. origins: where each field is from, if not all are from there.
    """
    try:
        info = msgspec.inspect.type_info(config_type)
        known = {name for name, _ in _fields(info)}
        value = {key: item for key, item in value.items() if key in known or key not in {"apiVersion", "kind"}}
        unknown = next(_unknown(value, info, ""), None)
        if unknown is not None:
            raise ClaimError("config", f"request {request!r}: {origin}: unknown field {unknown}")
        return None if partly else msgspec.convert(value, config_type)
    except (msgspec.ValidationError, ValueError, TypeError, RecursionError) as error:
        named = _PLACE.search(str(error))
        origin = origins.get(named[1], origin) if named else origin
        raise ClaimError("config", f"request {request!r}: {origin}: {error}") from error


def _fields(info: msgspec.inspect.Type) -> list[tuple[str, msgspec.inspect.Type]]:
    if isinstance(info, msgspec.inspect.StructType | msgspec.inspect.DataclassType | msgspec.inspect.TypedDictType):
        fields = [(item.encode_name, item.type) for item in info.fields]
        if isinstance(info, msgspec.inspect.StructType) and info.tag_field:
            fields.append((info.tag_field, msgspec.inspect.AnyType()))
        return fields
    return []


def _unknown(value: Any, info: msgspec.inspect.Type, path: str) -> Iterator[str]:
    """Yield the fields that the type does not know; msgspec's own strictness is the author's to switch on."""
    if isinstance(info, msgspec.inspect.UnionType):
        # Of several kinds of objects, the one that it fits best is meant.
        problems = [list(_unknown(value, kind, path)) for kind in info.types if _may_be(value, kind)]
        yield from min(problems, key=len, default=[])
    elif isinstance(value, Mapping):
        fields = dict(_fields(info))
        if fields or isinstance(info, msgspec.inspect.StructType | msgspec.inspect.DataclassType):
            for key, item in value.items():
                if key in fields:
                    yield from _unknown(item, fields[key], f"{path}{key}.")
                else:
                    yield f"{f'{path}{key}' or repr(key)}; there are {', '.join(fields) or 'none'}"
        elif isinstance(info, msgspec.inspect.DictType):
            for key, item in value.items():
                yield from _unknown(item, info.value_type, f"{path}{key}.")
    elif isinstance(value, list) and isinstance(info, msgspec.inspect.CollectionType):
        for index, item in enumerate(value):
            yield from _unknown(item, info.item_type, f"{path.rstrip('.')}[{index}].")


def _may_be(value: Any, info: msgspec.inspect.Type) -> bool:
    if isinstance(value, Mapping):
        return isinstance(info, msgspec.inspect.DictType | msgspec.inspect.AnyType) or bool(_fields(info))
    return not _fields(info)


# ---------------------------------------------------------------- the work


@dataclass(frozen=True, slots=True)
class _Group:
    """The devices of one request that come from one source."""

    request: str
    served: Served
    devices: tuple[Device, ...]
    results: tuple[Result, ...]
    config: Any
    admin: bool


class _Turns:
    """A lock for each claim, kept while somebody wants it."""

    def __init__(self) -> None:
        self._locks: dict[str, tuple[asyncio.Lock, int]] = {}

    @contextlib.asynccontextmanager
    async def of(self, uid: str) -> Any:
        """Hold the claim's lock."""
        lock, users = self._locks.get(uid) or (asyncio.Lock(), 0)
        self._locks[uid] = lock, users + 1
        try:
            async with lock:
                yield
        finally:
            lock, users = self._locks.pop(uid)
            if users > 1:
                self._locks[uid] = lock, users - 1


class Driver:
    """One DRA driver of this node. Belongs to one event loop.

    Args:
        name: the driver's name.
        pool: the pool's name, which is the node's.
        served: the resources whose devices it offers.
        desk: the ledger, shared by all drivers of the process.
        claims: the API server.
        cdi_directory: where the runtime looks for CDI files.
        deadline: seconds for one claim.
        patience: seconds for a call; what is not done then is told so, and goes on.
        pull: whether a claim for an idle device of the plugin's side begins its move (R2).
        report: whether to write `status.devices` of claims, which costs a GET and a PATCH for each.
        boot: what tells one boot of the node from another; None: the kernel's own.
        changed: called after claims came or went.
        ready: whether a device (resource, id) may be given to claims yet.
        qualifiers: returns those of resources, as in the names of published devices; a resource for
            which it has none has no published devices yet.
        guard: keeps devices that are one thing, or parts of one, from holders that exclude each other.
        running_pods: records in the ledger which pods use which claims, and returns the pods whose processes run.

    """

    def __init__(
        self,
        name: str,
        pool: str,
        served: Sequence[Served],
        desk: AsyncLedger,
        claims: Claims,
        *,
        cdi_directory: str = cdi.DIRECTORY,
        deadline: float = DEADLINE,
        patience: float = PATIENCE,
        pull: bool = False,
        report: bool = False,
        boot: str | None = None,
        changed: Callable[[], None] | None = None,
        ready: Callable[[str, str], bool] = lambda resource, device: True,
        running_pods: Callable[[], Awaitable[RunningPods]] = _no_pods,
        qualifiers: Callable[[Sequence[str]], Mapping[str, str]] = naming.qualifiers,
        guard: ExclusionGuard | None = None,
    ) -> None:
        self.name: Final = name
        self._guard = guard or ExclusionGuard()
        self._ready = ready
        self._running_pods = running_pods
        self._qualifiers = qualifiers
        self.pool: Final = pool
        self.served = served
        self._desk = desk
        self._claims = claims
        self._store = cdi.Store(name, cdi_directory)
        self._deadline = deadline
        self._patience = patience
        self.pull = pull
        self.report = report
        self._boot = boot_id() if boot is None else boot
        self._changed = changed or (lambda: None)
        self._turns = _Turns()
        self._preparing: dict[str, set[asyncio.Task[Prepared]]] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._statistics = Statistics()
        self._said: dict[str, str] = {}

    def __repr__(self) -> str:
        return f"<Driver {self.name} pool {self.pool}: {', '.join(s.source.resource for s in self.served)}>"

    @property
    def served(self) -> tuple[Served, ...]:
        """The resources whose devices it offers; may be set anew at any time."""
        return self._served

    @served.setter
    def served(self, served: Sequence[Served]) -> None:
        self._served: tuple[Served, ...] = tuple(served)
        self._names: tuple[object, dict[str, tuple[Served, Device]]] = (None, {})

    @property
    def statistics(self) -> Statistics:
        """What was done so far."""
        return self._statistics

    @property
    def devices(self) -> Mapping[str, tuple[Served, Device]]:
        """The devices by the name that slices and claims use."""
        snapshots = [served.inventory.snapshot for served in self.served]
        words = self._qualifiers([snapshot.resource for snapshot in snapshots])
        key = tuple((snapshot.resource, snapshot.version) for snapshot in snapshots), tuple(words.items())
        if self._names[0] != key:
            served = {one.inventory.snapshot.resource: one for one in self.served}
            ids = {snapshot.resource: snapshot.devices for snapshot in snapshots}
            names = naming.published_names(words, ids)
            self._names = key, {name: (served[of], ids[of][one]) for name, (of, one) in names.items()}
        return self._names[1]

    # What the kubelet asks.

    async def prepare(self, claims: Iterable[ClaimRef]) -> dict[str, Prepared | ClaimError]:
        """Prepare claims, each on its own; an answer by UID for every one of them."""
        return await self._each(claims, self._prepare)

    async def unprepare(self, claims: Iterable[ClaimRef]) -> dict[str, ClaimError | None]:
        """Unprepare claims, each on its own, known or not; None by UID where it is done."""
        return await self._each(claims, self._unprepare)

    async def _each(
        self, claims: Iterable[ClaimRef], work: Callable[[ClaimRef], Coroutine[Any, Any, _T]]
    ) -> dict[str, _T | ClaimError]:
        refs = {claim.uid: claim for claim in claims}
        tasks = {uid: self._task(work(ref)) for uid, ref in refs.items()}
        # A caller that goes away does not stop what has begun: its next try finds it done.
        if tasks:
            await asyncio.wait(tasks.values(), timeout=self._patience)
        late = f"not done within {self._patience:g} s; it goes on"
        return {
            uid: _outcome(task) if task.done() else ClaimError("timeout", f"claim {refs[uid].title}: {late}")
            for uid, task in tasks.items()
        }

    async def _prepare(self, ref: ClaimRef) -> Prepared:
        task: asyncio.Task[Any] | None = asyncio.current_task()
        assert task is not None
        self._preparing.setdefault(ref.uid, set()).add(task)
        began = time.perf_counter()
        self._count(in_flight=1)
        try:
            _check(ref)
            async with asyncio.timeout(self._deadline), self._turns.of(ref.uid):
                prepared = await self._prepare_in_turn(ref)
            self._said.pop(ref.uid, None)
            return prepared
        except BaseException as error:
            failure = _as_claim_error(error, f"claim {ref.title}", self._deadline)
            self._count(prepare_failures=_plus(self._statistics.prepare_failures, failure.reason))
            _LOG.warning("%s: cannot prepare claim %s (%s): %s", self.name, ref.title, ref.uid, failure)
            raise failure from error
        finally:
            self._count(in_flight=-1, prepare_seconds=time.perf_counter() - began)
            self._preparing[ref.uid].discard(task)
            if not self._preparing[ref.uid]:
                del self._preparing[ref.uid]

    async def _prepare_in_turn(self, ref: ClaimRef) -> Prepared:
        known = self._known(ref.uid)
        if known is not None and (prepared := _result(known)) is not None and prepared.boot == self._boot:
            await self._write_file(ref.uid, prepared)
            self._count(prepared_again=1)
            return prepared
        began = time.perf_counter()
        claim = await self._claims.get_claim(ref.namespace, ref.name)
        self._count(api_seconds=time.perf_counter() - began)
        allocation = parse_allocation(claim, ref, self.name, self.pool)
        if not allocation.reserved:
            raise ClaimError("unreserved", f"claim {ref.title} is not reserved for a pod (any more)")
        groups = self._groups(ref, allocation)
        if known is not None and known.result is not None:
            # Prepared before a reboot: the devices have to be set up again.
            await self._desk.do(ledger.reopen(self.name, ref.uid))
        record = Claim(
            self.name,
            ref.uid,
            ref.namespace,
            ref.name,
            tuple(
                ClaimDevice(group.served.source.resource, device.id, result.share_id or "", group.admin)
                for group in groups
                for device, result in zip(group.devices, group.results, strict=True)
            ),
            None,
            time.time(),
            pods=allocation.pods,
        )
        return await self._carry_out(ref, record, groups)

    async def _carry_out(self, ref: ClaimRef, record: Claim, groups: Sequence[_Group]) -> Prepared:
        traces = any("prepare" in group.served.source.hooks for group in groups)
        await self._reserve(ref, record, durable=traces)
        try:
            edits: dict[str, list[ContainerEdits]] = {}
            for group in groups:
                edits.setdefault(group.request, []).append(await self._edits(ref, group))
            prepared = await _in_thread(self._answer, ref.uid, groups, edits)
            await self._verify_granted(ref, record)  # after the device numbers in the CDI file were read
            final = dataclasses.replace(record, result=msgspec.json.encode(prepared).decode())
            await self._ask(ref, ledger.prepare(final, pull=self.pull))
        except BaseException:
            await self._finish(self._undo(ref, record, traces=traces))
            raise
        self._count(prepared=1)
        self._changed()
        if self.report:
            self._task(self._report(ref, prepared))
        return prepared

    async def _unprepare(self, ref: ClaimRef) -> None:
        began = time.perf_counter()
        self._count(in_flight=1)
        try:
            for task in self._preparing.get(ref.uid, ()):
                task.cancel(_OVERTAKEN)
            async with asyncio.timeout(self._deadline), self._turns.of(ref.uid):
                await self._refuse_running(ref)
                await self._unprepare_in_turn(ref.uid)
        except BaseException as error:
            failure = _as_claim_error(error, f"claim {ref.title}", self._deadline)
            self._count(unprepare_failures=_plus(self._statistics.unprepare_failures, failure.reason))
            _LOG.warning("%s: cannot unprepare claim %s (%s): %s", self.name, ref.title, ref.uid, failure)
            raise failure from error
        finally:
            self._said.pop(ref.uid, None)
            self._count(in_flight=-1, unprepare_seconds=time.perf_counter() - began)

    async def _refuse_running(self, ref: ClaimRef) -> None:
        """Keep a claim whose containers run, and have the kubelet try again.

        Of a pod that was deleted by force and whose containers hang the kubelet's reconcile loop unprepares the
        claims all the same (kubelet 1.36, cm/dra/manager.go: reconcileLoop). If another pod shares the claim, the loop
        only drops the pod from the claim state.

        Raises:
            ClaimError: processes of a pod of this claim run, or it is not known which pods use it.

        """
        if self._known(ref.uid) is None:
            return
        try:
            running, unlisted = await self._running_pods()
        except (ClaimStateError, LedgerError, OSError) as error:
            what = f"it is not known which pods use it; it stays prepared so long: {error}"
            raise ClaimError("unknown", f"claim {ref.title}: {what}") from error
        known = self._known(ref.uid)
        if known is None:
            return
        if users := sorted(known.pods & running):
            raise ClaimError(
                "running", f"claim {ref.title}: processes of pod {users[0]} run; it stays prepared so long"
            )
        if unlisted:
            what = f"processes of pod {min(unlisted)} run, which the kubelet does not list and which may use it"
            raise ClaimError("unknown", f"claim {ref.title}: {what}; it stays prepared so long")

    async def _unprepare_in_turn(self, uid: str) -> None:
        known = self._known(uid)
        if known is not None:
            await self._call_unprepare(known)
        if _UID.fullmatch(uid):
            await _in_thread(self._store.remove, uid)
        if known is not None:
            await self._desk.do(ledger.unprepare(self.name, uid))
            self._count(unprepared=1)
            self._changed()
            self._tell_released(known)

    async def reconcile(
        self, named: Collection[str], pods: PodProcesses, unlisted: Collection[str] = (), *, sweep: bool = True
    ) -> Reconciled:
        """End claims that are over by all witnesses (E2), and compare the CDI files with the ledger.

        A claim ends with NodeUnprepareResources. It ends here only when the kubelet does not count it as prepared,
        no process of its pods can run, and the API server, naming the claim, says that it is deleted or allocated
        elsewhere. What cannot be asked about stays.

        Args:
            named: UIDs of the claims in the kubelet's claim state.
            pods: which pods' processes run.
            unlisted: pods of which it is not known which claims they use.
            sweep: whether to remove CDI files of claims that the ledger does not know. Not before
                they were heard as evidence: the ledger may be the one that is wrong.

        """
        lists: dict[str, list[str]] = {item.name: [] for item in dataclasses.fields(Reconciled)}

        async def look(claim: Claim) -> None:
            async with self._turns.of(claim.uid):
                said = await self._reconcile_one(claim, frozenset(named), pods, frozenset(unlisted))
            if said:
                lists[said].append(claim.uid)

        mine = [claim for claim in self._desk.snapshot.claims.values() if claim.driver == self.name]
        for batch in (mine[at : at + 16] for at in range(0, len(mine), 16)):
            await asyncio.gather(*(look(claim) for claim in batch))
        for uid in await asyncio.to_thread(self._store.list) if sweep else ():
            if self._known(uid) is None and uid not in self._preparing and uid not in named:
                async with self._turns.of(uid):
                    if self._known(uid) is None:
                        with contextlib.suppress(cdi.CdiError):
                            await _in_thread(self._store.remove, uid)
                            lists["removed"].append(uid)
        done = Reconciled(**{name: tuple(sorted(uids)) for name, uids in lists.items()})
        if done != Reconciled():
            _LOG.info("%s: claims reconciled: %s", self.name, done)
        return done

    async def _reconcile_one(
        self, claim: Claim, named: frozenset[str], pods: PodProcesses, unlisted: frozenset[str]
    ) -> str:
        known = self._known(claim.uid)
        if known is None:
            return ""
        prepared = _result(known)
        # A ledger of schema 1 has no pods: whether containers of this boot use the claim is not known.
        unknown = not known.pods and prepared is not None and prepared.boot == self._boot
        try:
            users = known.pods | unlisted
            over = known.name and not unknown and holders.claim_is_over(known.uid, users, named, pods)
            if over and not await self._still(known):
                await self._unprepare_in_turn(known.uid)
                return "unprepared"
        except Exception as error:  # the API server's, a hook's, the disk's: another time
            _LOG.info("%s: claim %s stays as it is for now: %s", self.name, known.title, error)
            return "unknown"
        if prepared is None:
            return ""
        try:
            if prepared.boot != self._boot:
                await self._desk.do(ledger.reopen(self.name, known.uid))
                return "reopened"
            written = await self._write_file(known.uid, prepared)
        except (cdi.CdiError, LedgerError) as error:
            _LOG.warning("%s: claim %s: %s", self.name, known.title, error)
            return "unknown"
        return "rewritten" if written else ""

    async def _write_file(self, uid: str, prepared: Prepared) -> bool:
        """Write a prepared claim's CDI file, in its turn; return False if it was there already or needs none."""
        return bool(prepared.spec) and await _in_thread(self._store.write, uid, prepared.spec.encode())

    async def keep_files(self) -> None:
        """Write CDI files again soon after they were removed, until cancelled.

        Without its file a container cannot be restarted, and the kubelet prepares a claim only once.
        Returns when the directory was deleted on the host while a container has it mounted: the host
        may have another one in its place, but this mount shows the deleted one until it is made anew.
        """
        backoff = Backoff(first=1.0, most=60.0)
        with filewatch.shared().watch([os.path.realpath(self._store.directory)]) as watch:
            while not await _in_thread(self._store.deleted):
                if error := await self._restore_files():
                    _LOG.warning("%s: CDI files are missing: %s", self.name, error)
                    await asyncio.sleep(backoff.next())
                    continue
                backoff.reset()
                if await watch.wait(LOOK):
                    await asyncio.sleep(SETTLE)

    async def _restore_files(self) -> str:
        """Write the files of prepared claims that are not there; return why one could not be written, or ""."""
        there = await _in_thread(self._store.list)
        claims = [claim for claim in self._desk.snapshot.claims.values() if claim.driver == self.name]
        errors = await asyncio.gather(*(self._restore_file(claim.uid) for claim in claims if claim.uid not in there))
        return next(filter(None, errors), "")

    async def _restore_file(self, uid: str) -> str:
        async with self._turns.of(uid):
            known = self._known(uid)
            prepared = _result(known) if known is not None else None
            if prepared is None or prepared.boot != self._boot:
                return ""
            try:
                if await self._write_file(uid, prepared):
                    _LOG.warning("%s: the CDI file of claim %s was removed; it is written again", self.name, uid)
            except cdi.CdiError as error:
                return str(error)
            return ""

    async def _still(self, known: Claim) -> bool:
        """Whether the API server still has this claim, allocated to the same devices."""
        ref = ClaimRef(known.namespace, known.name, known.uid)
        async with asyncio.timeout(self._deadline):
            claim = await self._claims.get_claim(known.namespace, known.name)
        try:
            allocation = parse_allocation(claim, ref, self.name, self.pool)
        except ClaimError as error:
            if error.reason == "malformed":
                raise
            return False
        prepared = _result(known)
        allocated = {(result.device, result.share_id or "") for result in allocation.results}
        return prepared is None or allocated == {(device.device, device.share) for device in prepared.devices}

    def claim_evidence(self, prepared: Iterable[PreparedClaim], resource: str) -> Iterator[ClaimEvidence]:
        """Yield what the kubelet's claim state says of claims on devices of one resource (R8)."""
        for claim in prepared:
            shares = {
                self.devices[name][1].id: share
                for pool, name, share in claim.devices.get(self.name, ())
                if pool == self.pool
                and name in self.devices
                and self.devices[name][0].source.resource == resource
                and name not in only_seen(claim, self.name)
            }
            if shares:
                yield ClaimEvidence(
                    self.name,
                    claim.uid,
                    frozenset(shares),
                    prepared=True,
                    namespace=claim.namespace,
                    name=claim.name,
                    pods=claim.pod_uids,
                    shares=shares,
                )

    async def close(self) -> None:
        """End what runs in the background."""
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def cdi_evidence(self) -> dict[str, list[ClaimEvidence]]:
        """Return what the CDI files say of prepared claims, by resource (R8). Blocks for their reading."""
        found: dict[str, list[ClaimEvidence]] = {served.source.resource: [] for served in self.served}
        for uid in self._store.list():
            devices: dict[str, set[str]] = {}
            for name in self._store.device_names(uid):
                kind, _, rest = name.partition("_")
                for word in rest.split("_")[2:] if kind == _HOLDING else ():
                    if word in self.devices:
                        served, device = self.devices[word]
                        devices.setdefault(served.source.resource, set()).add(device.id)
            for resource, ids in devices.items():
                found[resource].append(ClaimEvidence(self.name, uid, frozenset(ids), prepared=True))
        return found

    # Steps.

    def _known(self, uid: str) -> Claim | None:
        return self._desk.snapshot.claims.get((self.name, uid))

    def _groups(self, ref: ClaimRef, allocation: Allocation) -> list[_Group]:
        """Find the devices and decode the parameters of each request.

        Raises:
            ClaimError: a device is missing, gone or unhealthy, or the parameters are wrong.

        """
        found: dict[tuple[str, str, bool], list[tuple[Device, Result]]] = {}
        by_resource = {served.source.resource: served for served in self.served}
        for result in allocation.results:
            if result.device not in self.devices:
                raise ClaimError(
                    "missing", f"request {result.request!r}: driver {self.name} has no device {result.device!r} here"
                )
            served, device = self.devices[result.device]
            admin = bool(result.admin_access)
            if not admin:
                _check_health(device, result, self.name)
                if not self._ready(served.source.resource, device.id):
                    what = "who holds it is not known yet, the agent has just started"
                    raise ClaimError("starting", f"request {result.request!r}: device {result.device!r}: {what}")
            found.setdefault((result.request, served.source.resource, admin), []).append((device, result))
        return [
            _Group(
                request.partition("/")[0],
                by_resource[resource],
                tuple(device for device, _ in items),
                tuple(result for _, result in items),
                decoded_config(by_resource[resource].source.config_type, allocation.config, request),
                admin,
            )
            for (request, resource, admin), items in found.items()
        ]

    async def _reserve(self, ref: ClaimRef, record: Claim, *, durable: bool) -> None:
        """Have the ledger reserve a claim's devices, if nobody holds what excludes them.

        Raises:
            ClaimError: a device is not to be had.

        """
        keys = sorted(record.held)
        try:
            await self._guard.reread()
            await self._guard.verify(keys)
            with self._guard.reserve(keys):
                await self._desk.identify({key: self._guard.identity(*key) for key in keys})
                await self._ask(ref, ledger.reserve(record, durable=durable, pull=self.pull))
        except ConflictError as error:
            self._tell_refused(ref, str(error), str(error))
            raise ClaimError("refused", str(error)) from error

    async def _verify_granted(self, ref: ClaimRef, record: Claim) -> None:
        """Check that a claim's devices still are what they were when they were reserved.

        Raises:
            ClaimError: one is not.

        """
        try:
            await self._guard.verify_granted(record.held)
        except ConflictError as error:
            self._tell_refused(ref, str(error), str(error))
            raise ClaimError("refused", str(error)) from error

    def _tell_refused(self, ref: ClaimRef, what: str, message: str) -> None:
        if self._said.get(ref.uid) != what:
            self._said[ref.uid] = what
            self._task(self._tell(ref, "DeviceNotAvailable", message))

    async def _ask(self, ref: ClaimRef, operation: ledger.Operation[Claim | Refused]) -> Claim:
        answer = await self._desk.do(operation)
        if isinstance(answer, Refused):
            if answer.moving:
                self._changed()
            self._tell_refused(ref, answer.state.value, answer.message)
            raise ClaimError("refused", answer.message)
        return answer

    async def _edits(self, ref: ClaimRef, group: _Group) -> ContainerEdits:
        """Set up the devices of a group and return what its containers get.

        The same as through the plugin's door: the devices' own edits, then those of the hooks.
        """
        source, devices = group.served.source, tuple(dict.fromkeys(group.devices))
        if "reset" in source.hooks and not group.admin:
            # Who shares a device with another claim must not have it reset under the other's feet.
            others = {
                key
                for claim in self._desk.snapshot.claims_on(source.resource, (device.id for device in devices))
                if (claim.driver, claim.uid) != (self.name, ref.uid)
                for key in claim.held
            }
            idle = [device for device in devices if (source.resource, device.id) not in others]
            if idle:
                await self._hook("reset", source, source.reset, idle)
        extra = ContainerEdits()
        if "edits" in source.hooks:
            extra = _edits_of(source, "edits", await self._hook("edits", source, source.edits, devices))
        if "prepare" in source.hooks:
            made = await self._hook("prepare", source, source.prepare, devices, group.config)
            if made is not None:
                extra = ContainerEdits.merge((extra,), winner=_edits_of(source, "prepare", made))
        try:
            return ContainerEdits.merge((device.container_edits for device in devices), winner=extra)
        except EditConflictError as error:
            raise ClaimError("conflict", f"request {group.request!r}: the devices' edits: {error}") from error

    def _answer(self, uid: str, groups: Sequence[_Group], edits: Mapping[str, Sequence[ContainerEdits]]) -> Prepared:
        """Make the answer and the CDI file. In a thread: it looks at device nodes.

        One CDI device a request, so that a container gets the edits of its own requests and each
        once; the request's first device carries it. Its name tells the devices, as evidence (R8).
        """
        listed: dict[str, ContainerEdits] = {}
        devices: list[PreparedDevice] = []
        for request, of_request in edits.items():
            try:
                merged = ContainerEdits.merge(of_request)
            except EditConflictError as error:
                raise ClaimError("conflict", f"request {request!r}: {error}") from error
            members = [(group, result) for group in groups if group.request == request for result in group.results]
            ids = list(merged.cdi)
            if merged.env or merged.nodes or merged.mounts:
                kind = _SEEING if all(group.admin for group, _ in members) else _HOLDING
                held = dict.fromkeys(result.device for group, result in members if not group.admin or kind == _SEEING)
                name = "_".join((kind, uid, request, *held))
                listed[name] = merged
                ids.insert(0, cdi.qualified(self.name, name))
            for _, result in members:
                devices.append(PreparedDevice(request, result.pool, result.device, tuple(ids), result.share_id or ""))
                ids = []
        if not listed:
            self._store.remove(uid)
            return Prepared(tuple(devices), "", self._boot)
        data = cdi.encode(cdi.build(self.name, listed))
        self._store.write(uid, data)
        return Prepared(tuple(devices), data.decode(), self._boot)

    async def _undo(self, ref: ClaimRef, record: Claim, *, traces: bool) -> None:
        """Leave nothing of a Prepare that failed; what cannot be undone now, Unprepare will."""
        try:
            await _in_thread(self._store.remove, ref.uid)
            if traces:
                await self._call_unprepare(record)
            await self._desk.do(ledger.unprepare(self.name, ref.uid))
        except (ClaimError, hooks.HookError, cdi.CdiError, LedgerError) as error:
            _LOG.warning("%s: the failed Prepare of claim %s is not wholly undone: %s", self.name, ref.title, error)

    async def _finish(self, work: Coroutine[Any, Any, None]) -> None:
        """Do it to the end, though this task be cancelled."""
        await _ended(self._task(work))

    async def _call_unprepare(self, claim: Claim) -> None:
        for served, devices in self._devices_of(claim):
            if "unprepare" in served.source.hooks:
                await self._hook("unprepare", served.source, served.source.unprepare, devices)

    def _tell_released(self, claim: Claim) -> None:
        """Have `released` called for the devices that nobody holds any more."""
        for served, devices in self._devices_of(claim, held=True):
            source = served.source
            now = self._desk.snapshot
            used = self._guard.in_use((source.resource, device.id) for device in devices)
            idle = [
                device
                for device in devices
                if not now.claims_on(source.resource, (device.id,)) and (source.resource, device.id) not in used
            ]
            if idle and "released" in source.hooks:
                work = self._release(source, idle)
                self._guard.release([(source.resource, device.id) for device in idle], work)

    async def _release(self, source: DeviceSource, devices: Sequence[Device]) -> None:
        began = time.perf_counter()
        try:
            await hooks.call(f"released of {source.resource}", source.released, devices, timeout=source.hook_timeout)
        finally:
            self._count(hook_seconds=time.perf_counter() - began)

    def _devices_of(self, claim: Claim, *, held: bool = False) -> Iterator[tuple[Served, list[Device]]]:
        for served in self.served:
            resource, listed = served.source.resource, served.inventory.snapshot.devices
            ids = dict.fromkeys(d.device for d in claim.devices if d.resource == resource and not (held and d.admin))
            if ids:
                yield served, [listed.get(name) or Device(name, health=Health.UNHEALTHY, message=GONE) for name in ids]

    async def _hook(
        self, name: str, source: DeviceSource, hook: Callable[..., _T | Awaitable[_T]], *args: object
    ) -> _T:
        began = time.perf_counter()
        try:
            return await hooks.call(f"{name} of {source.resource}", hook, *args, timeout=source.hook_timeout)
        except hooks.HookError as error:
            raise ClaimError("hook", str(error)) from error
        finally:
            self._count(hook_seconds=time.perf_counter() - began)

    # In the background.

    async def _report(self, ref: ClaimRef, prepared: Prepared) -> None:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        ready = {
            "type": "Ready",
            "status": "True",
            "reason": "Prepared",
            "message": f"prepared on {self.pool}",
            "lastTransitionTime": now,
        }
        devices = [
            {
                "driver": self.name,
                "pool": device.pool,
                "device": device.device,
                **({"shareID": device.share} if device.share else {}),
                "conditions": [ready],
            }
            for device in prepared.devices
        ]
        try:
            await self._claims.set_devices(ref, self.name, devices)
        except Exception as error:  # best effort
            _LOG.debug("%s: status of claim %s: %s", self.name, ref.title, error)

    async def _tell(self, ref: ClaimRef, reason: str, message: str) -> None:
        try:
            await self._claims.claim_event(ref, reason, message)
        except Exception as error:  # best effort
            _LOG.debug("%s: event of claim %s: %s", self.name, ref.title, error)

    def _task(self, work: Coroutine[Any, Any, _T]) -> asyncio.Task[_T]:
        return self._keep(asyncio.create_task(work))

    def _keep(self, task: asyncio.Task[_T]) -> asyncio.Task[_T]:
        self._tasks.add(task)
        task.add_done_callback(self._over)
        return task

    def _over(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # seen: a caller that went away does not ask for it

    def _count(self, **changes: Any) -> None:
        now = self._statistics
        values: dict[str, Any] = {
            name: value if isinstance(value, Mapping) else getattr(now, name) + value for name, value in changes.items()
        }
        self._statistics = dataclasses.replace(now, **values)


_OVERTAKEN: Final = "overtaken by Unprepare"
_HOLDING: Final = "claim"
_SEEING: Final = "admin"


async def _in_thread(function: Callable[..., _T], *args: object) -> _T:
    """Call a function in a thread; if this task is cancelled meanwhile, raise that when the call has ended.

    A thread cannot be cancelled: a claim's turn that ended before it would let the next call for
    this claim work on the same file beside it.
    """
    return await _ended(asyncio.get_running_loop().run_in_executor(None, function, *args))


async def _ended(future: asyncio.Future[_T]) -> _T:
    """Wait for the end of a future, and only then raise the cancellation of this task, if there was one."""
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.wait({future})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        if not future.cancelled():
            future.exception()  # retrieved; the cancellation counts
        raise cancelled
    return future.result()


def _outcome(task: asyncio.Task[_T]) -> _T | ClaimError:
    error = task.exception() if not task.cancelled() else ClaimError("stopped", "the driver is stopping")
    if error is None:
        return task.result()
    return error if isinstance(error, ClaimError) else ClaimError("internal", f"internal error: {error!r}")


def _as_claim_error(error: BaseException, what: str, deadline: float) -> ClaimError:
    """Say an error so that a user can read it; what is unexpected goes to the log, too."""
    if isinstance(error, ClaimError):
        text, reason = str(error), error.reason
    elif isinstance(error, asyncio.CancelledError):
        overtaken = error.args[:1] == (_OVERTAKEN,)
        text, reason = f"{what}: {_OVERTAKEN if overtaken else 'the driver is stopping'}", "overtaken"
    elif isinstance(error, TimeoutError):
        text, reason = f"{what}: not done within {deadline:g} s", "timeout"
    elif isinstance(error, cdi.CdiError):
        text, reason = str(error), "cdi"
    elif isinstance(error, LedgerError):
        text, reason = str(error), "ledger"
    else:
        # The API client's errors come here, too; their text is meant for people.
        text, reason = f"{what}: {error or type(error).__name__}", "api"
    return ClaimError(reason, text if len(text) <= _MAX_MESSAGE else f"{text[: _MAX_MESSAGE - 3]}...")


def _check(ref: ClaimRef) -> None:
    if not _UID.fullmatch(ref.uid):
        raise ClaimError("malformed", f"{ref.uid!r} is not the UID of a claim")
    if not _SUBDOMAIN.fullmatch(ref.namespace) or not _SUBDOMAIN.fullmatch(ref.name):
        raise ClaimError("malformed", f"{ref.title!r} is not the name of a claim")


def _check_health(device: Device, result: Result, driver: str) -> None:
    if device.health.usable:
        return
    tolerated = any(
        toleration.get("key") in {None, "", f"{driver}/unhealthy"} for toleration in result.tolerations or ()
    )
    if device.message == GONE or not tolerated:
        why = device.message or "no reason was given"
        raise ClaimError("unhealthy", f"request {result.request!r}: device {result.device!r} is unhealthy: {why}")


def _edits_of(source: DeviceSource, hook: str, answer: object) -> ContainerEdits:
    if not isinstance(answer, ContainerEdits):
        raise ClaimError("hook", f"{hook} of {source.resource} returned {type(answer).__name__}, not ContainerEdits")
    return answer


def _result(claim: Claim) -> Prepared | None:
    if claim.result is None:
        return None
    try:
        return msgspec.json.decode(claim.result, type=Prepared)
    except msgspec.DecodeError:  # an older agent's: prepare it anew
        return None


def _plus(counts: Mapping[str, int], key: str) -> Mapping[str, int]:
    return MappingProxyType({**counts, key: counts.get(key, 0) + 1})


# ---------------------------------------------------------------- gRPC


class _V1(dra_v1_pb2_grpc.DRAPluginServicer):
    """k8s.io.kubelet.pkg.apis.dra.v1."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    async def NodePrepareResources(  # noqa: N802  # the API's name, as below
        self, request: dra_v1_pb2.NodePrepareResourcesRequest, context: object
    ) -> dra_v1_pb2.NodePrepareResourcesResponse:
        """Prepare claims before the sandbox of a pod is made."""
        response = dra_v1_pb2.NodePrepareResourcesResponse()
        for uid, answer in (await self._driver.prepare(_refs(request.claims))).items():
            entry = response.claims[uid]
            if isinstance(answer, ClaimError):
                entry.error = str(answer)
                continue
            for device in answer.devices:
                listed = entry.devices.add(
                    request_names=[device.request],
                    pool_name=device.pool,
                    device_name=device.device,
                    cdi_device_ids=device.cdi_ids,
                )
                if device.share:
                    listed.share_id = device.share
        return response

    async def NodeUnprepareResources(  # noqa: N802
        self, request: dra_v1_pb2.NodeUnprepareResourcesRequest, context: object
    ) -> dra_v1_pb2.NodeUnprepareResourcesResponse:
        """Unprepare claims after their last pod."""
        response = dra_v1_pb2.NodeUnprepareResourcesResponse()
        for uid, answer in (await self._driver.unprepare(_refs(request.claims))).items():
            response.claims[uid].error = "" if answer is None else str(answer)
        return response


class _V1Beta1(dra_v1beta1_pb2_grpc.DRAPluginServicer):
    """k8s.io.kubelet.pkg.apis.dra.v1beta1: the same without shares."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    async def NodePrepareResources(  # noqa: N802
        self, request: dra_v1beta1_pb2.NodePrepareResourcesRequest, context: object
    ) -> dra_v1beta1_pb2.NodePrepareResourcesResponse:
        """Prepare claims before the sandbox of a pod is made."""
        response = dra_v1beta1_pb2.NodePrepareResourcesResponse()
        for uid, answer in (await self._driver.prepare(_refs(request.claims))).items():
            entry = response.claims[uid]
            if isinstance(answer, ClaimError):
                entry.error = str(answer)
                continue
            for device in answer.devices:
                entry.devices.add(
                    request_names=[device.request],
                    pool_name=device.pool,
                    device_name=device.device,
                    cdi_device_ids=device.cdi_ids,
                )
        return response

    async def NodeUnprepareResources(  # noqa: N802
        self, request: dra_v1beta1_pb2.NodeUnprepareResourcesRequest, context: object
    ) -> dra_v1beta1_pb2.NodeUnprepareResourcesResponse:
        """Unprepare claims after their last pod."""
        response = dra_v1beta1_pb2.NodeUnprepareResourcesResponse()
        for uid, answer in (await self._driver.unprepare(_refs(request.claims))).items():
            response.claims[uid].error = "" if answer is None else str(answer)
        return response


def _refs(claims: Iterable[dra_v1_pb2.Claim] | Iterable[dra_v1beta1_pb2.Claim]) -> list[ClaimRef]:
    return [ClaimRef(claim.namespace, claim.name, claim.uid) for claim in claims]


def add_to_server(driver: Driver, server: grpc.aio.Server) -> None:
    """Serve a driver in both versions of the kubelet's API."""
    dra_v1_pb2_grpc.add_DRAPluginServicer_to_server(_V1(driver), server)
    dra_v1beta1_pb2_grpc.add_DRAPluginServicer_to_server(_V1Beta1(driver), server)
