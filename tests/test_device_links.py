"""Device nodes that running containers lose when systemd writes the containers' device rules anew."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from deviceplugin import device_links
from deviceplugin.device import Device


@pytest.mark.parametrize(
    ("there", "matters"),
    [
        ((), False),
        (("pids", "memory"), False),
        (("cgroup.controllers", "kubepods", "system.slice"), False),
        (("cgroup.controllers", "kubepods"), False),
        (("cgroup.controllers", "system.slice", "kubepods.slice"), True),
        (("cgroup.controllers", "system.slice"), True),
    ],
    ids=["nothing", "cgroup v1", "cgroupfs driver", "no systemd", "systemd driver", "before the first pod"],
)
def test_where_a_reload_matters(tmp_path: Path, there: tuple[str, ...], matters: bool) -> None:
    """A reload of systemd matters only with cgroup v2 and the kubelet's systemd driver."""
    for name in there:
        (tmp_path / name).mkdir()
    assert device_links.reload_matters(tmp_path) is matters


def test_nodes_without_links(tmp_path: Path) -> None:
    """A device node needs a link named after its number (char/1:3); files and missing nodes need none."""
    numbers = {name: os.stat(f"/dev/{name}").st_rdev for name in ("null", "full")}
    (tmp_path / "char").mkdir()
    (tmp_path / "char" / f"{os.major(numbers['null'])}:{os.minor(numbers['null'])}").symlink_to("/dev/null")
    (tmp_path / "file").touch()
    devices = [
        Device("a", nodes=["/dev/null", "/dev/full"]),
        Device("b", nodes=["/dev/full", str(tmp_path / "file"), str(tmp_path / "gone")]),
    ]
    link = f"/dev/char/{os.major(numbers['full'])}:{os.minor(numbers['full'])}"
    assert device_links.unlinked(devices, [tmp_path / "none", tmp_path]) == {"/dev/full": link}
    text = device_links.warning({"/dev/full": link})
    assert text.startswith("1 device node without a link in /dev/char or /dev/block, with runc before 1.1.7 containers")
    assert f"/dev/full ({link})" in text
