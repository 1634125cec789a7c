"""Finds the file operations that the product makes in the thread of an event loop, where they stop everything else."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, Final

ROOT: Final = Path(__file__).parent.parent
PRODUCT: Final = tuple(f"{ROOT}/{package}/" for package in ("deviceplugin", "dra_bridge"))
HARNESS: Final = (*(f"{prefix}testing/" for prefix in PRODUCT), f"{ROOT}/tests/")
_POSIX: Final = frozenset(
    [
        "access",
        "chmod",
        "chown",
        "ftruncate",
        "fdatasync",
        "fsync",
        "fstat",
        "fstatvfs",
        "link",
        "listdir",
        "lstat",
        "mkdir",
        "mknod",
        "open",
        "pread",
        "pwrite",
        "readlink",
        "remove",
        "rename",
        "replace",
        "rmdir",
        "scandir",
        "stat",
        "statvfs",
        "symlink",
        "truncate",
        "unlink",
        "utime",
        "getxattr",
    ]
)
_OTHERS: Final = frozenset(
    {("_io", "open"), ("io", "open"), ("fcntl", "flock"), ("fcntl", "lockf"), ("io", "open_code")}
)


def _operation(function: Any) -> str:
    """Return a builtin function's name if it is a file operation, else ""."""
    module, name = getattr(function, "__module__", None), getattr(function, "__name__", "")
    if module == "posix":
        return name if name in _POSIX else ""
    if (module, name) in _OTHERS:
        return name
    if type(getattr(function, "__self__", None)).__module__ == "sqlite3":
        return f"sqlite3 {name}"
    return ""


class LoopFileOperations:
    """While it is entered, counts the product's file operations in this thread, by place (file:function, operation)."""

    def __init__(self, output: str = "", allowed: Callable[[str, str], bool] = lambda place, operation: False) -> None:
        self.found: Counter[str] = Counter()
        self._output = output
        self._allowed = allowed

    def __enter__(self) -> LoopFileOperations:
        threading.setprofile(self._profile)
        sys.setprofile(self._profile)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]

    def _profile(self, frame: FrameType, event: str, what: Any) -> None:
        if event != "c_call" or not (operation := _operation(what)):
            return
        place: FrameType | None = frame
        while place is not None and not place.f_code.co_filename.startswith(str(ROOT)):
            place = place.f_back
        if place is None:
            return
        file = place.f_code.co_filename
        if file.startswith(HARNESS) or not file.startswith(PRODUCT):
            return
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return
        chain, at = [], place
        while at is not None and len(chain) < 4:
            if at.f_code.co_filename.startswith(PRODUCT):
                chain.append(f"{Path(at.f_code.co_filename).relative_to(ROOT)}:{at.f_code.co_qualname}")
            at = at.f_back
        text = f"{operation} in {' < '.join(chain)}"
        if text not in self.found and self._output:
            with open(self._output, "a") as output:
                output.write(text + "\n")
        self.found[text] += 1
