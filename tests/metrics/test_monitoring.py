"""The monitoring examples: alert rules with tests, and queries of existing metrics."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import yaml

from dra_bridge.manifests import Deployment
from tests.programs import promtool
from tests.reference_pages import known_families

EXAMPLES = Path(__file__).parents[2] / "examples" / "monitoring"

NO_NAMES = {
    "clock",
    "direction",
    "for",
    "health",
    "hook",
    "kind",
    "look",
    "method",
    "python",
    "side",
    "source",
    "state",
    "version",
}
"""Labels with a fixed set of values."""


def rules() -> list[dict[str, Any]]:
    """Return the alerts."""
    groups = yaml.safe_load((EXAMPLES / "alerts.yaml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"] if "alert" in rule]


def queries() -> list[str]:
    """Return the dashboard's queries with its variables filled in."""
    panels = json.loads((EXAMPLES / "dashboard.json").read_text())["panels"]
    texts = [target["expr"] for panel in panels for target in panel["targets"]]
    return [filled(text) for text in texts]


def filled(text: str) -> str:
    return text.replace("$__rate_interval", "1m").replace("$node", ".*").replace("$resource", ".*")


def test_only_pods_of_the_agents_namespaces_are_scraped() -> None:
    """Only pods in the agents' own namespaces are scraped: any user may set the agents' label on a pod."""
    job = yaml.safe_load((EXAMPLES / "prometheus.yaml").read_text())["scrape_configs"][0]
    (found,) = job["kubernetes_sd_configs"]
    *_, daemon_set = yaml.safe_load_all((EXAMPLES.parent / "daemonset.yaml").read_text())
    assert found["namespaces"]["names"] == [Deployment().namespace, daemon_set["metadata"]["namespace"]]


def known_names() -> set[str]:
    """Return the names of all series that an agent may have."""
    return {sample.name for family in known_families() for sample in family.samples}


def test_only_what_exists_is_asked_for() -> None:
    """Every metric in a rule or a panel exists."""
    texts = [*queries(), *(rule["expr"] for rule in rules())]
    asked = {name for text in texts for name in re.findall(r"(?:deviceplugin|process)_\w+", text)}
    assert len(asked) > 30
    assert asked <= known_names()


def test_every_alert_has_a_runbook() -> None:
    """Each alert has a description and a runbook section with checks and a remedy; no section is left over."""
    text = (EXAMPLES.parents[1] / "docs" / "runbooks.md").read_text()
    sections = {part.partition("\n")[0]: part for part in text.split("\n## ")[1:]}
    assert sections.keys() == {rule["alert"] for rule in rules()}
    for rule in rules():
        assert rule["annotations"]["description"]
        assert rule["annotations"]["runbook_url"] == f"docs/runbooks.md#{rule['alert'].lower()}"
    for name, section in sections.items():
        assert re.findall(r"^\*\*(\w+)\.\*\* ", section, re.MULTILINE)[-2:] == ["Check", "Remedy"], name
    assert set(re.findall(r"\(#(\w+)\)", text)) <= {name.lower() for name in sections}


@promtool
def test_rules_do_what_their_tests_say() -> None:
    """`promtool test rules` passes."""
    done = subprocess.run(
        ["promtool", "test", "rules", "alerts.test.yaml"], cwd=EXAMPLES, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


@promtool
def test_only_the_agents_are_scraped(tmp_path: Path) -> None:
    """Only pods of the agents' namespaces are scraped, and labels with control characters are dropped."""
    config = yaml.safe_load((EXAMPLES / "prometheus.yaml").read_text())
    (job,) = config["scrape_configs"]
    (found,) = job.pop("kubernetes_sd_configs")  # Debian's promtool does not know `kubernetes_sd_configs`
    assert found == {"role": "pod", "namespaces": {"names": ["dra-bridge", "kube-system"]}}
    (rule,) = job["metric_relabel_configs"]
    assert rule["action"] == "drop"
    labels = {label for family in known_families() for sample in family.samples for label in sample.labels}
    assert {"resource", "device", "namespace", "pod", "container", "claim", "driver", "reason"} <= labels
    assert labels - {"le"} <= {*rule["source_labels"], *NO_NAMES}
    assert re.fullmatch(rule["regex"].replace("[[:cntrl:]]", r"[\x00-\x1f\x7f]"), "deviceplugin_devices;x\x1b[2J;;;")
    (tmp_path / "alerts.yaml").write_text("groups: []\n")
    (tmp_path / "prometheus.yaml").write_text(yaml.safe_dump(config))
    done = subprocess.run(["promtool", "check", "config", tmp_path / "prometheus.yaml"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_fires_and_resolves() -> None:
    """Each alert has a test in which it fires and resolves, and is silent otherwise."""
    first, *others = yaml.safe_load((EXAMPLES / "alerts.test.yaml").read_text())["tests"]
    names = {rule["alert"] for rule in rules()}
    assert {case["alertname"] for case in first["alert_rule_test"] if not case["exp_alerts"]} == names
    resolved = set()
    for test in others:
        fired = set()
        for case in sorted(test["alert_rule_test"], key=lambda case: int(case["eval_time"].removesuffix("m"))):
            if case["exp_alerts"]:
                fired.add(case["alertname"])
            elif case["alertname"] in fired:
                resolved.add(case["alertname"])
    assert resolved == names


def test_every_alert_has_a_cause_on_the_real_node() -> None:
    """Each alert is named by a scenario of the tests on the real node."""
    text = (Path(__file__).parents[1] / "cluster" / "test_alerts_real.py").read_text()
    assert {rule["alert"] for rule in rules()} <= set(re.findall(r'"(\w+)"', text))


@promtool
def test_queries_of_the_dashboard_are_valid(tmp_path: Path) -> None:
    """Prometheus can parse each query."""
    recorded = [{"record": f"panel:{number}", "expr": text} for number, text in enumerate(queries())]
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": recorded}]}))
    done = subprocess.run(["promtool", "check", "rules", tmp_path / "rules.yaml"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "FAILED" not in done.stdout + done.stderr


def test_panels_do_not_overlap() -> None:
    """Each panel has its own place and number."""
    panels = json.loads((EXAMPLES / "dashboard.json").read_text())["panels"]
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        place = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert at["x"] + at["w"] <= 24
        assert not taken & place, panel["title"]
        taken |= place
    assert len({panel["id"] for panel in panels}) == len(panels)
