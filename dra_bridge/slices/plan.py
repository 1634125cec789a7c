"""Computes the writes that turn the ResourceSlices of the API server into the wanted slices, and compares slices."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple

import msgspec

from deviceplugin.naming import NamingError, parse_quantity
from dra_bridge.kube import Object

UNGROWABLE: Final = 2**62
"""The agent replaces or deletes an edited or foreign slice whose generation is at least this number, because the API
server accepts no generation above 2**63 - 1."""


def in_version(body: Object, version: str) -> Object:
    """Convert a slice of resource.k8s.io/v1 to another version: v1beta2 is equal, v1beta1 nests each device deeper."""
    if version == "v1beta1" and "devices" in body["spec"]:
        devices = [
            {"name": device["name"], "basic": {key: value for key, value in device.items() if key != "name"}}
            for device in body["spec"]["devices"]
        ]
        body = {**body, "spec": {**body["spec"], "devices": devices}}
    return {**body, "apiVersion": f"resource.k8s.io/{version}", "kind": "ResourceSlice"}


def neutral(body: Object) -> Object:
    """Convert a ResourceSlice of any API version to resource.k8s.io/v1, the only version that this package handles."""
    spec = body.get("spec") or {}
    devices = spec.get("devices") or []
    if any("basic" in device for device in devices):
        flat = [{"name": device["name"], **(device.get("basic") or {})} for device in devices]
        body = {**body, "spec": {**spec, "devices": flat}}
    return body


def fingerprint(body: Object) -> str:
    """Return a digest of a slice's content. Equivalent contents have the same digest.

    The digest depends on the values of quantities (1Gi equals 1024Mi), not on empty fields, the order of keys, the
    times at which taints were added, or the pool's generation.
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
                    [name, _number(capacity.get("value")), _policy(capacity.get("requestPolicy"))]
                    for name, capacity in sorted((device.get("capacity") or {}).items())
                ],
                [[taint["key"], taint.get("value") or "", taint["effect"]] for taint in device.get("taints") or ()],
                [
                    [consumed["counterSet"], _amounts(consumed.get("counters"))]
                    for consumed in device.get("consumesCounters") or ()
                ],
                bool(device.get("allowMultipleAllocations")),
                # The digest includes fields that this package does not use, such as bindingConditions, because other
                # programs may have added them.
                sorted((key, value) for key, value in device.items() if key not in _OF_DEVICES and value),
            ]
            for device in spec.get("devices") or ()
        ],
        [
            [counter_set["name"], _amounts(counter_set.get("counters"))]
            for counter_set in spec.get("sharedCounters") or ()
        ],
    ]
    return hashlib.sha256(msgspec.json.encode(content)).hexdigest()


_OF_DEVICES: Final = frozenset(
    {"name", "attributes", "capacity", "taints", "consumesCounters", "allowMultipleAllocations"}
)


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
        [_number(quantity) for quantity in policy.get("validValues") or ()],
        [_number(span.get(key)) for key in ("min", "max", "step")],
    ]


def _amounts(counters: Object | None) -> list[Any]:
    return [[name, _number(counter.get("value"))] for name, counter in sorted((counters or {}).items())]


class Write(NamedTuple):
    """A write to the API server. body: the slice to send; for a deletion, only the slice's metadata is used."""

    verb: Literal["create", "replace", "delete"]
    body: Object


ServerMutations = Mapping[str, tuple[str, str]]
"""For each slice name, two fingerprints: of the slice that was last sent, and of the slice that the server then
stored."""

Times = Mapping[tuple[str, str, str], str]
"""For each taint (device, key, effect), when the taint was added (RFC 3339)."""


def plan(
    wanted: Sequence[Object],
    existing: Sequence[Object],
    *,
    owner: Object | None = None,
    generation: int = 0,
    mutations: ServerMutations | None = None,
    times: Times | None = None,
) -> list[Write]:
    """Return the fewest writes, in their order, that turn a pool's existing slices into the wanted slices.

    The scheduler uses a pool only while it finds all slices of the pool's highest generation. So a change of one slice
    is a single write, which takes effect at once. A change of several slices needs a new generation: the first slice of
    the new generation makes the old generation invalid, and superfluous slices are deleted last. If the writes of an
    earlier plan were interrupted, this plan continues them.

    A foreign generation above `generation` is undone if it is at least `UNGROWABLE`: a wanted slice is replaced by a
    slice of the former generation, any other slice is deleted. The scheduler accepts the lower generation, because it
    does not remember former generations.

    existing: the pool's slices, foreign slices included. The plan deletes foreign slices; no foreign slice may have the
    name of a wanted slice. owner: ownerReference of each slice. generation: the highest generation that was ever
    written. mutations: changes that the server makes to sent slices; the plan does not try to undo such changes. times:
    when the taints of devices were added; the written slices have these times.
    """
    bodies = {body["metadata"]["name"]: body for body in wanted}
    current = {body["metadata"]["name"]: body for body in existing}
    latest = max([generation, *(number for number in map(generation_of, existing) if number < UNGROWABLE)])

    prints = {name: (fingerprint(bodies[name]), fingerprint(current[name])) for name in bodies.keys() & current.keys()}
    same = {
        name for name, (want, have) in prints.items() if want == have or (mutations or {}).get(name) == (want, have)
    }
    in_latest = {name for name, body in current.items() if generation_of(body) == latest}
    extras = [body for name, body in current.items() if name not in bodies]
    changed = [name for name in bodies if name not in same & in_latest]
    if in_latest <= same:
        # All existing slices of this generation are as wanted, so only the missing slices are written.
        target = max(latest, 1)
    elif len(bodies) > 1 and len(changed) == 1 and in_latest == current.keys() == bodies.keys():
        target = latest
    else:
        target, changed = latest + 1, list(bodies)
    writes = []
    for name, body in bodies.items():
        present = current.get(name)
        owned = present is not None and (owner is None or present["metadata"].get("ownerReferences") == [owner])
        if name in changed or present is None or not owned or annotations_of(body)[0] != annotations_of(present)[0]:
            verb: Literal["create", "replace"] = "create" if present is None else "replace"
            writes.append(Write(verb, _body(body, present, target, owner, times or {})))
    # A slice that is already being deleted, and waits for its finalizers, is not deleted again.
    return writes + [Write("delete", body) for body in extras if not body["metadata"].get("deletionTimestamp")]


def generation_of(body: Object) -> int:
    """Return the pool's generation that a slice states; 0 if the slice states no generation."""
    return int((body["spec"].get("pool") or {}).get("generation") or 0)


def annotations_of(body: Object) -> tuple[dict[str, str], dict[str, str]]:
    """Return two dicts of a slice's annotations: those with names under `<driver>/`, and all others."""
    prefix = f"{body['spec']['driver']}/"
    annotations = body["metadata"].get("annotations") or {}
    own = {key: value for key, value in annotations.items() if key.startswith(prefix)}
    return own, {key: value for key, value in annotations.items() if key not in own}


def _body(wanted: Object, present: Object | None, generation: int, owner: Object | None, times: Times) -> Object:
    metadata = dict(wanted["metadata"])
    if present is not None:
        have = present["metadata"]
        kept = ("uid", "resourceVersion", "labels", "finalizers", "ownerReferences")
        metadata.update({key: have[key] for key in kept if key in have})
        annotations = {**annotations_of(present)[1], **(metadata.pop("annotations", None) or {})}
        if annotations:
            metadata["annotations"] = annotations
    if owner is not None:
        metadata["ownerReferences"] = [owner]
    spec = {**wanted["spec"], "pool": {**wanted["spec"]["pool"], "generation": generation}}
    if "devices" in spec:
        spec["devices"] = [_with_times(device, times) if "taints" in device else device for device in spec["devices"]]
    return {**wanted, "metadata": metadata, "spec": spec}


def _with_times(device: Object, times: Times) -> Object:
    taints = []
    for taint in device["taints"]:
        since = times.get((device["name"], taint["key"], taint["effect"]))
        taints.append({**taint, "timeAdded": since} if since else taint)
    return {**device, "taints": taints}
