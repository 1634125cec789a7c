"""Discovery: which version of resource.k8s.io the API server is spoken to in."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from typing import Final

from dra_bridge.kube.connection import Connection
from dra_bridge.kube.errors import ApiError, UnavailableError, UnsupportedError
from dra_bridge.kube.kinds import GROUP, RESOURCE_SLICES, Object

__all__ = ["VERSIONS", "Discovery"]

logger: Final = logging.getLogger(__name__)

VERSIONS: Final = ("v1", "v1beta2", "v1beta1")
"""The versions of resource.k8s.io that are spoken, the best first (v1 since 1.34, v1beta2 1.33, v1beta1 1.32)."""


class Discovery:
    """Chooses the best version of resource.k8s.io that the server serves, and remembers it."""

    def __init__(self, connection: Connection) -> None:
        self.chosen = ""
        """The version; empty if none is chosen yet, or the last one is in doubt."""
        self._connection = connection
        self._chosen_at = 0.0
        self._recoveries = 0
        """How often the server had been lost and found back when the version was chosen."""
        self._choosing = asyncio.Lock()

    async def version(self, *, older_than: float | None = None) -> str:
        """Return the version of resource.k8s.io to speak: v1, v1beta2 or v1beta1.

        Asked of the server once, again after an outage, after a 404 that means the whole kind, and
        when the answer is older than `older_than` seconds.

        Raises:
            UnsupportedError: the server serves none of them.

        """
        async with self._choosing:
            if self.chosen and (older_than is None or self._age() <= older_than):
                return self.chosen
            before, chosen = self.chosen, ""
            served = await self._group()
            names = {entry.get("version") for entry in served.get("versions") or ()}
            for version in (version for version in VERSIONS if version in names):
                if version != before:
                    known = await self._connection.send("GET", f"/apis/{GROUP}/{version}")
                    if not any(entry.get("name") == RESOURCE_SLICES.plural for entry in known.get("resources") or ()):
                        continue
                chosen = version
                break
            self.chosen, self._chosen_at = chosen, time.monotonic()
            self._recoveries = self._connection.traffic.recoveries
            if not chosen:
                raise UnsupportedError(
                    f"the API server serves none of {GROUP}/{', '.join(VERSIONS)}: Dynamic Resource Allocation is off"
                )
            if chosen != before:
                logger.info("the API server is spoken to in %s/%s", GROUP, chosen)
            return chosen

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
        """Ask again when next a version is needed: the last one may not be served any more."""
        self.chosen = ""

    def _age(self) -> float:
        if self._recoveries != self._connection.traffic.recoveries:
            return math.inf  # the server was lost since: it may be a newer one
        return time.monotonic() - self._chosen_at
