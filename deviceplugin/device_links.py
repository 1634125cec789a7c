"""Device nodes that running containers lose when systemd writes the rules of their cgroups anew.

With cgroup v2 and the kubelet's systemd driver a container is a scope of systemd's. runc before 1.1.7 names a device to
systemd only if /dev/char/MAJOR:MINOR or the same below /sys is there (libcontainer/cgroups/systemd/common.go), and then
allows all of the container's devices by a program of its own. `systemctl daemon-reload`, which package managers call,
puts systemd's program in its place: opening a device that it was not named fails with EPERM from then on. The kernel
and udev make the paths of devices that a driver announces; numbers that it only serves, as NVIDIA's does, have none.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from deviceplugin.device import Device, counted

ADVICE: Final = (
    "make the link before containers start: a line of tmpfiles.d for each (`L /dev/char/240:0 - - - - ../fpga0`), for "
    "NVIDIA GPUs `nvidia-ctk system create-dev-char-symlinks --create-all`"
)


def reload_matters(cgroup_root: Path = Path("/sys/fs/cgroup")) -> bool:
    """Return whether systemd writes the device rules of pods: cgroup v2, and no cgroups of the cgroupfs driver."""
    there = {name for name in ("cgroup.controllers", "system.slice", "kubepods") if (cgroup_root / name).exists()}
    return there == {"cgroup.controllers", "system.slice"}


def unlinked(devices: Iterable[Device], places: Sequence[Path] = (Path("/dev"), Path("/sys/dev"))) -> dict[str, str]:
    """Return the links that are missing, by the path of their device node. places: where one of them suffices."""
    missing: dict[str, str] = {}
    for path in {node.host for device in devices for node in device.container_edits.device_nodes}:
        try:
            status = os.stat(path)
        except OSError:
            continue  # the source's business
        if kind := "char" if stat.S_ISCHR(status.st_mode) else "block" if stat.S_ISBLK(status.st_mode) else "":
            link = f"{kind}/{os.major(status.st_rdev)}:{os.minor(status.st_rdev)}"
            if not any((place / link).exists() for place in places):
                missing[path] = f"/dev/{link}"
    return dict(sorted(missing.items()))


def warning(missing: dict[str, str]) -> str:
    """Return what is wrong with device nodes without links, and what mends it, in one sentence."""
    shown: Sequence[str] = [f"{path} ({link})" for path, link in list(missing.items())[:3]]
    more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
    what = counted(len(missing), "device node")
    effect = "with runc before 1.1.7 containers lose them at the next `systemctl daemon-reload` (EPERM)"
    return f"{what} without a link in /dev/char or /dev/block, {effect}: {', '.join(shown)}{more}; {ADVICE}"
