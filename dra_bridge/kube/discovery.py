"""Discovery: the version of resource.k8s.io in which the client talks to the API server."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from typing import Final

from dra_bridge.kube.connection import Connection
from dra_bridge.kube.errors import ApiError, UnavailableError, UnsupportedError
from dra_bridge.kube.kinds import GROUP, RESOURCE_SLICES, Object

logger: Final = logging.getLogger(__name__)

VERSIONS: Final = ("v1", "v1beta2", "v1beta1")
"""The versions of resource.k8s.io of this client, the best first (v1 since 1.34, v1beta2 1.33, v1beta1 1.32)."""


class Discovery:
    """Chooses the best version of resource.k8s.io that the server serves, and remembers it."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._chosen = ""
        """The version; empty if none is chosen yet, or the last one is in doubt."""
        self._chosen_at = 0.0
        self._recoveries = 0
        """How often the server had been lost and back when the version was chosen."""
        self._choosing = asyncio.Lock()

    async def version(self, *, older_than: float | None = None) -> str:
        """Return the chosen version. Raises UnsupportedError if the server serves none that this client knows.

        The server is asked once, again after an outage, after `forget`, and when its answer is older than
        `older_than` seconds.
        """
        async with self._choosing:
            if self._chosen and (older_than is None or self._age() <= older_than):
                return self._chosen
            before, chosen = self._chosen, ""
            served = {entry.get("version") for entry in (await self._group()).get("versions") or ()}
            for version in VERSIONS:
                if version in served and (version == before or await self._has_slices(version)):
                    chosen = version
                    break
            self._chosen, self._chosen_at = chosen, time.monotonic()
            self._recoveries = self._connection.traffic.recoveries
            if not chosen:
                raise UnsupportedError(
                    f"the API server serves none of {GROUP}/{', '.join(VERSIONS)}: Dynamic Resource Allocation is off"
                )
            if chosen != before:
                logger.info("the API server is used in version %s/%s", GROUP, chosen)
            return chosen

    async def _has_slices(self, version: str) -> bool:
        found = await self._connection.send("GET", f"/apis/{GROUP}/{version}")
        return any(entry.get("name") == RESOURCE_SLICES.plural for entry in found.get("resources") or ())

    async def _group(self) -> Object:
        """Return what the server serves of resource.k8s.io; empty if its list of groups is without it."""
        try:
            return await self._connection.send("GET", f"/apis/{GROUP}")
        except ApiError as error:
            if error.code != 404:
                raise
        groups = (await self._connection.send("GET", "/apis")).get("groups")
        if not isinstance(groups, list):
            raise UnavailableError("GET /apis: the answer is no list of API groups")
        return next((group for group in groups if group.get("name") == GROUP), {})

    def forget(self) -> None:
        """Ask the server again when a version is next needed: it may not serve the chosen one any more."""
        self._chosen = ""

    def _age(self) -> float:
        if self._recoveries != self._connection.traffic.recoveries:
            return math.inf  # the server was lost since: it may have been upgraded
        return time.monotonic() - self._chosen_at
