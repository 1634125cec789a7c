"""Allocates claims as kube-scheduler 1.36 does, for one node and simple selectors. Functions without I/O.

Only complete pools of ResourceSlices count, and only their highest generation. A device is allocated only once; with
`allowMultipleAllocations`, as often as its capacity permits, each time with a new share ID. A device with a taint that
the request does not tolerate is not allocated. Pods get an extended resource from the device plugin while the node's
allocatable number of the resource is above 0, even if no device is free. When this number is 0, pods get the resource
through the DeviceClass that names the resource.

The scheduler supports CEL comparisons joined by `&&`, within LIMITS, so no library for CEL is needed. Other expressions
cause an `UnknownSelectorError`, which `FakeNode` raises before a pod waits. The scheduler does not score nodes.
"""

from __future__ import annotations

import copy
import itertools
import re
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any, Final

from deviceplugin.naming import parse_quantity
from dra_bridge.kube.api import Object

__all__ = [
    "LIMITS",
    "Object",
    "UnknownSelectorError",
    "allocate",
    "check",
    "class_of",
    "offered",
    "selected",
    "through",
    "waits_for",
]

LIMITS: Final = (
    "the fake scheduler understands `exactly`, `matchAttribute`, shared counters, and selectors of comparisons "
    'joined by &&: device.driver == "x"; device.attributes["domain"].name with == or != and a string, an integer or a '
    'boolean, alone if it is a boolean, or with .isGreaterThan(semver("1.2.3")), .isLessThan and .compareTo(...) >= 0; '
    'device.capacity["domain"].name.compareTo(quantity("1Gi")) >= 0'
)
"""The supported requests of a claim, as a text for errors."""

Candidate = tuple[str, str, Object]
"""A device that may be allocated: its driver, its pool, and its entry in a ResourceSlice."""


_TERM: Final = re.compile(
    r"""device\.(?:
        (?P<driver>driver)
        | (?P<part>attributes|capacity)\[(?P<quote>["'])(?P<domain>[^"']+)(?P=quote)\]\.(?P<name>\w+)
        )\s*(?:
        (?P<operator>==|!=)\s*(?P<value>"[^"]*"|'[^']*'|true|false|-?\d+)
        | \.compareTo\((?P<kind>quantity|semver)\((?P<mark>["'])(?P<other>[^"']+)(?P=mark)\)\)
          \s*(?P<order>>=|<=|==|>|<)\s*0
        | \.(?P<method>isGreaterThan|isLessThan)\((?P<of>quantity|semver)\((?P<sign>["'])(?P<than>[^"']+)(?P=sign)\)\)
        | (?P<bool>)
        )\s*""",
    re.VERBOSE,
)


class UnknownSelectorError(Exception):
    """Raised for a CEL expression that this scheduler does not support."""


def through(resource: str, allocatable: int, classes: Iterable[Mapping[str, Any]]) -> str | None:
    """Return the DeviceClass through which pods get an extended resource; None if the device plugin provides it."""
    return None if allocatable > 0 else class_of(resource, classes)


def class_of(resource: str, classes: Iterable[Mapping[str, Any]]) -> str | None:
    """Return the name of the (newest) DeviceClass for an extended resource; None if there is none."""
    if resource.startswith(prefix := "deviceclass.resource.kubernetes.io/"):
        return resource.removeprefix(prefix)
    naming = [
        device_class
        for device_class in classes
        if (device_class.get("spec") or {}).get("extendedResourceName") == resource
    ]
    naming.sort(
        key=lambda device_class: (
            str(device_class["metadata"].get("creationTimestamp", "")),
            device_class["metadata"]["name"],
        )
    )
    return str(naming[-1]["metadata"]["name"]) if naming else None


def offered(slices: Iterable[Mapping[str, Any]], node: str) -> list[tuple[str, str, Object]]:
    """Return the devices of all complete pools of a node as (driver, pool, device), in the order of the slices' names.

    ResourceSlices with a node selector are ignored.
    """
    pools: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for body in slices:
        spec = body["spec"]
        if spec.get("nodeName") == node or spec.get("allNodes"):
            pools.setdefault((spec["driver"], spec["pool"]["name"]), []).append(body)
    devices = []
    for (driver, pool), members in sorted(pools.items()):
        newest = max(body["spec"]["pool"].get("generation", 0) for body in members)
        current = [body for body in members if body["spec"]["pool"].get("generation", 0) == newest]
        if len(current) != current[0]["spec"]["pool"]["resourceSliceCount"]:
            continue
        names = [device["name"] for body in current for device in body["spec"].get("devices") or ()]
        if len(set(names)) < len(names):
            # The real scheduler reports "duplicate device name" (dynamic-resource-allocation 0.36, pools_stable.go).
            continue
        for body in sorted(current, key=lambda body: str(body["metadata"]["name"])):
            devices += [(driver, pool, device) for device in body["spec"].get("devices") or ()]
    return devices


def selected(expression: str, driver: str, device: Mapping[str, Any]) -> bool:
    """Return whether a device matches a CEL expression. Raises UnknownSelectorError."""
    return all(_holds(term, driver, device) for term in _terms(expression))


def _terms(expression: str) -> list[re.Match[str]]:
    """Return the comparisons that a CEL expression joins by `&&`. Raises UnknownSelectorError."""
    terms = []
    for term in expression.split("&&"):
        text = term.strip()
        while text.startswith("(") and text.endswith(")"):
            text = text[1:-1].strip()
        if (match := _TERM.fullmatch(text)) is None:
            raise UnknownSelectorError(f"the selector {term.strip()!r} is not understood: {LIMITS}")
        terms.append(match)
    return terms


def check(claim: Mapping[str, Any]) -> None:
    """Raise UnknownSelectorError if a claim requests more than `allocate` supports."""
    devices = claim["spec"].get("devices") or {}
    for request in devices.get("requests") or ():
        if "exactly" not in request:
            raise UnknownSelectorError(f"request {request['name']!r} has no `exactly`: {LIMITS}")
        for selector in request["exactly"].get("selectors") or ():
            _terms(selector["cel"]["expression"])
    for constraint in devices.get("constraints") or ():
        if "matchAttribute" not in constraint:
            raise UnknownSelectorError(f"the constraint {constraint} has no `matchAttribute`: {LIMITS}")


def _attribute(device: Mapping[str, Any], part: str, domain: str, name: str, driver: str) -> Any:
    """Return the value of a device's attribute or capacity; None if the device lacks it."""
    entries = device.get(part) or {}
    entry = entries.get(f"{domain}/{name}")
    if entry is None and domain == driver:
        entry = entries.get(name)
    if entry is None:
        return None
    return next(iter(entry.values())) if part == "attributes" else entry["value"]


def _holds(term: re.Match[str], driver: str, device: Mapping[str, Any]) -> bool:
    if term["driver"]:
        value: Any = driver
    elif (value := _attribute(device, term["part"], term["domain"], term["name"], driver)) is None:
        return False  # A missing key is an error in CEL, so the device is not selected.
    if kind := term["kind"] or term["of"]:
        order = term["order"] or {"isGreaterThan": ">", "isLessThan": "<"}[term["method"]]
        have, want = (_ordered(kind, text) for text in (value, term["other"] or term["than"]))
        return bool(
            {">=": have >= want, "<=": have <= want, "==": have == want, ">": have > want, "<": have < want}[order]
        )
    if term["operator"] is None:
        return value is True
    literal = term["value"]
    wanted: Any = literal[1:-1] if literal[0] in "\"'" else {"true": True, "false": False}.get(literal)
    if wanted is None:
        wanted = int(literal)
    return bool(value == wanted) == (term["operator"] == "==")


def _ordered(kind: str, text: str) -> Any:
    """Return a sort key for quantities, or for semantic versions.

    A version without a prerelease is higher than the same version with a prerelease (semver.org, 11).
    """
    if kind == "quantity":
        return parse_quantity(text)
    core, _, prerelease = text.partition("+")[0].partition("-")
    parts = [(0, int(one), "") if one.isdecimal() else (1, 0, one) for one in prerelease.split(".") if one]
    return [int(number) for number in core.split(".")], not prerelease, parts


def allocate(
    claim: Mapping[str, Any],
    classes: Iterable[Mapping[str, Any]],
    slices: Iterable[Mapping[str, Any]],
    claims: Iterable[Mapping[str, Any]],
    node: str,
    *,
    driver: str = "",
) -> Object | None:
    """Return the `status.allocation` of a claim on a node; None if the claim has to wait.

    classes, slices, claims: all objects of the cluster, of resource.k8s.io/v1. driver: the driver whose devices may be
    allocated; "" for all drivers.

    Raises:
        UnknownSelectorError: a request has a selector that this scheduler does not support.
    """
    check(claim)
    by_name = {device_class["metadata"]["name"]: device_class for device_class in classes}
    listed, taken_by = list(slices), list(claims)
    devices = [candidate for candidate in offered(listed, node) if driver in ("", candidate[0])]
    asked = claim["spec"].get("devices") or {}
    requests = asked.get("requests") or ()
    if any(request["exactly"]["deviceClassName"] not in by_name for request in requests):
        return None
    constraints = asked.get("constraints") or ()
    values = [
        dict.fromkeys(value for candidate in devices for value in _values(one["matchAttribute"], candidate))
        for one in constraints
    ]
    for choice in itertools.product(*values):

        def matches(request: str, candidate: Candidate, choice: Sequence[Any] = choice) -> bool:
            return all(
                value in _values(one["matchAttribute"], candidate)
                for one, value in zip(constraints, choice, strict=True)
                if request in (one.get("requests") or [request])
            )

        free = _Free(devices, listed, taken_by)
        results: list[Object] | None = []
        for request in requests:
            device_class = by_name[request["exactly"]["deviceClassName"]]
            found = _request(request, device_class, devices, free, matches)
            results = None if found is None or results is None else [*results, *found]
        if results is not None:
            config = [
                {"source": "FromClass", "requests": [request["name"]], **parameters}
                for request in requests
                for parameters in by_name[request["exactly"]["deviceClassName"]]["spec"].get("config") or ()
            ]
            config += [{"source": "FromClaim", **copy.deepcopy(one)} for one in asked.get("config") or ()]
            return {"devices": {"results": results, **({"config": config} if config else {})}}
    return None


def waits_for(
    claim: Mapping[str, Any],
    classes: Iterable[Mapping[str, Any]],
    slices: Iterable[Mapping[str, Any]],
    claims: Iterable[Mapping[str, Any]],
    node: str,
) -> str:
    """Return why `allocate` gives a claim no devices on a node, for messages. The arguments are those of `allocate`."""
    by_name, listed, taken_by = {one["metadata"]["name"]: one for one in classes}, list(slices), list(claims)
    devices, asked = offered(listed, node), claim["spec"].get("devices") or {}
    taken, free = _taken(taken_by), _Free(devices, listed, taken_by)
    for request in asked.get("requests") or ():
        exactly = request["exactly"]
        name = exactly["deviceClassName"]
        if name not in by_name:
            return f"no DeviceClass {name}; there are {', '.join(sorted(by_name)) or 'none'}"
        count, what = int(exactly.get("count") or 1), f"{exactly.get('count') or 1} of DeviceClass {name}"
        if not devices:
            of_node = [body for body in listed if body["spec"].get("nodeName") == node or body["spec"].get("allNodes")]
            if not of_node:
                return f"{what}: no ResourceSlice is of node {node}"
            return f"{what}: the ResourceSlices of node {node} are empty or incomplete"
        fitting = [one for one in devices if _fits(exactly, by_name[name], one)]
        if len(fitting) < count:
            return f"{what}: {len(fitting)} of the {len(devices)} devices in the slices match its selectors"
        if exactly.get("adminAccess"):
            continue
        tolerated = [one for one in fitting if not _repelled(one[2], exactly.get("tolerations") or ())]
        match = f"{what}: {len(fitting)} match, {{}} of them"
        if len(tolerated) < count:
            taints = ", ".join(sorted({taint["key"] for one in fitting for taint in one[2].get("taints") or ()}))
            return f"{match.format(len(tolerated))} without a taint that it does not tolerate ({taints})"
        unused = [one for one in tolerated if taken.get((one[0], one[1], one[2]["name"]), 0) < _times(one[2])]
        if len(unused) < count:
            return f"{match.format(len(unused))} not allocated to other claims"
        if sum(map(free.take, unused)) < count:
            less = "match and are not allocated, but too little of the shared counters is left"
            return f"{what}: {len(unused)} {less}"
    attributes = " and of ".join(str(one["matchAttribute"]) for one in asked.get("constraints") or ())
    return "free devices for all of its requests" + (f" with one value of {attributes}" if attributes else "")


def _fits(exactly: Mapping[str, Any], device_class: Mapping[str, Any], candidate: Candidate) -> bool:
    """Return whether a device matches the selectors of a request and its class."""
    selectors = [*(device_class["spec"].get("selectors") or ()), *(exactly.get("selectors") or ())]
    return all(selected(selector["cel"]["expression"], candidate[0], candidate[2]) for selector in selectors)


def _values(attribute: str, candidate: Candidate) -> tuple[Any, ...]:
    """Return a device's values of an attribute: none, one, or all of a list. Devices must have one value in common."""
    domain, _, name = attribute.partition("/")
    value = _attribute(candidate[2], "attributes", domain, name, candidate[0])
    return () if value is None else tuple(value) if isinstance(value, list) else (value,)


def _request(
    request: Mapping[str, Any],
    device_class: Mapping[str, Any],
    devices: Sequence[Candidate],
    free: _Free,
    matches: Callable[[str, Candidate], bool],
) -> list[Object] | None:
    """Return the allocation results of one request; None if too few devices are free."""
    exactly = request["exactly"]
    fitting = [one for one in devices if matches(request["name"], one) and _fits(exactly, device_class, one)]
    count = len(fitting) if exactly.get("allocationMode") == "All" else int(exactly.get("count") or 1)
    results: list[Object] = []
    for of, pool, device in fitting:
        if len(results) == count:
            break
        result: Object = {"request": request["name"], "driver": of, "pool": pool, "device": device["name"]}
        if exactly.get("adminAccess"):
            results.append({**result, "adminAccess": True})
        elif not _repelled(device, exactly.get("tolerations") or ()) and free.take((of, pool, device)):
            if device.get("allowMultipleAllocations"):
                result |= {"shareID": str(uuid.uuid4()), "consumedCapacity": _consumed(device)}
            results.append(result)
    return results if len(results) == count and count else None


class _Free:
    """The free devices: how often each device is allocated, and how much of each shared counter is free."""

    def __init__(
        self, devices: Iterable[Candidate], slices: Iterable[Mapping[str, Any]], claims: Iterable[Mapping[str, Any]]
    ) -> None:
        self._taken = _taken(claims)
        self._counters: dict[tuple[str, str, str, str], Fraction] = {}
        for body in slices:
            spec = body["spec"]
            for one in spec.get("sharedCounters") or ():
                for name, counter in one["counters"].items():
                    self._counters[spec["driver"], spec["pool"]["name"], one["name"], name] = parse_quantity(
                        counter["value"]
                    )
        for candidate in devices:
            if self._taken.get((candidate[0], candidate[1], candidate[2]["name"])):
                self._consume(candidate)

    def take(self, candidate: Candidate) -> bool:
        """Allocate a device once if it is free and its counters suffice. Return whether it was allocated."""
        key = (candidate[0], candidate[1], candidate[2]["name"])
        if self._taken.get(key, 0) >= _times(candidate[2]):
            return False
        needed = _consumes(candidate)
        if any(self._counters.get(counter, Fraction()) < amount for counter, amount in needed.items()):
            return False
        self._taken[key] = self._taken.get(key, 0) + 1
        self._consume(candidate)
        return True

    def _consume(self, candidate: Candidate) -> None:
        for counter, amount in _consumes(candidate).items():
            self._counters[counter] = self._counters.get(counter, Fraction()) - amount


def _consumes(candidate: Candidate) -> dict[tuple[str, str, str, str], Fraction]:
    driver, pool, device = candidate
    return {
        (driver, pool, one["counterSet"], name): parse_quantity(counter["value"])
        for one in device.get("consumesCounters") or ()
        for name, counter in one["counters"].items()
    }


def _taken(claims: Iterable[Mapping[str, Any]]) -> dict[tuple[str, str, str], int]:
    """Return how often each device is allocated. Allocations with admin access do not count."""
    taken: dict[tuple[str, str, str], int] = {}
    for claim in claims:
        allocation = (claim.get("status") or {}).get("allocation") or {}
        for result in (allocation.get("devices") or {}).get("results") or ():
            if not result.get("adminAccess"):
                key = (result["driver"], result["pool"], result["device"])
                taken[key] = taken.get(key, 0) + 1
    return taken


def _times(device: Mapping[str, Any]) -> int:
    """Return how often a device can be allocated: once, or as often as its capacity permits."""
    if not device.get("allowMultipleAllocations"):
        return 1
    capacity = device.get("capacity") or {}
    each = {name: parse_quantity(part) for name, part in _consumed(device).items()}
    return min(
        (int(parse_quantity(capacity[name]["value"]) / part) for name, part in each.items() if part),
        default=1_000_000,
    )


def _consumed(device: Mapping[str, Any]) -> dict[str, str]:
    """Return how much of each capacity of a shared device a claim takes if it requests no amount."""
    capacity: Mapping[str, Mapping[str, Any]] = device.get("capacity") or {}
    return {
        name: (amount.get("requestPolicy") or {}).get("default") or amount["value"] for name, amount in capacity.items()
    }


def _repelled(device: Mapping[str, Any], tolerations: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether a device has a taint that forbids its allocation to a request with these tolerations."""
    return any(
        taint["effect"] in ("NoSchedule", "NoExecute")
        and not any(_tolerates(toleration, taint) for toleration in tolerations)
        for taint in device.get("taints") or ()
    )


def _tolerates(toleration: Mapping[str, Any], taint: Mapping[str, Any]) -> bool:
    if toleration.get("effect") not in (None, "", taint["effect"]):
        return False
    if toleration.get("operator", "Equal") == "Exists":
        return toleration.get("key") in (None, "", taint["key"])
    return bool(toleration.get("key") == taint["key"] and toleration.get("value", "") == taint.get("value", ""))
