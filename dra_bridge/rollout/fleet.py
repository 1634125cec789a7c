"""What is so on the nodes of a cluster, and what to do next: pure functions over snapshots.

Nothing here asks anybody. Nodes, slices, claims, pods and events come in as the API server has
them; what comes out is what `status` shows, whether a move is done and what it waits for, and
which nodes a rollout begins, waits for or stops at. `dra_bridge.rollout.rollout` does it.

A rollout keeps its state on the Nodes: the share that a Node asked for before it was begun stands
in the annotation `<driver>/dra-share-before`, so that any later run can go on or undo.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from deviceplugin.naming import published_names
from deviceplugin.topology import natural
from dra_bridge.handover import Share, ShareError, parse_share
from dra_bridge.ledger import State
from dra_bridge.rollout import progress

__all__ = [
    "Before",
    "Decision",
    "DeviceView",
    "Goal",
    "Limits",
    "NodeView",
    "Phase",
    "before_annotation",
    "begin_patch",
    "decide",
    "distance",
    "drivers_of",
    "forget_patch",
    "obstacles",
    "order",
    "phase",
    "settled",
    "share_patch",
    "summary",
    "troubles",
    "views",
]

Object = Mapping[str, Any]

MOVING: Final = frozenset({State.TO_DRA, State.TO_PLUGIN})
UID_LENGTH: Final = 8
"""Characters of a pod's UID that tell it from others on its node."""


def before_annotation(driver: str) -> str:
    """Return the key of the annotation in which a rollout keeps what was before it."""
    return f"{driver}/dra-share-before"


class Before(msgspec.Struct, frozen=True, omit_defaults=True):
    """What was on a node before a rollout began with it.

    share: the annotation's text, None without one. failed: the beginnings of the UIDs of pods
    that were in trouble already.
    """

    share: str | None
    failed: tuple[str, ...] = ()


# What is so.


@dataclass(frozen=True, slots=True)
class DeviceView:
    """One device. since: Unix seconds of its state. pods: that its claims are reserved for."""

    resource: str
    name: str
    state: State
    since: int
    holder: str = ""
    waits: str = ""
    gone: bool = False
    pods: tuple[str, ...] = ()

    @property
    def side(self) -> str:
        """The side that it is on now: plugin, dra, or none."""
        if self.state in (State.PLUGIN, State.TO_DRA):
            return "plugin"
        return "none" if self.state is State.QUARANTINED else "dra"


@dataclass(frozen=True, slots=True)
class NodeView:
    """One driver on one node.

    asked: the Node's annotation, None without one. told: what the agent tells, None if nothing.
    serves: whether there are slices of the driver at all.
    """

    node: str
    driver: str
    asked: str | None = None
    before: Before | None = None
    told: progress.Progress | None = None
    devices: tuple[DeviceView, ...] = ()
    serves: bool = True
    ready: bool = True


def drivers_of(slices: Iterable[Object]) -> list[str]:
    """Return the drivers whose agents tell of moves."""
    return sorted(
        {
            driver
            for one in slices
            if progress.annotation(driver := one["spec"]["driver"]) in (one["metadata"].get("annotations") or {})
        }
    )


def views(
    driver: str, nodes: Iterable[Object], slices: Iterable[Object], claims: Iterable[Object] = ()
) -> list[NodeView]:
    """Return what is so of a driver on these nodes, in the natural order of their names."""
    by_node: dict[str, list[Object]] = {}
    for one in slices:
        if one["spec"]["driver"] == driver:
            by_node.setdefault(one["spec"].get("nodeName", ""), []).append(one)
    allocated = _allocated(driver, claims)
    found = []
    for node in nodes:
        name, annotations = node["metadata"]["name"], node["metadata"].get("annotations") or {}
        told = progress.read(driver, by_node.get(name, ()))
        found.append(
            NodeView(
                name,
                driver,
                annotations.get(progress.share_annotation(driver)),
                _before(annotations.get(before_annotation(driver))),
                told,
                _devices(told, allocated.get(name, {})) if told is not None else (),
                name in by_node,
                _ready(node),
            )
        )
    return sorted(found, key=lambda view: order(view.node))


def order(name: str) -> Any:
    """Return what names are sorted by: node-2 before node-10."""
    return natural(name)


def _before(text: str | None) -> Before | None:
    if text is None:
        return None
    try:
        return msgspec.json.decode(text, type=Before)
    except msgspec.MsgspecError:
        return None


def _ready(node: Object) -> bool:
    """Whether a node is Ready; one that says nothing is taken to be."""
    conditions = (node.get("status") or {}).get("conditions") or ()
    return all(one.get("status") == "True" for one in conditions if one.get("type") == "Ready")


def _allocated(driver: str, claims: Iterable[Object]) -> dict[str, dict[str, list[Object]]]:
    """Return the claims that were given a device by its published name, by pool."""
    found: dict[str, dict[str, list[Object]]] = {}
    for claim in claims:
        status = claim.get("status") or {}
        for result in ((status.get("allocation") or {}).get("devices") or {}).get("results") or ():
            if result.get("driver") == driver and not result.get("adminAccess"):
                found.setdefault(result.get("pool", ""), {}).setdefault(result.get("device", ""), []).append(claim)
    return found


def _devices(told: progress.Progress, allocated: Mapping[str, Sequence[Object]]) -> tuple[DeviceView, ...]:
    names = published_names(told.words, {resource: one.devices for resource, one in told.resources.items()})
    claims = {key: allocated.get(name, ()) for name, key in names.items()}
    found = []
    for resource, one in told.resources.items():
        for name, device in one.devices.items():
            holders = claims.get((resource, name), ())
            titles = dict.fromkeys(
                f"claim {claim['metadata']['namespace']}/{claim['metadata']['name']}" for claim in holders
            )
            pods = {
                str(user.get("name", ""))
                for claim in holders
                for user in (claim.get("status") or {}).get("reservedFor") or ()
                if user.get("resource") == "pods"
            }
            on_claims_side = device.state in (State.DRA, State.TO_PLUGIN)
            found.append(
                DeviceView(
                    resource,
                    name,
                    device.state,
                    device.since,
                    (on_claims_side and ", ".join(titles)) or device.holder,
                    device.waits,
                    device.gone,
                    tuple(sorted(pods)) if on_claims_side else (),
                )
            )
    return tuple(sorted(found, key=lambda view: (natural(view.resource), natural(view.name))))


# Moves.


def distance(view: NodeView) -> int:
    """Return how many devices have still to move until the node is as it is asked to be."""
    if view.told is None:
        return 0
    asked = _share(view.asked)
    left = 0
    for resource in view.told.resources.values():
        share = asked or _share(resource.share)
        counts = resource.counts
        total = sum(number for state, number in counts.items() if state != State.QUARANTINED.value)
        to_dra, to_plugin = counts.get(State.TO_DRA.value, 0), counts.get(State.TO_PLUGIN.value, 0)
        bound = counts.get(State.DRA.value, 0) + to_dra
        missing = (share.of(total) if share is not None else bound) - bound
        # Those under way to the wrong side are turned round before others begin.
        turned = min(missing, to_plugin) if missing > 0 else min(-missing, to_dra)
        left += to_dra + to_plugin + abs(missing) - turned
    return left


def settled(view: NodeView) -> bool:
    """Return whether the agent knows what is asked for and every device is where it should be."""
    return view.told is not None and view.told.asked == (view.asked or "") and distance(view) == 0


def obstacles(view: NodeView) -> list[str]:
    """Return what stands between a node and what it is asked for, for people; nothing if it is settled."""
    if view.told is None:
        if view.serves:
            return ["its agent tells nothing of moves: it is an older one, or its annotation cannot be read"]
        return [f"there are no slices of {view.driver}: its agent has not run there"]
    if view.asked is not None and _share(view.asked) is None:
        return [f"its annotation {progress.share_annotation(view.driver)}: {view.asked!r} is not a share"]
    if view.told.asked != (view.asked or ""):
        ready = "" if view.ready else " (the node is not Ready)"
        return [f"its agent has not taken it in yet; is it running?{ready}"]
    found = []
    for device in view.devices:
        if device.state in MOVING:
            holder = " for ".join(filter(None, (device.holder, ", ".join(device.pods))))
            waits = device.waits or "its agent"
            held = f", held by {holder}" if holder and holder not in waits else ""
            found.append(f"{device.name} ({device.state.value}) waits for {waits}{held}")
    if not found and distance(view):
        holders = [f"{one.name} held by {one.holder}" for one in view.devices if one.holder]
        found.append(f"devices move when they are idle: {', '.join(holders)}" if holders else "its agent")
    return found


def summary(view: NodeView) -> str:
    """Return a line on a node: what is asked for by whom, and how many devices are where."""
    if view.told is None:
        return obstacles(view)[0]
    asked = "nothing" if view.asked is None else view.asked
    parts = [f"asked for {asked}"]
    for name, resource in view.told.resources.items():
        counts = ", ".join(f"{number} {state}" for state, number in sorted(resource.counts.items())) or "no devices"
        parts.append(f"{name}: {counts} (share {resource.share})")
    return "; ".join(parts)


def _share(text: str | None) -> Share | None:
    try:
        return parse_share(text) if text is not None else None
    except ShareError:
        return None


# Trouble.


def troubles(pods: Iterable[Object], events: Iterable[Object], resources: Collection[str]) -> dict[str, str]:
    """Return the pods of a node that devices may have failed, in words, by the beginning of their UIDs.

    Such are pods that ask for one of the resources or have claims, and that are Failed (as after
    UnexpectedAdmissionError) or cannot start for an event FailedPrepareDynamicResources.
    """
    unprepared = {
        (one.get("involvedObject") or {}).get("uid"): str(one.get("message", ""))
        for one in events
        if one.get("reason") == "FailedPrepareDynamicResources"
    }
    found = {}
    for pod in pods:
        metadata, status = pod["metadata"], pod.get("status") or {}
        uid, name = str(metadata["uid"]), f"{metadata.get('namespace', '')}/{metadata['name']}"
        if not _asks(pod, resources):
            continue
        if status.get("phase") == "Failed":
            said = ": ".join(filter(None, (status.get("reason"), status.get("message"))))
            found[uid[:UID_LENGTH]] = f"pod {name} has failed{f' ({said})' if said else ''}"
        elif status.get("phase") == "Pending" and uid in unprepared:
            found[uid[:UID_LENGTH]] = f"pod {name} cannot start ({unprepared[uid]})"
    return found


def _asks(pod: Object, resources: Collection[str]) -> bool:
    spec = pod.get("spec") or {}
    if spec.get("resourceClaims") or (pod.get("status") or {}).get("extendedResourceClaimStatus"):
        return True
    containers = [*(spec.get("containers") or ()), *(spec.get("initContainers") or ())]
    return any(
        name in ((container.get("resources") or {}).get(part) or {})
        for container in containers
        for part in ("limits", "requests")
        for name in resources
    )


# Rollouts.


@dataclass(frozen=True, slots=True)
class Goal:
    """What a rollout is for. share: the annotation's text, None to remove it; without meaning in an undo."""

    share: str | None = None
    undo: bool = False

    def wanted(self, view: NodeView) -> str | None:
        """Return what a node is to be asked for."""
        return view.before.share if self.undo and view.before is not None else self.share


class Phase(enum.Enum):
    """How far a node is. OUT: it is none of the rollout's business. AWAY: no agent serves it."""

    WAITING = "waiting"
    MOVING = "moving"
    DONE = "done"
    OUT = "out"
    AWAY = "away"


def phase(goal: Goal, view: NodeView) -> Phase:
    """Return how far a node is."""
    if goal.undo and view.before is None:
        return Phase.OUT
    if view.asked != goal.wanted(view):
        return Phase.WAITING if view.told is not None or goal.undo else Phase.AWAY
    if view.told is None:
        return Phase.DONE if goal.undo else Phase.AWAY
    return Phase.DONE if settled(view) else Phase.MOVING


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do now.

    begin: nodes to be asked now. forget: nodes that are as they were, whose record can go. stop:
    why nothing more is begun, if something went wrong. over: nothing is left to do or to wait for.
    """

    begin: tuple[str, ...] = ()
    forget: tuple[str, ...] = ()
    stop: tuple[str, ...] = ()
    over: bool = False


@dataclass(frozen=True, slots=True)
class Limits:
    """How careful a rollout is. patience: seconds that a node may take; pause: stop after the first nodes."""

    max_unavailable: int = 1
    patience: float = 600.0
    pause: bool = False


def decide(
    goal: Goal,
    nodes: Sequence[NodeView],
    limits: Limits,
    *,
    now: float = 0.0,
    since: Mapping[str, float] | None = None,
    trouble: Mapping[str, Mapping[str, str]] | None = None,
    own: Collection[str] = frozenset(),
) -> Decision:
    """Decide what a rollout does next.

    since: when each node in the move was first seen so by this run. trouble: pods in trouble by
    node (`troubles`); those known before the node was begun do not count. own: nodes that this run
    has begun.
    """
    phases = {view.node: phase(goal, view) for view in nodes}
    by_name = {view.node: view for view in nodes}
    moving = [name for name, at in phases.items() if at is Phase.MOVING]
    forget = tuple(name for name, at in phases.items() if at is Phase.DONE) if goal.undo else ()
    stop = [
        f"{name}: {said}"
        for name, pods in (trouble or {}).items()
        if name in by_name
        for uid, said in pods.items()
        if uid not in _known(by_name[name])
    ]
    for name in moving:
        if now - (since or {}).get(name, now) > limits.patience:
            waits = "; ".join(obstacles(by_name[name])) or "its agent"
            stop.append(f"{name}: not done after {limits.patience:g} s: {waits}")
    if stop:
        return Decision(forget=forget, stop=tuple(stop))
    waiting = [name for name, at in phases.items() if at is Phase.WAITING]
    if limits.pause and own:
        return Decision(forget=forget, over=not moving and not forget)
    # One that moves already, to another share, is in the move whether it is asked or not.
    restless = [name for name in waiting if by_name[name].told is not None and not settled(by_name[name])]
    ready = [name for name in waiting if name not in restless and by_name[name].ready]
    room = max(0, limits.max_unavailable - len(moving) - len(restless))
    begin = (*restless[: max(0, limits.max_unavailable - len(moving))], *ready[:room])
    if waiting and not begin and not moving:
        return Decision(forget=forget, stop=tuple(f"{name}: the node is not Ready" for name in waiting))
    return Decision(begin, forget, over=not moving and not waiting and not forget)


def _known(view: NodeView) -> Collection[str]:
    return view.before.failed if view.before is not None else ()


def share_patch(driver: str, share: str | None) -> dict[str, Any]:
    """Return the merge patch of a Node that asks for a share, or (None) for nothing any more."""
    return {"metadata": {"annotations": {progress.share_annotation(driver): share}}}


def begin_patch(goal: Goal, driver: str, node: Object, trouble: Collection[str]) -> dict[str, Any] | None:
    """Return the merge patch that begins a node, None if it was begun: the share, and what was before it.

    node: as it is, which the patch depends on. trouble: UIDs as of `troubles`. What was before the
    first rollout stays known through later ones; one that is undone goes back to it.
    """
    annotations = node["metadata"].get("annotations") or {}
    key, before_key = progress.share_annotation(driver), before_annotation(driver)
    now, before = annotations.get(key), _before(annotations.get(before_key))
    wanted = goal.share
    if goal.undo:
        if before is None:
            return None
        wanted = before.share
    if now == wanted:
        return None
    kept = before or Before(now)
    kept = msgspec.structs.replace(kept, failed=tuple(sorted(trouble)))
    return {
        "metadata": {
            "annotations": {key: wanted, before_key: msgspec.json.encode(kept).decode()},
            "resourceVersion": node["metadata"].get("resourceVersion"),
        }
    }


def forget_patch(driver: str, node: Object) -> dict[str, Any]:
    """Return the merge patch that removes what a rollout has kept on a node."""
    return {
        "metadata": {
            "annotations": {before_annotation(driver): None},
            "resourceVersion": node["metadata"].get("resourceVersion"),
        }
    }
