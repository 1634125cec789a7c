"""Run a program with a limit of inotify instances or watches, as on busy nodes on which few or none are left.

``python -m tests.cluster.inotify_limits instances|watches NUMBER COMMAND...`` runs the command in its own user
namespace, in which all users have the same ids as outside. The kernel counts inotify objects for each user and
namespace, so the limit does not apply to the kubelet or other tests. `allow` changes the limit while the program runs.
Requires root.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

__all__ = ["allow"]

LIMITS = "/proc/sys/user/max_inotify_"
"""The common prefix of the files with the limits: of the user namespace of the process that opens such a file."""
MAP = "0 0 4294967295"
NEW_USER_NAMESPACE = 0x10000000
_libc = ctypes.CDLL(None, use_errno=True)


def _done(result: int) -> None:
    if result:
        raise OSError(number := ctypes.get_errno(), os.strerror(number))


def allow(process: int, what: str, number: int) -> None:
    """Change the limit of instances or watches (`what`) of the running program `process`."""
    command = [sys.executable, "-m", __name__, "--of", str(process), what, str(number)]
    subprocess.run(command, check=True)


def main(argv: list[str]) -> None:
    """Enter a user namespace, set the limit, and run the command, if one is given."""
    if argv[0] == "--of":
        file = os.open(f"/proc/{argv[1]}/ns/user", os.O_RDONLY)
        _done(_libc.setns(file, NEW_USER_NAMESPACE))
        Path(f"{LIMITS}{argv[2]}").write_text(argv[3])
        return
    # Only a process outside of the namespace may map all users into it.
    inside, outside = (os.pipe() for _ in range(2))
    mine = os.getpid()
    if not (child := os.fork()):
        os.read(inside[0], 1)
        for name in ("uid_map", "gid_map"):
            Path(f"/proc/{mine}/{name}").write_text(MAP)
        os.write(outside[1], b"1")
        os._exit(0)
    _done(_libc.unshare(NEW_USER_NAMESPACE))
    os.write(inside[1], b"1")
    os.read(outside[0], 1)
    os.waitpid(child, 0)
    Path(f"{LIMITS}{argv[0]}").write_text(argv[1])
    os.execvp(argv[2], argv[2:])


if __name__ == "__main__":
    main(sys.argv[1:])
