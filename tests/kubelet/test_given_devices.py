"""Which hardware an AllocateResponse gives: its device nodes, CDI devices, and UUIDs of NVIDIA devices."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from deviceplugin import cdi_specs
from deviceplugin.device import ContainerEdits, DeviceNode, Mount
from deviceplugin.kubelet.given_devices import GivenDevices
from deviceplugin.testing.foreign import AllocateAnswer
from deviceplugin.wire import deviceplugin_pb2 as pb

MOUNTS = "/var/run/nvidia-container-devices"
KIND = "vendor.example/gadget"
TTY, PTMX = "char:5:0", "char:5:2"


def node(**fields: Any) -> dict[str, Any]:
    return {"containerEdits": {"deviceNodes": [fields]}}


def spec(*devices: dict[str, Any], kind: str = KIND, **fields: Any) -> str:
    return json.dumps({"cdiVersion": "0.6.0", "kind": kind, "devices": devices, **fields})


def given(**answer: Any) -> GivenDevices:
    message = AllocateAnswer(**answer).message(["a", "b"])
    return GivenDevices.of(pb.AllocateResponse.FromString(message).container_responses)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ({"env": {"X": "GPU-1"}, "mounts": [("/GPU-1", "/opt")]}, GivenDevices()),
        ({"nodes": [("/dev/{id}", "/dev/x", "rw")]}, GivenDevices(nodes=("/dev/a", "/dev/b"))),
        ({"cdi": [KIND + "={id}"]}, GivenDevices(cdi=(f"{KIND}=a", f"{KIND}=b"))),
        (
            {"annotations": {"cdi.k8s.io/x": f"{KIND}=b,{KIND}=a", "y": "z/z=z"}},
            GivenDevices(cdi=(f"{KIND}=b", f"{KIND}=a")),
        ),
        ({"env": {"NVIDIA_VISIBLE_DEVICES": "GPU-1,MIG-2,all,3"}}, GivenDevices(uuids=("GPU-1", "MIG-2"))),
        (
            {"mounts": [("/dev/null", "/var/run/nvidia-container-devices/GPU-{id}")]},
            GivenDevices(uuids=("GPU-a", "GPU-b")),
        ),
    ],
)
def test_devices_of_an_answer(answer: dict[str, Any], expected: GivenDevices) -> None:
    """Devices are found in a response's nodes, CDI devices, CDI annotations, and NVIDIA's variable and mounts."""
    assert given(**answer) == expected


def test_devices_of_edits_are_those_of_the_answer() -> None:
    """The devices of container edits are found in their nodes, CDI devices, and NVIDIA's variable and mounts."""
    edits = ContainerEdits(
        {"NVIDIA_VISIBLE_DEVICES": "GPU-1"},
        [DeviceNode("/dev/a")],
        [Mount("/dev/null", f"{MOUNTS}/MIG-2")],
        cdi=[f"{KIND}=a"],
    )
    assert GivenDevices.in_edits(edits) == GivenDevices(("/dev/a",), (f"{KIND}=a",), ("GPU-1", "MIG-2"))


def test_tokens_of_devices(tmp_path: Path) -> None:
    """A CDI device's numbers are those in its spec, else those of its node on the host; else it has none."""
    (tmp_path / "any-name.json").write_text(
        spec(
            {"name": "a", **node(path="/dev/in", type="c", major=240, minor=1)},
            {"name": "b", **node(path="/dev/in", hostPath="/dev/tty")},
            {"name": "c", **node(path="/dev/tty", hostPath="/no/such/dev/tty")},
            {"name": "d", **node(path="/dev/no-such")},
            {"name": "e", "containerEdits": {"env": ["E=1"]}},
        )
    )
    expected = {"a": {"char:240:1"}, "b": {TTY}, "c": {TTY}, "d": set(), "e": set(), "f": set()}
    for name, tokens in expected.items():
        assert GivenDevices(cdi=(f"{KIND}={name}",)).tokens([str(tmp_path)]) == tokens, name
    both = GivenDevices(("/dev/ptmx",), (f"{KIND}=a", "other.example/x=b"), ("GPU-1",))
    assert both.tokens([str(tmp_path)]) == {PTMX, "char:240:1", "uuid:GPU-1"}


def test_all_directories_are_read(tmp_path: Path) -> None:
    """CDI specs in YAML and JSON are read from each directory; nodes of a whole spec belong to each of its devices."""
    for name in ("etc", "run"):
        (tmp_path / name).mkdir()
    (tmp_path / "etc" / "a.yaml").write_text(
        f"kind: {KIND}\ncontainerEdits: {{deviceNodes: [{{path: /dev/ptmx}}]}}\n"
        "devices: [{name: 0, containerEdits: {deviceNodes: [{path: /dev/tty}]}}]\n"
    )
    (tmp_path / "run" / "b.json").write_text(spec({"name": "1", **node(path="/x", type="b", major=7, minor=1)}))
    places = [str(tmp_path / "missing"), str(tmp_path / "etc"), str(tmp_path / "run")]
    assert cdi_specs.nodes_of([f"{KIND}=0"], places) == {TTY, PTMX}
    assert cdi_specs.nodes_of([f"{KIND}=1"], places) == {"block:7:1"}
    assert cdi_specs.names_of(KIND, places) == {"0", "1"}
    assert cdi_specs.names_of("vendor.example/other", places) == frozenset()


def test_a_changed_spec_is_read_again(tmp_path: Path) -> None:
    """A CDI spec that changes again at once, with the same size and inode, is read again."""
    file = tmp_path / "a.json"
    for minor in range(1, 9):
        file.write_text(spec({"name": "a", **node(path="/x", type="c", major=240, minor=minor)}))
        assert cdi_specs.nodes_of([f"{KIND}=a"], [str(tmp_path)]) == {f"char:240:{minor}"}


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"kind": "a/b", "devices": [1]}', '{"kind": "a/b", "devices": [{"name": "x"}, 7]}']
)
def test_a_damaged_spec_hides_no_other(tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture) -> None:
    """A file that is no CDI spec is named in the log; the other specs in its directory are read."""
    (tmp_path / "a.json").write_text(text)
    (tmp_path / "b.json").write_text(spec({"name": "a", **node(path="/dev/tty")}))
    assert cdi_specs.nodes_of([f"{KIND}=a"], [str(tmp_path)]) == {TTY}
    assert f"{tmp_path / 'a.json'} cannot be read as a CDI spec: " in caplog.text
