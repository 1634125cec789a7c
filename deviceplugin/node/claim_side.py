"""The interface between an agent and the DRA part of its process, which gives devices to claims."""

from __future__ import annotations

from collections.abc import Collection
from typing import ClassVar


class ClaimSide:
    """The DRA part of an agent's process, which gives devices to claims.

    The default methods here are for a process without DRA, in which only pods get devices (by `limits`).

    agent_name: the agent's name, which is also the name of the copy of its allocations (see `AllocationCopies`), or "".
    drivers: the DRA drivers that this process runs now. node_name: the node's name; "" if the name is only in an
    environment variable.
    """

    serves_claims: ClassVar[bool] = False
    agent_name: str = ""
    node_name: str = ""
    drivers: Collection[str] = ()

    def draining(self, resource: str) -> Collection[str]:
        """Return the ids of devices that new pods should get only if there are not enough other devices."""
        return ()

    def brought(self, resource: str, parent: str) -> None:
        """Decide which devices of a resource go to claims, if the resource is served although no config names it.

        parent: the resource of the source that has yielded this resource's source (`child_sources`); "" if a vendor's
        plugin has registered the resource.
        """

    def contested(self, resource: str, reason: str) -> None:
        """React after another plugin has registered a resource with the kubelet. reason: the evidence for messages."""

    async def end(self) -> None:
        """Stop preparing claims. After this method, the agent ends its service for pods."""
