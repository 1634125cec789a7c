"""The NVIDIA driver as all sources of a loop share it: scanned from time to time, listened to in between."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, Final

from deviceplugin import filewatch
from deviceplugin.health import Verdict
from deviceplugin.sources.nvidia.places import Places
from deviceplugin.sources.nvidia.session import Session
from deviceplugin.sources.nvidia.thread import NvmlThread
from deviceplugin.sources.nvidia.values import News, NvmlError, NvmlScan, Xid

_LOG: Final = logging.getLogger(__name__)

SCAN_TIMEOUT: Final = 60.0
"""Seconds for a scan; the first one may wake eight sleeping GPUs."""
EVENT_WAIT: Final = 1.0
"""Seconds that one wait for events takes at the most; others who want the library wait as long."""
CALL_GRACE: Final = 10.0
GAP: Final = 0.5
"""Seconds between two scans at the least, however many hints there are."""


class Subscription:
    """What one source has not taken in yet."""

    def __init__(self, period: float) -> None:
        self.period = period
        self._news: deque[News] = deque(maxlen=10_000)
        self._came = asyncio.Event()

    def add(self, news: News) -> None:
        """Add to what is to be taken in."""
        self._news.append(news)
        self._came.set()

    async def take(self) -> list[News]:
        """Wait for news and return them all."""
        await self._came.wait()
        self._came.clear()
        news = list(self._news)
        self._news.clear()
        return news


class Driver:
    """Scans all GPUs from time to time and listens in between, for as long as somebody wants to know."""

    def __init__(self, places: Places) -> None:
        self.places = places
        self.session = Session(places.library, sysfs_root=places.sysfs, proc=places.proc)
        self.thread: NvmlThread | None = None
        self._subscriptions: set[Subscription] = set()
        self._task: asyncio.Task[None] | None = None
        self._last: News | None = None

    @contextlib.contextmanager
    def subscribe(self, period: float) -> Iterator[Subscription]:
        """Hear of everything while in the context; scans are made at least each `period` seconds."""
        subscription = Subscription(period)
        if self._last is not None:
            subscription.add(self._last)
        self._subscriptions.add(subscription)
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="nvml")
        try:
            yield subscription
        finally:
            self._subscriptions.discard(subscription)
            if not self._subscriptions:
                self._task.cancel()
                self._task = self._last = None
                if self.thread is not None:
                    session, self.session = (
                        self.session,
                        Session(self.places.library, sysfs_root=self.places.sysfs, proc=self.places.proc),
                    )
                    self.thread.close(session.close)
                    self.thread = None

    async def measure(self, ids: Sequence[str]) -> dict[str, dict[str, Any]]:
        """Return how busy these are.

        Raises:
            NvmlError: NVML does not answer.

        """
        if self.thread is None:
            return {}
        return await self.thread.call(self.session.measure, ids, timeout=EVENT_WAIT + CALL_GRACE)

    def _publish(self, news: News) -> None:
        if not isinstance(news, Xid):
            self._last = news
        for subscription in self._subscriptions:
            subscription.add(news)

    async def _run(self) -> None:
        thread = self.thread = NvmlThread("nvml")
        session = self.session
        pause = GAP
        with filewatch.shared().watch([self.places.dev, *self.places.cdi]) as watch:
            while True:
                period = min((subscription.period for subscription in self._subscriptions), default=10.0)
                try:
                    scan = await thread.call(session.scan, timeout=SCAN_TIMEOUT)
                except NvmlError as error:
                    self._publish(error)
                    pause = min(2 * pause, max(period, GAP))
                    await watch.wait(pause)
                    continue
                except Exception as error:
                    _LOG.exception("looking at the GPUs failed")
                    self._publish(NvmlError(f"{type(error).__name__}: {error}", Verdict.UNREADABLE))
                    await watch.wait(period)
                    continue
                pause = GAP
                self._publish(scan)
                await self._listen(thread, session, watch, scan, period)

    async def _listen(
        self, thread: NvmlThread, session: Session, watch: filewatch.Watch, scan: NvmlScan, period: float
    ) -> None:
        """Pass on what the driver tells until the next scan is due."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        hinted = False
        while not (hinted and loop.time() - began >= GAP) and (left := began + period - loop.time()) > 0:
            if not scan.listening:
                hinted |= await watch.wait(min(left, GAP) if hinted else left)
                continue
            try:
                xids, due = await thread.call(session.wait, min(left, EVENT_WAIT), timeout=EVENT_WAIT + CALL_GRACE)
            except NvmlError as error:
                self._publish(error)
                return
            for xid in xids:
                self._publish(xid)
            if due:
                hinted = True
                await watch.wait(max(0.0, began + GAP - loop.time()))
            hinted |= await watch.wait(0)


_drivers: Final[weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[Places, Driver]]] = (
    weakref.WeakKeyDictionary()
)


def shared(places: Places) -> Driver:
    """Return the running loop's one driver for these places."""
    drivers = _drivers.setdefault(asyncio.get_running_loop(), {})
    return drivers.setdefault(places, Driver(places))
