"""Finds device nodes that running containers lose when systemd rewrites the device rules of their cgroups.

With cgroup v2 and the kubelet's systemd driver, a container is a scope of systemd. runc before 1.1.7 passes a device to
systemd only if /dev/char/MAJOR:MINOR or the same path below /sys exists (libcontainer/cgroups/systemd/common.go). Then
runc installs its own BPF program in the cgroup, which allows all of the container's devices. `systemctl daemon-reload`,
which package managers call, replaces runc's program by systemd's program. From then on, a container cannot open a
device that runc did not pass to systemd (EPERM). The kernel and udev create these paths only for device numbers that a
driver announces. NVIDIA's driver does not announce its device numbers, so NVIDIA's devices have no such paths.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from deviceplugin.device import Device, counted, some

ADVICE: Final = (
    "make the link before containers start: a line of tmpfiles.d for each (`L /dev/char/240:0 - - - - ../fpga0`), for "
    "NVIDIA GPUs `nvidia-ctk system create-dev-char-symlinks --create-all`"
)


def reload_matters(cgroup_root: Path = Path("/sys/fs/cgroup")) -> bool:
    """Return whether systemd writes the device rules of pods' cgroups (cgroup v2 and the kubelet's systemd driver)."""
    there = {name for name in ("cgroup.controllers", "system.slice", "kubepods") if (cgroup_root / name).exists()}
    return there == {"cgroup.controllers", "system.slice"}


def unlinked(devices: Iterable[Device], places: Sequence[Path] = (Path("/dev"), Path("/sys/dev"))) -> dict[str, str]:
    """Return, for each device node without a link /dev/char/MAJOR:MINOR (or /dev/block), the path of the missing link.

    places: the directories with the subdirectories `char` and `block`. A link below one of `places` is enough.
    """
    missing: dict[str, str] = {}
    for path in {node.host for device in devices for node in device.container_edits.device_nodes}:
        try:
            status = os.stat(path)
        except OSError:
            continue  # The source reports a missing node.
        if kind := "char" if stat.S_ISCHR(status.st_mode) else "block" if stat.S_ISBLK(status.st_mode) else "":
            link = f"{kind}/{os.major(status.st_rdev)}:{os.minor(status.st_rdev)}"
            if not any((place / link).exists() for place in places):
                missing[path] = f"/dev/{link}"
    return dict(sorted(missing.items()))


def warning(missing: dict[str, str]) -> str:
    """Return a sentence with the effect and the remedy of missing links. missing: the result of `unlinked`."""
    shown = some([f"{path} ({link})" for path, link in missing.items()], 3)
    what = counted(len(missing), "device node")
    effect = "with runc before 1.1.7 containers lose them at the next `systemctl daemon-reload` (EPERM)"
    return f"{what} without a link in /dev/char or /dev/block, {effect}: {shown}; {ADVICE}"
