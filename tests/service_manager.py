"""The service manager's end of sd_notify(3), for agents that tests run as units."""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
from collections.abc import Iterator

DEADLINE = 60.0
"""Seconds to wait for each message."""


class ServiceManagerEnd:
    """The messages of a process to its service manager. told: all variables received so far."""

    def __init__(self, receiving: socket.socket) -> None:
        self.told: list[str] = []
        self._socket = receiving

    def wait_for(self, start: str) -> str:
        """Return the rest of the next variable that begins with `start`. Raises TimeoutError after DEADLINE seconds."""
        while True:
            for variable in self._socket.recv(4096).decode().splitlines():
                self.told.append(variable)
                if variable.startswith(start):
                    return variable.removeprefix(start)


@contextlib.contextmanager
def service_manager() -> Iterator[ServiceManagerEnd]:
    """Set NOTIFY_SOCKET in this block, so that started programs send messages to the yielded `ServiceManagerEnd`."""
    receiving = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    with tempfile.TemporaryDirectory() as directory, receiving:
        receiving.bind(f"{directory}/notify")
        receiving.settimeout(DEADLINE)
        os.environ["NOTIFY_SOCKET"] = f"{directory}/notify"
        try:
            yield ServiceManagerEnd(receiving)
        finally:
            del os.environ["NOTIFY_SOCKET"]
