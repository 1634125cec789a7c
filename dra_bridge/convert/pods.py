"""Decides which claims replace the limits of a pod, and finds the pod specs in objects. Pure functions."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from deviceplugin.naming import RESOURCE, NamingError, parse_quantity
from dra_bridge.convert.remarks import RemarkKind, UnconvertibleError
from dra_bridge.convert.templates import claim_name

Path = tuple[str | int, ...]
"""The keys and indexes that lead from a document's object to a value in the object."""

MAX_DEVICES: Final = 32
"""Maximum number of devices of one claim (AllocationResultsMaxSize, pkg/apis/resource/types.go, 1.36)."""

_TEMPLATE: Final = ("spec", "template", "spec")
_PODS: Final[Mapping[tuple[str, str], Path]] = {
    ("", "Pod"): ("spec",),
    ("", "PodTemplate"): ("template", "spec"),
    ("", "ReplicationController"): _TEMPLATE,
    **{("apps", kind): _TEMPLATE for kind in ("DaemonSet", "Deployment", "ReplicaSet", "StatefulSet")},
    ("batch", "Job"): _TEMPLATE,
    ("batch", "CronJob"): ("spec", "jobTemplate", *_TEMPLATE),
}


class CustomPath(NamedTuple):
    """The path to pod templates or specs in objects of a custom kind.

    steps: keys, or `*` for every entry of a list or mapping.
    """

    kind: str
    steps: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> CustomPath:
        """Parse KIND=PATH, such as RayCluster=spec.workerGroupSpecs[*].template. Raises ValueError."""
        kind, _, path = text.partition("=")
        steps = tuple(path.replace("[]", ".*").replace("[*]", ".*").split("."))
        if not kind or not all(steps):
            raise ValueError(f"{text!r} is not KIND=PATH, such as RayCluster=spec.workerGroupSpecs[*].template")
        return cls(kind, steps)


@dataclass(frozen=True, slots=True)
class LimitedDevices:
    """The devices of one resource that a container requests by limits."""

    resource: str
    class_name: str
    count: int


@dataclass(frozen=True, slots=True)
class ContainerChange:
    """The change of a container. path: the container's path in the pod spec.

    resources: names of the resources whose limits are removed. claims: names of the claims that are added.
    """

    path: Path
    name: str
    resources: tuple[str, ...]
    claims: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PodChange:
    """The changes of a pod spec.

    claims: for the name of each new claim in the pod, the devices that the claim requests.
    """

    containers: tuple[ContainerChange, ...]
    claims: Mapping[str, LimitedDevices]


def objects_in(body: Any) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield the objects of a document with their paths: the document's object itself, or the items if it is a list."""
    if not isinstance(body, dict):
        return
    items = body.get("items")
    kind = str(body.get("kind", ""))
    if not kind.endswith("List") or not isinstance(items, list):
        yield (), body
        return
    for index, item in enumerate(items):
        if isinstance(item, dict):
            # Items of a DeploymentList, for example, may lack their kind and version, because the list's kind implies
            # them.
            known = {"apiVersion": body.get("apiVersion"), "kind": kind.removesuffix("List")}
            yield ("items", index), item if item.get("kind") else {**known, **item}


def is_builtin(body: Mapping[str, Any]) -> bool:
    """Return whether an object is of a built-in kind of Kubernetes that has pods."""
    return (str(body.get("apiVersion")).rpartition("/")[0], str(body.get("kind"))) in _PODS


def limits_elsewhere(body: Any, resources: Container[str], known: Container[Path]) -> set[str]:
    """Return which of `resources` an object requests by `limits` outside of the pod specs at the paths `known`."""
    found: set[str] = set()
    seen: set[int] = set()  # A list or mapping may contain itself, by a YAML alias.
    waiting: list[tuple[Path, Any]] = [((), body)]
    while waiting:
        path, part = waiting.pop()
        if path in known or id(part) in seen or not isinstance(part, dict | list):
            continue
        seen.add(id(part))
        for key, value in part.items() if isinstance(part, dict) else enumerate(part):
            if key == "limits" and isinstance(value, dict):
                found |= {name for name, count in value.items() if name in resources and count not in (0, "0")}
            else:
                waiting.append(((*path, key), value))
    return found


def pod_specs(body: Mapping[str, Any], custom: Iterable[CustomPath]) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield the pod specs of an object, with their paths from the object."""
    kind = str(body.get("kind"))
    known = _PODS.get((str(body.get("apiVersion")).rpartition("/")[0], kind))
    wanted = [known] if known else []
    found = [each for path in wanted for each in _at(body, path)]
    for one in custom:
        if one.kind == kind:
            found += _at(body, one.steps)
    for path, spec in found:
        inner = spec.get("spec") if isinstance(spec, dict) and "containers" not in spec else None
        if isinstance(inner, dict):
            path, spec = (*path, "spec"), inner
        if isinstance(spec, dict) and isinstance(spec.get("containers"), list):
            yield path, spec


def _at(part: Any, steps: Sequence[str | int]) -> list[tuple[Path, Any]]:
    found: list[tuple[Path, Any]] = [((), part)]
    for step in steps:
        below: list[tuple[Path, Any]] = []
        for path, one in found:
            if step == "*":
                keys = list(range(len(one))) if isinstance(one, list) else list(one) if isinstance(one, dict) else []
            else:
                keys = [step] if isinstance(one, dict) and step in one else []
            below += [((*path, key), one[key]) for key in keys]
        found = below
    return found


def extended_resources(container: Any) -> dict[str, Any]:
    """Return a container's limits of extended resources, as {resource: limit}. Limits of 0 are left out."""
    return {name: value for name, value in _quantities(container, "limits").items() if value not in (0, "0")}


def _quantities(container: Any, part: str) -> dict[str, Any]:
    resources = container.get("resources") if isinstance(container, dict) else None
    given = resources.get(part) if isinstance(resources, dict) else None
    names = given if isinstance(given, dict) else {}
    return {name: value for name, value in names.items() if isinstance(name, str) and re.fullmatch(RESOURCE, name)}


def containers_of(spec: Mapping[str, Any]) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield the containers of a pod spec with their paths. Init containers that are not sidecars come last."""
    found: list[tuple[Path, dict[str, Any]]] = []
    for part in ("containers", "initContainers"):
        each = spec.get(part)
        listed = enumerate(each if isinstance(each, list) else ())
        found += [((part, index), container) for index, container in listed if isinstance(container, dict)]
    yield from sorted(found, key=lambda one: ends_first(*one))


def ends_first(path: Path, container: Mapping[str, Any]) -> bool:
    """Return whether a container is an init container that ends before other containers start; False for a sidecar."""
    return path[0] == "initContainers" and container.get("restartPolicy") != "Always"


def pod_change(spec: Mapping[str, Any], classes: Mapping[str, str]) -> PodChange | None:
    """Return the changes of a pod spec; None if the pod requests no resource in `classes`. Raises UnconvertibleError.

    classes: for each resource, the name of its DeviceClass. Each container gets its own claim, because containers that
    share a claim share the claim's devices, but containers with limits never share devices. There is one exception. A
    container that starts after an init container reuses the init container's devices, so these two share a claim if
    both request the same number of devices (kubelet 1.36, devicemanager/manager.go, devicesToReuse).
    """
    claims: dict[str, LimitedDevices] = {}
    reusable: set[str] = set()
    changes = []
    for path, container in containers_of(spec):
        name = str(container.get("name"))
        wanted = [_limited(container, resource, classes) for resource in _given(container, classes)]
        if not wanted:
            continue
        named = []
        for devices in wanted:
            others = [claim for claim in claims.values() if claim.resource == devices.resource]
            same = [one for one, claim in claims.items() if claim == devices and one in reusable]
            if ends_first(path, container) and same:
                named.append(same[0])
                continue
            if ends_first(path, container) and others:
                detail = f"{devices.resource}: {devices.count}, beside {', '.join(str(one.count) for one in others)}"
                raise UnconvertibleError(RemarkKind.INIT_CONTAINER, name, detail)
            named.append(claim_name(devices.resource, name, claims))
            if named[-1] in {*claims, *_taken(spec)}:
                raise UnconvertibleError(RemarkKind.NAME_TAKEN, name, f"the pod has a claim {named[-1]}")
            claims[named[-1]] = devices
            if path[0] == "containers" or ends_first(path, container):
                reusable.add(named[-1])
        changes.append(ContainerChange(path, name, tuple(one.resource for one in wanted), tuple(named)))
    if not changes:
        return None
    if spec.get("nodeName"):
        raise UnconvertibleError(RemarkKind.NODE_NAME, "", f"nodeName: {spec['nodeName']}")
    return PodChange(tuple(changes), claims)


def _given(container: Mapping[str, Any], classes: Mapping[str, str]) -> list[str]:
    both = {**_quantities(container, "limits"), **_quantities(container, "requests")}
    return [name for name, value in both.items() if name in classes and value not in (0, "0")]


def _limited(container: Mapping[str, Any], resource: str, classes: Mapping[str, str]) -> LimitedDevices:
    limit = _quantities(container, "limits").get(resource)
    request = _quantities(container, "requests").get(resource, limit)
    name = str(container.get("name"))
    try:
        count, asked = parse_quantity(limit), parse_quantity(request)  # type: ignore[arg-type]  # None is refused
    except NamingError:
        raise UnconvertibleError(RemarkKind.NOT_A_COUNT, name, f"{resource}: {limit}") from None
    if count.denominator != 1 or count < 0:
        raise UnconvertibleError(RemarkKind.NOT_A_COUNT, name, f"{resource}: {limit}")
    if asked != count:
        raise UnconvertibleError(
            RemarkKind.REQUEST_DIFFERS, name, f"{resource}: the request is {request}, the limit is {limit}"
        )
    if count > MAX_DEVICES:
        raise UnconvertibleError(RemarkKind.TOO_MANY, name, f"{resource}: {count}")
    return LimitedDevices(resource, classes[resource], int(count))


def _taken(spec: Mapping[str, Any]) -> set[str]:
    claims = spec.get("resourceClaims")
    return {str(one.get("name")) for one in claims if isinstance(one, dict)} if isinstance(claims, list) else set()
