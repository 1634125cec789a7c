"""A file system that can hang: a FUSE mount that shows the files of another directory, served by its own process.

While this process is stopped, each access to a path of the mount blocks, as with an unreachable NFS server. The process
implements the kernel's protocol (linux/fuse.h, 7.31), so that tests need no library. It handles one request at a time,
and lets the kernel cache nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import signal
import stat
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Self

ROOT: Final = 1
_HEADER: Final = struct.Struct("<IIQQIIIHH")
_ATTRIBUTES: Final = struct.Struct("<6Q10I")
_UNANSWERED: Final = (2, 36, 42)  # requests without a response: FORGET, INTERRUPT, BATCH_FORGET
_MODE, _SIZE, _HANDLE = 1, 8, 1


class HangingFileSystem:
    """Mounts the directory `backing` at `point`. Missing directories are made."""

    def __init__(self, backing: Path, point: Path) -> None:
        self.point = point
        for directory in (backing, point):
            directory.mkdir(parents=True, exist_ok=True)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.cluster.hanging", str(backing), str(point)], stdout=subprocess.PIPE
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == b"mounted\n"
        (point / "first").touch()  # the kernel learns at the first close that the server does not support FLUSH
        (point / "first").unlink()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.answer()
        subprocess.run(["umount", "--lazy", str(self.point)], check=True)
        self._process.terminate()
        self._process.wait(20)
        assert self._process.stdout is not None
        self._process.stdout.close()

    def hang(self) -> None:
        """Stop the process (SIGSTOP), so that all accesses block."""
        self._process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WNOWAIT)

    def answer(self) -> None:
        """Continue the process, which then answers waiting and new requests."""
        self._process.send_signal(signal.SIGCONT)


class Server:
    """Answers the kernel's requests for one mount."""

    def __init__(self, backing: str) -> None:
        self._paths = {ROOT: backing}
        self._next = ROOT + 1

    def serve(self, device: int) -> None:
        """Answer requests until the file system is unmounted."""
        while True:
            try:
                request = os.read(device, 1 << 21)
            except OSError as error:
                if error.errno == errno.ENODEV:
                    return
                if error.errno in (errno.EINTR, errno.ENOENT):
                    continue
                raise
            _, opcode, unique, node, *_ = _HEADER.unpack_from(request)
            if opcode in _UNANSWERED:
                continue
            try:
                answer, code = self._handlers[opcode](self, node, request[_HEADER.size :]), 0
            except KeyError:
                answer, code = b"", errno.ENOSYS
            except OSError as error:
                answer, code = b"", error.errno or errno.EIO
            with contextlib.suppress(FileNotFoundError):  # the requesting process was killed
                os.write(device, struct.pack("<IiQ", 16 + len(answer), -code, unique) + answer)

    def _at(self, node: int, name: bytes) -> str:
        return os.path.join(self._paths[node], os.fsdecode(name.rstrip(b"\0")))

    def _node(self, path: str) -> int:
        for node, known in self._paths.items():
            if known == path:
                return node
        self._paths[self._next] = path
        self._next += 1
        return self._next - 1

    @staticmethod
    def _attributes(status: os.stat_result) -> bytes:
        nanoseconds = (status.st_atime_ns, status.st_mtime_ns, status.st_ctime_ns)
        return _ATTRIBUTES.pack(
            *(status.st_ino, status.st_size, status.st_blocks),
            *(time // 10**9 for time in nanoseconds),
            *(time % 10**9 for time in nanoseconds),
            *(status.st_mode, status.st_nlink, status.st_uid, status.st_gid, status.st_rdev, 4096, 0),
        )

    def _entry(self, path: str) -> bytes:
        status = os.lstat(path)
        return struct.pack("<4QII", self._node(path), 0, 0, 0, 0, 0) + self._attributes(status)

    def _init(self, node: int, body: bytes) -> bytes:
        return struct.pack("<4IHHIIHHI7I", 7, 31, 0, 0, 12, 9, 1 << 17, 1, 0, 0, 0, *(0,) * 7)

    def _lookup(self, node: int, body: bytes) -> bytes:
        return self._entry(self._at(node, body))

    def _getattr(self, node: int, body: bytes) -> bytes:
        flags, _, handle = struct.unpack_from("<IIQ", body)
        status = os.fstat(handle) if flags & _HANDLE else os.lstat(self._paths[node])
        return struct.pack("<QII", 0, 0, 0) + self._attributes(status)

    def _setattr(self, node: int, body: bytes) -> bytes:
        valid, _, _, size = struct.unpack_from("<IIQQ", body)
        path = self._paths[node]
        if valid & _SIZE:
            os.truncate(path, size)
        if valid & _MODE:
            os.chmod(path, stat.S_IMODE(struct.unpack_from("<I", body, 68)[0]))
        return struct.pack("<QII", 0, 0, 0) + self._attributes(os.lstat(path))

    def _readlink(self, node: int, body: bytes) -> bytes:
        return os.fsencode(os.readlink(self._paths[node]))

    def _symlink(self, node: int, body: bytes) -> bytes:
        name, target, _ = body.split(b"\0")
        os.symlink(target, self._at(node, name))
        return self._entry(self._at(node, name))

    def _mknod(self, node: int, body: bytes) -> bytes:
        mode, device, _, _ = struct.unpack_from("<4I", body)
        path = self._at(node, body[16:])
        os.mknod(path, mode, device)
        return self._entry(path)

    def _mkdir(self, node: int, body: bytes) -> bytes:
        path = self._at(node, body[8:])
        os.mkdir(path, stat.S_IMODE(struct.unpack_from("<I", body)[0]))
        return self._entry(path)

    def _unlink(self, node: int, body: bytes) -> bytes:
        self._forget(self._at(node, body))
        os.unlink(self._at(node, body))
        return b""

    def _rmdir(self, node: int, body: bytes) -> bytes:
        self._forget(self._at(node, body))
        os.rmdir(self._at(node, body))
        return b""

    def _forget(self, path: str) -> None:
        """Give the FUSE node of a removed path another path, so that the next file at this path gets its own node."""
        for node, known in self._paths.items():
            if known == path:
                self._paths[node] = f"{path}\n"

    def _rename(self, node: int, body: bytes, names: int = 8) -> bytes:
        (target,) = struct.unpack_from("<Q", body)
        old, new, _ = body[names:].split(b"\0")
        before, after = self._at(node, old), self._at(target, new)
        os.rename(before, after)
        self._forget(after)
        for known, path in self._paths.items():
            if f"{path}/".startswith(f"{before}/"):
                self._paths[known] = after + path[len(before) :]
        return b""

    def _rename2(self, node: int, body: bytes) -> bytes:
        return self._rename(node, body, 16)

    def _link(self, node: int, body: bytes) -> bytes:
        (old,) = struct.unpack_from("<Q", body)
        path = self._at(node, body[8:])
        os.link(self._paths[old], path)
        return self._entry(path)

    def _open(self, node: int, body: bytes) -> bytes:
        flags = struct.unpack_from("<I", body)[0] & ~(os.O_NOFOLLOW | os.O_EXCL | os.O_CREAT)
        return struct.pack("<QII", os.open(self._paths[node], flags), 0, 0)

    def _create(self, node: int, body: bytes) -> bytes:
        flags, mode, _, _ = struct.unpack_from("<4I", body)
        path = self._at(node, body[16:])
        handle = os.open(path, flags | os.O_CREAT, stat.S_IMODE(mode))
        return self._entry(path) + struct.pack("<QII", handle, 0, 0)

    def _read(self, node: int, body: bytes) -> bytes:
        handle, offset, size = struct.unpack_from("<QQI", body)
        return os.pread(handle, size, offset)

    def _write(self, node: int, body: bytes) -> bytes:
        handle, offset, size = struct.unpack_from("<QQI", body)
        return struct.pack("<II", os.pwrite(handle, body[40 : 40 + size], offset), 0)

    def _statfs(self, node: int, body: bytes) -> bytes:
        return struct.pack("<5Q4I6I", 1 << 20, 1 << 20, 1 << 20, 1 << 20, 1 << 20, 4096, 255, 4096, 0, *(0,) * 6)

    def _release(self, node: int, body: bytes) -> bytes:
        os.close(struct.unpack_from("<Q", body)[0])
        return b""

    def _fsync(self, node: int, body: bytes) -> bytes:
        os.fsync(struct.unpack_from("<Q", body)[0])
        return b""

    def _nothing(self, node: int, body: bytes) -> bytes:
        return b""

    def _opendir(self, node: int, body: bytes) -> bytes:
        return struct.pack("<QII", 0, 0, 0)

    def _readdir(self, node: int, body: bytes) -> bytes:
        _, offset, size = struct.unpack_from("<QQI", body)
        answer = b""
        for number, name in enumerate(sorted(os.listdir(self._paths[node])), 1):
            encoded = os.fsencode(name)
            entry = struct.pack("<QQII", number, number, len(encoded), 0) + encoded
            entry += b"\0" * (-len(entry) % 8)
            if number > offset and len(answer) + len(entry) <= size:
                answer += entry
        return answer

    _handlers: Final[dict[int, Callable[[Any, int, bytes], bytes]]] = {
        1: _lookup,
        3: _getattr,
        4: _setattr,
        5: _readlink,
        6: _symlink,
        8: _mknod,
        9: _mkdir,
        10: _unlink,
        11: _rmdir,
        12: _rename,
        13: _link,
        14: _open,
        15: _read,
        16: _write,
        17: _statfs,
        18: _release,
        20: _fsync,
        26: _init,
        27: _opendir,
        28: _readdir,
        29: _nothing,
        30: _nothing,
        34: _nothing,
        35: _create,
        38: _nothing,
        45: _rename2,
    }
    """The handlers by the kernel's number of the operation. Other operations get ENOSYS, also FLUSH."""


def main(backing: str, point: str) -> None:
    """Mount the file system, print "mounted", and answer requests."""
    device = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={device},rootmode=40000,user_id=0,group_id=0,allow_other"
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"hanging", os.fsencode(point), b"fuse", 0, options.encode()) != 0:
        raise OSError(ctypes.get_errno(), f"cannot mount {point}")
    print("mounted", flush=True)
    Server(backing).serve(device)


if __name__ == "__main__":
    main(*sys.argv[1:])
