"""``tests.cluster.isolate`` leaves nothing behind. The tests need root, as the cluster does."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.cluster import isolate
from tests.waits import wait

REPOSITORY = Path(__file__).resolve().parents[1]
RUN = "import sys; from tests.cluster import isolate; sys.exit(isolate.run(sys.argv[1:]))"

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="namespaces and mounts need root")


def processes(mark: str) -> list[int]:
    """The processes with the argument `mark` in their command line; a run passes `mark` to its script as $0."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if mark.encode() in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
    return found


def ended(mark: str) -> bool:
    return not processes(mark)


def links() -> set[str]:
    shown = subprocess.run(["ip", "-o", "link"], check=True, capture_output=True, text=True).stdout
    return {line.split(": ")[1] for line in shown.splitlines()}


def cgroups() -> set[str]:
    return {str(path) for top in isolate.cgroup_hierarchies() for path in top.iterdir() if path.name.startswith(PREFIX)}


PREFIX = "deviceplugin-cluster-"


class Run:
    """A shell script that runs isolated, started by a process outside of the isolation."""

    def __init__(self, script: str, directory: Path) -> None:
        self.mark = f"isolated-{os.urandom(6).hex()}"
        self.output = directory / self.mark
        with open(self.output, "wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-c", RUN, "sh", "-c", script, self.mark],
                cwd=REPOSITORY,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def wait_said(self, word: str) -> None:
        def said() -> bool:
            assert self.process.poll() is None or word in self.output.read_text(), self.output.read_text()
            return word in self.output.read_text()

        wait(said, f"the isolated script says {word}")

    @property
    def names(self) -> set[str]:
        """The names in `isolate.RUNS` of the runs that this process started."""
        return {path.name for path in isolate.RUNS.iterdir() if path.name.startswith(f"{PREFIX}{self.process.pid}-")}


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[str], Run]]:
    runs: list[Run] = []

    def begin(script: str) -> Run:
        runs.append(Run(script, tmp_path))
        return runs[-1]

    yield begin
    for run in runs:
        run.process.kill()
        run.process.wait()
        wait(partial(ended, run.mark), "all processes are gone")


# This script leaves what a cluster leaves: a cgroup below its own with a process in it, a veth pair, a mount, and a
# child process in a session of its own that outlives its parent.
BUSY = """
set -e
for top in /sys/fs/cgroup/pids /sys/fs/cgroup; do
  if [ -d $top/$DEVICEPLUGIN_CLUSTER_RUN ]; then break; fi
done
mkdir -p $top/$DEVICEPLUGIN_CLUSTER_RUN/kubepods/pod1
procs=$top/$DEVICEPLUGIN_CLUSTER_RUN/kubepods/pod1/cgroup.procs
setsid sh -c "echo \\$\\$ > $procs; trap '' TERM HUP; sleep 1000 & wait" $0 &
ip link add left-$$ type veth peer name right-$$
mkdir /var/lib/kubelet/pods
mount -t tmpfs tmpfs /var/lib/kubelet/pods
touch /var/lib/kubelet/pods/$0 /etc/cdi/$0 /run/cdi/$0 /var/log/pods/$0 /var/lib/cni/$0
mknod /dev/$0 c 1 5
head -c 1 /dev/$0 >/dev/null
while ! grep -q . $procs; do :; done
echo ready
"""


def assert_nothing_left(run: Run, before: set[str]) -> None:
    wait(lambda: not processes(run.mark), "all processes are gone")
    wait(lambda: not run.names, "the run is gone")
    assert not [path for path in cgroups() if f"{PREFIX}{run.process.pid}-" in path]
    assert links() == before
    assert not [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if str(isolate.BASE) in line]
    for directory in isolate.HIDDEN:
        assert not (directory / run.mark).exists()
    assert not Path("/var/lib/kubelet/pods", run.mark).exists()
    assert not Path("/dev", run.mark).exists()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP])
def test_killed_run_leaves_nothing(start: Callable[[str], Run], number: signal.Signals) -> None:
    before = links()
    run = start(BUSY + "sleep 1000")
    run.wait_said("ready")
    assert run.names
    assert len(processes(run.mark)) >= 3
    assert cgroups()
    os.kill(run.process.pid, number)
    assert run.process.wait(20) == (-number if number == signal.SIGKILL else 128 + number)
    assert_nothing_left(run, before)


def test_run_that_ends_leaves_nothing_and_hands_on_its_status(start: Callable[[str], Run]) -> None:
    before = links()
    run = start(BUSY + "exit 7")
    assert run.process.wait(20) == 7, run.output.read_text()
    assert not run.names  # the run has removed its names from RUNS before it ends
    assert_nothing_left(run, before)


def test_killed_first_process_ends_the_run(start: Callable[[str], Run]) -> None:
    before = links()
    run = start(BUSY + "sleep 1000")
    run.wait_said("ready")
    first = [pid for pid in processes(run.mark) if b"--first" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")]
    os.kill(max(first), signal.SIGKILL)  # the lower process id is that of `unshare`, which has the same arguments
    assert run.process.wait(20) != 0
    assert_nothing_left(run, before)


def test_two_runs_side_by_side(start: Callable[[str], Run]) -> None:
    before = links()
    script = BUSY + "ls /var/lib/kubelet/pods /var/log/pods; ip -o link; echo listed; sleep 1000"
    one, two = start(script), start(script)
    one.wait_said("listed")
    two.wait_said("listed")
    assert one.mark in one.output.read_text()
    assert one.mark not in two.output.read_text()
    assert two.mark not in one.output.read_text()
    assert one.names
    assert two.names
    assert not one.names & two.names
    one.process.kill()
    one.process.wait()
    assert_nothing_left(one, before)
    assert two.process.poll() is None
    assert processes(two.mark)
    assert [path for path in cgroups() if f"{PREFIX}{two.process.pid}-" in path]


def test_next_run_removes_what_a_run_left_whose_reaper_was_killed(start: Callable[[str], Run]) -> None:
    run = start(BUSY + "sleep 1000")
    run.wait_said("ready")
    (name,) = run.names
    reapers = [pid for pid in processes("--reap") if name.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()]
    for pid in (*reapers, run.process.pid):
        os.kill(pid, signal.SIGKILL)
    run.process.wait()
    wait(lambda: not processes(run.mark), "all processes are gone")
    assert run.names
    assert [path for path in cgroups() if path.endswith(name)]
    after = start("true")
    assert after.process.wait(20) == 0, after.output.read_text()
    assert not run.names
    assert not [path for path in cgroups() if path.endswith(name)]


def test_run_in_progress_is_not_taken_for_a_dead_one(start: Callable[[str], Run]) -> None:
    run = start(BUSY + "sleep 1000")
    run.wait_said("ready")
    (name,) = run.names
    with open(isolate.RUNS / name) as handle, pytest.raises(BlockingIOError):
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    isolate.remove_dead_runs()
    assert run.names == {name}
    assert run.process.poll() is None


def test_inside_is_a_place_for_a_node(start: Callable[[str], Run]) -> None:
    run = start(
        """set -e
        for directory in /var/lib/kubelet /etc/cdi /var/run/cdi /run/cdi /var/lib/cni /var/log/pods; do
          [ -z "$(ls -A $directory)" ]
        done
        mknod /run/deviceplugin-cluster/devices/null c 1 3
        echo gone > /run/deviceplugin-cluster/devices/null
        [ ! -s /run/deviceplugin-cluster/devices/null ]
        ip route get 192.0.2.1 | grep -q 'via 10.77.0.1'
        grep -q node1 /etc/hosts
        ! getent hosts no-such-host.invalid
        before=$(cat /proc/sys/kernel/panic)
        echo 77 > /proc/sys/kernel/panic
        [ "$(cat /proc/sys/kernel/panic)" = 77 ]
        [ "$(ls -d /proc/[0-9]* | wc -l)" -lt 10 ]
        [ -f tests/test_isolate.py ]
        echo fine"""
    )
    settings = {name: Path("/proc/sys", name).read_text() for name in isolate.SETTINGS}
    assert run.process.wait(20) == 0, run.output.read_text()
    assert run.output.read_text() == "fine\n"
    assert {name: Path("/proc/sys", name).read_text() for name in isolate.SETTINGS} == settings


def test_command_that_is_not_there(start: Callable[[str], Run], tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", RUN, "/no/such/command"], cwd=REPOSITORY, capture_output=True)
    assert done.returncode == 127
    assert b"/no/such/command" in done.stderr
