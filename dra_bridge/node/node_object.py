"""Follows the Node object of this node: its annotations and `status.allocatable`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Final

from deviceplugin.naming import NamingError, parse_quantity
from deviceplugin.tasks import in_time
from dra_bridge.handover.allocatable import AllocatableStatus
from dra_bridge.kube import NODES, Cluster, ClusterError, Failing, ForbiddenError, Listed, Object, WatchState

_LOG: Final = logging.getLogger(__name__)

NODE_READ: Final = 5.0
"""Seconds after which the agent logs a warning that it has not read the Node's annotations yet."""
KARPENTER: Final = "karpenter.sh/nodepool"
"""The label that only Nodes created by Karpenter have."""
INITIALIZED: Final = "karpenter.sh/initialized"
"""Karpenter sets this label of a Node to "true" once the Node's first extended resources are allocatable."""


@dataclass(slots=True, eq=False)
class NodeWatch:
    """Follows the Node object of this node.

    annotated: a function that is called when the Node's annotations change, or when the Node was replaced by a new Node
    of the same name. allocatable: the object that receives the numbers in `status.allocatable`. annotations, uid:
    annotations and UID of the last read Node, even if this Node was deleted since; None and "" before the first read.
    gone: whether no Node of this name exists. state: the state of the watch.
    """

    cluster: Cluster
    node: str
    annotated: Callable[[], None]
    allocatable: AllocatableStatus
    annotations: Mapping[str, str] | None = None
    uid: str = ""
    gone: bool = False
    state: WatchState = field(default_factory=WatchState)
    _known: asyncio.Event = field(default_factory=asyncio.Event)
    _initialized: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self) -> None:
        """Follow the Node until cancelled."""
        follow = self.cluster.follow(NODES, self.state, field_selector=f"metadata.name={self.node}")
        async with aclosing(follow) as events:
            async for event in events:
                if isinstance(event, Listed):
                    node = event.items[0] if event.items else {}
                else:
                    node = event.object if event.type != "DELETED" else {}
                self.observe(node)

    def observe(self, node: Object) -> None:
        """Record a state of the Node object; {} if the Node does not exist."""
        self.allocatable.observe(numbers((node.get("status") or {}).get("allocatable") or {}))
        self.gone = not node
        if not node:
            if self.uid:
                _LOG.warning("the Node object %s is gone; the requested share stays", self.node)
            return
        labels = node["metadata"].get("labels") or {}
        if KARPENTER not in labels or labels.get(INITIALIZED) == "true":
            self._initialized.set()
        annotations, uid = node["metadata"].get("annotations") or {}, node["metadata"].get("uid", "")
        if (annotations, uid) != (self.annotations, self.uid):
            self.annotations, self.uid = annotations, uid
            self._known.set()
            self.annotated()

    @property
    def uninitialized(self) -> bool:
        """Whether Karpenter has created the Node and has not initialized it yet; False until the Node is read."""
        return self._known.is_set() and not self._initialized.is_set()

    async def initialized(self) -> bool:
        """Return whether new devices may go to DRA at once; False while Karpenter is initializing the node.

        The method waits at most `NODE_READ` seconds for the Node to be read, and returns False if it is still unread
        then.
        """
        await in_time(self._known.wait(), NODE_READ)
        return self._initialized.is_set()

    async def known(self) -> None:
        """Wait until the Node's annotations were read, and while Karpenter is initializing the node.

        The annotations may request a share for DRA. If an agent that starts during an outage of the API server did not
        wait, it would move the devices of this share back to the device plugin. Karpenter waits for allocatable
        devices, so no device may move to DRA before Karpenter has initialized the node.
        """
        if not await in_time(self._known.wait(), NODE_READ):
            _LOG.warning("node %s cannot be read yet; no device moves until its annotations are known", self.node)
            await self._known.wait()
        if not self._initialized.is_set():
            _LOG.info("no device of node %s moves until Karpenter has initialized it", self.node)
        await self._initialized.wait()


@dataclass(slots=True, eq=False)
class NodeStatusWriter:
    """Writes `status.allocatable` of this node's Node object. The agent needs the right to patch `nodes/status`.

    refused: the refusal of the last writes by the API server, and the time of the first refusal; None after a
    successful write.
    """

    cluster: Cluster
    node: str
    refused: Failing | None = None

    async def write(self, resource: str, number: int) -> bool:
        """Write a resource's number. Return False if the API server refuses the write or does not respond."""
        patch = {"status": {"allocatable": {resource: str(number)}}}
        try:
            await self.cluster.patch(NODES, self.node, patch, subresource="status")
        except ForbiddenError as error:
            if self.refused is None:
                text = (
                    "the status of node %s cannot be written, so pods that wait may fail while devices move "
                    "(UnexpectedAdmissionError), and start up to 10 s later: %s"
                )
                _LOG.warning(text, self.node, error)
            self.refused = Failing.after(self.refused, error)
            return False
        except ClusterError as error:
            _LOG.info("the status of node %s cannot be written now: %s", self.node, error)
            return False
        _LOG.debug("the Node's status.allocatable is now %d", number, extra={"resource": resource})
        self.refused = None
        return True


def numbers(allocatable: Mapping[str, str]) -> dict[str, int]:
    """Return, for each resource in `status.allocatable` whose quantity is a whole number (8 or 1k), this number."""
    quantities = {}
    for name, text in allocatable.items():
        try:
            quantities[name] = int(parse_quantity(text))
        except NamingError:
            continue
    return quantities
