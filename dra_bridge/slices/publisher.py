"""ResourceSlices: what the API server should have of this node's devices, and who makes it so.

`desired` says it, a pure function of the devices and their sides. `plan` compares it with what the
API server has and lists the fewest writes. `Publisher` keeps watching and writing. One pool a
driver and node, named like the node.

Within this module slices are as resource.k8s.io/v1 has them; `in_version` and `neutral` translate.
The limits are those of Kubernetes 1.36 (k8s.io/api/resource/v1).
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any, Final, Literal, NamedTuple, TypeVar

import msgspec

from deviceplugin.device import AttributeValue, Device, Version
from deviceplugin.inventory import Snapshot
from deviceplugin.naming import (
    EXTENDED_RESOURCE,
    MAX_CONSUMED_SETS,
    MAX_ENTRIES,
    NamingError,
    canonical_resource,
    check_attribute,
    check_capacity,
    check_counters,
    device_name,
    parse_quantity,
    qualified,
)
from dra_bridge.kube import (
    NODES,
    RESOURCE_SLICES,
    ApiError,
    Backoff,
    Changed,
    Cluster,
    ConflictError,
    InvalidError,
    Listed,
    NotFoundError,
    Object,
    Statistics,
    UnavailableError,
    UnsupportedError,
    VersionChangedError,
)

__all__ = [
    "ALL",
    "SHARES",
    "Capabilities",
    "Desired",
    "Offer",
    "Pool",
    "PoolState",
    "Publisher",
    "Write",
    "desired",
    "in_version",
    "neutral",
    "plan",
    "remove_slices",
]

logger: Final = logging.getLogger(__name__)
_T = TypeVar("_T")

MAX_DEVICES: Final = 64
"""Devices of a slice: the limit of slices in which any has taints or consumes counters (128 without)."""
MAX_COUNTER_SETS: Final = 8
MAX_NAME: Final = 253

ROUNDS: Final = 6
"""How often in a row slices are written until the server has them as they are wanted."""

SHARES: Final = "shares"
"""Capacity that the DRA door adds to a shared device: how many claims it takes, one a claim unless it asks for more."""

Feature = Literal["taints", "sharing", "counters"]

_WITHOUT: Final[Mapping[Feature, str]] = {
    "taints": "the API server drops device taints (feature gate DRADeviceTaints is off): "
    "unhealthy devices are left out of the slices instead",
    "sharing": "the API server drops consumable capacity (feature gate DRAConsumableCapacity is off): "
    "each shared device goes to one claim at a time",
    "counters": "the API server does not take shared counters (feature gate DRAPartitionableDevices is off, "
    "or a server before 1.35): devices that consume counters are not offered",
}


# --- what goes in ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What the API server keeps of what it is sent; fields of features that are off it drops without an error."""

    taints: bool = True
    sharing: bool = True
    counters: bool = True


ALL: Final = Capabilities()
"""A server with all features on, as 1.36 is."""


@dataclass(frozen=True, slots=True)
class Offer:
    """What one resource gives to its driver's pool.

    snapshot: its devices. offered: ids on the DRA side, None for all of them. replicas: claims that
    one device takes, or that each takes by its id (one that is not named: 1). order: ids as the
    scheduler, which takes devices from the front, had better find them; those that are not named
    follow by their ids. qualifier: in the devices' published names (`deviceplugin.naming`).
    """

    snapshot: Snapshot
    offered: Collection[str] | None = None
    replicas: int | Mapping[str, int] = 1
    order: Sequence[str] = ()
    qualifier: str = ""

    @property
    def devices(self) -> list[Device]:
        """All devices in their order, else the natural one (gpu2 before gpu10), whatever their side and health."""
        devices = self.snapshot.devices
        at = {name: number for number, name in enumerate(self.order)}
        return [devices[name] for name in sorted(devices, key=lambda name: (at.get(name, len(at)), _natural(name)))]

    def offers(self, device: str) -> bool:
        """Return whether a device is on the DRA side."""
        return self.offered is None or device in self.offered

    def takes(self, device: str) -> int:
        """Return how many claims a device takes."""
        return self.replicas if isinstance(self.replicas, int) else self.replicas.get(device, 1)


@dataclass(frozen=True, slots=True)
class Pool:
    """All that one driver has on one node.

    offers: one for each resource of the driver, also those that offer nothing now. unhealthy: the
    effect of the taint `<driver>/unhealthy`. annotations: on the pool's first slice, names under
    `<driver>/`; with any, there is a slice even without devices.
    """

    driver: str
    node: str
    offers: tuple[Offer, ...] = ()
    unhealthy: Literal["NoSchedule", "NoExecute"] = "NoSchedule"
    annotations: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Desired:
    """What the API server should have.

    slices: bodies as resource.k8s.io/v1 has them or in the version asked for, without
        `spec.pool.generation`, owner and resourceVersion.
    withheld: names of devices that cannot be offered. problems: why, and what else was left out,
        one sentence each.
    """

    slices: tuple[Object, ...]
    withheld: frozenset[str] = frozenset()
    problems: tuple[str, ...] = ()


# --- names ----------------------------------------------------------------------------------------


def slice_name(node: str, driver: str, number: int) -> str:
    """Return the name of a pool's slice: the same each time, so that a create that was lost is not done twice."""
    mark = hashlib.sha256(f"{node}\0{driver}".encode()).hexdigest()[:5]
    end = f"-{mark}-{number}"
    return f"{node}-{driver}"[: MAX_NAME - len(end)].rstrip("-.") + end


def _natural(text: str) -> tuple[list[tuple[int, int, str]], str]:
    parts = re.split(r"([0-9]+)", text)
    return [(1, int(part), "") if part.isdecimal() else (0, 0, part) for part in parts], text


# --- desired --------------------------------------------------------------------------------------


def desired(pool: Pool, *, version: str = "v1", capabilities: Capabilities = ALL) -> Desired | None:
    """Return the slices that this pool should consist of; None while a source has not listed its devices.

    Pure: the same input gives the same bodies. What the API would refuse of a single device is left
    out and reported instead of spoiling the pool: an attribute, a capacity, or the device.

    Each device has its place in one slice, also while it is not offered. So a change of one device's
    side, health or taints changes only the slice with its place, which is one atomic write.
    """
    if not all(offer.snapshot.listed for offer in pool.offers):
        return None
    problems: list[str] = []
    sets = _counter_sets(pool, problems) if capabilities.counters else {}
    used: set[str] = set()
    places: list[Object | None] = []
    withheld: set[str] = set()
    for offer in pool.offers:
        for device in offer.devices:
            offered = offer.offers(device.id)
            name = device_name(device.id, offer.qualifier)
            consumed: Mapping[str, Mapping[str, int | str]] = {}
            if device.consumes and capabilities.counters:
                consumed = _consumed(device, sets, problems if offered else [])
                used.update(consumed)
            taints = _taints(pool, device)
            entry: Object | None = None
            if offered and ((device.consumes and not consumed) or (taints and not capabilities.taints)):
                withheld.add(name)
            elif offered:
                entry = _entry(name, device, offer, pool.driver, capabilities, problems)
                if taints:
                    entry["taints"] = taints
                if consumed:
                    entry["consumesCounters"] = [
                        {"counterSet": one, "counters": _counters(what)} for one, what in sorted(consumed.items())
                    ]
            places.append(entry)
    counters = [{"name": name, "counters": _counters(sets[name])} for name in sorted(used, key=_natural)]
    parts: list[Object] = []
    if any(places):
        parts += [{"sharedCounters": part} for part in _chunks(counters, MAX_COUNTER_SETS)]
        for part in _chunks(places, MAX_DEVICES):
            devices = [entry for entry in part if entry is not None]
            parts.append({"devices": devices} if devices else {})
    if not parts and pool.annotations:
        parts = [{}]
    slices = tuple(
        in_version(
            {
                "metadata": {
                    "name": slice_name(pool.node, pool.driver, number),
                    **({"annotations": dict(pool.annotations)} if pool.annotations and number == 0 else {}),
                },
                "spec": {
                    "driver": pool.driver,
                    "nodeName": pool.node,
                    "pool": {"name": pool.node, "resourceSliceCount": len(parts)},
                    **part,
                },
            },
            version,
        )
        for number, part in enumerate(parts)
    )
    return Desired(slices, frozenset(withheld), tuple(dict.fromkeys(problems)))


def _entry(
    name: str, device: Device, offer: Offer, driver: str, capabilities: Capabilities, problems: list[str]
) -> Object:
    replicas = offer.takes(device.id)
    shared = replicas > 1 and capabilities.sharing
    attributes: Object = {EXTENDED_RESOURCE: {"string": canonical_resource(offer.snapshot.resource)}}
    capacity: Object = {}
    if shared:
        capacity[SHARES] = {
            "value": str(replicas),
            "requestPolicy": {"default": "1", "validRange": {"min": "1", "step": "1"}},
        }
    # capacity before attributes, so that neither is cut for the sake of the framework's own extras
    taken = {qualified(key, driver) for key in (*attributes, *capacity)}
    wanted: list[tuple[str, Any, bool]] = [(key, value, True) for key, value in device.capacity.items()]
    wanted += [(key, value, False) for key, value in device.attributes.items()]
    room = MAX_ENTRIES - len(attributes) - len(capacity)
    for key, value, amount in wanted:
        where = f"{offer.snapshot.resource} device {device.id!r}"
        try:
            (check_capacity if amount else check_attribute)(key, value)
            if qualified(key, driver) in taken:
                raise NamingError(f"{key!r} is given twice, or is the framework's own name")
            if not room:
                raise NamingError(f"{key!r} is one more than the {MAX_ENTRIES} attributes and capacities of a device")
        except NamingError as error:
            problems.append(f"{where}: left out: {error}")
            continue
        room -= 1
        taken.add(qualified(key, driver))
        if amount:
            capacity[key] = _capacity(value, replicas if shared else 1)
        else:
            attributes[key] = _attribute(value)
    numa = device.numa_nodes
    if room and len(numa) == 1 and qualified("numa", driver) not in taken:
        # Kubernetes 1.36 has standard attributes for PCI only, none for NUMA
        attributes["numa"] = {"int": numa[0]}
    entry: Object = {"name": name, "attributes": attributes}
    if capacity:
        entry["capacity"] = capacity
    if shared:
        entry["allowMultipleAllocations"] = True
    return entry


def _attribute(value: AttributeValue) -> Object:
    if isinstance(value, bool):
        return {"bool": value}
    if isinstance(value, int):
        return {"int": value}
    return {"version": str(value)} if isinstance(value, Version) else {"string": value}


def _capacity(value: int | str, replicas: int) -> Object:
    """A capacity; of a shared device, a claim that does not say how much it needs takes a fair part.

    Without a policy such a claim would take all of it, and the device would not be shared
    (k8s.io/api/resource/v1, CapacityRequestPolicy).
    """
    if replicas == 1:
        return {"value": str(value)}
    number = parse_quantity(value)
    part = Fraction(number // replicas) if number.denominator == 1 else Fraction(0)
    return {"value": str(value), "requestPolicy": {"default": _like(str(value), part)}}


def _like(text: str, number: Fraction) -> str:
    """An integer as a quantity, with a suffix of the same kind as `text` has where that is exact."""
    best = str(number)
    if text.endswith("i") and number:
        for power, suffix in enumerate(("Ki", "Mi", "Gi", "Ti", "Pi", "Ei"), 1):
            if number % 1024**power == 0:
                best = f"{number // 1024**power}{suffix}"
    return best


def _taints(pool: Pool, device: Device) -> list[Object]:
    return [] if device.health.usable else [{"key": f"{pool.driver}/unhealthy", "effect": pool.unhealthy}]


def _counter_sets(pool: Pool, problems: list[str]) -> dict[str, Mapping[str, int | str]]:
    """The counter sets of all devices, offered or not, by name; one that two devices tell differently is none."""
    sets: dict[str, Mapping[str, int | str]] = {}
    bad: set[str] = set()
    for offer in pool.offers:
        for device in offer.snapshot.devices.values():
            for name, counters in device.counters.items():
                try:
                    check_counters(name, counters)
                except NamingError as error:
                    problems.append(f"{offer.snapshot.resource} device {device.id!r}: left out: {error}")
                    bad.add(name)
                    continue
                if _same_counters(sets.setdefault(name, counters), counters):
                    continue
                problems.append(f"{offer.snapshot.resource}: devices tell counter set {name!r} differently: left out")
                bad.add(name)
    return {name: counters for name, counters in sets.items() if name not in bad}


def _same_counters(one: Mapping[str, int | str], other: Mapping[str, int | str]) -> bool:
    return one is other or (
        one.keys() == other.keys() and all(parse_quantity(one[key]) == parse_quantity(other[key]) for key in one)
    )


def _consumed(
    device: Device, sets: Mapping[str, Mapping[str, int | str]], problems: list[str]
) -> Mapping[str, Mapping[str, int | str]]:
    """What a device consumes; nothing if that cannot be told to the API, and then it cannot be offered."""
    try:
        if len(device.consumes) > MAX_CONSUMED_SETS:
            raise NamingError(f"consumes from {len(device.consumes)} counter sets, {MAX_CONSUMED_SETS} are possible")
        for name, counters in device.consumes.items():
            check_counters(name, counters)
            if name not in sets:
                raise NamingError(f"consumes from counter set {name!r}, which no device brings along")
            for counter in counters:
                if counter not in sets[name]:
                    raise NamingError(f"consumes counter {counter!r}, which set {name!r} does not have")
    except NamingError as error:
        problems.append(f"device {device.id!r} is not offered: {error}")
        return {}
    return device.consumes


def _counters(counters: Mapping[str, int | str]) -> Object:
    return {name: {"value": str(value)} for name, value in sorted(counters.items())}


def _chunks(items: list[_T], size: int) -> list[list[_T]]:
    return [items[start : start + size] for start in range(0, len(items), size)]


# --- versions -------------------------------------------------------------------------------------


def in_version(body: Object, version: str) -> Object:
    """Return a slice of resource.k8s.io/v1 in another version: v1beta2 is the same, v1beta1 wraps each device."""
    group = f"resource.k8s.io/{version}"
    if version == "v1beta1" and "devices" in body["spec"]:
        devices = [
            {"name": device["name"], "basic": {key: value for key, value in device.items() if key != "name"}}
            for device in body["spec"]["devices"]
        ]
        body = {**body, "spec": {**body["spec"], "devices": devices}}
    return {**body, "apiVersion": group, "kind": "ResourceSlice"}


def neutral(body: Object) -> Object:
    """Return a slice of any version as resource.k8s.io/v1 has it."""
    spec = body.get("spec") or {}
    devices = spec.get("devices") or []
    if any("basic" in device for device in devices):
        flat = [{"name": device["name"], **(device.get("basic") or {})} for device in devices]
        body = {**body, "spec": {**spec, "devices": flat}}
    return body


# --- comparing ------------------------------------------------------------------------------------


def fingerprint(body: Object) -> str:
    """Return what tells the content of two slices apart, however it is written.

    Quantities count by their value, empty and left-out fields are the same, so are orders of keys;
    when a taint was added, the pool's generation and fields that are not spoken here do not count.
    """
    spec = body["spec"]
    pool = spec.get("pool") or {}
    content = [
        spec.get("driver"),
        spec.get("nodeName"),
        pool.get("name"),
        pool.get("resourceSliceCount"),
        [
            [
                device["name"],
                sorted((device.get("attributes") or {}).items()),
                [
                    [name, _number(one.get("value")), _policy(one.get("requestPolicy"))]
                    for name, one in sorted((device.get("capacity") or {}).items())
                ],
                [[taint["key"], taint.get("value") or "", taint["effect"]] for taint in device.get("taints") or ()],
                [[one["counterSet"], _amounts(one.get("counters"))] for one in device.get("consumesCounters") or ()],
                bool(device.get("allowMultipleAllocations")),
            ]
            for device in spec.get("devices") or ()
        ],
        [[one["name"], _amounts(one.get("counters"))] for one in spec.get("sharedCounters") or ()],
    ]
    return hashlib.sha256(msgspec.json.encode(content)).hexdigest()


def _number(value: Any) -> str | None:
    if value is None:
        return None
    try:
        return str(parse_quantity(value))
    except NamingError:
        return f"? {value}"


def _policy(policy: Object | None) -> list[Any] | None:
    if not policy:
        return None
    span = policy.get("validRange") or {}
    return [
        _number(policy.get("default")),
        [_number(one) for one in policy.get("validValues") or ()],
        [_number(span.get(key)) for key in ("min", "max", "step")],
    ]


def _amounts(counters: Object | None) -> list[Any]:
    return [[name, _number(one.get("value"))] for name, one in sorted((counters or {}).items())]


# --- plan -----------------------------------------------------------------------------------------


class Write(NamedTuple):
    """One write: `body` is what to send; for a delete only its metadata counts."""

    verb: Literal["create", "replace", "delete"]
    body: Object


Taken = Mapping[str, tuple[str, str]]
"""By slice name: the fingerprints of what was sent last and of what the server made of it."""

Times = Mapping[tuple[str, str, str], str]
"""When a taint was added, by device, key and effect; RFC 3339."""


def plan(
    wanted: Sequence[Object],
    existing: Sequence[Object],
    *,
    owner: Object | None = None,
    generation: int = 0,
    taken: Taken | None = None,
    times: Times | None = None,
) -> list[Write]:
    """Return the fewest writes, in their order, that turn a pool's existing slices into the wanted ones.

    A pool is used by the scheduler only while all slices of its highest generation are there. So a
    change of one slice is one write that takes effect at once; a change of several goes into a new
    generation, written slice after slice while the old one is superseded by the first of them, and
    slices that are left over are deleted last. A plan that was broken off is taken up again.

    owner: ownerReference of each slice. generation: the highest one that was ever written.
    taken: see Taken; a difference that the server itself makes is not fought. times: see Times.
    """
    names = {body["metadata"]["name"] for body in wanted}
    current = {body["metadata"]["name"]: body for body in existing}
    latest = max([generation, *(_generation(body) for body in existing)], default=0)
    extras = [body for body in existing if body["metadata"]["name"] not in names]

    def same(body: Object) -> bool:
        found = current.get(body["metadata"]["name"])
        return found is not None and _as_wanted(body, found, taken or {})

    def settled(body: Object) -> bool:
        return same(body) and _generation(current[body["metadata"]["name"]]) == latest

    changed = [body for body in wanted if not settled(body)]
    now = [body for body in existing if _generation(body) == latest]
    one_of_several = (
        len(wanted) > 1
        and len(changed) == 1
        and len(now) == len(existing) == len(wanted)
        and changed[0]["metadata"]["name"] in current
        and not extras
    )
    if all(body["metadata"]["name"] in names and same(_by_name(wanted, body)) for body in now):
        target = max(latest, 1)  # nothing of this generation is wrong: only complete it
    elif one_of_several:
        target = latest
    else:
        target, changed = latest + 1, list(wanted)
    rewritten = {body["metadata"]["name"] for body in changed}
    writes = []
    for body in wanted:
        name = body["metadata"]["name"]
        found = current.get(name)
        if name not in rewritten and found is not None and _same_metadata(body, found, owner):
            continue
        writes.append(Write("create" if found is None else "replace", _body(body, found, target, owner, times or {})))
    return writes + [Write("delete", body) for body in extras]


def _generation(body: Object) -> int:
    return int((body["spec"].get("pool") or {}).get("generation") or 0)


def _by_name(bodies: Sequence[Object], one: Object) -> Object:
    return next(body for body in bodies if body["metadata"]["name"] == one["metadata"]["name"])


def _as_wanted(wanted: Object, found: Object, taken: Taken) -> bool:
    want, have = fingerprint(wanted), fingerprint(found)
    return want == have or taken.get(wanted["metadata"]["name"]) == (want, have)


def _ours(annotations: Mapping[str, str], driver: str) -> dict[str, str]:
    return {key: value for key, value in annotations.items() if key.startswith(f"{driver}/")}


def _same_metadata(wanted: Object, found: Object, owner: Object | None) -> bool:
    driver = wanted["spec"]["driver"]
    want, have = wanted["metadata"], found["metadata"]
    return _ours(want.get("annotations") or {}, driver) == _ours(have.get("annotations") or {}, driver) and (
        owner is None or have.get("ownerReferences") == [owner]
    )


def _body(wanted: Object, found: Object | None, generation: int, owner: Object | None, times: Times) -> Object:
    metadata = dict(wanted["metadata"])
    driver = wanted["spec"]["driver"]
    if found is not None:
        have = found["metadata"]
        kept = {
            key: value for key, value in (have.get("annotations") or {}).items() if not key.startswith(f"{driver}/")
        }
        metadata.update({key: have[key] for key in ("uid", "resourceVersion", "labels", "finalizers") if key in have})
        annotations = {**kept, **(metadata.pop("annotations", None) or {})}
        if annotations:
            metadata["annotations"] = annotations
    if owner is not None:
        metadata["ownerReferences"] = [owner]
    elif found is not None and "ownerReferences" in found["metadata"]:
        metadata["ownerReferences"] = found["metadata"]["ownerReferences"]
    spec = {**wanted["spec"], "pool": {**wanted["spec"]["pool"], "generation": generation}}
    if "devices" in spec:
        spec["devices"] = [_with_times(device, times) for device in spec["devices"]]
    return {**wanted, "metadata": metadata, "spec": spec}


def _with_times(device: Object, times: Times) -> Object:
    if "taints" not in device:
        return device
    taints = []
    for taint in device["taints"]:
        since = times.get((device["name"], taint["key"], taint["effect"]))
        taints.append({**taint, "timeAdded": since} if since else taint)
    return {**device, "taints": taints}


# --- publishing -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PoolState:
    """How far a driver's pool is; never changed, replaced.

    wanted, accepted: the tickets of the newest `want` and of the newest one that the API server has.
    generation: the pool's. slices: how many there are. devices: names of the devices in them.
    unsupported: features that the server lacks. problems: what was left out and why, or what
    keeps the server from accepting it. writes: successful ones so far.
    """

    driver: str
    wanted: int = 0
    accepted: int = 0
    generation: int = 0
    slices: int = 0
    devices: frozenset[str] = frozenset()
    unsupported: frozenset[str] = frozenset()
    problems: tuple[str, ...] = ()
    writes: int = 0


class _Driver:
    """What the publisher remembers of one driver."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.state = PoolState(pool.driver)
        self.wake = asyncio.Event()
        self.mirror: dict[str, Object] = {}
        self.taken: dict[str, tuple[str, str]] = {}
        self.times: dict[tuple[str, str, str], str] = {}
        self.generation = 0
        """The highest one that was ever written, or that an unanswered write makes necessary."""
        self.listed = False
        """Whether the mirror was filled from a list since it was last in doubt."""
        self.deleted: set[str] = set()
        """UIDs of slices that were deleted here and whose end the watch has not told yet."""
        self.gone: set[str] = set()
        """UIDs of slices that the watch has told the end of since a write began whose answer is out."""
        self.said: set[str] = set()
        self.rounds: tuple[list[float], list[float]] = ([], [])
        """When rounds of writes began: again for the same ticket, and the first for each."""
        self.counted = 0


class Publisher:
    """Makes the API server have this node's slices as they are wanted, and keeps it so.

    One watch for all drivers. Slices of other drivers, nodes and pools are not touched. It writes
    when something changed or was taken away (the kubelet deletes all slices of its node when it
    starts) and never else. What it cannot do it tries again, as long as it takes.
    """

    def __init__(
        self,
        cluster: Cluster,
        node: str,
        *,
        say: Callable[[str, str], None] | None = None,
        backoff: Backoff | None = None,
        burst: int = 10,
        per_second: float = 0.5,
        probe_again: float = 60.0,
    ) -> None:
        """Do nothing yet; `want` says what, `run` does it.

        say: called with driver and message, once for each message; by default a warning is logged.
        backoff: waits after failures. burst, per_second: how many rounds of writes a driver may
        make at once, and how fast that is regained: two agents that disagree do not flood the server.
        Ten times as much for what is newly wanted.
        probe_again: seconds after which a feature that the server lacked may be asked for again, when
        there is reason to believe that it is another server.
        """
        self._cluster = cluster
        self._node = node
        self._say = say or (lambda driver, message: logger.warning("%s: %s", driver, message))
        self._backoff = backoff or cluster.backoff
        self._burst = burst
        self._per_second = per_second
        self._probe_again = probe_again
        self._probed_at = 0.0
        self._drivers: dict[str, _Driver] = {}
        self._workers: dict[str, asyncio.Task[None]] = {}
        self._group: asyncio.TaskGroup | None = None
        self._listed = asyncio.Event()
        self._known: dict[Feature, bool] = {}
        self._owner: Object | None = None
        self._changed = asyncio.Event()

    def __repr__(self) -> str:
        return f"<Publisher {self._node}: {', '.join(self._drivers) or 'no drivers'}>"

    # --- for others ---

    def want(self, pool: Pool) -> int:
        """Say what a driver's pool should be from now on; return a ticket for `accepted`.

        Raises:
            ValueError: it is for another node.

        """
        if pool.node != self._node:
            raise ValueError(f"this publisher is for node {self._node}, not {pool.node}")
        driver = self._drivers.get(pool.driver)
        if driver is None:
            driver = self._drivers[pool.driver] = _Driver(pool)
            if self._group is not None:
                self._start(driver)
        elif driver.state.wanted and driver.pool == pool:
            return driver.state.wanted
        driver.pool = pool
        self._set(driver, wanted=driver.state.wanted + 1)
        driver.wake.set()
        return driver.state.wanted

    @property
    def statistics(self) -> Statistics:
        """What went to the API server so far."""
        return self._cluster.statistics

    def state(self, driver: str) -> PoolState:
        """Return how far a driver's pool is."""
        found = self._drivers.get(driver)
        return found.state if found else PoolState(driver)

    async def accepted(self, driver: str, ticket: int) -> PoolState:
        """Wait until the API server has what was wanted with this ticket, or something newer."""
        while (state := self.state(driver)).accepted < ticket:
            await self._changed.wait()
        return state

    async def run(self) -> None:
        """Publish until cancelled. Slices are left as they are then: claims in use need them."""
        try:
            async with asyncio.TaskGroup() as group:
                self._group = group
                for driver in self._drivers.values():
                    self._start(driver)
                try:
                    await self._watch()
                finally:
                    self._group = None  # a group that is ending takes no more workers
        finally:
            self._workers.clear()

    # --- the mirror of what the server has ---

    async def _watch(self) -> None:
        selector = f"spec.nodeName={self._node}"
        async with aclosing(self._cluster.follow(RESOURCE_SLICES, field_selector=selector)) as events:
            async for event in events:
                if isinstance(event, Listed):
                    self._replace_mirror(event.items)
                    self._listed.set()
                elif isinstance(event, Changed):
                    self._observe(event.object, deleted=event.type == "DELETED")

    def _replace_mirror(self, items: Iterable[Object]) -> None:
        self._owner = None  # perhaps the Node is another one
        for driver in self._drivers.values():
            driver.mirror.clear()
            driver.deleted.clear()
            driver.listed = True
        for item in items:
            self._keep(item)
        self._forget_missing_features()
        for driver in self._drivers.values():
            driver.wake.set()

    def _forget_missing_features(self) -> None:
        if asyncio.get_running_loop().time() - self._probed_at < self._probe_again:
            return
        missing = [feature for feature, there in self._known.items() if not there]
        for feature in missing:
            del self._known[feature]  # it may be another server by now
        if missing:
            for driver in self._drivers.values():
                driver.wake.set()

    def _observe(self, item: Object, *, deleted: bool = False) -> None:
        driver = self._driver_of(item)
        if driver is None:
            return
        metadata = item["metadata"]
        if deleted:
            driver.gone.add(metadata.get("uid", ""))
        known = driver.mirror.get(metadata["name"])
        if (known is not None and _newer(known, item)) or metadata.get("uid") in driver.deleted:
            if deleted:
                driver.deleted.discard(metadata.get("uid"))
            return  # an echo from before our own last write
        if deleted:
            if known is None:
                return
            del driver.mirror[metadata["name"]]
            self._owner = None  # perhaps the Node is another one
        else:
            self._keep(item)
            if known is not None and known["metadata"].get("resourceVersion") == metadata.get("resourceVersion"):
                return
        driver.wake.set()

    def _keep(self, item: Object) -> None:
        driver = self._driver_of(item)
        if driver is None:
            return
        body = neutral(item)
        driver.mirror[body["metadata"]["name"]] = body
        driver.generation = max(driver.generation, _generation(body))
        devices = body["spec"].get("devices") or ()
        if driver.times:
            names = {device["name"] for device in devices}
            driver.times = {key: since for key, since in driver.times.items() if key[0] not in names}
        for device in devices:
            for taint in device.get("taints") or ():
                self._known["taints"] = True
                if taint.get("timeAdded"):
                    driver.times[device["name"], taint["key"], taint["effect"]] = taint["timeAdded"]
            if device.get("allowMultipleAllocations"):
                self._known["sharing"] = True
            if device.get("consumesCounters"):
                self._known["counters"] = True

    def _driver_of(self, item: Object) -> _Driver | None:
        spec = item.get("spec") or {}
        if spec.get("nodeName") != self._node or (spec.get("pool") or {}).get("name") != self._node:
            return None
        return self._drivers.get(spec.get("driver", ""))

    # --- one driver ---

    def _start(self, driver: _Driver) -> None:
        assert self._group is not None
        name = driver.pool.driver
        self._workers[name] = self._group.create_task(self._work(driver), name=f"slices of {name}")

    async def _work(self, driver: _Driver) -> None:
        backoff = self._backoff.fresh()
        conflicts = 0
        while True:
            await driver.wake.wait()
            await self._listed.wait()
            driver.wake.clear()
            wait = 0.0
            try:
                if not driver.listed:  # it joined after the watch began, or what the server has is in doubt
                    await self._refresh(driver)
                if not await self._reconcile(driver):
                    wait = backoff.longest()
                    driver.wake.set()
            except (ConflictError, NotFoundError, VersionChangedError) as error:
                # What the server has is not what the watch said: read it, and try again.
                driver.listed = False
                conflicts += 1
                if isinstance(error, NotFoundError):
                    self._owner = None
                if conflicts > 1:
                    wait = backoff.next()
                if conflicts == 5:
                    self._problem(driver, f"the slices cannot be written: {error}")
                driver.wake.set()
            except InvalidError as error:
                self._problem(driver, f"the API server refuses the slices: {_explained(error)}")
                # It may be a policy that was just changed and is not known to every server yet. Once the waits have
                # grown to their most, only something else that is wanted will help.
                wait = backoff.next()
                if wait > self._backoff.cap / 2:
                    wait = 10 * backoff.longest()
                driver.wake.set()
            except (ApiError, UnsupportedError) as error:
                if not isinstance(error, UnavailableError) or error.code:
                    self._problem(driver, f"the slices cannot be written: {error}")
                wait = backoff.next()
                if isinstance(error, ApiError):
                    wait = max(wait, min(error.retry_after, backoff.cap))
                driver.wake.set()
            else:
                conflicts = 0
                backoff.reset()
            if wait:
                await self._pause(driver, wait)

    async def _pause(self, driver: _Driver, seconds: float) -> None:
        """Wait; something newer that is wanted does not wait for an older failure if the server answers."""
        ticket = driver.state.wanted
        pause = asyncio.ensure_future(self._cluster.pause(seconds))
        try:
            while not pause.done():
                changed = asyncio.ensure_future(self._changed.wait())
                try:
                    await asyncio.wait({pause, changed}, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    changed.cancel()
                if driver.state.wanted != ticket and self._cluster.statistics.lost_since is None:
                    return
        finally:
            pause.cancel()

    async def _refresh(self, driver: _Driver) -> None:
        selector = f"spec.nodeName={self._node},spec.driver={driver.pool.driver}"
        listing = await self._cluster.list(RESOURCE_SLICES, field_selector=selector)
        driver.mirror.clear()
        driver.listed = True
        for item in listing.items:
            self._keep(item)

    async def _reconcile(self, driver: _Driver) -> bool:
        """Make the slices as they are wanted; return False if that does not end."""
        pool, ticket = driver.pool, driver.state.wanted
        version = await self._cluster.version()
        for _ in range(ROUNDS):
            wanted = desired(pool, capabilities=self._capabilities())
            if wanted is None:
                return True
            if await self._probe(pool, wanted, version):
                continue
            await self._know_owner(wanted)
            writes = plan(
                wanted.slices,
                list(driver.mirror.values()),
                owner=self._owner,
                generation=driver.generation,
                taken=driver.taken,
                times=driver.times,
            )
            if not writes:
                self._finish(driver, wanted, ticket)
                return True
            if await self._spare(driver, ticket) and driver.state.wanted != ticket:
                return True  # something newer is wanted and has set the worker going
            for write in writes:
                try:
                    await self._write(driver, write, version)
                except UnavailableError as error:
                    if error.code != 429:
                        # It may have been carried out, or may be later. So the slices are read again and written in
                        # a generation that is newer than all: the late write names an older resourceVersion and is
                        # refused, or it makes a slice of an older generation, which the scheduler does not use.
                        driver.listed = False
                        driver.generation = max(driver.generation, _generation(write.body)) + 1
                    raise
        self._problem(driver, "the API server makes something else of the slices each time they are written")
        return False

    async def _know_owner(self, wanted: Desired) -> None:
        if self._owner is None and wanted.slices:
            node = await self._cluster.get(NODES, self._node)
            self._owner = {
                "apiVersion": "v1",
                "kind": "Node",
                "name": self._node,
                "uid": node["metadata"]["uid"],
                "controller": True,
            }

    async def _write(self, driver: _Driver, write: Write, version: str) -> None:
        metadata = write.body["metadata"]
        name = metadata["name"]
        if write.verb == "delete":
            try:
                await self._cluster.delete(RESOURCE_SLICES, name, uid=metadata.get("uid", ""))
            except NotFoundError:
                pass
            driver.mirror.pop(name, None)
            driver.deleted.add(metadata.get("uid", ""))
            driver.taken.pop(name, None)
        else:
            body = in_version(write.body, version)
            send = self._cluster.create if write.verb == "create" else self._cluster.replace
            driver.gone.clear()
            answer = neutral(await send(RESOURCE_SLICES, body))
            self._compare(driver, write.body, answer)
            known = driver.mirror.get(name)
            if answer["metadata"].get("uid", "") in driver.gone:
                driver.wake.set()  # the watch was faster: somebody has deleted it since
            elif known is None or not _newer(known, answer):
                self._keep(answer)
        self._set(driver, writes=driver.state.writes + 1)

    def _compare(self, driver: _Driver, sent: Object, answer: Object) -> None:
        """See what the server dropped or changed; once it is known it is not sent again, nor fought over."""
        for feature in _features(sent) - _features(answer):
            self._lacks(feature)
        want, have = fingerprint(sent), fingerprint(answer)
        if want == have:
            driver.taken.pop(sent["metadata"]["name"], None)
            return
        driver.taken[sent["metadata"]["name"]] = (want, have)
        if not _features(sent) - _features(answer):
            message = "the API server, or an admission webhook, changes the slices on their way; they are left so"
            self._say_once(driver, message)

    # --- what the server can do ---

    def _capabilities(self) -> Capabilities:
        return Capabilities(
            **{feature: self._known.get(feature, True) for feature in ("taints", "sharing", "counters")}
        )

    def _lacks(self, feature: Feature) -> None:
        self._known[feature] = False

    async def _probe(self, pool: Pool, wanted: Desired, version: str) -> bool:
        """Ask, by a write that is not kept, for features that are needed and not known yet; True if one is not there.

        So nothing is published that would be wrong without them: an unhealthy device without its
        taint, or partitions that exclude each other without their counters.
        """
        unknown: set[Feature] = set()
        for body in wanted.slices:
            unknown |= _features(body)
        unknown -= self._known.keys()
        asked = frozenset(unknown)
        if unknown:
            self._probed_at = asyncio.get_running_loop().time()
        while unknown:
            body = in_version(_probe_body(pool, unknown), version)
            try:
                answer = neutral(await self._cluster.create(RESOURCE_SLICES, body, dry_run=True))
            except InvalidError as error:
                if "counters" in unknown:  # before 1.35 counters had to lie in the same slice
                    self._lacks("counters")
                    unknown.discard("counters")
                    continue
                logger.debug("dry run: %s", error)
                self._known.update(dict.fromkeys(unknown, True))  # what is really written will tell
                break
            kept = _features(answer)
            self._known.update({feature: feature in kept for feature in unknown})
            break
        return not all(self._known.get(feature, True) for feature in asked)

    # --- ends ---

    async def _spare(self, driver: _Driver, ticket: int) -> bool:
        """Count a round of writes; wait first, and return True, if there were too many lately.

        The first round for a ticket is what this node itself wants (each device that moves takes
        two or three): ten times as many are spared for it as for disagreements.
        """
        now = asyncio.get_running_loop().time()
        first = ticket != driver.counted
        driver.counted = ticket
        rounds, times = driver.rounds[first], 10 if first else 1
        window = self._burst / self._per_second if self._per_second else 0.0
        rounds[:] = [at for at in rounds if now - at < window]
        many = len(rounds) >= self._burst * times
        if many and self._per_second:
            await asyncio.sleep(1.0 / (self._per_second * times))
        rounds.append(now)
        return many

    def _finish(self, driver: _Driver, wanted: Desired, ticket: int) -> None:
        unsupported: set[Feature] = {feature for feature, there in self._known.items() if not there}
        needed = _needs(driver.pool)
        for feature in unsupported & needed:
            self._say_once(driver, _WITHOUT[feature])
        for problem in wanted.problems:
            self._say_once(driver, problem)
        names = frozenset(
            device["name"] for body in driver.mirror.values() for device in body["spec"].get("devices") or ()
        )
        self._set(
            driver,
            accepted=max(ticket, driver.state.accepted),
            generation=max((_generation(body) for body in driver.mirror.values()), default=0),
            slices=len(driver.mirror),
            devices=names,
            unsupported=frozenset(unsupported & needed),
            problems=wanted.problems,
        )

    def _problem(self, driver: _Driver, message: str) -> None:
        self._set(driver, problems=tuple(dict.fromkeys((*driver.state.problems, message)))[-20:])
        self._say_once(driver, message)

    def _say_once(self, driver: _Driver, message: str) -> None:
        if message not in driver.said:
            if len(driver.said) >= 1000:
                driver.said.clear()
            driver.said.add(message)
            self._say(driver.pool.driver, message)

    def _set(self, driver: _Driver, **changes: Any) -> None:
        driver.state = replace(driver.state, **changes)
        self._changed.set()
        self._changed = asyncio.Event()


def _newer(known: Object, item: Object) -> bool:
    """Whether what is known of a slice is newer than this (versions compare as numbers since 1.35, and did before)."""
    one, other = known["metadata"].get("resourceVersion", ""), item["metadata"].get("resourceVersion", "")
    return one.isdecimal() and other.isdecimal() and int(one) > int(other)


def _features(body: Object) -> set[Feature]:
    spec = body["spec"]
    found: set[Feature] = set()
    if spec.get("sharedCounters"):
        found.add("counters")
    for device in spec.get("devices") or ():
        if device.get("taints"):
            found.add("taints")
        if device.get("allowMultipleAllocations"):
            found.add("sharing")
        if device.get("consumesCounters"):
            found.add("counters")
    return found


def _needs(pool: Pool) -> set[Feature]:
    """The features that a pool makes use of where they are."""
    needs: set[Feature] = set()
    for offer in pool.offers:
        for device in offer.devices:
            if not offer.offers(device.id):
                continue
            if offer.takes(device.id) > 1:
                needs.add("sharing")
            if _taints(pool, device):
                needs.add("taints")
            if device.consumes:
                needs.add("counters")
    return needs


def _probe_body(pool: Pool, features: Collection[Feature]) -> Object:
    device: Object = {"name": "probe"}
    if "taints" in features:
        device["taints"] = [{"key": f"{pool.driver}/unhealthy", "effect": "NoSchedule"}]
    if "sharing" in features:
        device["allowMultipleAllocations"] = True
    if "counters" in features:
        device["consumesCounters"] = [{"counterSet": "probe", "counters": {"probe": {"value": "1"}}}]
    return {
        "metadata": {"name": slice_name(pool.node, pool.driver, 0)[: MAX_NAME - 6] + "-probe"},
        "spec": {
            "driver": pool.driver,
            "nodeName": pool.node,
            "pool": {"name": pool.node, "generation": 0, "resourceSliceCount": 1},
            "devices": [device],
        },
    }


def _explained(error: ApiError) -> str:
    if not error.causes:
        return error.message
    return "; ".join(f"{cause.field}: {cause.message}" for cause in error.causes[:5])


async def remove_slices(cluster: Cluster, drivers: Iterable[str], node: str = "") -> int:
    """Delete the slices of these drivers, on one node or on all; return how many there were.

    For uninstalling; a publisher that still runs would write them again.
    """
    removed = 0
    for driver in drivers:
        selector = f"spec.driver={driver}" + (f",spec.nodeName={node}" if node else "")
        for item in (await cluster.list(RESOURCE_SLICES, field_selector=selector)).items:
            try:
                await cluster.delete(RESOURCE_SLICES, item["metadata"]["name"], uid=item["metadata"].get("uid", ""))
            except NotFoundError:
                continue
            removed += 1
    return removed
