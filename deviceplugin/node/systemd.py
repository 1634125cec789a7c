"""Tells systemd of the agent where it runs as a unit of `Type=notify`: sd_notify(3), without a library.

READY=1 is sent once a kubelet that starts then finds what it needs to admit the pods of before a reboot again: the
sockets, and the first list of each resource. Units that come after the agent's, as the kubelet's does, start then.
STATUS= is what `systemctl status` shows. WATCHDOG=1 comes from the event loop, so systemd restarts an agent whose loop
does not run any more.
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
"""Seconds after which the agent counts as started though it does not serve everything: the kubelet starts then."""
LOOK: Final = 0.1
"""Seconds between two looks at the agent's status before READY=1."""
TICK: Final = 5.0
"""The same after it."""


class ServiceManager:
    """The service manager that has started this process.

    watchdog: seconds within which it expects each WATCHDOG=1, None for no watchdog. Takes its variables out of the
    environment, so that programs which the agent runs do not speak for it.
    """

    def __init__(self, environment: MutableMapping[str, str] = os.environ) -> None:
        address = environment.pop("NOTIFY_SOCKET", "")
        microseconds, pid = environment.pop("WATCHDOG_USEC", ""), environment.pop("WATCHDOG_PID", "")
        self._address = f"\0{address[1:]}" if address.startswith("@") else address
        mine = pid in ("", str(os.getpid())) and microseconds.isdecimal() and int(microseconds) > 0
        self.watchdog = int(microseconds) / 1e6 if mine and self.there else None
        if self.watchdog is not None:
            faulthandler.enable()  # it ends a process that hangs by SIGABRT: the log has each thread's stack then

    @property
    def there(self) -> bool:
        """Whether there is one that wants to be told."""
        return self._address[:1] in ("/", "\0")

    def tell(self, **variables: object) -> None:
        """Send variables of sd_notify(3) in one message. One that cannot be sent is lost, as with libsystemd."""
        text = "\n".join(f"{name}={value}" for name, value in variables.items())
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sending:
            sending.setblocking(False)
            sending.sendto(text.encode(), self._address)

    async def follow(self, status: Callable[[], AgentStatus]) -> None:
        """Tell it how the agent does, until cancelled. It has been told nothing before."""
        begun, ready, said, beaten = time.monotonic(), False, "", 0.0
        # The unit's TimeoutStartSec= counts from before Python has loaded the agent, which a slow disk makes long.
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
    """Return one line of what the agent does. missing: what keeps it from being started."""
    if missing:
        return f"starts: {missing[0]}" + (f"; and {len(missing) - 1} more" if missing[1:] else "")
    served = f"serves {len(status.resources)} resource{'' if len(status.resources) == 1 else 's'}"
    reasons = " ".join("; ".join(unready(status)).split())
    return f"{served}; not ready: {reasons}"[:400] if reasons else served
