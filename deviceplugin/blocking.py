"""Detects that a coroutine blocks the event loop, and names the line that blocks it.

A blocked event loop serves no calls of the kubelet, and calls no signal handlers. So a separate thread detects and
reports that the loop is blocked.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import sysconfig
import threading
import time
from collections import deque
from types import FrameType
from typing import Final

from deviceplugin.source import DeviceSource

_LOG: Final = logging.getLogger(__name__)
LIMIT: Final = 2.0
"""Seconds without an iteration of the event loop after which the loop counts as blocked."""
PERIOD: Final = 5.0
"""Seconds between two checks of the event loop; each check wakes the loop once."""
SAMPLE: Final = 0.2
"""Seconds between two samples of the line of code that the thread of a blocked loop executes."""
TIMES: Final = 3
"""A line in a source's code is reported if, in this number of the last KEPT checks, the line blocked the event loop for
less than LIMIT."""
KEPT: Final = 20
_STANDARD_LIBRARY: Final = (sysconfig.get_path("stdlib"), "<frozen")
REMEDY: Final = "a coroutine must not block: write a plain function, or call what blocks by asyncio.to_thread"


class BlockedLoopError(RuntimeError):
    """Raised in a test if a coroutine of a source blocks the agent. The message has the resource, file and line."""


class LoopWatch:
    """Watches the event loop of the thread that creates this object, from another thread, until `end` is called.

    blocked: the resource, and the line of code that blocks the loop now, as text; "" while the loop runs. found: the
    last reported line in a source's code, with the resource, as text; "" if no line was reported.
    """

    def __init__(self, period: float = PERIOD, limit: float = LIMIT) -> None:
        self.blocked = ""
        self.found = ""
        self._short: deque[tuple[str, str] | None] = deque(maxlen=KEPT)
        """For each of the last KEPT checks: (resource, line) if a line in a source's code blocked the loop for less
        than LIMIT, else None."""
        self._loop = asyncio.get_running_loop()
        self._looped = threading.get_ident()
        self._period, self._limit = period, limit
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="loop-watch", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Stop watching the loop."""
        self._over.set()

    def _watch(self) -> None:
        while not self._over.wait(self._period):
            began, turned = time.monotonic(), threading.Event()
            try:
                self._loop.call_soon_threadsafe(turned.set)
            except RuntimeError:  # The event loop is closed.
                return
            # A line is treated as blocking only if two successive samples show the same line, because a busy machine
            # delays the loop too.
            line: tuple[str, str] | None = None
            same: tuple[str, str] | None = None
            while not turned.wait(SAMPLE) and not self._over.is_set():
                before, line = line, self._line()
                same = line if line == before else None
                if same is not None and not self.blocked and time.monotonic() - began > self._limit:
                    self.blocked = self._report(*same, f"{time.monotonic() - began:.0f} s")
            self._short.append(same if same is not None and same[0] and not self.blocked else None)
            if same is not None and self._short.count(same) >= TIMES:
                self._report(*same, f"{time.monotonic() - began:.1f} s, again and again")
                self._short.clear()
            self.blocked = ""

    def _report(self, resource: str, place: str, how_long: str) -> str:
        """Log the line that blocks or has blocked the loop; return the resource and the line as one text."""
        text = f"{resource or 'the agent'}: {place}"
        if resource:
            self.found = text
        extra = {"resource": resource} if resource else {}
        _LOG.error("%s has blocked the whole agent for %s: %s", place, how_long, REMEDY, extra=extra)
        return text

    def _line(self) -> tuple[str, str] | None:
        """Return the line of code that the loop's thread executes now, as (resource, line).

        The resource is "" if the code was not called by a source. The result is None while the thread executes only the
        event loop's own code.
        """
        frame: FrameType | None = sys._current_frames().get(self._looped)  # noqa: SLF001 - the documented way to it
        place, resource = "", ""
        while frame is not None and frame.f_code.co_name != "_run_once" and not resource:
            code = frame.f_code
            if not place and not code.co_filename.startswith(_STANDARD_LIBRARY):
                place = f"{code.co_filename}:{frame.f_lineno}, in {code.co_name}"
            source = frame.f_locals.get("self")
            resource = source.resource if isinstance(source, DeviceSource) else ""
            frame = frame.f_back
        return (resource, place) if place else None
