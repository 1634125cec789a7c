"""`deviceplugin import` converts settings of other plugins to a config file, and names unsupported ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from deviceplugin import cli, config
from deviceplugin.config.foreign import Imported, UnknownSettingsError, as_file
from deviceplugin.config.foreign import imported as imported_and_checked

GENERIC = """
domain: example.com
devices:
  - name: serial
    groups:
      - paths: [{path: /dev/ttyUSB*}]
      - paths: [{path: /dev/ttyACM*}]
  - name: capture
    groups:
      - paths:
          - {path: /dev/snd/pcmC0D0c, permissions: rw}
          - {path: /dev/snd/controlC0, mountPath: /dev/c, limit: 2, permissions: rw}
  - name: fuse
    groups:
      - count: 10
        paths: [{path: /dev/fuse, permissions: rw}]
  - name: ch340
    groups:
      - usb: [{vendor: "1a86", product: "7523"}]
"""
FLAGS = """
apiVersion: apps/v1
kind: DaemonSet
metadata: {name: generic-device-plugin}
spec:
  template:
    spec:
      containers:
        - name: generic-device-plugin
          args:
            - --device
            - |
              name: video
              groups:
                - paths:
                    - path: /dev/video0
            - '--device={"name": "kvm", "groups": [{"count": 2, "paths": [{"path": "/dev/kvm"}]}]}'
"""
SMARTER = """
apiVersion: v1
kind: ConfigMap
metadata: {name: smarter-device-manager}
data:
  conf.yaml: |
    - devicematch: ^rtc0$
      nummaxdevices: 20
    - devicematch: ^video[0-9]*$
      nummaxdevices: 1
    - devicematch: ^(a|b)$
"""
NVIDIA = """
version: v1
flags:
  migStrategy: mixed
  plugin: {deviceListStrategy: [cdi-cri]}
sharing:
  timeSlicing:
    renameByDefault: true
    failRequestsGreaterThanOne: true
    resources:
      - {name: nvidia.com/gpu, replicas: 4}
      - {name: nvidia.com/mig-1g.5gb, replicas: 2, devices: ["0"]}
"""


def imported(text: str) -> Imported:
    return imported_and_checked(text, config.parse)


def resources(text: str) -> dict[str, dict[str, Any]]:
    """Return the imported resources by name, after a check that they are a valid config file."""
    made = imported(text)
    assert [one.name for one in config.parse(as_file(made)).resources] == [one["name"] for one in made.resources]
    return {one["name"]: one for one in made.resources}


def test_generic_device_plugin() -> None:
    """Paths, container paths, groups, counts, permissions and USB ids are imported; a limit is noted."""
    made = resources(GENERIC)
    assert made["example.com/serial"]["devices"] == [{"path": "/dev/ttyUSB*"}, {"path": "/dev/ttyACM*"}]
    assert made["example.com/serial"]["permissions"] == "rwm"
    assert made["example.com/capture"]["devices"] == [
        {"group": ["/dev/snd/pcmC0D0c", {"path": "/dev/snd/controlC0", "container": "/dev/c"}]}
    ]
    assert made["example.com/fuse"] == {
        "name": "example.com/fuse",
        "devices": [{"path": "/dev/fuse"}],
        "sharing": {"replicas": 10},
    }
    assert made["example.com/ch340"]["devices"] == [{"usb": {"vendor": "1a86", "product": "7523"}}]
    notes = imported(GENERIC).notes
    assert any(note == "example.com/capture: limit of /dev/snd/controlC0" for note in notes)
    assert any(note.startswith("generic-device-plugin: its device ids. Its pods run on") for note in notes)


def test_flags_of_a_daemonset() -> None:
    """Each --device of a container is a resource of the default domain."""
    made = resources(FLAGS)
    assert made["squat.ai/video"]["devices"] == [{"path": "/dev/video0"}]
    assert made["squat.ai/kvm"]["sharing"] == {"replicas": 2}


@pytest.mark.parametrize(
    ("name", "link"),
    [
        ("ttyUSB0", "/dev/serial/by-id/..."),
        ("ttyACM12", "/dev/serial/by-id/..."),
        ("video0", "/dev/v4l/by-id/..."),
        ("ttyUSB*", ""),
        ("video[0-9]*", ""),
        ("rtc0", ""),
        ("ttyS0", ""),
    ],
)
def test_numbers_that_can_change(name: str, link: str) -> None:
    """A path with a number that can change, such as ttyUSB0, is noted with its stable link; a glob is not."""
    for text in (
        f'devices: [{{name: x, groups: [{{paths: [{{path: "/dev/{name}"}}]}}]}}]',
        f'- devicematch: "^{name.replace("]*", "]+").replace("B*", "B.*")}$"',
    ):
        notes = [note for note in imported(text).notes if "its number can change" in note]
        assert len(notes) == bool(link), text
        assert all(f"/dev/{name} as" in note and note.endswith(f"name its link {link}") for note in notes)


SPEC = '{"name": "video", "groups": [{"count": 2, "paths": [{"path": "/dev/video0"}]}]}'


@pytest.mark.parametrize(
    "text",
    [
        f"--device '{SPEC}'",
        f"--device='{SPEC}' --domain=squat.ai\n",
        f"--device={SPEC}",
        f"  --domain squat.ai \\\n  --device {SPEC}",
        f"docker run --rm x generic-device-plugin --device '{SPEC}' --log-level debug",
        SPEC,
        f"'{SPEC}'",
        "Args:\n  --device\n  name: video\n  groups:\n    - count: 2\n      paths:\n        - path: /dev/video0\n",
        f"[--device, '{SPEC}']",
        f"- --device\n- |\n  {SPEC}\n",
        f"args:\n- --domain\n- squat.ai\n- '--device={SPEC}'\n",
        f"command: [generic-device-plugin, --domain, squat.ai]\nargs: [--device, '{SPEC}']",
        f"controllers: {{main: {{containers: {{main: {{args: [--device, '{SPEC}']}}}}}}}}",
        f"config:\n  data: |\n    devices:\n      - {SPEC}\n",
        f"kind: DaemonSet\nmetadata: {{annotations: {{last: '--device {{}}'}}}}\nspec: {{args: [--device, '{SPEC}']}}",
        f"a: &a {SPEC}\n---\nb: [&b [*b], {SPEC}]",
        f"base: &base {SPEC}\ndevices: [{{<<: *base}}]",
    ],
)
def test_flags_at_any_place(text: str) -> None:
    """A flag, a command line, a list of arguments and values of a chart give the same entry."""
    made = resources(text)
    assert made == {
        "squat.ai/video": {
            "name": "squat.ai/video",
            "devices": [{"path": "/dev/video0"}],
            "permissions": "rwm",
            "sharing": {"replicas": 2},
        }
    }
    assert any("devic.es" in note for note in imported(text).notes)


def test_first_form_of_a_flag() -> None:
    """The form NAME,GLOB,GLOB of the first versions has one device for each match."""
    made = resources("--device serial,/dev/ttyUSB*,/dev/ttyACM*  --device video,/dev/video0")
    assert made["squat.ai/serial"]["devices"] == [{"path": "/dev/ttyUSB*"}, {"path": "/dev/ttyACM*"}]
    assert made["squat.ai/video"]["devices"] == [{"path": "/dev/video0"}]


def test_flags_without_a_counterpart_are_named() -> None:
    """Each flag except devices and domain is noted, and so is a device that is not YAML."""
    notes = imported(f"--listen :8080 --device '{{a: [' --config /etc/x.yaml --device '{SPEC}'").notes
    assert "generic-device-plugin: --listen :8080" in notes
    assert "generic-device-plugin: --device {a: [: it is not YAML" in notes
    assert "generic-device-plugin: --config /etc/x.yaml: import that file, or its ConfigMap" in notes


CORAL = [{"vendor": "1a6e", "product": "089a"}, {"vendor": "18d1", "product": "9302"}]


@pytest.mark.parametrize(
    "groups",
    [
        '[{"usb": [{"vendor": "1a6e", "product": "089a"}, {"vendor": "18D1", "product": "9302"}]}]',
        '[{"usb": [{"vendor": "1a6e", "product": "089A"}]}, {"usb": [{"vendor": "18d1", "product": 9302}]}]',
    ],
    ids=["one group", "two groups"],
)
def test_ids_of_one_usb_device(groups: str) -> None:
    """Both USB ids of a Coral accelerator become one entry, because the accelerator changes its id."""
    text = f'devices: [{{"name": "coral", "groups": {groups}}}]'
    assert resources(text)["squat.ai/coral"]["devices"] == [{"usb": CORAL}]


def test_several_usb_ids_of_a_group() -> None:
    """Several ids of a group become a list, with a note. Ids such as 0403 and 1e68 are not read as numbers."""
    text = "devices: [{name: x, groups: [{usb: [{vendor: 0403}, {vendor: 1e68, product: ea60, serial: A}]}]}]"
    wanted = [{"vendor": "0403"}, {"vendor": "1e68", "product": "ea60", "serial": "A"}]
    assert resources(text)["squat.ai/x"]["devices"] == [{"usb": wanted}]
    assert any("the ids of a group are those that one device has in turn" in note for note in imported(text).notes)


def test_parts_of_a_group() -> None:
    """Optional parts stay optional, a mountPath with a slash at its end is a directory, and directories are noted."""
    paths = "[{path: /dev/a*, mountPath: /dev/in/}, {path: /dev/b*, optional: true}]"
    text = f"devices: [{{name: x, groups: [{{paths: {paths}}}, {{paths: [{{path: /dev/snd, optional: true}}]}}]}}]"
    assert resources(text)["squat.ai/x"]["devices"] == [
        {"group": [{"path": "/dev/a*", "container": "/dev/in/{name}"}, {"path": "/dev/b*", "optional": True}]},
        {"path": "/dev/snd"},
    ]
    assert "squat.ai/x: /dev/snd as a directory: name its nodes, by `path` or `group`" in imported(text).notes
    text = text.replace("mountPath: /dev/in/", "optional: true")
    assert resources(text)["squat.ai/x"]["devices"][0] == {"group": ["/dev/a*", {"path": "/dev/b*", "optional": True}]}


def test_other_settings_under_the_same_name() -> None:
    """Of several settings for one name the first are imported, and a note names the others."""
    slices = "version: v1\nsharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: %d}]}}\n"
    one, other = (yaml.safe_dump(slices % number) for number in (4, 8))
    text = f"config: {{map: {{a: {one.strip()}, b: {other.strip()}, c: {one.strip()}}}}}"
    assert resources(text)["nvidia.com/gpu"]["sharing"] == {"replicas": 4}
    named = [note for note in imported(text).notes if "same name" in note]
    other = "{'devices': [{'nvidia': {}}], 'sharing': {'replicas': 8}}"
    assert named == [f"nvidia.com/gpu: other settings under the same name, {other}; the first are taken"]


@pytest.mark.parametrize(
    "text",
    [
        "timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 4}]}",
        "sharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 4}]}}",
    ],
)
def test_nvidia_sharing_alone(text: str) -> None:
    """The sharing section of NVIDIA's file can be imported alone."""
    assert resources(text)["nvidia.com/gpu"]["sharing"] == {"replicas": 4}


def test_smarter_entry_alone() -> None:
    """A single entry of smarter-device-manager's list can be imported; a directory is noted."""
    made = imported("devicematch: ^snd$\nnummaxdevices: 2\n")
    assert [one["name"] for one in made.resources] == ["smarter-devices/snd"]
    assert any("/dev/snd as a directory" in note for note in made.notes)


def test_smarter_device_manager() -> None:
    """A regular expression becomes a glob; an expression without an equivalent glob is noted."""
    made = resources(SMARTER)
    assert made["smarter-devices/rtc0"]["devices"] == [{"path": "/dev/rtc0"}]
    assert made["smarter-devices/rtc0"]["sharing"] == {"replicas": 20}
    assert made["smarter-devices/video"]["devices"] == [{"path": "/dev/video[0-9]*"}]
    assert any("'^(a|b)$'" in note for note in imported(SMARTER).notes)


@pytest.mark.parametrize(
    ("match", "name", "path"),
    [
        ("^tty[0-9]+$", "tty", "/dev/tty[0-9]*"),
        (r"^i2c-\\d+$", "i2c", "/dev/i2c-[0-9]*"),
        ("^tty[^U]$", "tty", "/dev/tty[!U]"),
        ("^vcsm.*$", "vcsm", "/dev/vcsm*"),
        ("^hid.+raw.$", "hid", "/dev/hid?*raw?"),
        ("ttyACM", "ttyACM", "/dev/*ttyACM*"),
        ("^gpiochip", "gpiochip", "/dev/gpiochip*"),
        (r"mem\\.x$", "mem_x", "/dev/*mem.x"),
        ("^snd/controlC0$", "snd_controlC0", "/dev/snd/controlC0"),
    ],
)
def test_expressions_that_globs_can_match(match: str, name: str, path: str) -> None:
    """A glob matches no less than the expression; a note names the glob if it matches more, or in fewer directories."""
    text = f'- devicematch: "{match}"'
    assert {one["name"]: one["devices"] for one in resources(text).values()} == {
        f"smarter-devices/{name}": [{"path": path}]
    }
    different = any(path in note for note in imported(text).notes)
    assert different == ("]*" in path or not match.startswith("^") or not match.endswith("$"))


@pytest.mark.parametrize(
    "match",
    [
        "^tty[^U]*$",
        r"^gpio\\w$",
        r"^a\\D",
        r"^a\\b",
        "^(a|b)$",
        "^a?$",
        "^a{2}$",
        "^ab*$",
        "^[[:alpha:]]$",
        "^.*$",
        "",
        "^a^b$",
    ],
)
def test_expressions_that_no_glob_can_match(match: str) -> None:
    """An expression without an equivalent glob is noted, and the other entries are imported."""
    text = f'[{{devicematch: "{match}"}}, {{devicematch: ^rtc0$}}]'
    assert list(resources(text)) == ["smarter-devices/rtc0"]
    assert any("devicematch" in note and "write its paths as globs" in note for note in imported(text).notes)


@pytest.mark.parametrize(
    ("glob", "here"),
    [
        ("/dev/tty[^U]*", "/dev/tty[!U]*"),
        (r"/dev/a\*", "/dev/a[*]"),
        (r"/dev/a\b", "/dev/ab"),
        ("/dev/[a-c]?", "/dev/[a-c]?"),
    ],
)
def test_globs_of_go(glob: str, here: str) -> None:
    """A glob of generic-device-plugin, which is Go's, becomes a glob that matches the same paths here."""
    assert resources(f"{{name: a, groups: [{{paths: [{{path: '{glob}'}}]}}]}}")["squat.ai/a"]["devices"] == [
        {"path": here}
    ]


GOOD = "{name: good, groups: [{paths: [{path: /dev/null}]}]}"


@pytest.mark.parametrize(
    ("text", "note"),
    [
        ("{name: a, groups: [{paths: [{path: /dev/x}, {}]}]}", "squat.ai/a: left out: paths: {}; write a list"),
        ("{name: a, groups: [{paths: {path: /dev/x}}]}", "squat.ai/a: left out: paths: {'path': '/dev/x'}; w"),
        ("{name: a, groups: [3, {paths: []}]}", "squat.ai/a: left out: groups: 3; write a mapping"),
        ("{name: a, groups: [{count: -2, paths: [{path: /x}]}]}", "squat.ai/a: left out: count: -2; write a"),
        ("{name: a, groups: [{paths: [{path: '/dev/[!a]'}]}]}", "squat.ai/a: left out: path: /dev/[!a]: write"),
        ("{name: a, groups: [{usb: [{vendor: 0x1x}]}]}", "squat.ai/a: left out: devices[0].usb.vendor: '0x1x' is"),
        ("{name: 'A B', groups: [{paths: [{path: /x}]}]}", "squat.ai/A B: left out: name: the part after the slash"),
        ("{devicematch: ^a$, nummaxdevices: x}", "smarter-device-manager: devicematch '^a$': left out: nummaxdevices"),
        ("{version: v1, sharing: 3}", "the settings {'version': 'v1', 'sharing': 3}: left out: sharing: 3; w"),
        (
            "{timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 2.5}]}}",
            "nvidia.com/gpu: left out: replicas: 2.5; write a whole number",
        ),
        (
            "{timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 99999}]}}",
            "nvidia.com/gpu: left out: sharing.replicas: must be 1 to 10000, not 99999",
        ),
    ],
)
def test_a_wrong_entry_is_left_out(text: str, note: str) -> None:
    """A note names the resource, the key, the value and the correction; the other resources are imported."""
    assert list(resources(f"a: {GOOD}\nb: {text}")) == ["squat.ai/good"]
    assert any(one.startswith(note) for one in imported(f"a: {GOOD}\nb: {text}").notes)


def test_groups_that_share_a_node_are_not_imported_together() -> None:
    """A resource that a config file may not have beside the others is left out, with its name and the reason."""
    text = (
        "["
        + ", ".join(f"{{name: {n}, groups: [{{paths: [{{path: /dev/{n}}}, {{path: /dev/c}}]}}]}}" for n in "ab")
        + "]"
    )
    assert list(resources(text)) == ["squat.ai/a"]
    assert any(note.startswith("squat.ai/b: left out: devices[0].group[1]: ") for note in imported(text).notes)


def test_nvidia() -> None:
    """Time slices become replicas under the names that pods use; unsupported settings are noted."""
    made = resources(NVIDIA)
    gpu = made["nvidia.com/gpu.shared"]
    assert gpu["devices"] == [{"nvidia": {"mig": "mixed", "injection": "cdi"}}]
    assert gpu["sharing"] == {"replicas": 4}
    assert made["nvidia.com/mig-1g.5gb.shared"]["devices"] == [{"nvidia": {"injection": "cdi", "profile": "1g.5gb"}}]
    notes = "\n".join(imported(NVIDIA).notes)
    assert "failRequestsGreaterThanOne" in notes
    assert "devices ['0']" in notes


@pytest.mark.parametrize(
    ("entry", "name", "nvidia", "note"),
    [
        ("{name: gpu, replicas: 4}", "nvidia.com/gpu", {}, ""),
        (
            "{name: nvidia.com/gpu, rename: gpu-shared, replicas: 4}",
            "nvidia.com/gpu",
            {},
            "nvidia.com/gpu: rename gpu-shared: NVIDIA's plugin ignores it too",
        ),
        ("{name: mig-1g.10gb, replicas: 4}", "nvidia.com/mig-1g.10gb", {"profile": "1g.10gb"}, ""),
        ("{name: mig-1g.10gb.me, replicas: 4}", "nvidia.com/mig-1g.10gb.me", {"profile": "1g.10gb+me"}, ""),
        ("{name: mig-1g.24gb.me.all, replicas: 4}", "nvidia.com/mig-1g.24gb.me.all", {"profile": "1g.24gb+me.all"}, ""),
        ("{name: mig-1g.24gb-me, replicas: 4}", "nvidia.com/mig-1g.24gb-me", {"profile": "1g.24gb-me"}, ""),
    ],
)
def test_names_in_the_config_of_nvidia(entry: str, name: str, nvidia: dict[str, str], note: str) -> None:
    """The domain nvidia.com is added to a name, `rename` is noted, and a resource name of MIG gives the profile."""
    text = f"sharing: {{timeSlicing: {{resources: [{entry}]}}}}"
    assert resources(text)[name] == {"name": name, "devices": [{"nvidia": nvidia}], "sharing": {"replicas": 4}}
    assert [one for one in resources(text) if one != name] == ["nvidia.com/gpu"] * (name != "nvidia.com/gpu")
    assert imported(text).notes == [note] * bool(note)


@pytest.mark.parametrize("name", ["a100", "mig-a100", "mig-1c.2g.10gb", "mig-1g.10gb+me", "mig-1g.10gb."])
def test_unknown_resource_in_the_config_of_nvidia(name: str) -> None:
    """Replicas of a resource that NVIDIA's plugin does not have are noted, and no GPU is listed for them."""
    text = f"sharing: {{timeSlicing: {{resources: [{{name: nvidia.com/{name}, replicas: 4}}]}}}}"
    assert resources(text) == {"nvidia.com/gpu": {"name": "nvidia.com/gpu", "devices": [{"nvidia": {}}]}}
    assert imported(text).notes == [f"nvidia.com/{name}: NVIDIA's plugin has no such resource"]


@pytest.mark.parametrize(("strategy", "mig"), [("none", {}), ("single", {"mig": "single"}), ("mixed", None)])
def test_partitions_are_shared_only_with_mixed(strategy: str, mig: dict[str, str] | None) -> None:
    """Replicas of a mig-* resource are noted and not imported, unless NVIDIA's plugin has it by migStrategy mixed."""
    text = f"{{version: v1, flags: {{migStrategy: {strategy}}}, sharing: {{timeSlicing: {{renameByDefault: true, "
    text += "resources: [{name: nvidia.com/mig-1g.5gb, replicas: 2}]}}}"
    if mig is None:
        assert "nvidia.com/mig-1g.5gb.shared" in resources(text)
        assert imported(text).notes == []
    else:
        assert resources(text) == {"nvidia.com/gpu": {"name": "nvidia.com/gpu", "devices": [{"nvidia": mig}]}}
        why = f"NVIDIA's plugin has no such resource with migStrategy {strategy}"
        assert imported(text).notes == [f"nvidia.com/mig-1g.5gb.shared: {why}"]


def test_one_resource_has_the_partitions_of_several_configs() -> None:
    """Of two configs in a ConfigMap, with and without renameByDefault, only one resource gets `mig: mixed`."""
    configs = [
        f"{{version: v1, flags: {{migStrategy: mixed}}, sharing: {{timeSlicing: {{renameByDefault: {rename}, "
        "resources: [{name: nvidia.com/gpu, replicas: 2}]}}}"
        for rename in ("false", "true")
    ]
    made = imported(yaml.dump({"kind": "ConfigMap", "data": {"a": configs[0], "b": configs[1]}}))
    assert [one["name"] for one in made.resources] == ["nvidia.com/gpu"]
    why = "nvidia.com/gpu of another config has its partitions; write a config file for each"
    assert made.notes == [f"nvidia.com/gpu.shared: {why}"]
    assert config.parse(as_file(made)).resources


def test_flags_of_nvidia_without_a_counterpart_are_named() -> None:
    """Flags in NVIDIA's config file that cannot be imported are noted; default values are not."""
    flags = """
    version: v1
    flags:
      migStrategy: single
      gdsEnabled: false
      gfd: {sleepInterval: 30s}
      plugin: {passDeviceSpecs: true, deviceListStrategy: [volume-mounts], deviceIDStrategy: index}
    """
    assert set(imported(flags).notes) == {
        "NVIDIA: gfd",
        "NVIDIA: passDeviceSpecs True",
        "NVIDIA: deviceListStrategy volume-mounts",
        "NVIDIA: deviceIDStrategy index",
    }
    assert imported("{version: v1, flags: {plugin: {deviceIDStrategy: uuid, passDeviceSpecs: false}}}").notes == []


@pytest.mark.parametrize(
    "text",
    [
        "args: [--mig-strategy=mixed, --pass-device-specs, --device-list-strategy=envvar, --fail-on-init-error=false]",
        "command: [nvidia-device-plugin, --mig-strategy mixed, --pass-device-specs]",
        "env: [{name: MIG_STRATEGY, value: mixed}, {name: PASS_DEVICE_SPECS}, {name: GDS_ENABLED, value: 'false'}]",
        "args: ['nvidia-device-plugin --mig-strategy=mixed --pass-device-specs']",
    ],
)
def test_arguments_of_nvidia_are_named(text: str) -> None:
    """Arguments and variables of NVIDIA's plugin, which override its config, are noted, with a config or alone."""
    why = "which its plugin prefers to the config; set it in the entry's `nvidia`"
    wanted = [f"NVIDIA: --mig-strategy mixed, {why}", f"NVIDIA: --pass-device-specs, {why}"]
    made = imported(f"a: {{version: v1}}\nb: {{{text}}}")
    assert [one["name"] for one in made.resources] == ["nvidia.com/gpu"]
    assert made.notes == wanted
    with pytest.raises(UnknownSettingsError) as refused:
        imported(f"{{{text}}}")
    assert all(note in str(refused.value) for note in wanted)


def test_a_config_of_nvidia_without_a_version() -> None:
    """A config without `version` is of v1, as for NVIDIA's plugin."""
    made = resources("flags: {migStrategy: single, plugin: {deviceListStrategy: cdi-cri}}")
    assert made["nvidia.com/gpu"]["devices"] == [{"nvidia": {"mig": "single", "injection": "cdi"}}]


@pytest.mark.parametrize("last", ["foo: bar: baz", "- --device={name: kvm, groups: []}"])
def test_a_mistake_in_yaml_has_a_line(last: str) -> None:
    """A manifest with flags that is not YAML is refused with the line of the mistake."""
    with pytest.raises(UnknownSettingsError, match=r"is not YAML: mapping values are not allowed(.|\n)*line 4"):
        imported(f"args:\n- --device\n- x\n{last}\n")


def test_values_of_the_chart_of_nvidia_are_named() -> None:
    """Flags in the values of NVIDIA's chart beside its config are noted, as only the config is imported."""
    config_of_chart = "config: {map: {default: 'version: v1'}}\n"
    values = (
        "deviceListStrategy: volume-mounts\ndeviceIDStrategy: null\ncompatWithCPUManager: true\ngfd: {enabled: true}\n"
    )
    made = imported(config_of_chart + values)
    assert [one["name"] for one in made.resources] == ["nvidia.com/gpu"]
    assert [note.split(" as a value")[0].split(";")[0] for note in made.notes] == [
        "NVIDIA: compatWithCPUManager True",
        "NVIDIA: deviceListStrategy volume-mounts",
        "NVIDIA: gfd",
    ]
    assert imported(config_of_chart + "deviceListStrategy: null\ngfd: {enabled: false}\n").notes == []


@pytest.mark.parametrize(
    "text",
    ["", "a: 1", "- 1", "kind: ConfigMap\ndata: {x: 'y: 1'}", "[", "kind: List", "devices: [{name: a, groups: 1}]"],
)
def test_other_files_are_refused(text: str) -> None:
    """A file that is of none of the supported plugins raises UnknownSettingsError."""
    with pytest.raises(UnknownSettingsError):
        imported(text)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The file is printed on standard output, with notes on standard error, too; an unknown file gives status 2."""
    file = tmp_path / "generic.yaml"
    file.write_text(GENERIC)
    assert cli.main(["import", str(file)]) == 0
    out, err = capsys.readouterr()
    assert config.parse(out).resources
    assert "not imported: example.com/capture: limit" in err
    assert "# not imported: example.com/capture: limit" in out
    file.write_text("a: 1")
    assert cli.main(["import", str(file)]) == 2
    assert "a plugin that is known" in capsys.readouterr().err
