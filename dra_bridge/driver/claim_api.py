"""What a driver needs of the API server for its claims."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol

from dra_bridge import kube
from dra_bridge.driver.claims import ClaimRef

__all__ = ["ClaimApi", "ClusterClaims"]

_LOG: Final = logging.getLogger(__name__)


class ClaimApi(Protocol):
    """What a driver needs of the API server."""

    async def get_claim(self, namespace: str, name: str) -> Mapping[str, Any] | None:
        """Return a ResourceClaim as the API server has it now, None if there is none.

        Raises whatever it likes where that cannot be learned; the claim gets it as its error.
        """

    async def set_devices(self, claim: ClaimRef, driver: str, devices: Sequence[Mapping[str, Any]]) -> None:
        """Write this driver's entries of the claim's `status.devices`; others' stay. Best effort."""

    async def claim_event(self, claim: ClaimRef, reason: str, message: str) -> None:
        """Write a warning Event about the claim. Best effort."""


class ClusterClaims:
    """`Claims` by way of the API client. node: this node's name, for events."""

    def __init__(self, api: kube.Cluster, node: str) -> None:
        self._api = api
        self._node = node
        self._status_refused = ""

    async def get_claim(self, namespace: str, name: str) -> Mapping[str, Any] | None:
        """Return a ResourceClaim, None if there is none."""
        try:
            return await self._api.get(kube.RESOURCE_CLAIMS, name, namespace)
        except kube.NotFoundError:
            return None

    async def set_devices(self, claim: ClaimRef, driver: str, devices: Sequence[Mapping[str, Any]]) -> None:
        """Write this driver's entries of `status.devices`, until the server drops or refuses them."""
        if self._status_refused:
            return
        for _ in range(3):
            now = await self.get_claim(claim.namespace, claim.name)
            if now is None or now["metadata"]["uid"] != claim.uid:
                return
            others = [entry for entry in now.get("status", {}).get("devices") or () if entry["driver"] != driver]
            patch = {
                "metadata": {"uid": claim.uid, "resourceVersion": now["metadata"]["resourceVersion"]},
                "status": {"devices": [*others, *devices]},
            }
            try:
                made = await self._api.patch(
                    kube.RESOURCE_CLAIMS, claim.name, patch, claim.namespace, subresource="status"
                )
            except kube.ConflictError:
                continue
            except kube.ForbiddenError as error:
                self._refused(str(error))
            else:
                if not (made.get("status") or {}).get("devices"):
                    self._refused("the server drops them (DRAResourceClaimDeviceStatus is off)")
            return

    def _refused(self, why: str) -> None:
        self._status_refused = why
        _LOG.info("claims get no conditions in status.devices from here on: %s", why)

    async def claim_event(self, claim: ClaimRef, reason: str, message: str) -> None:
        """Write a warning Event about the claim."""
        regarding = {
            "apiVersion": await self._api.api_version(kube.RESOURCE_CLAIMS),
            "kind": "ResourceClaim",
            "metadata": {"namespace": claim.namespace, "name": claim.name, "uid": claim.uid},
        }
        await self._api.event(regarding, reason, message, node=self._node)
