"""Run a command in namespaces in which a complete Kubernetes node can run, without changes to the host.

``python -m tests.cluster.isolate COMMAND...`` runs the command in its own mount, network and pid namespaces:

* Each directory that a node writes to is an empty tmpfs (``HIDDEN``). The device plugin directory is always
  ``/var/lib/kubelet/device-plugins``, whatever the kubelet's ``--root-dir`` is, so that without a mount namespace tests
  would disturb a kubelet of the machine. All other files (the work tree, virtual environments, caches) are the host's.
* ``STATE`` has the harness's own files. ``DEVICES`` is for the tests: a tmpfs on which device nodes work.
* ``/dev`` is a copy: tests plug in devices there, and pods that mount it leave files in it.
* The node has the addresses ``NODE_IP`` and ``SERVICE_IP``. It has a default route, without which kube-apiserver does
  not start; the route leads nowhere. A lookup of a name that is not in ``/etc/hosts`` fails at once: with a name server
  that does not answer, a node takes 30 s to start. All ports are free.
* The kernel settings that a kubelet changes (``SETTINGS``) and the boot id (``BOOT_ID``) are replaced by files, so that
  the host's values do not change.
* The kubelet has its own cgroup (see ``cgroup``).

The end of a run: the run's exit status is the command's. When the command ends, the first process of the pid namespace
ends; then the kernel kills all other processes of the namespace, and removes the mounts and the network. The first
process also ends when the outer process ends, which it notices by a pipe, so that SIGKILL of the outer process has the
same effect. Only the cgroups stay: a reaper process outside of the namespaces and of the process group removes the
cgroups after both processes have ended. If the reaper is killed too, the next run removes the cgroups: a run holds a
lock on a file in ``RUNS`` while any of its three processes runs.

Empty directories that are created as mount points stay on the host.

The commands run as root. Two runs can run at the same time.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType

NODE_NAME = "node1"
NODE_IP = "10.77.0.2"
SERVICE_IP = "10.96.0.1"
"""The address of the ``kubernetes`` service. There is no kube-proxy: the kube-apiserver has this address itself."""

BASE = Path("/run/deviceplugin-cluster")
RUNS = BASE / "runs"
STATE = BASE / "state"
DEVICES = BASE / "devices"

HIDDEN = (
    STATE,
    DEVICES,
    Path("/var/lib/kubelet"),
    Path("/var/lib/cni"),
    Path("/var/log/pods"),
    Path("/var/log/containers"),
    Path("/etc/cdi"),
    Path("/run/cdi"),
    Path("/run/netns"),
    # containerd's shims always have their sockets here, whatever containerd's configuration is
    Path("/run/containerd"),
)

# Kernel settings that the kubelet changes (pkg/kubelet/cm/container_manager_linux.go, setupKernelTunables).
SETTINGS = (
    "vm/overcommit_memory",
    "vm/panic_on_oom",
    "kernel/panic",
    "kernel/panic_on_oops",
    "kernel/keys/root_maxkeys",
    "kernel/keys/root_maxbytes",
)

BOOT_ID = STATE / "etc" / "kernel.random.boot_id"
"""The file mounted over /proc/sys/kernel/random/boot_id outside of containers; tests write a new id into it to simulate
a reboot."""

_PREFIX = "deviceplugin-cluster-"
_ENVIRONMENT = "DEVICEPLUGIN_CLUSTER_RUN"
_GRACE = 30.0  # seconds in which the command must end after the outer process got a signal


def inside() -> bool:
    """Return whether this process runs isolated."""
    return bool(os.environ.get(_ENVIRONMENT)) and os.path.ismount(STATE) and os.path.ismount("/var/lib/kubelet")


def cgroup() -> str:
    """Return the cgroup of this run's kubelet, in the form of the kubelet's ``cgroupRoot``."""
    return "/" + os.environ[_ENVIRONMENT]


POD_CGROUPS = BASE / "cgroup"
"""A cgroup file system with only this run's pods, for agents outside of pods, which see all of the host's cgroups."""


# --- cgroups ---------------------------------------------------------------------------------------------------------


def cgroup_hierarchies() -> list[Path]:
    """Return the mount points of the cgroup hierarchies: one with cgroup v2, one for each controller with v1."""
    found: dict[str, Path] = {}
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        head, _, tail = line.partition(" - ")
        root, point = head.split()[3:5]
        kind = tail.split(" ", 1)[0]
        if kind in ("cgroup", "cgroup2") and root == "/" and point.startswith("/sys/fs/cgroup"):
            found.setdefault(point, Path(point))
    return list(found.values())


def _make_cgroup(name: str) -> None:
    for hierarchy in cgroup_hierarchies():
        if (hierarchy / "cgroup.controllers").exists():
            for controller in (hierarchy / "cgroup.controllers").read_text().split():
                with contextlib.suppress(OSError):
                    (hierarchy / "cgroup.subtree_control").write_text(f"+{controller}")
        (hierarchy / name).mkdir()
        for setting in ("cpuset.mems", "cpuset.cpus"):  # if these files are empty, a v1 cpuset accepts no process
            if (hierarchy / setting).exists() and (hierarchy / name / setting).exists():
                with contextlib.suppress(OSError):
                    (hierarchy / name / setting).write_text((hierarchy / setting).read_text())


def cgroup_directories(name: str) -> Iterator[Path]:
    """Yield the directories of a cgroup and of all cgroups below it, in all hierarchies, the deepest first."""
    for hierarchy in cgroup_hierarchies():
        for directory, _, _ in os.walk(hierarchy / name, topdown=False):
            yield Path(directory)


def kill_cgroup(name: str) -> None:
    """Kill every process in a cgroup and in those below it, except the caller.

    cgroup.procs shows a process outside the caller's pid namespace as 0: such processes are skipped.
    """
    for directory in cgroup_directories(name):
        with contextlib.suppress(OSError):
            for pid in {int(line) for line in (directory / "cgroup.procs").read_text().split()} - {0, os.getpid()}:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def remove_cgroup(name: str, timeout: float = 30.0) -> bool:
    """Kill the processes of a cgroup, and remove it with all cgroups below it; return whether it is gone in time."""
    deadline = time.monotonic() + timeout
    while True:
        kill_cgroup(name)
        for directory in cgroup_directories(name):
            with contextlib.suppress(OSError):
                directory.rmdir()
        if not any(cgroup_directories(name)):
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)


# --- runs, alive and dead --------------------------------------------------------------------------------------------


def _begin_run() -> tuple[str, int]:
    """Create the name and the cgroup of a new run; return the name and a descriptor with the run's lock."""
    RUNS.mkdir(parents=True, exist_ok=True)
    while True:
        name = f"{_PREFIX}{os.getpid()}-{secrets.token_hex(4)}"
        lock = os.open(RUNS / name, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.exists(RUNS / name):
                break
        except BlockingIOError:
            pass
        os.close(lock)  # between open and flock, another run's cleanup locked or removed this file
    _make_cgroup(name)
    return name, lock


def _remove_run(name: str) -> None:
    if remove_cgroup(name):
        (RUNS / name).unlink(missing_ok=True)


def remove_dead_runs() -> None:
    """Remove the cgroups of runs that ended together with their reaper."""
    if not RUNS.is_dir():
        return
    for path in RUNS.iterdir():
        with contextlib.suppress(FileNotFoundError), open(path, "r+") as handle:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue  # the run is not dead
            _remove_run(path.name)


def _reap(name: str, pipe: int) -> None:
    """The reaper: wait until all processes have closed the other end of the pipe, then remove the run's cgroups."""
    while os.read(pipe, 1):
        pass
    _remove_run(name)


# --- inside ----------------------------------------------------------------------------------------------------------


def _mount(*arguments: str) -> None:
    done = subprocess.run(["mount", *arguments], stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"isolate: mount {' '.join(arguments)}: {done.stderr.strip()}")


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"isolate: ip {' '.join(arguments)}: {done.stderr.strip()}")


def _set_up() -> None:
    """Set up mounts, cgroups, devices and network in this process's namespaces."""
    _mount("--make-rprivate", "/")
    for path in HIDDEN:
        path.mkdir(parents=True, exist_ok=True)
        # Device nodes work on a tmpfs unless it is mounted with nodev.
        _mount("-t", "tmpfs", "-o", "mode=0755,dev,exec", "tmpfs", str(path))
    etc = STATE / "etc"
    etc.mkdir()
    (etc / "resolv.conf").write_text("nameserver 127.0.0.1\noptions timeout:1 attempts:1\n")
    (etc / "hosts").write_text(
        f"127.0.0.1 localhost\n::1 localhost\n{NODE_IP} {NODE_NAME}\n{SERVICE_IP} kubernetes.default.svc\n"
    )
    for name in ("resolv.conf", "hosts"):
        target = Path(os.path.realpath(f"/etc/{name}"))
        if target.exists():
            _mount("--bind", str(etc / name), str(target))
    for setting in (*SETTINGS, "kernel/random/boot_id"):
        real = Path("/proc/sys") / setting
        if real.exists():
            copy = etc / setting.replace("/", ".")
            copy.write_text(real.read_text())
            _mount("--bind", str(copy), str(real))
    hierarchy = min(cgroup_hierarchies(), key=lambda one: (one.name != "pids", one))
    (POD_CGROUPS / hierarchy.name).mkdir(parents=True, exist_ok=True)
    _mount("--bind", f"{hierarchy}{cgroup()}", str(POD_CGROUPS / hierarchy.name))
    _copy_dev()
    # As on a real node: otherwise the kubelet refuses volumes with mountPropagation.
    _mount("--make-rshared", "/")

    _ip("link", "set", "lo", "up")
    _ip("addr", "add", f"{SERVICE_IP}/32", "dev", "lo")
    # veth with both ends in this namespace, because some kernels lack the dummy device.
    _ip("link", "add", "uplink0", "type", "veth", "peer", "name", "uplink1")
    _ip("link", "set", "uplink1", "up")
    _ip("addr", "add", f"{NODE_IP}/24", "dev", "uplink0")
    _ip("link", "set", "uplink0", "up")
    _ip("route", "add", "default", "via", NODE_IP.rpartition(".")[0] + ".1", "dev", "uplink0")


def _copy_dev() -> None:
    """Replace /dev by a tmpfs with the same devices and the same mounts."""
    copy = STATE / "dev"
    copy.mkdir()
    _mount("-t", "tmpfs", "-o", "mode=0755,dev", "tmpfs", str(copy))
    for directory, names, files in os.walk("/dev"):
        for name in (*names, *files):
            path = os.path.join(directory, name)
            there = str(copy) + path.removeprefix("/dev")
            status = os.lstat(path)
            if os.path.ismount(path):
                if stat.S_ISDIR(status.st_mode):
                    os.mkdir(there)
                    names.remove(name)
                else:
                    open(there, "x").close()
                _mount("--rbind", path, there)
            elif stat.S_ISDIR(status.st_mode):
                os.mkdir(there)
                os.chmod(there, stat.S_IMODE(status.st_mode))
            elif stat.S_ISLNK(status.st_mode):
                os.symlink(os.readlink(path), there)
            elif stat.S_ISCHR(status.st_mode) or stat.S_ISBLK(status.st_mode):
                os.mknod(there, status.st_mode, status.st_rdev)
                os.chmod(there, stat.S_IMODE(status.st_mode))
                os.chown(there, status.st_uid, status.st_gid)
    _mount("--move", str(copy), "/dev")
    copy.rmdir()


def _first_process(control: int, command: Sequence[str]) -> None:
    """The first process of the pid namespace: run the command, reap orphans, and end when the outer process ends.

    ``control`` is a pipe from the outer process. Each byte is the number of a signal for the command.
    """
    for number in (signal.SIGINT, signal.SIGQUIT):  # the terminal sends these signals to the command as well
        signal.signal(number, signal.SIG_IGN)
    started = threading.Event()
    child: list[int] = []

    def obey() -> None:
        while number := os.read(control, 1):
            started.wait()
            with contextlib.suppress(ProcessLookupError):
                os.kill(child[0], number[0])
        os._exit(137)

    threading.Thread(target=obey, daemon=True).start()
    _set_up()
    try:
        process = subprocess.Popen(command, preexec_fn=_default_signals)
    except OSError as error:
        print(f"isolate: {command[0]}: {error.strerror}", file=sys.stderr)
        os._exit(127 if error.errno == errno.ENOENT else 126)
    child.append(process.pid)
    started.set()
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid == process.pid:
            code = os.waitstatus_to_exitcode(status)
            # When this process ends, the kernel kills all others of the namespace.
            os._exit(code if code >= 0 else 128 - code)


def _default_signals() -> None:
    for number in (signal.SIGINT, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)


# --- outside ---------------------------------------------------------------------------------------------------------


def run(command: Sequence[str]) -> int:
    """Run a command isolated and return its exit status, or 128 + n if signal n has killed it."""
    if os.geteuid() != 0:
        raise SystemExit("isolate: namespaces, mounts and cgroups need root")
    unshare = shutil.which("unshare")
    if unshare is None:
        raise SystemExit("isolate: there is no unshare: apt-get install util-linux")
    remove_dead_runs()
    name, lock = _begin_run()
    control_out, control_in = os.pipe()
    alive_out, alive_in = os.pipe()
    me = [sys.executable, "-I", "-S", os.path.abspath(__file__)]
    reaper = subprocess.Popen(
        [*me, "--reap", name, str(alive_out)],
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        cwd="/",
        pass_fds=(alive_out, lock),
    )
    os.close(alive_out)
    told = False

    def forward(number: int, _: FrameType | None) -> None:
        nonlocal told
        os.write(control_in, bytes([number]))
        if not told:
            told = True
            signal.setitimer(signal.ITIMER_REAL, _GRACE)

    def too_late(_number: int, _frame: FrameType | None) -> None:
        os.close(control_in)  # the closed pipe ends the first process, and so all processes of the namespace

    handlers = {number: signal.signal(number, forward) for number in (signal.SIGTERM, signal.SIGHUP)}
    handlers[signal.SIGALRM] = signal.signal(signal.SIGALRM, too_late)
    for number in (signal.SIGINT, signal.SIGQUIT):  # the terminal sends these signals to the command itself
        handlers[number] = signal.signal(number, signal.SIG_IGN)
    try:
        status = subprocess.Popen(
            [
                *(unshare, "--mount", "--net", "--pid", "--fork", "--kill-child=SIGKILL", "--mount-proc"),
                *(*me, "--first", str(control_out), *command),
            ],
            env={**os.environ, _ENVIRONMENT: name},
            pass_fds=(control_out, alive_in, lock),
        ).wait()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        os.close(alive_in)
        reaper.wait()
        os.close(lock)
        os.close(control_out)
        with contextlib.suppress(OSError):
            os.close(control_in)
    return status if status >= 0 else 128 - status


def main(arguments: Sequence[str]) -> int:
    """Build missing programs while there is a network, and run the command isolated; return the exit status."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print("usage: python -m tests.cluster.isolate COMMAND [ARGUMENT...]", file=sys.stderr)
        return 2
    from tests.cluster import build

    try:
        build.ensure()
    except build.BuildError as error:
        print(f"isolate: {error}", file=sys.stderr)
        return 1
    return run(arguments)


if __name__ == "__main__":
    # Started by path, without site packages, this file is the reaper or the first process.
    if sys.argv[1:2] == ["--reap"]:
        _reap(sys.argv[2], int(sys.argv[3]))
    elif sys.argv[1:2] == ["--first"]:
        _first_process(int(sys.argv[2]), sys.argv[3:])
    else:
        sys.exit(main(sys.argv[1:]))
