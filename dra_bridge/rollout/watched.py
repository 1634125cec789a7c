"""Keeps the state of the nodes of a rollout or a migration up to date, by watches of the API server."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from typing import Final, NamedTuple, Self

from deviceplugin.device import natural
from deviceplugin.tasks import cancel_all, in_time
from dra_bridge import kube
from dra_bridge.kube import LEASES, NODES, RESOURCE_SLICES, Cluster, ListedClaim, Object
from dra_bridge.rollout import fleet
from dra_bridge.rollout.agents import LABEL
from dra_bridge.rollout.fleet import NodeView
from dra_bridge.rollout.reporter import Reporter

EXPLAIN: Final = 5.0
"""If no node has changed for this number of seconds, the program prints why nodes wait."""


class _WatchOf(NamedTuple):
    """The objects that one watch follows. namespace: "" for all namespaces."""

    kind: kube.Kind
    namespace: str = ""
    label_selector: str = ""
    field_selector: str = ""


def _leave_out(kind: kube.Kind, body: Object) -> None:
    """Remove the fields of an object that `fleet.views` does not read, because they would take most of the memory."""
    body["metadata"].pop("managedFields", None)
    if kind is RESOURCE_SLICES:
        body["spec"].pop("devices", None)


class WatchedFleet:
    """Nodes, agents' Leases and a driver's ResourceSlices, which watches keep up to date.

    namespaces: the namespaces of the agents' Leases. selector: a label selector for nodes. names: node names; empty for
    all nodes.
    """

    def __init__(
        self,
        cluster: Cluster,
        driver: str,
        reporter: Reporter,
        namespaces: Sequence[str] = (),
        *,
        selector: str = "",
        names: Sequence[str] = (),
    ) -> None:
        self.cluster = cluster
        self.driver = driver
        self.reporter = reporter
        self._names = names
        self._objects: dict[_WatchOf, dict[str, Object]] = {}
        self._claims: Sequence[ListedClaim] = ()
        self._views: dict[str, tuple[list[Object], NodeView]] = {}
        """For each node, the last `NodeView`, with the API objects from which it was made."""
        self.changed = asyncio.Event()
        self._last: list[NodeView] = []
        self._since = time.monotonic()
        named, of_driver = "", f"spec.driver={driver}"
        if len(names) == 1:
            named = f"metadata.name={names[0]}"
            of_driver += f",spec.nodeName={names[0]}"
        self._nodes = _WatchOf(NODES, label_selector=selector, field_selector=named)
        self._slices = _WatchOf(RESOURCE_SLICES, field_selector=of_driver)
        self._leases = [_WatchOf(LEASES, namespace, LABEL, named) for namespace in namespaces]

    @contextlib.asynccontextmanager
    async def watched(self) -> AsyncIterator[Self]:
        """While the context is active, keep the objects up to date.

        Entering the context waits until all objects were listed.
        """
        tasks = [asyncio.create_task(self._follow(what)) for what in (self._nodes, self._slices, *self._leases)]
        try:
            while len(self._objects) < len(tasks):
                await self.changed.wait()
                self.changed.clear()
            yield self
        finally:
            await cancel_all(tasks)

    async def _follow(self, what: _WatchOf) -> None:
        kind, namespace, label, field = what
        follow = self.cluster.follow(kind, namespace=namespace, label_selector=label, field_selector=field)
        async with aclosing(follow) as events:
            async for event in events:
                for body in event.items if isinstance(event, kube.Listed) else (event.object,):
                    _leave_out(what.kind, body)
                if isinstance(event, kube.Listed):
                    self._objects[what] = {body["metadata"]["name"]: body for body in event.items}
                elif event.type == "DELETED":
                    self._objects[what].pop(event.object["metadata"]["name"], None)
                else:
                    self._objects[what].setdefault(event.object["metadata"]["name"], event.object)
                    self._put(what, event.object)
                self.changed.set()

    def node(self, name: str) -> Object:
        """Return a Node in the newest state that the watch or `put` has stored.

        If the Node has changed since then, the API server refuses a patch with this state's resourceVersion. Raises
        NotFoundError if the Node was deleted.
        """
        if (node := self._objects[self._nodes].get(name)) is None:
            raise kube.NotFoundError(f"node {name} was deleted")
        return node

    def put(self, node: Object) -> None:
        """Store a Node from the API server, unless the watch has reported a newer version or the deletion of the Node.

        The watch also reports this process's own writes, perhaps before the response to the write.
        """
        self._put(self._nodes, node)

    def _put(self, what: _WatchOf, body: Object) -> None:
        name = body["metadata"]["name"]
        before = self._objects[what].get(name)
        if before is not None and not kube.is_older(body, before):
            self._objects[what][name] = body

    def views(self) -> list[NodeView]:
        """Return the present progress of the nodes. A node's view is made again only if its objects have changed."""
        leases = [lease for what in self._leases for lease in self._objects[what].values()]
        slices = self._objects[self._slices].values()
        nodes = self._objects[self._nodes]
        made_of = {name: [node] for name, node in nodes.items() if not self._names or name in self._names}
        for name, body in (
            *((lease["metadata"]["name"], lease) for lease in leases),
            *((body["spec"].get("nodeName", ""), body) for body in slices),
        ):
            if name in made_of:
                made_of[name].append(body)
        kept = {name: view for name, (objects, view) in self._views.items() if made_of.get(name) == objects}
        changed = [nodes[name] for name in made_of if name not in kept]
        made = {view.node: view for view in fleet.views(self.driver, changed, slices, self._claims, leases)}
        self._views = {name: (objects, kept.get(name) or made[name]) for name, objects in made_of.items()}
        return sorted((view for _, view in self._views.values()), key=lambda view: natural(view.node))

    async def wait(self, seconds: float, waiting: Callable[[NodeView], bool]) -> None:
        """Wait up to `seconds` for a change. After EXPLAIN seconds without a change, print why nodes wait."""
        if (nodes := self.views()) != self._last:
            self._last, self._since = nodes, time.monotonic()
        if await in_time(self.changed.wait(), seconds):
            self.changed.clear()
        if time.monotonic() - self._since >= EXPLAIN:
            self._since = time.monotonic()
            await self.explain(waiting)

    async def explain(self, waiting: Callable[[NodeView], bool]) -> None:
        """Print why waiting nodes do not have their requested share yet, with their devices' current holders."""
        with contextlib.suppress(kube.UnavailableError, kube.ForbiddenError):
            self._claims = await self.cluster.allocated_claims()
            self._views.clear()
        self.reporter.explain([view for view in self.views() if waiting(view)])
