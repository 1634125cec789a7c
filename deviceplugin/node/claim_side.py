"""The interface between an agent and the DRA part of its process, which gives devices to claims."""

from __future__ import annotations

from collections.abc import Collection
from typing import ClassVar


class ClaimSide:
    """The DRA part of an agent's process, which gives devices to claims.

    The methods of this class are for a process without DRA, in which only pods get devices (by `limits`).

    agent_name: the agent's name, which is also the name of the copy of its allocations (see `AllocationCopies`), or "".
    drivers: the DRA drivers that this process runs now. node_name: the node's name, "" if only an environment variable
    names it.
    """

    serves_claims: ClassVar[bool] = False
    agent_name: str = ""
    node_name: str = ""
    drivers: Collection[str] = ()

    def draining(self, resource: str) -> Collection[str]:
        """Return the ids of devices that new pods should get only if there are not enough other devices."""
        return ()

    def brought(self, resource: str, parent: str) -> None:
        """Handle a further resource that a source has yielded (`child_sources`). parent: the resource of that source.

        parent is "" for a resource that a vendor's plugin has registered and no config names.
        """

    def contested(self, resource: str, reason: str) -> None:
        """React after another plugin has registered a resource with the kubelet. reason: the evidence."""

    async def end(self) -> None:
        """Stop preparing claims. Afterwards the agent ends its service for pods."""
