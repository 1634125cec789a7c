"""Parses addresses of sockets (host and port), makes the paths of Unix sockets, and removes abandoned Unix sockets."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import Final

MAX_SOCKET_PATH: Final = 107
"""Maximum bytes of a Unix socket's path on Linux, without the closing zero."""


def parse_address(address: str) -> tuple[str, int]:
    """Split `host:port`, `[v6]:port` or `:port` into host and port. Raises OSError if the address has another form."""
    host, colon, port = address.rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not colon or not port.isascii() or not port.isdecimal() or int(port) > 65535 or (":" in host and host == bare):
        raise OSError(errno.EINVAL, f"{address!r} is not host:port, [v6 address]:port or :port")
    return bare, int(port)


def socket_path(directory: str | Path, name: str, tail: str) -> Path:
    """Return the path of a Unix socket: directory/name+tail.

    If the path would be too long, the end of `name` is replaced by a hash. Raises ValueError if the directory's path
    leaves no room for the hash.
    """
    room = MAX_SOCKET_PATH - len(os.fsencode(directory)) - 1 - len(tail)
    if len(name) > room:
        digest = hashlib.sha256(name.encode()).hexdigest()[:8]
        if room < len(digest):
            text = f"the path is too long for a unix socket in it ({MAX_SOCKET_PATH} bytes in all)"
            raise ValueError(f"{directory}: {text}; use a shorter directory")
        name = f"{name[: max(0, room - len(digest) - 1)]}-{digest}"[-room:].lstrip("-")
    return Path(directory) / f"{name}{tail}"


def remove_abandoned(paths: Iterable[Path]) -> None:
    """Remove each of these paths that is a Unix socket at which no process listens any more."""
    for path in filter(_is_abandoned, paths):
        with contextlib.suppress(OSError):
            path.unlink()


def _is_abandoned(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except OSError as error:
            return isinstance(error, ConnectionRefusedError)
    return False
