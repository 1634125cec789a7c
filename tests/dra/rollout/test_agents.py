"""Requests for the status of agents, through the proxy of the API server, and the reasons for missing answers."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

import pytest

from deviceplugin.device import Device, Health
from deviceplugin.inventory import merged
from deviceplugin.kubelet.podresources import PodContainer
from deviceplugin.kubelet.status import VendorConnection, Withheld
from deviceplugin.metrics import page
from deviceplugin.metrics.report import ClaimedDevice, DeviceLocation, ProviderReport
from deviceplugin.register.records import State
from dra_bridge.kube import Cluster
from dra_bridge.rollout import agents, fleet
from dra_bridge.rollout.adoption import AgentPod, in_use
from dra_bridge.rollout.agents import Answers, DeviceNow, ask_agents
from dra_bridge.rollout.fleet import NodeView, ReportedDevice
from dra_bridge.testing.apiserver import FakeApiServer, Fault
from tests.dra.rollout.nodes import agent_pod, binding
from tests.metrics.views import RESOURCE, Still, resource

READY: dict[str, Any] = {"readinessProbe": {"httpGet": {"path": "/readyz", "port": "metrics"}}}

NO_POD = "no pod with the label app.kubernetes.io/managed-by=dra-bridge in namespace dra-bridge runs there"


def status(still: Still) -> dict[str, Any]:
    """Return the answer of an agent to `/status`."""
    found = json.loads(page.status(still.observer().view()))
    assert isinstance(found, dict)
    return found


async def asked(server: FakeApiServer, *nodes: str, namespace: str = "") -> Answers:
    async with Cluster.from_server(server.url) as cluster:
        return await ask_agents(cluster, nodes, namespace)


async def answers_of(server: FakeApiServer, still: Still | dict[str, Any], **pod: Any) -> Answers:
    """Return what is read of an agent on node n1 with this state or this answer to `/status`. pod: see `agent_pod`."""
    server.create(agent_pod("n1", **pod))
    answer = status(still) if isinstance(still, Still) else still
    server.proxied = lambda path: (200, answer)
    server.forget_log()
    return await asked(server, "n1")


async def test_holders_and_health_of_now(server: FakeApiServer) -> None:
    """The holder and health of each device come from its agent's answer to the request; no object is written."""
    held = {
        "a": [PodContainer("ml", "train", "main"), PodContainer("ml", "train", "side")],
        "b": [PodContainer("", "", "", "1234")],
    }
    one = resource("a", Device("b").with_health(Health.UNHEALTHY, "too hot"), "c", "d", held=held)
    object.__setattr__(one, "snapshot", merged(one.snapshot, [one.snapshot.devices[name] for name in "abc"]))
    object.__setattr__(one, "withheld", {"a": Withheld("unknown", "not known")})
    answers = await answers_of(server, Still(one), **READY)
    assert answers.devices == {
        ("n1", RESOURCE, "a"): DeviceNow("healthy", holder="pod ml/train", withheld="not known", state="plugin"),
        ("n1", RESOURCE, "b"): DeviceNow("unhealthy", "too hot", holder="pod 1234", state="plugin"),
        ("n1", RESOURCE, "c"): DeviceNow("healthy", holder="", state="plugin"),
        ("n1", RESOURCE, "d"): DeviceNow(
            "unhealthy", answers.devices["n1", RESOURCE, "d"].message, True, "", state="plugin"
        ),
    }
    assert answers.reasons == {}
    assert not server.writes
    paths = [one.path for one in server.log if "/proxy/" in one.path]
    assert paths == ["/api/v1/namespaces/dra-bridge/pods/agent-n1:9410/proxy/status"]


async def test_problems_of_the_agent_itself(server: FakeApiServer) -> None:
    """An agent's answer has the reasons why the agent is not ready, and its other problems, beside its devices."""
    one = resource("a")
    object.__setattr__(one, "registered", False)
    still = Still(one)
    still.config_error = "the config file is refused, nothing is changed: x"
    answers = await answers_of(server, still)
    unready = f"it is not ready: {RESOURCE}: not registered with the kubelet"
    assert answers.problems == {"n1": (unready, "the config file is refused, nothing is changed: x")}
    assert ("n1", RESOURCE, "a") in answers.devices


@pytest.mark.parametrize("connected", [True, False])
async def test_adopted_resources(server: FakeApiServer, connected: bool) -> None:
    """An agent's answer has the adopted resources; a vendor plugin that is not connected is a problem of the agent."""
    own, theirs = resource("a"), resource("b", name="v/x", vendor=VendorConnection(connected=connected, since=60.0))
    answers = await answers_of(server, Still(own, theirs))
    assert answers.adopted == {("n1", "v/x"): connected}
    problem = "v/x: the vendor's plugin is not registered with the agent since 1970-01-01T00:01:00Z"
    assert answers.problems == ({} if connected else {"n1": (problem,)})


class Reporting:
    """A part of an agent, as the DRA bridge is one, that adds this report to the agent's status."""

    name = "bridge"

    def __init__(self, found: ProviderReport) -> None:
        self._found = found

    def report(self) -> ProviderReport:
        return self._found


async def test_claims_of_a_plugin_that_is_away(server: FakeApiServer) -> None:
    """If the vendor's plugin is not connected, the agent lists no devices; the holders come from the agent's ledger."""
    still = Still(resource(name="v/x", vendor=VendorConnection(connected=False, since=60.0)))
    places = {("v/x", name): DeviceLocation(State.DRA) for name in ("g0", "g1")}
    claims = [ClaimedDevice("v/x", "g0", "ml", "c")]
    still.providers.append(Reporting(ProviderReport(claims=claims, locations=places)))
    answers = await answers_of(server, still)
    assert not answers.devices
    assert {key: (device.state, device.claims) for key, device in answers.unlisted.items()} == {
        ("n1", "v/x", "g0"): ("dra", ("ml/c",)),
        ("n1", "v/x", "g1"): ("dra", ()),
    }
    agent = AgentPod("n1", "/a", mounted=True, ready=True, plugins="/p", registry="/r", claims=True)
    assert in_use(answers, [agent], {"n1"}) == [
        "claims have devices of v/x: ml/c; end their pods first",
        "devices of v/x are for claims on n1; bring them back first: dra-bridge rollout --share none",
    ]


async def test_what_moves_wait_for_now(server: FakeApiServer) -> None:
    """The reason of a wait in an agent's answer replaces the one in the slice, if the device's state is the same."""
    device = {"id": "a", "health": "healthy", "state": "to-dra", "waits": "pod default/train-0"}
    said = {"holdersKnown": True, "resources": [{"resource": RESOURCE, "devices": [device]}]}
    answers = await answers_of(server, said)
    stale = "ListAndWatch to show it Unhealthy"
    for state, waits in ((State.TO_DRA, "pod default/train-0"), (State.TO_PLUGIN, stale)):
        view = NodeView("n1", "d", devices=(ReportedDevice(state, 1, "", stale, resource=RESOURCE, name="a"),))
        assert fleet.with_answers(view, answers).devices[0].waits == waits


async def test_pages_with_tls(server: FakeApiServer) -> None:
    """If the agent's probes use HTTPS, the proxy request uses HTTPS too."""
    secured = {"port": 9999, "readinessProbe": {"httpGet": {"scheme": "HTTPS"}}}
    assert ("n1", RESOURCE, "a") in (await answers_of(server, Still(resource("a")), **secured)).devices
    assert server.requests("GET", "/pods/https:agent-n1:9999/proxy/status")


async def test_agent_without_a_checkpoint(server: FakeApiServer) -> None:
    """Without a recent checkpoint the holder of a device is unknown with a reason, and its health is known."""
    still = Still(resource("a"))
    still.scanned_at = None
    answers = await answers_of(server, still)
    assert answers.devices == {("n1", RESOURCE, "a"): DeviceNow("healthy", holder=None, state="plugin")}
    assert answers.reasons == {"n1": "its agent has not read the kubelet's checkpoint lately"}


def forbidden(path: str) -> tuple[int, dict[str, Any]]:
    return 403, {"kind": "Status", "code": 403, "reason": "Forbidden", "message": "you may not get pods/proxy"}


@pytest.mark.parametrize(
    ("proxied", "reason"),
    [
        (
            forbidden,
            "this needs the right to get pods/proxy in namespace dra-bridge, which a Role of `manifests` gives",
        ),
        (lambda path: (403, "a client certificate is needed\n"), "its agent refuses: a client certificate is needed"),
        (lambda path: (401, "a token is needed\n"), "its page asks for a token, which the proxy cannot pass on"),
        (lambda path: (503, "connection refused"), "connection refused"),
        (lambda path: (200, "hello"), "its answer is not an agent's status: "),
        (lambda path: (200, {"resources": 5}), "its answer is not an agent's status: "),
    ],
)
async def test_pages_that_are_refused(
    server: FakeApiServer, proxied: Callable[[str], tuple[int, Any]], reason: str
) -> None:
    """A refused request is reported with its reason, is sent once per agent, and is no outage of the API server."""
    server.create(agent_pod("n1"))
    server.proxied = proxied
    async with Cluster.from_server(server.url) as cluster:
        answers = await ask_agents(cluster, ["n1"])
        assert cluster.statistics.lost_since is None
    assert not answers.devices
    assert answers.reasons["n1"].startswith(reason)
    assert len(server.requests("GET", "/proxy/")) == 1


async def test_nodes_without_a_page(server: FakeApiServer) -> None:
    """An agent without a metrics port is not asked; on a node without an agent pod, the node's port 9410 is asked."""
    server.create(agent_pod("n1", None))
    leaving = agent_pod("n2")
    leaving["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    server.create(leaving)
    server.proxied = lambda path: (503, "connection refused")
    answers = await asked(server, "n1", "n2")
    assert answers.reasons == {
        "n1": "its pod has no port named metrics: its agent has no --metrics-address",
        "n2": f"{NO_POD}, and no agent answers at port 9410 of the node (connection refused)",
    }
    assert {one.path for one in server.requests("GET", "/proxy/")} == {
        "/api/v1/nodes/n2:9410/proxy/status",
        "/api/v1/nodes/https:n2:9410/proxy/status",
    }


@pytest.mark.parametrize("scheme", ["", "https:"])
async def test_an_agent_that_is_no_pod(server: FakeApiServer, scheme: str) -> None:
    """Without an agent pod, the node is asked at port 9410, with and without TLS."""
    there = f"/nodes/{scheme}n1:9410/proxy/status"
    answer = status(Still(resource("a")))
    server.proxied = lambda path: (200, answer) if path.endswith(there) else (503, "malformed HTTP response")
    answers = await asked(server, "n1")
    assert answers.devices == {("n1", RESOURCE, "a"): DeviceNow("healthy", holder="", state="plugin")}
    assert not answers.reasons


async def test_who_may_not_ask_nodes(server: FakeApiServer) -> None:
    """Without the right to get nodes/proxy, the missing right is reported after one request."""
    server.proxied = forbidden
    why = "an agent that is no pod is asked at port 9410 of its node: this needs the right to get nodes/proxy"
    assert (await asked(server, "n1")).reasons == {"n1": f"{NO_POD}; {why}"}
    assert len(server.requests("GET", "/proxy/")) == 1


async def test_an_agent_without_slices_says_so(server: FakeApiServer) -> None:
    """With `others`, the problems of agents on nodes without slices are reported too."""
    for name in ("n1", "n2"):
        server.create(agent_pod(name))
    gone = {"unready": ["slices of driver d are not published"], "holdersKnown": True, "resources": []}
    server.proxied = lambda path: (200, gone if "agent-n2" in path else status(Still(resource("a"))))
    async with Cluster.from_server(server.url) as cluster:
        answers = await ask_agents(cluster, {"n1"}, others=True)
        assert (await ask_agents(cluster, {"n1"})).problems == {}
    assert fleet.problems(answers) == ["the agent of n2: it is not ready: slices of driver d are not published"]


async def test_pods_of_others_are_not_asked(server: FakeApiServer) -> None:
    """Only pods in the namespaces of the bindings, or in the named one, are asked: other pods could forge answers."""
    forged = agent_pod("n1")
    forged["metadata"]["namespace"] = "team"
    server.create(forged)
    server.proxied = lambda path: (200, status(Still(resource("a")))) if "/pods/" in path else forbidden(path)
    assert (await asked(server, "n1")).reasons["n1"].startswith(NO_POD)
    server.create(binding("two", "gpus"))
    server.create(binding("three", "dra-bridge"))
    more = NO_POD.replace("namespace dra-bridge", "namespaces dra-bridge, gpus")
    assert (await asked(server, "n1")).reasons["n1"].startswith(more)
    assert not server.requests("GET", "/pods/")
    assert ("n1", RESOURCE, "a") in (await asked(server, "n1", namespace="team")).devices
    assert all("/namespaces/" in one.path for one in server.requests("GET", "/pods"))


async def test_the_namespace_of_agents_is_not_known(server: FakeApiServer) -> None:
    """Without the right to list bindings, the binding dra-bridge is read; if that fails, the error asks for `-n`."""
    lists = Fault(code=403, message="you may not list bindings")
    server.fail(lambda request: request.path.endswith("/clusterrolebindings"), lists, times=2)
    assert ("n1", RESOURCE, "a") in (await answers_of(server, Still(resource("a")))).devices
    server.fail(lambda request: request.path.endswith("/clusterrolebindings/dra-bridge"), Fault(code=403, message="no"))
    assert (await asked(server, "n1")).reasons == {"n1": "no; name the namespace of the agents by -n"}
    server.delete("clusterrolebindings", "dra-bridge")
    why = "no ClusterRoleBinding with the label app.kubernetes.io/managed-by=dra-bridge names the namespace of the"
    assert (await asked(server, "n1")).reasons == {"n1": f"{why} agents; name it by -n"}


async def test_helm_puts_its_own_label_on_the_binding(server: FakeApiServer) -> None:
    """A binding named dra-bridge is found although Helm has replaced its managed-by label."""
    server.delete("clusterrolebindings", "dra-bridge")
    server.create(binding(label="Helm"))
    assert ("n1", RESOURCE, "a") in (await answers_of(server, Still(resource("a")))).devices


async def test_no_right_to_list_pods(server: FakeApiServer) -> None:
    """Without the right to list pods, the missing right is the reason why no node has an answer."""
    server.fail(lambda request: request.path.endswith("/pods"), Fault(code=403, message="no, you may not"))
    assert (await asked(server, "n1", "n2")).reasons == dict.fromkeys(
        ("n1", "n2"), "no, you may not; this needs the right to list pods"
    )


async def test_agents_are_asked_at_once_but_not_all(server: FakeApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most AT_ONCE agents are asked at the same time."""
    monkeypatch.setattr(agents, "AT_ONCE", 3)
    inside, most = 0, 0
    together = threading.Barrier(3)
    lock = threading.Lock()

    def proxied(path: str) -> tuple[int, Any]:
        nonlocal inside, most
        with lock:
            inside += 1
            most = max(most, inside)
        together.wait(30)
        with lock:
            inside -= 1
        return 200, status(Still(resource("a")))

    server.proxied = proxied
    monkeypatch.setattr(agents, "TIMEOUT", 30.0)
    nodes = [f"n{number}" for number in range(9)]
    for node in nodes:
        server.create(agent_pod(node))
    answers = await asked(server, *nodes)
    assert (len(answers.devices), answers.reasons) == (9, {})
    assert most == 3


async def test_agents_that_hang(server: FakeApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent without an answer is given up after TIMEOUT, and all agents together after TOTAL."""
    for node in ("n1", "n2"):
        server.create(agent_pod(node))
    server.proxied = lambda path: (200, status(Still(resource("a"))))
    monkeypatch.setattr(agents, "TIMEOUT", 0.2)
    server.fail(lambda request: "agent-n1:" in request.path, Fault(delay=60.0))
    answers = await asked(server, "n1", "n2")
    assert answers.devices.keys() <= {("n2", RESOURCE, "a")}
    assert answers.reasons["n1"] == "no answer within 0.2 s"
    monkeypatch.setattr(agents, "TIMEOUT", 60.0)
    monkeypatch.setattr(agents, "TOTAL", 0.2)
    server.fail(lambda request: "/proxy/" in request.path, Fault(delay=60.0), times=2)
    assert (await asked(server, "n1", "n2")).reasons == dict.fromkeys(
        ("n1", "n2"), "not all agents answered within 0.2 s"
    )
