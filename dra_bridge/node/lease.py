"""Keeps the Lease of this node, whose annotations are the drivers' reports for `dra-bridge status` and `rollout`.

The reports are not in a ResourceSlice, because a cluster autoscaler treats a node with an empty slice as idle, even if
pods use the node's devices.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from contextlib import aclosing
from typing import Final

from deviceplugin.tasks import in_time
from dra_bridge.kube import (
    LEASES,
    ApiError,
    Cluster,
    ClusterError,
    ConflictError,
    Failing,
    Listed,
    NotFoundError,
    Object,
    WatchState,
    is_older,
)
from dra_bridge.node.node_object import NodeWatch
from dra_bridge.rollout import progress

_LOG: Final = logging.getLogger(__name__)

FIRST: Final = 5.0
"""Maximum seconds for which the first write of the Lease waits for the watch to list the Lease."""
LABELS: Final = {"app.kubernetes.io/managed-by": "dra-bridge"}


class NodeLease:
    """Writes the drivers' reports into the Lease of this node whenever a report has changed.

    The Node owns the Lease, so both are deleted together. The agent changes only the annotations of its own drivers.

    namespace: the agents' namespace. watch: follows this node's Node object. reports: the wanted report for each
    annotation; "" for no annotation. state: the state of the watch of the Lease. failing: the failure that keeps the
    Lease from being written; None if the last write succeeded.
    """

    def __init__(self, cluster: Cluster, namespace: str, watch: NodeWatch) -> None:
        self.cluster = cluster
        self.namespace = namespace
        self.state = WatchState()
        self.failing: Failing | None = None
        self._watch = watch
        self.reports: dict[str, str] = {}
        self._seen: Object | None = None
        self._deleted = ""
        """The UID of the last Lease whose deletion the watch has reported. The response to the request that created
        this Lease may arrive after the report of its deletion."""
        self._listed, self._changed, self._attempted = asyncio.Event(), asyncio.Event(), asyncio.Event()

    @property
    def most(self) -> int:
        """The maximum number of bytes in one driver's report.

        All reports are annotations of one object, and share the size limit of this object's annotations.
        """
        return progress.MAX_BYTES // max(1, len(self.reports))

    def report(self, driver: str, text: str) -> None:
        """Set the report that a driver's annotation should have; "" removes the annotation."""
        key = progress.annotation(driver)
        if self.reports.get(key) != text:
            self.reports[key] = text
            self._changed.set()

    def write(self) -> None:
        """Make `run` check the Lease's reports and owner again, because the Node may have been replaced."""
        self._changed.set()

    async def attempted(self, seconds: float) -> None:
        """Wait until the first write of the Lease has succeeded or failed, at most this number of seconds."""
        await in_time(self._attempted.wait(), seconds)

    async def read(self) -> list[Object]:
        """Return a list with the Lease; an empty list if the Lease does not exist. Raises ClusterError.

        While the watch is alive the result is the watch's state. Only this agent writes the Lease.
        """
        if self._listed.is_set() and self.state.lapse(time.monotonic()) is None:
            return [self._seen] if self._seen is not None else []
        try:
            return [await self.cluster.get(LEASES, self._watch.node, self.namespace)]
        except NotFoundError:
            return []

    async def run(self) -> None:
        """Follow the Lease and write it after changes, until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._follow())
            group.create_task(self._keep())

    async def _follow(self) -> None:
        selector = f"metadata.name={self._watch.node}"
        follow = self.cluster.follow(LEASES, self.state, namespace=self.namespace, field_selector=selector)
        async with aclosing(follow) as events:
            async for event in events:
                if isinstance(event, Listed):
                    self._seen = event.items[0] if event.items else None
                elif event.type != "DELETED":
                    self._see(event.object)
                else:
                    self._deleted = event.object["metadata"]["uid"]
                    if self._seen is not None and self._seen["metadata"]["uid"] == self._deleted:
                        self._seen = None
                self._listed.set()
                self._changed.set()

    def _see(self, lease: Object) -> None:
        if lease["metadata"]["uid"] == self._deleted:
            self._seen = None
            self._changed.set()
        elif self._seen is None or not is_older(lease, self._seen):
            self._seen = lease

    async def _keep(self) -> None:
        backoff = self.cluster.backoff.fresh()
        await in_time(self._listed.wait(), FIRST)
        while True:
            await self._changed.wait()
            self._changed.clear()
            if not self._watch.uid or self._watch.gone:
                continue  # The API server would delete a Lease whose owner, the Node, is unknown or gone.
            try:
                await self._write()
            except ClusterError as error:
                if self.failing is None:
                    _LOG.warning("Lease %s/%s cannot be written: %s", self.namespace, self._watch.node, error)
                self.failing = Failing.after(self.failing, error)
                self._attempted.set()
                self._changed.set()
                wait = backoff.next()
                if isinstance(error, ApiError):
                    wait = max(wait, min(error.retry_after, backoff.most))
                await self.cluster.pause(wait)
            else:
                self.failing = None
                self._attempted.set()
                backoff.reset()

    async def _write(self) -> None:
        name = self._watch.node
        owners = [{"apiVersion": "v1", "kind": "Node", "name": name, "uid": self._watch.uid}]
        reports = {key: text or None for key, text in self.reports.items()}
        if (seen := self._seen) is not None:
            metadata = seen["metadata"]
            annotations = metadata.get("annotations") or {}
            changes = {key: text for key, text in reports.items() if annotations.get(key) != text}
            if not changes and metadata.get("ownerReferences") == owners:
                return
            patch = {"metadata": {"annotations": changes, "ownerReferences": owners}}
            with contextlib.suppress(NotFoundError):
                self._see(await self.cluster.patch(LEASES, name, patch, self.namespace))
                return
            self._seen = None
        if not (kept := {key: text for key, text in reports.items() if text}):
            return
        metadata = {"name": name, "namespace": self.namespace, "labels": LABELS}
        metadata |= {"annotations": kept, "ownerReferences": owners}
        try:
            self._see(await self.cluster.create(LEASES, {"metadata": metadata, "spec": {}}, self.namespace))
        except ConflictError:  # The Lease exists, but the watch has not reported it yet.
            self._seen = await self.cluster.get(LEASES, name, self.namespace)
            self._changed.set()
