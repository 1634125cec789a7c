"""The agent as a systemd unit on a node with cgroup v2: reboots, device rules, the agent's token and its rights."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from tests.cluster.node import Pod
from tests.vm.machine import LIMIT, wait_for
from tests.vm.node import AGENT, DRIVER, FIRST, FPGAS, MAJOR, MachineCluster

DRIVERLESS, REFUSED = "No such device or address", "Operation not permitted"
DROP_IN = f"/etc/systemd/system/{AGENT}.d/20-test.conf"
FAILED = "UnexpectedAdmissionError"


@pytest.fixture(autouse=True)
def clean(node: MachineCluster) -> Iterator[None]:
    """After each test, remove pods, claims and settings of the agent's unit, and restore the devices' numbers."""
    yield
    node.number_devices({f"fpga{index}": FIRST + index for index in range(4)})
    node.machine.run(f"test ! -e {DROP_IN} || (rm {DROP_IN}; systemctl daemon-reload; systemctl restart {AGENT})")
    links(node, there=True)
    for kind in ("Pod", "ResourceClaim"):
        for one in node.api.list(kind, "default"):
            # Not by force: the kubelet would still know the claim, and not prepare a later claim of the same name.
            node.api.delete(kind, one["metadata"]["name"], "default", grace=1 if kind == "Pod" else None)
    wait_for(lambda: not node.api.list("Pod", "default"), "the pods are gone")
    wait_for(lambda: not node.api.list("ResourceClaim", "default"), "the claims are gone")
    node.wait_allocatable(FPGAS, 2, timeout=LIMIT)


def by_limits(node: MachineCluster, name: str) -> Pod:
    """Start a pod with a device by limits; no controller replaces the pod."""
    return node.start_pod(name, {FPGAS: 1})


def by_claim(node: MachineCluster, name: str) -> Pod:
    """Start a pod with a claim, which is made for the pod."""
    version = "v1" if node.minor >= 34 else "v1beta1"
    exactly = {"deviceClassName": "fpga.example.com"}
    request = {"name": "fpga", "exactly": exactly} if version == "v1" else {"name": "fpga", **exactly}
    claim = {
        "apiVersion": f"resource.k8s.io/{version}",
        "kind": "ResourceClaim",
        "metadata": {"name": name},
        "spec": {"devices": {"requests": [request]}},
    }
    node.api.create(claim, "default")
    return node.start_pod(name, claims={"fpga": name})


def device_of(node: MachineCluster, pod: Pod) -> tuple[str, str]:
    """Return name and device number (major:minor) of the only device in a pod's container."""
    found = node.exec(pod, 'for each in /dev/fpga*; do echo "${each#/dev/} $(stat -c %t:%T $each)"; done').split()
    assert len(found) == 2, found
    major, minor = (int(part, 16) for part in found[1].split(":"))
    return found[0], f"{major}:{minor}"


def opens(node: MachineCluster, pod: Pod, number: str) -> str:
    """Open a device in a container, and return the error: DRIVERLESS if the open is allowed, REFUSED if not."""
    major, minor = number.split(":")
    script = f"rm -f /tmp/n; mknod /tmp/n c {major} {minor}; : < /tmp/n"
    return node.exec(pod, f"({script}) 2>&1", check=False).rpartition(": ")[2]


def ask(node: MachineCluster, path: str) -> str:
    """Return a page of the agent, requested on its node."""
    script = f"import urllib.request as u; print(u.urlopen('http://127.0.0.1:9410{path}').read().decode())"
    return node.machine.run(f'python3 -c "{script}"')


def page(node: MachineCluster) -> dict[str, Any]:
    """Return the agent's /status."""
    found = json.loads(ask(node, "/status"))
    assert isinstance(found, dict)
    return found


def metric(node: MachineCluster, name: str) -> float:
    """Return the value of a metric without labels; 0 if the agent does not have the metric."""
    found = re.search(rf"^{name} (\S+)$", ask(node, "/metrics"), re.MULTILINE)
    return float(found[1]) if found else 0.0


def both(node: MachineCluster) -> list[Pod]:
    """Start a pod by limits and a pod by a claim, and wait until both run."""
    pods = [by_limits(node, "limits"), by_claim(node, "claim")]
    for pod in pods:
        pod.wait_running(timeout=LIMIT)
    return pods


def runs_again(node: MachineCluster, pods: Sequence[Pod]) -> None:
    """Wait until these pods run again after a reboot, and check that each pod can open only its own device."""

    def started_again(pod: Pod) -> bool:
        assert pod.status["phase"] != "Failed", pod.explain()
        return pod.restarts() > 0

    for pod in pods:
        node.wait_for(lambda pod=pod: started_again(pod), LIMIT, f"{pod} has started again")  # type: ignore[misc]
        pod.wait_running(timeout=LIMIT)
    # The status may still name a container that started while the machine went down. No command can run in it.
    numbers = [wait_for(lambda pod=pod: device_of(node, pod), f"{pod} can be entered")[1] for pod in pods]  # type: ignore[misc]
    assert len(set(numbers)) == len(numbers)
    for pod, number in zip(pods, numbers, strict=True):
        assert opens(node, pod, number) == DRIVERLESS
        for other in set(numbers) - {number}:
            assert opens(node, pod, other) == REFUSED


def links(node: MachineCluster, *, there: bool) -> None:
    """Make or remove the devices' links in /dev/char."""
    command = f"ln -sf ../null /dev/char/{MAJOR}:$n" if there else f"rm -f /dev/char/{MAJOR}:$n"
    node.machine.run(f"for n in {' '.join(str(FIRST + index) for index in range(4))}; do {command}; done")


def test_hardened(node: MachineCluster) -> None:
    """`systemd-analyze security` rates the exposure of the agent's running unit below 2.5 of 10."""
    exposure = re.search(
        r"level for dra-bridge.service: ([\d.]+)", node.machine.run(f"systemd-analyze security {AGENT}")
    )
    assert exposure is not None
    print(f"exposure {exposure[1]}")
    assert float(exposure[1]) < 2.5
    assert node.machine.setting(AGENT, "StatusText") == "serves 1 resource"


def test_status_of_an_agent_that_is_no_pod(node: MachineCluster) -> None:
    """`status` reads holders and health from an agent that is a unit, not a pod, at its node's port."""
    both(node)
    shown = node.dra_bridge("status", f"--driver={DRIVER}")
    print(shown)
    assert "pod default/limits" in shown
    assert "claim default/claim" in shown
    assert "?" not in shown
    problems = node.dra_bridge("status", f"--driver={DRIVER}", "--problems")
    print(problems)
    assert "?" not in problems


def test_token(node: MachineCluster) -> None:
    """The timer's service renews the token, bound to the same node. A token that is bound to no node is refused."""
    before = node.machine.run("cat /etc/dra-bridge/token")
    node.machine.run("systemctl start dra-bridge-token.service")
    after = node.machine.run("cat /etc/dra-bridge/token")
    assert after not in ("", before)
    review = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenReview", "spec": {"token": after.strip()}}
    path = "/apis/authentication.k8s.io/v1/tokenreviews"
    extra = node.api.request("POST", path, review)["status"]["user"]["extra"]
    assert extra["authentication.kubernetes.io/node-name"] == [node.node_name]
    kubectl = "kubectl --server=https://$KUBERNETES_SERVICE_HOST --certificate-authority=ca.crt --token=$(cat token)"
    create = f"cd /etc/dra-bridge; . ./server; {kubectl} create token dra-bridge -n dra-bridge 2>&1"
    refused = node.machine.run(create, check=False)
    assert "may have tokens that are bound to that node only" in refused
    ends = json.loads(base64.urlsafe_b64decode(after.split(".")[1] + "==="))["exp"]
    wait_for(lambda: metric(node, "deviceplugin_api_token_expiry_timestamp_seconds") >= ends, "the agent has read it")
    assert node.machine.setting("dra-bridge-token.timer", "ActiveState") == "active"


@pytest.mark.parametrize("linked", [True, False], ids=["with links", "without links"])
def test_daemon_reload(node: MachineCluster, linked: bool) -> None:
    """After `systemctl daemon-reload`, containers can open only devices with links in /dev/char; the agent says so."""
    links(node, there=linked)
    pods = both(node)
    numbers = [device_of(node, pod)[1] for pod in pods]
    assert [opens(node, pod, number) for pod, number in zip(pods, numbers, strict=True)] == [DRIVERLESS, DRIVERLESS]
    told = [str(problem) for problem in page(node)["problems"] if "without a link in /dev/char" in problem]
    printed = node.machine.run("/opt/deviceplugin/bin/deviceplugin devices /etc/dra-bridge/config.yaml")
    print(printed, *told, sep="\n")
    assert ("without a link in /dev/char" in printed) is not linked
    assert bool(told) is not linked
    node.machine.run("systemctl daemon-reload")
    after = DRIVERLESS if linked else REFUSED
    assert [opens(node, pod, number) for pod, number in zip(pods, numbers, strict=True)] == [after, after]
    links(node, there=True)
    assert not [problem for problem in page(node)["problems"] if "without a link" in problem]


def test_reboot(node: MachineCluster) -> None:
    """After a reboot, pods by limits and claim run again with the same devices; the agent starts before the kubelet."""
    assert node.machine.run("stat -f -c %T /run/cdi/").strip() == "tmpfs"
    pods = both(node)
    had = [device_of(node, pod)[0] for pod in pods]  # names only: an earlier test may have changed the numbers
    node.machine.reboot()
    runs_again(node, pods)
    assert [device_of(node, pod)[0] for pod in pods] == had
    started = [int(node.machine.setting(unit, "ActiveEnterTimestampMonotonic")) for unit in (AGENT, "kubelet.service")]
    assert started == sorted(started)


def test_an_agent_that_does_not_start(node: MachineCluster) -> None:
    """If no agent starts after a reboot, the pod by limits fails; the pod by claim runs once an agent runs."""
    limits, claim = both(node)
    late = "[Service]\nExecStart=\nExecStart=/bin/sleep infinity\nTimeoutStartSec=10\n"
    node.machine.put({DROP_IN: late})
    node.machine.run("systemctl daemon-reload")
    node.machine.reboot()
    limits.wait_phase("Failed", timeout=LIMIT)
    assert limits.status["reason"] == FAILED
    assert "no healthy devices present" in limits.status["message"]
    assert node.machine.setting("kubelet.service", "ActiveState") == "active"
    node.machine.run(f"rm {DROP_IN}; systemctl daemon-reload; systemctl restart {AGENT}")
    runs_again(node, [claim])


def test_numbers_swapped_by_a_reset(node: MachineCluster) -> None:
    """Devices exchange their numbers at a machine's reset: each pod still has its device, and can open no other."""
    pods = both(node)
    before = dict(device_of(node, pod) for pod in pods)
    minors = {f"fpga{index}": FIRST + 3 - index for index in range(4)}
    node.number_devices(minors)
    node.machine.reboot(hard=True)
    runs_again(node, pods)
    after = dict(device_of(node, pod) for pod in pods)
    assert after.keys() == before.keys()
    assert after == {name: f"{MAJOR}:{minors[name]}" for name in after}


def test_a_loop_that_hangs(node: MachineCluster) -> None:
    """The agent hangs: systemd's watchdog aborts it, Python logs the threads' stacks, and systemd starts it again."""
    pods = both(node)
    node.machine.put({DROP_IN: "[Service]\nWatchdogSec=20\n"})
    node.machine.run(f"systemctl daemon-reload; systemctl restart {AGENT}")
    before = node.machine.setting(AGENT, "MainPID")
    assert node.machine.setting(AGENT, "NRestarts") == "0"
    node.machine.run(f"kill -STOP {before}")
    wait_for(lambda: int(node.machine.setting(AGENT, "NRestarts")) > 0, "systemd starts the agent again")
    node.wait_agent()
    assert node.machine.setting(AGENT, "MainPID") != before
    journal = node.machine.journal(AGENT, lines=1000)
    assert "Watchdog timeout" in journal
    assert "Fatal Python error: Aborted" in journal
    assert [opens(node, pod, device_of(node, pod)[1]) for pod in pods] == [DRIVERLESS, DRIVERLESS]
