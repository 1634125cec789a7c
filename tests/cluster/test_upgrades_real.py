"""Operations on agents in a DaemonSet while pods hold devices, on the real node.

The operations are an update with ``maxSurge``, a new image together with a broken config file, an upgrade and its
rollback during a move, and a drain of the node. `tests.cluster.test_daemonset_real` tests agents without moves.
"""

from __future__ import annotations

import json
import urllib.error
from collections import Counter
from typing import Any

from tests.cluster import test_daemonset_real as daemonset
from tests.cluster.node import Pod
from tests.cluster.test_daemonset_real import (
    COUNT,
    DRIVER,
    IMAGES,
    NAMESPACE,
    PATIENCE,
    RESOURCE,
    Deployed,
    get,
    held_by,
    ready,
)

deployed = daemonset.deployed  # a fixture
ON = f"--namespace={NAMESPACE}"
BY_HAND = {"updateStrategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}}


def set_image(deployed: Deployed, image: str) -> None:
    """Set another image in the DaemonSet."""
    deployed.cluster.kubectl("set", "image", "daemonset/dra-bridge", f"agent={image}", ON)


def unready(pod: Pod) -> str:
    """Return why an agent's pod is not ready; "" if the pod is ready."""
    try:
        get(pod, "/readyz")
    except urllib.error.HTTPError as error:
        return error.read().decode()
    return ""


def other_pod(deployed: Deployed, agent: Pod) -> Pod:
    """Wait for the pod that replaces this agent's pod; return the new pod when it runs and answers HTTP requests."""

    def other() -> Pod | None:
        found = [pod for pod in deployed.pods() if pod.uid != agent.uid and "deletionTimestamp" not in metadata(pod)]
        return found[0] if found and found[0].phase == "Running" else None

    pod = deployed.cluster.wait_for(other, PATIENCE, "another pod runs", log="kubelet")
    assert pod is not None

    def answers() -> bool:
        try:
            return bool(get(pod, "/healthz"))
        except urllib.error.HTTPError:
            return True
        except OSError:
            return False

    deployed.cluster.wait_for(answers, PATIENCE, "it answers")
    return pod


def metadata(pod: Pod) -> dict[str, Any]:
    found: dict[str, Any] = pod.object["metadata"]
    return found


def one_more_each(deployed: Deployed) -> tuple[Pod, Pod]:
    """Start one more pod by limits and one more pod by a claim, and wait until both run."""
    # While no plugin is registered, a pod by limits gets its device through DRA.
    deployed.cluster.wait_reported()
    deployed.cluster.wait_allocatable(RESOURCE, 2)
    deployed.wait_offered(2)
    deployed.template("board")
    plain = deployed.cluster.start_pod("plain-later", {RESOURCE: 1})
    user = deployed.pod("user-later", {"board": {"resourceClaimTemplateName": "board"}})
    return plain.wait_running(), user.wait_running()


def states(deployed: Deployed) -> Counter[str]:
    """Return the number of devices in each state, from the output of `status`."""
    return Counter(state for _, state, _ in deployed.sides().values())


def wait_states(deployed: Deployed, **wanted: int) -> None:
    """Wait until these numbers of devices are in these states; a state's name has _ for -."""
    counts = Counter({name.replace("_", "-"): count for name, count in wanted.items()})
    deployed.cluster.wait_for(lambda: states(deployed) == counts, 60, f"the devices are {dict(counts)}")


def share(deployed: Deployed, text: str) -> None:
    """Request with `migrate` how many devices are for claims, without waiting for the moves."""
    deployed.run_cli("migrate", deployed.cluster.node_name, "--driver", DRIVER, "--share", text)


def test_max_surge_by_hand(deployed: Deployed) -> None:
    """An update with maxSurge does not end, and the log, /readyz and `status` state the reason. Pods still get devices.

    After the printed manifests are applied, the update ends.
    """
    cluster, agent = deployed.cluster, deployed.agent()
    plain, user, held = deployed.both_doors()
    containers = plain.container_id(), user.container_id()
    cluster.kubectl("patch", "daemonset", "dra-bridge", ON, "--patch", json.dumps({"spec": BY_HAND}))
    set_image(deployed, IMAGES[1])
    second = other_pod(deployed, agent)
    why = "set maxSurge to 0"
    cluster.wait_for(lambda: why in unready(second), PATIENCE, "it says that it is not ready, and why")
    cluster.wait_for(lambda: why in second.logs(), 30, "so does its log")
    cluster.wait_for(lambda: why in deployed.cli("status")[1], 60, "so does status")
    assert deployed.cli("status")[0] == 1
    later = one_more_each(deployed)
    assert len({*held, *map(held_by, later)}) == COUNT
    assert (ready(agent), ready(second), agent.restarts(), second.restarts()) == (True, False, 0, 0)
    deployed.image = IMAGES[1]
    deployed.apply()
    assert ready(last := deployed.agent(other_than=agent.uid))
    cluster.wait_for(lambda: len(deployed.holders()) == COUNT, 60, "all holders are known")
    assert deployed.holders().items() >= held.items()
    assert (plain.container_id(), user.container_id()) == containers
    assert last.restarts() == 0


def test_a_new_image_with_a_broken_file(deployed: Deployed) -> None:
    """A new image comes with a broken config file: the new agent uses the last valid file, and is not ready.

    The agent states the reason. It is ready after the file is repaired.
    """
    cluster, agent = deployed.cluster, deployed.agent()
    plain, user, held = deployed.both_doors()
    containers = plain.container_id(), user.container_id()
    broken = {"data": {"config.yaml": "resources: [}"}}
    cluster.api.patch("ConfigMap", "dra-bridge", broken, NAMESPACE)
    set_image(deployed, IMAGES[1])
    second = other_pod(deployed, agent)
    cluster.wait_for(lambda: "the last good one is served: " in unready(second), PATIENCE, "it says why")
    later = one_more_each(deployed)
    assert len({*held, *map(held_by, later)}) == COUNT
    assert (ready(second), second.restarts()) == (False, 0)
    assert "deviceplugin_config_current 0.0" in get(second, "/metrics")
    said = deployed.cli("status")
    assert said[0] == 1
    assert "config.yaml:1" in said[1]
    deployed.image = IMAGES[1]
    deployed.apply()

    def mended() -> bool:
        deployed.change(second)
        return ready(second)

    cluster.wait_for(mended, PATIENCE, "it is ready")
    assert deployed.agent().uid == second.uid
    assert second.restarts() == 0
    cluster.wait_for(lambda: deployed.holders().items() >= held.items(), 60, "all holders are known")
    assert (plain.container_id(), user.container_id()) == containers


def test_upgrade_and_rollback_in_the_middle_of_a_move(deployed: Deployed) -> None:
    """Devices that are to move when their holders end do so after an upgrade of the agent and after its rollback."""
    cluster, agent = deployed.cluster, deployed.agent()
    plain, user, held = deployed.both_doors()
    containers = plain.container_id(), user.container_id()
    device = held_by(plain)
    share(deployed, "all")
    wait_states(deployed, dra=3, to_dra=1)
    set_image(deployed, IMAGES[1])
    second = deployed.agent(other_than=agent.uid)
    wait_states(deployed, dra=3, to_dra=1)
    cluster.wait_for(lambda: deployed.holders() == held, 60, f"the holders are {held}")
    deployed.template("board")
    hungry = [deployed.pod(f"user-{n}", {"board": {"resourceClaimTemplateName": "board"}}) for n in range(3)]
    cluster.wait_for(lambda: sum(pod.phase == "Running" for pod in hungry) == 2, PATIENCE, "two of three run")
    (waits,) = [pod for pod in hungry if pod.phase != "Running"]
    assert waits.unschedulable()
    plain.delete()
    waits.wait_running()
    assert held_by(waits) == device
    wait_states(deployed, dra=4)
    # The devices are to move back to the device plugin, and the agent gets the former image again.
    share(deployed, "none")
    wait_states(deployed, to_plugin=4)
    cluster.kubectl("rollout", "undo", "daemonset/dra-bridge", ON)
    third = deployed.agent(other_than=second.uid)
    assert [one["image"] for one in third.object["spec"]["containers"]] == [IMAGES[0]]
    wait_states(deployed, to_plugin=4)
    assert user.container_id() == containers[1]
    hungry[hungry.index(waits)].delete()
    wait_states(deployed, to_plugin=3, plugin=1)
    cluster.wait_allocatable(RESOURCE, 1)
    assert held_by(cluster.start_pod("back", {RESOURCE: 1}).wait_running()) == device
    assert [agent.restarts() for agent in deployed.pods()] == [0]


def test_drain(deployed: Deployed) -> None:
    """`kubectl drain` ends the pods with devices, but not the agent; devices move. Pods run again after `uncordon`."""
    cluster, agent = deployed.cluster, deployed.agent()
    plain, user, _ = deployed.both_doors()
    share(deployed, "all")
    wait_states(deployed, dra=3, to_dra=1)
    drain = ("drain", cluster.node_name, "--ignore-daemonsets", "--force", "--delete-emptydir-data")
    cluster.kubectl(*drain, f"--timeout={PATIENCE:g}s")
    assert plain.gone()
    assert user.gone()
    wait_states(deployed, dra=4)
    cluster.wait_for(lambda: not deployed.holders(), 60, "nobody holds a device")
    assert deployed.agent().uid == agent.uid
    deployed.template("board")
    waits: list[Pod] = [deployed.pod("claim-later", {"board": {"resourceClaimTemplateName": "board"}})]
    if cluster.minor >= 35:
        waits.append(cluster.start_pod("limits-later", {RESOURCE: 1}))
    for pod in waits:
        pod.wait_unschedulable()
    cluster.kubectl("uncordon", cluster.node_name)
    assert len({held_by(pod.wait_running()) for pod in waits}) == len(waits)
