"""The identity that a device had when it was granted; the kubelet's checkpoint has it in the AllocateResponse."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from deviceplugin.identity import UNIDENTIFIED, identified
from deviceplugin.kubelet.checkpoint import annotate, annotation, granted
from deviceplugin.register.question import Wanted
from deviceplugin.register.records import UNKNOWN, WHOLE, Amount
from deviceplugin.wire import deviceplugin_pb2 as pb

R = "example.com/r"
BOOT = "boot"
TAKES = (("gpu", "memory", "5"),)
SINCE = 1.5
A = Wanted((R, "a"), identified(frozenset({"char:240:1", "uuid:a"}), BOOT), WHOLE, SINCE, frozenset())
B = Wanted((R, "b"), identified(frozenset({"char:240:2"}), BOOT), Amount("1/2", TAKES), SINCE, frozenset())
C = Wanted((R, "c"), UNIDENTIFIED, WHOLE, SINCE, frozenset())
NOTHING = Wanted((R, ""), UNIDENTIFIED, UNKNOWN)


THREADS = """
import base64, importlib, sys, threading
from deviceplugin.register import claim_files
from deviceplugin.kubelet import checkpoint
from deviceplugin.wire import deviceplugin_pb2 as pb

sys.setswitchinterval(1e-6)
text = '{"boot": "b", "devices": {"a": {"device": "a"}}}'
answer = pb.ContainerAllocateResponse(annotations={checkpoint.annotation("r"): text}).SerializeToString()


def decode():
    barrier.wait()
    checkpoint.granted(base64.b64encode(answer).decode(), "r", "a", "b")
    claim_files.decode(b'{"driver": "d", "uid": "u"}', "d", "u")


for _ in range(200):
    importlib.reload(claim_files)
    importlib.reload(checkpoint)
    barrier = threading.Barrier(6)
    threads = [threading.Thread(target=decode) for _ in range(6)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
"""
"""A program in which several threads decode an AllocateResponse for the first time, repeatedly."""


def kept(response: pb.ContainerAllocateResponse) -> str:
    return base64.b64encode(response.SerializeToString()).decode()


def test_an_answer_tells_what_each_device_was() -> None:
    """An AllocateResponse tells the agent for each id the device, the amount, and the identity, which may be empty."""
    response = pb.ContainerAllocateResponse(annotations={"other": "x"})
    annotate(response, R, {"a": A, "b::1": B, "c": C}, BOOT, SINCE)
    assert [granted(kept(response), R, name, BOOT) for name in ("a", "b::1", "c")] == [A, B, C]
    assert granted(kept(response), R, "d", BOOT) == NOTHING
    assert response.annotations["other"] == "x"


def test_a_container_with_two_resources_gets_two_annotations() -> None:
    """The responses of two resources have different annotations, since the kubelet merges those of a container."""
    both = pb.ContainerAllocateResponse()
    for resource in (R, "example.com/other"):
        one = pb.ContainerAllocateResponse()
        annotate(one, resource, {"a": A}, BOOT, SINCE)
        assert both.annotations.keys().isdisjoint(one.annotations.keys())
        both.annotations.update(one.annotations)
    assert granted(kept(both), R, "a", BOOT) == A


@pytest.mark.parametrize("value", [None, "{", "[]", '{"boot":"boot","devices":{"a":7}}', "another boot"])
def test_without_an_annotation_of_this_boot_the_nodes_tell(value: str | None) -> None:
    """Without an annotation of this boot, the numbers of the response's device nodes identify the device."""
    node = next(Path("/dev") / name for name in ("fuse", "tty", "ptmx") if (Path("/dev") / name).exists())
    response = pb.ContainerAllocateResponse(
        devices=[pb.DeviceSpec(host_path=str(one)) for one in (node, "/dev/null", "/dev/no-such", "/etc/hostname")]
    )
    if value == "another boot":
        annotate(response, R, {"a": A}, "before", SINCE)
    elif value is not None:
        response.annotations[annotation(R)] = value
    number = os.stat(node).st_rdev
    tokens = identified(frozenset({f"char:{os.major(number)}:{os.minor(number)}"}), BOOT, sure=False)
    paths = frozenset({str(node), "/dev/null", "/dev/no-such", "/etc/hostname"})
    expected = (
        A._replace(identity=tokens, paths=paths) if value == "another boot" else NOTHING._replace(identity=tokens)
    )
    assert granted(kept(response), R, "a", BOOT) == expected


def test_without_an_annotation_cdi_devices_and_uuids_identify(tmp_path: Path) -> None:
    """In another plugin's response, CDI devices and UUIDs identify a device; without the CDI spec only UUIDs do."""
    spec = tmp_path / "vendor.json"
    node = {"path": "/dev/x", "type": "c", "major": 240, "minor": 7}
    spec.write_text(
        json.dumps({"kind": "v.com/c", "devices": [{"name": "a", "containerEdits": {"deviceNodes": [node]}}]})
    )
    response = pb.ContainerAllocateResponse(
        envs={"NVIDIA_VISIBLE_DEVICES": "GPU-1"}, cdi_devices=[pb.CDIDevice(name="v.com/c=a")]
    )
    for device in ("char:240:7", None):
        tokens = frozenset({"uuid:GPU-1"} | ({device} if device else set()))
        wanted = granted(kept(response), R, "a", BOOT, lambda given: given.tokens([str(tmp_path)]))
        assert wanted == NOTHING._replace(identity=identified(tokens, BOOT, sure=False))
        spec.unlink(missing_ok=True)


@pytest.mark.parametrize("response", ["", "AQL/", "%"])
def test_what_is_no_answer_tells_nothing(response: str) -> None:
    """Data that is no AllocateResponse gives no identity and no error, since it may be another plugin's."""
    assert granted(response, R, "a", BOOT) == NOTHING


def test_several_threads_decode_for_the_first_time() -> None:
    """Several threads may decode an AllocateResponse for the first time at once: a decoder is made beforehand.

    Without this decoder msgspec 0.22 crashes if several threads prepare a type at once. The event loop, scans,
    registrations and metrics all read the checkpoint.
    """
    done = subprocess.run([sys.executable, "-c", THREADS], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
