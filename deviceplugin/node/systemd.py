"""Notifies systemd of the agent's state, if the agent is a unit of `Type=notify`: sd_notify(3), without a library.

The agent sends READY=1 when the sockets exist and each resource has its first device list. Units that are ordered after
the agent's unit, such as the kubelet's, start at READY=1. So the kubelet can admit its pods from before a reboot at
once. `systemctl status` shows the text of STATUS=. The event loop sends WATCHDOG=1, so systemd restarts an agent whose
event loop hangs.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import logging
import os
import socket
import time
from collections.abc import Callable, MutableMapping
from typing import Final

from deviceplugin.kubelet.status import AgentStatus, unready, unserved

_LOG: Final = logging.getLogger(__name__)

START: Final = 60.0
"""Seconds after which READY=1 is sent even if the agent does not serve all resources, so that the kubelet can start."""
LOOK: Final = 0.1
"""Seconds between two checks of the agent's status before READY=1."""
TICK: Final = 5.0
"""Seconds between two checks of the agent's status after READY=1."""


class ServiceManager:
    """The service manager (systemd) that has started this process.

    watchdog: the maximum seconds between two WATCHDOG=1 that the manager permits; None if it expects none. This class
    removes systemd's environment variables, so that programs which the agent runs cannot send notifications.
    """

    def __init__(self, environment: MutableMapping[str, str] = os.environ) -> None:
        address = environment.pop("NOTIFY_SOCKET", "")
        microseconds, pid = environment.pop("WATCHDOG_USEC", ""), environment.pop("WATCHDOG_PID", "")
        self._address = f"\0{address[1:]}" if address.startswith("@") else address
        mine = pid in ("", str(os.getpid())) and microseconds.isdecimal() and int(microseconds) > 0
        self.watchdog = int(microseconds) / 1e6 if mine and self.there else None
        if self.watchdog is not None:
            # When systemd ends a hanging process by SIGABRT, `faulthandler` writes the stack of each thread.
            faulthandler.enable()

    @property
    def there(self) -> bool:
        """Whether the process has a service manager that expects notifications."""
        return self._address[:1] in ("/", "\0")

    def tell(self, **variables: object) -> None:
        """Send variables of sd_notify(3) in one message. A message that cannot be sent is lost, as with libsystemd."""
        text = "\n".join(f"{name}={value}" for name, value in variables.items())
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sending:
            sending.setblocking(False)
            sending.sendto(text.encode(), self._address)

    async def follow(self, status: Callable[[], AgentStatus]) -> None:
        """Notify the service manager of the agent's state (READY=1 included) until cancelled."""
        begun, ready, said, beaten = time.monotonic(), False, "", 0.0
        # The unit's TimeoutStartSec= is extended, because its time may be nearly over: Python loads the agent slowly
        # from some disks.
        self.tell(EXTEND_TIMEOUT_USEC=int(2 * START * 1e6))
        while True:
            now, current = time.monotonic(), status()
            missing = () if ready else tuple(unserved(current))
            if not ready and (not missing or now - begun >= START):
                ready = True
                self.tell(READY=1)
                if missing:
                    text = "the agent counts as started after %g s, and a kubelet starts without: %s"
                    _LOG.warning(text, START, "; ".join(missing))
            if (text := summary(current, missing)) != said:
                said = text
                self.tell(STATUS=text)
            if self.watchdog is not None and now - beaten >= self.watchdog / 4:
                beaten = now
                self.tell(WATCHDOG=1)
            await asyncio.sleep(min((TICK if ready else LOOK), (self.watchdog or TICK) / 4))


def summary(status: AgentStatus, missing: tuple[str, ...] = ()) -> str:
    """Return the agent's state in one line. missing: the reasons why READY=1 is not sent yet."""
    if missing:
        return f"starts: {missing[0]}" + (f"; and {len(missing) - 1} more" if missing[1:] else "")
    served = f"serves {len(status.resources)} resource{'' if len(status.resources) == 1 else 's'}"
    reasons = " ".join("; ".join(unready(status)).split())
    return f"{served}; not ready: {reasons}"[:400] if reasons else served
