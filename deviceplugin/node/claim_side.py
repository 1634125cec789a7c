"""The interface between an agent and the DRA side of its process, which serves claims."""

from __future__ import annotations

from collections.abc import Collection
from typing import ClassVar


class ClaimSide:
    """The DRA side of an agent's process, which serves claims.

    The methods of this class are for a process without a DRA side, in which only pods get devices, by limits.

    agent_name: the file name for the copy of the agent's allocations, "" for no copy. drivers: the drivers that this
    process serves now. node_name: the node's name, "" if only an environment variable names it.
    """

    serves_claims: ClassVar[bool] = False
    agent_name: str = ""
    node_name: str = ""
    drivers: Collection[str] = ()

    def draining(self, resource: str) -> Collection[str]:
        """Return the ids of devices that new pods should get only if there are not enough other devices."""
        return ()

    def brought(self, resource: str, parent: str) -> None:
        """Handle a resource that a source serves in addition (`child_sources`). parent: the resource of that source.

        parent is "" for a resource that a vendor's plugin has registered and no config names.
        """

    def contested(self, resource: str, reason: str) -> None:
        """Handle that another plugin has registered a resource with the kubelet. reason: the proof."""

    async def end(self) -> None:
        """Prepare no more claims. The service for pods ends next."""
