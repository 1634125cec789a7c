"""What devices were when they were granted, as the kubelet keeps it in its checkpoint."""

from __future__ import annotations

import base64
import os
from pathlib import Path

import pytest

from deviceplugin.kubelet.granted import Granted, annotate, annotation, granted
from deviceplugin.wire import deviceplugin_pb2 as pb

R = "example.com/r"
A = Granted(frozenset({"char:240:1", "uuid:a"}))
B = Granted(frozenset({"char:240:2"}), shared=True)


def kept(response: pb.ContainerAllocateResponse) -> str:
    return base64.b64encode(response.SerializeToString()).decode()


def test_an_answer_tells_what_each_device_was() -> None:
    """Each id has its own tokens, and whether its holder shares the device; a device without tokens is not named."""
    response = pb.ContainerAllocateResponse(annotations={"other": "x"})
    annotate(response, R, {"a": A, "b": B, "c": Granted()}, "boot")
    assert [granted(kept(response), R, name, "boot") for name in "abc"] == [A, B, Granted(shared=True)]
    assert response.annotations["other"] == "x"


def test_a_container_with_two_resources_gets_two_annotations() -> None:
    """The kubelet merges the annotations of a container's resources; neither answer replaces the other's."""
    both = pb.ContainerAllocateResponse()
    for resource in (R, "example.com/other"):
        one = pb.ContainerAllocateResponse()
        annotate(one, resource, {"a": A}, "boot")
        assert both.annotations.keys().isdisjoint(one.annotations.keys())
        both.annotations.update(one.annotations)
    assert granted(kept(both), R, "a", "boot") == A


def test_a_device_without_tokens_gets_no_annotation() -> None:
    """There is nothing to say of it."""
    response = pb.ContainerAllocateResponse()
    annotate(response, R, {"a": Granted()}, "boot")
    assert not response.annotations


@pytest.mark.parametrize("value", [None, "{", "[]", '{"boot":"boot","devices":{"a":7},"shared":[]}', "another boot"])
def test_without_an_annotation_of_this_boot_the_nodes_tell(value: str | None) -> None:
    """The numbers of the answer's device nodes count; nobody knows whether their holder has them alone."""
    node = next(Path("/dev") / name for name in ("fuse", "tty", "ptmx") if (Path("/dev") / name).exists())
    response = pb.ContainerAllocateResponse(
        devices=[pb.DeviceSpec(host_path=str(one)) for one in (node, "/dev/null", "/dev/no-such", "/etc/hostname")]
    )
    if value == "another boot":
        annotate(response, R, {"a": A}, "before")
    elif value is not None:
        response.annotations[annotation(R)] = value
    number = os.stat(node).st_rdev
    tokens = frozenset({f"char:{os.major(number)}:{os.minor(number)}"})
    assert granted(kept(response), R, "a", "boot") == Granted(tokens, shared=True)


@pytest.mark.parametrize("response", ["", "AQL/", "%"])
def test_what_is_no_answer_tells_nothing(response: str) -> None:
    """It is no error either: other plugins' answers are theirs."""
    assert granted(response, R, "a", "boot") == Granted(shared=True)
