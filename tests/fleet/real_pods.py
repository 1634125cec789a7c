"""Runs the pods that the real scheduler binds to embedded kubelets, and reports them as kubelets do."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from contextlib import aclosing
from typing import Any, Final, Protocol

from deviceplugin.testing.pods import FakePod
from dra_bridge.kube import PODS, Cluster, Listed
from dra_bridge.kube.api import Object
from dra_bridge.testing.node import FakeNode, overlaps
from tests.cluster.api import Api
from tests.fleet.plane import RESOURCE

_LOG: Final = logging.getLogger(__name__)
LONGEST: Final = 300.0
"""Seconds that a pod may take to run, and to end."""


class ClaimsOfPods(Protocol):
    """The source of claims of an embedded kubelet."""

    def adopt(self, claim: Object) -> None:
        """Add a claim that the real scheduler has allocated."""

    def release(self, name: str, namespace: str) -> None:
        """Remove a claim that the real scheduler has allocated."""

    def wake(self) -> None:
        """Have the embedded scheduler look for pods."""


class RealPods:
    """The pods of a namespace on the nodes of this process.

    nodes: each node, with its source of claims. ran: by pod, when it ran (Unix seconds). failed: why pods did not run.
    """

    def __init__(self, api: Api, cluster: Cluster, nodes: Mapping[str, tuple[FakeNode, ClaimsOfPods]]) -> None:
        self._api = api
        self._cluster = cluster
        self._nodes = nodes
        self._begun: dict[str, asyncio.Task[FakePod | None]] = {}
        self._ending: dict[str, asyncio.Task[None]] = {}
        self.ran: dict[str, float] = {}
        self.failed: list[str] = []

    async def run(self, namespace: str) -> None:
        """Start and end the pods that the real scheduler binds, until cancelled."""
        follow = self._cluster.follow(PODS, namespace=namespace, field_selector="spec.nodeName!=")
        async with aclosing(follow) as events:
            async for event in events:
                for body in event.items if isinstance(event, Listed) else (event.object,):
                    self._see(body)

    def _see(self, body: Object) -> None:
        uid, metadata = body["metadata"]["uid"], body["metadata"]
        if body["spec"]["nodeName"] not in self._nodes:
            return
        if uid not in self._begun and "deletionTimestamp" not in metadata:
            self._begun[uid] = asyncio.create_task(self._start(body))
        if uid in self._begun and uid not in self._ending and "deletionTimestamp" in metadata:
            self._ending[uid] = asyncio.create_task(self._end(body))

    async def _start(self, body: Object) -> FakePod | None:
        node, claims = self._nodes[body["spec"]["nodeName"]]
        try:
            return await asyncio.to_thread(self._run, node, claims, body)
        except Exception as error:
            _LOG.exception("pod %s", body["metadata"]["name"])
            self.failed.append(f"{body['metadata']['name']}: {type(error).__name__}: {error}")
            return None

    def _run(self, node: FakeNode, claims: ClaimsOfPods, body: Object) -> FakePod:
        metadata, names = body["metadata"], names_of_claims(body)
        for name in names:
            claims.adopt(self._api.get("ResourceClaim", name, metadata["namespace"], "resource.k8s.io/v1"))
        (container,) = body["spec"]["containers"]
        limits = {} if names else {RESOURCE: int(container["resources"]["limits"][RESOURCE])}
        where = {"namespace": metadata["namespace"], "uid": metadata["uid"]}
        pod = node.start_pod(metadata["name"], limits or None, claims=names, **where)
        claims.wake()
        pod.wait_running(LONGEST)
        status = {"status": {"phase": "Running"}}
        self._api.patch("Pod", metadata["name"], status, metadata["namespace"], "status", "v1")
        self.ran[metadata["name"]] = time.time()
        return pod

    async def _end(self, body: Object) -> None:
        metadata = body["metadata"]
        _, claims = self._nodes[body["spec"]["nodeName"]]
        pod = await self._begun[metadata["uid"]]
        try:
            if pod is not None:
                await asyncio.to_thread(pod.delete, LONGEST)
            await asyncio.to_thread(self._api.delete, "Pod", metadata["name"], metadata["namespace"], "v1", 0)
        except Exception as error:
            _LOG.exception("end of pod %s", metadata["name"])
            self.failed.append(f"end of {metadata['name']}: {type(error).__name__}: {error}")
        for name in names_of_claims(body):
            claims.release(name, metadata["namespace"])

    def found(self) -> dict[str, Any]:
        """Return the results so far, for JSON. overlaps: devices that two pods had at the same time."""
        both = [str(pair) for node, _ in self._nodes.values() for pair in overlaps(node.holdings())]
        return {"ran": dict(self.ran), "failed": list(self.failed), "overlaps": both}


def names_of_claims(pod: Object) -> tuple[str, ...]:
    """Return the names of the claims that were made for a pod."""
    status = pod.get("status") or {}
    names = [one["resourceClaimName"] for one in status.get("resourceClaimStatuses") or ()]
    extended = status.get("extendedResourceClaimStatus") or {}
    return (*names, *([extended["resourceClaimName"]] if extended else ()))
