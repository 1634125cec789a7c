"""The writes that turn the ResourceSlices which the API server has into the wanted ones, and how two slices compare."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from deviceplugin.naming import NamingError, parse_quantity
from dra_bridge.kube import Object

__all__ = ["ServerMutations", "Times", "Write", "fingerprint", "generation_of", "plan"]


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


class Write(NamedTuple):
    """One write: `body` is what to send; for a delete only its metadata counts."""

    verb: Literal["create", "replace", "delete"]
    body: Object


ServerMutations = Mapping[str, tuple[str, str]]
"""By slice name: the fingerprints of what was sent last and of what the server made of it."""

Times = Mapping[tuple[str, str, str], str]
"""When a taint was added, by device, key and effect; RFC 3339."""


def plan(
    wanted: Sequence[Object],
    existing: Sequence[Object],
    *,
    owner: Object | None = None,
    generation: int = 0,
    mutations: ServerMutations | None = None,
    times: Times | None = None,
) -> list[Write]:
    """Return the fewest writes, in their order, that turn a pool's existing slices into the wanted ones.

    A pool is used by the scheduler only while all slices of its highest generation are there. So a
    change of one slice is one write that takes effect at once; a change of several goes into a new
    generation, written slice after slice while the old one is superseded by the first of them, and
    slices that are left over are deleted last. A plan that was broken off is taken up again.

    owner: ownerReference of each slice. generation: the highest one that was ever written.
    mutations: see ServerMutations; a difference that the server itself makes is not fought. times: see Times.
    """
    names = {body["metadata"]["name"] for body in wanted}
    current = {body["metadata"]["name"]: body for body in existing}
    latest = max([generation, *(generation_of(body) for body in existing)], default=0)
    extras = [body for body in existing if body["metadata"]["name"] not in names]

    def same(body: Object) -> bool:
        found = current.get(body["metadata"]["name"])
        return found is not None and _as_wanted(body, found, mutations or {})

    def settled(body: Object) -> bool:
        return same(body) and generation_of(current[body["metadata"]["name"]]) == latest

    changed = [body for body in wanted if not settled(body)]
    now = [body for body in existing if generation_of(body) == latest]
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


def generation_of(body: Object) -> int:
    """Return the generation of the pool that a slice says it is of, 0 for none."""
    return int((body["spec"].get("pool") or {}).get("generation") or 0)


def _by_name(bodies: Sequence[Object], one: Object) -> Object:
    return next(body for body in bodies if body["metadata"]["name"] == one["metadata"]["name"])


def _as_wanted(wanted: Object, found: Object, mutations: ServerMutations) -> bool:
    want, have = fingerprint(wanted), fingerprint(found)
    return want == have or mutations.get(wanted["metadata"]["name"]) == (want, have)


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
