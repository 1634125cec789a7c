"""A virtual machine: qemu on a copy of the disk of ``tests.vm.build``, in the namespaces of ``tests.cluster.isolate``.

The machine uses KVM if the host has it. Without KVM it is ten times slower, so tests wait for conditions, not times.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from tests.vm import build

T = TypeVar("T")

LIMIT = 900.0
"""Maximum seconds of a wait for a condition: a boot without KVM needs 40 s of CPU, on a host that may be busy."""
LOOK = 0.5
"""Seconds between two checks of a condition. Most checks start a program in the machine."""
MEGABYTES = 1792


class MachineError(Exception):
    """The machine, or a program in it, has failed or does not answer."""


def accelerated() -> bool:
    """Return whether this host's KVM can run any kernel. kvm_pvm, of a host that is a guest itself, cannot."""
    hardware = any(Path("/sys/module", name).exists() for name in ("kvm_intel", "kvm_amd"))
    return hardware and os.access("/dev/kvm", os.R_OK | os.W_OK)


def wait_for(condition: Callable[[], T], what: str, limit: float = LIMIT, context: Callable[[], str] = str) -> T:
    """Wait until the condition's result is true; return the result. Raises MachineError after `limit` seconds."""
    deadline, last = time.monotonic() + limit, ""
    while True:
        try:
            if value := condition():
                return value
        except (MachineError, OSError, KeyError, ValueError) as error:
            last = f"; last: {error}"
        if time.monotonic() > deadline:
            raise MachineError(f"not within {limit:g} s: {what}{last}\n{context()}")
        time.sleep(LOOK)


class Machine:
    """A machine that is started once. directory: the directory of its disks, sockets and console log.

    programs: files and directories of the host, by their names below /opt/node. The machine has read-only copies.
    """

    def __init__(self, disk: build.Disk, directory: Path, programs: Mapping[str, Path]) -> None:
        self._disk = disk
        self._directory = directory
        self._programs = programs
        self.console = directory / "console.log"
        self._qemu: subprocess.Popen[bytes] | None = None

    def boot(self) -> None:
        """Start the machine; `wait_up` waits until the machine has booted."""
        overlay = self._directory / "disk.qcow2"
        backing = ["-b", str(self._disk.root), "-F", "raw"]
        subprocess.run(["qemu-img", "create", "-q", "-f", "qcow2", *backing, str(overlay)], check=True)
        programs = self._directory / "programs"
        for name, path in self._programs.items():
            (programs / name).parent.mkdir(parents=True, exist_ok=True)
            if path.is_dir():
                shutil.copytree(path, programs / name, dirs_exist_ok=True)
            else:
                shutil.copy(path, programs / name)
        # `tests.vm.build` has compiled only the agent's dependencies, not the agent.
        subprocess.run([sys.executable, "-m", "compileall", "-q", str(programs)], check=True)
        programs_disk = self._directory / "programs.ext4"
        formatting = ["mke2fs", "-q", "-t", "ext4", "-L", build.LABEL, "-d", str(programs), str(programs_disk), "1G"]
        subprocess.run(formatting, check=True)
        shutil.rmtree(programs)
        for command in (
            ["ip", "tuntap", "add", "dev", "tap0", "mode", "tap"],
            ["ip", "addr", "add", f"{build.GATEWAY}/24", "dev", "tap0"],
            ["ip", "link", "set", "tap0", "up"],
        ):
            subprocess.run(command, check=True)
        # Without KVM a second processor makes the machine slower, because of the kernel's ticks and locks. With ERMS
        # the kernel would clear and copy memory by string instructions, which qemu emulates byte by byte.
        software = ["-accel", "tcg", "-cpu", "max,erms=off,la57=off", "-smp", "1"]
        arguments = ["-accel", "kvm", "-cpu", "host", "-smp", "2"] if accelerated() else software
        boot = "root=/dev/vda rw console=ttyS0 net.ifnames=0 panic=10 mitigations=off quiet"
        arguments += ["-m", str(MEGABYTES), "-nodefaults", "-no-user-config", "-display", "none"]
        arguments += ["-kernel", str(self._disk.directory / "vmlinuz"), "-append", boot]
        arguments += ["-initrd", str(self._disk.directory / "initrd.img")]
        # cache=unsafe: a crash of qemu may lose writes, but a reset of the machine loses none.
        arguments += ["-drive", f"file={overlay},if=virtio,format=qcow2,cache=unsafe"]
        arguments += ["-drive", f"file={programs_disk},if=virtio,format=raw,readonly=on"]
        arguments += ["-netdev", "tap,id=net0,ifname=tap0,script=no,downscript=no"]
        arguments += ["-device", "virtio-net-pci,netdev=net0", "-device", "virtio-rng-pci"]
        arguments += ["-serial", f"file:{self.console}", "-qmp", f"unix:{self._directory}/qmp,server=on,wait=off"]
        with open(self._directory / "qemu.log", "wb") as log:
            self._qemu = subprocess.Popen(
                ["qemu-system-x86_64", "-machine", "q35", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def stop(self) -> None:
        """Kill the machine."""
        if self._qemu is not None:
            self._disconnect()
            self._qemu.kill()
            self._qemu.wait()
            subprocess.run(["ip", "link", "del", "tap0"], check=False)

    def _console_end(self) -> str:
        text = self.console.read_text(errors="replace") if self.console.exists() else ""
        log = self._directory / "qemu.log"
        return f"{log.read_text(errors='replace') if log.exists() else ''}\nthe console ends with:\n{text[-3000:]}"

    def wait_up(self, before: str = "") -> None:
        """Wait until the machine has booted. before: the id of the former boot, which must not be the present id."""

        def up() -> bool:
            if self._qemu is None or self._qemu.poll() is not None:
                raise SystemExit(f"qemu has ended\n{self._console_end()}")
            return self.boot_id() != before

        wait_for(up, "the machine is up", context=self._console_end)

    def boot_id(self) -> str:
        """Return the id of the present boot. Raises MachineError if the machine does not answer."""
        return self.run("cat /proc/sys/kernel/random/boot_id", connect=20).strip()

    # --- what runs in the machine ---

    def _ssh(self, connect: int) -> list[str]:
        options = ["BatchMode=yes", "StrictHostKeyChecking=no", "UserKnownHostsFile=/dev/null", "LogLevel=ERROR"]
        options += [f"ConnectTimeout={connect}", "ServerAliveInterval=5", "ServerAliveCountMax=24"]
        # One connection for all commands: without KVM each connection takes seconds.
        options += ["ControlMaster=auto", "ControlPersist=yes", f"ControlPath={self._directory}/ssh"]
        flags = [part for option in options for part in ("-o", option)]
        return ["ssh", "-F", "none", "-i", str(self._disk.key), *flags, f"root@{build.ADDRESS}"]

    def _disconnect(self) -> None:
        """End the SSH connection."""
        subprocess.run([*self._ssh(3), "-O", "exit"], capture_output=True, check=False)

    def run(self, script: str, *, check: bool = True, stdin: bytes = b"", connect: int = 20) -> str:
        """Run a shell script as root and return its output. Raises MachineError if it fails or does not end."""
        command = [*self._ssh(connect), f"bash -ec {shlex.quote(script)}"]
        try:
            done = subprocess.run(command, input=stdin, capture_output=True, timeout=LIMIT)
        except subprocess.TimeoutExpired:
            raise MachineError(f"{script!r} does not end") from None
        if check and done.returncode != 0:
            said = (done.stderr + done.stdout).decode(errors="replace").strip()
            raise MachineError(f"{script!r} ended with {done.returncode}: {said}")
        return done.stdout.decode(errors="replace")

    def put(self, files: Mapping[str, str | Path], mode: int = 0o644) -> None:
        """Write files into the machine, and sync. files: by path, a text, or a file or directory that is copied."""

        def plain(entry: tarfile.TarInfo) -> tarfile.TarInfo:
            entry.uid = entry.gid = 0
            entry.uname = entry.gname = "root"
            return entry

        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as archive:
            for name, content in files.items():
                if isinstance(content, Path):
                    archive.add(content.resolve(), name.lstrip("/"), filter=plain)
                    continue
                entry = tarfile.TarInfo(name.lstrip("/"))
                entry.size, entry.mode, entry.mtime = len(content.encode()), mode, int(time.time())
                archive.addfile(entry, io.BytesIO(content.encode()))
        self.run("tar -x -C / -f - && sync", stdin=packed.getvalue())

    def reboot(self, *, hard: bool = False) -> None:
        """Reboot the machine and wait until it is up again. hard: by a reset, as with a button; else by systemd."""
        before = self.boot_id()
        if hard:
            self.run("sync")
            self._qmp("system_reset")
        else:
            with contextlib.suppress(MachineError):  # the connection may end before the command
                self.run("systemctl reboot")
        self._disconnect()
        self.wait_up(before)

    def _qmp(self, command: str) -> None:
        """Have qemu execute a command of its monitor."""
        with socket.socket(socket.AF_UNIX) as monitor:
            monitor.settimeout(30)
            monitor.connect(f"{self._directory}/qmp")
            answers = _lines(monitor)
            next(answers)  # skip the monitor's greeting
            for each in ("qmp_capabilities", command):
                monitor.sendall(json.dumps({"execute": each}).encode() + b"\n")
                while "return" not in (answer := next(answers)):
                    if "error" in answer:
                        raise MachineError(f"{each}: {answer}")

    def journal(self, unit: str, *, boot: int = 0, lines: int = 200) -> str:
        """Return the last lines of a unit's journal. boot: 0 for the present boot, -1 for the former one."""
        return self.run(f"journalctl -q --no-pager -o short-monotonic -b {boot} -u {unit} -n {lines} || true")

    def setting(self, unit: str, name: str) -> str:
        """Return the value of a property of a systemd unit."""
        return self.run(f"systemctl show -p {name} --value {unit}").strip()


def _lines(monitor: socket.socket) -> Iterator[dict[str, Any]]:
    rest = b""
    while True:
        while b"\n" not in rest:
            received = monitor.recv(65536)
            if not received:
                raise MachineError("qemu's monitor has closed")
            rest += received
        line, _, rest = rest.partition(b"\n")
        yield json.loads(line)
