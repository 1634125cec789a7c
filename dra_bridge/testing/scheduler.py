"""What kube-scheduler 1.36 does with claims, as far as one node and plain selectors need it: functions without I/O.

Pools count only when complete, and only their highest generation. A device is given out once (with
`allowMultipleAllocations` as often as its capacity lasts, each time with a share ID of its own);
one with a taint that the request does not tolerate is left alone. An extended resource goes to the
device plugin as long as any of it is allocatable, be all of it taken; when nothing is, to the
DeviceClass that names it.

Left out: CEL beyond comparisons joined by `&&` (`UnknownSelectorError` says which), constraints,
shared counters, `firstAvailable`, scores.
"""

from __future__ import annotations

import copy
import re
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from deviceplugin.naming import parse_quantity
from dra_bridge.kube.api import Object

__all__ = ["Object", "UnknownSelectorError", "allocate", "class_of", "offered", "selected", "through"]


_TERM: Final = re.compile(
    r"""device\.(?:
        (?P<driver>driver)
        | (?P<part>attributes|capacity)\[(?P<quote>["'])(?P<domain>[^"']+)(?P=quote)\]\.(?P<name>\w+)
        )\s*(?:
        (?P<operator>==|!=)\s*(?P<value>"[^"]*"|'[^']*'|true|false|-?\d+)
        | \.compareTo\(quantity\((?P<mark>["'])(?P<quantity>[^"']+)(?P=mark)\)\)\s*(?P<order>>=|<=|==|>|<)\s*0
        | (?P<bool>)
        )\s*""",
    re.VERBOSE,
)


class UnknownSelectorError(Exception):
    """Raised when a CEL expression is more than this scheduler understands."""


def through(resource: str, allocatable: int, classes: Iterable[Mapping[str, Any]]) -> str | None:
    """Return the DeviceClass through which an extended resource is served on a node; None: the device plugin."""
    return None if allocatable > 0 else class_of(resource, classes)


def class_of(resource: str, classes: Iterable[Mapping[str, Any]]) -> str | None:
    """Return the DeviceClass that names an extended resource, the newest of several."""
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
    """Return (driver, pool, device) of all complete pools of a node, in the order of their slices.

    Node selectors are not evaluated: slices with one are for no node.
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
            continue  # "duplicate device name": buildPool, pools_stable.go of k8s.io/dynamic-resource-allocation 0.36
        for body in sorted(current, key=lambda body: str(body["metadata"]["name"])):
            devices += [(driver, pool, device) for device in body["spec"].get("devices") or ()]
    return devices


def selected(expression: str, driver: str, device: Mapping[str, Any]) -> bool:
    """Return whether a device is as a CEL expression asks for.

    Raises:
        UnknownSelectorError: the expression is more than comparisons joined by `&&`.

    """
    for term in expression.split("&&"):
        text = term.strip()
        while text.startswith("(") and text.endswith(")"):
            text = text[1:-1].strip()
        match = _TERM.fullmatch(text)
        if match is None:
            raise UnknownSelectorError(f"this scheduler does not understand {term.strip()!r}")
        if not _holds(match, driver, device):
            return False
    return True


def _holds(term: re.Match[str], driver: str, device: Mapping[str, Any]) -> bool:
    if term["driver"]:
        value: Any = driver
    else:
        entries = device.get(term["part"]) or {}
        entry = entries.get(f"{term['domain']}/{term['name']}")
        if entry is None and term["domain"] == driver:
            entry = entries.get(term["name"])
        if entry is None:
            return False  # no such key: an error in CEL, which does not select the device
        value = next(iter(entry.values())) if term["part"] == "attributes" else entry["value"]
    if term["quantity"]:
        have, want = parse_quantity(value), parse_quantity(term["quantity"])
        return {">=": have >= want, "<=": have <= want, "==": have == want, ">": have > want, "<": have < want}[
            term["order"]
        ]
    if term["operator"] is None:
        return value is True
    literal = term["value"]
    wanted: Any = literal[1:-1] if literal[0] in "\"'" else {"true": True, "false": False}.get(literal)
    if wanted is None:
        wanted = int(literal)
    return bool(value == wanted) == (term["operator"] == "==")


def allocate(
    claim: Mapping[str, Any],
    classes: Iterable[Mapping[str, Any]],
    slices: Iterable[Mapping[str, Any]],
    claims: Iterable[Mapping[str, Any]],
    node: str,
    *,
    driver: str = "",
) -> Object | None:
    """Return the `status.allocation` that a claim gets on a node; None if it has to wait.

    classes, slices, claims: all there are, as resource.k8s.io/v1 has them. driver: only this
    driver's devices are considered.

    Raises:
        UnknownSelectorError: a selector is more than this scheduler understands.

    """
    by_name = {device_class["metadata"]["name"]: device_class for device_class in classes}
    taken = _taken(claims)
    devices = [candidate for candidate in offered(slices, node) if driver in ("", candidate[0])]
    devices_spec = claim["spec"].get("devices") or {}
    results: list[Object] = []
    config: list[Object] = []
    for request in devices_spec.get("requests") or ():
        exactly = request.get("exactly")
        if exactly is None:
            raise UnknownSelectorError(f"request {request['name']!r} has no `exactly`")
        device_class = by_name.get(exactly["deviceClassName"])
        if device_class is None:
            return None
        config += [
            {"source": "FromClass", "requests": [request["name"]], **parameters}
            for parameters in device_class["spec"].get("config") or ()
        ]
        selectors = [*(device_class["spec"].get("selectors") or ()), *(exactly.get("selectors") or ())]
        fitting = [
            candidate
            for candidate in devices
            if all(selected(selector["cel"]["expression"], candidate[0], candidate[2]) for selector in selectors)
        ]
        admin = bool(exactly.get("adminAccess"))
        free = [
            candidate
            for candidate in fitting
            if admin
            or (
                taken.get((candidate[0], candidate[1], candidate[2]["name"]), 0) < _times(candidate[2])
                and not _repelled(candidate[2], exactly.get("tolerations") or ())
            )
        ]
        count = len(fitting) if exactly.get("allocationMode") == "All" else int(exactly.get("count") or 1)
        if len(free) < count or not count:
            return None
        for of, pool, device in free[:count]:
            result: Object = {"request": request["name"], "driver": of, "pool": pool, "device": device["name"]}
            if admin:
                result["adminAccess"] = True
            else:
                if device.get("allowMultipleAllocations"):
                    result |= {"shareID": str(uuid.uuid4()), "consumedCapacity": _consumed(device)}
                key = (of, pool, device["name"])
                taken[key] = taken.get(key, 0) + 1
            results.append(result)
    config += [{"source": "FromClaim", **copy.deepcopy(parameters)} for parameters in devices_spec.get("config") or ()]
    return {"devices": {"results": results, **({"config": config} if config else {})}}


def _taken(claims: Iterable[Mapping[str, Any]]) -> dict[tuple[str, str, str], int]:
    """Return how often each device is allocated."""
    taken: dict[tuple[str, str, str], int] = {}
    for claim in claims:
        allocation = (claim.get("status") or {}).get("allocation") or {}
        for result in (allocation.get("devices") or {}).get("results") or ():
            if not result.get("adminAccess"):
                key = (result["driver"], result["pool"], result["device"])
                taken[key] = taken.get(key, 0) + 1
    return taken


def _times(device: Mapping[str, Any]) -> int:
    """Return how many claims a device takes."""
    if not device.get("allowMultipleAllocations"):
        return 1
    capacity = device.get("capacity") or {}
    each = {name: parse_quantity(part) for name, part in _consumed(device).items()}
    return min(
        (int(parse_quantity(capacity[name]["value"]) / part) for name, part in each.items() if part),
        default=1_000_000,
    )


def _consumed(device: Mapping[str, Any]) -> dict[str, str]:
    """Return what a claim that asks for no amounts takes of a shared device."""
    capacity: Mapping[str, Mapping[str, Any]] = device.get("capacity") or {}
    return {
        name: (amount.get("requestPolicy") or {}).get("default") or amount["value"] for name, amount in capacity.items()
    }


def _repelled(device: Mapping[str, Any], tolerations: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a taint keeps a request away."""
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
