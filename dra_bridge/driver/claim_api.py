"""Reads claims at the API server, and writes their status and Events."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final

from deviceplugin.tasks import Tasks
from dra_bridge import kube
from dra_bridge.driver.claims import ClaimRecords, ClaimRef, Prepared

_LOG: Final = logging.getLogger(__name__)

AGAIN: Final = 60.0
"""Seconds for which a driver's `status.devices` is not written again, after the API server refused or dropped a write.
For example, the agent may lack the right to write.
"""


class ClusterClaims:
    """Reads claims from the API server, and writes their status and Events. node: this node's name, for Events."""

    def __init__(self, api: kube.Cluster, node: str) -> None:
        self._api = api
        self._node = node
        self._without_status: dict[str, float] = {}
        """For each driver, when the API server last refused or dropped the driver's entries in a `status.devices`
        (monotonic seconds). A driver has no value here once the API server has stored its entries.

        The mapping also has drivers that the configuration no longer names: the agent has no right to write their
        entries.
        """

    async def get_claim(self, namespace: str, name: str) -> Mapping[str, Any] | None:
        """Return a ResourceClaim, None if the claim does not exist."""
        try:
            return await self._api.get(kube.RESOURCE_CLAIMS, name, namespace)
        except kube.NotFoundError:
            return None

    async def set_devices(self, claim: ClaimRef, driver: str, devices: Sequence[Mapping[str, Any]]) -> None:
        """Replace this driver's entries in the `status.devices` of a claim.

        The function does nothing for `AGAIN` seconds after the API server has dropped or refused entries of this
        driver.
        """
        if time.monotonic() < self._without_status.get(driver, -AGAIN) + AGAIN:
            return
        name, namespace = claim.name, claim.namespace
        for _ in range(3):
            now = await self.get_claim(namespace, name)
            if now is None or now["metadata"]["uid"] != claim.uid:
                return
            others = [entry for entry in now.get("status", {}).get("devices") or () if entry["driver"] != driver]
            metadata = {"uid": claim.uid, "resourceVersion": now["metadata"]["resourceVersion"]}
            patch = {"metadata": metadata, "status": {"devices": [*others, *devices]}}
            try:
                made = await self._api.patch(kube.RESOURCE_CLAIMS, name, patch, namespace, subresource="status")
            except kube.ConflictError:
                continue
            except kube.ForbiddenError as error:
                self._refused(driver, str(error))
            else:
                if (made.get("status") or {}).get("devices"):
                    self._without_status.pop(driver, None)
                else:
                    self._refused(driver, "the server drops them (DRAResourceClaimDeviceStatus is off)")
            return

    def _refused(self, driver: str, why: str) -> None:
        if driver not in self._without_status:
            _LOG.info("status.devices of claims is not written: %s", why, extra={"driver": driver})
        self._without_status[driver] = time.monotonic()

    async def claim_event(self, claim: ClaimRef, reason: str, message: str) -> None:
        """Write a warning Event about the claim."""
        await self._api.event(kube.RESOURCE_CLAIMS, claim._asdict(), reason, message, self._node)


@dataclass(frozen=True, slots=True)
class ClaimEvents:
    """Writes Events and conditions of claims in background tasks. A failed write is not repeated.

    report: whether to write `status.devices` of prepared claims. refusals: for each claim UID, the kind of the last
    refusal with an Event, so that the next refusal of this kind gets no Event.
    """

    records: ClaimRecords
    api: ClusterClaims
    tasks: Tasks
    report: bool
    refusals: dict[str, str] = field(default_factory=dict)

    def refused(self, ref: ClaimRef, kind: str, message: str) -> None:
        """Write an Event about a claim that was refused its devices; consecutive refusals of one kind get one Event."""
        if self.refusals.get(ref.uid) != kind:
            self.refusals[ref.uid] = kind
            self._start(self.api.claim_event, ref, "DeviceNotAvailable", message)

    def prepared(self, ref: ClaimRef, prepared: Prepared) -> None:
        """Write the condition Ready into the claim's `status.devices`; only called if `report` is true."""
        ready = {
            "type": "Ready",
            "status": "True",
            "reason": "Prepared",
            "message": f"prepared on {self.records.pool}",
            "lastTransitionTime": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        }
        devices = [
            {
                "driver": self.records.driver,
                "pool": device.pool,
                "device": device.device,
                **({"shareID": device.share} if device.share else {}),
                "conditions": [ready],
            }
            for device in prepared.devices
        ]
        self._start(self.api.set_devices, ref, self.records.driver, devices)

    def _start(self, write: Callable[..., Awaitable[None]], ref: ClaimRef, *args: object) -> None:
        async def attempt() -> None:
            try:
                await write(ref, *args)
            except Exception as error:  # Claims work without these writes, so a failure is only logged.
                extra = {"driver": self.records.driver, "claim": ref.title}
                _LOG.debug("cannot write the status or an Event of claim %s: %s", ref.title, error, extra=extra)

        self.tasks.start(attempt())
