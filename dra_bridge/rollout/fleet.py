"""Computes, from API objects, the progress of a cluster's nodes and the next steps of a rollout. Pure functions.

The state of a rollout is on the Nodes: the annotation `<driver>/dra-share-before` records a Node's share before the
rollout. So a later run of the command `rollout` can continue or undo the rollout.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import msgspec

from deviceplugin.device import natural, some
from deviceplugin.exclusion import DeviceKey
from deviceplugin.naming import published_names
from deviceplugin.register.records import NONE, State
from dra_bridge.handover.share import Share, ShareError, parse_requested
from dra_bridge.kube import ListedClaim, Object
from dra_bridge.rollout import autoscaler
from dra_bridge.rollout.agents import Answers
from dra_bridge.rollout.autoscaler import UNMARKED, MarkedNode, Marks, MarkStep, guarded_patch, marks_of, placement
from dra_bridge.rollout.progress import DeviceProgress, Progress, annotation, read, share_annotation

RESTARTING: Final = "check the driver name; is the agent running?"
GONE: Final = "there is no such node with these labels any more"
COUNTED_TWICE: Final = (
    "until that pod ends, the scheduler counts a withheld device twice: it is missing from allocatable, and the pod's "
    "request is subtracted as well"
)


def before_annotation(driver: str) -> str:
    """Return the key of the annotation in which a rollout records the Node's former share."""
    return f"{driver}/dra-share-before"


class Before(msgspec.Struct, frozen=True, omit_defaults=True):
    """A node's state before a rollout began with the node. failed: shortened UIDs of pods that had already failed.

    owner: the owner (see `Goal`) of the rollout that has set the present share; "" in records of older versions.
    """

    share: str | None
    failed: tuple[str, ...] = ()
    owner: str = ""


_BEFORE: Final = msgspec.json.Decoder(Before)


class ReportedDevice(DeviceProgress, frozen=True, kw_only=True):
    """One device as the node's agent reports it. pods: the pods for which the device's claims are reserved.

    known: whether the report has the present holder. health: "" if unknown. withheld: why the device is not
    offered, "" if it is offered or this is unknown. admins: claims with only administrative access to the device.
    """

    resource: str
    name: str
    pods: tuple[str, ...] = ()
    known: bool = False
    health: str = ""
    message: str = ""
    withheld: str = ""
    admins: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class NodeView:
    """The state of one driver on one node.

    requested: the share in the Node's annotation. serves: whether there is a report on the driver for this node, or
    ResourceSlices of the driver. uid: the Node's UID. marks: the Node's annotations for the cluster autoscaler. sliced:
    whether the node has ResourceSlices of the driver. former: whether the report is on a ResourceSlice, as older agents
    write it.
    """

    node: str
    driver: str
    requested: str | None = None
    before: Before | None = None
    reported: Progress | None = None
    devices: tuple[ReportedDevice, ...] = ()
    serves: bool = True
    ready: bool = True
    uid: str = ""
    marks: Marks = UNMARKED
    sliced: bool = False
    former: bool = False

    @property
    def taken_in(self) -> bool:
        """Whether the agent has read the share that the Node requests."""
        return self.reported is not None and self.reported.requested == (self.requested or "")


def drivers_of(slices: Iterable[Object], leases: Iterable[Object]) -> list[str]:
    """Return the drivers for which an annotation of these ResourceSlices or Leases has an agent's report."""
    keys = {key for body in leases for key in body["metadata"].get("annotations") or ()}
    named = {body["spec"]["driver"] for body in slices if annotation(body["spec"]["driver"]) in _annotations(body)}
    return sorted(named | {key.removesuffix(annotation("")) for key in keys if key.endswith(annotation(""))})


def _annotations(body: Object) -> Mapping[str, str]:
    return body["metadata"].get("annotations") or {}


def views(
    driver: str,
    nodes: Iterable[Object],
    slices: Iterable[Object],
    claims: Iterable[ListedClaim] = (),
    leases: Iterable[Object] = (),
) -> list[NodeView]:
    """Return a driver's progress on each of these nodes, in the natural order of the nodes' names.

    leases: Leases with the agents' reports. A report on a ResourceSlice is from a running agent of an older version.
    """
    by_lease = {body["metadata"]["name"]: body for body in leases}
    by_node: dict[str, list[Object]] = {}
    for body in slices:
        if body["spec"]["driver"] == driver:
            by_node.setdefault(body["spec"].get("nodeName", ""), []).append(body)
    by_device: dict[DeviceKey, list[ListedClaim]] = {}
    admins: dict[DeviceKey, list[ListedClaim]] = {}
    for claim in claims:
        for result in claim.results:
            if result.driver == driver:
                seen = admins if result.admin else by_device
                seen.setdefault((result.pool, result.device), []).append(claim)
    node_views = []
    for node in nodes:
        name, annotations = node["metadata"]["name"], _annotations(node)
        former = read(driver, by_node.get(name, ()))
        if former is not None and not former.resources:
            # An annotation that has only prefixes of device names is no report of an older agent.
            former = None
        reported = former or read(driver, [by_lease[name]] if name in by_lease else [])
        conditions = (node.get("status") or {}).get("conditions") or ()
        node_views.append(
            NodeView(
                name,
                driver,
                annotations.get(share_annotation(driver)),
                _before(annotations.get(before_annotation(driver))),
                reported,
                _devices(name, reported, by_device, admins) if reported is not None else (),
                name in by_node or reported is not None,
                all(condition.get("status") == "True" for condition in conditions if condition.get("type") == "Ready"),
                node["metadata"].get("uid", ""),
                marks_of(driver, annotations),
                name in by_node,
                former is not None,
            )
        )
    return sorted(node_views, key=lambda view: natural(view.node))


def _before(text: str | None) -> Before | None:
    try:
        return _BEFORE.decode(text) if text is not None else None
    except msgspec.MsgspecError:
        return None


def _devices(
    pool: str,
    reported: Progress,
    claims: Mapping[DeviceKey, Sequence[ListedClaim]],
    admins: Mapping[DeviceKey, Sequence[ListedClaim]],
) -> tuple[ReportedDevice, ...]:
    """Return a node's devices. claims, admins: for each (pool, device name), its holders and administrative claims."""
    devices = {resource: progress.devices for resource, progress in reported.resources.items()}
    published = {key: name for name, key in published_names(reported.qualifiers, devices).items()}
    listed = []
    for resource, progress in reported.resources.items():
        for name, device in progress.devices.items():
            key = (pool, published.get((resource, name), ""))
            holders = claims.get(key, ()) if device.state.prepares else ()
            titles, watching = _titles(holders), _titles(admins.get(key, ()))
            pods = {pod.name for claim in holders for pod in claim.pods}
            fields = msgspec.structs.asdict(device) | {"holder": ", ".join(titles) or device.holder}
            fields |= {"known": bool(titles), "admins": watching}
            listed.append(ReportedDevice(resource=resource, name=name, pods=tuple(sorted(pods)), **fields))
    return tuple(sorted(listed, key=lambda view: (natural(view.resource), natural(view.name))))


def _titles(claims: Iterable[ListedClaim]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(f"claim {claim.title}" for claim in claims))


def with_answers(view: NodeView, answers: Answers) -> NodeView:
    """Return a node's view with facts from its agent's response: health, why moves wait, holders other than claims."""
    devices = []
    for device in view.devices:
        now = answers.devices.get((view.node, device.resource, device.name))
        if now is not None:
            changes: dict[str, Any] = {"health": now.health, "message": now.message, "withheld": now.withheld}
            changes["gone"] = device.gone or now.gone
            if now.state == device.state.value:
                changes["waits"] = now.waits
            if not device.known and now.holder is not None:
                changes |= {"holder": now.holder, "pods": now.pods, "known": True}
            device = msgspec.structs.replace(device, **changes)
        devices.append(device)
    return replace(view, devices=tuple(devices))


def problems(answers: Answers) -> list[str]:
    """Return a sentence for each problem that agents report about themselves, with the nodes of these agents."""
    by_problem: dict[str, list[str]] = {}
    for node, texts in answers.problems.items():
        for problem in texts:
            by_problem.setdefault(problem, []).append(node)
    return [f"the agent of {shortened(nodes)}: {problem}" for problem, nodes in by_problem.items()]


def unknown(nodes: Iterable[NodeView], answers: Answers) -> list[str]:
    """Return a sentence for each reason why holders of devices, or the health of devices, are unknown."""
    by_reason: dict[str, list[str]] = {}
    for view in nodes:
        if any(not (device.known and device.health) for device in view.devices):
            reason = answers.reasons.get(view.node, "its agent does not serve these devices now")
            by_reason.setdefault(reason, []).append(view.node)
    return [f"unknown holders or health (?) on {shortened(nodes)}: {reason}" for reason, nodes in by_reason.items()]


def withheld(view: NodeView) -> list[str]:
    """Return a sentence for each reason why devices are not offered, and one on how the scheduler counts them."""
    by_reason: dict[str, list[str]] = {}
    for device in view.devices:
        if device.withheld:
            by_reason.setdefault(device.withheld, []).append(device.name)
    sentences = [f"withheld: {shortened(names)}: {reason}" for reason, names in by_reason.items()]
    return [*sentences, *([COUNTED_TWICE] if sentences else [])]


def administrative(view: NodeView) -> list[str]:
    """Return a sentence for each claim that has administrative access to devices."""
    by_claim: dict[str, list[str]] = {}
    for device in view.devices:
        for claim in device.admins:
            by_claim.setdefault(claim, []).append(device.name)
    them = {claim: "it" if len(names) == 1 else "them" for claim, names in by_claim.items()}
    text = "{} has administrative access to {}, without holding {}"
    return [text.format(claim, shortened(names), them[claim]) for claim, names in by_claim.items()]


def shortened(names: Iterable[str]) -> str:
    """Return a text with at most five names, in natural order, and the number of the other names."""
    return some(sorted(set(names), key=natural), 5)


def distance(view: NodeView) -> int:
    """Return how many devices still have to move until the node has its requested share."""
    left = 0
    for resource in view.reported.resources.values() if view.reported is not None else ():
        share = _share(view.requested) or _share(resource.share)
        plugin, to_dra, dra, to_plugin = (
            resource.counts.get(state.value, 0) for state in (State.PLUGIN, State.TO_DRA, State.DRA, State.TO_PLUGIN)
        )
        missing = share.of(plugin + to_dra + dra + to_plugin) - dra - to_dra if share is not None else 0
        # Devices that are moving to the wrong side are moved back first, before other devices begin to move.
        left += to_dra + max(missing, to_plugin) if missing > 0 else to_plugin + max(-missing, to_dra)
    return left


def excess(view: NodeView, text: str | None) -> list[str]:
    """Return a warning for each resource of which a node has fewer devices than the share in `text` requires."""
    share = _share(text)
    if share is None or share.count is None or view.reported is None:
        return []
    totals = {name: sum(progress.counts.values()) for name, progress in view.reported.resources.items()}
    return [
        f"warning: {view.node} has {total} {name}, the share is {share.count}; all go to claims, also later ones"
        for name, total in totals.items()
        if share.count > total
    ]


def finished(view: NodeView) -> bool:
    """Return whether the agent has read the requested share and every device is on its requested side."""
    return view.taken_in and distance(view) == 0 and not (view.reported is not None and view.reported.kept)


def obstacles(view: NodeView) -> list[str]:
    """Return, for messages, the reasons why a node does not have the requested share yet; empty if it has the share."""
    if view.reported is None:
        if view.serves:
            return ["its agent reports no moves: it is an older one, or its report cannot be read"]
        return [f"no agent of {view.driver} reports its devices now; {RESTARTING}"]
    if view.requested is not None and _share(view.requested) is None:
        return [f"its annotation {share_annotation(view.driver)}: {view.requested!r} is not a share"]
    if not view.taken_in:
        ready = "" if view.ready else " (the node is not Ready)"
        return [f"its agent has not read the requested share yet; is it running?{ready}"]
    if kept := view.reported.kept:
        return [f"its Node was recreated without the annotation; the share {kept} stays until another is requested"]
    together: dict[tuple[str, str], list[str]] = {}
    for device in view.devices:
        if device.state in (State.TO_DRA, State.TO_PLUGIN):
            waits, held = device.waits or "a reason that its agent has not reported yet", ""
            if device.holder and device.holder not in waits:
                held = f", held by {holder(device)}"
            elif pods := [pod for pod in device.pods if pod not in waits]:
                held = f", which {', '.join(pods)} {'uses' if len(pods) == 1 else 'use'}"
            together.setdefault((device.state.value, waits + held), []).append(device.name)
    sentences = [
        f"{shortened(names)} ({state}) {'waits' if len(names) == 1 else 'wait'} for {what}"
        for (state, what), names in together.items()
    ]
    if not sentences and distance(view):
        holders = ", ".join(f"{device.name} held by {device.holder}" for device in view.devices if device.holder)
        sentences.append(
            f"devices move when they are idle: {holders}" if holders else "its agent has not begun to move devices"
        )
    return sentences


def held(view: NodeView) -> bool:
    """Return whether a node is unfinished only because all devices that still have to move have holders."""
    moving = [device for device in view.devices if device.state in (State.TO_DRA, State.TO_PLUGIN)]
    left = moving or [device for device in view.devices if holder(device)]
    return view.taken_in and distance(view) > 0 and bool(left) and all(map(holder, left))


def holder(device: ReportedDevice) -> str:
    """Return a device's holders as text: a pod, or claims and their pods; "" if the device has none."""
    return " for ".join(filter(None, (device.holder, ", ".join(device.pods))))


def summary(view: NodeView) -> str:
    """Return a line about a node: the requested share, and the number of devices in each state."""
    if view.reported is None:
        return obstacles(view)[0]
    by = f" by the rollout of {view.before.owner}" if view.before is not None and view.before.owner else ""
    parts = [f"{share_in_words(view.requested)}{by}"]
    for name, resource in view.reported.resources.items():
        counts = ", ".join(f"{number} {state}" for state, number in sorted(resource.counts.items())) or "no devices"
        parts.append(f"{name}: {counts} (share {resource.share})")
    return "; ".join(parts)


def share_in_words(share: str | None) -> str:
    """Describe in words the share that a Node's annotation requests."""
    return "no share requested" if share is None else f"share {share} requested"


def _share(text: str | None) -> Share | None:
    try:
        return parse_requested(text) if text is not None else None
    except ShareError:
        return None


@dataclass(frozen=True, slots=True)
class Goal:
    """The goal of a rollout. share: the value of the Nodes' annotation, None to remove it; unused in an undo.

    owner: the user and the share; if the same user runs the same command again, the command continues with the nodes
    that it has begun. take_over: whether to continue with nodes that another owner has begun.
    """

    share: str | None = None
    undo: bool = False
    owner: str = ""
    take_over: bool = False

    def wanted(self, before: Before | None) -> str | None:
        """Return the share that the rollout requests for a node. before: the node's recorded state."""
        return before.share if self.undo and before is not None else self.share


def conflict(goal: Goal, requested: str | None, before: Before | None, *, begun: bool = False) -> str:
    """Return a text if another owner has requested another share for the node; "" if there is no conflict.

    begun: whether this run has already set the node's share. A run sets a share only once.
    """
    owner = before.owner if before is not None else ""
    if requested == goal.wanted(before) or (goal.undo and (before is None or not begun)):
        return ""
    if not begun and (goal.take_over or not owner):
        return ""
    who = f"by the rollout of {owner}"
    if owner in ("", goal.owner):
        who = "by somebody else since this rollout has begun it"
    return f"{share_in_words(requested)} {who}; --take-over replaces it"


class Phase(enum.Enum):
    """A node's phase in a rollout. UNTOUCHED: there is no record to undo. UNSERVED: no agent reports on the node."""

    WAITING = "waiting"
    MOVING = "moving"
    DONE = "done"
    UNTOUCHED = "untouched"
    UNSERVED = "unserved"


def phase(goal: Goal, view: NodeView) -> Phase:
    """Return the phase of a node in the rollout."""
    if goal.undo and view.before is None:
        return Phase.UNTOUCHED
    if view.reported is None and not goal.undo:
        return Phase.UNSERVED
    if view.requested != goal.wanted(view.before):
        return Phase.WAITING
    return Phase.DONE if view.reported is None or finished(view) else Phase.MOVING


@dataclass(frozen=True, slots=True)
class RolloutStep:
    """The next steps of a rollout.

    begin: nodes whose share is set next. forget: nodes that have their former share again, and whose record (`Before`)
    is removed next. stop: failures because of which the rollout begins with no further node. over: whether nothing is
    left to do or to wait for. held: nodes that the rollout does not wait for, because their devices are held too long.
    """

    begin: tuple[str, ...] = ()
    forget: tuple[str, ...] = ()
    stop: tuple[str, ...] = ()
    over: bool = False
    held: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RolloutLimits:
    """Limits of a rollout. patience: maximum seconds for a node's moves. pause: whether to stop after the first nodes.

    continue_when_held: whether the rollout continues with other nodes if a node's devices are held for longer than
    `patience`. ignore_autoscaler: whether the rollout ignores cluster autoscalers, because there are none. Then it
    marks no Node, and does not request that agents publish pools without devices.
    """

    max_unavailable: int = 1
    patience: float = 600.0
    pause: bool = False
    ignore_autoscaler: bool = False
    continue_when_held: bool = False


def decide(
    goal: Goal,
    nodes: Sequence[NodeView],
    limits: RolloutLimits,
    *,
    ages: Mapping[str, float] = NONE,
    failing: Mapping[str, Mapping[str, str]] = NONE,
    own: Collection[str] = frozenset(),
    gone: Collection[str] = (),
) -> RolloutStep:
    """Return the next steps of a rollout.

    ages: for each node, the seconds since this run first saw the node move. failing: the `failing_pods` of each node;
    pods that failed before the rollout began with the node do not count. own: nodes whose share this run has set. gone:
    unfinished nodes of this run whose Node was deleted or has other labels now; the Node may return without its share.
    """
    by_phase: dict[Phase, list[NodeView]] = {member: [] for member in Phase}
    for view in nodes:
        by_phase[phase(goal, view)].append(view)
    moving, waiting = by_phase[Phase.MOVING], by_phase[Phase.WAITING]
    forget = tuple(view.node for view in by_phase[Phase.DONE]) if goal.undo else ()
    others: dict[str, list[str]] = {}
    for view in nodes:
        if other := conflict(goal, view.requested, view.before, begun=view.node in own):
            others.setdefault(other, []).append(view.node)
    stop = [f"{shortened(names)}: {other}" for other, names in others.items()]
    for view in nodes:
        before = view.before.failed if view.before is not None else ()
        pods = failing.get(view.node, {})
        stop += [f"{view.node}: {reason}" for uid, reason in pods.items() if uid not in before]
    late = [view for view in moving if ages.get(view.node, 0.0) > limits.patience]
    waiting_for_holders = tuple(view.node for view in late if limits.continue_when_held and held(view))
    for view in late:
        if view.node not in waiting_for_holders:
            waits = "; ".join(obstacles(view)) or "its agent has not reported why yet"
            stop.append(f"{view.node}: not done after {limits.patience:g} s: {waits}")
    for name in gone:
        if ages.get(name, 0.0) > limits.patience:
            stop.append(f"{name}: not done after {limits.patience:g} s: {GONE}")
    if stop:
        return RolloutStep(forget=forget, stop=tuple(stop))
    under_way = len(moving) - len(waiting_for_holders) + len(gone)
    if limits.pause and own:
        return RolloutStep(forget=forget, over=not under_way and not forget, held=waiting_for_holders)
    # Nodes whose devices are still moving come first, because they count as moving even if their share is not set yet.
    unfinished = [view for view in waiting if view.reported is not None and not finished(view)]
    ready = [view for view in waiting if view.ready and (view.reported is None or finished(view))]
    count = max(0, limits.max_unavailable - under_way)
    chosen = [*unfinished[:count], *ready[: max(0, count - len(unfinished))]]
    if waiting and not chosen and not under_way:
        return RolloutStep(forget=forget, stop=tuple(f"{view.node}: the node is not Ready" for view in waiting))
    over = not under_way and not waiting and not forget
    return RolloutStep(tuple(view.node for view in chosen), forget, over=over, held=waiting_for_holders)


def order(goal: Goal, nodes: Sequence[NodeView], limits: RolloutLimits) -> list[tuple[str, ...]]:
    """Return groups of nodes in the order in which a rollout would begin with them if the moves took no time."""
    waiting = [view for view in nodes if phase(goal, view) is Phase.WAITING]
    whole = decide(goal, waiting, replace(limits, pause=False, max_unavailable=max(1, len(waiting)))).begin
    return [whole[start : start + limits.max_unavailable] for start in range(0, len(whole), limits.max_unavailable)]


def counted_phases(goal: Goal, nodes: Sequence[NodeView]) -> str:
    """Return a line with the number of nodes in each phase."""
    phases = [phase(goal, view) for view in nodes]
    numbers = [(phases.count(one), one.value) for one in Phase if one in phases]
    return f"{len(nodes)} nodes: {', '.join(f'{number} {word}' for number, word in numbers)}"


def plan(goal: Goal, nodes: Sequence[NodeView], limits: RolloutLimits) -> list[str]:
    """Return the order of nodes in a rollout as lines. The rollout begins with all nodes of a line together."""
    by_name, groups = {view.node: view for view in nodes}, order(goal, nodes, limits)
    lines = [f"it would stop: {line}" for line in decide(goal, nodes, limits).stop]
    for number, group in enumerate(groups, 1):
        words = []
        for name in group:
            taken = sum(bool(holder(device)) for device in by_name[name].devices)
            words.append(f"{name} ({taken} held)" if taken else name)
        lines.append(f"{number}. {', '.join(words)}")
    begun = {name for group in groups for name in group}
    if left := [view.node for view in nodes if phase(goal, view) is Phase.WAITING and view.node not in begun]:
        lines.append(f"not begun, since they are not Ready: {shortened(left)}")
    return lines


def share_patch(driver: str, share: str | None) -> dict[str, Any]:
    """Return the merge patch that writes the requested share into a Node's annotation; None removes the annotation."""
    return {"metadata": {"annotations": {share_annotation(driver): share}}}


def begin_patch(goal: Goal, driver: str, node: Object, failing: Collection[str]) -> dict[str, Any] | None:
    """Return the merge patch by which a rollout begins with a node: it sets the share and records the former share.

    The result is None if the rollout has already begun with the node, or if the node belongs to another owner's rollout
    now. node: the present Node; the patch fails if the Node changes. failing: UIDs as in `failing_pods`. If an earlier
    rollout has recorded the former share already, this record stays unchanged until an undo.
    """
    annotations = _annotations(node)
    key, before_key = share_annotation(driver), before_annotation(driver)
    now, before = annotations.get(key), _before(annotations.get(before_key))
    wanted = goal.wanted(before)
    if now == wanted or (goal.undo and before is None) or conflict(goal, now, before):
        return None
    record = Before(before.share if before is not None else now, tuple(sorted(failing)), goal.owner)
    return guarded_patch(node, {key: wanted, before_key: msgspec.json.encode(record).decode()})


def forget_patch(goal: Goal, driver: str, node: Object) -> dict[str, Any] | None:
    """Return the merge patch that removes a rollout's record from a node.

    The result is None if there is no record, or if the requested share is not the share from before the rollout.
    """
    annotations = _annotations(node)
    before = _before(annotations.get(before_annotation(driver)))
    if before is None or annotations.get(share_annotation(driver)) != goal.wanted(before):
        return None
    return guarded_patch(node, {before_annotation(driver): None})


def next_marks(goal: Goal, nodes: Iterable[NodeView], limits: RolloutLimits) -> MarkStep:
    """Return how to change the marks for the cluster autoscaler on Nodes next. nodes: all nodes of the rollout."""
    marked = []
    for view in nodes:
        settled = phase(goal, view) in (Phase.DONE, Phase.UNTOUCHED)
        where, served = placement(view.reported), view.reported is not None
        marked.append(MarkedNode(view.node, view.marks, where, served, settled, view.sliced, view.former, view.ready))
    return autoscaler.next_marks(marked, ignore=limits.ignore_autoscaler)


def with_marks(step: RolloutStep, marks: MarkStep, limits: RolloutLimits, waited: float = 0.0) -> RolloutStep:
    """Return the step, without `begin` while marks or pools are missing; stop if `waited` (s) exceeds the patience."""
    if marks.waits and waited > limits.patience and not step.stop:
        what = "published, though a rollout asks for it" if marks.unpublished else "withdrawn"
        late = f"{shortened(marks.waits)}: the agent's pool is not {what} after {limits.patience:g} s"
        return replace(step, begin=(), stop=(late,))
    return replace(step, begin=step.begin if marks.ready else (), over=step.over and marks.over)
