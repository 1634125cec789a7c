"""The Node object of this node: its annotations, and what its status says is allocatable."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextlib import aclosing
from typing import Final

from deviceplugin.naming import NamingError, parse_quantity
from dra_bridge.kube import NODES, Cluster, ClusterError, ForbiddenError, Listed

_LOG: Final = logging.getLogger(__name__)

NODE_READ: Final = 5.0
"""Seconds after which a warning is logged that the Node's annotations are not known yet."""


class NodeWatch:
    """Follows this node's Node.

    annotated: called when its annotations are other ones. allocatable: called with each version's `status.allocatable`.

    Attribute annotations: None while they are not known.
    """

    def __init__(
        self,
        cluster: Cluster,
        node: str,
        annotated: Callable[[], None],
        allocatable: Callable[[Mapping[str, str]], None],
    ) -> None:
        self.annotations: Mapping[str, str] | None = None
        self._cluster = cluster
        self._node = node
        self._annotated = annotated
        self._allocatable = allocatable
        self._known = asyncio.Event()

    async def run(self) -> None:
        """Follow it until cancelled."""
        async with aclosing(self._cluster.follow(NODES, field_selector=f"metadata.name={self._node}")) as events:
            async for event in events:
                if isinstance(event, Listed):
                    found = event.items[0] if event.items else {}
                else:
                    found = event.object if event.type != "DELETED" else {}
                self._allocatable((found.get("status") or {}).get("allocatable") or {})
                annotations = (found.get("metadata") or {}).get("annotations") or {}
                if annotations != self.annotations:
                    self.annotations = annotations
                    self._known.set()
                    self._annotated()

    async def known(self) -> None:
        """Wait until they are known: an agent that starts while the API server is away moves nothing back."""
        try:
            async with asyncio.timeout(NODE_READ):
                await self._known.wait()
        except TimeoutError:
            _LOG.warning("node %s cannot be read yet; no device moves until its annotations are known", self._node)
            await self._known.wait()


class NodeStatusWriter:
    """Writes `status.allocatable` of this node's Node. That needs the right to patch `nodes/status`."""

    def __init__(self, cluster: Cluster, node: str) -> None:
        self._cluster = cluster
        self._node = node
        self._refused = False

    async def write(self, resource: str, number: int) -> bool:
        """Write a resource's number; return False if it is refused or the API server cannot be asked."""
        patch = {"status": {"allocatable": {resource: str(number)}}}
        try:
            await self._cluster.patch(NODES, self._node, patch, subresource="status")
        except ForbiddenError as error:
            if not self._refused:
                _LOG.warning(
                    "the status of node %s cannot be written, so pods that wait may fail while devices move "
                    "(UnexpectedAdmissionError), and start up to 10 s later: %s",
                    self._node,
                    error,
                )
            self._refused = True
            return False
        except ClusterError as error:
            _LOG.info("the status of node %s cannot be written now: %s", self._node, error)
            return False
        _LOG.debug("%s: the node's status says %d allocatable", resource, number)
        self._refused = False
        return True


def numbers(allocatable: Mapping[str, str]) -> dict[str, int]:
    """Return the whole numbers among the quantities of `status.allocatable`, such as 8 or 1k."""
    found = {}
    for name, text in allocatable.items():
        try:
            found[name] = int(parse_quantity(text))
        except NamingError:
            continue
    return found
