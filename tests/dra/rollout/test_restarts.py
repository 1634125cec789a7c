"""Which pods a restart of the kubelet would end, according to the objects in the API server."""

from __future__ import annotations

from typing import Any

import pytest

from deviceplugin.register.records import State
from dra_bridge.rollout.fleet import NodeView, ReportedDevice
from dra_bridge.rollout.progress import Progress, ResourceProgress
from dra_bridge.rollout.restarts import denied_pods, ended_by_restart, mixed
from tests.dra.objects import body

R, D, NODE = "example.com/gpu", "gpu.example.com", "n1"


def pod(name: str, at: int, count: int = 1, *, dra: bool = False, phase: str = "Running") -> dict[str, Any]:
    """Return a pod that was made at a second of a minute."""
    status: dict[str, Any] = {"phase": phase}
    if dra:
        mapping = {"containerName": "main", "requestName": "container-0-request-0", "resourceName": R}
        status["extendedResourceClaimStatus"] = {"requestMappings": [mapping], "resourceClaimName": f"{name}-x"}
    spec = {"nodeName": NODE, "containers": [{"name": "main", "resources": {"limits": {R: str(count)}}}]}
    return body("Pod", name, "ml", meta={"creationTimestamp": f"2026-01-01T10:00:{at:02d}Z"}, spec=spec, status=status)


@pytest.mark.parametrize(
    ("pods", "ended"),
    [
        ([pod("old", 1), pod("served", 2, dra=True)], ()),
        ([pod("served", 1, dra=True), pod("young", 2)], ("ml/young",)),
        ([pod("young", 2), pod("waited", 1, 3, dra=True)], ("ml/young",)),
        ([pod("over", 1, dra=True, phase="Succeeded"), pod("young", 2)], ()),
        ([pod("served", 1, dra=True), pod("other", 2, 0)], ()),
        ([], ()),
    ],
)
def test_pods_that_are_denied(pods: list[dict[str, Any]], ended: tuple[str, ...]) -> None:
    """The kubelet's order of pods decides which ones end; ended pods, and pods without the resource, do not count."""
    assert denied_pods(pods, R) == ended


def view(*states: State) -> NodeView:
    devices = tuple(
        ReportedDevice(state=state, since=0, resource=R, name=f"g{number}", holder="somebody", known=True)
        for number, state in enumerate(states)
    )
    return NodeView(NODE, D, reported=Progress({R: ResourceProgress("all", {})}), devices=devices)


def test_nodes_with_holders_on_both_sides() -> None:
    """Only nodes with held devices of both plugin and DRA are checked; a pod that an agent has named is left out."""
    # The pods are created within one second, so the kubelet may take either for the older one.
    pods = {"n1": [pod("served", 1, dra=True), pod("young", 2)]}
    assert mixed(view(State.DRA, State.DRA)) == []
    assert ended_by_restart([view(State.DRA, State.DRA)], {}) == []
    both = view(State.DRA, State.TO_DRA)
    assert mixed(both) == [R]
    (text,) = ended_by_restart([both], pods)
    assert text.startswith("n1: a kubelet restart would end ml/young (example.com/gpu): ")
    assert ended_by_restart([both], pods, ["n1: ends ml/young"]) == []
