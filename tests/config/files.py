"""Config files for the tests, and ways to read them."""

from __future__ import annotations

import functools

import pytest
from hypothesis import strategies as st

from deviceplugin.config import ConfigError, ResourceConfig, document, parse

WHOLE = """\
resources:
  - name: example.com/serial
    driver: serial.example.com
    devices:
      - path: /dev/ttyUSB*
      - simulated: {count: 8, numa: 2, unhealthy_file: /run/unhealthy}
      - group: [/dev/a*, /dev/b*]
    permissions: wr
    env: {SERIAL_MODE: fast}
    nodes: [/dev/control]
    mounts: [{host: /opt/x, container: /opt/y}]
    annotations: {example.com/tty: "yes"}
    cdi: [example.com/nic=nic0]
    sharing: {replicas: 4}
    topology: false
    attributes: {ports: 2, fast: true, model: x, firmware: {version: 1.2.3}}
    capacity: {memory: 16Gi, slots: 3}
    dra: {share: 50%, drain: wait}
"""


def resource(text: str) -> ResourceConfig:
    """Return the resource of a config file with these fields (in YAML's flow style) beside its name and devices."""
    return parse(f"resources: [{{name: example.com/a, devices: [path: /dev/x], {text}}}]").resources[0]


def problems(text: str) -> tuple[document.Problem, ...]:
    """Return the problems of a config file's text; an empty tuple if it is valid."""
    try:
        parse(text)
    except ConfigError as error:
        return error.problems
    return ()


def refused(text: str | bytes) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        parse(text, "my.yaml")
    return caught.value


@functools.cache
def bombs() -> dict[str, tuple[str, str]]:
    """Return files that would take a careless reader minutes or gigabytes, each with the text of its error."""
    good = "resources:\n- name: example.com/a\n  devices: [path: /dev/a]\n"
    levels = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    levels += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 10)]
    laughs = "\n".join(levels)
    escapes = '"' + "\\e" * 60_000 + '"'
    variables = ", ".join(f"? {'A' * 4000}{n} : x" for n in range(1000))
    each = [f"{{name: a/b{n}, env: *e, devices: [path: /dev/x{n}]}}" for n in range(20)]
    resources = ", ".join(each).replace("*e", f"&e {{{variables}}}", 1)
    values, aliases = f"more than {document.MAX_VALUES} values", "once its aliases are followed"
    return {
        "list of lists as a name": (f"{laughs}\nresources: [name: *a9]\n", "expected text, got a list"),
        "list of lists as a number": (f"{laughs}\nmetrics: {{period: !!int [*a9]}}\n", "expected a whole number"),
        "list of lists as a truth value": (f"{laughs}\nmetrics: {{dcgm: !!bool [*a9]}}\n", "expected true or false"),
        "200,000 unknown keys": (good + "".join(f"key{n}: 1\n" for n in range(200_000)), values),
        "20,000 unknown keys": (good + "".join(f"resource{n}: 1\n" for n in range(20_000)), "and at least 75 more"),
        "4 MiB of values": (f"[{'a,' * 2_000_000}]", values),
        "4 MiB of one text": (f"{good}  env: {{A: '{'a' * 4_000_000}'}}\n", "at most 131071 are allowed"),
        "4 MiB of lines": ("ab\n" * 1_000_000 + "\t: ]", "characters"),
        "100,000 %TAG directives": ("".join(f"%TAG !a{n}! x\n" for n in range(100_000)), "more than 32 %TAG"),
        "one long name again and again": (
            f"x: &x {escapes}\nresources: [{'{name: *x, devices: [path: *x]}, ' * 5000}]",
            "has 60000 characters",
        ),
        "1,000 long names of variables again and again": (
            f"resources: [{resources}]\nmetrics: {{token: x}}",
            "metrics.token: 'x' is a relative path",
        ),
        "merges of one list again and again": (
            f"e: &e {{}}\ns: &s [{'*e, ' * 20_000}]\nresources: [{{{'<<: *s, ' * 9_000}}}]",
            aliases,
        ),
    }


KEYS = st.sampled_from(
    [
        "name",
        "driver",
        "devices",
        "env",
        "mounts",
        "sharing",
        "replicas",
        "path",
        "simulated",
        "group",
        "dra",
        "resources",
    ]
)

WORD = st.text(st.characters(min_codepoint=33, max_codepoint=126), max_size=6)
