"""The Helm chart makes the same objects as `dra-bridge manifests`, and refuses invalid values."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from deviceplugin.config import Config, parse
from deviceplugin.version import VERSION
from dra_bridge import cli
from dra_bridge.manifests import Deployment, manifests
from tests import chart
from tests.cluster import build
from tests.programs import tool

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted(path for path in (ROOT / "examples").glob("[01]*.yaml"))
helm_is_there = tool("helm")
Object = dict[str, Any]

TEXT = """\
resources:
  - name: example.com/fpga
    driver: fpga.example.com
    devices: [{path: "/run/fpga/*/ctl"}, {group: [/run/fpga/a, /dev/b, /srv/x/c*]}]
    nodes: [/dev/control]
  - {name: example.com/half, driver: fpga.example.com, devices: [{path: /dev/half*}]}
  - {name: other.org/a-name-that-is-too-long-for-one-word, driver: fpga.example.com, devices: [{path: /dev/long}]}
  - {name: example.com/serial, devices: [{path: /dev/ttyUSB*}]}
"""


def helm(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run helm."""
    command = [str(build.ensure_tool("helm")), *arguments]
    env = {**os.environ, "GOGC": "off"}  # helm ends before a garbage collection would pay off
    return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120, env=env)


def rendered(values: Mapping[str, Any], *options: str, name: str = "dra-bridge") -> list[Object]:
    """Return the objects of the chart for these values, without empty documents."""
    arguments = [f"--set-json={key}={json.dumps(value)}" for key, value in values.items()]
    done = helm("template", name, str(chart.CHART), "--namespace=dra-bridge", *arguments, *options)
    assert done.returncode == 0, done.stderr
    assert "warning" not in done.stderr.lower()
    return [one for one in yaml.load_all(done.stdout, yaml.CSafeLoader) if one]


def by_name(objects: Iterable[Object]) -> dict[tuple[str, str], Object]:
    return {(one["kind"], one["metadata"]["name"]): one for one in objects if one["kind"] != "Namespace"}


@pytest.mark.parametrize("path", chart.generate(), ids=lambda path: path.name)
def test_generated_files_are_up_to_date(path: Path) -> None:
    """The checked-in files are those that `python -m tests.chart --write` generates."""
    assert path.read_text() == chart.generate()[path]


@helm_is_there
def test_the_example_of_an_own_plugin(capsys: pytest.CaptureFixture[str]) -> None:
    """The example's values give the objects of `manifests --source`, and its image runs the same command."""
    directory = chart.ROOT / "examples" / "own-plugin"
    values = yaml.safe_load((directory / "values.yaml").read_text())
    name = f"{values['image']['repository']}:{values['image']['tag']}"
    command = " ".join(values["command"])
    assert cli.main(["manifests", "--source", str(directory / "toys.py"), "--command", command, "--image", name]) == 0
    assert by_name(rendered(values)) == by_name(yaml.safe_load_all(capsys.readouterr().out))
    (entrypoint,) = re.findall(r"^ENTRYPOINT (.+)$", (directory / "Dockerfile").read_text(), re.MULTILINE)
    assert json.loads(entrypoint) == values["command"]


@helm_is_there
def test_config_as_yaml() -> None:
    """A config given as YAML values is the same to the agent as a config given as text."""
    found = by_name(rendered({"config": yaml.safe_load(TEXT)}))
    wanted = by_name(manifests(parse(TEXT), TEXT))
    text = found["ConfigMap", "dra-bridge"]["data"].pop("config.yaml")
    assert parse(text) == parse(TEXT)
    wanted["ConfigMap", "dra-bridge"]["data"].pop("config.yaml")
    assert found == wanted


GROUP = {"some": {"nodeSelector": {"pool": "a"}}}


def served(**resource: Any) -> Object:
    return {"resources": [{"name": "example.com/x", "devices": [{"path": "/dev/x"}], **resource}]}


MANAGED = {"app.kubernetes.io/managed-by": "dra-bridge"}
GROUPS: dict[str, Object] = {
    "boards": {
        "nodeSelector": {"pool": "boards"},
        "config": {
            "resources": [{"name": "example.com/fpga", "driver": "fpga.example.com", "devices": [{"path": "/dev/f*"}]}]
        },
        "memory": "96Mi",
    },
    "lab": {
        "nodeSelector": {"pool": "lab"},
        "config": {
            "resources": [{"name": "example.com/serial", "driver": "uart.example.com", "devices": [{"path": "/x/*"}]}]
        },
        "metricsPort": 0,
        "image": {"tag": "2"},
    },
}
HOW = {
    "boards": Deployment(node_selector={"pool": "boards"}, memory="96Mi", name="dra-bridge-boards"),
    "lab": Deployment(node_selector={"pool": "lab"}, metrics_port=0, image="deviceplugin:2", name="dra-bridge-lab"),
}


@helm_is_there
def test_groups() -> None:
    """Each group of nodes has a DaemonSet and ConfigMap of its own; all groups have common rights and policies."""
    found = by_name(rendered({"groups": GROUPS}))
    configs = {name: parse(json.dumps(group["config"])) for name, group in GROUPS.items()}
    together = Config(resources=tuple(one for config in configs.values() for one in config.resources))
    wanted = by_name(manifests(together, ""))
    del wanted["DaemonSet", "dra-bridge"]
    for name, config in configs.items():
        text = found["ConfigMap", f"dra-bridge-{name}"]["data"]["config.yaml"]
        assert parse(text) == config
        objects = by_name(manifests(config, text, HOW[name]))
        daemon_set = objects["DaemonSet", f"dra-bridge-{name}"]
        daemon_set["spec"]["template"]["spec"]["serviceAccountName"] = "dra-bridge"
        wanted |= {key: one for key, one in objects.items() if key[0] in ("ConfigMap", "DaemonSet")}
    assert found == wanted


@helm_is_there
def test_what_a_pod_gets_beyond_the_config() -> None:
    """Image pull secrets, volumes, tolerations and the priority class are values of the chart."""
    values = {
        "config": TEXT,
        "imagePullSecrets": [{"name": "registry"}],
        "tolerations": [{"key": "gpu", "operator": "Exists"}],
        "priorityClass": "high",
        "volumes": [{"name": "tls", "secret": {"secretName": "tls"}}],
        "volumeMounts": [{"name": "tls", "mountPath": "/tls", "readOnly": True}],
        "image": {"digest": "sha256:" + "0" * 64},
    }
    pod = by_name(rendered(values))["DaemonSet", "dra-bridge"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert pod["imagePullSecrets"] == values["imagePullSecrets"]
    assert pod["tolerations"] == values["tolerations"]
    assert pod["priorityClassName"] == "high"
    assert pod["volumes"][-1] == {"name": "tls", "secret": {"secretName": "tls"}}
    assert container["volumeMounts"][-1] == {"name": "tls", "mountPath": "/tls", "readOnly": True}
    assert container["image"] == f"deviceplugin:{VERSION}@sha256:{'0' * 64}"


@helm_is_there
def test_what_other_charts_have() -> None:
    """Affinity, resources, update strategy, labels, annotations, arguments and env can be set, also for a group."""
    affinity: Object = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [{}]}}}
    values: Object = {
        "affinity": affinity,
        "resources": {"requests": {"cpu": "50m"}, "limits": {"cpu": "1"}},
        "updateStrategy": {"rollingUpdate": {"maxUnavailable": "10%"}},
        "podLabels": {"team": "lab"},
        "podAnnotations": {"sidecar.istio.io/inject": "false"},
        "extraArgs": ["--log-format=json"],
        "env": [{"name": "TZ", "value": "UTC"}],
    }
    config = served(health={"probe": "open"})
    plain = by_name(rendered({"config": config}))["DaemonSet", "dra-bridge"]["spec"]
    group = {**values, "config": config, "nodeSelector": {"pool": "a"}, "updateStrategy": {"type": "OnDelete"}}
    ways: list[tuple[Object, str, Object]] = [
        (
            {"config": config, **values},
            "dra-bridge",
            {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0, "maxUnavailable": "10%"}},
        ),
        ({"groups": {"a": group}}, "dra-bridge-a", {"type": "OnDelete"}),
    ]
    for given, name, strategy in ways:
        spec = by_name(rendered(given))["DaemonSet", name]["spec"]
        template = spec["template"]
        (container,), (before,) = template["spec"]["containers"], plain["template"]["spec"]["containers"]
        assert spec["updateStrategy"] == strategy
        assert template["spec"]["affinity"] == affinity
        assert template["metadata"]["labels"] == {**spec["selector"]["matchLabels"], **MANAGED, "team": "lab"}
        assert template["metadata"]["annotations"] == {
            **plain["template"]["metadata"]["annotations"],
            "sidecar.istio.io/inject": "false",
        }
        assert container["resources"] == {
            "requests": {"cpu": "50m", "memory": "72Mi"},
            "limits": {"cpu": "1", "memory": "128Mi"},
        }
        assert container["args"] == [*before["args"], "--log-format=json"]
        assert container["env"] == [*before["env"], {"name": "TZ", "value": "UTC"}]


@helm_is_there
def test_common_labels() -> None:
    """Common labels are on all objects and pods, and not in selectors."""
    optional = ("networkPolicy", "podMonitor", "prometheusRule")
    values = {"config": TEXT, "claimStatus": True, **{name: {"enabled": True} for name in optional}}
    plain, found = by_name(rendered(values)), by_name(rendered({**values, "commonLabels": {"team": "lab"}}))
    for name, one in found.items():
        assert one["metadata"]["labels"].pop("team") == "lab", name
    assert found["DaemonSet", "dra-bridge"]["spec"]["template"]["metadata"]["labels"].pop("team") == "lab"
    assert found == plain


@helm_is_there
def test_another_name() -> None:
    """With fullnameOverride the objects' names do not depend on the release name."""
    found = by_name(rendered({"config": TEXT, "fullnameOverride": "lab"}, name="everything"))
    assert found == by_name(manifests(parse(TEXT), TEXT, Deployment(name="lab")))
    assert ("DaemonSet", "lab-boards") in by_name(rendered({"groups": GROUPS, "fullnameOverride": "lab"}))


@helm_is_there
def test_network_policy() -> None:
    """The NetworkPolicy selects the pods of all groups and allows access to the metrics port only."""
    peers = [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}]
    found = by_name(rendered({"groups": GROUPS, "networkPolicy": {"enabled": True, "from": peers}}))
    spec = found["NetworkPolicy", "dra-bridge"]["spec"]
    (selector,) = spec["podSelector"]["matchExpressions"]
    assert (selector["key"], selector["operator"]) == ("app.kubernetes.io/name", "In")
    pods = [one["spec"]["template"] for (kind, _), one in found.items() if kind == "DaemonSet"]
    assert sorted(selector["values"]) == sorted(pod["metadata"]["labels"][selector["key"]] for pod in pods)
    assert spec["policyTypes"] == ["Ingress"]
    assert spec["ingress"] == [{"ports": [{"port": "metrics", "protocol": "TCP"}], "from": peers}]
    closed = by_name(rendered({"config": TEXT, "metricsPort": 0, "networkPolicy": {"enabled": True}}))
    assert "ingress" not in closed["NetworkPolicy", "dra-bridge"]["spec"]


@helm_is_there
def test_alerts() -> None:
    """The PrometheusRule has the alerts of the examples; only the address of the runbooks can be changed."""
    text = (chart.MONITORING / "alerts.yaml").read_text()
    wanted = {"enabled": True, "labels": {"release": "prometheus"}}
    rule = by_name(rendered({"config": TEXT, "prometheusRule": wanted}))["PrometheusRule", "dra-bridge"]
    assert rule["spec"] == yaml.safe_load(text)
    assert rule["metadata"]["labels"]["release"] == "prometheus"
    address = "https://git.example.com/copy/blob/main"
    values = {"config": TEXT, "prometheusRule": {**wanted, "runbookUrl": f"{address}/"}}
    rule = by_name(rendered(values))["PrometheusRule", "dra-bridge"]
    assert rule["spec"] == yaml.safe_load(text.replace("runbook_url: ", f"runbook_url: {address}/"))


@helm_is_there
def test_pod_monitor() -> None:
    """Each DaemonSet with metrics has a PodMonitor with the example's endpoint, with HTTPS if the agent has TLS."""
    (wanted,) = yaml.safe_load((chart.MONITORING / "podmonitor.yaml").read_text())["spec"]["podMetricsEndpoints"]
    secured = {**served(), "metrics": {"certificate": "/tls/both.pem"}}
    groups = {**GROUPS, "tls": {"nodeSelector": {"pool": "tls"}, "config": secured}}
    found = by_name(rendered({"groups": groups, "podMonitor": {"enabled": True, "labels": {"release": "p"}}}))
    monitors = {name: one for (kind, name), one in found.items() if kind == "PodMonitor"}
    assert monitors.keys() == {"dra-bridge-boards", "dra-bridge-tls"}
    for name, scheme in (("dra-bridge-boards", {}), ("dra-bridge-tls", {"scheme": "https"})):
        assert monitors[name]["metadata"]["labels"]["release"] == "p"
        assert monitors[name]["spec"]["podMetricsEndpoints"] == [{**wanted, **scheme}]
        pods = found["DaemonSet", name]["spec"]["template"]
        assert monitors[name]["spec"]["selector"]["matchLabels"].items() <= pods["metadata"]["labels"].items()


@helm_is_there
def test_own_fields_of_the_endpoint() -> None:
    """Interval, TLS and token of the endpoint are values; own relabelings follow the example's."""
    (example,) = yaml.safe_load((chart.MONITORING / "podmonitor.yaml").read_text())["spec"]["podMetricsEndpoints"]
    own: Object = {
        "interval": "1m",
        "scrapeTimeout": "5s",
        "tlsConfig": {"ca": {"secret": {"name": "tls", "key": "ca.crt"}}, "serverName": "agents"},
        "authorization": {"credentials": {"name": "tls", "key": "token"}},
        "metricRelabelings": [{"action": "drop", "sourceLabels": ["__name__"], "regex": "process_.*"}],
    }
    more = [{"targetLabel": "cluster", "replacement": "a"}]
    values = {"config": TEXT, "podMonitor": {"enabled": True, "relabelings": more, **own}}
    spec = by_name(rendered(values))["PodMonitor", "dra-bridge"]["spec"]
    assert spec["podMetricsEndpoints"] == [{**example, **own, "relabelings": [*example["relabelings"], *more]}]


@helm_is_there
def test_older_clusters() -> None:
    """For servers before 1.34 the DeviceClasses have no extendedResourceName."""
    objects = rendered({"config": TEXT}, "--kube-version=1.33.4")
    classes = [one for one in objects if one["kind"] == "DeviceClass"]
    assert len(classes) == 3
    assert not [one for one in classes if "extendedResourceName" in one["spec"]]


@helm_is_there
@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({}, "config.resources is empty"),
        ({"config": ""}, "config.resources is empty"),
        ({"config": "resources: ["}, "config is no YAML"),
        ({"config": {"resources": []}}, "minItems"),
        ({"config": "resources: 5"}, "config.resources is no list"),
        ({"config": "resources: [x]"}, "config.resources[0].name is not like example.com/fpga"),
        ({"config": "resources: [{name: fpga}]"}, "config.resources[0].name is not like example.com/fpga"),
        (
            {"config": 'resources: [{name: a.b/c, driver: \'d"] || true || "x" in ["d\'}]'},
            "config.resources[0].driver is not",
        ),
        ({"config": served(), "kubeletRoot": "/"}, "/kubeletRoot"),
        ({"config": served(), "kubeletRoot": "/x/../etc"}, "/kubeletRoot"),
        ({"config": served(), "cdiDir": '/a b"c: d'}, "/cdiDir"),
        ({"config": served(), "fullnameOverride": "x" * 60, "groups": GROUP}, "longer than 63 characters"),
        ({"config": served(devices=[{"pth": "/dev/x"}])}, "pth"),
        ({"config": served(permissions="q")}, "/config/resources/0/permissions"),
        ({"config": served(), "memorry": "1Gi"}, "memorry"),
        ({"config": served(), "metricsPort": 70000}, "/metricsPort"),
        ({"config": served(), "metricsPort": 0, "podMonitor": {"enabled": True}}, "metricsPort is 0"),
        ({"config": served(), "podResourcesSocket": "/kubelet.sock"}, "/podResourcesSocket"),
        ({"config": served(), "podLogDir": "/"}, "/podLogDir"),
        ({"config": served(), "commonLabels": {"app.kubernetes.io/name": "x"}}, "/commonLabels"),
        ({"config": served(), "updateStrategy": {"rollingUpdate": {"maxSurge": 1}}}, "maxSurge"),
        ({"config": served(), "podMonitor": {"interval": "15"}}, "/podMonitor/interval"),
        ({"config": served(), "prometheusRule": {"runbookUrl": "docs"}}, "/prometheusRule/runbookUrl"),
        ({"config": served(driver="x.example.com"), "kubeletRoot": "/" + "x" * 63}, "/kubeletRoot"),
        ({"config": served(), "image": {"digest": "sha256:1"}}, "/image/digest"),
        ({"groups": {"a": {"config": served()}}}, "nodeSelector"),
        ({"groups": {"a": {"nodeSelector": {"pool": "a"}}}}, "groups.a.config.resources is empty"),
        ({"groups": {"a": {"nodeSelector": {}, "config": served(), "claimStatus": True}}}, "claimStatus"),
    ],
    ids=str,
)
def test_values_that_are_refused(values: Mapping[str, Any], problem: str) -> None:
    """The error for invalid values names the value."""
    arguments = [f"--set-json={key}={json.dumps(value)}" for key, value in values.items()]
    done = helm("template", str(chart.CHART), *arguments)
    assert done.returncode != 0
    assert problem in done.stderr


@helm_is_there
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_lint(path: Path) -> None:
    """`helm lint --strict` finds no problem, and the schema accepts the example config files."""
    done = helm(
        "lint", "--strict", str(chart.CHART), f"--set-json=config={json.dumps(yaml.safe_load(path.read_text()))}"
    )
    assert done.returncode == 0, done.stdout + done.stderr
