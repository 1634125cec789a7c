"""What others write into a driver's pool on this node: which slices and edits these are, and how they are described.

The scheduler takes all slices of one driver and one pool name that are for a node as one pool, whoever wrote them. Of
these it uses those of the highest generation, if they are as many as the first of them says, and if no device has its
name twice (k8s.io/dynamic-resource-allocation 0.36, structured/internal/stable/pools_stable.go, GatherPools).
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
"""Seconds for which a write of others is remembered."""
OFTEN: Final = 6
"""Writes of others within WINDOW from which on somebody is said to write again and again."""
REMEMBERED: Final = 64
"""Writes of others that are remembered at most."""


class ForeignKind(Enum):
    """What others wrote. The values are the label `kind` of the metric."""

    SLICE = "slice"
    """A slice in the pool, for this node by its name."""
    NODELESS = "nodeless"
    """A slice in the pool that names no node: `allNodes`, `nodeSelector` or `perDeviceNodeSelection`."""
    POOL = "pool"
    """A slice of the driver for this node in a pool of another name, whose devices no claim can have."""
    EDITED = "edited"
    """The agent's own slice with other devices, another count or another generation."""
    GENERATION = "generation"
    """A slice in the pool, the agent's own or not, of a generation that is so high that it might not be outgrown."""
    NAME = "name"
    """A slice that is not of the pool and has the name of one of the agent's."""
    DELETED = "deleted"
    """The agent's own slice was deleted, as the kubelet does when it starts."""


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
    """A slice of others. devices: those that it offers in the pool. manager: the program that wrote it last, or "".

    uid: of the object. finalizers: what keeps it from going, once it is being deleted. refused: the API server's words
    when it was to be deleted, "" if it was not refused.
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
    """A write of others that was overcome. at: monotonic seconds."""

    kind: ForeignKind
    name: str
    manager: str
    at: float


def is_own(body: Object, driver: str, node: str) -> bool:
    """Return whether a slice is one of the agent's by its name and by the fields that nobody can change.

    An agent that publishes fewer slices than before finds those that it has too many.
    """
    spec = body["spec"]
    where = (spec.get("driver"), spec.get("nodeName"), spec["pool"]["name"])
    return where == (driver, node, node) and own_name(node, driver, body["metadata"]["name"])


def kind_of(body: Object, node: str) -> ForeignKind:
    """Return what a slice of others is. It may be one of the agent's by its name: then only its generation is wrong."""
    spec = body["spec"]
    if spec["pool"]["name"] != node:
        return ForeignKind.POOL
    if generation_of(body) >= UNGROWABLE:
        return ForeignKind.GENERATION
    return ForeignKind.SLICE if spec.get("nodeName") else ForeignKind.NODELESS


def offered_in(body: Object, node: str) -> frozenset[str]:
    """Return the devices that a slice offers in this node's pool."""
    spec = body["spec"]
    return frozenset(device["name"] for device in spec.get("devices") or () if spec["pool"]["name"] == node)


def manager_of(body: Object) -> str:
    """Return the program that changed an object last, by its managedFields; "" if they do not tell.

    Their times are whole seconds: of two programs in one second it is not the agent.
    """
    entries = body["metadata"].get("managedFields") or ()
    latest: Mapping[str, str] = max(
        entries, key=lambda entry: (str(entry.get("time", "")), entry.get("manager") != COMPONENT), default={}
    )
    return str(latest.get("manager", ""))


def foreign_slices(bodies: Iterable[Object], driver: str, node: str, refused: Mapping[str, str]) -> list[ForeignSlice]:
    """Return the slices that are not the agent's, by name. refused: why they could not be deleted, by UID."""
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
    """Return the writes of others with a new one, without those that were long ago."""
    return (*(write for write in writes if new.at - write.at < WINDOW), new)[-REMEMBERED:]


def sentence(kind: ForeignKind, name: str, manager: str) -> str:
    """Return what was written, as the beginning of a sentence."""
    by = f" (written by {manager})" if manager else ""
    return f"slice {name}{by} {_WORDS[kind]}"


def problems(
    driver: str, present: Iterable[ForeignSlice], writes: Sequence[ForeignWrite], now: float | None = None
) -> Iterator[str]:
    """Yield a sentence for each slice of others that is there, and one if others write again and again.

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
            f"{WINDOW / 60:.0f} minutes; the agent undoes it, but not at any rate; the last: {last}"
        )
