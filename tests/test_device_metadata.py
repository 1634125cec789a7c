"""Files that describe the devices of a container with limits (KEP-5304)."""

from __future__ import annotations

import json
from pathlib import Path

from deviceplugin.device import Device
from deviceplugin.device_metadata import DIRECTORY, VERSIONS, by_limits, described, write

R = "example.com/fpga"


def test_each_device_by_limits_has_a_file(tmp_path: Path) -> None:
    """Each device has a file, whose path has its resource and id; the file is rewritten only if the device changed."""
    cards = [(name, Device(name, attributes={"model": name})) for name in ("a", "b")]
    edits = by_limits(str(tmp_path), R, "fpga.example.com", "node-1", cards)
    assert [mount.container for mount in edits.mounts] == [
        f"{DIRECTORY}/extendedresources/{R}/{name}/fpga.example.com-metadata.json" for name in ("a", "b")
    ]
    assert all(mount.readonly for mount in edits.mounts)
    host = Path(edits.mounts[0].host)
    objects = [json.loads(line) for line in host.read_text().splitlines()]
    assert [one["apiVersion"] for one in objects] == [f"metadata.resource.k8s.io/{version}" for version in VERSIONS]
    (request,) = objects[0]["requests"]
    attributes = {"extendedResource": {"string": R}, "model": {"string": "a"}}
    device = {"driver": "fpga.example.com", "pool": "node-1", "name": "a", "attributes": attributes}
    assert request == {"name": R, "devices": [device]}
    before = host.stat()
    assert by_limits(str(tmp_path), R, "fpga.example.com", "node-1", cards) == edits
    assert host.stat() == before
    by_limits(str(tmp_path), R, "fpga.example.com", "node-1", [("a", Device("a", attributes={"model": "new"}))])
    assert "new" in host.read_text()
    assert len(list(host.parent.iterdir())) == 2, "no drafts are left"


def test_attributes_that_the_api_would_refuse_are_left_out() -> None:
    """An attribute that the API server would refuse is left out; the device's other attributes are kept."""
    assert described(R, Device("a", attributes={"good": 1, "bad name": 2})).keys() == {"extendedResource", "good"}


def test_a_file_says_whether_it_was_written(tmp_path: Path) -> None:
    """`write` returns whether it wrote the file: False if the file already had these bytes."""
    path = str(tmp_path / "below" / "x")
    assert [write(path, b"1"), write(path, b"1"), write(path, b"2")] == [True, False, True]
