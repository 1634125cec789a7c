"""Run a plugin's script, or `-m MODULE`, as `tests.scenarios.quick` does, as if no inotify instance were left."""

from __future__ import annotations

import errno
import sys

from watchdog.observers.inotify_c import InotifyFD

from tests.scenarios import quick


def refuse(_: InotifyFD) -> None:
    """Fail as inotify_init1 does when the user has fs.inotify.max_user_instances instances."""
    raise OSError(errno.EMFILE, "Too many open files")


if __name__ == "__main__":
    InotifyFD.__init__ = refuse  # type: ignore[assignment]
    quick.main(sys.argv[1:])
