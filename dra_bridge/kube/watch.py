"""What lists and watches yield, and how a silent watch or a restored storage of the server is noticed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Final

import msgspec

from dra_bridge.kube.api import GoneError, Kind, Object

logger: Final = logging.getLogger(__name__)

SILENCE: Final = (180.0, 300.0)
"""Seconds for which a watch without event and bookmark is trusted, drawn between the two.

kube-apiserver sends a bookmark every minute (defaultBookmarkFrequency, cacher.go, 1.36), but only when its
cache has passed the watch's position. In a cluster where nothing changes the cache moves with etcd's progress
notifications: every 5 s as kubeadm sets it up, every 10 minutes by etcd's default. A node then lists its own
objects once in about 4 minutes for each watch.
"""


@dataclass(frozen=True, slots=True)
class Listed:
    """All objects there are, and the resourceVersion at which that is true.

    A watch yields it at the beginning, and whenever it did not end as the client had asked.
    """

    items: list[Object]
    resource_version: str


class Changed(msgspec.Struct, frozen=True):
    """One object that was added, changed or deleted since. type: ADDED, MODIFIED or DELETED."""

    type: str
    object: Object


class Positions:
    """The highest resourceVersions that the server has shown; restored: how often it went back behind them."""

    def __init__(self) -> None:
        self.restored = 0
        self._highest: dict[str, int] = {}  # by the kind's plural: kinds may lie in different etcds
        self._reads: set[asyncio.Timeout] = set()  # the deadlines of the watches' current reads

    def highest(self, kind: Kind) -> int:
        """Return the highest resourceVersion of a kind, 0 if none is known."""
        return self._highest.get(kind.plural, 0)

    def moved(self, kind: Kind, position: str, before: int = 0) -> None:
        """Note a resourceVersion. That of a consistent list is at least `before`, the highest before the request.

        If it is not, the server's storage was restored: open watches may be silent from here on.
        """
        number = int(position) if position.isdecimal() and len(position) < 20 else 0
        if number < before:
            text = "the API server went back from resourceVersion %d to %d of %s; all watches list again"
            logger.warning(text, before, number, kind.plural)
            self.restored += 1
            self._highest.clear()
            for read in self._reads:
                if not read.expired():
                    read.reschedule(0.0)
        self._highest[kind.plural] = max(number, self.highest(kind))

    async def read(self, lines: AsyncIterator[bytes], silence: float, restored: int) -> bytes:
        """Return the next line of a watch's stream, b"" at its end.

        Raises GoneError if nothing came for `silence` seconds, or the server went back meanwhile.
        """
        if self.restored != restored:
            raise GoneError("the API server went back")
        limit = asyncio.timeout(silence)
        try:
            async with limit:
                self._reads.add(limit)
                return await anext(lines, b"")
        except TimeoutError:
            if limit.expired():
                raise GoneError("the watch is silent") from None
            raise
        finally:
            self._reads.discard(limit)
