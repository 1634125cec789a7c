"""The command line of the bridge: its output, the objects that it writes, and its exit status."""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import re
import signal
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from deviceplugin import config
from deviceplugin.register.records import State
from deviceplugin.tables import age
from deviceplugin.version import installing
from dra_bridge import cli
from dra_bridge.handover.share import parse_requested
from dra_bridge.kube import NAMESPACE
from dra_bridge.manifests import Deployment, manifests
from dra_bridge.node.options import AGENT, add_run_options, parse_run
from dra_bridge.rollout import pace, progress, reporter, rollout, watched
from dra_bridge.rollout.autoscaler import SCALE_DOWN_DISABLED
from dra_bridge.rollout.fleet import RESTARTING
from dra_bridge.rollout.pods import FEW
from dra_bridge.rollout.progress import DeviceProgress, Progress, ResourceProgress
from dra_bridge.testing.apiserver import FakeApiServer, Fault, LoggedRequest
from tests.dra.objects import allocated_claim, body, node_body
from tests.dra.rollout.nodes import agent_pod, binding
from tests.kubeconfigs import written
from tests.programs import running

D = "gpu.example.com"
R = "example.com/gpu"
SHARE = f"{D}/dra-share"
BEFORE = f"{D}/dra-share-before"
SINCE = 1_700_000_000
WAIT = 60.0
"""Seconds after which a program counts as hung. On a loaded machine the start alone takes ten seconds."""


@dataclass
class FakeAgent:
    """A node and the report of its agent. The agent makes requested moves at once, except moves of held devices.

    held: the holder of each held device. deaf: the agent ignores requests.
    """

    server: FakeApiServer
    node: str
    count: int = 4
    held: dict[str, str] = field(default_factory=dict)
    deaf: bool = False
    states: dict[str, State] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.states = {f"gpu-{number}": State.PLUGIN for number in range(self.count)}
        self.server.create(node_body(self.node, labels={"pool": "gpu"}))
        self.tell()

    @property
    def annotations(self) -> Mapping[str, str]:
        return self.server.get("nodes", self.node)["metadata"].get("annotations") or {}

    @property
    def told(self) -> str:
        """The requested number of devices for claims (share), as the agent has reported it in its Lease."""
        told = progress.read(D, [self.server.get("leases", self.node, NAMESPACE)])
        return "" if told is None else told.requested

    @property
    def moving(self) -> bool:
        """Whether a device moves between limits and claims, or the agent has not read the Node's annotation yet."""
        if set(self.states.values()) - {State.PLUGIN, State.DRA}:
            return True
        with contextlib.suppress(KeyError):  # the Node object may be deleted
            return self.said != self.annotations.get(SHARE)
        return False

    def ask(self, **annotations: str) -> None:
        """Set the annotations of the Node; the keyword dra_share stands for the annotation DRIVER/dra-share."""
        node = self.server.get("nodes", self.node)
        node["metadata"]["annotations"] = {f"{D}/{key.replace('_', '-')}": text for key, text in annotations.items()}
        self.server.replace(node)

    def work(self) -> None:
        """Move devices between limits and claims as requested, except held devices, and report their states."""
        asked = self.annotations.get(SHARE)
        share = parse_requested(asked or "none")
        dra, there = (State.DRA, State.TO_DRA), [n for n, s in self.states.items() if s in (State.DRA, State.TO_DRA)]
        rest = sorted(self.states.keys() - set(there))
        want = share.of(self.count)
        for name in rest[: max(0, want - len(there))]:
            self.states[name] = State.TO_DRA
        for name in there[: max(0, len(there) - want)]:
            self.states[name] = State.TO_PLUGIN
        for name, state in self.states.items():
            if name not in self.held and state not in (State.PLUGIN, State.DRA):
                self.states[name] = State.DRA if state in dra else State.PLUGIN
        self.tell(asked)

    def tell(self, requested: str | None = None) -> None:
        """Write the Lease with the report; write the slice if it has devices or is requested, else delete the slice."""
        counts: dict[str, int] = {}
        for state in self.states.values():
            counts[state.value] = counts.get(state.value, 0) + 1
        devices = {
            name: DeviceProgress(
                state,
                SINCE,
                self.held.get(name, ""),
                "its holder" if state in (State.TO_DRA, State.TO_PLUGIN) else "",
            )
            for name, state in self.states.items()
        }
        self.said = requested
        told = Progress({R: ResourceProgress(requested or "none", counts, devices)}, requested or "", {R: ""})
        annotations = {progress.annotation(D): progress.encoded(told)}
        meta = {"labels": {"app.kubernetes.io/managed-by": "dra-bridge"}, "annotations": annotations}
        self.write("leases", body("Lease", self.node, NAMESPACE, meta=meta))
        listed = [{"name": name} for name, state in self.states.items() if state is State.DRA]
        pool = {"name": self.node, "generation": 1, "resourceSliceCount": 1}
        spec = {"driver": D, "nodeName": self.node, "pool": pool, "devices": listed}
        with contextlib.suppress(KeyError):  # the Node object may be deleted
            if listed or progress.pool_annotation(D) in self.annotations:
                self.write("resourceslices", body("ResourceSlice", f"{self.node}-s", spec=spec))
            elif any(one["metadata"]["name"] == f"{self.node}-s" for one in self.server.objects()):
                self.server.delete("resourceslices", f"{self.node}-s")

    def write(self, plural: str, made: dict[str, Any]) -> None:
        """Create an object, or replace it if it exists."""
        there = {one["metadata"]["name"] for one in self.server.objects(plural)}
        (self.server.replace if made["metadata"]["name"] in there else self.server.create)(made)


@dataclass
class FakeFleet:
    """An API server, agents, and a kubeconfig for the command line."""

    server: FakeApiServer
    kubeconfig: Path
    agents: dict[str, FakeAgent] = field(default_factory=dict)
    over: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Held while an agent works, and while a test replaces the Node of an agent."""
    most: int = 0
    """The highest number of nodes whose devices have moved at the same time."""

    def agent(self, node: str, *, share: str = "", **options: Any) -> FakeAgent:
        """Add a node. share: request so many devices for claims, and wait until the agent has reported it."""
        agent = self.agents[node] = FakeAgent(self.server, node, **options)
        if share:
            agent.ask(dra_share=share)
            self.wait_for(lambda: agent.told == share)
        return agent

    def loop(self) -> None:
        """Let the agents work after each request to the API server, or every 0.05 s."""
        seen = -1
        while not self.over.is_set():
            with self.server.log_condition:
                if len(self.server.log) == seen:
                    self.server.log_condition.wait(0.05)
                seen = len(self.server.log)
            for agent in list(self.agents.values()):
                with self.lock:
                    if not agent.deaf:  # a test sets this before it removes the Node
                        self.most = max(self.most, sum(one.moving for one in list(self.agents.values())))
                        agent.work()

    def wait_for(self, met: Callable[[], bool]) -> None:
        self.server.wait_for(lambda _: met(), WAIT)


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read_here: None) -> Iterator[FakeFleet]:
    monkeypatch.setattr(rollout, "POLL", 0.1)
    with FakeApiServer() as server:
        server.create(binding())
        here = FakeFleet(server, written(tmp_path / "kubeconfig", server.url))
        thread = threading.Thread(target=here.loop, daemon=True)
        thread.start()
        yield here
        here.over.set()
        thread.join(WAIT)


@dataclass
class Ran:
    status: int
    out: str
    err: str


Bridge = Callable[..., Ran]
"""A function that runs a command line in this process."""


@pytest.fixture
def alone(capsys: pytest.CaptureFixture[str]) -> Bridge:
    """Return a function that runs a command line without an API server."""

    def run(*argv: str) -> Ran:
        try:
            status = cli.main(argv)
        except SystemExit as error:
            status = int(error.code or 0)
        return Ran(status, *capsys.readouterr())

    return run


@pytest.fixture
def bridge(nodes: FakeFleet, alone: Bridge) -> Bridge:
    """Return a function that runs a command line against the API server of these nodes."""
    return lambda *argv: alone(*argv, "--kubeconfig", str(nodes.kubeconfig))


def claimed(nodes: FakeFleet, *names: str) -> None:
    """Add nodes whose devices are all for claims (DRA), and whose agents ignore further requests."""
    for name in names:
        agent = nodes.agent(name, share="all")
        with nodes.lock:
            agent.deaf = True


def started(nodes: FakeFleet, *argv: str) -> contextlib.AbstractContextManager[subprocess.Popen[str]]:
    """Start a command line in a process of its own."""
    command = [sys.executable, "-u", "-m", "tests.kubeconfigs", *argv, "--kubeconfig", str(nodes.kubeconfig)]
    return running(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def test_version_is_printed(alone: Bridge) -> None:
    """`--version` prints the version under this program's name."""
    ran = alone("--version")
    assert (ran.status, ran.out.startswith("dra-bridge 0.")) == (0, True)


@pytest.mark.parametrize("command", ["manifests", "migrate", "rollout"])
def test_help_has_examples(command: str, alone: Bridge) -> None:
    """Help has command lines that can be copied, and says what `--timeout` is by default."""
    out = alone(command, "--help").out
    assert f"examples:\n  dra-bridge {command} --" in out or f"examples:\n  dra-bridge {command} node1 --" in out
    assert command != "migrate" or "longest wait (default: no limit)" in out


@pytest.mark.parametrize("command", ["validate", "devices", "schema"])
def test_commands_of_the_other_program_are_named(command: str, alone: Bridge) -> None:
    """A command of `deviceplugin` that is given to `dra-bridge` is an error, which names `deviceplugin COMMAND`."""
    ran = alone(command, "x")
    assert (ran.status, f"; deviceplugin {command} reads the same config files" in ran.err) == (2, True)


@pytest.mark.parametrize("argv", [["status"], ["run", "--config", "x"], ["migrate", "n1", "--driver", D, "--unset"]])
def test_missing_extra_is_named(argv: list[str]) -> None:
    """Without aiohttp, each command that needs aiohttp names the extra that installs it, without a traceback."""
    code = f"import sys; sys.modules['aiohttp'] = None; from dra_bridge import cli; sys.exit(cli.main({argv!r}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=WAIT, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"aiohttp is not installed; {installing('bridge')}\n"


@pytest.mark.usefixtures("read_here")
@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("[]", "is not a kubeconfig, a mapping with clusters, contexts, users and current-context\n"),
        ("root:x:0:0::/root:/bin/sh", "is not a kubeconfig, a mapping with clusters, "),
        ("clusters: 5", "is not a kubeconfig, a mapping with clusters, "),
        ("{", "while parsing"),
        ("certificate-authority-data: AAAA", ": certificate-authority cannot be used: "),
        ("client-certificate-data: AAAA, client-key-data: AAAA", ": client-certificate or client-key cannot be used"),
    ],
)
def test_broken_kubeconfigs_are_explained(tmp_path: Path, alone: Bridge, change: str, said: str) -> None:
    """The error names a kubeconfig that cannot be used, and the field if one field is wrong; the exit status is 2."""
    file = tmp_path / "kubeconfig"
    if change.startswith(("certificate", "client")):
        cluster, user = (change, "") if change.startswith("certificate") else ("insecure-skip-tls-verify: true", change)
        change = f"""
            current-context: c
            contexts: [{{name: c, context: {{cluster: c, user: u}}}}]
            clusters: [{{name: c, cluster: {{server: "https://127.0.0.1:1", {cluster}}}}}]
            users: [{{name: u, user: {{{user}}}}}]
        """
    file.write_text(change)
    ran = alone("status", "--kubeconfig", str(file))
    assert ran.status == 2
    assert ran.err.startswith(f"cannot reach an API server: {file}")
    assert said in ran.err


# manifests


CONFIG = f"resources:\n  - name: {R}\n    driver: {D}\n    devices:\n      - simulated: {{count: 2}}\n"
OWN = Path(__file__).parents[2] / "examples" / "11-parameters.py"
"""An author's own agent."""
SOURCE = """
from dra_bridge import run
from deviceplugin import DeviceSource
class D(DeviceSource):
    def watch(self):
        yield []
"""
"""The first lines of an author's file: a class of sources without a resource and a driver."""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A config file."""
    (made := tmp_path / "config.yaml").write_text(CONFIG)
    return made


@pytest.fixture
def printed(file: Path, alone: Bridge) -> Bridge:
    """Return a function that runs `manifests` for a config file with this text."""

    def run(text: str, *options: str) -> Ran:
        file.write_text(text)
        return alone("manifests", "--config", str(file), *options)

    return run


@pytest.mark.parametrize(("command", "content"), [("manifests", None), ("manifests", "resources: 5"), ("run", "a: 5")])
def test_a_bad_config_is_named(file: Path, bridge: Bridge, alone: Bridge, command: str, content: str | None) -> None:
    """The error names a config file that is missing or invalid; nothing is printed, and the exit status is 2."""
    file.unlink()
    if content is not None:
        file.write_text(content)
    ran = (bridge if command == "run" else alone)(command, "--config", str(file))
    assert (ran.status, ran.out) == (2, "")
    assert str(file) in ran.err
    assert "Errno" not in ran.err


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--metrics-port", "99999"], "not a port"),
        (["--node-selector", "x"], "KEY=VALUE"),
        (["--node-selector", "pool=fpga,zone=a"], "is not one label of nodes, KEY=VALUE; repeat the option"),
        (["--node-selector", "A B=c"], "KEY=VALUE"),
        (["--node-selector", f"a.b/c={'x' * 64}"], "KEY=VALUE"),
        (["--node-selector", "a=b", "--node-selector", "a=c"], "--node-selector gives two values for one label"),
        (["--name", "Bad_Name"], "lower-case letters, digits and dashes"),
        (["--namespace", "x" * 64], "at most 63"),
        (["--kubelet-root", "kubelet"], "not an absolute path"),
        (["--kubelet-root", "/" + "x" * 100], "too long for a unix socket"),
        (["--cdi-dir", ""], "not an absolute path"),
        (["--cdi-dir", "/"], "not an absolute path below /"),
        (["--device-plugin-dir", "plugins"], "not an absolute path"),
        (["--pod-resources-socket", "/kubelet.sock"], "not the path of a socket in a directory below /"),
        (["--cgroup-root", "/"], "not an absolute path below /"),
        (["--pod-log-dir", ""], "not an absolute path"),
        (["--memory", "lots"], "'lots' is not a memory limit of at least 32Mi"),
        (["--memory", "1Ki"], "'1Ki' is not a memory limit of at least 32Mi"),
        (["--runtime-class", "Foo_"], "not the name of a RuntimeClass"),
        (["--image", ""], "not an image"),
        (["--writable-sys", "/sysfs"], "'/sysfs' is not a directory below /sys; write /sys/devices, for example"),
    ],
)
def test_wrong_options_of_manifests(printed: Bridge, options: list[str], why: str) -> None:
    """An option value that an API server or kubelet would refuse is wrong usage; the message says what is valid."""
    ran = printed(CONFIG, *options)
    assert (ran.status, ran.out) == (2, "")
    assert why in ran.err


def test_manifests_of_an_own_agent(alone: Bridge) -> None:
    """An author's own agent gets no ConfigMap; its resources and drivers are those of the sources given to `run`."""
    ran = alone("manifests", "--source", str(OWN), "--command", "python3 '/app/my agent.py'")
    assert ran.status == 0
    objects = {one["kind"]: one for one in yaml.safe_load_all(ran.out)}
    assert "ConfigMap" not in objects
    assert objects["DeviceClass"]["spec"]["extendedResourceName"] == "example.com/fpga"
    pod = objects["DaemonSet"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["command"] == ["python3", "/app/my agent.py"]
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_run_options(parser)
    assert parser.parse_args(container["args"]).metrics_address == ":9410"
    assert "config" not in [one["name"] for one in (*container["volumeMounts"], *pod["volumes"])]
    assert "name in ['example.com/fpga']" in ran.out.replace('"', "'")
    assert "privileged" not in container["securityContext"]
    assert ran.err == "the agent is not privileged; --privileged always if it opens device nodes\n"


def test_manifests_of_an_own_agent_with_a_certificate(tmp_path: Path, alone: Bridge) -> None:
    """Probes use HTTPS if the agent has a certificate; a message names the files that the pod needs as mounts."""
    file = tmp_path / "agent.py"
    secured = "run(S(), metrics_address=':1', token='/t/token', certificate='/t/tls.pem')"
    file.write_text(f"{SOURCE}class S(D): resource, driver = 'a.b/x', 'a.b'\n{secured}")
    ran = alone("manifests", "--source", str(file), "--command", "x")
    assert (ran.status, "scheme: HTTPS" in ran.out) == (0, True)
    assert "mount into the DaemonSet's container, from a Secret say: /t/tls.pem, /t/token" in ran.err


def test_manifests_of_an_own_agent_that_writes_to_sysfs(alone: Bridge) -> None:
    """`--writable-sys` mounts /sys/devices, or named directories below /sys, and a message says what this permits."""
    command = ["manifests", "--source", str(OWN), "--command", "x", "--writable-sys"]
    ran = alone(*command)
    assert (ran.status, "mountPath: /sys/devices" in ran.out) == (0, True)
    assert "the agent may write to /sys/devices of its node: it can change how every device there works\n" in ran.err
    ran = alone(*command, "/sys/module/x", "--writable-sys", "/sys/bus/pci")
    assert ("mountPath: /sys/devices" in ran.out, "mountPath: /sys/bus/pci" in ran.out) == (False, True)
    assert "write to /sys/module/x, /sys/bus/pci of" in ran.err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "import deviceplugin\ndeviceplugin.run(deviceplugin.DeviceSource())",
            "calls deviceplugin.run, which serves no",
        ),
        ("1 / 0", "cannot be run: ZeroDivisionError: division by zero"),
        ("pass", "does not call dra_bridge.run"),
        (f"{SOURCE}run(D())", "names no driver"),
        (f"{SOURCE}class S(D): resource, driver = 'x', 'a.b'\nrun(S())", "it has no vendor domain"),
        (
            f"{SOURCE}class S(D): resource, driver = 'a.b/x', 'a.b'\nrun(S)",
            "S is a class; a source is an instance of it: S()",
        ),
        (None, "cannot be read: "),
    ],
)
def test_manifests_of_a_file_that_is_no_agent(tmp_path: Path, alone: Bridge, text: str | None, said: str) -> None:
    """A file that passes no sources with drivers to `dra_bridge.run` is an error, and no manifest is printed."""
    file = tmp_path / "agent.py"
    if text is not None:
        file.write_text(text)
    ran = alone("manifests", "--source", str(file), "--command", "x")
    assert (ran.status, ran.out) == (2, "")
    assert str(file) in ran.err
    assert said in ran.err
    assert "--source and --command need each other" in alone("manifests", "--source", str(file)).err


def test_manifests_say_why_the_agent_is_privileged(printed: Bridge) -> None:
    """The reason for a privileged agent is printed beside the manifests; `--privileged never` makes it unprivileged."""
    text = "resources: [{name: a/b, devices: [path: /dev/x], health: {probe: open}}]\n"
    ran = printed(text)
    assert (ran.status, "privileged: true" in ran.out) == (0, True)
    assert ran.err == (
        "the agent is privileged: a/b: `health.probe: open` opens device nodes; --privileged never leaves it out\n"
    )
    ran = printed(text, "--privileged", "never")
    assert (ran.status, "privileged: true" in ran.out, ran.err) == (0, False, "")


def test_manifests_say_what_is_mounted_widely(printed: Bridge) -> None:
    """A device in /run makes the agent see all of /run, and a message says so; a device below /run/fpga does not."""
    text = "resources: [{name: a/b, devices: [path: /run/fpga*]}]\n"
    assert printed(text).err.startswith("the agent sees all of /run: ")
    assert printed(text.replace("fpga", "fpga/")).err == ""


def test_files_that_the_metrics_need_are_named(printed: Bridge) -> None:
    """A message names the certificate and token files to mount; with `--metrics-port 0` there is no message."""
    text = CONFIG + "metrics: {certificate: /tls/a.pem, key: /tls/a.pem, token: /tls/token}\n"
    said = "into the DaemonSet's container, from a Secret say: /tls/a.pem, /tls/token\n"
    assert said in printed(text).err
    ran = printed(text, "--metrics-port", "0")
    assert (ran.status, ran.err) == (0, "")


# status


def test_status_tells_devices_and_holders(nodes: FakeFleet, bridge: Bridge) -> None:
    """`status` shows each device's side (plugin or DRA), state, holder and time.

    Holders by claim come from the API server.
    """
    nodes.agent("n1", count=3, held={"gpu-0": "pod default/p"}, share="all")
    nodes.server.create(allocated_claim("c", D, "n1", "gpu-1", "q"))
    ran = bridge("status", "-o", "json")
    assert ran.status == 0
    (node,) = json.loads(ran.out)["nodes"]
    assert (node["node"], node["driver"], node["requested"], node["done"]) == ("n1", D, "all", False)
    assert node["waitsFor"] == ["gpu-0 (to-dra) waits for its holder, held by pod default/p"]
    (resource,) = node["resources"]
    assert resource["counts"] == {"to-dra": 1, "dra": 2}
    assert [(one["name"], one["side"], one["state"], one["holder"], one["pods"]) for one in resource["devices"]] == [
        ("gpu-0", "plugin", "to-dra", None, []),  # no agent runs on the node, so `pods` is empty
        ("gpu-1", "dra", "dra", "claim default/c", ["q"]),
        ("gpu-2", "dra", "dra", None, []),
    ]
    assert resource["devices"][0]["since"] == "2023-11-14T22:13:20Z"
    table = bridge("status").out
    assert (
        table.splitlines()[0] == "NODE  RESOURCE         DEVICE  SIDE    STATE   HOLDER                 HEALTH  SINCE"
    )
    assert "n1    example.com/gpu  gpu-1   dra     dra     claim default/c for q  ?       " in table
    assert "n1    example.com/gpu  gpu-2   dra     dra     ?                      ?       " in table
    why = "no pod with the label app.kubernetes.io/managed-by=dra-bridge in namespace dra-bridge runs there"
    nor = "and no agent answers at port 9410 of the node (no endpoints available)"
    assert table.splitlines()[-1] == f"unknown holders or health (?) on n1: {why}, {nor}"
    assert f"n1 {D}: share all requested; {R}: 2 dra, 1 to-dra (share all)" in table
    assert "  gpu-0 (to-dra) waits for its holder, held by pod default/p" in table


def test_status_asks_the_agents(nodes: FakeFleet, bridge: Bridge) -> None:
    """`status` shows holders and health as agents answer them, not as reported; "?" if an agent lacks the device."""
    nodes.agent("n1", count=5, held={"gpu-0": "pod default/ended"})
    nodes.server.create(agent_pod("n1"))
    pod = {"side": "plugin", "namespace": "ml", "pod": "train", "container": "c", "claim": "", "uid": "u"}
    claim = {"side": "dra", "namespace": "ml", "pod": "user", "container": "c", "claim": "mine", "uid": ""}
    devices = [
        {"id": "gpu-0", "health": "healthy", "holders": [], "withheld": "not known: no checkpoint"},
        {"id": "gpu-1", "health": "unhealthy", "message": "XID 79", "holders": [pod]},
        {"id": "gpu-2", "health": "unhealthy", "gone": True, "holders": []},
        {"id": "gpu-3", "health": "unknown", "holders": [claim]},
    ]
    answer = {"holdersKnown": True, "resources": [{"resource": R, "devices": devices}]}
    nodes.server.proxied = lambda path: (200, answer)
    writes = len(nodes.server.writes)
    table = bridge("status").out
    lines = [line.split("  ") for line in table.splitlines()[1:6]]
    shown = [[cell.strip() for cell in line if cell.strip()] for line in lines]
    assert [(row[2], row[5], row[6]) for row in shown] == [
        ("gpu-0", "-", "healthy"),
        ("gpu-1", "pod ml/train", "unhealthy (XID 79)"),
        ("gpu-2", "-", "gone"),
        ("gpu-3", "claim ml/mine for user", "unknown"),
        ("gpu-4", "?", "?"),
    ]
    assert [row[4] for row in shown] == ["plugin (withheld)", "plugin", "plugin (gone)", "plugin", "plugin"]
    assert "\n  withheld: gpu-0: not known: no checkpoint\n  until that pod ends, the scheduler counts a" in table
    found = json.loads(bridge("status", "-o", "json").out)
    assert found["unknown"] == ["unknown holders or health (?) on n1: its agent does not serve these devices now"]
    (resource,) = found["nodes"][0]["resources"]
    assert [(one["holder"], one["health"], one["message"], one["gone"]) for one in resource["devices"]] == [
        ("", "healthy", "", False),
        ("pod ml/train", "unhealthy", "XID 79", False),
        ("", "unhealthy", "", True),
        ("claim ml/mine", "unknown", "", False),
        (None, None, "", False),
    ]
    assert [one["withheld"] for one in resource["devices"]] == ["not known: no checkpoint", *[""] * 4]
    assert len(nodes.server.writes) == writes


def test_status_begins_with_problems_of_agents(nodes: FakeFleet, bridge: Bridge) -> None:
    """An agent that is not ready, or that has refused a config file, is named above the table; the exit status is 1."""
    answer = {
        "holdersKnown": True,
        "resources": [],
        "unready": [f"{R}: not registered with the kubelet"],
        "problems": ["the config file is refused, nothing is changed: x"],
    }
    nodes.server.proxied = lambda path: (200, answer)
    for node in ("n1", "n2"):
        nodes.agent(node)
        nodes.server.create(agent_pod(node))
    lines = [
        f"the agent of n1, n2: it is not ready: {R}: not registered with the kubelet",
        "the agent of n1, n2: the config file is refused, nothing is changed: x",
    ]
    ran = bridge("status")
    assert (ran.status, ran.out.splitlines()[:2]) == (1, lines)
    ran = bridge("status", "-o", "json")
    assert (ran.status, json.loads(ran.out)["problems"]) == (1, lines)


def test_nothing_of_a_cluster_reaches_the_terminal_raw(nodes: FakeFleet, bridge: Bridge) -> None:
    """Control characters in objects and in answers of agents are printed escaped: they cannot move the cursor."""
    evil = "\x1b[2J\x1b[31m\r\n\u202ereversed"
    nodes.agent("n1", held={"gpu-0": f"pod default/p{evil}"}, share="all")
    nodes.server.create(agent_pod("n1"))
    devices = [{"id": "gpu-1", "health": "unhealthy", "message": evil, "holders": [], "withheld": evil}]
    nodes.server.proxied = lambda path: (
        200,
        {"holdersKnown": True, "resources": [{"resource": R, "devices": devices}]},
    )
    ran = bridge("status")
    assert (ran.status, ran.err) == (0, "")
    assert set(ran.out) <= set(map(chr, range(32, 127))) | {"\n"}
    assert "gpu-0 (to-dra) waits for its holder, held by pod default/p\\x1b[2J\\x1b[31m\\r\\n\\u202ereversed" in ran.out
    assert "unhealthy (\\x1b[2J" in ran.out
    ran = bridge("migrate", "n1", "--driver", D, "--share", "all", "--wait", "--timeout", "0.3")
    assert "held by pod default/p\\x1b[2J" in ran.out
    nodes.server.fail(lambda request: "resourceslices" in request.path, Fault(code=403, message=f"no{evil}"))
    assert bridge("status").err == "403 Injected: no\\x1b[2J\\x1b[31m\\r\n\\u202ereversed\n"


def test_status_names_classes_that_take_the_resource(nodes: FakeFleet, bridge: Bridge) -> None:
    """Status warns of two DeviceClasses with one extended resource, unless the user may not list DeviceClasses."""
    nodes.agent("n1")
    for name in ("ours", "theirs"):
        nodes.server.create(body("DeviceClass", name, spec={"extendedResourceName": R}))
    assert f"DeviceClasses ours, theirs all name the extended resource {R}: pods with" in bridge("status").out
    nodes.server.fail(lambda request: request.path.endswith("/deviceclasses"), Fault(code=403))
    ran = bridge("status")
    assert (ran.status, "DeviceClasses" in ran.out) == (0, False)


def test_status_of_some_nodes(nodes: FakeFleet, bridge: Bridge) -> None:
    """Only the named nodes and the named driver are shown; n9 comes before n10."""
    for node in ("n10", "n9", "n8"):
        nodes.agent(node)
    shown = json.loads(
        bridge("status", "--node", "n10", "--node", "n9", "--node", "n9", "--driver", D, "-o", "json").out
    )["nodes"]
    assert [node["node"] for node in shown] == ["n9", "n10"]


@pytest.mark.parametrize(("options", "of"), [([], ""), (["--node", "n1"], " of node n1"), (["-o", "json"], "")])
def test_status_without_anything(nodes: FakeFleet, bridge: Bridge, options: list[str], of: str) -> None:
    """If no agent has written a report, `status` fails and names the annotation that it has looked for."""
    nodes.server.create(node_body("n1"))
    ran = bridge("status", *options)
    assert (ran.status, ran.out) == (1, "")
    assert ran.err.startswith(f"no Lease{of} has the annotation DRIVER/handover, ")


@pytest.mark.parametrize(
    "command",
    [
        ["status"],
        ["uninstall", "--driver", D],
        ["migrate", "n1", "--share", "all"],
        ["rollout", "--share", "all", "-l", "pool=gpu"],
    ],
    ids=lambda command: command[0],
)
def test_a_driver_that_nobody_has(nodes: FakeFleet, bridge: Bridge, command: list[str]) -> None:
    """A driver that no node has is an error, which names the drivers that exist; no Lease is deleted."""
    nodes.agent("n1")
    ran = bridge(*command, "--driver", "gpu.example.org")
    assert (ran.status, ran.out) == (1, "")
    assert ran.err == f"no node has the driver gpu.example.org now (there are: {D}); {RESTARTING}\n"
    assert len(nodes.server.objects("leases")) == 1


@pytest.mark.usefixtures("read_here")
@pytest.mark.parametrize("command", [["uninstall", "--driver", D], ["migrate", "n1", "--driver", D, "--unset"]])
def test_a_missing_kubeconfig_is_named(command: list[str], tmp_path: Path, alone: Bridge) -> None:
    """A kubeconfig file that does not exist is reported, with status 2."""
    ran = alone(*command, "--kubeconfig", str(tmp_path / "none"))
    assert (ran.status, "cannot reach an API server" in ran.err) == (2, True)


def test_server_that_does_not_answer_is_said_once(nodes: FakeFleet) -> None:
    """The error is one line, and names the address and the kubeconfig with this address."""
    text = nodes.kubeconfig.read_text().replace(nodes.server.url, "http://127.0.0.1:1")
    nodes.kubeconfig.write_text(text)
    command = [sys.executable, "-m", "dra_bridge", "status", "--kubeconfig", str(nodes.kubeconfig)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    where = f"http://127.0.0.1:1 (kubeconfig {nodes.kubeconfig})"
    assert done.stderr.startswith(f"cannot reach an API server at {where}: GET /api")
    assert done.stderr.count("\n") == 1


@pytest.mark.usefixtures("read_here")
def test_empty_environment_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alone: Bridge) -> None:
    """An empty $KUBECONFIG counts as unset; the error says that it is empty."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("KUBECONFIG", "")
    ran = alone("status")
    assert ran.status == 2
    assert ran.err.endswith("there is no kubeconfig ~/.kube/config, and $KUBECONFIG is empty\n")
    ran = alone("status", "--kubeconfig", "/nosuch")
    assert (ran.status, ran.err.endswith("there is no kubeconfig /nosuch\n")) == (2, True)


# uninstall


def test_uninstall_removes_slices(nodes: FakeFleet, bridge: Bridge, file: Path) -> None:
    """The slices of a config's drivers or of named drivers are removed, on one node or on all."""
    claimed(nodes, "n1", "n2")
    assert bridge("uninstall", "--driver", D, "--node", "n1").out == "1 slice removed\n"
    assert [one["metadata"]["name"] for one in nodes.server.objects()] == ["n2-s"]
    nodes.agents.clear()
    assert bridge("uninstall", "--config", str(file)).out.startswith("1 slice removed\n")
    ran = bridge("uninstall", "--config", str(file))
    assert ran.out.startswith("0 slices removed\nnot removed: created objects")
    assert f"  kubectl annotate nodes --all {SHARE}- {BEFORE}- {D}/dra-pool- {D}/dra-scale-down-\n" in ran.out
    assert f"plugins/{AGENT} in the kubelet's directory\n" in ran.out
    assert ran.err == ""


def test_uninstall_names_all_that_manifests_print(bridge: Bridge, file: Path) -> None:
    """The printed `kubectl delete` commands cover every kind that `manifests` prints."""
    out = bridge("uninstall", "--config", str(file)).out
    commands = [line.partition("  #")[0].split() for line in out.splitlines() if "kubectl delete" in line]
    deleted = {kind for words in commands for kind in words[-1].split(",")}
    printed = manifests(config.parse(CONFIG), CONFIG, Deployment(claim_status=True))
    assert deleted == {one["kind"].lower() for one in printed} | {"lease"}
    assert all(one["metadata"]["labels"]["app.kubernetes.io/managed-by"] == "dra-bridge" for one in printed)


def test_uninstall_beside_agents_is_refused(nodes: FakeFleet, bridge: Bridge) -> None:
    """While an agent runs, or a claim is allocated, uninstall refuses; --force removes the slices with a warning."""
    for name in ("n1", "n2", "n3"):
        claimed(nodes, name)
    for name in ("n1", "n2"):
        nodes.server.create(agent_pod(name))
    nodes.server.create(allocated_claim("c", D, "n2", "gpu-1"))
    agents = "agents run on n1: they publish slices again; delete the DaemonSet first\n"
    ran = bridge("uninstall", "--driver", D, "--node", "n1")
    assert (ran.status, ran.out, ran.err) == (
        1,
        "",
        f"nothing was removed; --force removes the slices in spite of these reasons:\n{agents}",
    )
    ran = bridge("uninstall", "--driver", D, "--node", "n2")
    claims = "claims have devices of these drivers: default/c: their pods cannot end without the driver's agent\n"
    assert (ran.status, claims in ran.err) == (1, True)
    assert len(nodes.server.objects("resourceslices")) == 3
    ran = bridge("uninstall", "--driver", D, "--node", "n1", "--force")
    assert (ran.status, ran.out, ran.err) == (0, "1 slice removed\n", f"warning: {agents}")
    assert bridge("uninstall", "--driver", D, "--node", "n3").err == ""
    nodes.server.fail(lambda request: request.path.endswith("/pods"), Fault(code=403, message="no, you may not"))
    ran = bridge("uninstall", "--driver", D)
    assert (ran.status, "not known whether agents run or claims are in use: no, you may not" in ran.err) == (1, True)


def test_check_before_the_agents_are_removed(nodes: FakeFleet, bridge: Bridge) -> None:
    """`uninstall --check` removes nothing and ignores running agents; claims that have devices give status 1."""
    claimed(nodes, "n1")
    nodes.server.create(agent_pod("n1"))
    ran = bridge("uninstall", "--driver", D, "--check")
    assert (ran.status, ran.out) == (0, f"no claim has devices of {D}: the agents can be removed\n")
    nodes.server.create(allocated_claim("c", D, "n1", "gpu-1"))
    ran = bridge("uninstall", "--driver", D, "--check")
    assert (ran.status, ran.out) == (1, "")
    assert (
        ran.err == "claims have devices of these drivers: default/c: their pods cannot end without the driver's agent\n"
    )
    assert len(nodes.server.objects("resourceslices")) == 1


def test_uninstall_that_is_refused(nodes: FakeFleet, bridge: Bridge) -> None:
    """If the API server refuses `uninstall`, the refusal is printed, and the exit status is 1."""
    nodes.server.fail(lambda request: "resourceslices" in request.path, Fault(code=403, message="no, you may not"))
    ran = bridge("uninstall", "--driver", D)
    assert ran.status == 1
    assert "no, you may not" in ran.err


# run


@pytest.mark.usefixtures("read_here")
def test_run_without_an_api_server(file: Path, alone: Bridge, capsys: pytest.CaptureFixture[str]) -> None:
    """An agent that finds no API server in its configuration reports it in one line, and creates no directory."""
    root = file.parent / "kubelet"
    options = ["--kubeconfig", str(file.parent / "none"), "--kubelet-root", str(root)]
    ran = alone("run", "--config", str(file), *options)
    assert (ran.status, ran.err.count("\n")) == (2, 1)
    assert ran.err.startswith("cannot reach an API server: ")
    with pytest.raises(SystemExit, match="2"):
        parse_run(options)
    assert capsys.readouterr().err == ran.err
    assert not root.exists()


def test_options_of_an_authors_agent(nodes: FakeFleet) -> None:
    """An author's own agent takes the same options as `run`, without a config."""
    cluster = ["--kubeconfig", str(nodes.kubeconfig)]
    options = parse_run([*cluster, "--node-name", "n7", "--cdi-dir", "/cdi", "--kubelet-root", "/k"])
    assert (options.node, options.paths.cdi_dir, options.paths.kubelet_root) == ("n7", Path("/cdi"), Path("/k"))
    assert (options.metrics_address, options.claim_status) == (None, False)
    options = parse_run([*cluster, "--claim-status", "--agent-name", "acme"])
    assert (options.claim_status, options.agent_name) == (True, "acme")
    with pytest.raises(SystemExit):
        parse_run([*cluster, "--agent-name", "../x"])


# migrate


def test_migrate_there_and_back(nodes: FakeFleet, bridge: Bridge) -> None:
    """`migrate --wait` ends when all devices have moved; `--unset` removes the annotation."""
    agent = nodes.agent("n1")
    ran = bridge("migrate", "n1", "--driver", D, "--share", "50%", "--wait")
    assert ran.status == 0, ran
    assert agent.annotations == {SHARE: "50%"}
    assert list(agent.states.values()).count(State.DRA) == 2
    assert ran.out.splitlines()[0] == "n1: share 50% requested"
    assert "done after" in ran.out.splitlines()[-1]
    ran = bridge("migrate", "n1", "--driver", D, "--unset", "--wait")
    assert ran.status == 0
    assert agent.annotations == {}
    assert set(agent.states.values()) == {State.PLUGIN}


def test_a_share_is_forced(nodes: FakeFleet, bridge: Bridge) -> None:
    """`--force` adds the word force to the annotation that `--share` writes."""
    agent = nodes.agent("n1")
    ran = bridge("migrate", "n1", "--driver", D, "--share", "100%", "--force", "--wait")
    assert (ran.status, ran.out.splitlines()[0]) == (0, "n1: share all force requested")
    assert agent.annotations == {SHARE: "all force"}


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["n1", "--driver", D, "--share", "half"], "'half' is not a share"),
        (["n1", "--driver", D, "--share", "-1"], "'-1' is not a share"),
        (["n1", "n7", "--driver", D, "--share", "all"], "there is no node n7"),
        (["n1", "bare", "--driver", D, "--share", "all"], f"node bare: no agent of {D} reports its devices"),
        (["n1", "old", "--driver", D, "--share", "all"], "node old: its agent reports no moves"),
        (["n1", "--driver", D], "one of the arguments --share --unset is required"),
        (["n1", "--driver", D, "--unset", "--force"], "--force needs a share"),
        (["n1", "--driver", D, "--share", "2", "--timeout", "1"], "dra-bridge migrate: --timeout needs --wait\n"),
    ],
)
def test_what_cannot_be_asked_for(nodes: FakeFleet, bridge: Bridge, argv: list[str], said: str) -> None:
    """A wrong --share or node gives status 2, a missing agent gives status 1; nothing is written."""
    agent = nodes.agent("n1", deaf=True)
    for name in ("bare", "old"):
        nodes.server.create(node_body(name))
    pool = {"name": "old", "generation": 1, "resourceSliceCount": 1}
    nodes.server.create(body("ResourceSlice", "old-s", spec={"driver": D, "nodeName": "old", "pool": pool}))
    ran = bridge("migrate", *argv)
    missing = any(word in said for word in ("devices", "moves"))  # an agent may appear later
    assert ran.status == (1 if missing else 2)
    assert said in ran.err
    assert agent.annotations == {}
    assert [one for one in nodes.server.writes if one.method == "PATCH"] == []


def test_migrate_without_the_right(nodes: FakeFleet, bridge: Bridge) -> None:
    """Without the right to patch Nodes, the error names this right."""
    nodes.agent("n1")
    nodes.server.fail(lambda request: request.method == "PATCH", Fault(code=403, message="nodes is forbidden"))
    ran = bridge("migrate", "n1", "--driver", D, "--share", "all")
    assert ran.status == 2
    assert ran.err == "node n1: nodes is forbidden; this needs the right to patch nodes\n"


def test_migrate_that_takes_too_long(nodes: FakeFleet, bridge: Bridge) -> None:
    """After the timeout the output names the waiting device and its holder; the status is 1, and the move goes on."""
    agent = nodes.agent("n1", held={"gpu-2": "pod default/long"})
    ran = bridge("migrate", "n1", "--driver", D, "--share", "all", "--wait", "--timeout", "0.5")
    assert ran.status == 1
    assert "n1: 3 of 4 devices moved" in ran.out or "n1: 0 of 1 devices moved" in ran.out
    assert "n1: gpu-2 (to-dra) waits for its holder, held by pod default/long" in ran.out
    assert "not done after 0.5 s; the move goes on" in ran.out
    assert agent.annotations == {SHARE: "all"}


@pytest.mark.parametrize(
    "command",
    [["migrate", "n1", "--wait", "--timeout", "1.5"], ["rollout", "-l", "pool=gpu", "--timeout-per-node", "1.5"]],
    ids=lambda command: command[0],
)
def test_waiting_says_for_what(
    nodes: FakeFleet, bridge: Bridge, monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    """When no device has moved for a while, the output says once what a device waits for and which claim holds it."""
    monkeypatch.setattr(watched, "EXPLAIN", 0.2)
    agent = nodes.agent("n1", count=2, share="all")
    agent.held["gpu-1"] = "claim default/c"
    ran = bridge(*command, "--driver", D, "--share", "none")
    assert ran.status == 1
    assert ran.out.count("n1: gpu-1 (to-plugin) waits for its holder, held by claim default/c") == 1


def test_a_rollout_goes_on_while_devices_are_held(nodes: FakeFleet, bridge: Bridge) -> None:
    """With --continue-when-held a node with held devices counts as waiting, and the other nodes are moved."""
    nodes.agent("n1", held={"gpu-3": "pod default/p"})
    nodes.agent("n2")
    same = ("rollout", "--driver", D, "-l", "pool=gpu", "--timeout-per-node", "1", "--continue-when-held")
    ran = bridge(*same, "--share", "all")
    assert ran.status == 0, ran
    assert "n1: its devices are held; the rollout goes on with other nodes" in ran.out
    assert "waiting for held devices: n1" in ran.out
    assert nodes.agents["n2"].told == "all"
    assert "1 of 2 nodes done" in ran.out
    nodes.agents["n1"].held = {}
    undone = bridge(*same, "--undo")
    assert undone.status == 0, undone
    assert not any(agent.annotations for agent in nodes.agents.values())


def test_a_node_without_an_answer_stops_such_a_rollout(nodes: FakeFleet, bridge: Bridge) -> None:
    """--continue-when-held applies only to held devices: an agent that does not read the request stops the rollout."""
    nodes.agent("n1", deaf=True)
    more = ("--timeout-per-node", "1", "--continue-when-held")
    assert bridge("rollout", "--driver", D, "--share", "all", "-l", "pool=gpu", *more).status == 1


def test_a_dry_run_shows_the_order(nodes: FakeFleet, bridge: Bridge) -> None:
    """`rollout --dry-run` lists the nodes that would start together and their held devices, and writes nothing."""
    nodes.agent("n10")
    nodes.agent("n2", held={"gpu-3": "pod default/p"})
    nodes.agent("n1", share="all")
    nodes.agent("n3")
    nodes.server.forget_log()
    more = ("--max-unavailable", "2", "--dry-run")
    ran = bridge("rollout", "--driver", D, "--share", "all", "-l", "pool=gpu", *more)
    assert ran.status == 0, ran
    assert ran.out.splitlines() == ["4 nodes: 3 waiting, 1 done", "1. n2 (1 held), n3", "2. n10"]
    assert not [one for one in nodes.server.writes if "selfsubjectreviews" not in one.path]


@pytest.mark.parametrize("columns", [80, 120])
def test_a_dry_run_on_a_terminal(nodes: FakeFleet, columns: int) -> None:
    """The output of a dry run has line breaks only between node names; further lines of a group are indented."""
    names = [f"ip-10-0-123-{number}.eu-central-1.compute.internal" for number in range(3)]
    for name in names:
        nodes.agent(name)
    argv = ("rollout", "--driver", D, "--share", "all", "-l", "pool=gpu", "--max-unavailable", "3", "--dry-run")
    status, text = on_a_terminal(nodes, *argv, columns=columns)
    lines = ESCAPES.sub("", text).replace("\r", "").rstrip().split("\n")
    assert (status, max(map(len, lines)) <= columns) == (0, True)
    assert all(line.startswith("  ip-") for line in lines[2:])
    assert " ".join(line.strip() for line in lines[1:]) == f"1. {', '.join(names)}"


def test_nodes_whose_devices_return_begin_at_a_pace(
    nodes: FakeFleet, bridge: Bridge, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nodes whose devices return to limits start at a pace: a node that would exceed it starts later.

    An undo to limits lists the claims once, a rollout to DRA never.
    """
    tried: list[float] = []

    def take(_: pace.Pace, now: float) -> bool:
        tried.append(now)
        return len(tried) % 3 == 0

    monkeypatch.setattr(pace.Pace, "take", take)
    monkeypatch.setattr(pace, "BYTES_A_SECOND", 1.0)
    for name in ("n1", "n2"):
        nodes.agent(name)
    same = ("rollout", "--driver", D, "-l", "pool=gpu", "--max-unavailable", "2")
    assert bridge(*same, "--share", "all").status == 0
    assert (tried, nodes.server.requests("GET", "/resourceclaims")) == ([], [])
    undone = bridge(*same, "--undo")
    assert undone.status == 0, undone
    assert len(tried) >= 6
    assert len(nodes.server.requests("GET", "/resourceclaims")) == 1
    assert undone.out.startswith("a node whose devices return to the plugin side begins every ")
    assert not any(agent.annotations for agent in nodes.agents.values())


def test_a_rollout_survives_an_outage(nodes: FakeFleet, bridge: Bridge) -> None:
    """The rollout retries writes that fail or are refused and lists that fail, and completes."""
    for number in (1, 2, 3):
        nodes.agent(f"n{number}")

    def first_of_n2(request: LoggedRequest) -> bool:
        return request.method == "PATCH" and request.path.endswith("/n2") and SHARE in str(request.body)

    nodes.server.fail(first_of_n2, Fault())
    nodes.server.fail(first_of_n2, Fault(code=403, message="RBAC: not read"))
    nodes.server.fail(lambda request: request.method == "GET" and request.path.endswith("/pods"), Fault(code=503), 2)
    ran = bridge("rollout", "--driver", D, "--share", "all", "-l", "pool=gpu")
    assert ran.status == 0, ran
    assert ran.out.count("the API server does not answer") == 4
    assert "3 of 3 nodes done" in ran.out


def test_migrate_that_is_overruled(nodes: FakeFleet, bridge: Bridge) -> None:
    """If another number of devices for claims is requested while `migrate --wait` waits, it ends with status 1."""
    agent = nodes.agent("n1", deaf=True)

    def overrule() -> None:
        nodes.wait_for(lambda: any(one.watch and "nodes" in one.path for one in nodes.server.log))
        agent.ask(dra_share="1")

    thread = threading.Thread(target=overrule)
    thread.start()
    ran = bridge("migrate", "n1", "--driver", D, "--share", "all", "--wait", "--timeout", "15")
    thread.join()
    assert ran.status == 1
    assert "n1: share 1 requested meanwhile" in ran.out


ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
"""Terminal escape sequences, which move the cursor, erase or colour."""


def on_a_terminal(
    nodes: FakeFleet,
    *argv: str,
    columns: int = 90,
    rows: int = 24,
    interrupt: Callable[[str], bool] = lambda text: False,
) -> tuple[int, str]:
    """Run a command line on a terminal of this size; return the exit status and the output, escapes included.

    interrupt: called with the output so far; when it returns true, Ctrl-C is sent, once.
    """
    leader, follower = os.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    env = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "LINES")} | {"TERM": "xterm"}
    command = [sys.executable, "-m", "tests.kubeconfigs", *argv, "--kubeconfig", str(nodes.kubeconfig)]
    with running(command, stdout=follower, stderr=follower, env=env) as process:
        os.close(follower)
        text, pressed = b"", False
        with contextlib.suppress(OSError):
            while part := os.read(leader, 1 << 16):
                text += part
                if not pressed and interrupt(text.decode(errors="ignore")):
                    process.send_signal(signal.SIGINT)
                    pressed = True
        status = process.wait(WAIT)
    os.close(leader)
    return status, text.decode()


@pytest.mark.parametrize("columns", [80, 120])
def test_status_on_a_terminal(nodes: FakeFleet, columns: int) -> None:
    """Names of nodes, pods and resources are not shortened, and no line is longer than the terminal."""
    node, pod = "ip-10-0-123-45.eu-central-1.compute.internal", "pod ml-team/a-training-job-with-a-long-name-worker-0"
    nodes.agent(node, held={"gpu-0": pod}, share="all")
    status, text = on_a_terminal(nodes, "status", columns=columns)
    lines = ESCAPES.sub("", text).split("\r\n")
    assert status == 0
    assert "…" not in text
    assert max(map(len, lines)) <= columns
    assert any(f"{node}  {R}" in line for line in lines)
    assert f"gpu-0 (to-dra) waits for its holder, held by {pod}" in " ".join(line.strip() for line in lines)


@pytest.mark.parametrize(
    ("count", "rows", "patience"), [(10, 10, 10), pytest.param(30, 24, 40, marks=pytest.mark.explore)]
)
def test_rollout_of_many_nodes_on_a_terminal(nodes: FakeFleet, count: int, rows: int, patience: int) -> None:
    """The bar of all nodes and the moving nodes stay on the screen; why the rollout stops is printed last.

    patience: seconds in which all other nodes must be done, also on a busy machine.
    """
    for number in range(count):
        nodes.agent(f"node-{number:02}", held={"gpu-0": "pod default/p"} if number == 7 else {})
    argv = ("rollout", "--driver", D, "--share", "all", "-l", "pool=gpu", "--max-unavailable", str(count - 2))
    status, text = on_a_terminal(nodes, *argv, "--timeout-per-node", str(patience), columns=80, rows=rows)
    assert status == 1
    frames = text.split(f"of {count} nodes")
    assert "1 moving, 0 not started" in frames[-2]
    assert "node-07" in frames[-1], "the node that moves is below the bar of all nodes"
    bars = [ESCAPES.sub("", frame).count(" devices ") for frame in frames[1:]]
    assert 2 <= max(bars) <= rows - reporter.OTHER_ROWS
    last = " ".join(ESCAPES.sub("", text).split()).split(f"{count - 1} of {count} nodes done ")[1]
    why = f"not done after {patience} s: gpu-0 (to-dra) waits for its holder, held by pod default/p"
    assert last.endswith(f"stopped: node-07: {why}")
    assert "━" not in last[last.index("run the same command to continue") :]


def test_status_again_and_again(nodes: FakeFleet, bridge: Bridge) -> None:
    """`status --watch` redraws the table in place, as long as the screen, until Ctrl-C; with JSON it is refused."""
    nodes.agent("n1", count=30, held={"gpu-0": "pod default/p"}, share="all")
    home = "\x1b[H\x1b[2J"
    status, text = on_a_terminal(nodes, "status", "--watch", rows=10, interrupt=lambda text: text.count(home) > 2)
    assert status == 130
    _, *screens = text.split(home)
    assert all("more lines; --problems shows only nodes and devices with problems" in screen for screen in screens[:2])
    assert all(screen.count("\r\n") < 10 for screen in screens)
    assert "Traceback" not in text
    for option in ("--watch", "--problems"):
        ran = bridge("status", option, "-o", "json")
        assert (ran.status, ran.out) == (2, "")
        assert "are for tables; the JSON output always contains everything" in ran.err


def test_status_again_and_again_into_a_pipe(nodes: FakeFleet) -> None:
    """In a pipe, each table of `status --watch` begins with the time; a failed request does not end the command."""
    nodes.agent("n1")
    with started(nodes, "status", "--watch") as process:
        assert process.stdout is not None
        lines = iter(process.stdout.readline, "")
        assert next(lines).startswith("--- ")
        nodes.server.fail(lambda request: request.path.endswith("/resourceslices"), Fault(code=503, message="injected"))
        assert any("the API server does not answer: 503" in line for line in lines)
        assert any(line.startswith("n1 ") for line in lines)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=WAIT)
        assert process.returncode == 130


def test_status_of_problems_alone(nodes: FakeFleet, bridge: Bridge) -> None:
    """`status --problems` shows only nodes and devices with problems."""
    nodes.agent("n1", count=3)
    nodes.agent("n2", held={"gpu-0": "pod default/p"}, share="all")
    out = bridge("status", "--problems").out
    assert not any(line.startswith("n1 ") for line in out.splitlines())
    assert [line.split()[2] for line in out.splitlines() if line.startswith("n2    ")] == ["gpu-0"]
    assert "not listed: 6 devices" in out


def test_bars_do_not_outlive_an_interrupt(nodes: FakeFleet) -> None:
    """A terminal shows progress bars; Ctrl-C erases them, and the printed messages and the request stay."""
    agent = nodes.agent("n1", held={"gpu-0": "pod default/p"})
    argv = ("migrate", "n1", "--driver", D, "--share", "all", "--wait")
    status, text = on_a_terminal(nodes, *argv, interrupt=lambda text: "share all requested" in text and "━" in text)
    assert status == 130
    assert agent.annotations == {SHARE: "all"}
    assert "interrupted; the requested share stays" in text
    assert "Traceback" not in text
    _, _, after = text.rpartition("━")
    assert "\x1b[1A\x1b[2K" in after  # the cursor goes up to the bar, and its line is erased


def test_share_of_more_devices_than_there_are(nodes: FakeFleet, bridge: Bridge) -> None:
    """A request for more claims' devices than there are is accepted with a warning, as devices may be added later."""
    nodes.agent("n1", count=3)
    warning = f"warning: n1 has 3 {R}, the share is 99; all go to claims, also later ones"
    assert warning in bridge("migrate", "n1", "--driver", D, "--share", "99").out.splitlines()
    ran = bridge("rollout", "--driver", D, "--share", "4", "-l", "pool=gpu")
    assert warning.replace("99", "4") in ran.out.splitlines()
    assert "warning" not in bridge("migrate", "n1", "--driver", D, "--share", "3").out


# rollout


def test_rollout_goes_node_after_node(nodes: FakeFleet, bridge: Bridge) -> None:
    """One node moves at a time, in natural order of names; an annotation keeps how many devices were for claims."""
    for number in (10, 9, 1, 2):
        nodes.agent(f"n{number}")
    nodes.agents["n2"].ask(dra_share="1")
    nodes.wait_for(lambda: nodes.agents["n2"].told == "1")  # a node that moves already would be the first
    nodes.most = 0
    ran = bridge("rollout", "--driver", D, "--share", "all", "-l", "pool=gpu")
    assert ran.status == 0, ran
    asked = [line.split(":")[0] for line in ran.out.splitlines() if "share all requested" in line]
    assert asked == ["n1", "n2", "n9", "n10"]
    of_n1 = [line for line in ran.out.splitlines() if line.startswith("n1: ")]
    assert of_n1[-3] == "n1: 4 of 4 devices moved"
    assert of_n1[-2].startswith("n1: done after")
    assert of_n1[-1] == f"n1: no more marked {SCALE_DOWN_DISABLED}"
    assert "4 of 4 nodes done" in ran.out
    assert nodes.most == 1
    for agent in nodes.agents.values():
        assert agent.annotations.keys() == {SHARE, BEFORE}
        assert agent.annotations[SHARE] == "all"
        assert json.loads(agent.annotations[BEFORE])["share"] == ("1" if agent.node == "n2" else None)


def failed_pod(node: str, name: str, limits: Mapping[str, str]) -> dict[str, Any]:
    spec = {"nodeName": node, "containers": [{"name": "c", "resources": {"limits": dict(limits)}}]}
    status = {"phase": "Failed", "reason": "UnexpectedAdmissionError", "message": "no devices"}
    return body("Pod", name, "default", spec=spec, status=status)


def test_rollout_looks_once_more_at_the_end(nodes: FakeFleet, bridge: Bridge) -> None:
    """A pod that fails while the last node finishes stops the rollout."""
    agent = nodes.agent("n1", held={"gpu-0": "pod default/p"})

    def fail() -> None:
        nodes.wait_for(lambda: agent.states["gpu-0"] is State.TO_DRA and len(nodes.server.requests("GET", "/pods")) > 1)
        nodes.server.create(failed_pod("n1", "late", {R: "1"}))
        agent.held.clear()

    thread = threading.Thread(target=fail)
    thread.start()
    ran = bridge("rollout", "--driver", D, "--share", "all", "-l", "pool=gpu")
    thread.join()
    assert ran.status == 1
    assert "stopped: n1: pod default/late has failed" in ran.out


def test_rollout_of_many_nodes_lists_pods_once_for_all_of_them(nodes: FakeFleet, bridge: Bridge) -> None:
    """The rollout lists the failed pods of the cluster and not the pods of each node; it ignores earlier failures."""
    many = [f"n{number}" for number in range(1, FEW + 3)]
    for name in many:
        nodes.agent(name)
    nodes.server.create(failed_pod("n2", "early", {R: "1"}))
    nodes.server.create(failed_pod("elsewhere", "other", {R: "1"}))
    held = nodes.agents["n1"]
    held.held["gpu-0"] = "pod default/p"
    same = ("rollout", "--driver", D, "-l", "pool=gpu", "--max-unavailable", "100")

    def fail() -> None:
        nodes.wait_for(lambda: held.states["gpu-0"] is State.TO_DRA)
        nodes.server.create(failed_pod("n3", "late", {R: "1"}))

    thread = threading.Thread(target=fail)
    thread.start()
    ran = bridge(*same, "--share", "all")
    thread.join()
    assert ran.status == 1
    assert [line for line in ran.out.splitlines() if line.startswith("stopped")] == [
        "stopped: n3: pod default/late has failed (UnexpectedAdmissionError: no devices)"
    ]
    assert not nodes.server.requests("GET", "/nodes/")  # The watch has the Nodes.
    selectors = [request.query["fieldSelector"] for request in nodes.server.requests("GET", "/pods")]
    assert set(selectors) == {"status.phase=Pending,spec.nodeName!=", "status.phase=Failed"}


def test_rollout_with_nothing_to_do(nodes: FakeFleet, bridge: Bridge) -> None:
    """A node with as many devices for claims as requested gets no new request, only a mark against scale-down."""
    agent = nodes.agent("n1", share="1")
    ran = bridge("rollout", "--driver", D, "--share", "1", "-l", "pool=gpu")
    assert ran.status == 0
    # The node has devices on both sides, so it gets the mark that keeps an autoscaler from draining it.
    assert agent.annotations.keys() == {SHARE, SCALE_DOWN_DISABLED, f"{D}/dra-pool", f"{D}/dra-scale-down"}
    assert f"n1 stays marked {SCALE_DOWN_DISABLED}" in ran.out


def test_rollout_over_nodes_without_an_agent(nodes: FakeFleet, bridge: Bridge) -> None:
    """Nodes without an agent of the driver are named at the end, and the status is 1."""
    nodes.agent("n1")
    nodes.server.create(node_body("n2", labels={"pool": "gpu"}))
    ran = bridge("rollout", "--driver", D, "--share", "all", "-l", "pool=gpu")
    assert ran.status == 1
    assert f"no agent of {D} serves n2" in ran.out
    assert "annotations" not in nodes.server.get("nodes", "n2")["metadata"]


def test_rollout_of_a_wrong_selector(nodes: FakeFleet, bridge: Bridge) -> None:
    """A selector that matches no node is an error with status 2."""
    nodes.agent("n1")
    ran = bridge("rollout", "--driver", D, "--share", "all", "-l", "pool=cpu")
    assert (ran.status, ran.err) == (2, "no node matches the selector 'pool=cpu'\n")


def test_rollout_interrupted(nodes: FakeFleet) -> None:
    """Ctrl-C ends the rollout with status 130 and a hint how to continue; no other node starts."""
    first, second = nodes.agent("n1", held={"gpu-0": "pod default/p"}), nodes.agent("n2")
    with started(nodes, "rollout", "--driver", D, "--share", "all", "-l", "pool=gpu") as process:
        nodes.wait_for(lambda: SHARE in first.annotations)
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=WAIT)
        assert process.returncode == 130
    assert "Run the same command to continue" in out
    assert (SHARE in second.annotations, second.annotations[SCALE_DOWN_DISABLED]) == (False, "true")


@pytest.mark.parametrize(
    "argv",
    [
        ["uninstall"],
        ["uninstall", "--config", "/nowhere/config.yaml"],
        *(
            ["rollout", "--driver", D, "--share", "all", "-l", "pool=gpu", *wrong]
            for wrong in (["--max-unavailable", "0"], ["--timeout-per-node", "soon"], ["--undo"], ["-l", ""])
        ),
    ],
    ids=" ".join,
)
def test_wrong_usage_has_status_2(bridge: Bridge, argv: list[str]) -> None:
    """Missing, contradicting and invalid options, and an empty selector, are wrong usage."""
    assert bridge(*argv).status == 2


def test_age() -> None:
    """Ages are printed as kubectl prints them."""
    assert [age(seconds) for seconds in (-3, 5, 130, 7300, 200_000)] == ["0s", "5s", "2m", "2h", "2d"]
