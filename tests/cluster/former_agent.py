"""Simulates an agent of an older version, which wrote its report as an annotation of its slice, not in a Lease.

The older version kept a slice without devices for the report. It ignored a rollout's request (an annotation of the
Node) for a pool without devices.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Self

from dra_bridge.handover.share import parse_share
from tests.cluster.api import ApiError
from tests.cluster.group import DEVICES, Group, GroupNode

LOOK = 0.2
"""Seconds between two readings of the Node."""


@dataclass
class FormerAgent:
    """A former agent of one driver on one node. It has the rights of the present manifests."""

    group: Group
    node: GroupNode
    _over: threading.Event = field(default_factory=threading.Event)

    @classmethod
    @contextlib.contextmanager
    def running(cls, group: Group, node: GroupNode) -> Iterator[Self]:
        """Publish a slice, and write it again when the Node requests another share (devices for claims).

        The slice stays at the end of the context.
        """
        agent = cls(group, node)
        agent.write("")
        thread = threading.Thread(target=agent._follow, daemon=True)
        thread.start()
        try:
            yield agent
        finally:
            agent.end()
            thread.join(60)

    def end(self) -> None:
        """End the agent, as if its pod were replaced."""
        self._over.set()

    def replaced(self) -> bool:
        """Return whether no slice of the node has a report. Only former agents write reports in slices."""
        found = self.group.cluster.api.list("ResourceSlice")
        texts = [
            (one["metadata"].get("annotations") or {}).get(f"{self.group.driver}/handover")
            for one in found
            if one["spec"].get("nodeName") == self.node.name
        ]
        return not any(json.loads(text)["resources"] for text in texts if text)

    def _follow(self) -> None:
        known, key = "", f"{self.group.driver}/dra-share"
        while not self._over.wait(LOOK):
            with contextlib.suppress(ApiError, OSError):
                annotations = self.group.cluster.api.get("Node", self.node.name)["metadata"].get("annotations") or {}
                if (requested := annotations.get(key, "")) != known:
                    self.write(requested)
                    known = requested

    def write(self, requested: str) -> None:
        """Create or replace the slice, with as many devices as are requested for claims, and the report."""
        cluster, driver, name = self.group.cluster, self.group.driver, self.node.name
        share = requested or "none"
        moved = parse_share(share).of(DEVICES)
        states = {f"{number}": "dra" if number < moved else "plugin" for number in range(DEVICES)}
        counts = {state: number for state, number in (("dra", moved), ("plugin", DEVICES - moved)) if number}
        devices = {device: {"state": state, "since": 1} for device, state in states.items()}
        resource = {"share": share, "counts": counts, "devices": devices}
        report = {"resources": {self.group.resource: resource}, "requested": requested}
        uid = cluster.api.get("Node", name)["metadata"]["uid"]
        kind = cluster.api.resource("ResourceSlice")
        metadata: dict[str, Any] = {
            "name": f"{name}-{driver}-0",
            "annotations": {f"{driver}/handover": json.dumps(report)},
            "ownerReferences": [{"apiVersion": "v1", "kind": "Node", "name": name, "uid": uid}],
        }
        pool = {"name": name, "generation": 1, "resourceSliceCount": 1}
        spec: dict[str, Any] = {"driver": driver, "nodeName": name, "pool": pool}
        if moved:
            spec["devices"] = [{"name": f"card-{device}"} for device, state in states.items() if state == "dra"]
        body = {"apiVersion": kind.api_version, "kind": kind.kind, "metadata": metadata, "spec": spec}
        api = cluster.api_with_token(cluster.service_account_token("dra-bridge", "dra-bridge", ("Node", name)))
        try:
            present = api.get("ResourceSlice", metadata["name"])
        except ApiError as error:
            if error.code != 404:
                raise
            api.create(body)
        else:
            metadata["resourceVersion"] = present["metadata"]["resourceVersion"]
            pool["generation"] = present["spec"]["pool"]["generation"] + 1
            api.request("PUT", kind.path(metadata["name"]), body)
