"""Makes the disk of the virtual machine, with Debian and its kernel, and the programs of its units.

``python -m tests.vm.build`` makes missing parts in about three minutes, and stores them in the cache of tests.cluster.
Debian's packages are installed by debootstrap, the agent's dependencies are wheels from PyPI, and kubelet and
containerd are built from their Go modules (``tests.cluster.build``).
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.cluster import build
from tests.cluster.build import BuildError, run

RELEASE = "bookworm"
PYTHON = "3.11"
"""The version of Python in this Debian release, which is the oldest version that the project supports."""
PACKAGES = (
    *("systemd", "systemd-sysv", "udev", "dbus", "linux-image-cloud-amd64", "openssh-server", "python3"),
    *("runc", "containernetworking-plugins", "iproute2", "kmod", "procps", "ca-certificates"),
)
GATEWAY = "10.78.0.1"
"""The host's address in the virtual network between the host and the machine."""
ADDRESS = "10.78.0.2"
"""The machine's address in the virtual network between the host and the machine."""
NODE = "node1"
LABEL = "programs"
"""The label of the file system that a machine mounts at /opt/node."""
_FILES = {
    "etc/hostname": f"{NODE}\n",
    "etc/hosts": f"127.0.0.1 localhost\n{ADDRESS} {NODE}\n",
    "etc/fstab": f"/dev/vda / ext4 defaults 0 1\nLABEL={LABEL} /opt/node ext4 ro 0 0\n",
    "opt/node/.keep": "",
    "etc/systemd/network/10-node.network": (
        f"[Match]\nName=eth0\n[Network]\nAddress={ADDRESS}/24\nGateway={GATEWAY}\nLinkLocalAddressing=no\n"
    ),
    # Pods are connected by CNI, not by networkd.
    "etc/systemd/network/20-pods.network": "[Match]\nName=veth*\n[Link]\nUnmanaged=yes\n",
    "etc/modules-load.d/node.conf": "overlay\nveth\n",
    "etc/sysctl.d/90-node.conf": "net.ipv4.ip_forward=1\nvm.overcommit_memory=1\nkernel.panic=10\n",
    "etc/systemd/journald.conf.d/node.conf": "[Journal]\nStorage=persistent\nRateLimitIntervalSec=0\n",
    # PAM would start root's service manager for each connection, which takes minutes without KVM.
    "etc/ssh/sshd_config.d/node.conf": "UseDNS no\nUsePAM no\n",
}
_MASKED = (
    *("apt-daily.timer", "apt-daily-upgrade.timer", "e2scrub_all.timer", "e2scrub_reap.service"),
    *("getty@tty1.service", "serial-getty@ttyS0.service"),
)


@dataclass(frozen=True)
class Disk:
    """The directory of the files from which a machine boots. site: the directory of the agent's dependencies."""

    directory: Path
    site: Path

    @property
    def root(self) -> Path:
        """The root file system; machines write to copies of it."""
        return self.directory / "root.ext4"

    @property
    def key(self) -> Path:
        """The private key of root's SSH."""
        return self.directory / "id_ed25519"


def missing_packages() -> list[str]:
    """Return the Debian packages that are required on this host and whose programs are missing."""
    wanted = {
        "qemu-system-x86": "qemu-system-x86_64",
        "qemu-utils": "qemu-img",
        "debootstrap": "debootstrap",
        "openssh-client": "ssh",
        "e2fsprogs": "mke2fs",
    }
    return [package for package, program in wanted.items() if shutil.which(program) is None]


def _make_disk(work: Path, into: Path) -> None:
    root = work / "root"
    run(
        ["debootstrap", "--variant=minbase", f"--include={','.join(PACKAGES)}", RELEASE, str(root)],
        work,
        DEBIAN_FRONTEND="noninteractive",
    )
    for name, text in _FILES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    run(["systemctl", f"--root={root}", "enable", "systemd-networkd", "ssh"], work)
    run(["systemctl", f"--root={root}", "mask", *_MASKED], work)
    run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(into / "id_ed25519")], work)
    (root / "root" / ".ssh").mkdir(mode=0o700, exist_ok=True)
    shutil.copy(into / "id_ed25519.pub", root / "root" / ".ssh" / "authorized_keys")
    for name in ("vmlinuz", "initrd.img"):
        (found,) = (root / "boot").glob(f"{name}-*")
        shutil.copy(found, into / name)
    shutil.rmtree(root / "var" / "cache" / "apt")
    run(["mke2fs", "-q", "-t", "ext4", "-d", str(root), str(into / "root.ext4"), "6G"], work)


def _make_site(_: Path, into: Path) -> None:
    run(build.install_locked(PYTHON, into / "site"), into)
    # The DaemonSet's image lacks the library that reads a kubeconfig, which setup.cfg has in the extra `cli`.
    fits = [f"--python-version={PYTHON}", "--only-binary=:all:"]
    (clients,) = re.findall(
        r"^    (kubernetes_asyncio\S+)$", (build.EXAMPLES.parent / "setup.cfg").read_text(), re.MULTILINE
    )
    run([sys.executable, "-m", "pip", "install", "-q", *fits, f"--target={into / 'clients'}", clients], into)
    shutil.copytree(into / "clients", into / "site", dirs_exist_ok=True)
    # The agent's unit may not write bytecode into this directory, so each start would compile the files. Compiling here
    # has no effect if this process has another version of Python than the machine.
    run([sys.executable, "-m", "compileall", "-q", "-j", "2", str(into / "site")], into)


def ensure() -> Disk:
    """Return the disk; make it if it is missing. Raises BuildError."""
    if os.geteuid() != 0:
        raise BuildError("debootstrap, namespaces and network devices need root")
    build.ensure_packages(missing_packages)
    # A disk keeps the package versions of the day on which it was made. A change of these lists makes another disk.
    contents = hashlib.sha256(repr((PACKAGES, _MASKED, sorted(_FILES.items()))).encode()).hexdigest()[:10]
    disk = build.built(f"vm-{RELEASE}-{contents}", ("root.ext4", "vmlinuz", "initrd.img"), _make_disk)
    site = build.built(f"agent-{PYTHON}-{build.locked_packages()}", (), _make_site) / "site"
    return Disk(disk, site)


def main(versions: Sequence[str]) -> int:
    """Make the disk and the programs of these versions of Kubernetes, and print the disk's directory."""
    try:
        for version in versions or (build.default_version(),):
            build.ensure(version)
        print(ensure().directory)
    except (BuildError, subprocess.SubprocessError) as error:
        print(f"[build] {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
