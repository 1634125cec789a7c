"""Events and conditions that users find at their claims."""

from __future__ import annotations

import logging
from datetime import UTC, datetime
from typing import Final

from dra_bridge.driver.claim_api import ClaimApi
from dra_bridge.driver.claim_files import Prepared
from dra_bridge.driver.claims import ClaimRef
from dra_bridge.driver.tasks import Tasks

__all__ = ["ClaimEvents"]

_LOG: Final = logging.getLogger(__name__)


class ClaimEvents:
    """Writes them in the background; one that cannot be written is lost.

    Args:
        driver: the driver's name.
        pool: its pool's name, which is the node's.
        claims: the API server.
        tasks: where the writes run.

    """

    def __init__(self, driver: str, pool: str, claims: ClaimApi, tasks: Tasks) -> None:
        self._driver = driver
        self._pool = pool
        self._claims = claims
        self._tasks = tasks
        self._refusals: dict[str, str] = {}
        """The kind of the last refusal that has an Event, by claim UID."""

    def refused(self, ref: ClaimRef, kind: str, message: str) -> None:
        """Write an Event about a claim that is refused its devices, unless its last one is of the same kind."""
        if self._refusals.get(ref.uid) != kind:
            self._refusals[ref.uid] = kind
            self._tasks.start(self._event(ref, "DeviceNotAvailable", message))

    def forget(self, uid: str) -> None:
        """Write an Event again when this claim is refused the next time."""
        self._refusals.pop(uid, None)

    def prepared(self, ref: ClaimRef, prepared: Prepared) -> None:
        """Write the condition Ready into the claim's `status.devices`."""
        self._tasks.start(self._conditions(ref, prepared))

    async def _conditions(self, ref: ClaimRef, prepared: Prepared) -> None:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        ready = {
            "type": "Ready",
            "status": "True",
            "reason": "Prepared",
            "message": f"prepared on {self._pool}",
            "lastTransitionTime": now,
        }
        devices = [
            {
                "driver": self._driver,
                "pool": device.pool,
                "device": device.device,
                **({"shareID": device.share} if device.share else {}),
                "conditions": [ready],
            }
            for device in prepared.devices
        ]
        try:
            await self._claims.set_devices(ref, self._driver, devices)
        except Exception as error:  # best effort
            _LOG.debug("%s: status of claim %s: %s", self._driver, ref.title, error)

    async def _event(self, ref: ClaimRef, reason: str, message: str) -> None:
        try:
            await self._claims.claim_event(ref, reason, message)
        except Exception as error:  # best effort
            _LOG.debug("%s: event of claim %s: %s", self._driver, ref.title, error)
