"""Nodes, their agents and a cluster autoscaler, as far as a rollout concerns them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dra_bridge.handover.share import parse_share
from dra_bridge.rollout import autoscaler, fleet, progress
from dra_bridge.rollout.autoscaler import MarkStep
from dra_bridge.rollout.fleet import Goal, NodeView, RolloutLimits
from dra_bridge.rollout.progress import Progress, ResourceProgress
from tests.autoscaler import Verdict, judge
from tests.dra.objects import body

D, R = "fpga.example.com", "example.com/fpga"
DEVICES = 4
BUSY, LOW = 3, 1
"""How many of a node's four devices and four CPUs its pods use: on a busy node, and on a node with low use."""
SHARE, POOL, RECORD = progress.share_annotation(D), progress.pool_annotation(D), autoscaler.mark_annotation(D)
IDLE, UNREADY = Verdict.IDLE, Verdict.UNREADY


def node(name: str, annotations: Mapping[str, str] | None = None) -> dict[str, Any]:
    status = {"allocatable": {"cpu": "4", "memory": "8Gi"}, "conditions": [{"type": "Ready", "status": "True"}]}
    metadata = {"name": name, "uid": name, "resourceVersion": "7", "annotations": dict(annotations or {})}
    return {"metadata": metadata, "status": status}


def slice_of(name: str, devices: int) -> dict[str, Any]:
    pool = {"name": name, "generation": 1, "resourceSliceCount": 1}
    spec = {"driver": D, "nodeName": name, "pool": pool, "devices": [{"name": f"d{n}"} for n in range(devices)]}
    return {"metadata": {"name": f"{name}-s"}, "spec": spec}


def pods_of(name: str, count: int) -> list[dict[str, Any]]:
    container = {"resources": {"requests": {"cpu": "1", "memory": "1Gi", R: "1"}}}
    return [{"spec": {"nodeName": name, "containers": [container]}} for _ in range(count)]


def claim(name: str, device: int) -> dict[str, Any]:
    results = [{"driver": D, "pool": name, "device": f"d{device}"}]
    return {"status": {"allocation": {"devices": {"results": results}}, "reservedFor": [{"name": "p"}]}}


def binding(name: str = "dra-bridge", namespace: str = "dra-bridge", label: str = "dra-bridge") -> dict[str, Any]:
    """Return a ClusterRoleBinding of the agents' ServiceAccount, as `manifests` prints it."""
    subject = {"kind": "ServiceAccount", "name": name, "namespace": namespace}
    labels = {"app.kubernetes.io/managed-by": label}
    return body("ClusterRoleBinding", name, meta={"labels": labels}, subjects=[subject])


def agent_pod(node: str, port: int | None = 9410, **container: Any) -> dict[str, Any]:
    """Return an agent's pod, as `manifests` prints it. port: the metrics port; container: more fields of it."""
    labels = {"app.kubernetes.io/name": "dra-bridge", "app.kubernetes.io/managed-by": "dra-bridge"}
    ports = [{"name": "metrics", "containerPort": port}] if port else []
    spec = {"nodeName": node, "containers": [{"name": "agent", "ports": ports, **container}]}
    return body("Pod", f"agent-{node}", "dra-bridge", meta={"labels": labels}, spec=spec, status={"phase": "Running"})


@dataclass
class Group:
    """Nodes whose pods use three of four devices and CPUs, and agents that do one step each time the test lets them.

    former: nodes whose agents, of an older version, always have a slice. Up to three of a node's devices for claims are
    allocated to claims of pods.
    """

    annotations: dict[str, dict[str, str]]
    former: frozenset[str] = frozenset()
    at: dict[str, str] = field(default_factory=dict)
    known: dict[str, str] = field(default_factory=dict)
    sliced: dict[str, bool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, found in self.annotations.items():
            self.at[name] = self.known[name] = found.get(SHARE, "")
            self.sliced[name] = self.wants_slice(name)

    def on_dra(self, name: str) -> int:
        return parse_share(self.at[name] or "none").of(DEVICES)

    def wants_slice(self, name: str) -> bool:
        return bool(self.on_dra(name)) or name in self.former or POOL in self.annotations[name]

    def nodes(self) -> list[dict[str, Any]]:
        return [node(name, found) for name, found in self.annotations.items()]

    def views(self) -> list[NodeView]:
        slices, leases = self.slices(), []
        for name in self.annotations:
            dra, known = self.on_dra(name), self.known[name]
            counts = {"dra": dra, "plugin": DEVICES - dra} if known == self.at[name] else {"to-dra": DEVICES}
            report = Progress({R: ResourceProgress(known or "none", counts)}, known)
            said = {"annotations": {progress.annotation(D): progress.encoded(report)}}
            if name in self.former:
                next(one for one in slices if one["spec"]["nodeName"] == name)["metadata"] |= said
            else:
                leases.append({"metadata": {"name": name, **said}})
        return fleet.views(D, self.nodes(), slices, leases=leases)

    def slices(self) -> list[dict[str, Any]]:
        return [slice_of(name, self.on_dra(name)) for name, there in self.sliced.items() if there]

    def verdicts(self) -> dict[str, Verdict]:
        claims = [claim(name, n) for name in self.annotations for n in range(min(BUSY, self.on_dra(name)))]
        return judge(
            self.nodes(), self.slices(), claims, [pod for name in self.annotations for pod in pods_of(name, 3)]
        )

    def quiet(self) -> bool:
        return all(self.sliced[name] == self.wants_slice(name) for name in self.annotations)

    def patch(self, name: str, patch: Mapping[str, Any] | None) -> None:
        for key, text in (patch or {"metadata": {"annotations": {}}})["metadata"]["annotations"].items():
            if text is None:
                self.annotations[name].pop(key, None)
            else:
                self.annotations[name][key] = text

    def now(self, name: str) -> dict[str, Any]:
        return node(name, self.annotations[name])

    def write(self, step: MarkStep) -> None:
        for name in step.mark:
            self.patch(name, autoscaler.mark_patch(D, self.now(name)))
        for name in step.publish:
            self.patch(name, autoscaler.publish_patch(D, self.now(name)))
        for name in {*step.withdraw, *step.release}:
            self.patch(name, autoscaler.release_patch(D, self.now(name), step))

    def agent(self, name: str) -> None:
        """Let an agent read the Node's annotation or, if it has read it, move devices; then it publishes its slice."""
        wanted = self.annotations[name].get(SHARE, "")
        if self.known[name] != wanted:
            self.known[name] = wanted
        else:
            self.at[name] = wanted
        self.sliced[name] = self.wants_slice(name)

    def moving(self) -> int:
        """Return how many nodes have devices that move, or an agent that has not read the Node's annotation yet."""
        return sum(
            self.at[name] != found.get(SHARE, "") or self.known[name] != self.at[name]
            for name, found in self.annotations.items()
        )

    def roll(self, goal: Goal, limits: RolloutLimits, choices: Sequence[int], stop_after: int = 400) -> bool:
        """Run a rollout until it is over; return False if it was interrupted after `stop_after` steps.

        choices: numbers of agents; in each step, the chosen agent and the next one in turn do a step. The autoscaler
        looks at the nodes in each step, unless marks are switched off.
        """
        own: set[str] = set()
        names = list(self.annotations)
        for step in range(stop_after):
            views = self.views()
            marks = fleet.next_marks(goal, views, limits)
            decision = fleet.with_marks(fleet.decide(goal, views, limits, own=own), marks, limits)
            assert not decision.stop
            if decision.over:
                return True
            for name in decision.forget:
                self.patch(name, fleet.forget_patch(goal, D, self.now(name)))
            self.write(marks)
            for name in decision.begin:
                self.patch(name, fleet.begin_patch(goal, D, self.now(name), []))
                own.add(name)
            assert self.moving() <= limits.max_unavailable
            self.agent(names[choices[step % len(choices)] % len(names)])
            self.agent(names[step % len(names)])
            if not limits.ignore_autoscaler:
                self.check(began=marks.ready and not marks.leaving)
        return False

    def check(self, *, began: bool) -> None:
        verdicts = self.verdicts()
        assert IDLE not in verdicts.values(), (verdicts, self)
        if began and self.quiet():
            assert UNREADY not in verdicts.values(), (verdicts, self)
