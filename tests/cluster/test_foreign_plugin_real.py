"""Another plugin registers a resource of the bridge on the real node, and ends five seconds later.

The other plugin is `tests.testing.bare`, which is independent of the agent. When a plugin ends, a kubelet before 1.37
counts all its devices as unhealthy; since 1.37 the kubelet keeps the ended plugin's list.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from deviceplugin.wire import deviceplugin_pb2 as pb
from tests.cluster import locks
from tests.cluster import test_witnesses_real as witnesses
from tests.cluster.node import DEVICE_PLUGINS, Pod
from tests.cluster.test_witnesses_real import Agents, Scene, claimer, plain, resource
from tests.scenarios.sides import named
from tests.testing.bare import BarePlugin

scene = witnesses.scene  # a fixture
STAYS = 5.0
"""Seconds that the other plugin runs, like a vendor's pod that an operator deletes at once."""
NOTICED = re.compile(
    r"another plugin has registered this resource with the kubelet|another plugin may have registered this resource"
)


@pytest.fixture(autouse=True)
def watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the agents serve their metrics."""
    monkeypatch.setattr(Agents, "metrics", "127.0.0.1:9410")


def metric(scene: Scene, name: str, **labels: str) -> float:
    """Return the sum of the resource's samples of a metric that have these labels."""
    lines = scene.agents.page("/metrics").splitlines()
    wanted = [f'{key}="{value}"' for key, value in {"resource": named("a"), **labels}.items()]
    rows = [line for line in lines if line.startswith(f"deviceplugin_{name}{{") and all(one in line for one in wanted)]
    assert rows, name
    return sum(float(row.rpartition(" ")[2]) for row in rows)


def healthy() -> list[str]:
    """Return the ids that the kubelet counts as healthy."""
    text = (DEVICE_PLUGINS / "kubelet_internal_checkpoint").read_text()
    return sorted(json.loads(text)["Data"]["RegisteredDevices"][named("a")])


@contextlib.contextmanager
def other_plugin(*ids: str, nodes: tuple[Path, ...] = ()) -> Iterator[BarePlugin]:
    """Register another plugin, which gives these nodes to containers; at the end its socket and streams end at once."""
    plugin = BarePlugin(DEVICE_PLUGINS, *ids, resource=named("a"), endpoint="vendor.sock")
    one = pb.ContainerAllocateResponse(
        devices=[pb.DeviceSpec(container_path=str(node), host_path=str(node), permissions="rw") for node in nodes]
    )
    plugin.response = lambda names: pb.AllocateResponse(container_responses=[one])
    try:
        plugin.register()
        yield plugin
    finally:
        plugin.stop()


def serve(scene: Scene, devices: int) -> None:
    """Serve this many devices, all of them for limits, and wait until the agent is ready."""
    scene.begin(a=(devices, "none"))
    scene.cluster.wait_for(lambda: not scene.agents.lacks(), 30, "the agent is ready")


@pytest.mark.parametrize("same", [False, True], ids=["other-ids", "the-same-ids"])
def test_it_stays_for_five_seconds(scene: Scene, same: bool) -> None:
    """The agent reports another plugin within seconds and registers again; pods get only devices of the agent."""
    cluster = scene.cluster
    serve(scene, 3)
    running = scene.pod("before", "a")
    scene.running(running)
    names = healthy() if same else ["theirs-0", "theirs-1"]
    assert not NOTICED.search(scene.agents.log())
    with other_plugin(*names) as plugin:
        began = time.monotonic()
        cluster.wait_for(lambda: NOTICED.search(scene.agents.log()), 10, "it is noticed")
        scene.observe(max(0.0, STAYS - (time.monotonic() - began)))
        during = scene.pod("during", "a")
        scene.running(running, during)
        assert not scene.agents.lacks()
    scene.observe(3)
    after = scene.pod("after", "a")
    scene.running(running, during, after)
    cluster.wait_allocatable(named("a"), 3)
    assert not scene.agents.lacks()
    assert plugin.allocations == []
    # A plugin with the same ids cannot be distinguished from a restarted plugin of another resource.
    assert (metric(scene, "foreign_registrations_total") > 0) is not same
    assert metric(scene, "registered") == 1
    assert metric(scene, "device_held_twice") == 0
    scene.before = scene.after = 3
    assert running.phase == during.phase == "Running"


def test_the_kubelet_hangs_when_it_is_noticed(scene: Scene) -> None:
    """The agent is not ready, and says why, until the kubelet, which hangs, has accepted the agent's registration."""
    cluster = scene.cluster
    serve(scene, 2)
    kubelet, agent = cluster.components["kubelet"].pid, scene.agents.process
    assert agent is not None
    agent.send_signal(signal.SIGSTOP)  # the stopped agent cannot register again before the kubelet hangs
    with other_plugin("theirs"):
        try:
            cluster.wait_for(lambda: healthy() == ["theirs"], 5, "the kubelet has their list")
            os.kill(kubelet, signal.SIGSTOP)
        finally:
            agent.send_signal(signal.SIGCONT)
        try:
            why = "not registered with the kubelet: another plugin has registered it"
            cluster.wait_for(lambda: why in scene.agents.lacks(), 30, "the agent is not ready")
            assert metric(scene, "registered") == 0
            assert metric(scene, "foreign_registrations_total") == 1
        finally:
            os.kill(kubelet, signal.SIGCONT)
    cluster.wait_for(lambda: not scene.agents.lacks(), 60, "the agent is ready")
    cluster.wait_for(lambda: metric(scene, "registered") == 1, 10, "its metric says so")  # a page is cached for 0.5 s
    cluster.wait_reported()
    cluster.wait_allocatable(named("a"), 2)
    scene.running(scene.pod("after", "a"))
    scene.before = scene.after = 1


@pytest.mark.parametrize("side", ["pods", "claims"])
def test_what_it_gave_while_no_agent_ran(scene: Scene, side: str) -> None:
    """Another plugin gave a held device to a second pod: the agent reports both holders; no third pod gets it."""
    cluster = scene.cluster
    if side == "pods":
        serve(scene, 2)
        holder = scene.pod("ours", "a")
    else:
        scene.nodes("a", 2)
        scene.serve(resource("a", "all"))
        scene.agents.wait_offered(2)
        holder = scene.claimer("ours", "a")
    scene.running(holder)
    (path,) = [path for path in (locks.NODES / "a").iterdir() if locks.key_of(path) == scene.key(holder)]
    scene.agents.kill()
    cluster.wait_allocatable(named("a"), 0)  # else the kubelet would drop the other plugin when the agent's stream ends
    with other_plugin("theirs-0", "theirs-1", nodes=(path,)) as plugin:  # two ids: the scheduler also counts `holder`
        cluster.wait_allocatable(named("a"), 2)
        taker = Pod(cluster, cluster.api.create(locks.pod("theirs", sleeper())))
        taker.wait_running()
        assert len(plugin.allocations) == 1
    scene.agents.start()
    scene.agents.wait_registered()
    cluster.wait_for(lambda: metric(scene, "device_held_twice") == 1, 30, "the device with two holders is told")
    cluster.wait_for(lambda: not scene.agents.lacks(), 30, "the agent is ready")
    holder.delete()
    holder.wait_gone()
    cluster.wait_for(lambda: metric(scene, "device_held_twice") == 0, 60, "one holder is left")
    cluster.wait_for(
        lambda: metric(scene, "devices_withheld", reason="foreign") == 1, 30, "what their pod has is withheld"
    )
    if side == "claims":  # with limits no pod would fit: the scheduler subtracts the second pod and the withheld device
        scene.running(scene.claimer("next", "a"))
    scene.wait((plain if side == "pods" else claimer)("wants", "a"))
    taker.delete()
    taker.wait_gone()
    cluster.wait_for(lambda: metric(scene, "devices_withheld", reason="foreign") == 0, 60, "nothing is withheld")
    scene.waiting.clear()
    scene.running(cluster.pod("wants"))
    scene.before = scene.after = 2


def sleeper() -> dict[str, object]:
    """Return a container with a device by limits that locks no device."""
    return {
        **locks.container(limits={named("a"): 1}),
        "command": ["/bin/sh", "-c", "trap exit TERM; sleep 3600 & wait"],
    }


def test_what_it_gave_without_saying_which(scene: Scene) -> None:
    """If another plugin gave a pod an unknown one of two devices, the agent gives no device until that pod ends."""
    cluster = scene.cluster
    serve(scene, 2)
    scene.agents.kill()
    with other_plugin("theirs"):
        cluster.wait_allocatable(named("a"), 1)
        taker = Pod(cluster, cluster.api.create(locks.pod("theirs", sleeper())))
        taker.wait_running()
    scene.agents.start()
    scene.agents.wait_registered()
    cluster.wait_for(lambda: metric(scene, "devices_withheld", reason="foreign") == 2, 30, "both devices are withheld")
    cluster.wait_allocatable(named("a"), 0)
    scene.wait(plain("waits", "a"))
    taker.delete()
    taker.wait_gone()
    cluster.wait_allocatable(named("a"), 2, 60)
    cluster.wait_for(lambda: metric(scene, "devices_withheld", reason="foreign") == 0, 30, "nothing is withheld")
    scene.running(cluster.pod("waits"))
    scene.waiting.clear()
    scene.before = scene.after = 1
