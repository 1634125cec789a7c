"""Checks whether agents can adopt a vendor's device plugin or give it back, and makes the patch of the DaemonSet.

An adopted plugin registers with the agent; a plugin that was given back registers with the kubelet. This module writes
nothing to the cluster. The patch fails if the fields that it replaces have changed meanwhile. The patch stores the
former values of these fields in an annotation of the DaemonSet, and the patch that gives the plugin back restores these
values.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from dra_bridge.kube import DAEMON_SETS, PODS, Cluster, NotFoundError, Object
from dra_bridge.rollout.agents import (
    LABEL,
    Answers,
    ask_agents,
    namespaces_of_agents,
    running_agents,
)
from dra_bridge.rollout.fleet import shortened
from dra_bridge.rollout.rollout import RolloutError

BEFORE: Final = "dra-bridge/before-adoption"
"""The annotation with an adopted DaemonSet's former hostPaths and update strategy, as JSON."""
APPLIED: Final = "kubectl.kubernetes.io/last-applied-configuration"
REGISTRY: Final = "plugins_registry"
STRATEGY: Final = "/spec/updateStrategy/rollingUpdate"
OWNERS: Final[Mapping[str, str]] = {
    "nvidia.com": "set devicePlugin.enabled=false in the ClusterPolicy, and run NVIDIA's plugin by its own chart",
    "sriovnetwork.openshift.io": "the SR-IOV operator has no option for it: replace its plugin, or leave it",
    "deviceplugin.intel.com": "run Intel's plugin by its own DaemonSet instead of the operator",
    "amd.com": "switch the device plugin off in the DeviceConfig, and run AMD's by its own DaemonSet",
    "kubevirt.io": "KubeVirt's devices cannot be adopted",
}
"""Advice for DaemonSets that another object owns, because the owner reverts a patch of the DaemonSet. The key is the
owner's API group or a suffix of it; the value tells the user an alternative to the patch."""
_IN_ITS_SOURCE: Final = "make the change where it takes the DaemonSet from"
MANAGERS: Final[Sequence[tuple[str, str, str, str]]] = (
    ("addonmanager.kubernetes.io/mode", "Reconcile", "the addon manager", "switch the addon off, and apply its own"),
    ("argocd.argoproj.io/instance", "", "Argo CD", _IN_ITS_SOURCE),
    ("argocd.argoproj.io/tracking-id", "", "Argo CD", _IN_ITS_SOURCE),
    ("kustomize.toolkit.fluxcd.io/name", "", "Flux", _IN_ITS_SOURCE),
    ("helm.toolkit.fluxcd.io/name", "", "Flux", "make the change in postRenderers of its HelmRelease"),
    ("objectset.rio.cattle.io/id", "", "Rancher", _IN_ITS_SOURCE),
    ("configmanagement.gke.io/managed", "enabled", "Config Sync", _IN_ITS_SOURCE),
    ("olm.owner", "", "the Operator Lifecycle Manager", "leave it, or replace its plugin"),
    ("app.kubernetes.io/managed-by", "dra-bridge", "dra-bridge", "this is an agent, not a vendor's plugin"),
    ("app.kubernetes.io/managed-by", "Helm", "Helm", "make the change by a value of the chart, or by --post-renderer"),
    ("app.kubernetes.io/managed-by", "", "{value}", _IN_ITS_SOURCE),
)
"""The labels and annotations that show that a tool manages a DaemonSet and reverts changes. Each entry has the key, the
value ("" for any value), the tool's name, and advice for the user."""


@dataclass(frozen=True, slots=True)
class AgentPod:
    """A running pod of an agent.

    directory: the directory that --adopt names, "" if the agent adopts nothing. mounted: whether the pod mounts this
    directory from the node. plugins, registry: the kubelet's directories device-plugins and plugins_registry on the
    pod's node. claims: whether the agent serves claims.
    """

    node: str
    directory: str
    mounted: bool
    ready: bool
    plugins: str
    registry: str
    claims: bool


@dataclass(frozen=True, slots=True)
class Advice:
    """The result of a check of a DaemonSet.

    problems: reasons why the plugin cannot be adopted, or given back, now. notes: further facts for the user. commands:
    commands that the user has to run, in this order. done: whether the plugin is already adopted, or already given
    back.
    """

    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    commands: tuple[str, ...] = ()
    done: bool = False


def agent_of(pod: Object) -> AgentPod:
    """Return an agent's directories and options, taken from the spec of its pod."""
    container = pod["spec"]["containers"][0]
    command = container.get("command") or []
    words = [*command, *(container.get("args") or ())]
    directory = _option(words, "--adopt").rstrip("/")
    volumes = {
        volume["name"]: (volume.get("hostPath") or {}).get("path", "") for volume in pod["spec"].get("volumes") or ()
    }
    mounts = {
        mount["mountPath"].rstrip("/"): volumes.get(mount["name"], "") for mount in container.get("volumeMounts") or ()
    }
    root = _option(words, "--kubelet-root").rstrip("/") or "/var/lib/kubelet"
    conditions = {condition["type"]: condition["status"] for condition in pod.get("status", {}).get("conditions") or ()}
    return AgentPod(
        pod["spec"].get("nodeName", ""),
        directory,
        mounted=mounts.get(directory, "").rstrip("/") == directory,
        ready=conditions.get("Ready") == "True",
        plugins=_option(words, "--device-plugin-dir").rstrip("/") or f"{root}/device-plugins",
        registry=f"{root}/{REGISTRY}",
        claims=command[:1] != ["deviceplugin"],
    )


def _option(words: Sequence[str], name: str) -> str:
    for word, after in zip(words, (*words[1:], ""), strict=True):
        if word == name:
            return after
        if word.startswith(f"{name}="):
            return word.removeprefix(f"{name}=")
    return ""


def managers(daemon_set: Object) -> list[str]:
    """Return, for each tool that would revert a change of a DaemonSet, a sentence with advice.

    The tools are identified by the DaemonSet's owners, labels and annotations.
    """
    metadata = daemon_set["metadata"]
    sentences = []
    for owner in metadata.get("ownerReferences") or ():
        group = owner["apiVersion"].partition("/")[0]
        advices = [advice for name, advice in OWNERS.items() if group == name or group.endswith(f".{name}")]
        advice = advices[0] if advices else "change it there, if that has an option for it"
        sentences.append(f"{owner['kind']} {owner['name']} ({owner['apiVersion']}) owns it and puts it back: {advice}")
    said = {**(metadata.get("annotations") or {}), **(metadata.get("labels") or {})}
    for key, value, who, advice in MANAGERS:
        if key in said and value in ("", said[key]):
            who = who.format(value=said[key])
            text = f"{who} manages it ({key}: {said[key]}) and puts it back: {advice}"
            if not any(sentence.startswith(f"{who} manages it") for sentence in sentences):
                sentences.append(text)
            if key == "app.kubernetes.io/managed-by":
                break
    return sentences


def adopt(daemon_set: Object, agents: Collection[AgentPod], nodes: Collection[str]) -> Advice:
    """Check whether a DaemonSet's plugin can be adopted; return the problems, or else the commands.

    nodes: the nodes that run pods of the DaemonSet.
    """
    problems = managers(daemon_set)
    there = {agent.node: agent for agent in agents}
    if without := sorted(node for node in nodes if node not in there):
        problems.append(f"no agent runs on {shortened(without)}: its plugin would find no kubelet.sock there")
    mine = [there[node] for node in nodes if node in there] or list(agents)
    for what, wrong in (
        ("have no --adopt", [agent for agent in mine if not agent.directory]),
        (
            "do not mount the node's directory of --adopt",
            [agent for agent in mine if agent.directory and not agent.mounted],
        ),
        ("are not ready", [agent for agent in mine if not agent.ready]),
    ):
        if wrong:
            problems.append(f"agents on {shortened(sorted(agent.node for agent in wrong))} {what}")
    if len(places := {(agent.directory, agent.plugins, agent.registry) for agent in mine if agent.directory}) != 1:
        if places:
            problems.append("agents have different directories; a DaemonSet has one template")
        elif not mine:
            problems.append("no agent adopts plugins")
        return Advice(tuple(problems))
    ((directory, plugins, registry),) = places
    wanted = {plugins: directory, registry: f"{directory}/{REGISTRY}"}
    paths = _host_paths(daemon_set)
    if directory in paths.values() and plugins not in paths.values():
        return Advice(tuple(problems), (f"it is adopted already: its plugin's directory is {directory}",), done=True)
    problems += _unusable(daemon_set, paths, plugins)
    if problems:
        return Advice(tuple(problems))
    strategy = daemon_set["spec"].get("updateStrategy") or {}
    rolling = strategy.get("rollingUpdate")
    surge = str((rolling or {}).get("maxSurge", 0)) not in ("0", "0%")
    before: Object = {"hostPaths": {}}
    operations = list[Object]()
    for index, volume in enumerate(daemon_set["spec"]["template"]["spec"].get("volumes") or ()):
        path = (volume.get("hostPath") or {}).get("path", "").rstrip("/")
        if path in wanted:
            before["hostPaths"][volume["name"]] = volume["hostPath"]
            operations += _replaced(index, volume, {"path": wanted[path], "type": "Directory"})
    if surge:
        before["rollingUpdate"] = rolling
        value = {"maxSurge": 0, "maxUnavailable": 1}
        operations += [{"op": "replace", "path": STRATEGY, "value": value}]
    if not daemon_set["metadata"].get("annotations"):
        operations.append({"op": "add", "path": "/metadata/annotations", "value": {}})
    operations.append({"op": "add", "path": _pointer(BEFORE), "value": json.dumps(before, sort_keys=True)})
    notes = [f"the plugin will register with the agents, in {directory}; pods keep their devices"]
    if surge:
        notes.append("maxSurge becomes 0: two instances would register, one with the kubelet and one with the agent")
    if (daemon_set["metadata"].get("labels") or {}).get("addonmanager.kubernetes.io/mode") == "EnsureExists":
        notes.append("the addon manager recreates a deleted DaemonSet without the change")
    if APPLIED in (daemon_set["metadata"].get("annotations") or {}):
        notes.append("kubectl apply of its manifest would put the hostPath back: change it there, too")
    return Advice((), tuple(notes), _commands(daemon_set, operations))


def undo(daemon_set: Object, agents: Collection[AgentPod], obstacles: Sequence[str]) -> Advice:
    """Check whether an adopted plugin can be given back; return the problems, or else the commands.

    obstacles: the reasons (from `in_use`) why the plugin must stay adopted now.
    """
    adopting = {pod.directory: pod for pod in agents if pod.directory}
    paths = _host_paths(daemon_set)
    try:
        before = json.loads((daemon_set["metadata"].get("annotations") or {}).get(BEFORE, "{}"))
    except ValueError:
        before = {}
    kept: Mapping[str, Object] = before.get("hostPaths") or {}
    notes, operations = list[str](), list[Object]()
    for index, volume in enumerate(daemon_set["spec"]["template"]["spec"].get("volumes") or ()):
        path = paths.get(volume["name"], "")
        directory, _, rest = path.partition(f"/{REGISTRY}")
        if not path or rest or (volume["name"] not in kept and directory not in adopting):
            continue
        agent = adopting.get(directory)
        if (former := kept.get(volume["name"])) is None and agent is not None:
            former = {"path": agent.plugins if path == directory else agent.registry, "type": "Directory"}
            notes.append(f"what volume {volume['name']} was before is not kept; it gets {former['path']}")
        if former is not None and former != volume["hostPath"]:
            operations += _replaced(index, volume, former)
    if not operations:
        return Advice((), ("it is not adopted: none of its hostPaths is in an agent's directory",), done=True)
    if obstacles:
        return Advice(tuple(obstacles))
    if before:
        operations.append({"op": "remove", "path": _pointer(BEFORE)})
    notes.append("the agents unregister node by node, as the plugin leaves them; pods keep their devices")
    commands = _commands(daemon_set, operations)
    if rolling := before.get("rollingUpdate"):
        notes.append("maxSurge is put back last: until then two instances would register")
        commands += (_patch(daemon_set, [{"op": "replace", "path": STRATEGY, "value": rolling}]),)
    return Advice((), tuple(notes), commands)


def _host_paths(daemon_set: Object) -> dict[str, str]:
    volumes = daemon_set["spec"]["template"]["spec"].get("volumes") or ()
    return {volume["name"]: volume["hostPath"]["path"].rstrip("/") for volume in volumes if volume.get("hostPath")}


def _unusable(daemon_set: Object, paths: Mapping[str, str], plugins: str) -> Iterable[str]:
    """Yield the reasons why the plugin would not register with the agent after a change of its DaemonSet's hostPath."""
    if plugins not in paths.values():
        above = [path for path in paths.values() if plugins.startswith(f"{path}/")]
        if above:
            yield f"it mounts all of {above[0]}, and no hostPath {plugins} that could be changed"
        else:
            yield f"it has no hostPath {plugins}: is it a device plugin's?"
    of_plugins = {name for name, path in paths.items() if path == plugins}
    template = daemon_set["spec"]["template"]["spec"]
    for container in (*template["containers"], *(template.get("initContainers") or ())):
        for mount in container.get("volumeMounts") or ():
            if mount["name"] in of_plugins and (mount.get("subPath") or mount.get("subPathExpr")):
                yield f"its container {container['name']} mounts a part of {plugins} (subPath)"


def _replaced(index: int, volume: Object, value: Object) -> list[Object]:
    path = f"/spec/template/spec/volumes/{index}"
    return [
        {"op": "test", "path": f"{path}/name", "value": volume["name"]},
        {"op": "test", "path": f"{path}/hostPath", "value": volume["hostPath"]},
        {"op": "replace", "path": f"{path}/hostPath", "value": value},
    ]


def _pointer(annotation: str) -> str:
    return "/metadata/annotations/" + annotation.replace("~", "~0").replace("/", "~1")


def _patch(daemon_set: Object, operations: Sequence[Object]) -> str:
    patch = json.dumps(operations)
    name, namespace = daemon_set["metadata"]["name"], daemon_set["metadata"]["namespace"]
    return shlex.join(["kubectl", "patch", "daemonset", name, "-n", namespace, "--type=json", "-p", patch])


def _commands(daemon_set: Object, operations: Sequence[Object]) -> tuple[str, ...]:
    name, namespace = daemon_set["metadata"]["name"], daemon_set["metadata"]["namespace"]
    commands = [_patch(daemon_set, operations)]
    if (daemon_set["spec"].get("updateStrategy") or {}).get("type") == "OnDelete":
        labels = (daemon_set["spec"]["selector"].get("matchLabels") or {}).items()
        selector = ",".join(f"{key}={value}" for key, value in sorted(labels))
        commands.append(shlex.join(["kubectl", "delete", "pods", "-n", namespace, "-l", selector]))
    else:
        commands.append(shlex.join(["kubectl", "rollout", "status", f"daemonset/{name}", "-n", namespace]))
    return tuple(commands)


def in_use(answers: Answers, agents: Collection[AgentPod], nodes: Collection[str]) -> list[str]:
    """Return a sentence for each reason why the adopted plugins of a DaemonSet must stay adopted now.

    The reasons are devices that claims have or that are on the DRA side, and nodes on which this is unknown. nodes: the
    nodes that run pods of the DaemonSet.
    """
    serving = {agent.node for agent in agents if agent.claims and agent.node in nodes}
    reasons = []
    if without := sorted(set(nodes) - {agent.node for agent in agents}):
        reasons.append(f"no agent runs on {shortened(without)}: it is not known whether claims have devices there")
    reasons += [
        f"it is not known whether claims have devices on {node}: {why}"
        for node, why in sorted(answers.reasons.items())
        if node in serving
    ]
    away, claims = dict[str, set[str]](), dict[str, set[str]]()
    for (node, resource, _), device in {**answers.devices, **answers.unlisted}.items():
        if (node, resource) in answers.adopted:
            if device.state not in ("", "plugin"):
                away.setdefault(resource, set()).add(node)
            claims.setdefault(resource, set()).update(device.claims)
    for resource, titles in sorted((name, titles) for name, titles in claims.items() if titles):
        reasons.append(f"claims have devices of {resource}: {shortened(sorted(titles))}; end their pods first")
    for resource, where in sorted(away.items()):
        reasons.append(
            f"devices of {resource} are for claims on {shortened(sorted(where))}; bring them back first: "
            "dra-bridge rollout --share none"
        )
    return reasons


async def advise(cluster: Cluster, name: str, namespace: str, agents_in: str, *, back: bool) -> Advice:
    """Check a DaemonSet. Return how to adopt its plugin, or if `back` is true, how to give the plugin back.

    agents_in: the agents' namespace; "" if the function has to find the namespace. Raises RolloutError if the DaemonSet
    does not exist, or the agents' namespace is unknown. Raises ClusterError.
    """
    try:
        daemon_set = await cluster.get(DAEMON_SETS, name, namespace)
    except NotFoundError as error:
        raise RolloutError(f"there is no DaemonSet {name} in namespace {namespace}") from error
    namespaces = [agents_in] if agents_in else await namespaces_of_agents(cluster)
    if not namespaces:
        raise RolloutError(
            f"no ClusterRoleBinding with the label {LABEL} names the agents' namespace; name the namespace by --agents"
        )
    agents = [agent_of(pod) for pod in await running_agents(cluster, namespaces)]
    uid = daemon_set["metadata"].get("uid")
    pods = (await cluster.list(PODS, namespace)).items
    owned = (
        pod for pod in pods if any(owner.get("uid") == uid for owner in pod["metadata"].get("ownerReferences") or ())
    )
    nodes = {node for pod in owned if (node := pod["spec"].get("nodeName"))}
    if not back:
        return adopt(daemon_set, agents, nodes)
    # Agents without --adopt are also asked, because they may have adopted the plugin before.
    with_claims = {agent.node for agent in agents if agent.claims and agent.node in nodes}
    answers = await ask_agents(cluster, with_claims, agents_in)
    return undo(daemon_set, agents, in_use(answers, agents, nodes))
