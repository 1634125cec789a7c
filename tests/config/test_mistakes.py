"""Errors for an invalid config file: line, place, and advice."""

from __future__ import annotations

import json

import pytest

from deviceplugin.config import parse
from tests.config.files import WHOLE, problems, refused


@pytest.mark.parametrize(
    ("field", "path", "advice"),
    [
        # unknown keys
        ("permisions: rw", "permisions", "did you mean 'permissions'?"),
        ("Env: {}", "Env", "did you mean 'env'?"),
        ("zzz: 1", "zzz", "there are name, driver, devices"),
        ("mounts: [{host: /a, contaner: /b}]", "mounts[0].contaner", "did you mean 'container'?"),
        ("sharing: {}, replicas: 4", "replicas", "it belongs under `sharing`; indent it by more spaces than that"),
        ("replicas: 4", "replicas", "write `sharing: {replicas: 4}`"),
        ("count: 4", "count", "write `sharing: {replicas: 4}`"),
        ("host: /a", "host", "write `mounts: [{host: /a}]`"),
        ("vendor: '0403'", "vendor", '`devices: [{pci: {vendor: "0403"}}]` or `devices: [{usb: {vendor: "0403"}}]`'),
        ("probe: open", "probe", "write `health: {probe: open}`"),
        ("groups: []", "groups", "of another device plugin, whose settings `deviceplugin import` converts"),
        ("resources: []", "resources", "it is a key of $; indent it like the other keys of that"),
        # forms that other programs accept
        ("health: {period: 30s}", "health.period", "write 30, the number of seconds"),
        ("health: {period: 2m}", "health.period", "write 120, the number of seconds"),
        ("health: {probe: /opt/x -v}", "health.probe", "write {command: [/opt/x, -v]}"),
        ("health: open", "health", "write {probe: open}"),
        ("sharing: 4", "sharing", "write {replicas: 4}"),
        ("mounts: ['/a:/b:ro']", "mounts[0]", "write {host: /a, container: /b}"),
        ("mounts: ['/a:/b']", "mounts[0]", "write {host: /a, container: /b, readonly: false}"),
        ("mounts: [/a]", "mounts[0]", "write {host: /a, container: /a}"),
        ("mounts: [{host: /a, mountPath: /b}]", "mounts[0].mountPath", "write `container: /b`"),
        ("mounts: [{hostPath: /a, container: /b}]", "mounts[0].hostPath", "write `host: /a`"),
        ("env: {A: {name}}", "env.A", '{name} is a mapping in YAML; write "{name}" in quotes'),
        ("driver: a.b, attributes: {a: {id}}", "attributes.a", 'write "{id}" in quotes'),
        ("health: {probe: {command: [/x, {node}]}}", "health.probe.command[1]", 'write "{node}" in quotes'),
        ("include: [[ab]]", "include[0]", "put a text that begins with [ in quotes"),
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
        ("permissions: rr", "permissions", "is not a set of permissions"),
        ("permissions: ''", "permissions", "is not a set of permissions"),
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
        ("exclude: ['a[^b]']", "exclude[0]", "`[^` is not supported in 'a[^b]'; write [!"),
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
        ("metadata: true", "metadata", "the files name a driver"),
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
    """The error for a wrong field has the file, the line, the path of the field, and advice."""
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
    """A resource name that the kubelet would refuse is an error with an example."""
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
        ("group: [/dev/a*, {path: b}]", ".group[1].path", "is a relative path"),
        ("group: [/dev/a*, {optional: true}]", ".group[1]", "'path' is missing"),
        (
            "group: [{path: /dev/a, optional: true}, {path: /dev/b, optional: true}]",
            ".group",
            "needs one that is always",
        ),
        ("{group: [/dev/a, /dev/b], container: /dev/c}", ".container", "write each part as {path: ..."),
        ("{container: /dev/c}", "", "an entry needs one of path, simulated"),
        ("path: [/dev/a, /dev/b]", ".path", "make each path an entry of its own, or write `group`"),
        ("{path: /dev/a, permissions: rw}", ".permissions", "it is a key of $.resources[0]; indent it like"),
        ("{usb: {serial: x}, vendor: '0403'}", ".vendor", "it belongs under `usb`; indent it"),
        ("{path: /dev/a, replicas: 4}", ".replicas", "write `sharing: {replicas: 4}` in $.resources[0]"),
        ("{path: /dev/a, count: 4}", ".count", "write `sharing: {replicas: 4}` in $.resources[0]"),
        ("{path: /dev/a, sharing: {replicas: 4}}", ".sharing", "it is a key of $.resources[0]"),
        ("usb: {vendor: '0403', replicas: 4}", ".usb.replicas", "write `sharing: {replicas: 4}` in $.resources[0]"),
        ("{path: /dev/a, mountPath: /dev/b}", ".mountPath", "write `container: /dev/b`"),
        ("group: [{path: /dev/a, mountPath: /dev/b}, /dev/c]", ".group[0].mountPath", "write `container: /dev/b`"),
        ('usb: "1a6e:089a"', ".usb", 'write {vendor: "1a6e", product: "089a"}'),
        ("usb: [vendor: '0403', 18d1:9302]", ".usb[1]", 'write {vendor: "18d1", product: "9302"}'),
        ("usb: {vendor: 1a6e:089a}", ".usb.vendor", 'write "1a6e" as `vendor`, "089a" as `product`'),
        ("usb: {vendor: usb}", ".usb.vendor", "is not an id of four hexadecimal digits"),
        ('pci: "8086:1572"', ".pci", 'write {vendor: "8086", device: "1572"}'),
        ("pci: 0000:3b:00.0", ".pci", 'write {address: "0000:3b:00.0"}'),
        ("usb: [{vendor: '0403'}, {}]", ".usb[1]", "would be every USB device"),
        ("usb: [{vendor: '0403'}]", ".usb", "the list has only 1; it needs at least 2"),
        ("nvidia: {profile: 1g.10gb.me}", ".nvidia.profile", "as nvidia-smi does, here 1g.10gb+me"),
        ("nvidia: {profile: nvidia.com/mig-1c.2g.48gb.me.all}", ".nvidia.profile", "here 1c.2g.48gb+me.all"),
        ("nvidia: {profile: MIG 1G.24GB-ME}", ".nvidia.profile", "here 1g.24gb-me"),
        ("nvidia: {profile: 1g.24gb+.gfx}", ".nvidia.profile", "such as 1g.10gb or 1g.10gb+me"),
        ("nvidia: {profile: 0g.10gb}", ".nvidia.profile", "such as 1g.10gb or 1g.10gb+me"),
        ("nvidia: {profile: 1g.05gb}", ".nvidia.profile", "such as 1g.10gb or 1g.10gb+me"),
    ],
)
def test_wrong_entry_is_named_with_advice(entry: str, path: str, advice: str) -> None:
    """The error for a wrong entry of `devices` has the entry's index and advice."""
    error = refused(f"resources:\n  - name: a/b\n    devices:\n      - path: /dev/z\n      - {entry}\n")
    assert (error.line, error.path) == (5, f"$.resources[0].devices[1]{path}")
    assert advice in error.message


@pytest.mark.parametrize(
    ("text", "line", "advice"),
    [
        ("", 1, "is empty; it needs `resources:`"),
        ("# nothing\n", 1, "is empty"),
        ("apiVersion: v1\nkind: ConfigMap\ndata: {}\n", 1, "is a Kubernetes object (ConfigMap), not a config file"),
        ("apiVersion: v1\nkind: Pod\n", 1, "is a Kubernetes object (Pod), not a config file"),
        ("image: {}\nconfig:\n  resources: []\n", 1, "looks like values of the Helm chart"),
        ("resources:\n- devices: [{path: /dev/tty[AB]*}]\n", 2, 'put a glob with brackets in quotes: "/dev/tty[AB]*"'),
        ("resources:\n- devices: [group: [/dev/a[0-9], /b]]\n", 2, 'in quotes: "/dev/a[0-9]"'),
        ("resources:\n- env:\n    A: {path}/x\n", 3, 'put a text with {path} in quotes: "{path}/x"'),
        ("resources:\n- devices: [{path: /a, container: /b/{name}}]", 2, 'in quotes: "/b/{name}"'),
        (
            "domain: a.b\ndevices: [{name: a, groups: [paths: [path: /dev/a]]}]",
            1,
            "`deviceplugin import my.yaml` makes",
        ),
        ("- devicematch: ^rtc0$\n", 1, "`deviceplugin import my.yaml` makes"),
        ("kind: DaemonSet\nspec: {args: [--device, 'x,/y']}", 1, "`deviceplugin import my.yaml` makes"),
        ('--device \'{"name": "x"}\'', 1, "`deviceplugin import` makes"),
        ("--device=x,/dev/x", 1, "`deviceplugin import` takes generic-device-plugin's flags"),
        ("resources:\n- include: [*a]\n", 2, "put a pattern that begins with * in quotes"),
        ("resources:\n- name: a/b\n    devices: []\n", 3, "begin in the same column"),
        ("---\n", 1, "is empty"),
        ("~", 1, "is empty"),
        ("[]", 1, "expected a mapping with resources, got a list"),
        ("hello", 1, "is a text without keys; this is not a config file"),
        ("{}", 1, "'resources' is missing"),
        ("resources: []", 1, "the list is empty; it needs at least 1"),
        ("resources:\n", 1, "has no value; expected a list"),
        ("resources: {}", 1, "expected a list, got a mapping"),
        ("\nresources: [}", 2, "is not valid YAML"),
        ("resources:\n\t- a", 2, "the line contains a tab"),
        ("resources: *x", 1, "an anchor (&name) comes before its alias"),
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
    """A file that is no YAML, no mapping or empty gets one error with its line."""
    error = refused(text)
    assert error.line == line
    assert advice in str(error)


@pytest.mark.parametrize(
    ("glob", "advice"),
    [
        ("/dev/[abc", "'/dev/[abc' has a `[` without its `]`; write [[] for the character itself"),
        ("/dev/[]", "has a `[` without its `]`"),
        ("/dev/[!]", "has a `[` without its `]`"),
        ("/dev/[a/b]", "has a `[` without its `]`"),
        ("/dev/tty[^U]*", "`[^` is not supported in '/dev/tty[^U]*'; write [!"),
        ("/dev/" + "a" * 4096, "has 4101 characters; at most 4095 are allowed"),
    ],
)
def test_glob_that_can_match_nothing_is_refused(glob: str, advice: str) -> None:
    """An unclosed bracket, and a pattern longer than a path, are errors with the line."""
    error = refused(f"resources:\n- name: a/b\n  devices:\n  - path: '{glob}'\n")
    assert (error.line, error.path) == (4, "$.resources[0].devices[0].path")
    assert advice in error.message


@pytest.mark.parametrize(
    ("groups", "refused_at"),
    [
        ([["/dev/dm-0", "/dev/control"], ["/dev/dm-1", "/dev/control"]], 1),
        ([["/dev/dm-*", "/dev/control"], ["/dev/control", "/dev/a*"]], 0),
        ([["/dev/dm-0", "/dev/control"], ["/dev/dm-0", "/dev/control"]], None),  # both resources have the same device
        ([["/dev/dm-0", "/dev/control"], ["/dev/dm-0", "/dev/control", "/dev/x"]], None),  # second has one more node
        ([["/dev/dm-0", "/dev/contro[l]"], ["/dev/dm-1", "/dev/contro[l]"]], None),
        ([["/dev/video*", "/dev/audio*"], ["/dev/video*", "/dev/meta*"]], None),
    ],
)
def test_a_node_of_two_different_groups_is_refused(groups: list[list[str]], refused_at: int | None) -> None:
    """A device node in two `group` lists is an error, unless one list has all nodes of the other. Globs may overlap."""
    lines = [f"- name: a/{n}\n  devices:\n  - group: {json.dumps(one)}\n" for n, one in enumerate(groups)]
    found = problems("resources:\n" + "".join(lines))
    expected = [] if refused_at is None else [(7, f"$.resources[1].devices[0].group[{refused_at}]")]
    assert [(one.line, one.path) for one in found] == expected
    assert all("/dev/control is in another group, too, on line 4;" in one.message for one in found)


def test_a_shared_node_is_no_device_of_its_resource() -> None:
    """A path cannot be under `nodes`, which go to every container, and also be a device."""
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
        ("driver: a.b, dra: {share: none}", "driver: a.b, dra: {share: all}", True),  # both resources have one driver
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
    """Two drivers with the same devices must both have all of them for limits, or both have all of them for claims."""
    resources = (f"- {{name: a/a, devices: [{first}], {one}}}", f"- {{name: a/b, devices: [{second}], {other}}}")
    found = problems("\n".join(("resources:", *resources)))
    assert [(problem.line, problem.path) for problem in found] == ([] if good else [(3, "$.resources[1]")])
    assert all("a/a" in problem.message for problem in found)


@pytest.mark.parametrize(
    ("name", "nvidia", "good"),
    [
        ("nvidia.com/b", "{mig: mixed}", False),
        ("example.com/b", "{mig: mixed}", True),
        ("nvidia.com/b", "{mig: single}", True),
        ("nvidia.com/b", "{mig: mixed, profile: 1g.10gb}", True),  # `mig` has no effect beside `profile`
    ],
)
def test_one_resource_of_a_domain_has_mixed(name: str, nvidia: str, *, good: bool) -> None:
    """Two resources of one domain cannot have `mig: mixed`, as both would bring the same resources of profiles."""
    first = "- {name: nvidia.com/a, devices: [{nvidia: {mig: mixed}}], include: [GPU-0*]}"
    second = f"- {{name: {name}, include: [GPU-1*],\n   devices: [{{nvidia: {nvidia}}}]}}"
    found = problems(f"resources:\n{first}\n{second}")
    assert [(one.line, one.path) for one in found] == ([] if good else [(4, "$.resources[1].devices[0].nvidia.mig")])
    assert all("nvidia.com/a" in one.message and "nvidia.com/mig-" in one.message for one in found)


@pytest.mark.parametrize("glob", ["/dev/[abc]x", "/dev/[]]", "/dev/[!]a]", "/dev/[!a-c]/[[]", "/dev/a]b"])
def test_closed_brackets_are_taken(glob: str) -> None:
    """Closed sets of characters, as in fnmatch, and a lone closing bracket are valid."""
    text = f"resources: [{{name: a/b, devices: [{{path: '{glob}'}}], include: ['{glob}']}}]"
    assert parse(text).resources[0].devices[0].path == glob


def test_many_problems_are_said_at_once() -> None:
    """All problems of a file are reported together, in the order of their lines."""
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


def test_missing_key_is_not_said_twice() -> None:
    """A misspelt required key is reported once, as unknown and not also as missing."""
    error = refused("resources: [{nmae: a/b, devices: [path: /dev/x]}]")
    assert [problem.path for problem in error.problems] == ["$.resources[0].nmae"]
