"""Random manifests as texts, in all layouts of YAML that people and charts write."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hypothesis import strategies as st

GPU = "nvidia.com/gpu"
NIC = "example.com/nic"
CLASSES = {GPU: "gpu.nvidia.com"}


@dataclass(frozen=True)
class Manifest:
    """A manifest's text. wanted: name and number of GPUs of each container with GPUs, in the order of the text."""

    text: str
    wanted: tuple[tuple[str, int], ...]


COMMENTS = st.sampled_from(
    ["", "  # why", " #\ttabs\tin it", "  # resources: {limits: {nvidia.com/gpu: 9}}", "  # ünï"]
)
LINES = st.sampled_from(["", "", "", "# a comment\n", "\n", "   \n", "    # a\ttab \t\n", "      # further in\n"])
OTHERS = st.sampled_from(
    [
        "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: c}\ndata:\n  x: |\n    limits:\n      nvidia.com/gpu: 1\n",
        "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: c}\ndata:\n  a: &a b\n  c: *a\n  d: 'it''s'\n",
        'kind: Secret\nmetadata: {name: s}\nstringData:\n  k: "a\\tb\\u00e9"\n  t: >-\n    folded\n    text\n',
        "# nothing but a comment\n",
        "",
        "{{ a template }}: {{ not yaml\n\tat all: [\n",
    ]
)
SCALARS = st.sampled_from(
    [
        "command: [sh, -c, 'sleep 1; exit']",
        "command: |\n{i}  # no comment\n{i}  limits: 1\n\n{i}  end",
        "args: >+\n{i}   folded\n\n",
        "workingDir: &{n}-dir /tmp",
        'image: "a:b"   ',
        "env: [{{name: A, value: *{n}}}, {{name: B,\n{i}  value: 'x\n{i}   y'}}]",
        "terminationMessagePath: a plain text\n{i}  of two lines",
    ]
)


@st.composite
def pod_specs(draw: st.DrawFn, indent: str) -> tuple[str, list[tuple[str, int]]]:
    """The lines of an indented pod spec, and the number of GPUs of each container."""
    wanted = []
    step = draw(st.sampled_from(["", "  "]))
    text = draw(LINES) + f"{indent}containers:{draw(COMMENTS)}\n"
    for number in range(draw(st.integers(1, 3))):
        count = draw(st.integers(0, 3))
        body, gpus = draw(containers(f"{indent}{step}  ", f"c{number}", count))
        text += draw(LINES) + f"{indent}{step}- {body.removeprefix(f'{indent}{step}  ')}"
        wanted += gpus
    if draw(st.booleans()):
        text += f"{indent}nodeSelector: {{a: b}}{draw(COMMENTS)}\n"
    if draw(st.booleans()):
        block = f"\n{indent}- name: mine\n{indent}  resourceClaimName: m"
        claims = draw(st.sampled_from([" []", "", " [{name: mine, resourceClaimName: mine}]", block]))
        text += f"{indent}resourceClaims:{claims}\n"
    return text, wanted


@st.composite
def containers(draw: st.DrawFn, indent: str, name: str, count: int) -> tuple[str, list[tuple[str, int]]]:
    """The lines of a container, and its number of GPUs."""
    parts = [f"name: &{name} {name}{draw(COMMENTS)}\n"]
    parts += [f"{draw(SCALARS).format(i=indent, n=name)}\n"] if draw(st.booleans()) else []
    resources = draw(resource_lines(indent, count))
    parts += [resources] if resources else []
    if resources and not parts[0].startswith("name") and draw(st.booleans()):
        parts.reverse()
    text = "".join(indent + part for part in parts)
    return text, [(name, count)] if count and resources else []


@st.composite
def resource_lines(draw: st.DrawFn, indent: str, count: int) -> str:
    """The lines of a container's resources, with `count` GPUs."""
    quote = draw(st.sampled_from(["", '"', "'"]))
    value = draw(st.sampled_from([f"{count}", f'"{count}"', f"'{count}'"]))
    limits = [(f"{quote}{GPU}{quote}", value)]
    limits += draw(st.lists(st.sampled_from([("cpu", "2"), ("memory", "1Gi"), (NIC, "1")]), unique=True, max_size=3))
    limits = list(draw(st.permutations(limits)))
    both = [("limits", limits)]
    if draw(st.booleans()):
        both.append(("requests", draw(st.sampled_from([limits, [("cpu", "1")]]))))
        both = list(draw(st.permutations(both)))
    style = draw(st.sampled_from(["block", "inner", "outer", "lines"]))

    def flow(entries: list[tuple[str, str]]) -> str:
        space = draw(st.sampled_from(["", " "]))
        return "{" + space + ", ".join(f"{key}: {text}" for key, text in entries) + space + "}"

    if style == "outer":
        return f"resources: {flow([(key, flow(entries)) for key, entries in both])}{draw(COMMENTS)}\n"
    if style == "lines":
        inner = ",\n".join(f'{indent}  "{key}": {flow(entries)}' for key, entries in both)
        return f"resources: {{\n{inner}\n{indent}}}{draw(COMMENTS)}\n"
    text = f"resources:{draw(COMMENTS)}\n"
    deep = indent + draw(st.sampled_from(["  ", "    "]))
    for key, entries in both:
        if style == "inner":
            text += f"{deep}{key}: {flow(entries)}{draw(COMMENTS)}\n"
            continue
        text += f"{draw(LINES)}{deep}{key}:{draw(COMMENTS)}\n"
        for name, quantity in entries:
            text += f"{draw(LINES)}{deep}  {name}: {quantity}{draw(COMMENTS)}\n"
    return text


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    """A YAML stream of a few objects; the containers of its pods may request GPUs."""
    text, wanted = "", []
    for number in range(draw(st.integers(1, 3))):
        if draw(st.booleans()):
            text += draw(OTHERS)
        else:
            body, gpus = draw(draw(st.sampled_from(SHAPES))(f"w{number}"))
            text += body
            wanted += gpus
        text += draw(st.sampled_from(["---\n", "--- # Source: a.yaml\n", "---  \n# Source: b\n"]))
    if draw(st.booleans()):
        text = draw(st.sampled_from(["---\n", "# first\n---\n"])) + text
    last = text.rstrip("\n")
    if draw(st.booleans()) and not last.endswith("---"):
        text = last
    if draw(st.booleans()):
        text = text.replace("\n", "\r\n")
    return Manifest(draw(st.sampled_from(["", "\ufeff"])) + text, tuple(wanted))


@st.composite
def deployments(draw: st.DrawFn, name: str) -> tuple[str, list[tuple[str, int]]]:
    """A Deployment in block style."""
    spec, wanted = draw(pod_specs("      "))
    head = f"apiVersion: apps/v1\nkind: Deployment\nmetadata: {{name: {name}}}\nspec:\n  template:\n"
    return f"{head}    spec:{draw(COMMENTS)}\n{spec}", wanted


@st.composite
def lists(draw: st.DrawFn, name: str) -> tuple[str, list[tuple[str, int]]]:
    """A List of Pods."""
    text, wanted = "apiVersion: v1\nkind: List\nitems:\n", []
    for number in range(draw(st.integers(1, 2))):
        spec, gpus = draw(pod_specs("    "))
        text += f"- metadata: {{name: {name}-{number}}}\n  apiVersion: v1\n  kind: Pod\n  spec:\n{spec}"
        wanted += gpus
    return text, wanted


@st.composite
def cron_jobs(draw: st.DrawFn, name: str) -> tuple[str, list[tuple[str, int]]]:
    """A CronJob whose pod spec is at the beginning of its document."""
    spec, wanted = draw(pod_specs("          "))
    head = "spec:\n  jobTemplate:\n    spec:\n      template:\n        spec:\n"
    return f"{head}{spec}kind: CronJob\nmetadata: {{name: {name}}}\napiVersion: batch/v1\n", wanted


SHAPES: list[Callable[[str], st.SearchStrategy[tuple[str, list[tuple[str, int]]]]]] = [deployments, lists, cron_jobs]
