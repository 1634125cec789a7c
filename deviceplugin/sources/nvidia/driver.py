"""Scans GPUs periodically and reads the NVIDIA driver's events, in one thread for all sources of an event loop."""

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
"""Maximum seconds for a scan of all GPUs. The time is long, because the first scan may have to wake sleeping GPUs."""
EVENT_WAIT: Final = 1.0
"""Maximum seconds of one wait for the driver's events. The time is short, because other calls wait for its end."""
CALL_GRACE: Final = 10.0
GAP: Final = 0.5
"""Minimum seconds between two scans, even if many file events or driver events request scans."""


class NvmlThread:
    """One thread that makes blocking calls one after another, each with a deadline.

    While a call hangs, no other call begins. A second thread would not help, because its calls would hang too.
    """

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._overdue: threading.Event | None = None
        """An event that is set when the last call that exceeded its deadline has ended."""
        threading.Thread(target=self._work, name="nvml", daemon=True).start()

    async def call(self, function: Callable[..., _T], *arguments: Any, timeout: float) -> _T:
        """Call a function in the thread, and return its result.

        Raises NvmlError if the call, including the wait for earlier calls, takes longer than `timeout` seconds.
        """
        if self._overdue is not None and not self._overdue.is_set():
            raise NvmlError("NVML still hangs", Verdict.UNREADABLE)
        future: concurrent.futures.Future[_T] = concurrent.futures.Future()
        over = threading.Event()

        def run() -> None:
            try:
                if future.set_running_or_notify_cancel():
                    future.set_result(function(*arguments))
            except Exception as error:  # Any exception is passed to the caller.
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
        """Make a last call, then end the thread."""
        self._jobs.put(last)
        self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()


class GpuMonitor:
    """Scans all GPUs periodically, and reads the driver's events between scans, while a source is subscribed."""

    def __init__(self, places: Places) -> None:
        self._places = places
        self._subscriptions: dict[asyncio.Queue[NvmlUpdate], float] = {}
        """For each subscribed source: the queue of the source's updates, and the seconds between scans that the source
        has requested."""
        self._running: tuple[NvmlThread, Session, asyncio.Task[None]] | None = None
        self._last: NvmlUpdate | None = None

    @contextlib.contextmanager
    def subscribe(self, period: float) -> Iterator[asyncio.Queue[NvmlUpdate]]:
        """Give a queue that receives updates while the context is active, with a scan at least every `period` seconds.

        If more than 10,000 updates wait in the queue, the oldest update is dropped.
        """
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
        """Return, for each UUID of a GPU or partition, the load; {} if no source is subscribed. May raise NvmlError."""
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
        """Send the driver's events to the sources until the next scan is due.

        The next scan is due `period` seconds after the last one, or soon after an event.
        """
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
    """Return the monitor for these paths of the driver's files. Each event loop has one monitor for the same paths."""
    return _drivers.setdefault(asyncio.get_running_loop(), {}).setdefault(places, GpuMonitor(places))
