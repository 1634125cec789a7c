"""Reads the state of devices from each agent's `/status`, through the API server's proxy of pods and nodes.

The report in an agent's Lease is not enough, because the agent adds holders to the report only after a delay, and the
report has no health. The API server could not handle a write of the Lease for each change of holders or health on many
nodes.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import msgspec

from deviceplugin.device import natural
from dra_bridge.kube import (
    CLUSTER_ROLE_BINDINGS,
    NAMESPACE,
    PODS,
    ApiError,
    Cluster,
    ClusterError,
    ForbiddenError,
    NotFoundError,
    Object,
)

LABEL: Final = "app.kubernetes.io/managed-by=dra-bridge"
"""The label of all objects that `dra-bridge manifests` makes, and of the agents' pods. The label proves nothing about a
pod, because every user who may create pods can set it."""
BINDING: Final = "dra-bridge"
"""The default name of the ClusterRoleBinding that `dra-bridge manifests` makes for the agents' ServiceAccount."""
PORT: Final = "metrics"
"""The name that `dra-bridge manifests` gives to the container port at which an agent serves `/status`."""
NODE_PORT: Final = 9410
"""The port of `/status` of an agent that runs outside of pods, as `dra-bridge manifests --systemd` sets it."""
TIMEOUT: Final = 3.0  # Seconds within which an agent must respond.
TOTAL: Final = 15.0  # Maximum seconds for the requests to all agents together.
AT_ONCE: Final = 16  # Maximum number of simultaneous requests to agents.
_RIGHT: Final = (
    f"an agent that is no pod is asked at port {NODE_PORT} of its node: this needs the right to get nodes/proxy"
)
_SILENT: Final = f", and no agent answers at port {NODE_PORT} of the node"


class _ReportedHolder(msgspec.Struct):
    side: str
    namespace: str = ""
    pod: str = ""
    claim: str = ""
    uid: str = ""

    @property
    def text(self) -> str:
        if self.side == "dra":
            return f"claim {self.namespace}/{self.claim}"
        return f"pod {self.namespace}/{self.pod}" if self.pod else f"pod {self.uid}" if self.uid else "a pod"


class _DeviceStatus(msgspec.Struct):
    """A device in `/status`. For a device that no device source lists, only id, state and holders are given."""

    id: str
    health: str = ""
    message: str = ""
    gone: bool = False
    withheld: str = ""
    state: str = ""
    waits: str = ""
    holders: list[_ReportedHolder] = []


class _Vendor(msgspec.Struct):
    connected: bool


class _Resource(msgspec.Struct):
    resource: str
    devices: list[_DeviceStatus]
    unlisted: list[_DeviceStatus] = []
    vendor: _Vendor | None = None


class _AgentStatus(msgspec.Struct):
    """The fields of an agent's `/status` that this module reads (`deviceplugin.metrics.page`)."""

    resources: list[_Resource]
    holders_known: bool = msgspec.field(name="holdersKnown")
    unready: list[str] = []
    problems: list[str] = []


_DECODER: Final = msgspec.json.Decoder(_AgentStatus)


class DeviceNow(msgspec.Struct, frozen=True):
    """One device in the `/status` of its agent.

    holder: the device's holders as text; "" if the device has no holder, None if its holder is unknown. withheld: why
    the agent offers the device to no pod or claim, "" if it offers the device. state: the device's state in the agent's
    register. waits: the event for which the device's move between plugin and DRA waits. pods: names of the pods that
    use claims of the device. claims: namespace/name of the claims that have the device.
    """

    health: str
    message: str = ""
    gone: bool = False
    holder: str | None = None
    pods: tuple[str, ...] = ()
    withheld: str = ""
    state: str = ""
    waits: str = ""
    claims: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Answers:
    """The content of the agents' responses.

    devices: for each (node, resource, device id), the agent's data on the device. unlisted: the same for devices in an
    agent's register that no device source lists. reasons: for each node, why facts about its devices are missing.
    problems: for each node, problems of the agent itself, such as a reason why it is not ready, or a config file that
    it has refused. adopted: for each (node, resource) of an adopted vendor's plugin, whether this plugin is connected
    to the agent.
    """

    devices: Mapping[tuple[str, str, str], DeviceNow] = field(default_factory=dict)
    reasons: Mapping[str, str] = field(default_factory=dict)
    problems: Mapping[str, Sequence[str]] = field(default_factory=dict)
    adopted: Mapping[tuple[str, str], bool] = field(default_factory=dict)
    unlisted: Mapping[tuple[str, str, str], DeviceNow] = field(default_factory=dict)


async def namespaces_of_agents(cluster: Cluster) -> list[str]:
    """Return the namespaces of the agents' ServiceAccounts. Raises ClusterError.

    The ServiceAccounts are found by the ClusterRoleBindings that `dra-bridge manifests` makes. Only a user who may bind
    roles in the whole cluster can add such a ClusterRoleBinding. The ClusterRoleBinding `BINDING` is read if no
    ClusterRoleBinding has the label `LABEL` (Helm replaces the label by its own label), or if the user may not list
    ClusterRoleBindings (operators may read only this one).
    """
    bindings: Sequence[Object] = ()
    with contextlib.suppress(ForbiddenError):
        bindings = (await cluster.list(CLUSTER_ROLE_BINDINGS, label_selector=LABEL)).items
    if not bindings:
        with contextlib.suppress(NotFoundError):
            bindings = [await cluster.get(CLUSTER_ROLE_BINDINGS, BINDING)]
    subjects = [subject for binding in bindings for subject in binding.get("subjects") or ()]
    return sorted(
        {subject.get("namespace", "") for subject in subjects if subject.get("kind") == "ServiceAccount"} - {""}
    )


async def lease_namespaces(cluster: Cluster, namespace: str = "") -> list[str]:
    """Return the namespaces with the Leases of agents. Raises ClusterError.

    namespace: the namespace that the user has named, or "". If neither the user nor a ClusterRoleBinding names a
    namespace, the result is `NAMESPACE`, the namespace of agents outside of pods.
    """
    if namespace:
        return [namespace]
    try:
        return await namespaces_of_agents(cluster) or [NAMESPACE]
    except ForbiddenError:
        return [NAMESPACE]


async def running_agents(cluster: Cluster, namespaces: Sequence[str], node: str = "") -> Sequence[Object]:
    """Return the running pods of agents in these namespaces. Raises ClusterError.

    node: the node that runs the pods; "" for all nodes.
    """
    selector = "status.phase=Running" + (f",spec.nodeName={node}" if node else "")
    pods = [
        pod
        for namespace in namespaces
        for pod in (await cluster.list(PODS, namespace, field_selector=selector, label_selector=LABEL)).items
    ]
    return [pod for pod in pods if "deletionTimestamp" not in pod["metadata"]]


async def ask_agents(cluster: Cluster, nodes: Collection[str], namespace: str = "", *, others: bool = False) -> Answers:
    """Ask the agents of these nodes for their devices, and return the responses.

    `Answers.reasons` states why facts are missing. Raises ClusterError. namespace: the agents' namespace; "" for the
    namespaces that the agents' ClusterRoleBindings name. others: whether to ask the agents of all other nodes as well.
    """
    if not (nodes or others):
        return Answers()
    why = f"no ClusterRoleBinding with the label {LABEL} names the namespace of the agents; name it by -n"
    try:
        namespaces = [namespace] if namespace else await namespaces_of_agents(cluster)
    except ClusterError as error:
        message = error.message if isinstance(error, ApiError) else str(error)
        namespaces, why = [], f"{message}; name the namespace of the agents by -n"
    if not namespaces:
        return Answers(reasons=dict.fromkeys(nodes, why))
    try:
        pods = await running_agents(cluster, namespaces, *(nodes if len(nodes) == 1 and not others else ()))
    except ForbiddenError as error:
        return Answers(reasons=dict.fromkeys(nodes, f"{error.message}; this needs the right to list pods"))
    turns = _Turns(asyncio.Semaphore(AT_ONCE), asyncio.get_running_loop().time() + TOTAL)
    asked = [(pod, node) for pod in pods if (node := pod["spec"].get("nodeName", "")) in nodes or (others and node)]
    where = f"in namespace{'s' if len(namespaces) > 1 else ''} {', '.join(namespaces)}"
    absent = f"no pod with the label {LABEL} {where} runs there"
    # On a node without an agent's pod, an agent may run outside of pods, so ask these nodes as well.
    units = sorted(set(nodes) - {node for _, node in asked}, key=natural)
    of_pods, of_units = await asyncio.gather(
        asyncio.gather(*(_ask(cluster, pod, turns) for pod, _ in asked)), _ask_units(cluster, units, turns)
    )
    answered = [(node, answer) for (_, node), answer in zip(asked, of_pods, strict=True)]
    answered += [(node, absent + answer if isinstance(answer, str) else answer) for node, answer in of_units.items()]
    reasons: dict[str, str] = {}
    devices: dict[tuple[str, str, str], DeviceNow] = {}
    problems: dict[str, tuple[str, ...]] = {}
    adopted: dict[tuple[str, str], bool] = {}
    unlisted: dict[tuple[str, str, str], DeviceNow] = {}
    for node, answer in answered:
        if isinstance(answer, str):
            reasons[node] = answer
            continue
        if not answer.holders_known:
            reasons[node] = "its agent has not read the kubelet's checkpoint lately"
        if problem_texts := (*(f"it is not ready: {reason}" for reason in answer.unready), *answer.problems):
            problems[node] = problem_texts
        for resource in answer.resources:
            if resource.vendor is not None:
                adopted[node, resource.resource] = resource.vendor.connected
            for there, listed in ((devices, resource.devices), (unlisted, resource.unlisted)):
                for device in listed:
                    there[node, resource.resource, device.id] = _now(device, known=answer.holders_known)
    return Answers(devices, reasons, problems, adopted, unlisted)


async def _ask(cluster: Cluster, pod: Object, turns: _Turns) -> _AgentStatus | str:
    """Ask the agent in a pod. Return the agent's status, or the reason why there is no status."""
    namespace, name = pod["metadata"]["namespace"], pod["metadata"]["name"]
    pages = [(port, container) for container in pod["spec"]["containers"] for port in container.get("ports") or ()]
    page = next(((port, container) for port, container in pages if port.get("name") == PORT), None)
    if page is None:
        return f"its pod has no port named {PORT}: its agent has no --metrics-address"
    port, container = page
    tls = ((container.get("readinessProbe") or {}).get("httpGet") or {}).get("scheme") == "HTTPS"
    asking = cluster.ask_pod(namespace, name, port["containerPort"], "/status", tls=tls, timeout=TIMEOUT)
    right = f"this needs the right to get pods/proxy in namespace {namespace}, which a Role of `manifests` gives"
    answer = await _answer(asking, turns, right)
    return answer.reason if isinstance(answer, _NoAnswer) else answer


async def _ask_units(cluster: Cluster, nodes: Sequence[str], turns: _Turns) -> dict[str, _AgentStatus | str]:
    """Ask the agents outside of pods on these nodes; return each agent's status, or the reason why there is none.

    The function assumes that either all such agents use TLS, or none. First, at most AT_ONCE of the nodes are asked
    without TLS, and if this fails, with TLS. The other nodes are then asked only in the way (with or without TLS) in
    which one of the first nodes responded. If no node responded, the other nodes are not asked, so that a cluster
    without such agents gets only few requests.
    """
    first = nodes[:: -(-len(nodes) // AT_ONCE) or 1]
    others = sorted(set(nodes) - set(first), key=natural)
    answers = await asyncio.gather(*(_ask_unit(cluster, node, _SCHEMES, turns) for node in first))
    if schemes := [scheme for scheme in _SCHEMES if any(answer.scheme == scheme for answer in answers)]:
        answers += await asyncio.gather(*(_ask_unit(cluster, node, schemes, turns) for node in others))
    else:
        refused = all(answer.refused for answer in answers)
        why = f"; {_RIGHT}" if refused else f"{_SILENT}, nor of {len(first)} others; --node NAME asks there"
        answers += [_UnitAnswer(why)] * len(others)
    return {node: answer.told for node, answer in zip((*first, *others), answers, strict=True)}


_SCHEMES: Final = ("", "https:")
"""Prefixes of a node's name in nodes/proxy requests. With the first prefix, the API server connects to the node without
TLS, with the second by TLS."""


class _UnitAnswer(NamedTuple):
    """The result of a request to an agent outside of pods.

    told: the agent's status; without a status, the second half of a sentence for the user, whose first half states that
    no agent's pod runs on the node.

    scheme: the prefix in _SCHEMES with which the agent responded, or None. refused: whether the user lacks the right to
    ask nodes.
    """

    told: _AgentStatus | str
    scheme: str | None = None
    refused: bool = False


async def _ask_unit(cluster: Cluster, node: str, schemes: Sequence[str], turns: _Turns) -> _UnitAnswer:
    why = ""
    for scheme in schemes:
        asking = cluster.ask_node(f"{scheme}{node}:{NODE_PORT}", "/status", timeout=TIMEOUT)
        answer = await _answer(asking, turns, _RIGHT)
        if not isinstance(answer, _NoAnswer):
            return _UnitAnswer(answer, scheme)
        if answer.final:
            return _UnitAnswer(f"; {answer.reason}", None if answer.refused else scheme, answer.refused)
        why = why or answer.reason
    return _UnitAnswer(f"{_SILENT} ({why})")


class _Turns(NamedTuple):
    """Limits the number and the total time of requests to agents. one: a semaphore that each request acquires.

    until: the deadline of all requests (seconds of the event loop's clock).
    """

    one: asyncio.Semaphore
    until: float


class _NoAnswer(NamedTuple):
    """The reason why a request to an agent returned no status. refused: whether the API server refused the request.

    final: whether the request would fail both with TLS and without TLS.
    """

    reason: str
    final: bool = False
    refused: bool = False


async def _answer(asking: Coroutine[None, None, bytes], turns: _Turns, right: str) -> _AgentStatus | _NoAnswer:
    """Wait for the semaphore and for an agent's response; return the agent's status, or the reason why there is none.

    right: the reason to return if the user lacks the right to ask the agent (403).
    """
    try:
        async with asyncio.timeout_at(turns.until), turns.one:
            body = await asking
        return _DECODER.decode(body)
    except TimeoutError:
        return _NoAnswer(f"not all agents answered within {TOTAL:g} s", final=True)
    except msgspec.MsgspecError as error:
        return _NoAnswer(f"its answer is not an agent's status: {error}", final=True)
    except ForbiddenError as error:
        if error.reason != "Forbidden":  # The agent itself has refused the request.
            return _NoAnswer(f"its agent refuses: {error.message}", final=True)
        return _NoAnswer(right, final=True, refused=True)
    except ApiError as error:
        if error.code == 401:
            return _NoAnswer("its page asks for a token, which the proxy cannot pass on", final=True)
        return _NoAnswer(error.message)
    finally:
        # If the deadline came during the wait for the semaphore, the coroutine has never started and must be closed.
        asking.close()


def _now(device: _DeviceStatus, *, known: bool) -> DeviceNow:
    """Convert a device's entry in `/status` to a `DeviceNow`.

    known: whether the agent knows all pods that hold devices; an agent always knows the claims.
    """
    users = [holder for holder in device.holders if holder.side == "dra"]
    title = ", ".join(dict.fromkeys(holder.text for holder in device.holders))
    return DeviceNow(
        device.health,
        device.message,
        device.gone,
        title if title or known else None,
        tuple(sorted({user.pod for user in users if user.pod})),
        device.withheld,
        device.state,
        device.waits,
        tuple(dict.fromkeys(f"{user.namespace}/{user.claim}" for user in users)),
    )
