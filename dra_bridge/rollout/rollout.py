"""Asking nodes for shares and following what comes of it: `migrate` and `rollout` without their options.

All goes through the API server, with the rights of whoever asks: read nodes, slices, claims, pods
and events, patch nodes. What to do is decided in `dra_bridge.rollout.fleet`; here it is done.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, Final, Protocol, Self

from dra_bridge.kube import (
    EVENTS,
    NODES,
    PODS,
    RESOURCE_CLAIMS,
    RESOURCE_SLICES,
    Changed,
    Cluster,
    ConflictError,
    ForbiddenError,
    Kind,
    Listed,
    NotFoundError,
    Object,
    UnavailableError,
)
from dra_bridge.rollout import fleet
from dra_bridge.rollout.fleet import Goal, Limits, NodeView, Phase

__all__ = ["Fleet", "Reporter", "RolloutError", "look", "migrate", "rollout"]

QUIET: Final = 5.0
"""Seconds without a change after which it is said what nodes wait for."""
LOOK: Final = 2.0
"""Seconds between two looks at the pods of a node in the move."""
AFTER: Final = 60.0
"""Seconds that a node's pods are still looked at after its move is done."""


class RolloutError(Exception):
    """Raised when what is asked for cannot be done; nothing was written then."""


class Reporter(Protocol):
    """Who shows people what goes on."""

    def show(self, nodes: Sequence[NodeView]) -> None:
        """Show how far these nodes are; called whenever something changed, and now and then."""

    def explain(self, nodes: Sequence[NodeView]) -> None:
        """Show what these nodes wait for."""

    def say(self, line: str) -> None:
        """Show a line."""


# What is so.


async def look(
    cluster: Cluster, driver: str = "", names: Sequence[str] = (), *, with_claims: bool = True
) -> list[NodeView]:
    """Return what is so: of a driver or of all, on these nodes or on all that a driver serves.

    with_claims: whether holders are told as the API server has them now.

    Raises:
        SteerError: there is no such driver or node.
        ClusterError: the API server cannot be asked.

    """
    if names:
        nodes, slices = await _of_nodes(cluster, names)
    else:
        nodes = (await cluster.list(NODES)).items
        slices = (await cluster.list(RESOURCE_SLICES)).items
    if driver and driver not in {one["spec"]["driver"] for one in slices}:
        everything = (await cluster.list(RESOURCE_SLICES)).items if names else slices
        if driver not in (there := {one["spec"]["driver"] for one in everything}):
            raise RolloutError(_no_driver(driver, there))
    claims = (await cluster.list(RESOURCE_CLAIMS)).items if with_claims else []
    found = [
        view
        for one in ([driver] if driver else fleet.drivers_of(slices))
        for view in fleet.views(one, nodes, slices, claims)
        if (view.node in names if names else view.serves)
    ]
    return sorted(found, key=lambda view: fleet.order(view.node))


async def _of_nodes(cluster: Cluster, names: Sequence[str]) -> tuple[list[Object], list[Object]]:
    """Return these nodes and the slices on them."""
    nodes: list[Object] = []
    slices: list[Object] = []
    missing = []
    for name in dict.fromkeys(names):
        try:
            nodes.append(await cluster.get(NODES, name))
        except NotFoundError:
            missing.append(name)
            continue
        slices += (await cluster.list(RESOURCE_SLICES, field_selector=f"spec.nodeName={name}")).items
    if missing:
        raise RolloutError(f"there is no node {', '.join(missing)}")
    return nodes, slices


def _asked(share: str | None) -> str:
    return "the share of its config" if share is None else share


def _no_driver(driver: str, there: set[str]) -> str:
    others = f" (there are: {', '.join(sorted(there))})" if there else ""
    return f"no node has slices of driver {driver}{others}"


class Fleet:
    """The nodes and a driver's slices on them, kept up to date by watches while the context lasts."""

    def __init__(self, cluster: Cluster, driver: str, *, label_selector: str = "", name: str = "") -> None:
        self.cluster = cluster
        self.driver = driver
        self._nodes: dict[str, Object] = {}
        self._slices: dict[str, Object] = {}
        self._claims: Sequence[Object] = ()
        self._changed = asyncio.Event()
        self._listed = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._watched: tuple[tuple[Kind, dict[str, Object], dict[str, str]], ...] = (
            (
                NODES,
                self._nodes,
                {"label_selector": label_selector, "field_selector": f"metadata.name={name}" if name else ""},
            ),
            (
                RESOURCE_SLICES,
                self._slices,
                {"field_selector": f"spec.driver={driver}" + (f",spec.nodeName={name}" if name else "")},
            ),
        )
        self._missing = {kind.plural for kind, _, _ in self._watched}

    async def __aenter__(self) -> Self:
        self._tasks = [asyncio.create_task(self._follow(*one)) for one in self._watched]
        await self._listed.wait()
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _follow(self, kind: Kind, known: dict[str, Object], selectors: Mapping[str, str]) -> None:
        async with aclosing(self.cluster.follow(kind, **selectors)) as events:
            async for event in events:
                if isinstance(event, Listed):
                    known.clear()
                    known.update((one["metadata"]["name"], one) for one in event.items)
                    self._missing.discard(kind.plural)
                    if not self._missing:
                        self._listed.set()
                elif isinstance(event, Changed) and event.type == "DELETED":
                    known.pop(event.object["metadata"]["name"], None)
                elif isinstance(event, Changed):
                    self._take(known, event.object)
                self._changed.set()

    @staticmethod
    def _take(known: dict[str, Object], found: Object) -> None:
        """Take an object in unless a newer one is known: what was written comes back by the watch later."""
        metadata = found["metadata"]
        before = (known.get(metadata["name"]) or {}).get("metadata") or {}
        versions = [str(one.get("resourceVersion", "")) for one in (before, metadata)]
        if before.get("uid") == metadata.get("uid") and all(map(str.isdecimal, versions)):
            older, newer = map(int, versions)
            if newer < older:
                return
        known[metadata["name"]] = found

    def views(self) -> list[NodeView]:
        """Return what is so now."""
        return fleet.views(self.driver, self._nodes.values(), self._slices.values(), self._claims)

    def wrote(self, node: Object) -> None:
        """Take a node in as the server answered it."""
        self._take(self._nodes, node)

    async def wait(self, seconds: float) -> bool:
        """Wait for a change; return whether there was one."""
        try:
            async with asyncio.timeout(seconds):
                await self._changed.wait()
        except TimeoutError:
            return False
        self._changed.clear()
        return True

    async def ask_claims(self) -> None:
        """Ask which claims there are, so that `views` can tell the holders as of now."""
        with contextlib.suppress(UnavailableError, ForbiddenError):
            self._claims = (await self.cluster.list(RESOURCE_CLAIMS)).items


# One move.


async def migrate(
    cluster: Cluster,
    names: Sequence[str],
    driver: str,
    share: str | None,
    reporter: Reporter,
    *,
    wait: bool = False,
    timeout: float = 0.0,
) -> bool:
    """Ask these nodes for a share (None: for nothing any more); return whether all went well.

    wait: until every device is where it should be, `timeout` seconds at the most if given.

    Raises:
        SteerError: it cannot be asked for; nothing was written.
        ClusterError: the API server cannot be asked.

    """
    found = await look(cluster, driver, names, with_claims=False)
    problems = [f"node {view.node}: {fleet.obstacles(view)[0]}" for view in found if view.told is None]
    if problems:
        raise RolloutError("\n".join(problems))
    patch = fleet.share_patch(driver, share)
    for name in names:
        try:
            await cluster.patch(NODES, name, patch)
        except ForbiddenError as error:
            raise RolloutError(f"node {name}: {error.message}; this takes the right to patch nodes") from error
        reporter.say(f"{name}: asked for {_asked(share)}")
    if not wait:
        return True
    began = time.monotonic()
    async with Fleet(cluster, driver, name=names[0] if len(names) == 1 else "") as watched:
        before: list[NodeView] = []
        quiet = began
        while True:
            nodes = [view for view in watched.views() if view.node in names]
            reporter.show(nodes)
            if nodes != before:
                before, quiet = nodes, time.monotonic()
            gone = set(names) - {view.node for view in nodes}
            others = [f"{view.node} is asked for {view.asked} by now" for view in nodes if view.asked != share]
            if gone or others:
                for line in (*(f"node {name} is gone" for name in sorted(gone)), *others):
                    reporter.say(line)
                return False
            left = [view for view in nodes if not fleet.settled(view)]
            now = time.monotonic()
            if not left:
                reporter.say(f"done after {now - began:.1f} s")
                return True
            if timeout and now - began >= timeout:
                await watched.ask_claims()
                reporter.explain([view for view in watched.views() if view.node in {one.node for one in left}])
                reporter.say(f"not done after {timeout:g} s; the move goes on")
                return False
            rest = timeout - (now - began) if timeout else QUIET
            await watched.wait(min(rest, 1.0))
            if time.monotonic() - quiet >= QUIET:
                quiet = time.monotonic()
                await watched.ask_claims()
                reporter.explain([view for view in watched.views() if view.node in {one.node for one in left}])


# One node after another.


async def rollout(cluster: Cluster, driver: str, goal: Goal, selector: str, limits: Limits, reporter: Reporter) -> bool:
    """Move the nodes of a label selector, some at a time; return whether all of them are as they should be.

    Raises:
        SteerError: it cannot be begun; nothing was written.
        ClusterError: the API server cannot be asked.

    """
    nodes = (await cluster.list(NODES, label_selector=selector)).items
    if not nodes:
        raise RolloutError(f"no node has labels as {selector!r} asks for")
    slices = (await cluster.list(RESOURCE_SLICES, field_selector=f"spec.driver={driver}")).items
    first = fleet.views(driver, nodes, slices)
    if goal.undo and not any(view.before for view in first):
        reporter.say(f"no rollout of {driver} is known on these nodes: there is nothing to undo")
        return True
    if not goal.undo and not slices:
        everything = (await cluster.list(RESOURCE_SLICES)).items
        raise RolloutError(_no_driver(driver, {one["spec"]["driver"] for one in everything}))
    async with Fleet(cluster, driver, label_selector=selector) as watched:
        return await _Rollout(watched, goal, limits, reporter).run()


class _Rollout:
    """One run of a rollout; what matters of it stands on the nodes."""

    def __init__(self, watched: Fleet, goal: Goal, limits: Limits, reporter: Reporter) -> None:
        self.fleet = watched
        self.cluster = watched.cluster
        self.driver = watched.driver
        self.goal = goal
        self.limits = limits
        self.reporter = reporter
        self._since: dict[str, float] = {}
        self._own: set[str] = set()
        self._done: dict[str, float] = {}
        self._looked: dict[str, tuple[float, dict[str, str]]] = {}
        """When a node's pods were last looked at, and which of them were in trouble."""
        self._sure = False
        self._baseline: dict[str, frozenset[str]] = {}
        """Pods that were in trouble when a node was first seen in the move, where no record says so."""

    async def run(self) -> bool:
        """Go on until it is over or has to stop."""
        before: list[NodeView] = []
        quiet = time.monotonic()
        while True:
            nodes = self.fleet.views()
            if nodes != before:
                before, quiet = nodes, time.monotonic()
            try:
                over = await self._step()
            except (UnavailableError, ConflictError, NotFoundError) as error:
                over = None
                if isinstance(error, UnavailableError):
                    self.reporter.say(f"the API server does not answer: {error.message}")
            if over is not None:
                return over
            await self.fleet.wait(LOOK)
            if time.monotonic() - quiet >= QUIET:
                quiet = time.monotonic()
                await self.fleet.ask_claims()
                self.reporter.explain([view for view in self.fleet.views() if self._phase(view) is Phase.MOVING])

    def _phase(self, view: NodeView) -> Phase:
        return fleet.phase(self.goal, view)

    async def _step(self) -> bool | None:
        """Do what can be done now; return whether all is well once it is over, None before."""
        nodes = self.fleet.views()
        now = time.monotonic()
        phases = {view.node: self._phase(view) for view in nodes}
        for name, at in phases.items():
            if at is Phase.MOVING:
                self._since.setdefault(name, now)
        self.reporter.show([view for view in nodes if view.node in self._since])
        for name, at in phases.items():
            if at is Phase.DONE and name in self._since and name not in self._done:
                self.reporter.say(f"{name}: done after {now - self._since[name]:.1f} s")
                self._done[name] = now
        trouble = {view.node: await self._trouble(view, now) for view in nodes if view.node in self._since}
        decision = fleet.decide(
            self.goal, nodes, self.limits, now=now, since=self._since, trouble=trouble, own=self._own
        )
        for name in decision.forget:
            node = await self.cluster.get(NODES, name)
            self.fleet.wrote(await self.cluster.patch(NODES, name, fleet.forget_patch(self.driver, node)))
            self._since.pop(name, None)
        for name in decision.begin:
            await self._begin(next(view for view in nodes if view.node == name))
        if decision.stop:
            await self.fleet.ask_claims()
            for line in decision.stop:
                self.reporter.say(f"stopped: {line}")
            return False
        if decision.over and not self._sure:
            self._sure = True
            self._looked.clear()  # a last look at the pods before all is said to be well
            return await self._step()
        return self._end(self.fleet.views()) if decision.over else None

    async def _trouble(self, view: NodeView, now: float) -> dict[str, str]:
        """Return which pods are in trouble on a node that is or was in the move, from a look not long ago."""
        at, found = self._looked.get(view.node, (-LOOK, {}))
        if now - at >= LOOK and now - self._done.get(view.node, now) <= AFTER:
            found = await self._troubles(view)
            self._looked[view.node] = now, found
        if view.before is None:
            known = self._baseline.setdefault(view.node, frozenset(found))
            found = {uid: said for uid, said in found.items() if uid not in known}
        return found

    async def _begin(self, view: NodeView) -> None:
        node = await self.cluster.get(NODES, view.node)
        trouble = await self._troubles(view)
        patch = fleet.begin_patch(self.goal, self.driver, node, trouble)
        if patch is None:
            self.fleet.wrote(node)
            return
        try:
            self.fleet.wrote(await self.cluster.patch(NODES, view.node, patch))
        except ForbiddenError as error:
            raise RolloutError(f"node {view.node}: {error.message}; this takes the right to patch nodes") from error
        self._own.add(view.node)
        self._since[view.node] = time.monotonic()
        self._done.pop(view.node, None)
        wanted = self.goal.wanted(view)
        self.reporter.say(f"{view.node}: asked for {_asked(wanted)}")
        self.reporter.show([replace(view, asked=wanted)])  # how far it is from that: it may be there at the next look

    async def _troubles(self, view: NodeView) -> dict[str, str]:
        """Return which pods of a node are in trouble."""
        resources = view.told.resources if view.told is not None else ()
        pods = (await self.cluster.list(PODS, field_selector=f"spec.nodeName={view.node}")).items
        events: Sequence[dict[str, Any]] = ()
        if any((pod.get("status") or {}).get("phase") == "Pending" for pod in pods):
            selector = "involvedObject.kind=Pod,reason=FailedPrepareDynamicResources"
            events = (await self.cluster.list(EVENTS, field_selector=selector)).items
        return fleet.troubles(pods, events, tuple(resources))

    def _end(self, nodes: Sequence[NodeView]) -> bool:
        phases = {view.node: self._phase(view) for view in nodes}
        away = [name for name, at in phases.items() if at is Phase.AWAY]
        waiting = [name for name, at in phases.items() if at is Phase.WAITING]
        done = sum(at is Phase.DONE for at in phases.values())
        if self.goal.undo:
            self.reporter.say("what was asked for before is asked for again" if not waiting else "paused")
        else:
            self.reporter.say(f"{done} of {len(phases)} nodes are as they should be")
        if away:
            self.reporter.say(f"no agent of {self.driver} serves {', '.join(away)}")
        if waiting:
            self.reporter.say(f"paused; still to come: {', '.join(waiting)}; the same command goes on")
        return not away
