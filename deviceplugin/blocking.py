"""Notices that a coroutine blocks the event loop, and names the line that does.

A blocked loop serves nothing: no call of the kubelet, no signal's handler. Only another thread can report it.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import sysconfig
import threading
import time
from types import FrameType
from typing import Final

from deviceplugin.source import DeviceSource

_LOG: Final = logging.getLogger(__name__)
LIMIT: Final = 2.0
"""Seconds without a turn of the loop after which it counts as blocked."""
PERIOD: Final = 5.0
"""Seconds between two checks; each wakes the loop once."""
SAMPLE: Final = 0.5
"""Seconds between two looks at the line that a blocked loop's thread is in."""
_STANDARD_LIBRARY: Final = (sysconfig.get_path("stdlib"), "<frozen")
REMEDY: Final = "a coroutine must not block: write a plain function, or call what blocks by asyncio.to_thread"


class BlockedLoopError(RuntimeError):
    """Raised where a test waits for an agent whose loop a coroutine blocks; the message has resource, file and line."""


class LoopWatch:
    """Watches the loop that runs in the present thread, from a thread of its own, until `end`.

    blocked: the resource and line that block the loop now, for people; "" while it turns.
    """

    def __init__(self, period: float = PERIOD, limit: float = LIMIT) -> None:
        self.blocked = ""
        self._loop = asyncio.get_running_loop()
        self._looped = threading.get_ident()
        self._period, self._limit = period, limit
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="loop-watch", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Stop watching."""
        self._over.set()

    def _watch(self) -> None:
        while not self._over.wait(self._period):
            began, turned = time.monotonic(), threading.Event()
            try:
                self._loop.call_soon_threadsafe(turned.set)
            except RuntimeError:  # the loop has ended
                return
            if turned.wait(self._limit):
                continue
            # A busy machine delays the loop as well; only a line that stays is what blocks it.
            line = self._line()
            while not turned.wait(SAMPLE) and not self._over.is_set():
                before, line = line, self._line()
                if line == before and line is not None and not self.blocked:
                    self._report(*line, time.monotonic() - began)
            self.blocked = ""

    def _report(self, resource: str, place: str, seconds: float) -> None:
        self.blocked = f"{resource or 'the agent'}: {place}"
        extra = {"resource": resource} if resource else {}
        _LOG.error("%s has blocked the whole agent for %.0f s: %s", place, seconds, REMEDY, extra=extra)

    def _line(self) -> tuple[str, str] | None:
        """Return the resource of the source whose code runs in the loop's thread ("": none), and the line.

        None if the loop itself runs there.
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
