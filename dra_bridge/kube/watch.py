"""List-and-watch: all objects of a kind and then each change, across outages and restored storages."""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
import urllib.parse
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple

import msgspec

from deviceplugin.backoff import Backoff
from dra_bridge.kube.connection import Connection
from dra_bridge.kube.discovery import Discovery
from dra_bridge.kube.errors import ApiError, GoneError, UnavailableError, UnsupportedError, error_of_status
from dra_bridge.kube.kinds import Kind, Object, path_of, selectors_of

logger: Final = logging.getLogger(__name__)

SILENCE: Final = (180.0, 300.0)
"""Seconds for which a watch without event and bookmark is trusted, drawn between the two.

kube-apiserver sends a bookmark every minute (defaultBookmarkFrequency, cacher.go, 1.36), but only when its
cache has passed the watch's position. In a cluster where nothing changes the cache moves with etcd's progress
notifications: every 5 s as kubeadm sets it up, every 10 minutes by etcd's default. A node then lists its own
objects once in about 4 minutes for each watch.
"""


class Listing(NamedTuple):
    """A list and the resourceVersion at which it is true."""

    items: list[Object]
    resource_version: str


@dataclass(frozen=True, slots=True)
class Listed:
    """All objects there are: at the beginning, and whenever a watch did not end as the client had asked.

    version: of resource.k8s.io in which the objects are; empty for other groups.
    """

    items: tuple[Object, ...]
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
    """The highest resourceVersions that the server has shown, and whether it went back behind them.

    restored: how often a list was older than what the server had shown before.
    """

    def __init__(self) -> None:
        self.restored = 0
        self._highest: dict[str, int] = {}
        """By the kind's plural: kinds may lie in different etcds."""
        self._reads: set[asyncio.Timeout] = set()
        """The deadlines of the watches' current reads."""

    def highest(self, kind: Kind) -> int:
        """Return the highest known resourceVersion of a kind, 0 for none."""
        return self._highest.get(kind.plural, 0)

    def moved(self, kind: Kind, position: str, before: int = 0) -> None:
        """Note a resourceVersion. That of a consistent list is at least `before`, the highest before the request.

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


@dataclass(frozen=True)
class Watches:
    """Follows kinds of objects on one API server.

    list_all: as `Cluster.list`. backoff, seconds and silence: as of `Cluster`.
    """

    connection: Connection
    discovery: Discovery
    positions: Positions
    list_all: Callable[..., Awaitable[Listing]]
    backoff: Backoff
    seconds: tuple[float, float]
    silence: tuple[float, float]
    _warned: set[str] = field(default_factory=set, init=False)

    async def follow(
        self, kind: Kind, namespace: str, selectors: Mapping[str, str]
    ) -> AsyncGenerator[Listed | Changed, None]:
        """Yield all objects now, then each change, for ever: see `Cluster.follow`."""
        backoff = self.backoff.fresh()
        what = f"watch {kind.plural}"
        position, listed_in, restored, lost = "", "", 0, False
        while True:
            opened = math.inf
            try:
                version = ""
                if not kind.version:
                    version = await self.discovery.version(older_than=0.0 if lost else self.seconds[0] / 2)
                if not position or version != listed_in:
                    listing = await self.list_all(kind, namespace, **selectors)
                    restored = self.positions.restored
                    version = "" if kind.version else await self.discovery.version()
                    position, listed_in = listing.resource_version, version
                    yield Listed(tuple(listing.items), version)
                seconds = random.uniform(*self.seconds)  # noqa: S311 - no secret
                path = path_of(kind, kind.version or version, "", namespace)
                target = _watch_target(path, selectors_of(**selectors), position, seconds)
                async with aclosing(self._events(target, restored)) as events:
                    async for event in events:
                        if event is None:
                            opened, lost = time.monotonic(), False
                            continue
                        self._warned.discard(what)
                        position = str((event.object.get("metadata") or {}).get("resourceVersion") or position)
                        self.positions.moved(kind, position)
                        if event.type in ("ADDED", "MODIFIED", "DELETED"):
                            yield Changed(event.type, event.object)  # type: ignore[arg-type]  # just compared
                if time.monotonic() - opened < seconds - 1.0:
                    raise UnavailableError(f"{what}: it ended before its time")
                self._warned.discard(what)
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
                        self.discovery.forget()  # the server may not serve the version any more
                    wait = max(wait, min(error.retry_after, backoff.most))
                if isinstance(error, UnsupportedError) or (error.code and not isinstance(error, GoneError)):
                    self._warn_once(what, error)
                await self.connection.traffic.pause(wait)

    async def _events(self, target: str, restored: int) -> AsyncGenerator[_WatchEvent | None, None]:
        """Yield None when the watch is open, then each event, bookmarks included."""
        async with self.connection.stream(target) as lines:
            yield None
            silence = random.uniform(*self.silence)  # noqa: S311 - no secret
            while line := await self.positions.read(lines, silence, restored):
                event = _WATCH_EVENT.decode(line)
                if event.type == "ERROR":
                    raise error_of_status(event.object)
                yield event

    def _warn_once(self, what: str, error: Exception) -> None:
        if what not in self._warned:
            self._warned.add(what)
            logger.warning("%s: %s; trying again", what, error)


def _watch_target(path: str, selectors: Mapping[str, str], position: str, seconds: float) -> str:
    parameters = {
        **selectors,
        "watch": "true",
        "allowWatchBookmarks": "true",
        "resourceVersion": position,
        "timeoutSeconds": str(max(1, round(seconds))),
    }
    return f"{path}?{urllib.parse.urlencode(parameters)}"
