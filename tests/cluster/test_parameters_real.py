"""The ValidatingAdmissionPolicy that checks opaque parameters of claims, on the real API server."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import pytest

from deviceplugin.config import Config, ResourceConfig
from dra_bridge.driver.claims import ClaimConfig, ClaimError, Opaque, decoded_config
from dra_bridge.manifests import Deployment, manifests
from dra_bridge.parameters import TAKES_NONE, expression
from tests.cluster.api import ApiError, Object
from tests.cluster.node import Cluster, ClusterError

RESOURCE, DRIVER = "example.net/tuned", "tuned.example.net"
PLAIN = "plain.example.net"
"""A driver without a config type, like all drivers of a config file."""


class Mode(enum.Enum):
    FAST = "fast"
    SLOW = "slow"


class Layer(msgspec.Struct, rename="camel"):
    layer_name: str
    weight: Annotated[float, msgspec.Meta(ge=0, lt=1)] = 0.5


class Tuning(msgspec.Struct, kw_only=True):
    watts: Annotated[int, msgspec.Meta(ge=10, le=300)] = 75
    mode: Mode = Mode.FAST
    level: Literal["low", 3] = "low"
    limits: dict[str, int] = {}
    layers: Annotated[list[Layer], msgspec.Meta(max_length=2)] = []
    name: Annotated[str, msgspec.Meta(min_length=1, pattern="^[a-z]+$")] = "x"
    on: bool = True
    best: Layer | None = None
    size: int | str = 1
    either: int | list[bool] = 1
    pair: tuple[int, str] = (1, "")
    needed: str
    anything: Any = None


GOOD: list[Object] = [
    {},
    {"apiVersion": "v1", "kind": "Tuning", "watts": 10, "mode": "slow", "level": 3, "on": False},
    {"limits": {"a": 1}, "layers": [{"layerName": "l"}, {"layerName": "m", "weight": 0}], "name": "z"},
    {"best": None, "size": "big", "either": [True], "pair": [1, "x"], "anything": {"a": [1, "b"]}},
    {"best": {"layerName": 'a "quoted" \\ $name', "weight": 0.25}, "size": 7},
]
BAD: list[tuple[Object, str]] = [
    ({"wats": 5}, "unknown field wats; there are watts, mode, "),
    ({"watts": "5"}, "watts: must be an integer"),
    ({"watts": 5}, "watts: must be at least 10"),
    ({"watts": 301}, "watts: must be at most 300"),
    ({"watts": 20.5}, "watts: must be an integer"),
    ({"watts": True}, "watts: must be an integer"),
    ({"watts": None}, "watts: must be an integer"),
    ({"mode": "medium"}, "mode: must be one of fast, slow"),
    ({"level": 4}, "level: must be one of low, 3"),
    ({"limits": {"a": "b"}}, "limits.*: must be an integer"),
    ({"limits": []}, "limits: must be an object"),
    ({"layers": [{"layerName": "l", "colour": "red"}]}, "unknown field layers[].colour; there are layerName, weight"),
    ({"layers": [{"weight": 0.1}]}, "layers[].layerName: is required"),
    ({"layers": [{"layerName": "l", "weight": 1}]}, "layers[].weight: must be below 1"),
    ({"layers": [{"layerName": "l"}] * 3}, "layers: must have at most 2 elements"),
    ({"layers": "l"}, "layers: must be a list"),
    ({"name": ""}, "name: must have at least 1 characters"),
    ({"on": "yes"}, "on: must be true or false"),
    ({"best": {"layerName": 5}}, "best.layerName: must be a string"),
    ({"best": []}, "best: must be an object"),
    ({"size": []}, "size: must be an integer; or size: must be a string"),
    ({"either": [1]}, "either: must be an integer; or either[]: must be true or false"),
    ({"pair": "x"}, "pair: must be a list"),
]


def config(*parameters: Object, driver: str = DRIVER) -> list[Object]:
    return [{"opaque": {"driver": driver, "parameters": one}} for one in parameters]


def claim(name: str, pieces: list[Object]) -> Object:
    devices = {"requests": [{"name": "one", "exactly": {"deviceClassName": DRIVER}}], "config": pieces}
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {"devices": devices},
    }


def template(name: str, pieces: list[Object]) -> Object:
    return {**claim(name, []), "kind": "ResourceClaimTemplate", "spec": {"spec": claim(name, pieces)["spec"]}}


def device_class(name: str, pieces: list[Object]) -> Object:
    kind = {"apiVersion": "resource.k8s.io/v1", "kind": "DeviceClass"}
    return {**kind, "metadata": {"name": name}, "spec": {"config": pieces}}


def refused(cluster: Cluster, body: Object) -> str:
    """Create an object by a dry run; return the policy's message if it is refused, else ""."""
    path = cluster.api.resource(body["kind"], body["apiVersion"]).path(namespace="default")
    try:
        cluster.api.request("POST", f"{path}?dryRun=All", body)
    except ApiError as error:
        if "ValidatingAdmissionPolicy" not in error.message:
            raise
        return error.message
    return ""


def refused_by_the_driver(parameters: Object) -> bool:
    """Return whether the driver refuses these parameters; the required field `needed` is added to them."""
    pieces = [ClaimConfig("FromClaim", opaque=Opaque(DRIVER, {"needed": "x", **parameters}))]
    try:
        decoded_config(Tuning, pieces, "one")
    except ClaimError:
        return True
    return False


def policy() -> list[Object]:
    """Return the policy that `manifests --check-parameters` prints, with its binding."""
    drivers = {DRIVER: RESOURCE, PLAIN: "example.net/plain"}
    served = tuple(ResourceConfig(name=name, driver=driver, devices=()) for driver, name in drivers.items())
    how = Deployment(name="checked", parameters={DRIVER: expression([Tuning]), PLAIN: expression([None])})
    return [
        one for one in manifests(Config(resources=served), "", how) if one["metadata"]["name"] == "checked-parameters"
    ]


@pytest.fixture
def checked(cluster: Cluster) -> Iterator[Cluster]:
    """A cluster in which the policy is in force. The claim `older`, with wrong parameters, is older than the policy."""
    if cluster.minor < 34:
        pytest.skip("the objects are written in resource.k8s.io/v1, of 1.34")
    wrong = claim("x", config({"wats": 1}))
    cluster.wait_for(lambda: not refused(cluster, wrong), 60, "the policy of a test before is not in force")
    cluster.api.apply(claim("older", config({"wats": 1})))
    objects = policy()
    assert len(objects) == 2
    cluster.api.apply(objects)
    cluster.wait_for(lambda: refused(cluster, wrong), 60, "the policy is in force")
    yield cluster
    for one in objects:
        cluster.api.delete(one["kind"], one["metadata"]["name"])


def test_the_policy_refuses_what_the_driver_refuses(checked: Cluster) -> None:
    """Policy and driver accept the same parameters; the policy's refusal of invalid parameters names the field."""
    assert {str(one): refused(checked, claim("x", config(one))) for one in GOOD} == {str(one): "" for one in GOOD}
    assert not [one for one in GOOD if refused_by_the_driver(one)]
    for parameters, problem in BAD:
        assert f"parameters of {DRIVER}: {problem}" in refused(checked, claim("x", config({}, parameters))), parameters
        assert refused_by_the_driver(parameters), parameters


def test_all_objects_with_parameters_are_checked(checked: Cluster) -> None:
    """The policy checks claims, claim templates and classes; parameters for a driver without a config type are refused.

    Parameters of other drivers are accepted.
    """
    for made in (claim, template, device_class):
        assert "unknown field wats" in refused(checked, made("x", config({"watts": 20}, {"wats": 1})))
        assert TAKES_NONE in refused(checked, made("x", config({}, driver=PLAIN)))
        assert refused(checked, made("x", config({"watts": 20}))) == ""
        assert refused(checked, made("x", config({"wats": 1}, driver="other.example.net"))) == ""
        assert refused(checked, made("x", [])) == ""
    # The policy also checks the change of an existing class.
    checked.api.apply(device_class("changed.example.net", config({"watts": 20})))
    with pytest.raises(ApiError, match="watts: must be an integer"):
        checked.api.apply(device_class("changed.example.net", config({"watts": "20"})))
    checked.api.delete("DeviceClass", "changed.example.net")


def test_kubectl_apply_names_the_field(checked: Cluster, tmp_path: Path) -> None:
    """The error of `kubectl apply` names the driver and the wrong field."""
    file = tmp_path / "claim.json"
    file.write_bytes(msgspec.json.encode(claim("mine", config({"wats": 5}))))
    with pytest.raises(ClusterError, match=rf"parameters of {DRIVER}: unknown field wats; there are watts") as error:
        checked.kubectl("apply", "-f", str(file))
    print(error.value)


def test_what_was_there_before_the_policy_can_be_changed(checked: Cluster) -> None:
    """A claim with wrong parameters that is older than the policy can be labelled, lose a finalizer and be deleted."""
    checked.api.patch("ResourceClaim", "older", {"metadata": {"labels": {"a": "b"}, "finalizers": ["example.net/x"]}})
    checked.api.delete("ResourceClaim", "older")
    checked.api.patch("ResourceClaim", "older", {"metadata": {"finalizers": None}})
    checked.wait_for(lambda: not checked.api.list("ResourceClaim", "default"), 30, "the claim has gone")


def test_the_api_server_finds_no_fault_in_the_policy(checked: Cluster) -> None:
    """The API server's type check of the policy has no warnings."""

    def judged() -> Object:
        return dict(checked.api.get("ValidatingAdmissionPolicy", "checked-parameters").get("status", {}))

    checked.wait_for(lambda: "observedGeneration" in judged(), 60, "the policy's types are checked")
    assert "expressionWarnings" not in judged().get("typeChecking", {}), judged()
