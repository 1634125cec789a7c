"""Device nodes in real containers: a container can open a device node only if the plugin grants it."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from deviceplugin.config import parse
from deviceplugin.sources import ConfiguredSource
from tests.cluster import isolate
from tests.cluster.node import Cluster, ExecError
from tests.cluster.test_sources_real import served

RESOURCE = "example.com/guarded"
# Runtimes let every container open null, zero, random, /dev/net/tun and a few others, but not these.
GUARDED = [Path(path) for path in ("/dev/fuse", "/dev/kvm", "/dev/loop-control")]


@pytest.fixture
def guarded() -> Iterator[Path]:
    """A device node with the number of a device that containers may not open by default."""
    number = next(os.stat(path).st_rdev for path in GUARDED if path.exists() and _opens(path))
    directory = isolate.DEVICES / "guarded"
    directory.mkdir()
    os.mknod(directory / "node", stat.S_IFCHR | 0o600, number)
    yield directory / "node"
    shutil.rmtree(directory)


def _opens(path: Path) -> bool:
    try:
        os.close(os.open(path, os.O_RDONLY))
    except OSError:
        return False
    return True


def test_permissions_of_the_resource_hold_in_the_container(cluster: Cluster, guarded: Path) -> None:
    """With `permissions: r`, a container can open its device for reading, but not for writing.

    A container without the device cannot open a node that it makes with the same number.
    """
    text = f"""
        resources:
        - name: {RESOURCE}
          permissions: r
          devices: [{{path: {guarded}}}]
    """
    with served(ConfiguredSource(parse(text).resources[0])):
        cluster.wait_allocatable(RESOURCE, 1)
        holder = cluster.start_pod("holder", {RESOURCE: 1}).wait_running()
        other = cluster.start_pod("other").wait_running()
        holder.exec(["sh", "-c", f"exec 3<{guarded}"])
        with pytest.raises(ExecError, match="not permitted"):
            holder.exec(["sh", "-c", f"exec 3>{guarded}"])
        number = os.stat(guarded).st_rdev
        made = f"mknod /tmp/made c {os.major(number)} {os.minor(number)}"
        with pytest.raises(ExecError, match="not permitted"):
            other.exec(["sh", "-c", f"{made} && exec 3</tmp/made"])
