"""What an agent asks of the part of its process that serves claims."""

from __future__ import annotations

from collections.abc import Collection
from typing import ClassVar


class ClaimSide:
    """The DRA side beside an agent. These are the answers where there is none: devices go to pods only.

    agent_name: names the copy of the agent's allocations, "" for none. drivers: those that this process serves, as they
    are at any time.
    """

    serves_claims: ClassVar[bool] = False
    agent_name: str = ""
    drivers: Collection[str] = ()

    def unknown(self, driver: str, resource: str, device: str) -> str:
        """Return why it is not known yet who holds a device of a resource that names a driver; "" if it is."""
        return ""

    def draining(self, resource: str) -> Collection[str]:
        """Return the devices that new pods had better not get, if there are enough others."""
        return ()

    def brought(self, resource: str, parent: str) -> None:
        """Take a resource that a source has brought along (`child_sources`). parent: the resource of that source.

        Also one that a vendor's plugin has registered and no config names; parent is "" then.
        """

    def contested(self, resource: str, reason: str) -> None:
        """Take that another plugin has registered a resource with the kubelet."""

    async def end(self) -> None:
        """Take no more claims; the plugin side ends next."""
