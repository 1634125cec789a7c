"""List-and-watch: all objects of a kind and then each change, across outages and restored storages."""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
import urllib.parse
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, Protocol

import msgspec

from deviceplugin.backoff import Backoff
from dra_bridge.kube.connection import Connection
from dra_bridge.kube.discovery import Discovery
from dra_bridge.kube.errors import ApiError, GoneError, UnavailableError, UnsupportedError, error_of_status
from dra_bridge.kube.kinds import Kind, Object, path_of, selectors_of

__all__ = ["SILENCE", "Changed", "Listed", "Lister", "Listing", "Positions", "Watches"]

logger: Final = logging.getLogger(__name__)

SILENCE: Final = (180.0, 300.0)
"""Seconds for which a watch without event and bookmark is believed, drawn between the two.

kube-apiserver sends a bookmark every minute (defaultBookmarkFrequency, cacher.go, 1.36), but only when its
cache has passed the watch's position. In a cluster where nothing changes the cache moves with etcd's progress
notifications: every 5 s as kubeadm sets it up, every 10 minutes by etcd's default. A node then lists its own
objects once in about 4 minutes for each watch.
"""


class Listing(NamedTuple):
    """A list and the position in the history at which it is true."""

    items: list[Object]
    resource_version: str


@dataclass(frozen=True, slots=True)
class Listed:
    """All objects there are: at the beginning, and whenever a watch did not end as it was asked to.

    version: of resource.k8s.io in which the objects are; empty for other groups.
    """

    items: tuple[Object, ...]
    resource_version: str
    version: str = ""


@dataclass(frozen=True, slots=True)
class Changed:
    """One object that was added, changed or deleted since."""

    type: Literal["ADDED", "MODIFIED", "DELETED"]
    object: Object


class _WatchEvent(msgspec.Struct):
    type: str
    object: Object


_WATCH_EVENT: Final = msgspec.json.Decoder(_WatchEvent)


class Positions:
    """How far the history of the server's objects was seen, and whether the server went back in it."""

    def __init__(self) -> None:
        self.restored = 0
        """How often a list was older than what had been seen before."""
        self._highest: dict[str, int] = {}
        """The highest resourceVersion seen, by the kind's plural: kinds may lie in different etcds."""
        self._reads: set[asyncio.Timeout] = set()
        """The deadlines of the watches' reads under way."""

    def highest(self, kind: Kind) -> int:
        """Return the highest resourceVersion that was seen of a kind, 0 for none."""
        return self._highest.get(kind.plural, 0)

    def moved(self, kind: Kind, position: str, before: int = 0) -> None:
        """Note a resourceVersion; a consistent list's is at least as high as what was seen before it was asked for.

        If it is not, the server's storage was restored: open watches may be silent from here on.
        """
        number = int(position) if position.isdecimal() and len(position) < 20 else 0
        if number < before:
            logger.warning(
                "the API server went back from resourceVersion %d to %d of %s; all watches list again",
                before,
                number,
                kind.plural,
            )
            self.restored += 1
            self._highest.clear()
            for read in self._reads:
                if not read.expired():
                    read.reschedule(0.0)
        self._highest[kind.plural] = max(number, self._highest.get(kind.plural, 0))

    async def read(self, lines: AsyncIterator[bytes], silence: float, restored: int) -> bytes:
        """Return the next line of a watch's stream, b"" at its end.

        Raises:
            GoneError: nothing came for `silence` seconds, or the server went back meanwhile.

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


class Lister(Protocol):
    """Lists all objects of a kind as of now, and notes their position (`Positions.moved`)."""

    async def __call__(
        self, kind: Kind, namespace: str = "", *, field_selector: str = "", label_selector: str = ""
    ) -> Listing:
        """Return the list."""


class Watches:
    """Follows kinds of objects on one API server."""

    def __init__(
        self,
        connection: Connection,
        discovery: Discovery,
        positions: Positions,
        lister: Lister,
        *,
        backoff: Backoff,
        seconds: tuple[float, float],
        silence: tuple[float, float],
    ) -> None:
        """Open nothing yet.

        backoff: the waits after failures. seconds: how long the server is asked to keep a watch
        open, drawn between the two. silence: how long a watch is believed that sends nothing,
        drawn between the two.
        """
        self._connection = connection
        self._discovery = discovery
        self._positions = positions
        self._list = lister
        self._backoff = backoff
        self._seconds = seconds
        self._silence = silence
        self._said: set[str] = set()

    async def follow(
        self, kind: Kind, namespace: str = "", *, field_selector: str = "", label_selector: str = ""
    ) -> AsyncGenerator[Listed | Changed, None]:
        """Yield all objects now, then each change, for ever: see `Cluster.follow`."""
        backoff = self._backoff.fresh()
        selectors = selectors_of(field_selector, label_selector)
        what = f"watch {kind.plural}"
        position, listed_in, restored, lost = "", "", 0, False
        while True:
            opened = math.inf
            try:
                version = ""
                if not kind.version:
                    version = await self._discovery.version(older_than=0.0 if lost else self._seconds[0] / 2)
                if not position or version != listed_in:
                    listing = await self._list(
                        kind, namespace, field_selector=field_selector, label_selector=label_selector
                    )
                    restored = self._positions.restored
                    version = "" if kind.version else await self._discovery.version()
                    position, listed_in = listing.resource_version, version
                    yield Listed(tuple(listing.items), position, version)
                seconds = random.uniform(*self._seconds)  # noqa: S311 - no secret
                changes = self._watch(kind, namespace, selectors, position, listed_in, seconds, restored)
                async with aclosing(changes):
                    async for event, found in changes:
                        if event == "OPEN":
                            opened, lost = time.monotonic(), False
                            continue
                        self._said.discard(what)
                        position = str((found.get("metadata") or {}).get("resourceVersion") or position)
                        self._positions.moved(kind, position)
                        if event in ("ADDED", "MODIFIED", "DELETED"):
                            yield Changed(event, found)  # type: ignore[arg-type]  # just compared
                if time.monotonic() - opened < seconds - 1.0:
                    raise UnavailableError(f"{what}: it ended before its time")
                self._said.discard(what)
                backoff.reset()
            except (ApiError, UnsupportedError) as error:
                position = ""
                if time.monotonic() - opened >= 1.0:
                    backoff.reset()  # a server that ends watches at once is not asked at once
                wait = backoff.next()
                if isinstance(error, GoneError):
                    if wait <= backoff.first:
                        wait = 0.0  # the first time there is nothing to wait for
                elif isinstance(error, ApiError):
                    lost = lost or isinstance(error, UnavailableError)
                    if error.code == 404 and not kind.version:
                        self._discovery.forget()  # the version is not served any more
                    wait = max(wait, min(error.retry_after, backoff.most))
                if isinstance(error, UnsupportedError) or (error.code and not isinstance(error, GoneError)):
                    self._say_once(what, f"{error}")
                await self._connection.traffic.pause(wait)

    async def _watch(
        self,
        kind: Kind,
        namespace: str,
        selectors: Mapping[str, str],
        position: str,
        version: str,
        seconds: float,
        restored: int,
    ) -> AsyncGenerator[tuple[str, Object], None]:
        parameters = {
            **selectors,
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": position,
            "timeoutSeconds": str(max(1, round(seconds))),
        }
        path = f"{path_of(kind, kind.version or version, '', namespace)}?{urllib.parse.urlencode(parameters)}"
        async with self._connection.stream(path) as lines:
            yield "OPEN", {}
            silence = random.uniform(*self._silence)  # noqa: S311 - no secret
            while line := await self._positions.read(lines, silence, restored):
                event = _WATCH_EVENT.decode(line)
                if event.type == "ERROR":
                    raise error_of_status(event.object)
                yield event.type, event.object

    def _say_once(self, what: str, message: str) -> None:
        if what not in self._said:
            self._said.add(what)
            logger.warning("%s: %s; trying again", what, message)
