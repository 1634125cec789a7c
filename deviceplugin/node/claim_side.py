"""The interface between an agent and the DRA side of its process."""

from __future__ import annotations

from collections.abc import Collection
from typing import ClassVar


class ClaimSide:
    """The DRA side of an agent's process.

    The methods here are for a process without it: only pods get devices, by limits.

    agent_name: the name of the copy of the agent's allocations, "" for none. drivers: the drivers that this process
    serves now. node_name: the node's name, "" if only the environment has it.
    """

    serves_claims: ClassVar[bool] = False
    agent_name: str = ""
    node_name: str = ""
    drivers: Collection[str] = ()

    def draining(self, resource: str) -> Collection[str]:
        """Return the devices that new pods should get only if there are not enough others."""
        return ()

    def brought(self, resource: str, parent: str) -> None:
        """Handle a resource that a source has brought along (`child_sources`). parent: the resource of that source.

        parent is "" for a resource that a vendor's plugin has registered and no config names.
        """

    def contested(self, resource: str, reason: str) -> None:
        """Handle that another plugin has registered a resource with the kubelet."""

    async def end(self) -> None:
        """Accept no more claims. The plugin side ends next."""
