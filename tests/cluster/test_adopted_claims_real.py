"""Claims of devices of an adopted plugin on the real node.

The tests compare what pods see, move devices between the plugin and claims, restart programs, and let the plugin
register with the kubelet instead of the agent.

The vendor's plugin is `deviceplugin.testing.foreign`. Containers show which devices they hold by locks of the kernel
(``tests.cluster.locks``), and under churn by files that they write (``tests.cluster.test_handover``).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from deviceplugin.kubelet import foreign_plugin
from deviceplugin.testing import foreign
from tests.cluster import isolate, locks, test_handover
from tests.cluster import test_witnesses_real as witnesses
from tests.cluster.bridge import Bridge
from tests.cluster.node import Cluster, Pod
from tests.cluster.test_adopted_real import DIRECTORY
from tests.cluster.test_existing_plugin_real import Vendor
from tests.cluster.test_witnesses_real import CHECKPOINT, LIMIT, Agents, Scene, claimer, plain, scene
from tests.nvml.gpus import FakeGpus
from tests.nvml.gpus import build as build_library
from tests.programs import ANY_CONFIG
from tests.scenarios.sides import end_one_of_each, named

__all__ = ["scene"]

BYPASSED = "has registered with the kubelet instead of this agent"
SEEN = r"""
env | grep -v HOSTNAME | sort
for path in /dev/gadgetctl $(find /run/deviceplugin-cluster -type c); do stat -c '%n %F %a %u %g %t.%T' $path; done
grep vendor-lib /proc/self/mountinfo | cut -d ' ' -f 4-6
cat /sys/fs/cgroup/devices/devices.list 2>/dev/null | sort
cat /opt/vendor-lib/hello
"""


PROGRAM = """
import sys
from dra_bridge.cli import main
from dra_bridge.node import driver_runtime, resource

driver_runtime.BYPASSED = resource.BYPASSED = 20.0
sys.exit(main())
"""
"""`dra-bridge` which considers a plugin's bypass of the agent over after 20 s without a sign of it, not 60 s."""


def command(bridge: Bridge) -> list[str]:
    """Return the command line of `dra-bridge run --adopt` with a bridge's config file."""
    options = ["--config", str(bridge.config), *ANY_CONFIG, "--adopt", str(DIRECTORY)]
    return [sys.executable, "-c", PROGRAM, "run", *options]


def adopted(letter: str, share: str | int, **more: Any) -> dict[str, Any]:
    return {
        "name": named(letter),
        "driver": f"{letter}.example.net",
        "devices": [{"plugin": {"claims": True}}],
        "dra": {"share": share},
        **more,
    }


@pytest.fixture(autouse=True)
def adopting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start the agents with --adopt, and wait for drivers only: a resource registers once its plugin has started."""

    def wait_registered(bridge: Bridge) -> None:
        for driver in bridge.drivers:
            line = f"driver {driver} is registered with the kubelet"
            bridge.cluster.wait_for(lambda line=line: line in bridge.log(), 120, line)  # type: ignore[misc]

    for kind in (Agents, Bridge):
        monkeypatch.setattr(kind, "command", command)
        monkeypatch.setattr(kind, "wait_registered", wait_registered)


@pytest.fixture
def vendors(monkeypatch: pytest.MonkeyPatch) -> dict[str, Vendor]:
    """Start a vendor's plugin for each served resource; return the plugins by the resource's letter."""
    found: dict[str, Vendor] = {}
    serve = Scene.serve

    def serve_adopted(scene: Scene, *resources: Mapping[str, Any]) -> Agents:
        agents = serve(scene, *resources)
        for one in resources:
            letter = str(one["name"]).rpartition("/")[2]
            vendor = found[letter] = Vendor(scene, letter)
            vendor.directory = DIRECTORY
            vendor.start()
        return agents

    monkeypatch.setattr(Scene, "serve", serve_adopted)
    monkeypatch.setattr(witnesses, "resource", adopted)
    return found


def calls(vendor: Vendor, call: str) -> list[dict[str, Any]]:
    return foreign.calls(vendor.notes, call)


# What a pod sees.


def test_what_a_pod_sees(scene: Scene) -> None:
    """With limits a pod sees what it sees without the agent; with a claim only owner and mode of device nodes differ.

    If the pod and the plugin set one variable, the pod's value holds with limits, and the plugin's with a claim.
    """
    cluster = scene.cluster
    scene.nodes("a", 1)
    library = isolate.DEVICES / "vendor-lib"
    shutil.rmtree(library, ignore_errors=True)
    library.mkdir()
    (library / "hello").write_text("of the vendor")
    vendor = Vendor(scene, "a")
    (node,) = (locks.NODES / "a").iterdir()
    os.chown(node, 1234, 4321)
    os.chmod(node, 0o640)
    vendor.answer["mounts"] = [[str(library), "/opt/vendor-lib"]]
    vendor.answer["annotations"] = {"vendor.example/x": "y"}
    vendor.answer["env"]["MODE"] = "the plugin's"

    def seen(pod: Pod) -> list[str]:
        scene.running(pod)
        text = pod.exec(["/bin/sh", "-c", SEEN])
        pod.delete()
        pod.wait_gone()
        return [line for line in text.splitlines() if not line.startswith(("POD=", "POD_UID="))]

    def own_mode(manifest: dict[str, Any]) -> dict[str, Any]:
        manifest["spec"]["containers"][0]["env"].append({"name": "MODE", "value": "the pod's"})
        return manifest

    vendor.start()
    cluster.wait_allocatable(named("a"), 1)
    alone, overridden = (seen(scene.make(one)) for one in (plain("p", "a"), own_mode(plain("p", "a"))))
    vendor.stop()
    cluster.wait_allocatable(named("a"), 0)
    scene.serve({**adopted("a", "none"), "devices": [{"plugin": {"claims": True, "drop_annotations": ["vendor.*"]}}]})
    vendor.directory = DIRECTORY
    vendor.start()
    cluster.wait_allocatable(named("a"), 1)
    limits = seen(scene.pod("limits", "a"))
    assert limits == alone
    scene.share(a="all")
    scene.wait_states("a", dra=1)
    claimed, claimed_overridden = (
        seen(scene.make(one)) for one in (claimer("claimed", "a"), own_mode(claimer("claimed", "a")))
    )
    differences = {(one, other) for one, other in zip(alone, claimed, strict=True) if one != other}
    # Only mode, user and group of the device node and of the control node differ.
    assert {" ".join(one.split()[:-4] + one.split()[-1:]) for one, _ in differences} == {
        " ".join(other.split()[:-4] + other.split()[-1:]) for _, other in differences
    }
    assert {(" ".join(one.split()[-4:-1]), " ".join(other.split()[-4:-1])) for one, other in differences} == {
        ("640 1234 4321", "666 0 0"),
        ("600 0 0", "666 0 0"),
    }
    assert "MODE=the pod's" in overridden
    assert "MODE=the plugin's" in claimed_overridden


def test_a_mount_without_a_source(scene: Scene, vendors: dict[str, Vendor]) -> None:
    """If the source of a plugin's mount is missing, an Event of the pod names it; once it exists, the pod runs."""
    scene.nodes("a", 1)
    scene.serve(adopted("a", "all"))
    missing = isolate.DEVICES / "not-there"
    shutil.rmtree(missing, ignore_errors=True)
    vendor = vendors["a"]
    vendor.stop()
    vendor.answer["mounts"] = [[str(missing), "/opt/missing"]]
    vendor.start()
    scene.agents.wait_offered(1)
    pod = scene.claimer("p", "a")
    words = scene.agents.wait_event(pod, str(missing), 60)
    print(words)
    assert not missing.exists()
    missing.mkdir()
    pod.wait_running(60)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=["sigterm", "sigkill"])
@pytest.mark.parametrize("call", ["GetPreferredAllocation", "Allocate"])
def test_a_plugin_that_ends_while_a_pod_is_admitted(
    scene: Scene, vendors: dict[str, Vendor], call: str, number: signal.Signals
) -> None:
    """The pod's status says which plugin ended in which call, and the kubelet admits the next pod.

    A claim holds a device, so the agent stays registered with the kubelet while the plugin is away. The kubelet's call
    to the agent therefore ends because the plugin has ended, and not because the agent's registration has ended.
    """
    cluster = scene.cluster
    scene.nodes("a", 2)
    scene.serve(adopted("a", 1))
    vendor, hold = vendors["a"], isolate.DEVICES / "hold"
    vendor.stop()
    vendor.quirks = {"hold": str(hold), "held": call, "preferred": True}
    scene.stack.callback(hold.unlink, missing_ok=True)
    vendor.start()
    scene.agents.wait_offered(1)
    cluster.wait_allocatable(named("a"), 1)
    held = scene.claimer("held", "a")
    scene.running(held)
    scene.before = 1
    hold.touch()
    before = len(calls(vendor, call))
    pod = scene.pod("limited", "a", restartPolicy="Never")
    cluster.wait_for(lambda: len(calls(vendor, call)) > before, LIMIT, f"the plugin is in {call}")
    vendor.stop(number)
    cluster.wait_for(lambda: pod.phase == "Failed", LIMIT, "the kubelet refuses the pod")
    message = cluster.api.get("Pod", pod.name)["status"]["message"]
    print(message)
    assert f"{named('a')}: the vendor's plugin at {DIRECTORY}/{named('a').replace('/', '_')}-vendor.sock" in message
    assert f"ended, or cannot be reached, during {call}" in message
    cluster.start_pod("bystander", {}).wait_running()
    hold.unlink()
    vendor.start()
    cluster.wait_for(lambda: len(healthy()) == 1, LIMIT, "the kubelet counts the device as healthy")
    scene.running(scene.pod("next", "a"))
    scene.after = 2


@pytest.mark.parametrize(
    ("side", "call", "grace", "then", "how"),
    [
        ("pod", "Allocate", 1, "other", "answers"),
        ("pod", "PreStartContainer", 0, "other", "killed"),
        ("claim", "Allocate", 0, "other", "answers"),
        ("claim", "PreStartContainer", 0, "same", "killed"),
    ],
)
def test_a_pod_is_deleted_while_its_plugin_hangs(
    scene: Scene, vendors: dict[str, Vendor], side: str, call: str, grace: int, then: str, how: str
) -> None:
    """A pod is deleted during a plugin's call: its late response grants nothing, and the next pod gets the device.

    side and call: how the first pod gets the device, and the plugin's call that hangs. grace: of the deletion, in
    seconds. then: the side of the next pod. how: the call ends by the plugin's response or by its kill.
    """
    cluster = scene.cluster
    scene.nodes("a", 1)
    hold = isolate.DEVICES / "hold"
    scene.stack.callback(hold.unlink, missing_ok=True)
    share = {"pod": "none", "claim": "all"}
    once = {"devices": [{"plugin": {"claims": True, "pre_start": "once"}}]}
    scene.serve({**adopted("a", share[side]), **once})
    vendor = vendors["a"]
    vendor.stop()
    hold.touch()
    vendor.quirks = {"hold": str(hold), "held": call, "pre_start": call == "PreStartContainer"}
    vendor.start()
    if side == "claim":
        scene.agents.wait_offered(1)
    else:
        cluster.wait_for(lambda: len(healthy()) == 1, LIMIT, "the kubelet counts the device as healthy")
    first = scene.pod("first", "a") if side == "pod" else scene.claimer("first", "a")
    cluster.wait_for(lambda: calls(vendor, call), LIMIT, f"the plugin is in {call}")
    first.delete(grace)
    after = side if then == "same" else {"pod": "claim", "claim": "pod"}[side]
    if then == "other":
        scene.share(a=share[after])
    manifest = plain("next", "a") if after == "pod" else claimer("next", "a")
    scene.waiting["next"] = manifest
    scene.make(manifest)
    scene.observe(3)
    if how == "killed":
        vendor.stop(signal.SIGKILL)
        hold.unlink()
        vendor.start()
    else:
        hold.unlink()

    def got() -> bool:
        scene.check()
        scene.urge()
        return any(one.pod == "next" for one in locks.holders())

    cluster.wait_for(got, 120, "the next pod has the device")
    scene.waiting.pop("next")
    assert not [one for one in locks.holders() if one.uid == first.uid]
    scene.after = 1


def test_pods_with_limits_through_dra_start_though_their_plugin_wants_pre_start_container(
    scene: Scene, vendors: dict[str, Vendor]
) -> None:
    """A pod with limits starts through DRA although its plugin wants PreStartContainer; the call is made once."""
    cluster = scene.cluster
    scene.nodes("a", 1)
    once = {"devices": [{"plugin": {"claims": True, "pre_start": "once"}}]}
    scene.serve({**adopted("a", "all"), **once})
    vendor = vendors["a"]
    vendor.stop()
    vendor.quirks = {"pre_start": True}
    vendor.start()
    scene.agents.wait_offered(1)
    pod = scene.pod("through-dra", "a")
    scene.running(pod)
    assert len(calls(vendor, "PreStartContainer")) == 1
    pod.delete()
    pod.wait_gone()
    scene.share(a="none")
    cluster.wait_for(lambda: len(healthy()) == 1, LIMIT, "the kubelet counts the device as healthy")
    scene.running(scene.pod("plain", "a"))
    assert len(calls(vendor, "PreStartContainer")) == 2
    scene.after = 1


# Moves and restarts.


def test_moves_through_restarts(scene: Scene, vendors: dict[str, Vendor]) -> None:
    """While kubelet, plugins and agent restart, pods with limits and with claims keep devices that are to move."""
    plains, claimers = scene.both()
    allocated = {letter: len(calls(vendor, "Allocate")) for letter, vendor in vendors.items()}
    for what in ("kubelet", "plugins", "agent", "plugins", "kubelet", "agent"):
        if what == "kubelet":
            scene.restart_kubelet("sigkill")
        elif what == "agent":
            scene.agents.kill()
            scene.agents.start()
            scene.agents.wait_registered()
        else:
            for vendor in vendors.values():
                vendor.stop(signal.SIGKILL)
                vendor.start()
        scene.check()
    scene.observe(5)
    # The agent kept the plugins' responses: no restart caused another Allocate.
    assert allocated == {letter: len(calls(vendor, "Allocate")) for letter, vendor in vendors.items()}
    end_one_of_each(scene, plains, claimers)


@pytest.fixture
def cards(cluster: Cluster) -> Iterator[Bridge]:
    """An agent that has adopted a plugin with eight devices, none of which is for claims yet."""
    for directory in (test_handover.DEVICES, test_handover.NOTES):
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
    names = [f"card{number}" for number in range(8)]
    for name in names:
        os.mknod(test_handover.DEVICES / name, 0o20600, os.makedev(1, 5))
    path = f"{test_handover.DEVICES}/{{id}}"
    one = {
        "name": test_handover.RESOURCE,
        "devices": dict.fromkeys(names, "Healthy"),
        "answer": {"nodes": [[path, path, "rw"]]},
    }
    file = cluster.logs / f"vendor-cards-{time.monotonic_ns()}.json"
    foreign.write(file, [one])
    resource = {
        "name": test_handover.RESOURCE,
        "driver": test_handover.DRIVER,
        "devices": [{"plugin": {"claims": True}}],
        "dra": {"share": "none"},
    }
    with contextlib.ExitStack() as stack:
        running = stack.enter_context(Bridge.running(cluster, resource))
        arguments = ["-m", "deviceplugin.testing.foreign", str(file), "--directory", str(DIRECTORY)]
        log = stack.enter_context(file.with_suffix(".log").open("wb"))
        vendor = stack.enter_context(subprocess.Popen([sys.executable, *arguments], stdout=log, stderr=log))
        stack.callback(vendor.kill)
        cluster.wait_allocatable(test_handover.RESOURCE, 8)
        stack.callback(test_handover.annotate, cluster, None)
        yield running


@pytest.mark.parametrize(("first", "then"), [("limits", "claim"), ("claim", "limits")])
def test_a_held_device_comes_back_under_another_id(
    scene: Scene, vendors: dict[str, Vendor], first: str, then: str
) -> None:
    """The plugin lists the same device nodes under new ids: no pod or claim gets a new id before the holder ends."""
    cluster, shares = scene.cluster, {"claim": "all", "limits": "none"}
    make = {"claim": scene.claimer, "limits": scene.pod}
    scene.nodes("a", 2)
    scene.serve(adopted("a", shares[first]))
    held = make[first]("held", "a")
    scene.running(held)
    scene.before = 1
    vendors["a"].stop()
    vendors["a"] = Vendor(scene, "a", prefix="x-")
    vendors["a"].directory = DIRECTORY
    vendors["a"].start()
    why = "which the vendor's plugin does not list any more"
    cluster.wait_for(lambda: scene.agents.log().count(why) >= 2, LIMIT, "both ids are withheld")
    scene.share(a=shares[then])
    waiting = [make[then](f"next-{number}", "a") for number in range(2)]
    scene.observe(10)
    assert [pod.phase for pod in waiting] == ["Pending", "Pending"]
    held.delete()
    held.wait_gone()
    scene.running(*waiting)
    scene.after = 2


@pytest.mark.parametrize(
    ("first", "then", "answer"),
    [
        (("a", "claim"), ("b", "limits"), "nodes"),
        (("a", "claim"), ("b", "claim"), "nodes"),
        (("a", "limits"), ("b", "limits"), "nodes"),
        (("b", "limits"), ("a", "claim"), "nodes"),
        (("b", "limits"), ("a", "limits"), "nodes"),
        (("b", "claim"), ("a", "limits"), "nodes"),
        (("a", "claim"), ("b", "limits"), "cdi"),
        (("a", "limits"), ("b", "limits"), "cdi"),
        (("b", "limits"), ("a", "claim"), "cdi"),
        (("b", "claim"), ("a", "limits"), "cdi"),
    ],
)
def test_a_node_that_another_resource_lists_as_well(
    scene: Scene, first: tuple[str, str], then: tuple[str, str], answer: str
) -> None:
    """A plugin gives a device node for resource a, and resource b lists it as well: the node has one holder at a time.

    first and then: for the holder and for the pod that waits for the holder's end, the resource, and limits or claim.
    """
    cluster, shares, ways = scene.cluster, {"claim": "all", "limits": "none"}, dict([first, then])
    make = {"claim": scene.claimer, "limits": scene.pod}
    scene.nodes("a", 1)
    path = {"path": f"{locks.NODES}/a/*"}
    scene.serve(adopted("a", shares[ways["a"]]), witnesses.resource("b", shares[ways["b"]], devices=[path]))
    vendor = Vendor(scene, "a", answer)
    vendor.directory = DIRECTORY
    vendor.start()
    for letter, way in ways.items():
        if way == "claim":
            scene.agents.wait_offered(1, f"{letter}.example.net")
        else:
            cluster.wait_allocatable(named(letter), 1)
    one_after_the_other(scene, make[first[1]]("held", first[0]), lambda name: make[then[1]](name, then[0]))


def one_after_the_other(scene: Scene, held: Pod, start: Callable[[str], Pod]) -> None:
    """Check that a second pod runs only after the end of the pod `held`. start: starts the second pod by its name."""
    scene.running(held)
    scene.before = 1
    second = start("second")
    scene.observe(10)
    assert second.phase in ("Pending", "Failed")
    held.delete()
    held.wait_gone()
    if second.phase == "Failed":  # The kubelet called Allocate before it had the list without the device.
        second = start("third")
    scene.running(second)


@pytest.mark.parametrize(("first", "then"), ["ab", "ba"])
def test_a_gpu_by_its_node_and_its_partition(
    scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: str, then: str
) -> None:
    """A plugin gives pods a whole GPU by its device node; no pod has the GPU's MIG partition at the same time."""
    scene.nodes("a", 1)
    (path,) = (locks.NODES / "a").iterdir()
    gpu = Path("/dev/nvidia0")
    gpu.unlink(missing_ok=True)
    os.mknod(gpu, stat.S_IFCHR | 0o666, path.stat().st_rdev)
    scene.stack.callback(gpu.unlink)
    machine = FakeGpus(tmp_path / "machine", library := build_library(tmp_path))
    machine.gpu(0)
    machine.partition(0, 0, "1g.5gb")
    monkeypatch.setenv("FAKE_NVML", str(machine.state))
    spec = Path("/etc/cdi/nvidia.json")
    spec.parent.mkdir(exist_ok=True)
    edits = {"deviceNodes": [{"path": str(path), "hostPath": str(gpu)}]}
    devices = [{"name": "0:0", "containerEdits": edits}]
    spec.write_text(json.dumps({"cdiVersion": "0.6.0", "kind": "nvidia.com/gpu", "devices": devices}))
    scene.stack.callback(spec.unlink)
    nvidia = {"profile": "1g.5gb", "injection": "cdi", "library": str(library)}
    scene.serve(adopted("a", "none"), witnesses.resource("b", "none", devices=[{"nvidia": nvidia}]))
    vendor = Vendor(scene, "a", "nodes")
    vendor.directory = DIRECTORY
    vendor.start()
    for letter in "ab":
        scene.cluster.wait_allocatable(named(letter), 1)
    one_after_the_other(scene, scene.pod("held", first), lambda name: scene.pod(name, then))


@pytest.mark.lengthy
def test_moves_under_churn(cards: Bridge) -> None:
    """No device has two holders while pods and devices' moves go on, also during restarts, kills and an API outage."""
    test_handover.test_no_device_ever_has_two_holders(cards)


# The plugin registers with the kubelet, past the agent, while claims hold devices.


def healthy() -> set[str]:
    """Return the ids that the kubelet counts as healthy."""
    return set(json.loads(CHECKPOINT.read_text())["Data"]["RegisteredDevices"].get(named("a")) or ())


def refused(scene: Scene, name: str) -> None:
    """Check that a new pod with limits gets no device, then delete the pod."""
    pod = scene.pod(name, "a", restartPolicy="Never")
    scene.cluster.wait_for(lambda: pod.phase == "Failed" or pod.unschedulable(), LIMIT, f"{name} gets nothing")
    print(f"{name}: {pod.phase}")
    scene.check()
    pod.delete(0)
    pod.wait_gone()


def reverted(scene: Scene, vendor: Vendor) -> None:
    """Restart the plugin so that it registers with the kubelet, as when its DaemonSet gets its former hostPath."""
    vendor.move(None)


@pytest.mark.parametrize("agent", ["runs", "starts-later"])
def test_a_reverted_path_while_claims_hold_devices(scene: Scene, vendors: dict[str, Vendor], agent: str) -> None:
    """The plugin registers with the kubelet: the agent registers again and refuses pods; claims keep their devices."""
    cluster = scene.cluster
    scene.nodes("a", 2)
    scene.serve(adopted("a", "all"))
    scene.agents.wait_offered(2)
    held = scene.claimer("held", "a")
    scene.running(held)
    vendor, before = vendors["a"], len(calls(vendors["a"], "Allocate"))
    scene.before = 1
    if agent == "starts-later":
        scene.agents.stop()
        reverted(scene, vendor)
        cluster.wait_for(lambda: len(healthy()) == 2, LIMIT, "the kubelet has the plugin's devices")
        scene.agents.start()
    else:
        reverted(scene, vendor)
    cluster.wait_for(lambda: BYPASSED in scene.agents.log(), LIMIT, "the agent has noticed")
    cluster.wait_for(lambda: not healthy(), LIMIT, "the kubelet counts no device as healthy")
    scene.agents.wait_offered(0)
    events = [one for one in cluster.api.list("Event", "default", "v1") if one["reason"] == "AdoptedPluginBypassed"]
    assert "was the hostPath of its DaemonSet reverted?" in events[-1]["message"]
    for number in range(2):
        refused(scene, f"limits-{number}")
    scene.restart_kubelet("sigterm")
    cluster.wait_for(lambda: not healthy(), LIMIT, "the kubelet counts no device as healthy")
    refused(scene, "limits-after")
    scene.observe(3)
    assert len(calls(vendor, "Allocate")) == before
    # The operator corrects the path.
    vendor.move(DIRECTORY)
    scene.agents.wait_offered(2, timeout=120)
    scene.running(scene.claimer("next", "a"))
    scene.after = 2


@pytest.mark.parametrize("adopts", [True, False])
def test_a_reverted_path_after_the_config_has_dropped_the_resource(
    scene: Scene, vendors: dict[str, Vendor], monkeypatch: pytest.MonkeyPatch, *, adopts: bool
) -> None:
    """A plugin registers with the kubelet after the config dropped its resource, whose devices claims hold.

    No pod gets a device. Only the agent's saved records still name the devices. adopts: the agent still adopts another
    resource; otherwise the agent runs without `--adopt`.
    """
    cluster = scene.cluster
    for letter in "ab":
        scene.nodes(letter, 2)
    scene.serve(adopted("a", "all"), adopted("b", "none"))
    scene.agents.wait_offered(2, "a.example.net")
    held = [scene.claimer(f"held-{number}", "a") for number in range(2)]
    scene.running(*held)
    scene.before = 2
    scene.agents.stop()
    del scene.agents.resources[0]
    if not adopts:
        scene.agents.resources[0] = {**adopted("b", "none"), "devices": [{"path": f"{locks.NODES}/b/*"}]}
        monkeypatch.setattr(Agents, "command", lambda agents: command(agents)[:-2])
    scene.agents.write()
    vendor, before = vendors["a"], len(calls(vendors["a"], "Allocate"))
    reverted(scene, vendor)
    cluster.wait_for(lambda: len(healthy()) == 2, LIMIT, "the kubelet has the plugin's devices")
    scene.agents.start()
    cluster.wait_for(lambda: BYPASSED in scene.agents.log(), LIMIT, "the agent has noticed")
    cluster.wait_for(lambda: not healthy(), LIMIT, "the kubelet counts no device as healthy")
    refused(scene, "limits")
    cluster.wait_allocatable(named("a"), 0)
    assert len(calls(vendor, "Allocate")) == before
    # The plugin registers with the agent again, or serves the resource without the agent.
    vendor.stop()
    for pod in held:
        pod.delete()
    if adopts:
        vendor.directory = DIRECTORY
    else:
        cluster.wait_for(lambda: "waiting for the vendor's plugin" in scene.agents.log(), LIMIT, "the agent has left")
    vendor.start()
    cluster.wait_allocatable(named("a"), 2)
    scene.running(scene.pod("next", "a"))
    scene.after = 1


def test_a_reverted_plugin_that_comes_again_and_again(scene: Scene, vendors: dict[str, Vendor]) -> None:
    """A plugin ends when the agent registers again, as AMD's does: the agent notices each return of the plugin."""
    cluster = scene.cluster
    scene.nodes("a", 2)
    scene.serve(adopted("a", "all"))
    scene.agents.wait_offered(2)
    held = [scene.claimer(f"held-{number}", "a") for number in range(2)]
    scene.running(*held)
    scene.before = 2
    vendor = vendors["a"]
    vendor.quirks = {"stream_end": "exit"}
    reverted(scene, vendor)
    prefix = "another plugin has registered this resource with the kubelet: "
    told = re.compile(rf"{prefix}(its checkpoint has|the socket \S+ is new, and named as its adopted plugin's)")

    def noticed() -> int:
        return len(told.findall(scene.agents.log()))

    for number in range(8):
        cluster.wait_for(lambda: noticed() > number, LIMIT, "it is noticed again")  # noqa: B023
        assert vendor.process is not None
        # When a stream ends, the kubelet disconnects the plugin that is registered then. If this is the agent already,
        # the vendor's plugin stays connected (kubelet 1.36.3, devicemanager/plugin/v1beta1/handler.go: runClient).
        try:
            assert vendor.process.wait(5) == 1
        except subprocess.TimeoutExpired:
            vendor.stop()
        vendor.start()
    cluster.wait_for(lambda: noticed() > 8, LIMIT, "it is noticed again")
    cluster.wait_for(lambda: not healthy(), LIMIT, "the kubelet counts no device as healthy")
    scene.observe(2)
    assert "may have registered this resource" not in scene.agents.log()
    vendor.move(DIRECTORY)
    scene.agents.wait_offered(2, timeout=120)


def test_two_instances_of_a_plugin(scene: Scene, vendors: dict[str, Vendor]) -> None:
    """If one plugin instance registers with the agent and one with the kubelet, no pod gets a device past the agent.

    Devices that no claim holds leave the slice.
    """
    cluster = scene.cluster
    scene.nodes("a", 4)
    scene.serve(adopted("a", 2))
    scene.agents.wait_offered(2)
    cluster.wait_allocatable(named("a"), 2)
    claimed, limited = scene.claimer("held", "a"), scene.pod("limited", "a")
    scene.running(claimed, limited)
    scene.before = 2
    scene.observe(foreign_plugin.LATE + 1)  # a list that the agent has just replaced is no sign of another plugin
    other = Vendor(scene, "a")
    for _ in range(2):
        other.start()
        cluster.wait_for(lambda: BYPASSED in scene.agents.log(), LIMIT, "the agent has noticed")
        scene.agents.wait_offered(1)
        cluster.wait_for(lambda: len(healthy()) <= 2, LIMIT, "the kubelet has the agent's list")
        more = scene.pod("more", "a")
        cluster.wait_for(lambda: more.phase in ("Running", "Failed"), LIMIT, "it is decided")  # noqa: B023
        print(f"the kubelet's answer to a pod beside two instances: {more.phase}")
        scene.check()
        more.delete(0)
        more.wait_gone()
        scene.restart_kubelet("sigterm")
        scene.observe(3)
        other.stop()
    assert not calls(other, "Allocate"), "a pod was given a device past the agent"
    scene.agents.wait_offered(2, timeout=120)
    cluster.wait_allocatable(named("a"), 2)
    scene.after = 2


def test_an_allocation_past_the_agent(scene: Scene, vendors: dict[str, Vendor]) -> None:
    """A device that a pod got past the agent is reported as quarantined, and no claim gets it before the pod ends."""
    cluster = scene.cluster
    scene.nodes("a", 2)
    scene.serve(adopted("a", "all"))
    scene.agents.wait_offered(2)
    scene.agents.kill()
    vendor = vendors["a"]
    reverted(scene, vendor)
    cluster.wait_allocatable(named("a"), 2)
    taker = scene.pod("taker", "a")
    scene.running(taker)
    scene.agents.start()
    scene.agents.wait_registered()
    cluster.wait_for(lambda: "is quarantined" in scene.agents.log(), 60, "it is told")
    cluster.wait_for(lambda: not healthy(), LIMIT, "the kubelet counts no device as healthy")
    vendor.move(DIRECTORY)
    scene.agents.wait_offered(1, timeout=120)
    scene.running(scene.claimer("other", "a"))
    scene.wait(claimer("wants", "a"))
    scene.observe(3)
    scene.before = scene.after = 2
    scene.handed_on(taker.delete, [taker.uid], "wants", limit=120)


def test_adoption_while_pods_hold_devices(scene: Scene) -> None:
    """Pods keep devices that the plugin gave them; the devices move to claims when the pods end, and back later."""
    cluster = scene.cluster
    scene.nodes("a", 4)
    vendor = Vendor(scene, "a")
    vendor.start()
    cluster.wait_allocatable(named("a"), 4)
    pods = [scene.pod(f"before-{number}", "a") for number in range(2)]
    scene.running(*pods)
    agents = scene.serve(adopted("a", "none"))
    vendor.stop()
    cluster.wait_allocatable(named("a"), 0)
    vendor.directory = DIRECTORY
    vendor.start()
    cluster.wait_allocatable(named("a"), 4)
    scene.share(a="all")
    agents.wait_offered(2)
    claimers = [scene.claimer(f"claim-{number}", "a") for number in range(2)]
    scene.running(*pods, *claimers)
    scene.before = 4
    scene.wait(claimer("wants", "a"))
    scene.restart_kubelet("sigkill")
    agents.kill()
    agents.start()
    agents.wait_registered()
    scene.observe(3)
    scene.handed_on(pods[0].delete, [pods[0].uid], "wants")
    # The way back: all claims end, the devices return to the plugin side, then the plugin registers with the kubelet.
    scene.share(a="none")
    for pod in (*claimers, cluster.pod("wants")):
        pod.delete()
        pod.wait_gone()
    scene.wait_states("a", plugin=4)
    vendor.stop()
    cluster.wait_allocatable(named("a"), 0)
    vendor.directory = None
    vendor.start()
    scene.stack.callback(vendor.stop)  # the plugin must end first: the agent's end waits until nothing is allocatable
    cluster.wait_allocatable(named("a"), 4)
    after = [scene.pod(f"after-{number}", "a") for number in range(3)]
    scene.running(pods[1], *after)
    assert BYPASSED not in agents.logs()
