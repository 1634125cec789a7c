"""The holders of devices by kernel locks: containers and agents lock a file for each physical device.

Each container of a test takes an exclusive lock (flock) on a file of the host for each device node that it sees. The
file's name is made from the node's device numbers, so that all paths of a device have one file. A container that does
not get the lock runs beside another holder: an overlap. The kernel releases the lock at the end of the container's last
process. So the result does not depend on the state of kubelet, API server and agent.

``python -m tests.cluster.locks bridge|plugin ...`` is `dra-bridge run ...` or `deviceplugin run ...` with a `released`
hook that tries the same lock: a call for a device whose lock is held is a failure too.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from deviceplugin.device import Device
from deviceplugin.wire import podresources_pb2, podresources_pb2_grpc
from tests.cluster import image, isolate

Object = dict[str, Any]

LOCKS = isolate.DEVICES / "locks"
"""The directory with a file for each device, and with `log`, to which containers and hooks append lines (`Note`)."""
NODES = isolate.DEVICES / "held"
"""The directory of the tests' device nodes; containers search it for their device nodes."""
MAJOR = 240
"""The nodes' major number, which is for local use (the kernel's admin-guide/devices.txt); no test opens the nodes."""

_FLOCK = "/locks/bin/ld.so --library-path /locks/bin /locks/bin/flock"
# $1: the shell's handler of SIGTERM. Child processes hold the same locks; the kernel kills them with process 1.
_HOLD = f"""
note() {{ read now rest < /proc/uptime; echo "$now $1 $2 $POD $POD_UID $CONTAINER" >> /locks/log; }}
trap "$1" TERM
n=3
for key in $(find {NODES} -type c -exec stat -c %t.%T {{}} + 2>/dev/null | sort); do
  eval "exec $n>>/locks/$key"
  if {_FLOCK} -n $n; then note got $key; else note failed $key; fi
  n=$((n + 1))
done
[ $n -gt 3 ] || note without -
while :; do sleep 2147483647 & wait $!; done
"""


# --- devices and locks -----------------------------------------------------------------------------------------------


def prepare() -> None:
    """Create empty directories, with the program flock for containers, because busybox has none."""
    for directory in (LOCKS, NODES):
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
    (LOCKS / "bin").mkdir()
    flock = shutil.which("flock")
    assert flock is not None, "flock is missing: apt-get install util-linux"
    shutil.copy(flock, LOCKS / "bin" / "flock")
    needs = subprocess.run(["ldd", flock], check=True, capture_output=True, text=True).stdout
    for name, path in re.findall(r"^\s+(?:(\S+) => )?(/\S+) \(0x", needs, re.MULTILINE):
        shutil.copy(path, LOCKS / "bin" / (name or "ld.so"))
    (LOCKS / "log").touch()


def make_node(path: Path, minor: int) -> str:
    """Create a device node with this minor number; return the key of its lock."""
    path.parent.mkdir(parents=True, exist_ok=True)
    os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(MAJOR, minor))
    return key_of(path)


def key_of(path: Path) -> str:
    """Return the key of a device node's lock, as `stat -c %t.%T` prints it."""
    numbers = os.stat(path).st_rdev
    return f"{os.major(numbers):x}.{os.minor(numbers):x}"


@dataclass(frozen=True)
class Note:
    """A line of the log. what: a word about a container, or about a call of `released`.

    A container got the lock of a device, failed to get the lock, or is without a device. A call of `released` found the
    lock free or held, or the call was broken (it failed on purpose).
    """

    at: float
    what: str
    key: str
    pod: str
    uid: str
    container: str


def notes() -> list[Note]:
    """Read the log."""
    found = []
    for line in (LOCKS / "log").read_text().splitlines():
        at, *rest = line.split()
        found.append(Note(float(at), *rest))
    return found


@dataclass(frozen=True)
class Holder:
    """The first process of a container, which has the lock of a device."""

    key: str
    pod: str
    uid: str
    container: str
    pid: int


def holders() -> list[Holder]:
    """Return the holders of all locks, by the kernel's list of each process's locks."""
    found = []
    for pid, environment in containers():
        with contextlib.suppress(OSError):
            for info in Path(f"/proc/{pid}/fdinfo").iterdir():
                if "FLOCK" in info.read_text():
                    key = os.path.basename(os.readlink(f"/proc/{pid}/fd/{info.name}"))
                    found.append(Holder(key, environment["POD"], environment["POD_UID"], environment["CONTAINER"], pid))
    return sorted(found, key=lambda one: (one.key, one.pod))


def containers() -> Iterator[tuple[int, Mapping[str, str]]]:
    """Yield the first process of each container that takes locks, and its environment."""
    for directory in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            text = (directory / "environ").read_bytes().decode(errors="replace")
            environment = dict(entry.split("=", 1) for entry in text.split("\0") if "=" in entry)
            if "POD_UID" not in environment:
                continue
            numbers = re.search(r"^NSpid:\s+(.*)$", (directory / "status").read_text(), re.MULTILINE)
            if numbers and numbers.group(1).split()[-1] == "1":
                yield int(directory.name), environment


def pids(uid: str) -> list[int]:
    """Return the first processes of a pod's containers."""
    return [pid for pid, environment in containers() if environment["POD_UID"] == uid]


def parent(pid: int) -> int:
    """Return the PID of a process's parent; the parent of a container's first process is the container's shim."""
    found = re.search(r"^PPid:\s+(\d+)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found.group(1))


# --- pods ------------------------------------------------------------------------------------------------------------


def container(
    name: str = "main",
    limits: Mapping[str, int] | None = None,
    claims: Collection[str] = (),
    *,
    ignores_term: bool = False,
    **more: Any,
) -> Object:
    """Return a container that locks its devices and waits. It ends with status 0 on SIGTERM, unless ignores_term."""
    return {
        "name": name,
        "image": image.IMAGE,
        "imagePullPolicy": "Never",
        "command": ["/bin/sh", "-c", _HOLD, "sh", "" if ignores_term else "exit 0"],
        "env": [
            {"name": "CONTAINER", "value": name},
            {"name": "POD", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
            {"name": "POD_UID", "valueFrom": {"fieldRef": {"fieldPath": "metadata.uid"}}},
        ],
        "volumeMounts": [{"name": "locks", "mountPath": "/locks"}],
        "resources": {
            **({"limits": {key: str(value) for key, value in limits.items()}} if limits else {}),
            **({"claims": [{"name": claim} for claim in claims]} if claims else {}),
        },
        **more,
    }


def pod(
    name: str, *main: Object, claims: Mapping[str, Object] | None = None, namespace: str = "default", **spec: Any
) -> Object:
    """Return a pod's manifest. claims: for each name in `resourceClaims`, a claim or a template."""
    entries = [{"name": claim, **source} for claim, source in (claims or {}).items()]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {
            "containers": list(main),
            "volumes": [{"name": "locks", "hostPath": {"path": str(LOCKS)}}],
            "terminationGracePeriodSeconds": 2,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            **({"resourceClaims": entries} if entries else {}),
            **spec,
        },
    }


# --- another client of the kubelet -----------------------------------------------------------------------------------


@contextlib.contextmanager
def flooded(socket: Path, per_second: float = 250.0) -> Iterator[list[int]]:
    """Call PodResources List more often than the kubelet allows all clients together (100 per second).

    Yields a list with the numbers of answered and of refused calls, which grow until the end of the context.
    """
    counts = [0, 0]
    over = threading.Event()

    def call() -> None:
        with grpc.insecure_channel(f"unix:{socket}", (("grpc.default_authority", "localhost"),)) as channel:
            stub = podresources_pb2_grpc.PodResourcesListerStub(channel)
            request = podresources_pb2.ListPodResourcesRequest()
            while not over.wait(1 / per_second):
                try:
                    stub.List(request, timeout=5)
                    counts[0] += 1
                except grpc.RpcError:
                    counts[1] += 1

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    try:
        yield counts
    finally:
        over.set()
        thread.join(10)


# --- the agents ------------------------------------------------------------------------------------------------------


def break_released(how: str, times: int) -> None:
    """Make the next `times` calls of `released` fail. how: "raises", or "hangs", which lasts until `mend_released`."""
    (LOCKS / "broken").write_text(f"{how} {times}")


def mend_released() -> None:
    """End the failures of `released`."""
    (LOCKS / "broken").unlink()


def _fail_as_asked(devices: Sequence[Device]) -> None:
    try:
        how, times = (LOCKS / "broken").read_text().split()
    except FileNotFoundError:
        return
    if times == "0":
        return
    (LOCKS / "broken").write_text(f"{how} {int(times) - 1}")
    with open(LOCKS / "log", "a") as log:
        log.write(f"{time.clock_gettime(time.CLOCK_BOOTTIME):.2f} broken - agent {os.getpid()} {devices[0].id}\n")
    if how == "raises":
        raise OSError("the device does not answer")
    while (LOCKS / "broken").exists():
        time.sleep(0.1)


def record_released(devices: Sequence[Device]) -> None:
    """Try the lock of each device, and log whether it was free: a hook that wipes a device needs it exclusively."""
    _fail_as_asked(devices)
    for device in devices:
        for node in device.container_edits.device_nodes:
            try:
                key = key_of(Path(node.host))
            except OSError:
                continue  # the device is unplugged
            with open(LOCKS / key, "a") as file, open(LOCKS / "log", "a") as log:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    what = "free"
                except BlockingIOError:
                    what = "held"
                at = time.clock_gettime(time.CLOCK_BOOTTIME)
                log.write(f"{at:.2f} {what} {key} agent {os.getpid()} {device.id}\n")


def main(argv: Sequence[str]) -> int:
    """Run an agent whose sources have the `released` hook."""
    from deviceplugin import sources
    from deviceplugin.cli import main as run_plugin
    from dra_bridge.cli import main as run_bridge

    class Recorded(sources.ConfiguredSource):
        def released(self, devices: Sequence[Device]) -> None:
            record_released(devices)

        @property
        def hooks(self) -> frozenset[str]:
            return super().hooks | {"released"}

    sources.ConfiguredSource = Recorded  # type: ignore[misc]
    kind, *arguments = argv
    return (run_bridge if kind == "bridge" else run_plugin)(["run", *arguments])


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.exit(main(sys.argv[1:]))
