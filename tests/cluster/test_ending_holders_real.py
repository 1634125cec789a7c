"""Pods wait for devices whose holders are about to end, and start as soon as the holders have ended.

The kubelet has its default periods; in other tests of this package they are shorter. The tests print their measured
times and add them to their reports.
"""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from tests.cluster import locks
from tests.cluster.node import KUBELET_DIRECTORY, Cluster, Pod
from tests.cluster.test_handover import AS_BY_DEFAULT
from tests.cluster.test_witnesses_real import Scene, claimer, plain, unbroken

SOON = 30.0
"""The limit of a short wait in seconds; the kubelet's next synchronisation of a pod comes after 60 s or more."""

Record = Callable[[str, object], None]


class Replaced(Scene):
    """A scene with a Deployment of one pod with a device; the test deletes its pods one after another."""

    def deploy(self, manifest: Mapping[str, Any]) -> None:
        labels = {"app": "replaced"}
        body = {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {"name": "replaced", "namespace": "default"},
            "spec": {
                "replicas": 1,
                "selector": {"matchLabels": labels},
                "template": {"metadata": {"labels": labels}, "spec": manifest["spec"]},
            },
        }
        self.cluster.api.create(body)
        self.stack.callback(self.cluster.api.delete, "Deployment", "replaced", "default", "apps/v1")

    def deployed(self) -> list[Pod]:
        """Return the Deployment's pods, failed ones included."""
        return self.cluster.pods("default", "app=replaced")

    def started(self, name: str) -> float:
        """Start a pod without a device; return the seconds that its start takes."""
        began = time.clock_gettime(time.CLOCK_BOOTTIME)
        pod = self.make(locks.pod(name, locks.container()))

        def note() -> locks.Note | None:
            return next((one for one in locks.notes() if one.uid == pod.uid), None)

        note_of_start = self.cluster.wait_for(note, SOON, "a pod without a device runs")
        assert note_of_start is not None
        return note_of_start.at - began

    def holder(self, limit: float = SOON) -> locks.Holder:
        """Wait until one process holds the device; return this holder."""
        self.cluster.wait_for(lambda: len(locks.holders()) == 1, limit, "one pod has the device")
        return locks.holders()[0]

    def handed_over(self, end: Callable[[Pod], object], limit: float = SOON) -> float:
        """End the pod that has the device; return the seconds from its processes' end until the next pod has it."""
        before = self.holder()
        got = {note.uid for note in locks.notes() if note.what == "got"}
        end(self.cluster.pod(before.pod))
        self.cluster.wait_for(lambda: not locks.pids(before.uid), 60, "the pod's processes have ended")
        ended = time.clock_gettime(time.CLOCK_BOOTTIME)

        def next_one() -> locks.Note | None:
            self.check()
            return next((note for note in locks.notes() if note.what == "got" and note.uid not in got), None)

        note = self.cluster.wait_for(next_one, limit, "the next pod has the device")
        assert note is not None
        return max(0.0, note.at - ended)


@pytest.fixture
def scene(make_cluster: Callable[..., Cluster], request: pytest.FixtureRequest) -> Iterator[Replaced]:
    cluster = make_cluster(kubelet_config=AS_BY_DEFAULT)
    yield from unbroken(Replaced(cluster, request.node.name.removeprefix("test_")))


def shown(record: Record, **figures: object) -> None:
    """Print figures, and add them to the test's report."""
    for name, value in figures.items():
        text = json.dumps([round(one, 2) for one in value]) if isinstance(value, list) else str(value)
        print(f"{name}: {text}")
        record(name, text)


@pytest.mark.parametrize("ignores_term", [False, True], ids=["ends", "is-killed"])
def test_a_deployments_pods_by_claim_are_deleted_by_force(
    scene: Replaced, record_property: Record, *, ignores_term: bool
) -> None:
    """A Deployment's next pod gets the device soon after the last process of the forcibly deleted pod."""
    scene.begin(a=(1, "all"))
    grace = {"terminationGracePeriodSeconds": 8} if ignores_term else {}
    scene.deploy(claimer("pod", "a", ignores_term=ignores_term, **grace))
    seconds = [scene.handed_over(lambda pod: pod.delete(0)) for _ in range(2 if ignores_term else 4)]
    shown(record_property, seconds_from_free_to_held=seconds)


@pytest.mark.parametrize("ignores_term", [False, True], ids=["ends", "is-killed"])
def test_a_deployments_pods_by_limits_are_deleted_by_force(
    scene: Replaced, record_property: Record, *, ignores_term: bool
) -> None:
    """A Deployment's next pod gets the device soon after its pod with limits is deleted by force; other pods start."""
    scene.begin(a=(1, "none"))
    grace = {"terminationGracePeriodSeconds": 15} if ignores_term else {}
    scene.deploy(plain("pod", "a", ignores_term=ignores_term, **grace))
    starts: list[float] = []

    def end(pod: Pod) -> None:
        pod.delete(0)
        while locks.pids(pod.uid):
            starts.append(scene.started(f"other-{len(starts)}"))

    seconds = [scene.handed_over(end) for _ in range(2 if ignores_term else 5)]
    phases = Counter(pod.phase for pod in scene.deployed())
    shown(record_property, seconds_from_free_to_held=seconds, seconds_to_start_others=starts, phases=dict(phases))


@pytest.mark.parametrize("how", ["by-force", "with-grace"])
def test_a_pod_that_waits_is_deleted(scene: Replaced, record_property: Record, how: str) -> None:
    """A pod that waits for a held device is deleted, by force or with a grace period: the kubelet soon ends the pod."""
    scene.begin(a=(1, "all"))
    held = scene.claimer("held", "a", ignores_term=True)
    scene.running(held)
    if how == "by-force":
        scene.hang(held)
    else:
        held.delete(0)
    waiting = scene.claimer("waiting", "a")
    waits = re.compile(r"claim default/waiting-device-\w+ waits for its devices")
    scene.cluster.wait_for(lambda: waits.search(scene.agents.logs()), SOON, "the pod waits")
    began = time.monotonic()
    waiting.delete(0 if how == "by-force" else 5)
    scene.cluster.wait_for(lambda: not (KUBELET_DIRECTORY / "pods" / waiting.uid).exists(), SOON, "the kubelet ends it")
    shown(record_property, seconds_to_end_a_waiting_pod=f"{time.monotonic() - began:.2f}")
    assert bool(locks.pids(held.uid)) is (how == "by-force")
    if how == "with-grace":
        following = scene.claimer("following", "a")
        scene.running(following)
    scene.thaw()
    # Wait while the agent runs: the kubelet calls Unprepare for a pod's claim before it removes the pod's directory.
    scene.cluster.wait_for(lambda: not (KUBELET_DIRECTORY / "pods" / held.uid).exists(), SOON, "the kubelet ends held")
