"""How an agent reads the checkpoint of the kubelet's device manager."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deviceplugin.files import file_identity
from deviceplugin.kubelet.checkpoint import FILE_NAME, CheckpointError, CheckpointVersion, parse, read
from deviceplugin.register.records import Allocation
from deviceplugin.testing import checkpoint as written
from deviceplugin.testing.checkpoint import PodDevicesEntry

R = "example.com/r"


def test_the_kubelets_file_is_read() -> None:
    """Each device id of a container is one allocation; the NUMA node under which the file lists it does not matter."""
    text = written.Checkpoint(
        [
            PodDevicesEntry("u1", "init", R, {0: ["a"], 1: ["b"]}, b""),
            PodDevicesEntry("u1", "main", R, {-1: ["a"]}, None),
            PodDevicesEntry("u2", "main", "example.com/other", None, b"x"),
            PodDevicesEntry("u3", "main", R, {0: None}, None),
        ],
        {R: ["a", "b", "c"], "example.com/other": None},
    ).to_json()
    found = parse(text)
    assert found.allocations == {
        Allocation("u1", "init", R, "a"),
        Allocation("u1", "init", R, "b"),
        Allocation("u1", "main", R, "a"),
    }
    assert found.registered == {R: {"a", "b", "c"}, "example.com/other": frozenset()}


def test_a_kubelet_that_never_gave_out_a_device_names_none() -> None:
    """In a checkpoint, lists and maps that the kubelet wrote as null are read as empty."""
    assert parse(written.Checkpoint().to_json()) == CheckpointVersion(frozenset(), {})
    assert parse(written.Checkpoint(None, None).to_json()) == CheckpointVersion(frozenset(), {})


def test_each_version_of_the_file_is_another_file(tmp_path: Path) -> None:
    """A checkpoint file that replaces another has another identity, even with the same contents."""
    path = tmp_path / FILE_NAME
    written.Checkpoint().write(path)
    first = read(tmp_path)
    assert read(tmp_path).file == first.file
    with open(path, "rb"):  # the open file keeps its inode, so that the next file gets another one
        written.Checkpoint().write(path)
    second = read(tmp_path)
    assert second.file != first.file
    assert second.file == file_identity(path)


def test_a_missing_checkpoint_is_an_error(tmp_path: Path) -> None:
    """A missing or unreadable checkpoint is an error that names the file: pods may hold devices."""
    with pytest.raises(CheckpointError, match=f"{FILE_NAME}: No such file"):
        read(tmp_path)
    (tmp_path / FILE_NAME).mkdir()
    with pytest.raises(CheckpointError, match=FILE_NAME):
        read(tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "null",
        "[]",
        "{}",
        '{"Data": null}',
        '{"Data": {}}',
        '{"Data": {"PodDeviceEntries": null}}',
        '{"Data": {"PodDeviceEntries": 3, "RegisteredDevices": {}}}',
        '{"Data": {"PodDeviceEntries": [{}], "RegisteredDevices": {}}}',
        '{"Data": {"PodDeviceEntries": [null], "RegisteredDevices": {}}}',
        '{"Data": {"PodDeviceEntries": null, "RegisteredDevices": [3]}}',
        '{"Data": {"PodDeviceEntries": [{"PodUID": "u", "ContainerName": "c", "ResourceName": "r", "DeviceIDs": 3}],'
        ' "RegisteredDevices": {}}}',
        "\udcff",
        "[" * 100_000,
    ],
)
def test_a_damaged_checkpoint_is_an_error(tmp_path: Path, text: str) -> None:
    """Contents that are no checkpoint are a CheckpointError."""
    (tmp_path / FILE_NAME).write_text(text, errors="surrogateescape")
    with pytest.raises(CheckpointError, match=f"{FILE_NAME}: the file is not a device manager checkpoint"):
        read(tmp_path)


@given(st.integers(0, 100))
def test_a_torn_checkpoint_is_an_error(cut: int) -> None:
    """A checkpoint that is cut off is an error, as it would name too few allocations."""
    text = written.Checkpoint([PodDevicesEntry("u1", "main", R, {-1: ["a"]}, None)], {R: ["a"]}).to_json()
    with pytest.raises(CheckpointError):
        parse(text[:cut])


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [
                    "Data",
                    "PodDeviceEntries",
                    "RegisteredDevices",
                    "PodUID",
                    "ContainerName",
                    "ResourceName",
                    "DeviceIDs",
                    "0",
                ]
            ),
            inner,
        )
    ),
    max_leaves=30,
)


@given(st.binary() | _json.map(lambda value: json.dumps(value).encode()))
def test_no_file_breaks_the_reader(text: bytes) -> None:
    """Whatever bytes a file has, the reader returns a checkpoint or raises CheckpointError."""
    try:
        found = parse(text)
    except CheckpointError:
        return
    assert all(isinstance(one, str) for allocation in found.allocations for one in allocation)
    assert all(isinstance(one, str) for ids in found.registered.values() for one in ids)
