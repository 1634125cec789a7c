"""Requests, for nodes, the share of their devices that claims get, and follows the moves of devices.

The commands `dra-bridge status`, `migrate` and `rollout` use this module. All requests go to the API server and need
rights of the user: to read nodes, Leases, ResourceSlices, claims, pods and events, and to patch nodes.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

from deviceplugin.device import natural
from dra_bridge import kube
from dra_bridge.kube import LEASES, NODES, RESOURCE_SLICES, Cluster, ListedClaim, Object
from dra_bridge.rollout import autoscaler, fleet
from dra_bridge.rollout.agents import LABEL, lease_namespaces
from dra_bridge.rollout.autoscaler import MarkStep
from dra_bridge.rollout.fleet import Goal, NodeView, Phase, RolloutLimits
from dra_bridge.rollout.pace import Pace, read_pace, returns
from dra_bridge.rollout.pods import list_each, read_failing
from dra_bridge.rollout.reporter import Reporter
from dra_bridge.rollout.watched import WatchedFleet

MANY: Final = 12
"""If there are more nodes than this number, the commands show totals of all nodes before the single nodes."""
POLL: Final = 2.0
"""Minimum seconds between two times when the rollout lists the pods of moving nodes to find failing pods."""
PAUSE: Final = 10.0
"""Minimum pause after the rollout has listed pods, as a multiple of the time that this took."""
TOGETHER: Final = 50
"""Maximum number of nodes for which the rollout first lists the failed pods and then requests the share. Pods of these
nodes that fail after the list count as new failures."""
AFTER: Final = 60.0
"""Seconds for which the rollout still checks a node's pods for failures after the node's moves have ended."""
AFTER_OUTAGE: Final = 60.0
"""For this number of seconds after a request without a response, a refusal (403) does not end the rollout.

A starting kube-apiserver refuses requests with 403 until its authorizer has read the roles.
"""
_SELECTED: Final = ("metadata.name", "spec.nodeName")
"""The fields by which field selectors choose objects of one node: the first for Nodes, the second for
ResourceSlices."""
NEEDS_LEASES: Final = "this needs the right to list and watch leases, which the role dra-bridge-operator gives"


class RolloutError(Exception):
    """Raised when a command is impossible, or the user lacks a right for it. status: the exit status of the program."""

    def __init__(self, message: str, status: int = 2) -> None:
        super().__init__(message)
        self.status = status


async def read_leases(cluster: Cluster, namespaces: Sequence[str]) -> list[Object]:
    """Return the Leases with the agents' reports.

    Raises ClusterError, and RolloutError if the user lacks the right to read Leases.
    """
    try:
        lists = [await cluster.list(LEASES, namespace, label_selector=LABEL) for namespace in namespaces]
    except kube.ForbiddenError as error:
        raise RolloutError(f"{error.message}; {NEEDS_LEASES}", status=1) from error
    return [body for listed in lists for body in listed.items]


async def _read_leases(cluster: Cluster, namespace: str) -> tuple[list[Object], list[str]]:
    """Return the agents' Leases, and these Leases' namespaces.

    namespace: the namespace that the user has named, or "".
    """
    namespaces = await lease_namespaces(cluster, namespace)
    return await read_leases(cluster, namespaces), namespaces


async def read_nodes(
    cluster: Cluster,
    driver: str = "",
    names: Sequence[str] = (),
    namespace: str = "",
    *,
    with_claims: bool = True,
    listed: Callable[[Sequence[NodeView]], None] = lambda nodes: None,
) -> list[NodeView]:
    """Return the progress of nodes. driver: the DRA driver; "" for all drivers.

    names: names of nodes; empty for all nodes of the driver.

    namespace: the agents' namespace; "" for the namespaces that the agents' ClusterRoleBindings name. with_claims:
    whether to read the devices' current holders from claims. listed: a function that is called with the progress before
    the claims are read. Raises RolloutError if the driver or a node does not exist, and ClusterError if the API server
    cannot be read.
    """
    (of_nodes, of_slices) = ([f"{key}={name}" for name in dict.fromkeys(names)] or [""] for key in _SELECTED)
    (leases, _), nodes, slices = await asyncio.gather(
        _read_leases(cluster, namespace),
        list_each(cluster, NODES, of_nodes),
        list_each(cluster, RESOURCE_SLICES, of_slices),
    )
    there = {body["metadata"]["name"] for body in nodes}
    if missing := [name for name in dict.fromkeys(names) if name not in there]:
        raise RolloutError(f"there is no node {', '.join(missing)}")
    if driver and driver not in _drivers(slices, leases):
        await check_driver(cluster, driver, leases)

    def views(claims: Sequence[ListedClaim]) -> list[NodeView]:
        found = [
            view
            for name in ([driver] if driver else fleet.drivers_of(slices, leases))
            for view in fleet.views(name, nodes, slices, claims, leases)
            if (view.node in names if names else view.serves)
        ]
        return sorted(found, key=lambda view: natural(view.node))

    now = views(())
    listed(now)
    return views(await cluster.allocated_claims()) if with_claims else now


def _drivers(slices: Sequence[Object], leases: Sequence[Object]) -> set[str]:
    return {body["spec"]["driver"] for body in slices}.union(fleet.drivers_of((), leases))


async def check_driver(cluster: Cluster, driver: str, leases: Sequence[Object]) -> None:
    """Raise RolloutError if neither ResourceSlices nor agents' reports name the driver. Raises ClusterError."""
    drivers = _drivers((await cluster.list(RESOURCE_SLICES)).items, leases)
    if driver not in drivers:
        others = f" (there are: {', '.join(sorted(drivers))})" if drivers else ""
        raise RolloutError(f"no node has the driver {driver} now{others}; {fleet.RESTARTING}", status=1)


async def _patch_node(cluster: Cluster, node: str, patch: Mapping[str, Any]) -> Object:
    try:
        return await cluster.patch(NODES, node, patch)
    except kube.ForbiddenError as error:
        raise RolloutError(f"node {node}: {error.message}; this needs the right to patch nodes") from error


async def _patch(
    cluster: Cluster, node: str, patch: Mapping[str, Any], share: str | None, reporter: Reporter
) -> Object:
    """Write the share by `patch` into a Node's annotation; return the changed Node.

    share: the share in `patch`, for messages.
    """
    patched = await _patch_node(cluster, node, patch)
    reporter.say(f"{node}: {'share override removed' if share is None else fleet.share_in_words(share)}")
    return patched


async def migrate(
    cluster: Cluster,
    names: Sequence[str],
    driver: str,
    share: str | None,
    reporter: Reporter,
    *,
    namespace: str = "",
    wait: bool = False,
    timeout: float = 0.0,
) -> bool:
    """Request a share on these nodes (None: remove the request); return whether this succeeded on all nodes.

    namespace: the agents' namespace; "" for the namespaces that the agents' ClusterRoleBindings name. wait: whether to
    wait until every device is on its requested side, at most `timeout` seconds if `timeout` is not 0. Raises
    RolloutError before the first write if the driver or a node does not exist, or if no agent reports the devices of a
    node. Raises RolloutError also if the user may not patch a Node. Raises ClusterError if the API server does not
    respond.
    """
    views = await read_nodes(cluster, driver, names, namespace, with_claims=False)
    if problems := [f"node {view.node}: {fleet.obstacles(view)[0]}" for view in views if view.reported is None]:
        raise RolloutError("\n".join(problems), status=1)
    for line in (line for view in views for line in fleet.excess(view, share)):
        reporter.say(line)
    for name in names:
        await _patch(cluster, name, fleet.share_patch(driver, share), share, reporter)
    if not wait:
        return True
    began = time.monotonic()
    namespaces = await lease_namespaces(cluster, namespace)
    async with WatchedFleet(cluster, driver, reporter, namespaces, names=names).watched() as watched:
        while True:
            nodes = watched.views()
            reporter.show(nodes)
            problems = [f"node {name} is gone" for name in sorted(set(names) - {view.node for view in nodes})]
            problems += [
                f"{view.node}: {fleet.share_in_words(view.requested)} meanwhile"
                for view in nodes
                if view.requested != share
            ]
            if problems:
                for line in problems:
                    reporter.say(line)
                return False
            elapsed = time.monotonic() - began
            if all(map(fleet.finished, nodes)):
                reporter.say(f"done after {elapsed:.1f} s")
                return True
            if timeout and elapsed >= timeout:
                await watched.explain(lambda view: not fleet.finished(view))
                reporter.say(f"not done after {timeout:g} s; the move goes on")
                return False
            await watched.wait(min(timeout - elapsed, 1.0) if timeout else 1.0, lambda view: not fleet.finished(view))


async def rollout(
    cluster: Cluster,
    driver: str,
    goal: Goal,
    selector: str,
    limits: RolloutLimits,
    reporter: Reporter,
    namespace: str = "",
    *,
    dry_run: bool = False,
) -> bool:
    """Move devices on the nodes of a label selector, some nodes at a time; return whether all nodes reached the goal.

    namespace: the agents' namespace; "" for the namespaces that the agents' ClusterRoleBindings name. dry_run: whether
    to show the order of the nodes and write nothing.

    Raises RolloutError if the rollout cannot begin (nothing was written then), or if the user may not patch a Node.
    Raises ClusterError if the API server does not respond.
    """
    views, namespaces = await _selected(cluster, driver, selector, namespace, check=not goal.undo)
    if goal.undo and not any(view.before or view.marks.own or view.marks.pool for view in views):
        reporter.say(f"no rollout of {driver} is known on these nodes: there is nothing to undo")
        return True
    goal = replace(goal, owner=await _owner(cluster, goal))
    if dry_run or len(views) > MANY:
        reporter.say(fleet.counted_phases(goal, views))
    if dry_run:
        for line in fleet.plan(goal, views, limits):
            reporter.say(line)
        return True
    async with WatchedFleet(cluster, driver, reporter, namespaces, selector=selector).watched() as watched:
        return await _Rollout(watched, goal, limits, await _pace(cluster, goal, views, reporter)).run()


async def _selected(
    cluster: Cluster, driver: str, selector: str, namespace: str, *, check: bool
) -> tuple[list[NodeView], list[str]]:
    """Return the progress of the nodes of a label selector, and the namespaces of the agents' Leases.

    check: whether to raise RolloutError if the driver does not exist. Objects are not kept after they were read,
    because there may be thousands.
    """
    (leases, namespaces), nodes, slices = await asyncio.gather(
        _read_leases(cluster, namespace),
        cluster.list(NODES, label_selector=selector),
        cluster.list(RESOURCE_SLICES, field_selector=f"spec.driver={driver}"),
    )
    if not nodes.items:
        raise RolloutError(f"no node matches the selector {selector!r}")
    if check and driver not in _drivers(slices.items, leases):
        await check_driver(cluster, driver, leases)
    return fleet.views(driver, nodes.items, slices.items, leases=leases), namespaces


async def _pace(cluster: Cluster, goal: Goal, views: Sequence[NodeView], reporter: Reporter) -> Pace:
    """Return the pace for nodes whose devices return to the plugin. If there are such nodes, list all claims."""
    if not any(returns(goal, view) for view in views if fleet.phase(goal, view) is Phase.WAITING):
        return Pace(0)
    pace = await read_pace(cluster)
    if pace.interval >= 1.0:
        reporter.say(
            f"a node whose devices return to the plugin side begins every {pace.interval:.1f} s at most, because its "
            "agent lists all claims of the cluster"
        )
    return pace


async def _owner(cluster: Cluster, goal: Goal) -> str:
    """Return the owner of this rollout: the name of the user at the API server, and the share. Raises ClusterError."""
    review = (await cluster.create(kube.SELF_SUBJECT_REVIEWS, {"metadata": {}})).get("status") or {}
    user = (review.get("userInfo") or {}).get("username") or "an unknown user"
    return f"{user} (undo)" if goal.undo else f"{user} (share {goal.share or 'default'})"


class _Rollout:
    """One run of a rollout. Another run can continue the rollout, because its state is in annotations of the Nodes."""

    def __init__(self, watched: WatchedFleet, goal: Goal, limits: RolloutLimits, pace: Pace) -> None:
        self._fleet = watched
        self._pace = pace
        self._reporter = watched.reporter
        self._goal = goal
        self._limits = limits
        self._since: dict[str, float] = {}
        self._own: dict[str, str] = {}
        """Nodes whose share this run has set, with the UIDs of their Node objects."""
        self._done: dict[str, float] = {}
        self._gone: Sequence[str] = ()
        """Nodes whose share this run has set, and that were deleted or relabelled before their moves were done."""
        self._failing: dict[str, dict[str, str]] = {}
        """For each node whose pods were listed, the pods that were failing in the last list."""
        self._next_look = -math.inf
        """The time (monotonic seconds) before which the pods are not listed again."""
        self._baseline: dict[str, frozenset[str]] = {}
        """For each node without a recorded former share, the pods that had failed when this run first saw the node
        move."""
        self._held: Sequence[str] = ()
        self._failures, self._failed_at = watched.cluster.statistics.failures, -AFTER_OUTAGE
        self._last_check = False
        self._waits_since: float | None = None
        """The time (monotonic seconds) since which the rollout waits for agents to publish or remove pools, or None."""

    async def run(self) -> bool:
        """Execute steps until the rollout is over or has to stop. Return whether the rollout succeeded."""
        while True:
            self._after_outage()
            try:
                if (over := await self._step()) is not None:
                    return over
            except kube.UnavailableError as error:
                self._reporter.say(f"the API server does not answer: {error.message}")
            except (kube.ConflictError, kube.NotFoundError):
                pass  # The Node has changed since this step read the Node; the next step decides again.
            except (kube.ForbiddenError, RolloutError) as error:
                if not self._after_outage():
                    raise
                self._reporter.say(f"the API server does not answer: {error}")
            await self._fleet.wait(POLL, lambda view: fleet.phase(self._goal, view) is Phase.MOVING)

    def _after_outage(self) -> bool:
        """Return whether a request had no response within the last AFTER_OUTAGE seconds."""
        if (failures := self._fleet.cluster.statistics.failures) != self._failures:
            self._failures, self._failed_at = failures, time.monotonic()
        return time.monotonic() - self._failed_at < AFTER_OUTAGE

    async def _step(self) -> bool | None:
        """Execute the steps that are possible now. Return whether the rollout succeeded; None until it ends."""
        nodes = self._fleet.views()
        now = time.monotonic()
        for name in [view.node for view in nodes if self._own.get(view.node, view.uid) != view.uid]:
            # The Node was deleted and created again, so it lacks the rollout's annotations.
            for kept in (self._own, self._since, self._done):
                kept.pop(name, None)
        phases = {view.node: fleet.phase(self._goal, view) for view in nodes}
        for name, at in phases.items():
            if at is Phase.MOVING:
                self._since.setdefault(name, now)
        begun = [view for view in nodes if view.node in self._since]
        self._reporter.total(phases)
        self._reporter.show(begun)
        for name in (view.node for view in begun if phases[view.node] is Phase.DONE and view.node not in self._done):
            self._reporter.say(f"{name}: done after {now - self._since[name]:.1f} s")
            self._done[name] = now
        failing = await self._newly_failing(begun, now)
        gone = sorted(self._own.keys() - self._done.keys() - phases.keys(), key=natural)
        for name in gone:
            if name not in self._gone:
                self._reporter.say(f"{name}: {fleet.GONE}; waiting for it")
        self._gone = gone
        ages = {name: now - at for name, at in self._since.items()}
        decision = fleet.decide(self._goal, nodes, self._limits, ages=ages, failing=failing, own=self._own, gone=gone)
        for name in sorted(set(decision.held) - set(self._held), key=natural):
            self._reporter.say(f"{name}: its devices are held; the rollout goes on with other nodes")
        self._held = decision.held
        for name in decision.forget:
            node = self._fleet.node(name)
            if patch := fleet.forget_patch(self._goal, self._fleet.driver, node):
                node = await self._fleet.cluster.patch(NODES, name, patch)
            self._fleet.put(node)
            self._since.pop(name, None)
        by_name = {view.node: view for view in nodes}
        marks = fleet.next_marks(self._goal, nodes, self._limits)
        self._waits_since = (self._waits_since or now) if marks.waits else None
        decision = fleet.with_marks(decision, marks, self._limits, now - (self._waits_since or now))
        if not decision.stop:
            await self._write_marks(marks)
        begin = [by_name[name] for name in decision.begin]
        begin = [view for view in begin if not returns(self._goal, view) or self._pace.take(time.monotonic())]
        for first in range(0, len(begin), TOGETHER):
            together = begin[first : first + TOGETHER]
            failed = await self._read_failing(together)
            for view in together:
                await self._begin(view, failed[view.node])
        for line in decision.stop:
            self._reporter.stopped.append(f"stopped: {line}")
        if decision.stop:
            if not self._goal.undo:
                self._say_done(phases.values())
            return False
        if not decision.over:
            return None
        if not self._last_check:
            self._last_check = True
            self._next_look = -math.inf  # The next step lists the pods once more, before the rollout reports success.
            return await self._step()
        return self._end()

    async def _write_marks(self, step: MarkStep) -> None:
        """Write and remove marks for the cluster autoscaler, and requests for pools."""
        driver = self._fleet.driver
        for name in step.mark:
            await self._write_mark(name, partial(autoscaler.mark_patch, driver))
        for name in step.publish:
            await self._write_mark(name, partial(autoscaler.publish_patch, driver))
        for name in dict.fromkeys((*step.withdraw, *step.release)):
            await self._write_mark(name, partial(autoscaler.release_patch, driver, step=step))
        for names, what in ((step.mark, "marked"), (step.release, "no more marked")):
            if names:
                self._reporter.say(f"{fleet.shortened(names)}: {what} {autoscaler.SCALE_DOWN_DISABLED}")

    async def _write_mark(self, name: str, patch_of: Callable[[Object], Mapping[str, Any] | None]) -> None:
        node = self._fleet.node(name)
        if patch := patch_of(node):
            node = await _patch_node(self._fleet.cluster, name, patch)
        self._fleet.put(node)

    async def _newly_failing(self, begun: Sequence[NodeView], now: float) -> dict[str, dict[str, str]]:
        """Return each node's `failing_pods`, without pods that failed before the rollout began with the node.

        Pods are listed at most every POLL seconds. Between two such lists, the function uses the last list.
        """
        if now >= self._next_look:
            watched = [view for view in begun if now - self._done.get(view.node, now) <= AFTER]
            self._failing |= await self._read_failing(watched)
            self._next_look = now + max(POLL, PAUSE * (time.monotonic() - now))
        newly: dict[str, dict[str, str]] = {}
        for view in begun:
            failing = self._failing.get(view.node)
            if failing is not None and view.before is None:
                known = self._baseline.setdefault(view.node, frozenset(failing))
                failing = {uid: reason for uid, reason in failing.items() if uid not in known}
            newly[view.node] = failing or {}
        return newly

    async def _read_failing(self, views: Iterable[NodeView]) -> dict[str, dict[str, str]]:
        resources = {view.node: tuple(view.reported.resources) if view.reported is not None else () for view in views}
        return await read_failing(self._fleet.cluster, resources)

    async def _begin(self, view: NodeView, failing: Collection[str]) -> None:
        node = self._fleet.node(view.node)
        patch = fleet.begin_patch(self._goal, self._fleet.driver, node, failing)
        if patch is None:
            self._fleet.put(node)
            return
        wanted = self._goal.wanted(view.before)
        for line in fleet.excess(view, wanted):
            self._reporter.say(line)
        self._fleet.put(await _patch(self._fleet.cluster, view.node, patch, wanted, self._reporter))
        self._own[view.node] = node["metadata"].get("uid", "")
        self._since[view.node] = time.monotonic()
        self._done.pop(view.node, None)
        # The number of devices to move is shown at once, because the node may already have the share at the next step.
        self._reporter.show([replace(view, requested=wanted)])

    def _say_done(self, phases: Iterable[Phase]) -> None:
        counts = Counter(phases)
        self._reporter.say(f"{counts[Phase.DONE]} of {counts.total()} nodes done")

    def _end(self) -> bool:
        by_phase: dict[Phase, list[str]] = {phase: [] for phase in Phase}
        for view in (nodes := self._fleet.views()):
            by_phase[fleet.phase(self._goal, view)].append(view.node)
        waiting, unserved = by_phase[Phase.WAITING], by_phase[Phase.UNSERVED]
        if self._goal.undo:
            self._reporter.say("paused" if waiting or self._held else "previous shares restored")
        else:
            self._say_done(fleet.phase(self._goal, view) for view in nodes)
        if unserved:
            self._reporter.say(f"no agent of {self._fleet.driver} serves {', '.join(unserved)}")
        if text := autoscaler.in_words(fleet.next_marks(self._goal, nodes, self._limits).kept):
            self._reporter.say(text)
        if self._held:
            self._reporter.say(
                f"waiting for held devices: {', '.join(self._held)}; they move as their holders end. Run the same "
                "command again to follow them"
            )
        if waiting:
            self._reporter.say(f"not started: {', '.join(waiting)}; run the same command to continue")
        return not unserved
