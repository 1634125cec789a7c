"""Where the files of the NVIDIA driver are on this node."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

CDI_DIRS: Final = ("/etc/cdi", "/var/run/cdi")


@dataclass(frozen=True, slots=True)
class Places:
    """Where everything is: the library (empty: where programs look), sysfs, proc, dev, CDI specs."""

    library: str = ""
    sysfs: str = "/sys"
    proc: str = "/proc"
    dev: str = "/dev"
    cdi: tuple[str, ...] = CDI_DIRS
