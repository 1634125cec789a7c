"""An upgrade of Kubernetes and its rollback while held devices wait to move, and pods by limits and claim run.

The components are changed in the order that docs/upgrading-kubernetes.md states. The node is not drained.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.cluster import build
from tests.cluster.bridge import Bridge
from tests.cluster.conftest import Shared
from tests.cluster.node import Cluster, Pod
from tests.cluster.test_handover import RESOURCE, annotate, serving_cards, states

OLD, NEW = build.FORMER_VERSION, build.DEFAULT_VERSION
CONTROL_PLANE = ("kube-apiserver", "kube-controller-manager", "kube-scheduler")
UPGRADE = (*((name, NEW) for name in CONTROL_PLANE), ("kubelet", NEW))
ROLLBACK = (("kubelet", OLD), *((name, OLD) for name in reversed(CONTROL_PLANE)))
"""The components and versions of the rollback, in order: a kubelet is never newer than its API server."""
BUILD = 1500.0
"""Maximum seconds of a wait for the older version, which `.ci/run` builds while the tests run."""


@pytest.fixture
def old_cluster(shared_cluster: Shared) -> Iterator[Cluster]:
    """A cluster of the older version."""
    if "CI" in os.environ and build.default_version() == NEW:
        build.wait_built(OLD, BUILD)
    elif missing := [version for version in (OLD, NEW) if not build.is_built(version)]:
        pytest.skip(f"python -m tests.cluster.build {' '.join(missing)} was not run")
    shared_cluster.stop()
    with Cluster(OLD) as cluster:
        yield cluster


def lives(*pods: Pod) -> list[tuple[str, str, int]]:
    """Return the pods' phases, container ids and restarts, which stay the same while the containers run."""
    return [(pod.phase, pod.container_id(), pod.restarts()) for pod in pods]


def test_an_upgrade_and_its_rollback_in_the_middle_of_a_migration(old_cluster: Cluster) -> None:
    """After each step of an upgrade and its rollback, containers run on and the devices' states are the same as before.

    New claims are prepared after each step. Devices that wait to move do so when their holder has ended.
    """
    cluster = old_cluster
    with serving_cards(cluster) as bridge:
        plain = cluster.start_pod("plain", {RESOURCE: 2}).wait_running()
        annotate(cluster, "4")
        bridge.wait_offered(4)
        bridge.claim("mine")
        claimer = bridge.pod("claimer", {"card": "mine"}).wait_running()
        annotate(cluster, "all")
        cluster.wait_for(lambda: states(bridge) == {"dra": 6, "to-dra": 2}, 60, "all but the held ones have moved")
        running, report = lives(plain, claimer), states(bridge)
        for number, (component, version) in enumerate((*UPGRADE, *ROLLBACK)):
            cluster.switch(component, version)
            cluster.wait_for(cluster.ready, 120, f"the node is ready with {component} {version}")
            prepared(bridge, f"later-{number}")
            assert lives(plain, claimer) == running, (component, version)
            assert states(bridge) == report, (component, version)
        plain.delete()
        plain.wait_gone()
        cluster.wait_for(lambda: states(bridge) == {"dra": 8}, 60, "the move ends")
        claimer.delete()
        claimer.wait_gone()


def prepared(bridge: Bridge, name: str) -> None:
    """Start a pod with a claim, wait until it runs, and end it."""
    bridge.claim(name)
    pod = bridge.pod(name, {"card": name}).wait_running()
    pod.delete()
    pod.wait_gone()
    bridge.cluster.api.delete("ResourceClaim", name)
