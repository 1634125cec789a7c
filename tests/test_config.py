"""The config file: what it may say, and what is said of one that may not."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from hypothesis import HealthCheck, assume, event, example, given, settings
from hypothesis import strategies as st

from deviceplugin import config, naming
from deviceplugin.config import ConfigError, ResourceConfig, parse
from deviceplugin.device import Version

ROOT = Path(__file__).parent.parent

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
    """Return the one resource whose fields (beyond name and devices) are this flow of YAML."""
    return parse(f"resources: [{{name: example.com/a, devices: [path: /dev/x], {text}}}]").resources[0]


def problems(text: str) -> tuple[config.Problem, ...]:
    """Return what is wrong with this, nothing if it can be used."""
    try:
        parse(text)
    except ConfigError as error:
        return error.problems
    return ()


def refused(text: str | bytes) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        parse(text, "my.yaml")
    return caught.value


# What it says.


def test_every_key_is_read() -> None:
    """A file that uses every key becomes values that say the same."""
    one = parse(WHOLE).resources[0]
    assert (one.name, one.driver) == ("example.com/serial", "serial.example.com")
    assert [entry.kind for entry in one.devices] == ["path", "simulated", "group"]
    assert one.devices[0].path == "/dev/ttyUSB*"
    simulated = one.devices[1].simulated
    assert simulated is not None
    assert (simulated.count, simulated.numa, simulated.unhealthy_file) == (8, 2, "/run/unhealthy")
    assert one.devices[2].group == ("/dev/a*", "/dev/b*")
    assert one.env == {"SERIAL_MODE": "fast"}
    assert one.nodes == ("/dev/control",)
    assert [(mount.host, mount.container, mount.readonly) for mount in one.mounts] == [("/opt/x", "/opt/y", True)]
    assert one.annotations == {"example.com/tty": "yes"}
    assert one.cdi == ("example.com/nic=nic0",)
    assert (one.sharing.replicas, one.topology) == (4, False)
    assert one.capacity == {"memory": "16Gi", "slots": 3}
    assert (one.dra.share, one.dra.drain) == ("50%", "wait")


def test_what_is_left_out_has_its_default() -> None:
    """A resource with nothing but a name and devices is read and write, not shared, with topology, not for claims."""
    one = parse("resources: [{name: a/b, devices: [path: /dev/x]}]").resources[0]
    assert (one.permissions, one.sharing.replicas, one.topology) == ("rw", 1, True)
    assert (one.dra.share, one.dra.drain) == ("none", "cordon")
    assert (dict(one.env), one.mounts, dict(one.annotations), one.cdi) == ({}, (), {}, ())
    assert (dict(one.attributes), dict(one.capacity)) == ({}, {})


def test_attributes_become_those_of_devices() -> None:
    """Attributes keep their four kinds; a version is one that selectors compare as a version."""
    attributes = parse(WHOLE).resources[0].device_attributes
    assert attributes == {"ports": 2, "fast": True, "model": "x", "firmware": "1.2.3"}
    assert isinstance(attributes["firmware"], Version)
    assert not isinstance(attributes["model"], Version)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("permissions: rw", "permissions: wr"),
        ("env: {A: '1', B: '2'}", "env: {B: '2', A: '1'}"),
        ("topology: true", ""),
        ("sharing: {}", "sharing: {replicas: 1}"),
        ("mounts: [{host: /a, container: /b}]", "mounts: [{container: /b, host: /a, readonly: true}]"),
        ("env: {A: x}", 'env: {"A": "x"}  '),
    ],
)
def test_resources_that_mean_the_same_are_equal(one: str, other: str) -> None:
    """Two ways to say the same make equal resources, so that a reload leaves them alone."""
    assert resource(one) == resource(other)
    assert hash(resource(one)) == hash(resource(other))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("attributes: {a: 1}", "attributes: {a: true}"),
        ("attributes: {a: 1.2.3}", "attributes: {a: {version: 1.2.3}}"),
        ("capacity: {a: 1}", "capacity: {a: '1'}"),
        ("mounts: [{host: /a, container: /b}]", "mounts: [{host: /a, container: /b, readonly: false}]"),
        ("sharing: {replicas: 2}", "sharing: {replicas: 3}"),
        ("sharing: {replicas: {a: 2, b: 3}}", "sharing: {replicas: {b: 3, a: 2}}"),
    ],
)
def test_resources_that_mean_something_else_differ(one: str, other: str) -> None:
    """Resources that would be served differently are not equal, even where Python's values are."""
    assert resource(one) != resource(other)


@pytest.mark.parametrize("text", ["on", "no", "12:30", "0644", "2024-01-01", "0x10", "1_000", "00:11:22:33:44:55"])
def test_text_is_what_was_written(text: str) -> None:
    """What YAML 1.1 would take for a boolean, a date or an odd number is text, as written."""
    assert resource(f'env: {{A: {text}, B: "{text}"}}').env == {"A": text, "B": text}


def test_anchors_and_merge_keys_work() -> None:
    """An alias repeats a value, and a merge key puts one mapping into another, whose own keys win."""
    parsed = parse(
        """
resources:
  - &base
    name: example.com/a
    devices: [path: /dev/a]
    env: &env {A: one, B: one}
    sharing: &sharing {replicas: 2}
  - <<: *base
    name: example.com/b
    env: {<<: [*env, {C: one, A: three}], A: two}
    sharing: *sharing
"""
    )
    assert parsed.resources[1].name == "example.com/b"
    assert parsed.resources[1].devices == parsed.resources[0].devices
    assert parsed.resources[1].env == {"A": "two", "B": "one", "C": "one"}
    assert parsed.resources[1].sharing.replicas == 2


def test_byte_order_mark_is_no_matter() -> None:
    """A file that begins with a byte order mark is read like one that does not."""
    assert parse(b"\xef\xbb\xbf" + WHOLE.encode()) == parse(WHOLE)


# What is said of one that cannot be used: line, place, and advice.


@pytest.mark.parametrize(
    ("field", "path", "advice"),
    [
        # unknown keys
        ("permisions: rw", "permisions", "did you mean 'permissions'?"),
        ("Env: {}", "Env", "did you mean 'env'?"),
        ("zzz: 1", "zzz", "there are name, driver, devices"),
        ("mounts: [{host: /a, contaner: /b}]", "mounts[0].contaner", "did you mean 'container'?"),
        # types
        ("env: {A: 1}", "env.A", 'expected text, got the number 1; write "1" in quotes'),
        ("env: {A: true}", "env.A", 'write "true" in quotes'),
        ("env: {A: 1.50}", "env.A", 'write "1.50" in quotes'),
        ("env: {A: }", "env.A", "has no value; expected text"),
        ("env: [A]", "env", "expected a mapping, got a list"),
        ("env: {A: [x]}", "env.A", "expected text, got a list"),
        ("topology: yes", "topology", "expected true or false, got the text 'yes'; write true"),
        ("topology: off", "topology", "write false"),
        ("topology: 1", "topology", "expected true or false, got the number 1"),
        ("sharing: 4", "sharing", "expected a mapping with replicas, got the number 4"),
        ("sharing: {replicas: '4'}", "sharing.replicas", "got the text '4'; write 4"),
        ("sharing: {replicas: 2.0}", "sharing.replicas", "got the number 2.0"),
        ("sharing: {replicas: 0}", "sharing.replicas", "must be 1 to 10000, not 0"),
        (f"sharing: {{replicas: {'9' * 5000}}}", "sharing.replicas", "expected"),
        (
            "mounts: /a",
            "mounts",
            "expected a list, got the text '/a'; begin each item on a line of its own with a dash",
        ),
        ("driver: ", "driver", "has no value"),
        ("driver: !!binary aGk=", "driver", "expected text, got something tagged tag:yaml.org,2002:binary"),
        ("env: !!set {a}", "env", "expected a mapping, got something tagged"),
        ("env: {1: a}", "env", "a key must be text, not the number 1; put it in quotes"),
        # names and values
        ("driver: GPU.example.com", "driver", "a DNS name in lower case, such as gpu.example.com"),
        (f"driver: {'a' * 64}", "driver", "has 64 characters; at most 63 are allowed"),
        ("permissions: rx", "permissions", "write any of r (read), w (write) and m (mknod), such as rw"),
        ("permissions: rr", "permissions", "are no permissions"),
        ("permissions: ''", "permissions", "are no permissions"),
        ("env: {A=B: c}", 'env["A=B"]', "is not a variable's name"),
        ('env: {A: "a\\0b"}', "env.A", "NUL"),
        ("annotations: {a b: c}", 'annotations["a b"]', "is not an annotation's name"),
        ("cdi: [nic0]", "cdi[0]", "write vendor/class=name, such as example.com/nic=nic0"),
        ("mounts: [{host: /a}]", "mounts[0]", "'container' is missing"),
        ("mounts: [{host: x, container: /b}]", "mounts[0].host", "write an absolute one"),
        ("mounts: [{host: /a, container: /}]", "mounts[0].container", "names the root directory"),
        ("mounts: [{host: ~/a, container: /b}]", "mounts[0].host", "neither ~ nor variables are expanded"),
        ("mounts: [{host: $HOME, container: /b}]", "mounts[0].host", "neither ~ nor variables are expanded"),
        ("mounts: [{host: '', container: /b}]", "mounts[0].host", "the path is empty"),
        ("mounts: [{host: /a/../b, container: /b}]", "mounts[0].host", "goes up with `..`"),
        ("mounts: [{host: '/[a', container: /b}, {host: x, container: /b}]", "mounts[1].host", "write an absolute one"),
        ("include: ['[a']", "include[0]", "has a `[` without its `]`; write [[] for the character itself"),
        ("exclude: ['a[!]']", "exclude[0]", "has a `[` without its `]`"),
        ("sharing: {replicas: {'[]': 2}}", 'sharing.replicas["[]"]', "has a `[` without its `]`"),
        (f"include: ['{'a' * 4096}']", "include[0]", "has 4096 characters; at most 4095 are allowed"),
        ("topology: !!bool [true]", "topology", "expected true or false, got something tagged"),
        ("health: {period: !!int {a: 1}}", "health.period", "expected a whole number, got something tagged"),
        ("mounts: [{host: /a//b/., container: /b}]", "mounts[0].host", "write /a/b"),
        (
            "mounts: [{host: /a, container: /c}, {host: /b, container: /c}]",
            "mounts[1].container",
            "something is mounted at '/c' already",
        ),
        # claims
        ("dra: {share: all}", "dra", "claims need a driver's name"),
        ("driver: a.b, dra: {share: 120%}", "dra.share", "a percentage such as 50%"),
        ("driver: a.b, dra: {share: -1}", "dra.share", "must be 0 to"),
        ("driver: a.b, dra: {share: [1]}", "dra.share", "expected a whole number or text, got a list"),
        ("driver: a.b, dra: {drain: Cordon}", "dra.drain", "not one of cordon or wait; did you mean 'cordon'?"),
        ("attributes: {a-b: 1}", 'attributes["a-b"]', "such as model or example.com/model"),
        ("attributes: {a: {version: '1.2'}}", "attributes.a.version", "write major.minor.patch, such as 1.2.0"),
        ("attributes: {a: 1.5}", "attributes.a", "expected true or false, a whole number, text or a mapping"),
        (f"attributes: {{a: {'é' * 40}}}", "attributes", "has at most 64 bytes"),
        (f"attributes: {{a: {'x' * 65}}}", "attributes.a", "has 65 characters; at most 64 are allowed"),
        (f"attributes: {{a: {2**63}}}", "attributes.a", "must be -9223372036854775808 to 9223372036854775807"),
        ("driver: a.b, attributes: {m: 1, a.b/m: 2}", "attributes", "are the same to driver a.b"),
        ("capacity: {a-b: 1}", 'capacity["a-b"]', "is not the name of an attribute or capacity"),
        ("health: {probe: opn}", "health.probe", "none or open or a mapping with command, got the text 'opn'; did you"),
        ("capacity: {a: 16GB}", "capacity.a", "such as 16Gi"),
        ("capacity: {a: -1}", "capacity.a", "must be 0 to"),
        ("capacity: {a: 1e30}", "capacity.a", 'write "1e30" in quotes'),
        ("capacity: {a: '1e30'}", "capacity", "must be at least 0 and fit into 64 bits"),
        (
            f"attributes: {{{', '.join(f'a{number}: 1' for number in range(31))}}}",
            "attributes",
            "30 attributes and capacities at the most, not 31",
        ),
    ],
)
def test_wrong_field_is_named_with_advice(field: str, path: str, advice: str) -> None:
    """A wrong field's error names the file, the line, the place, and says what would be right."""
    text = (
        "resources:\n- name: a/a\n  devices: [path: /dev/x]\n- {name: a/b, devices: [path: /dev/y],\n   "
        + field
        + "}\n"
    )
    error = refused(text)
    assert error.path == f"$.resources[1].{path}"
    assert advice in error.message
    assert error.line in {4, 5}
    assert str(error).startswith(f"my.yaml:{error.line}: $.resources[1].{path}: ")


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("gpu", "did you mean example.com/gpu?"),
        ("/gpu", "the vendor domain '' is not a DNS name"),
        ("example.com/", "must be letters, digits"),
        ("Example.com/gpu", "lower-case letters"),
        ("example.com/gpu/x", "more than one slash"),
        ("example.com/-gpu", "begin and end with a letter or digit"),
        (f"example.com/{'g' * 64}", "64 characters long, 63 are allowed"),
        (f"{'a' * 245}/gpu", "244 characters at the most"),
        ("kubernetes.io/gpu", "belong to Kubernetes"),
        ("x.kubernetes.io/gpu", "belong to Kubernetes"),
        ("requests.example.com/gpu", "must not start with `requests.`"),
        ("", "it has no vendor domain"),
    ],
)
def test_wrong_resource_name_is_refused(name: str, advice: str) -> None:
    """A name that the kubelet would refuse as an extended resource is refused here, with an example."""
    error = refused(f"resources:\n  - devices: [path: /dev/x]\n    name: '{name}'\n")
    assert (error.line, error.path) == (3, "$.resources[0].name")
    assert advice in error.message


@pytest.mark.parametrize(
    ("entry", "path", "advice"),
    [
        ("path: ttyUSB*", ".path", "write an absolute one, such as /dev/ttyUSB*"),
        ("path: ./dev/x", ".path", "such as /dev/x"),
        ("path: ''", ".path", "the path is empty"),
        ("path: /dev/", ".path", "write /dev"),
        ("path: /", ".path", "names the root directory"),
        ("path: /dev/**", ".path", "write one `*` for each level of directories"),
        ("path: [/dev/a]", ".path", "expected text, got a list"),
        ('path: "/dev/a\\0"', ".path", "NUL"),
        ("/dev/kvm", "", "expected a mapping with one of path, simulated"),
        ("/dev/kvm", "", "write path: /dev/kvm"),
        ("{}", "", "an entry needs one of path, simulated"),
        ("{path: /dev/a, simulated: {count: 1}}", "", "not path and simulated; make each an entry of its own"),
        ("pth: /dev/a", ".pth", "did you mean 'path'?"),
        ("simulated: 8", ".simulated", "expected a mapping with count, got the number 8"),
        ("simulated: {}", ".simulated", "'count' is missing"),
        ("simulated: {count: 0}", ".simulated.count", "must be 1 to 65536, not 0"),
        ("group: /dev/a*", ".group", "expected a list"),
        ("group: [/dev/a*]", ".group", "the list has only 1; it needs at least 2"),
        ("group: [/dev/a*, /dev/a*]", ".group", "the same glob is given twice"),
        ("group: [/dev/a*, b]", ".group[1]", "is a relative path"),
    ],
)
def test_wrong_entry_is_named_with_advice(entry: str, path: str, advice: str) -> None:
    """A wrong entry of `devices` is named by its number, and the error says what an entry looks like."""
    error = refused(f"resources:\n  - name: a/b\n    devices:\n      - path: /dev/z\n      - {entry}\n")
    assert (error.line, error.path) == (5, f"$.resources[0].devices[1]{path}")
    assert advice in error.message


@pytest.mark.parametrize(
    ("text", "line", "advice"),
    [
        ("", 1, "is empty; it needs `resources:`"),
        ("# nothing\n", 1, "is empty"),
        ("---\n", 1, "is empty"),
        ("~", 1, "is empty"),
        ("[]", 1, "expected a mapping with resources, got a list"),
        ("hello", 1, "expected a mapping with resources, got the text 'hello'"),
        ("{}", 1, "'resources' is missing"),
        ("resources: []", 1, "the list is empty; it needs at least 1"),
        ("resources:\n", 1, "has no value; expected a list"),
        ("resources: {}", 1, "expected a list, got a mapping"),
        ("\nresources: [}", 2, "is not valid YAML"),
        ("resources:\n\t- a", 2, "the line contains a tab"),
        ("resources: *x", 1, "an anchor (&name) must come before its alias"),
        ("a: 1\n---\nb: 2", 2, "one file holds one document"),
        ("resources: []\n\x07", 2, "the character #x0007 is not allowed"),
        ("resources: [1]\nresources: []", 1, "the key 'resources' is given twice, first on line 1"),
        ("<<: 3", 1, "`<<` merges a mapping or a list of mappings, not the number 3"),
        ("&a\n<<: *a", 1, "`<<` merges a mapping into itself"),
        ("resources: &a [*a]", 1, "got a list"),
        ("\n" + "[" * 100_000, 2, "is nested deeper than 32 levels"),
        ("a\ud800", 1, "is not text"),
        (b"a: 1\nb: \xff\xfe", 2, "is not UTF-8"),
        (WHOLE.encode("utf-16"), 1, "is not UTF-8"),
        (b"# " + b"x" * (5 << 20), 0, "is larger than 4 MiB"),
    ],
)
def test_what_is_no_config_is_refused_with_its_line(text: str | bytes, line: int, advice: str) -> None:
    """A file that is no YAML, or no mapping, or nothing at all, gets one clear error with its line."""
    error = refused(text)
    assert error.line == line
    assert advice in str(error)


def test_billion_laughs_end_early() -> None:
    """Aliases that multiply into more values than any config has are refused, not followed."""
    levels = ["a0: &a0 {path: /dev/x}"]
    levels += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 9)]
    nested = "\n".join(levels) + "\nresources:\n- &r {name: a/b, devices: [" + "path: /dev/x, " * 1000 + "]}\n"
    assert "unknown key" in str(refused(nested))  # never followed: no such key
    wide = "resources:\n- &r {name: a/b, devices: &d [" + "{path: /dev/x}, " * 1000 + "]}\n" + "- *r\n" * 1000
    assert "once its aliases are followed" in str(refused(wide))
    merged = "x: &m0 {a: b}\n" + "".join(
        f"x{n}: &m{n} {{<<: [{', '.join([f'*m{n - 1}'] * 9)}]}}\n" for n in range(1, 9)
    )
    assert "once its aliases are followed" in str(refused(f"{merged}<<: *m8\n"))


def bombs() -> dict[str, tuple[str, str]]:
    """Return files that would take a careless reader minutes or gigabytes, with what the error says."""
    good = "resources:\n- name: example.com/a\n  devices: [path: /dev/a]\n"
    levels = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    levels += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 10)]
    laughs = "\n".join(levels)
    escapes = '"' + "\\e" * 60_000 + '"'
    values, aliases = f"more than {config.MAX_VALUES} values", "once its aliases are followed"
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
        "merges of one list again and again": (
            f"e: &e {{}}\ns: &s [{'*e, ' * 20_000}]\nresources: [{{{'<<: *s, ' * 9_000}}}]",
            aliases,
        ),
    }


@pytest.mark.parametrize("name", bombs())
def test_hostile_file_is_refused_in_bounded_time_and_memory(name: str, tmp_path: Path) -> None:
    """Any file up to 4 MiB is read within 5 s of processor time and 64 MB; the next good file is read."""
    text, advice = bombs()[name]
    file, good = tmp_path / "bomb.yaml", tmp_path / "good.yaml"
    file.write_text(text)
    good.write_text(WHOLE)
    assert file.stat().st_size <= config.MAX_BYTES
    code = f"""
import resource
from deviceplugin import config
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
good = config.load({str(good)!r})
before = peak()
resource.setrlimit(resource.RLIMIT_CPU, (5, 5))
try:
    config.load({str(file)!r})
except config.ConfigError as error:
    print(error)
assert peak() - before <= 64e6, peak() - before
assert config.load({str(good)!r}) == good
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert advice in done.stdout


@pytest.mark.parametrize(
    "text",
    ['"a\\e[31m\\u202eb": 1', 'metrics: {"a\\r\\nb": 1}', "resources: !<!%1b[31m> [1]", "metrics: !%1b%0a%07 {}"],
)
def test_control_characters_are_shown_escaped(text: str) -> None:
    """What a file says cannot move the cursor of a terminal or begin a line of the log."""
    error = refused(text)
    assert error.problems
    assert all(line.isprintable() for line in str(error).split("\n")), str(error)
    assert str(error).count("\n") == len(error.problems) - 1


@pytest.mark.parametrize(
    ("glob", "advice"),
    [
        ("/dev/[abc", "'/dev/[abc' has a `[` without its `]`; write [[] for the character itself"),
        ("/dev/[]", "has a `[` without its `]`"),
        ("/dev/[!]", "has a `[` without its `]`"),
        ("/dev/[a/b]", "has a `[` without its `]`"),
        ("/dev/" + "a" * 4096, "has 4101 characters; at most 4095 are allowed"),
    ],
)
def test_glob_that_can_match_nothing_is_refused(glob: str, advice: str) -> None:
    """A bracket that is not closed and a pattern longer than a path are errors that name the line."""
    error = refused(f"resources:\n- name: a/b\n  devices:\n  - path: '{glob}'\n")
    assert (error.line, error.path) == (4, "$.resources[0].devices[0].path")
    assert advice in error.message


@pytest.mark.parametrize(
    ("groups", "refused_at"),
    [
        ([["/dev/dm-0", "/dev/control"], ["/dev/dm-1", "/dev/control"]], 1),
        ([["/dev/dm-*", "/dev/control"], ["/dev/control", "/dev/a*"]], 0),
        ([["/dev/dm-0", "/dev/control"], ["/dev/dm-0", "/dev/control"]], None),  # one device of two resources
        ([["/dev/dm-0", "/dev/control"], ["/dev/dm-0", "/dev/control", "/dev/x"]], None),  # it, and more of it
        ([["/dev/dm-0", "/dev/contro[l]"], ["/dev/dm-1", "/dev/contro[l]"]], None),
        ([["/dev/video*", "/dev/audio*"], ["/dev/video*", "/dev/meta*"]], None),
    ],
)
def test_a_node_of_two_different_groups_is_refused(groups: list[list[str]], refused_at: int | None) -> None:
    """It may be shared, or what makes the devices one thing; only who writes the file can say which."""
    lines = [f"- name: a/{n}\n  devices:\n  - group: {json.dumps(one)}\n" for n, one in enumerate(groups)]
    found = problems("resources:\n" + "".join(lines))
    expected = [] if refused_at is None else [(7, f"$.resources[1].devices[0].group[{refused_at}]")]
    assert [(one.line, one.path) for one in found] == expected
    assert all("/dev/control is in another group, too, on line 4;" in one.message for one in found)


def test_a_shared_node_is_no_device_of_its_resource() -> None:
    """A node under `nodes` goes to every container; one that is a device goes to one."""
    error = refused("resources: [{name: a/b, nodes: [/dev/y, /dev/x], devices: [path: /dev/x]}]")
    assert (error.path, len(error.problems)) == ("$.resources[0].nodes[1]", 1)


@pytest.mark.parametrize(
    ("one", "other", "good"),
    [
        ("driver: a.b, dra: {share: none}", "driver: c.d, dra: {share: all}", False),
        ("driver: a.b, dra: {share: 50%}", "driver: c.d, dra: {share: 50%}", False),
        ("driver: a.b, dra: {share: 100%}", "", False),
        ("driver: a.b, dra: {share: all}, exclude: [x1]", "exclude: [x1]", False),
        ("driver: a.b, dra: {share: all}", "driver: c.d, dra: {share: 100%}", True),
        ("driver: a.b, dra: {share: 0}", "", True),
        ("driver: a.b, dra: {share: none}", "driver: a.b, dra: {share: all}", True),  # they move together
        ("driver: a.b, dra: {share: all}, include: [x1]", "exclude: [x1]", True),
    ],
)
@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("path: /dev/x*", "path: /dev/x*"),
        ("path: /dev/x*", "group: [/dev/z*, /dev/x*]"),
        ('pci: {vendor: "8086"}', 'pci: {vendor: "8086"}'),
    ],
)
def test_devices_that_nobody_would_be_offered_are_refused(
    one: str, other: str, first: str, second: str, *, good: bool
) -> None:
    """A device is on one side at a time, so all drivers over it need it on the same one."""
    resources = (f"- {{name: a/a, devices: [{first}], {one}}}", f"- {{name: a/b, devices: [{second}], {other}}}")
    found = problems("\n".join(("resources:", *resources)))
    assert [(problem.line, problem.path) for problem in found] == ([] if good else [(3, "$.resources[1]")])
    assert all("a/a" in problem.message for problem in found)


@pytest.mark.parametrize("glob", ["/dev/[abc]x", "/dev/[]]", "/dev/[!]a]", "/dev/[!a-c]/[[]", "/dev/a]b"])
def test_closed_brackets_are_taken(glob: str) -> None:
    """Sets of characters as fnmatch reads them, and a closing bracket alone, are good."""
    text = f"resources: [{{name: a/b, devices: [{{path: '{glob}'}}], include: ['{glob}']}}]"
    assert parse(text).resources[0].devices[0].path == glob


def test_many_problems_are_said_at_once() -> None:
    """All that is wrong with a file is said together, in the order of the lines."""
    error = refused(
        """
resources:
  - name: gpu
    devices: [path: x]
    topology: maybe
    colour: blue
  - name: example.com/b
    devices: []
  - name: example.com/c
    devices: [path: /dev/a]
  - name: example.com/c
    devices: [path: /dev/b]
"""
    )
    assert [(problem.line, problem.path) for problem in error.problems] == [
        (3, "$.resources[0].name"),
        (4, "$.resources[0].devices[0].path"),
        (5, "$.resources[0].topology"),
        (6, "$.resources[0].colour"),
        (8, "$.resources[1].devices"),
        (11, "$.resources[3].name"),
    ]
    assert str(error).count("\n") == 5
    assert "is there already, on line 9" in error.problems[-1].message


def test_endless_problems_are_cut_short() -> None:
    """An error's text stays readable whatever the number of problems, and says how many it leaves out."""
    error = refused("resources: [" + "{}, " * 40 + "]")
    assert len(error.problems) == 80
    assert str(error).splitlines()[-1] == "my.yaml: and 55 more"
    error = refused("resources: [" + "{}, " * 400 + "]")
    assert len(error.problems) == 100
    assert str(error).splitlines()[-1] == "my.yaml: and at least 75 more"


def test_long_values_are_cut_short() -> None:
    """A value of a megabyte does not become an error of a megabyte."""
    assert len(str(refused(f"resources: [{{name: {'x' * 1_000_000}, devices: [path: /dev/x]}}]"))) < 2000


def test_missing_key_is_not_said_twice() -> None:
    """A required key that was misspelt is named once, as the misspelling."""
    error = refused("resources: [{nmae: a/b, devices: [path: /dev/x]}]")
    assert [problem.path for problem in error.problems] == ["$.resources[0].nmae"]


# Files.


def test_file_is_read(tmp_path: Path) -> None:
    """A file's content is what is parsed."""
    file = tmp_path / "config.yaml"
    file.write_text(WHOLE)
    assert config.load(file) == config.load(str(file)) == parse(WHOLE)


def test_error_names_the_file(tmp_path: Path) -> None:
    """An error about a file's content names the file as it was given."""
    file = tmp_path / "config.yaml"
    file.write_text("resources: 1")
    with pytest.raises(ConfigError) as caught:
        config.load(file)
    assert str(caught.value).startswith(f"{file}:1: $.resources: expected a list")


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("missing.yaml", "cannot be read: No such file or directory"),
        (".", "is a directory; name the file in it"),
        ("a\0b", "cannot be read: embedded null byte"),
        ("/dev/zero", "is larger than 4 MiB"),
        ("x" * 300, "cannot be read: File name too long"),
        ("/proc/self/mem", "cannot be read"),
    ],
)
def test_file_that_cannot_be_read_is_said(tmp_path: Path, name: str, advice: str) -> None:
    """A file that is not there, or no file, is an error of the same kind as one about its content."""
    with pytest.raises(ConfigError, match=re.escape(advice)) as caught:
        config.load(tmp_path / name if name != "." else tmp_path)
    assert (caught.value.line, caught.value.path) == (0, "$")


@pytest.mark.parametrize("file", sorted((ROOT / "examples").glob("*.yaml")), ids=lambda file: file.name)
def test_examples_can_be_used(file: Path) -> None:
    """Every example with resources in it is a config file without a problem."""
    if "\nresources:" in file.read_text():
        assert config.load(file).resources


# Whatever comes.

_TEXT = st.text(st.sampled_from("resourcenamdvip/*.:-[]{}&*<'\"#!|>%@\n\t 01~,?\\\0é\u2028\ud800")) | st.text()


@given(_TEXT)
@example("!")
@example("? a\n: b\n? a\n: c")
@example("resources: !x [")
def test_any_text_is_a_config_or_an_error(text: str) -> None:
    """Text of any kind gives a config or a ConfigError, and nothing else."""
    with contextlib.suppress(ConfigError):
        parse(text)


@given(st.binary())
def test_any_bytes_are_a_config_or_an_error(data: bytes) -> None:
    """Bytes of any kind give a config or a ConfigError, and nothing else."""
    with contextlib.suppress(ConfigError):
        parse(data)


_SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.dates()
_JSON = st.recursive(
    _SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8) | st.integers(), inner, max_size=4),
    max_leaves=12,
)
_KEYS = st.sampled_from(
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
_NEARLY = st.recursive(
    _SCALARS | st.sampled_from(["example.com/a", "/dev/x", "rw"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_KEYS, inner, max_size=5),
    max_leaves=25,
)


@given(_JSON | _NEARLY | st.fixed_dictionaries({"resources": st.lists(_NEARLY, max_size=3)}))
@settings(suppress_health_check=[HealthCheck.too_slow])
def test_any_structure_is_a_config_or_an_error(data: Any) -> None:
    """A structure of any shape, dumped as YAML, gives a config or a ConfigError whose problems all have a place."""
    try:
        text = yaml.safe_dump(data, allow_unicode=True)
    except UnicodeEncodeError:
        return
    assert all(problem.path.startswith("$") and problem.message for problem in problems(text))


# The schema.

_BEYOND = (
    "is there already, on line",
    "is mounted at",
    "are the same to driver",
    "has at most 64 bytes",
    "at the most, not",
    "must be at least 0 and fit into 64 bits",
    "would be every",
    "a resource has one nvidia entry",
    "is in another group, too",
    "or shared, not both",
    "would be offered to nobody",
)
"""What only the code can say; the schema lets it pass."""


def test_schema_file_is_that_of_the_code() -> None:
    """api/config.schema.json is what `deviceplugin schema` prints."""
    file = ROOT / "api" / "config.schema.json"
    assert json.loads(file.read_text()) == config.schema(), "run: deviceplugin schema > api/config.schema.json"


def test_schema_is_a_schema() -> None:
    """The schema is a valid JSON schema of draft 2020-12, and every key in it is described."""
    schema = config.schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    for definition in schema["$defs"].values():
        assert definition["description"]
        for name, field in definition["properties"].items():
            reference = schema["$defs"].get(field.get("$ref", "").removeprefix("#/$defs/"), {})
            assert field.get("description") or reference.get("description"), (definition["title"], name)


_VALIDATOR = jsonschema.Draft202012Validator(config.schema())


def agree(data: Any) -> bool:
    """Check that schema and code are of one opinion about this; return the schema's."""
    text = json.dumps(data, ensure_ascii=False)
    by_schema = [error.message for error in _VALIDATOR.iter_errors(data)]
    by_code = problems(text)
    if by_schema:
        assert by_code, (data, by_schema)
    else:
        beyond = [any(words in problem.message for words in _BEYOND) for problem in by_code]
        assert all(beyond), (data, by_code)
    return not by_schema


_WORD = st.text(st.characters(min_codepoint=33, max_codepoint=126), max_size=6)
_ODD: st.SearchStrategy[Any] = (
    st.sampled_from([None, True, False, 0, -1, 3, 1.5, "", "x", "/dev/x", "/dev/..", [], {}, ["x"], 2**64]) | _WORD
)
_PATH = st.from_regex(r"\A(/[-a-z?]{1,3}){1,3}\Z", fullmatch=True) | st.sampled_from(["/dev/tty[0-9]*", "/a.b/..c"])
_NAME = st.from_regex(r"[a-z]{1,3}(\.[a-z]{1,3})?/[a-zA-Z0-9]{1,4}", fullmatch=True)
_IDENTIFIER = st.from_regex(r"([a-z]{1,3}/)?[a-zA-Z_][a-zA-Z_0-9]{0,3}", fullmatch=True)
_ENTRY = st.one_of(
    st.fixed_dictionaries({"path": _PATH}),
    st.fixed_dictionaries({"group": st.lists(_PATH, min_size=2, max_size=3, unique=True)}),
    st.fixed_dictionaries(
        {
            "simulated": st.fixed_dictionaries(
                {"count": st.integers(1, 9)}, optional={"numa": st.integers(1, 3), "unhealthy_file": _PATH}
            )
        }
    ),
)
_RESOURCE = st.fixed_dictionaries(
    {"name": _NAME, "devices": st.lists(_ENTRY, min_size=1, max_size=3), "driver": st.just("a.b")},
    optional={
        "permissions": st.sampled_from(["r", "wr", "rwm"]),
        "nodes": st.lists(_PATH.filter(lambda path: "[" not in path), max_size=2),
        "env": st.dictionaries(_IDENTIFIER.filter(lambda name: "/" not in name), _WORD, max_size=2),
        "mounts": st.lists(
            st.fixed_dictionaries({"host": _PATH, "container": _PATH}, optional={"readonly": st.booleans()}), max_size=2
        ),
        "annotations": st.dictionaries(_NAME, _WORD, max_size=2),
        "cdi": st.lists(st.just("a.b/c=d"), max_size=2),
        "sharing": st.fixed_dictionaries({}, optional={"replicas": st.integers(1, 3)}),
        "topology": st.booleans(),
        "attributes": st.dictionaries(
            _IDENTIFIER,
            st.booleans() | st.integers(-9, 9) | _WORD | st.fixed_dictionaries({"version": st.just("1.2.3-rc.1")}),
            max_size=3,
        ),
        "capacity": st.dictionaries(
            _IDENTIFIER, st.integers(0, 9) | st.sampled_from(["16Gi", "1e30", "500m"]), max_size=3
        ),
        "dra": st.fixed_dictionaries(
            {}, optional={"share": st.sampled_from(["none", "50%", 3]), "drain": st.just("wait")}
        ),
    },
)


def places(data: Any) -> list[tuple[Any, Any]]:
    """Return every container in a structure with every key or index in it."""
    items = list(data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ())
    return [place for key, value in items for place in ((data, key), *places(value))]


@given(st.fixed_dictionaries({"resources": st.lists(_RESOURCE, min_size=1, max_size=2)}), st.data())
@settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much], deadline=None)
def test_schema_and_code_agree(data: Any, draw: st.DataObject) -> None:
    """An editor that checks by the schema accepts and refuses the same files as the agent does."""
    change = draw.draw(st.sampled_from(["nothing", "replace", "replace", "remove", "add"]))
    place, key = draw.draw(st.sampled_from(places(data)))
    if change == "replace":
        place[key] = draw.draw(_ODD)
    elif change == "remove":
        del place[key]
    elif change == "add" and isinstance(place, dict):
        place[draw.draw(_KEYS | _WORD)] = draw.draw(_ODD)
    text = json.dumps(data, ensure_ascii=False)
    # Characters that no YAML file may contain, and line ends, where Python's $ is not ECMAScript's.
    assume(text.isprintable() and "\\n" not in text)
    event(f"{change}: {'accepted' if agree(data) else 'refused'}")


def test_schema_and_code_agree_on_the_samples() -> None:
    """The samples in these tests are accepted by the schema and refused by it as the code does."""
    agree(yaml.safe_load(WHOLE))
    for replicas in ({"a100": 4}, {"": 4}, {"a": 0}, {}):
        agree({"resources": [{"name": "a/b", "devices": [{"path": "/dev/x"}], "sharing": {"replicas": replicas}}]})
    entries: tuple[dict[str, Any], ...] = (
        {"nvidia": {}},
        {"pci": {"vendor": "8086"}},
        {"pci": {}},
        {"usb": {"vendor": "x"}},
        {"nvidia": {"mig": "x"}},
    )
    for entry in entries:
        agree({"resources": [{"name": "a/b", "devices": [entry]}]})


# The patterns are those of deviceplugin.naming, which speaks for the API server.


def matches(annotated: Any, text: str) -> bool:
    (meta,) = annotated.__metadata__
    return (meta.max_length is None or len(text) <= meta.max_length) and re.fullmatch(meta.pattern, text) is not None


def allowed(check: Any, *args: Any) -> bool:
    try:
        check(*args)
    except naming.NamingError:
        return False
    return True


@given(st.from_regex(r"\A[-a-zA-Z0-9._/]{1,20}\Z") | _WORD)
@example("a/" + "b" * 63)
@example("a" * 244 + "/b")
@example("a" * 245 + "/b")
@example("xkubernetes.io/b")
@example("requests.a/b")
def test_resource_names_are_those_of_the_api(name: str) -> None:
    """The pattern for resource names takes what the API server takes."""
    assert matches(config.ResourceName, name) == allowed(naming.check_resource, name)


@given(st.from_regex(r"\A[-a-zA-Z0-9.]{1,20}\Z") | _WORD)
@example("a" * 63)
@example("a" * 64)
def test_driver_names_are_those_of_the_api(name: str) -> None:
    """The pattern for drivers' names takes what the API server takes."""
    assert matches(config.DriverName, name) == allowed(naming.check_driver, name)


@given(st.from_regex(r"\A([-a-z.]{1,9}/)?[-a-zA-Z0-9_]{1,20}\Z") | _WORD)
@example("a" * 32)
@example("a" * 33)
@example("a" * 64 + "/b")
def test_attribute_names_are_those_of_the_api(name: str) -> None:
    """The pattern for attributes' names takes what the API server takes."""
    assert matches(config.AttributeName, name) == allowed(naming.check_attribute_name, name)


@given(st.from_regex(r"\A[0-9.]{1,5}(-[0-9a-z.-]{1,5})?(\+[0-9a-z.-]{1,5})?\Z"))
def test_versions_are_those_of_the_api(version: str) -> None:
    """The pattern for versions takes what the API server takes."""
    assert matches(config.SemVer, version) == allowed(naming.check_attribute, "a", Version(version))


@given(st.from_regex(r"\A[+0-9.]{1,4}([a-zA-Z]{0,2}|e[+-]?[0-9]{1,2})\Z"))
def test_quantities_are_those_of_the_api(quantity: str) -> None:
    """The pattern for quantities takes what the API server takes, but for what is too much."""
    assert matches(config.Quantity, quantity) == allowed(naming.parse_quantity, quantity)


def test_parser_without_libyaml_says_the_same() -> None:
    """Where PyYAML came without libyaml, files are read by its Python parser, to the same end."""
    samples = [
        WHOLE,
        "",
        "a: \x07",
        "resources: [}",
        "[" * 1000,
        "a: &a [*a]",
        "resources: 1",
        "\ta",
        "a: 1\n---\nb: 1",
    ]
    code = f"""
import yaml
del yaml.CSafeLoader
from deviceplugin import config
assert config._Loader.__mro__[1] is yaml.SafeLoader
for sample in {samples!r}:
    try:
        print(config.parse(sample) == config.parse(sample.encode()))
    except config.ConfigError as error:
        print(error.line, error.path, len(error.problems))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    expected = [(found[0].line, found[0].path, len(found)) if (found := problems(text)) else True for text in samples]
    assert done.stdout.splitlines() == [
        " ".join(map(str, one)) if isinstance(one, tuple) else "True" for one in expected
    ]
