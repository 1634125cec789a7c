"""How the AllocateResponse of a vendor's plugin becomes the CDI container edits for a claim."""

from __future__ import annotations

import pytest

from deviceplugin.adoption.answers import AnswerError, edits_of
from deviceplugin.device import DeviceNode, Mount
from deviceplugin.testing.foreign import AllocateAnswer
from deviceplugin.wire import deviceplugin_pb2 as pb


def test_an_answer_becomes_edits() -> None:
    """A response's variables, nodes, mounts and CDI names become edits; a node without permissions gets rwm."""
    answer = AllocateAnswer(
        env={"GADGETS": "{ids}", "EMPTY": ""},
        nodes=[("/dev/{id}", "/dev/inside-{id}", "r"), ("/dev/bare-{id}", "/dev/bare-{id}", "")],
        control=[("/dev/ctl", "/dev/ctl", "rwm")],
        mounts=[("/opt/{id}", "/opt/in-{id}")],
        cdi=["vendor.example/gadget={id}"],
        extra="f80105",
    )
    edits = edits_of(answer.message(["g0", "g1"]))
    assert dict(edits.env) == {"GADGETS": "g0,g1", "EMPTY": ""}
    assert edits.device_nodes == (
        DeviceNode("/dev/ctl", "/dev/ctl", "rwm"),
        DeviceNode("/dev/g0", "/dev/inside-g0", "r"),
        DeviceNode("/dev/bare-g0", "/dev/bare-g0", "rwm"),
        DeviceNode("/dev/g1", "/dev/inside-g1", "r"),
        DeviceNode("/dev/bare-g1", "/dev/bare-g1", "rwm"),
    )
    assert edits.mounts == (Mount("/opt/g0", "/opt/in-g0"), Mount("/opt/g1", "/opt/in-g1"))
    assert edits.cdi == ("vendor.example/gadget=g0", "vendor.example/gadget=g1")
    assert not edits.annotations


def test_of_duplicates_the_first_counts() -> None:
    """Of two nodes or mounts with one container path, or equal CDI names, the first counts, as with the kubelet."""
    answer = AllocateAnswer(
        nodes=[("/dev/{id}", "/dev/gadget", "r")], mounts=[("/opt/{id}", "/opt/lib")], cdi=["vendor.example/gadget=all"]
    )
    edits = edits_of(answer.message(["g1", "g0"]))
    assert edits.device_nodes == (DeviceNode("/dev/g1", "/dev/gadget", "r"),)
    assert edits.mounts == (Mount("/opt/g1", "/opt/lib"),)
    assert edits.cdi == ("vendor.example/gadget=all",)


def test_annotations_that_name_cdi_devices_are_cdi_devices() -> None:
    """Annotations with names of CDI devices become CDI devices, as in the runtime: split at commas, each once."""
    name = "vendor.example/gadget"
    answer = AllocateAnswer(annotations={"cdi.k8s.io/{random}": f"{name}=g0,{name}=g1"}, cdi=[f"{name}=g1"])
    assert edits_of(answer.message(["g1"])).cdi == (f"{name}=g1", f"{name}=g0")


def test_other_annotations_are_an_error_unless_the_config_drops_them() -> None:
    """An annotation without CDI devices is an error, which names it and the config key that drops annotations."""
    answer = AllocateAnswer(annotations={"vendor.example/x": "y", "com.example.fpga": "z"}).message(["g0"])
    with pytest.raises(AnswerError, match=r"annotation com.example.fpga, .*`drop_annotations` under `plugin`"):
        edits_of(answer)
    with pytest.raises(AnswerError, match=r"annotation vendor.example/x,"):
        edits_of(answer, ["com.*"])
    assert not edits_of(answer, ["com.*", "vendor.example/[xy]"])


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (b"\xff", "not for one container"),
        (b"", "not for one container"),
        (AllocateAnswer().message([]) * 2, "not for one container"),
        (
            AllocateAnswer(nodes=[("dev/x", "/dev/x", "rw")]).message(["g0"]),
            "host path must be an absolute path, not 'dev/x'",
        ),
        (AllocateAnswer(nodes=[("/dev/x", "/dev/x", "rx")]).message(["g0"]), "made of r, w and m, not 'rx'"),
        (AllocateAnswer(mounts=[("/x", "")]).message(["g0"]), "container path must be an absolute path, not ''"),
        (AllocateAnswer(env={"A=B": "c"}).message(["g0"]), "'A=B': a variable's name"),
        (AllocateAnswer(cdi=["all"]).message(["g0"]), "not 'all'"),
        (AllocateAnswer(annotations={"cdi.k8s.io/x": "a/b=c, a/b=d"}).message(["g0"]), "not ' a/b=d'"),
    ],
)
def test_what_no_container_can_get_is_an_error(answer: bytes, why: str) -> None:
    """A response that no container can get is an error that names the cause."""
    with pytest.raises(AnswerError, match=f"^the vendor's plugin's answer .*{why}"):
        edits_of(answer)


def test_an_empty_answer_gives_nothing() -> None:
    """An empty response gives no edits, and is no error."""
    response = pb.AllocateResponse(container_responses=[pb.ContainerAllocateResponse()])
    assert not edits_of(response.SerializeToString())
