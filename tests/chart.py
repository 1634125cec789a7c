"""Generate the chart's templates from dra_bridge/manifests.yaml, and its values schema from the config file's.

`python -m tests.chart` exits with 1 if a generated file in the repository differs; `--write` writes the files. So the
rights, policies and mounts of the chart and of `dra-bridge manifests` have one source.
charts/dra-bridge/templates/_helpers.tpl computes the same values as manifests.py; tests/test_installers.py compares the
resulting objects. files/ has copies of examples/monitoring, because Helm reads no file outside of the chart.
"""

from __future__ import annotations

import itertools
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from deviceplugin import naming

ROOT = Path(__file__).resolve().parent.parent
CHART = ROOT / "charts" / "dra-bridge"
MONITORING = ROOT / "examples" / "monitoring"
HEAD = "{{- /* Generated from dra_bridge/manifests.yaml by `python -m tests.chart --write`. */ -}}\n"
FILES = {
    "ServiceAccount": "rbac",
    "ClusterRole": "rbac",
    "ClusterRoleBinding": "rbac",
    "Role": "rbac",
    "RoleBinding": "rbac",
    "ValidatingAdmissionPolicy": "policies",
    "ValidatingAdmissionPolicyBinding": "policies",
    "DeviceClass": "deviceclasses",
    "PriorityLevelConfiguration": "flows",
    "FlowSchema": "flows",
    "ResourceQuota": "quotas",
    "ConfigMap": "daemonset",
    "DaemonSet": "daemonset",
}
"""The template file of each kind. Helm creates the Namespace."""
EACH = {
    ("DeviceClass", ""): "classes",
    ("ResourceQuota", ""): "quotas",
    ("ConfigMap", "config"): "groups",
    ("DaemonSet", ""): "groups",
}
"""By kind and condition of an object that the chart repeats: the name of the value with an entry for each object."""
OWN_VALUES = {"attribute", "canonical", "class_name", "driver", "extended_resource_name", "tenant", "hard"}
OPTIONAL = {
    "affinity": "affinity",
    "escalation": "unprivileged",
    "extended_resource_name": "extended_resource_name",
    "image_pull_secrets": "image_pull_secrets",
    "pod_annotations": "pod_annotations",
    "port_capabilities": "port_capabilities",
    "privileged": "privileged",
    "runtime_class": "runtime_class",
    "scheme": "scheme",
    "token": "not_bridge",
}
"""By value of manifests.yaml that the template writes only under a condition: the name of the deciding value."""
APPENDED = {
    "env": "more_env",
    "labels": "more_labels",
    "volumes": "more_volumes",
    "volumeMounts": "more_volume_mounts",
}
"""By key of a list or mapping to which the chart's user can append: the name of the value that is appended."""


class Writer:
    """Writes an object of manifests.yaml as a Helm template. each: the value in EACH over which the object repeats."""

    def __init__(self, each: str) -> None:
        self._each = each

    def value(self, name: str) -> str:
        """Return the Helm variable of a value of manifests.yaml."""
        scoped = self._each == "groups" or (self._each and name in OWN_VALUES)
        return f"{'$one' if scoped else '$v'}.{name}"

    def lines(self, part: Any, indent: str = "", given: str = "") -> Iterator[str]:
        """Yield the lines of a mapping or a list. given: the condition that already encloses the lines."""
        entries = part.items() if isinstance(part, dict) else ((None, one) for one in part)
        for condition, together in itertools.groupby(entries, key=lambda entry: self._condition(entry[1])):
            new = condition not in ("", given)
            if new:
                yield f"{{{{- if {condition} }}}}"
            for key, one in together:
                if key != "when":
                    yield from self._entry(key, one, indent, condition)
            if new:
                yield "{{- end }}"

    def _entry(self, key: str | None, one: Any, indent: str, condition: str) -> Iterator[str]:
        start = f"{indent}{key}:" if key is not None else f"{indent}-"
        if isinstance(one, dict) and one.keys() != {"when"} and one:
            inner = list(self.lines(one, indent + "  ", condition))
            if key is None:  # the item's first line begins with the dash
                inner[0] = f"{indent}- {inner[0].removeprefix(indent + '  ')}"
            else:
                yield start
            yield from inner
            yield from self._appended(key, len(indent) + 2)
        elif isinstance(one, list) and any(isinstance(item, dict) for item in one):
            yield start
            yield from self.lines(one, indent, condition)
            yield from self._appended(key, len(indent))
        else:
            yield f"{start} {self._scalar(one, indent)}"

    def _appended(self, key: str | None, indent: int) -> Iterator[str]:
        if key in APPENDED:
            yield f"{{{{- with {self.value(APPENDED[key])} }}}}"
            yield f"{{{{- toYaml . | nindent {indent} }}}}"
            yield "{{- end }}"

    def _condition(self, one: Any) -> str:
        if isinstance(one, dict) and "when" in one:
            return self.value(_name(one["when"]))
        if isinstance(one, str) and _name(one) in OPTIONAL:
            return self.value(OPTIONAL[_name(one)])
        if isinstance(one, list) and one and all(isinstance(item, dict) and "when" in item for item in one):
            (name,) = {item["when"] for item in one}
            return self.value(_name(name))
        return ""

    def _scalar(self, one: Any, indent: str) -> str:
        if one == "${config}":  # the config file's text becomes a YAML block
            return f'{{{{ toYaml {self.value("config")} | indent {len(indent)} | trimPrefix "{indent}" }}}}'
        if isinstance(one, str) and (name := _name(one)):
            return f"{{{{ {self.value(name)} | toJson }}}}"
        text = yaml.safe_dump(one, width=10**6, default_flow_style=True).removesuffix("\n...\n").strip()
        text = re.sub(r"\$\{(\w+)\}", lambda found: f"{{{{ {self.value(found[1])} }}}}", text)
        return text.replace("$$", "$")


def _name(text: str) -> str:
    """Return the name of the value that a text consists of, or ""."""
    found = re.fullmatch(r"\$\{(\w+)\}", text)
    return found[1] if found else ""


def templates() -> dict[Path, str]:
    """Return the text of each generated template by its path."""
    objects = yaml.load((ROOT / "dra_bridge" / "manifests.yaml").read_bytes(), yaml.CSafeLoader)
    texts: dict[str, list[str]] = {}
    for one in objects:
        kind = one["kind"]
        if kind == "Namespace":
            continue
        condition = _name(one.get("when", ""))
        each = EACH.get((kind, condition), "")
        writer = Writer(each)
        lines = ["---", *writer.lines(one)]
        if condition:
            lines = [f"{{{{- if {writer.value(condition)} }}}}", *lines, "{{- end }}"]
        if each:
            lines = [f"{{{{- range $one := $v.{each} }}}}", *lines, "{{- end }}"]
        texts.setdefault(FILES[kind], []).extend(lines)
    begin = HEAD + '{{- $v := include "dra-bridge.values" . | fromJson -}}\n'
    return {CHART / "templates" / f"{name}.yaml": begin + "\n".join(lines) + "\n" for name, lines in texts.items()}


def schema() -> str:
    """Return the schema of the chart's values, with the config file's schema in its definitions."""
    values = json.loads((CHART / "values.schema.json").read_bytes())
    config = _plain(json.loads((ROOT / "api" / "config.schema.json").read_bytes()))
    del config["$schema"]
    values["$defs"] = {**config.pop("$defs"), "Config": config}
    return json.dumps(values, indent=2) + "\n"


def _plain(part: Any) -> Any:
    """Return a part of a schema without lookaheads in its patterns, because Helm's regular expressions lack these."""
    if isinstance(part, dict):
        return {key: _without_lookahead(one) if key == "pattern" else _plain(one) for key, one in part.items()}
    return [_plain(one) for one in part] if isinstance(part, list) else part


def _without_lookahead(pattern: str) -> str:
    while found := re.search(r"\(\?[=!]", pattern):
        depth, end = 1, found.end()
        while depth:
            depth += {"(": 1, ")": -1}.get(pattern[end], 0)
            end += 1
        pattern = pattern[: found.start()] + pattern[end:]
    return pattern


def patterns() -> str:
    """Return a template with the patterns of names; the template checks a config that is text, as no schema does."""
    forms = {"resource": naming.RESOURCE, "driver": naming.SUBDOMAIN}
    lines = [
        f'{{{{- define "dra-bridge.{name}-pattern" -}}}}^{_without_lookahead(form)}${{{{- end -}}}}\n'
        for name, form in forms.items()
    ]
    return HEAD.replace("dra_bridge/manifests.yaml", "deviceplugin/naming.py") + "".join(lines)


def copies() -> dict[Path, str]:
    """Return the text of each file of the chart that is a copy of an example, by its path."""
    head = "# Copied from examples/monitoring by `python -m tests.chart --write`.\n"
    names = ("alerts.yaml", "podmonitor.yaml")
    return {CHART / "files" / name: head + (MONITORING / name).read_text() for name in names}


def generate() -> dict[Path, str]:
    """Return the text of each generated file by its path."""
    own = {CHART / "values.schema.json": schema(), CHART / "templates" / "_patterns.tpl": patterns()}
    return {**templates(), **copies(), **own}


def main(arguments: list[str]) -> int:
    """Compare the generated files with the repository's, or write them; return the exit status."""
    differ = {path: text for path, text in generate().items() if not path.exists() or path.read_text() != text}
    for path, text in differ.items():
        print(path.relative_to(ROOT), "is written" if arguments == ["--write"] else "is not what its source says")
        if arguments == ["--write"]:
            path.write_text(text)
    if differ and arguments != ["--write"]:
        print("generate it again: python -m tests.chart --write")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
