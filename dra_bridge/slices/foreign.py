"""Finds and describes foreign writes: slices and edits by other programs in a driver's pool on this node.

The scheduler joins all slices of a node that name the same driver and pool, even if different programs wrote them. The
scheduler uses only the slices of the highest generation, and only on two conditions: the first of these slices states
the correct number of slices, and no two devices have the same name (k8s.io/dynamic-resource-allocation 0.36,
structured/internal/stable/pools_stable.go, GatherPools).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

from dra_bridge.kube import Object
from dra_bridge.kube.client import COMPONENT
from dra_bridge.slices.desired import own_name
from dra_bridge.slices.plan import UNGROWABLE, generation_of

WINDOW: Final = 600.0
"""Seconds for which the agent remembers a write of another program."""
OFTEN: Final = 6
"""Minimum number of foreign writes within `WINDOW` seconds for which the agent reports that other programs write again
and again."""
REMEMBERED: Final = 64
"""Maximum number of foreign writes that the agent remembers."""


class ForeignKind(Enum):
    """Kinds of foreign writes. Each value is a value of the metric's label `kind`."""

    SLICE = "slice"
    """A foreign slice in the driver's pool that names this node."""
    NODELESS = "nodeless"
    """A slice in the driver's pool that names no node: `allNodes`, `nodeSelector` or `perDeviceNodeSelection`."""
    POOL = "pool"
    """A foreign slice of the driver for this node, in a pool of another name. No claim can get its devices."""
    EDITED = "edited"
    """The agent's own slice, in which another program changed the devices, the slice count or the generation."""
    GENERATION = "generation"
    """Any slice in the pool with a generation so high that the agent could not increase it any more."""
    NAME = "name"
    """A slice outside the pool with a name that the agent needs for a slice of its own."""
    DELETED = "deleted"
    """The agent's own slice was deleted by another program. The kubelet also deletes the slices of its node when it
    starts."""


_WORDS: Final[Mapping[ForeignKind, str]] = {
    ForeignKind.SLICE: "is in the agent's pool",
    ForeignKind.NODELESS: "is in the agent's pool without spec.nodeName",
    ForeignKind.POOL: "is for this node in a pool that no agent serves",
    ForeignKind.EDITED: "is the agent's own and was edited",
    ForeignKind.GENERATION: "has a pool generation that leaves no room for a higher one",
    ForeignKind.NAME: "has the name of one of the agent's slices",
    ForeignKind.DELETED: "is the agent's own and was deleted",
}


@dataclass(frozen=True, slots=True)
class ForeignSlice:
    """A slice that another program wrote into the driver's pool, or for the driver and this node.

    devices: the devices that the slice offers in the pool. manager: the program that wrote the slice last, or "". uid:
    the slice's UID. finalizers: the finalizers that keep the object while it is being deleted. refused: the API
    server's message if it refused the deletion, otherwise "".
    """

    name: str
    kind: ForeignKind
    uid: str
    devices: frozenset[str]
    manager: str = ""
    finalizers: tuple[str, ...] = ()
    refused: str = ""


@dataclass(frozen=True, slots=True)
class ForeignWrite:
    """A write of another program that the agent has undone. at: when the agent undid the write (monotonic seconds)."""

    kind: ForeignKind
    name: str
    manager: str
    at: float


def is_own(body: Object, driver: str, node: str) -> bool:
    """Return whether a slice is the agent's own, by its name and by fields that cannot be changed.

    So an agent that now publishes fewer slices also finds the slices that it no longer needs.
    """
    spec = body["spec"]
    where = (spec.get("driver"), spec.get("nodeName"), spec["pool"]["name"])
    return where == (driver, node, node) and own_name(node, driver, body["metadata"]["name"])


def kind_of(body: Object, node: str) -> ForeignKind:
    """Return the kind of a foreign slice, or GENERATION for any slice in the pool whose generation is too high."""
    spec = body["spec"]
    if spec["pool"]["name"] != node:
        return ForeignKind.POOL
    if generation_of(body) >= UNGROWABLE:
        return ForeignKind.GENERATION
    return ForeignKind.SLICE if spec.get("nodeName") else ForeignKind.NODELESS


def offered_in(body: Object, node: str) -> frozenset[str]:
    """Return the published names of the devices that a slice offers in this node's pool."""
    spec = body["spec"]
    return frozenset(device["name"] for device in spec.get("devices") or () if spec["pool"]["name"] == node)


def manager_of(body: Object) -> str:
    """Return the program that changed an object last, from the object's managedFields; "" if it is unknown.

    The times in managedFields are whole seconds. If the agent and another program wrote in the same second, the
    function returns the other program.
    """
    entries = body["metadata"].get("managedFields") or ()
    latest: Mapping[str, str] = max(
        entries, key=lambda entry: (str(entry.get("time", "")), entry.get("manager") != COMPONENT), default={}
    )
    return str(latest.get("manager", ""))


def foreign_slices(bodies: Iterable[Object], driver: str, node: str, refused: Mapping[str, str]) -> list[ForeignSlice]:
    """Return the foreign slices, sorted by name.

    refused: for each slice's UID, why the API server refused to delete it.
    """
    found = []
    for body in bodies:
        metadata = body["metadata"]
        if is_own(body, driver, node):
            continue
        leaving = tuple(metadata.get("finalizers") or ()) if metadata.get("deletionTimestamp") else ()
        uid = metadata.get("uid", "")
        reason = refused.get(uid, "")
        offers = offered_in(body, node)
        found.append(
            ForeignSlice(metadata["name"], kind_of(body, node), uid, offers, manager_of(body), leaving, reason)
        )
    return sorted(found, key=lambda one: one.name)


def remembered(writes: Sequence[ForeignWrite], new: ForeignWrite) -> tuple[ForeignWrite, ...]:
    """Return the remembered foreign writes and a new write, without writes that are older than `WINDOW` seconds."""
    return (*(write for write in writes if new.at - write.at < WINDOW), new)[-REMEMBERED:]


def sentence(kind: ForeignKind, name: str, manager: str) -> str:
    """Return the beginning of a sentence about a foreign write: the slice, the program, and what is wrong."""
    by = f" (written by {manager})" if manager else ""
    return f"slice {name}{by} {_WORDS[kind]}"


def problems(
    driver: str, present: Iterable[ForeignSlice], writes: Sequence[ForeignWrite], now: float | None = None
) -> Iterator[str]:
    """Yield a sentence for each foreign slice, and another sentence if other programs write again and again.

    now: monotonic seconds.
    """
    for one in present:
        what = f"driver {driver}: {sentence(one.kind, one.name, one.manager)}"
        if one.finalizers:
            yield f"{what}; it is being deleted and waits for its finalizers: {', '.join(one.finalizers)}"
        elif one.kind is ForeignKind.POOL:
            yield f"{what}; a claim that gets its devices is not prepared: kubectl delete resourceslice {one.name}"
        elif one.refused:
            yield f"{what}; the agent may not delete it ({one.refused}): kubectl delete resourceslice {one.name}"
        else:
            yield f"{what}; the agent deletes it"
    at = time.monotonic() if now is None else now
    recent = [write for write in writes if at - write.at < WINDOW]
    if len(recent) >= OFTEN:
        count = f"{len(recent)} times" if len(recent) < REMEMBERED else f"at least {REMEMBERED} times"
        last = sentence(recent[-1].kind, recent[-1].name, recent[-1].manager)
        yield (
            f"driver {driver}: others write into the pool, or delete slices, again and again: {count} in the last "
            f"{WINDOW / 60:.0f} minutes; the agent undoes this at a limited rate; the last write: {last}"
        )
