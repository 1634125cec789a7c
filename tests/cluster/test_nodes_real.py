"""Device nodes in real containers: the plugin lets a container open them, not the runtime by itself."""

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
# Runtimes let every container open null, zero, random, /dev/net/tun and the like; these they do not.
GUARDED = [Path(path) for path in ("/dev/fuse", "/dev/kvm", "/dev/loop-control")]


@pytest.fixture
def guarded() -> Iterator[Path]:
    """A copy of a device node that containers may not open by themselves."""
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
    """With `permissions: r` a container can open its device for reading and not for writing; without the device,
    a node that it makes itself with the same number does not open at all.
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
