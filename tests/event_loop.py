"""Finds the file operations that the product makes in the thread of an event loop, where they block all other tasks.

An audit hook would see neither os.stat nor SQLite. So a profile function examines each call of a builtin function.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any, Final

__all__ = ["ALLOWED", "OUTPUT", "record_file_operations"]

OUTPUT: Final = "LOOP_FILE_OPERATIONS"
"""The environment variable with the path of the file to which the tests' agents write the operations found."""
ALLOWED: Final = frozenset(
    {
        "deviceplugin/identity.py:boot_id",  # reads /proc, which is in memory, only once
        "deviceplugin/kubelet/cgroups.py:own_pod",  # reads /proc/self and one directory, before anything is served
    }
)
"""Functions that may make file operations in an event loop, with the reasons why these operations cannot hang."""

_ROOT: Final = Path(__file__).parent.parent
_PRODUCT: Final = tuple(f"{_ROOT}/{package}/" for package in ("deviceplugin", "dra_bridge"))
_TESTING: Final = tuple(f"{prefix}testing/" for prefix in _PRODUCT)
_POSIX: Final = frozenset(
    {
        *("access", "chmod", "chown", "fdatasync", "fstat", "fstatvfs", "fsync", "ftruncate", "getxattr", "link"),
        *("listdir", "lstat", "mkdir", "mknod", "open", "pread", "pwrite", "readlink", "remove", "rename", "replace"),
        *("rmdir", "scandir", "stat", "statvfs", "symlink", "truncate", "unlink", "utime"),
    }
)
_OTHERS: Final = frozenset({("_io", "open"), ("io", "open"), ("fcntl", "flock"), ("fcntl", "lockf")})


def record_file_operations(output: str) -> None:
    """From now on, write each place in which a thread with an event loop makes a file operation to the file `output`.

    Only this thread and later threads are observed. A line has the operation and the functions of the product that
    called it, the innermost first.
    """
    seen: set[str] = set()

    def profile(frame: FrameType, event: str, function: Any) -> None:
        if event != "c_call" or not (operation := _operation(function)) or not _in_loop():
            return
        if (where := _functions(frame)) and (line := f"{operation} in {' < '.join(where)}") not in seen:
            seen.add(line)
            with open(output, "a") as file:
                file.write(f"{line}\n")

    threading.setprofile(profile)
    sys.setprofile(profile)


def _operation(function: Any) -> str:
    """Return a builtin function's name if it is a file operation, else ""."""
    module, name = getattr(function, "__module__", None), getattr(function, "__name__", "")
    if type(getattr(function, "__self__", None)).__module__ == "sqlite3":
        return f"sqlite3 {name}"
    return name if (module == "posix" and name in _POSIX) or (module, name) in _OTHERS else ""


def _in_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _functions(frame: FrameType | None) -> list[str]:
    """Return the innermost functions of the product on a stack; an empty list if a test or a fake makes the call."""
    while frame is not None and not frame.f_code.co_filename.startswith(f"{_ROOT}/"):
        frame = frame.f_back
    if frame is None or not frame.f_code.co_filename.startswith(_PRODUCT):
        return []
    if frame.f_code.co_filename.startswith(_TESTING):
        return []
    found: list[str] = []
    while frame is not None and len(found) < 4:
        if frame.f_code.co_filename.startswith(_PRODUCT):
            found.append(f"{Path(frame.f_code.co_filename).relative_to(_ROOT)}:{frame.f_code.co_qualname}")
        frame = frame.f_back
    return found
