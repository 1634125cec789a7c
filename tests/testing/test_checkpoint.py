"""Checkpoints of the fake kubelet, compared with samples that a Go program wrote with kubelet 1.36.3's package."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deviceplugin.testing.checkpoint import Checkpoint, CorruptCheckpointError, PodDevicesEntry

FIRST = PodDevicesEntry("u1", "c", "example.com/x", {-1: ["a"], 0: ["b", "c"], 10: None, 2: []}, b"\x01\x02\xff")
ODD = [
    FIRST,
    PodDevicesEntry("u2", "d <&>", "example.com/y", None, None),
    PodDevicesEntry("u2", 'd "q"\n', "example.com/y", {}, b""),
]
REGISTERED = {"example.com/x": ["c", "b", "a"], "example.com/a": [], "example.com/n": None}
SAMPLES = {
    "one": (
        Checkpoint([FIRST], REGISTERED),
        '{"Data":{"PodDeviceEntries":[{"PodUID":"u1","ContainerName":"c","ResourceName":"example.com/x",'
        '"DeviceIDs":{"-1":["a"],"0":["b","c"],"10":null,"2":[]},"AllocResp":"AQL/"}],"RegisteredDevices":'
        '{"example.com/a":[],"example.com/n":null,"example.com/x":["c","b","a"]}},"Checksum":329658802}',
    ),
    "odd": (
        Checkpoint(ODD, REGISTERED),
        '{"Data":{"PodDeviceEntries":[{"PodUID":"u1","ContainerName":"c","ResourceName":"example.com/x",'
        '"DeviceIDs":{"-1":["a"],"0":["b","c"],"10":null,"2":[]},"AllocResp":"AQL/"},{"PodUID":"u2","ContainerName":'
        '"d \\u003c\\u0026\\u003e","ResourceName":"example.com/y","DeviceIDs":null,"AllocResp":null},{"PodUID":"u2",'
        '"ContainerName":"d \\"q\\"\\n","ResourceName":"example.com/y","DeviceIDs":{},"AllocResp":""}],'
        '"RegisteredDevices":{"example.com/a":[],"example.com/n":null,"example.com/x":["c","b","a"]}},'
        '"Checksum":2768396019}',
    ),
    "nil": (
        Checkpoint(None, None),
        '{"Data":{"PodDeviceEntries":null,"RegisteredDevices":null},"Checksum":1944006890}',
    ),
    "empty": (Checkpoint([], {}), '{"Data":{"PodDeviceEntries":[],"RegisteredDevices":{}},"Checksum":2932075448}'),
}
TEXT = st.text(max_size=5)
IDS = st.none() | st.lists(TEXT, max_size=3)


@pytest.mark.parametrize("name", SAMPLES)
def test_bytes(name: str) -> None:
    """A checkpoint is written byte for byte as the kubelet writes it, checksum included."""
    checkpoint, text = SAMPLES[name]
    assert checkpoint.to_json().decode() == text


@pytest.mark.parametrize("name", SAMPLES)
def test_read(name: str) -> None:
    """A checkpoint that the kubelet wrote is read back as it was."""
    checkpoint, text = SAMPLES[name]
    assert Checkpoint.from_json(text) == checkpoint


def test_corrupt() -> None:
    """A checkpoint whose contents do not fit its checksum is refused."""
    document = json.loads(SAMPLES["one"][1])
    document["Data"]["RegisteredDevices"]["example.com/x"] = []
    with pytest.raises(CorruptCheckpointError):
        Checkpoint.from_json(json.dumps(document))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"Data":{}}', '{"Data":null,"Checksum":1}'])
def test_no_checkpoint(text: str) -> None:
    """A text that is not a checkpoint is refused with a ValueError."""
    with pytest.raises(ValueError):
        Checkpoint.from_json(text)


@given(
    st.none()
    | st.lists(
        st.builds(
            PodDevicesEntry,
            TEXT,
            TEXT,
            TEXT,
            st.none() | st.dictionaries(st.integers(-1, 12), IDS, max_size=3),
            st.none() | st.binary(max_size=5),
        ),
        max_size=3,
    ),
    st.none() | st.dictionaries(TEXT, IDS, max_size=3),
)
def test_round_trip(entries: list[PodDevicesEntry] | None, registered: dict[str, list[str] | None] | None) -> None:
    """Any checkpoint that the fake kubelet writes is read back unchanged."""
    checkpoint = Checkpoint(entries, registered)
    assert Checkpoint.from_json(checkpoint.to_json()) == checkpoint


def test_write_leaves_nothing_behind(tmp_path: Path) -> None:
    """Writing replaces the checkpoint and leaves no other file."""
    path = tmp_path / "checkpoint"
    for checkpoint, _ in SAMPLES.values():
        checkpoint.write(path)
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint"]
    assert Checkpoint.from_json(path.read_bytes()) == SAMPLES["empty"][0]
