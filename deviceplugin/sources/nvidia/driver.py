"""The NVIDIA driver as all sources of a loop share it: scanned from time to time, listened to in between."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import queue
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, TypeVar

from deviceplugin import filewatch
from deviceplugin.health import Verdict
from deviceplugin.sources.nvidia.nvml import NvmlError, NvmlScan, NvmlUpdate, Places, Xid
from deviceplugin.sources.nvidia.session import Session

_T = TypeVar("_T")
_LOG: Final = logging.getLogger(__name__)

SCAN_TIMEOUT: Final = 60.0
"""Seconds for a scan; the first one may wake eight sleeping GPUs."""
EVENT_WAIT: Final = 1.0
"""Seconds that one wait for events takes at the most; other calls wait as long for the thread."""
CALL_GRACE: Final = 10.0
GAP: Final = 0.5
"""Seconds between two scans at the least, however many hints there are."""


class NvmlThread:
    """One thread in which blocking calls are made, one after another, each with a deadline.

    A call that hangs keeps the thread, and no other call is begun until it returns: a second thread would hang, too.
    """

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._overdue: threading.Event | None = None
        """Set when the last call that took too long has ended."""
        threading.Thread(target=self._work, name="nvml", daemon=True).start()

    async def call(self, function: Callable[..., _T], *arguments: Any, timeout: float) -> _T:
        """Return the result of a function; raise NvmlError if it, or one before it, takes longer than `timeout` s."""
        if self._overdue is not None and not self._overdue.is_set():
            raise NvmlError("NVML still hangs", Verdict.UNREADABLE)
        future: concurrent.futures.Future[_T] = concurrent.futures.Future()
        over = threading.Event()

        def run() -> None:
            try:
                if future.set_running_or_notify_cancel():
                    future.set_result(function(*arguments))
            except Exception as error:  # the caller's
                future.set_exception(error)
            finally:
                over.set()

        self._jobs.put(run)
        try:
            async with asyncio.timeout(timeout):
                return await asyncio.wrap_future(future)
        except TimeoutError:
            self._overdue = over
            raise NvmlError(f"NVML did not answer within {timeout:g} s", Verdict.UNREADABLE) from None

    def close(self, last: Callable[[], None]) -> None:
        """Have the thread end after a last call."""
        self._jobs.put(last)
        self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()


class GpuMonitor:
    """Scans all GPUs from time to time and listens in between, as long as anybody is subscribed."""

    def __init__(self, places: Places) -> None:
        self._places = places
        self._subscriptions: dict[asyncio.Queue[NvmlUpdate], float] = {}
        """What each source has not processed yet, and how many seconds it wants between scans."""
        self._running: tuple[NvmlThread, Session, asyncio.Task[None]] | None = None
        self._last: NvmlUpdate | None = None

    @contextlib.contextmanager
    def subscribe(self, period: float) -> Iterator[asyncio.Queue[NvmlUpdate]]:
        """Receive updates in the context, and scans each `period` s at least; beyond 10,000 the oldest is dropped."""
        updates: asyncio.Queue[NvmlUpdate] = asyncio.Queue(10_000)
        if self._last is not None:
            updates.put_nowait(self._last)
        self._subscriptions[updates] = period
        if self._running is None:
            thread, session = NvmlThread(), Session(self._places)
            self._running = thread, session, asyncio.create_task(self._run(thread, session), name="nvml")
        try:
            yield updates
        finally:
            del self._subscriptions[updates]
            if not self._subscriptions:
                thread, session, task = self._running
                task.cancel()
                thread.close(session.close)
                self._running = self._last = None

    async def measure(self, ids: Sequence[str]) -> dict[str, dict[str, Any]]:
        """Return the load of these GPUs and partitions; nothing without a subscription. It may raise NvmlError."""
        if self._running is None:
            return {}
        thread, session, _ = self._running
        return await thread.call(session.measure, ids, timeout=EVENT_WAIT + CALL_GRACE)

    def _publish(self, update: NvmlUpdate) -> None:
        if not isinstance(update, Xid):
            self._last = update
        for updates in self._subscriptions:
            if updates.full():
                updates.get_nowait()
            updates.put_nowait(update)

    async def _run(self, thread: NvmlThread, session: Session) -> None:
        pause = GAP
        with filewatch.shared().watch([self._places.dev, *self._places.cdi]) as watch:
            while True:
                period = min(self._subscriptions.values(), default=10.0)
                try:
                    scan = await thread.call(session.scan, timeout=SCAN_TIMEOUT)
                except NvmlError as error:
                    self._publish(error)
                    pause = min(2 * pause, max(period, GAP))
                    await watch.wait(pause)
                except Exception as error:
                    _LOG.exception("the scan of the GPUs failed")
                    self._publish(NvmlError(f"{type(error).__name__}: {error}", Verdict.UNREADABLE))
                    await watch.wait(period)
                else:
                    pause = GAP
                    self._publish(scan)
                    await self._listen(thread, session, watch, scan, period)

    async def _listen(
        self, thread: NvmlThread, session: Session, watch: filewatch.Watch, scan: NvmlScan, period: float
    ) -> None:
        """Publish the driver's events until the next scan is due: after the period, or soon after a hint."""
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


_drivers: Final = weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[Places, GpuMonitor]]()


def shared(places: Places) -> GpuMonitor:
    """Return the running loop's one driver for these places."""
    return _drivers.setdefault(asyncio.get_running_loop(), {}).setdefault(places, GpuMonitor(places))
