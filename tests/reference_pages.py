"""``python -m tests.reference_pages`` writes the pages of config keys, metrics and findings from the code."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.metrics_core import Metric

from deviceplugin.kubelet.podresources import PodContainer
from deviceplugin.kubelet.status import VendorConnection
from deviceplugin.metrics import load
from deviceplugin.metrics.collectors import AgentCollector
from dra_bridge.plan.findings import FindingKind
from tests.dra.node.test_status import bridge, status_of
from tests.metrics.views import Still, resource
from tests.source import ROOT

MADE: Final = "Made of the code by `python -m tests.reference_pages`."
SECTIONS: Final = {
    "Load": r"deviceplugin_device_(?!health|replicas|state|holders|held)",
    "Claims": r"deviceplugin_dra_",
    "Slices": r"deviceplugin_slice",
    "Moves": r"deviceplugin_(handover_|kubelet_restart_ends)",
    "The API server": r"deviceplugin_(api_|claim_list_)",
    "The process": r"process_|deviceplugin_(build|unwatched|config)_",
    "Devices and their holders": r"deviceplugin_(device|allocation|holders_|kubelet_double|evidence_)",
    "The agent and the kubelet": r"",
}
"""The beginning of the metrics' names by section; a metric is in the first section whose pattern matches."""


def known_families() -> list[Metric]:
    """Return all metric families that an agent may have."""
    vendor = VendorConnection(connected=True, since=1.0)
    still = Still(resource("a", held={"a": [PodContainer("n", "p", "c")]}, refusals={"unhealthy": 1}, vendor=vendor))
    still.providers.append(status_of(bridge()))
    values: dict[str, Any] = {name: {"x": 1} if one.label else 1 for name, one in load.QUANTITIES.items()}
    registry = CollectorRegistry(auto_describe=False)
    registry.register(AgentCollector(still.measured(a=values).view))
    ProcessCollector(registry=registry)
    return list(registry.collect())


def _row(family: Metric) -> str:
    name = family.name + {"counter": "_total", "info": "_info"}.get(family.type, "")
    labels = dict.fromkeys(label for sample in family.samples for label in sample.labels if label != "le")
    return f"| `{name}` | {family.type} | {', '.join(labels)} | {family.documentation.removesuffix('.')} |"


def metrics() -> str:
    """Return the page of metrics: a table for each subject, in the order in which an agent has them."""
    rows: dict[str, list[str]] = {section: [] for section in SECTIONS}
    for family in known_families():
        rows[next(name for name, begin in SECTIONS.items() if re.match(begin, family.name))].append(_row(family))
    parts = [
        "# Metrics reference",
        f"{MADE} [Metrics](metrics.md) says how they are read. Those of claims, slices, moves",
    ]
    parts[-1] += " and the API server\nare of `dra-bridge` alone."
    for section, lines in rows.items():
        parts.append(f"## {section}")
        parts.append("\n".join(["| metric | type | labels | meaning |", "|---|---|---|---|", *lines]))
    return "\n\n".join(parts) + "\n"


def findings() -> str:
    """Return the page of the findings of `plan`."""
    rows = [f"| `{one.code}` | {one.severity.value} | {one.text} | {one.remedy} |" for one in FindingKind]
    head = f"# Findings of a plan\n\n{MADE} `dra-bridge plan` prints them ([Before a migration](plan.md)).\n"
    head += "`--ignore CODE` leaves one out. A code keeps its meaning.\n"
    return "\n".join([head, "| code | severity | what it is | what to do |", "|---|---|---|---|", *rows]) + "\n"


def _objects(schema: Any, path: str, defs: Any) -> Iterator[tuple[str, Any]]:
    """Yield each object of a schema that has keys, once, with its path."""
    if name := schema.get("$ref"):
        if (found := defs.pop(name.rpartition("/")[2], None)) is not None:
            yield from _objects(found, path, defs)
        return
    if schema.get("properties"):
        yield path, schema
        for key, value in schema["properties"].items():
            yield from _objects(value, f"{path}.{key}" if path else key, defs)
    for one in schema.get("anyOf", ()):
        yield from _objects(one, path, defs)
    if "items" in schema:
        yield from _objects(schema["items"], f"{path}[]", defs)


def _meaning(schema: Any, defs: Any) -> str:
    """Return the description of a key, or of the schema that it refers to, with its possible values and default."""
    target = defs.get(schema.get("$ref", "").rpartition("/")[2], schema)
    text = schema.get("description") or target.get("description", "")
    if values := schema.get("enum"):
        text += f" One of {', '.join(f'`{value}`' for value in values)}."
    if "default" in schema:
        text += f" Default: `{json.dumps(schema['default'])}`."
    return re.sub(r"([|<])", r"\\\1", text).strip()


def config() -> str:
    """Return the page of the config file's keys: a table for each object, in the schema's order."""
    schema = json.loads((ROOT / "api" / "config.schema.json").read_text())
    parts = [
        "# Keys of the config file",
        f"{MADE} The source is [the JSON schema](../api/config.schema.json), by which editors complete and check.\n"
        "[Configuring devices](devices.md) has examples.",
    ]
    for path, found in _objects(schema, "", dict(schema["$defs"])):
        required = found.get("required", ())
        rows = [
            f"| `{key}`{' (required)' * (key in required)} | {_meaning(value, schema['$defs'])} |"
            for key, value in found["properties"].items()
        ]
        parts.append(f"## `{path}`" if path else "## The file")
        parts.append(found.get("description", "").strip() or "Its keys:")
        parts.append("\n".join(["| key | meaning |", "|---|---|", *rows]))
    return "\n\n".join(parts) + "\n"


PAGES: Final[dict[Path, Callable[[], str]]] = {
    ROOT / "docs" / "config-reference.md": config,
    ROOT / "docs" / "metrics-reference.md": metrics,
    ROOT / "docs" / "plan-findings.md": findings,
}


if __name__ == "__main__":
    for path, page in PAGES.items():
        path.write_text(page())
    sys.exit(0)
