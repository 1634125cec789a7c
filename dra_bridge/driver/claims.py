"""Defines a driver's claims: names in the kubelet's calls, allocations in the API, and records in the ledger."""

from __future__ import annotations

import asyncio
import enum
import functools
import re
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, TypeVar

import msgspec

from deviceplugin import cdi
from deviceplugin.exclusion import DeviceKey
from deviceplugin.kubelet import holders
from deviceplugin.kubelet.cgroups import PodProcesses
from deviceplugin.kubelet.containers import Starts
from deviceplugin.register.records import Claim, Outlook
from deviceplugin.register.store import Store
from dra_bridge.kube import FOR_LIMITS, POD_CLAIM

_T = TypeVar("_T")

_SUBDOMAIN: Final = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
_FIELD: Final = re.compile(r"`\$\.([^`.\[]+)")
"""Matches a field's name in the text of an error of msgspec, which names the field as `$.field`."""


@dataclass(frozen=True, slots=True)
class Awaited:
    """The event for which a refused claim waits.

    devices: the devices that the claim should get, or had before. outlook: a function that returns whether the claim
    may get these devices soon.
    """

    devices: Collection[DeviceKey]
    outlook: Callable[[], Outlook]


class Reason(enum.StrEnum):
    """The reasons why a claim cannot be prepared or unprepared. The values are labels of metrics.

    docs/troubleshooting.md explains the reasons.
    """

    ADMIN = "admin"
    API = "api"
    CDI = "cdi"
    CONFIG = "config"
    CONFLICT = "conflict"
    FOREIGN = "foreign"
    GONE = "gone"
    HOOK = "hook"
    INTERNAL = "internal"
    LEDGER = "ledger"
    MALFORMED = "malformed"
    MISSING = "missing"
    OVERTAKEN = "overtaken"
    PLUGIN = "plugin"
    REFUSED = "refused"
    REPLACED = "replaced"
    RUNNING = "running"
    STARTING = "starting"
    STOPPED = "stopped"
    TIMEOUT = "timeout"
    UNALLOCATED = "unallocated"
    UNHEALTHY = "unhealthy"
    UNKNOWN = "unknown"
    UNRESERVED = "unreserved"


class ClaimError(Exception):
    """Raised when a claim cannot be prepared or unprepared. `kubectl describe pod` shows the error's text.

    awaited: the event for which the claim waits; None if the refusal is final.
    """

    def __init__(self, reason: Reason, message: str, awaited: Awaited | None = None) -> None:
        super().__init__(message)
        self.reason = reason
        self.awaited = awaited


class ClaimRef(NamedTuple):
    """A claim's namespace, name and UID, as in the kubelet's calls."""

    namespace: str
    name: str
    uid: str

    @property
    def title(self) -> str:
        """The claim's namespace and name, for messages."""
        return f"{self.namespace}/{self.name}"


def check_ref(ref: ClaimRef) -> None:
    """Raise ClaimError if a claim cannot have this UID, namespace or name."""
    if not cdi.UID.fullmatch(ref.uid):
        raise ClaimError(Reason.MALFORMED, f"{ref.uid!r} is not the UID of a claim")
    if not _SUBDOMAIN.fullmatch(ref.namespace) or not _SUBDOMAIN.fullmatch(ref.name):
        raise ClaimError(Reason.MALFORMED, f"{ref.title!r} is not the name of a claim")


class _Meta(msgspec.Struct):
    uid: str = ""
    annotations: dict[str, str] | None = None


class Result(msgspec.Struct, frozen=True, rename="camel"):
    """One device of an allocation (resource.k8s.io, DeviceRequestAllocationResult, the same in v1beta1 and v1)."""

    request: str
    driver: str
    pool: str
    device: str
    admin_access: bool | None = None
    share_id: str | None = msgspec.field(default=None, name="shareID")
    consumed_capacity: dict[str, Any] | None = None
    tolerations: list[dict[str, Any]] | None = None


class Opaque(msgspec.Struct, frozen=True):
    """Parameters in a claim or class for one driver (resource.k8s.io, OpaqueDeviceConfiguration)."""

    driver: str
    parameters: Any = None


class ClaimConfig(msgspec.Struct, frozen=True):
    """One configuration in a claim's allocation (resource.k8s.io, DeviceAllocationConfiguration)."""

    source: str = ""
    requests: list[str] | None = None
    opaque: Opaque | None = None


class _Devices(msgspec.Struct):
    results: list[Result] | None = None
    config: list[ClaimConfig] | None = None


class _AllocationResult(msgspec.Struct):
    devices: _Devices | None = None


class _User(msgspec.Struct, rename="camel"):
    resource: str = ""
    uid: str = ""
    api_group: str = ""


class _ClaimStatus(msgspec.Struct, rename="camel"):
    allocation: _AllocationResult | None = None
    reserved_for: list[_User] | None = None


class _Claim(msgspec.Struct):
    metadata: _Meta
    status: _ClaimStatus | None = None


@dataclass(frozen=True, slots=True)
class ClaimAllocation:
    """The devices of a claim from one driver on one node.

    config: the configurations for this driver, first of the class, then of the claim. reserved: whether the claim is
    reserved for a pod or another object. pods: UIDs of the pods for which the claim is reserved. limits: whether the
    scheduler made the claim for the `limits` of a pod (resource.k8s.io, 1.34 and later). pod_claim: the claim's name in
    the pod's spec if the claim was made from a template, else "".
    """

    results: tuple[Result, ...]
    config: tuple[ClaimConfig, ...]
    reserved: bool
    pods: frozenset[str] = frozenset()
    limits: bool = False
    pod_claim: str = ""

    @property
    def named(self) -> frozenset[tuple[str, str, str, str]]:
        """A tuple for each device: request (without the subrequest), pool, published name, and share ID."""
        return frozenset(
            (result.request.partition("/")[0], result.pool, result.device, result.share_id or "")
            for result in self.results
        )


def parse_allocation(claim: Mapping[str, Any] | None, ref: ClaimRef, driver: str, pool: str) -> ClaimAllocation:
    """Return the devices of this driver and pool in a claim's allocation.

    Raises ClaimError if the claim does not exist, has another UID, is not allocated, or is allocated on another node.
    """
    if claim is None:
        raise ClaimError(Reason.GONE, f"claim {ref.title} does not exist")
    try:
        parsed = msgspec.convert(claim, _Claim)
    except msgspec.ValidationError as error:
        raise ClaimError(Reason.MALFORMED, f"claim {ref.title} cannot be parsed: {error}") from error
    if parsed.metadata.uid != ref.uid:
        uids = f"its UID is {parsed.metadata.uid}, not {ref.uid}"
        raise ClaimError(Reason.REPLACED, f"claim {ref.title} was recreated: {uids}")
    allocation = parsed.status.allocation if parsed.status else None
    if allocation is None or parsed.status is None:
        raise ClaimError(Reason.UNALLOCATED, f"claim {ref.title} is not allocated")
    devices = allocation.devices or _Devices()
    results: list[Result] = []
    for result in devices.results or ():
        if result.driver != driver:
            continue
        if result.pool != pool:
            what = f"device {result.device!r} of request {result.request!r}"
            raise ClaimError(Reason.FOREIGN, f"{what} is in pool {result.pool!r}, but this node's pool is {pool!r}")
        results.append(result)
    if not results:
        raise ClaimError(Reason.FOREIGN, f"the allocation of claim {ref.title} names no device of driver {driver}")
    of_class: list[ClaimConfig] = []
    # Configurations of the class come before those of the claim. Apart from that, the API server's order is kept.
    of_claim: list[ClaimConfig] = []
    for config in devices.config or ():
        if config.opaque is not None and config.opaque.driver == driver:
            (of_class if config.source == "FromClass" else of_claim).append(config)
    users = parsed.status.reserved_for or ()
    pods: set[str] = set()
    for user in users:
        if user.resource == "pods" and not user.api_group and user.uid:
            pods.add(user.uid)
    annotations = parsed.metadata.annotations or {}
    limits, pod_claim = annotations.get(FOR_LIMITS) == "true", annotations.get(POD_CLAIM, "")
    return ClaimAllocation(tuple(results), (*of_class, *of_claim), bool(users), frozenset(pods), limits, pod_claim)


def decoded_config(config_type: type[_T] | None, config: Sequence[ClaimConfig], request: str) -> _T | None:
    """Return the parameters of one request as an object of the driver's configuration type.

    Parameters of the claim override those of the class. `apiVersion` and `kind` are accepted; any other field that the
    type does not have is an error. config_type: the type of the parameters; None if the driver accepts no parameters.
    config: this driver's configurations, first of the class, then of the claim. request: the request's name in the
    allocation, with the subrequest ("gpu/big").

    Raises ClaimError with the name of a field that is unknown, missing, of a wrong type, or has an invalid value.
    """
    main = request.partition("/")[0]
    merged: dict[str, Any] = {}
    origin = "no parameters"
    origins: dict[str, str] = {}
    try:
        for piece in config:
            if piece.requests and request not in piece.requests and main not in piece.requests:
                continue
            origin = "parameters of the class" if piece.source == "FromClass" else "parameters of the claim"
            parameters = piece.opaque.parameters if piece.opaque else None
            if config_type is None:
                raise ClaimError(Reason.CONFIG, f"request {request!r}: {origin}: this driver accepts no parameters")
            if not isinstance(parameters, Mapping):
                raise ClaimError(
                    Reason.CONFIG, f"request {request!r}: {origin} must be an object, not {parameters!r:.60}"
                )
            info = msgspec.inspect.type_info(config_type)
            usual = {"apiVersion", "kind"} - dict(_fields(info)).keys()
            value = {key: item for key, item in parameters.items() if key not in usual}
            if unknown := next(_unknown(value, info, ""), ""):
                raise ClaimError(Reason.CONFIG, f"request {request!r}: {origin}: unknown field {unknown}")
            merged.update(value)
            origins.update(dict.fromkeys(value, origin))
        return None if config_type is None else msgspec.convert(merged, config_type)
    except (msgspec.ValidationError, ValueError, TypeError, RecursionError) as error:
        named = _FIELD.search(str(error))
        origin = origins.get(named[1], origin) if named else origin
        raise ClaimError(Reason.CONFIG, f"request {request!r}: {origin}: {error}") from error


def _fields(info: msgspec.inspect.Type) -> list[tuple[str, msgspec.inspect.Type]]:
    if isinstance(info, msgspec.inspect.StructType | msgspec.inspect.DataclassType | msgspec.inspect.TypedDictType):
        fields = [(item.encode_name, item.type) for item in info.fields]
        if isinstance(info, msgspec.inspect.StructType) and info.tag_field:
            fields.append((info.tag_field, msgspec.inspect.AnyType()))
        return fields
    return []


def _unknown(value: Any, info: msgspec.inspect.Type, path: str) -> Iterator[str]:
    """Yield the fields of a value that the value's type does not have. By default, msgspec ignores such fields."""
    if isinstance(info, msgspec.inspect.UnionType):
        # If objects of several types are permitted, assume the type with the fewest unknown fields.
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


class PreparedDevice(msgspec.Struct, frozen=True, omit_defaults=True):
    """One device in a Prepare response. request: the request's name without the subrequest."""

    request: str
    pool: str
    device: str
    cdi_ids: tuple[str, ...] = ()
    share: str = ""


class Prepared(msgspec.Struct, frozen=True, omit_defaults=True):
    """The recorded response to the Prepare of a claim.

    spec: the claim's CDI spec as text, "" if the claim needs none. boot: the node's boot in which the claim was
    prepared. metadata: for each request, the text of its metadata file. withheld: the requests whose CDI devices are
    not in the CDI file, because a device of the request is unplugged, or because another holder can open a device node
    of the request. stale: device numbers that were removed from the CDI file, but whose nodes the claim's containers
    may still be able to open. starts: how often the kubelet had begun to start each container when the numbers in
    `stale` were removed; None if these counts have not been read yet.
    """

    devices: tuple[PreparedDevice, ...]
    spec: str = ""
    boot: str = ""
    metadata: Mapping[str, str] = {}
    withheld: frozenset[str] = frozenset()
    stale: frozenset[str] = frozenset()
    starts: Starts | None = None

    @property
    def named(self) -> frozenset[tuple[str, str, str, str]]:
        """A tuple for each device: its request, pool, name and share ID, to compare with `ClaimAllocation.named`."""
        return frozenset((device.request, device.pool, device.device, device.share) for device in self.devices)


_DECODER: Final = msgspec.json.Decoder(Prepared)


def prepared_of(claim: Claim) -> Prepared | None:
    """Return the recorded Prepare response of a claim; None if there is none, or an older agent recorded it."""
    return None if claim.result is None else _prepared(claim.result)


@functools.lru_cache(maxsize=256)
def _prepared(result: str) -> Prepared | None:
    """Decode a recorded response.

    The result is cached, because the files of all claims are compared with the responses every second.
    """
    try:
        return _DECODER.decode(result)
    except msgspec.DecodeError:
        return None


def is_over(
    claim: Claim, boot: str, named: Collection[str], pods: PodProcesses, unlisted: Collection[str] = ()
) -> bool:
    """Return whether no container of this node can use a claim any more.

    If the claim's pods are unknown, a container may use the claim until the next boot. boot: the id of the present
    boot. named: UIDs of the claims in the kubelet's claim state. pods: the pods whose processes run. unlisted: further
    pods that may use the claim.
    """
    prepared = prepared_of(claim)
    begun = {prepared.boot} if prepared is not None else {device.identity.boot for device in claim.devices}
    unknown = not claim.pods and boot in begun
    return not unknown and holders.claim_is_over(claim.uid, claim.pods.union(unlisted), named, pods)


@dataclass(frozen=True, slots=True)
class ClaimRecords:
    """The records of one driver's claims in the ledger file, and a lock for each claim."""

    driver: str
    pool: str
    ledger: Store
    _locks: weakref.WeakValueDictionary[str, asyncio.Lock] = field(default_factory=weakref.WeakValueDictionary)

    def get(self, uid: str) -> Claim | None:
        """Return the ledger file's record of a claim; None if there is no record."""
        return self.ledger.snapshot.claims.get((self.driver, uid))

    def all(self) -> list[Claim]:
        """Return the records of all claims of the driver."""
        return [claim for claim in self.ledger.snapshot.claims.values() if claim.driver == self.driver]

    def locked(self, uid: str) -> asyncio.Lock:
        """Return a claim's lock. While any task has the lock or waits for it, all callers get the same object."""
        return self._locks.setdefault(uid, asyncio.Lock())
