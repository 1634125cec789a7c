"""`deviceplugin import`: other plugins' settings become a config file, and what has no counterpart is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from deviceplugin import cli, config
from deviceplugin.config.foreign import UnknownSettingsError, as_file, imported

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


def resources(text: str) -> dict[str, dict[str, Any]]:
    """What is made of settings, by name; it is a config file that can be used."""
    made = imported(text)
    assert [one.name for one in config.parse(as_file(made)).resources] == [one["name"] for one in made.resources]
    return {one["name"]: one for one in made.resources}


def test_generic_device_plugin() -> None:
    """Paths, also those in the container, groups, counts, permissions and USB ids come along; a limit is named."""
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
    assert any("other device ids" in note for note in notes)


def test_flags_of_a_daemonset() -> None:
    """Each --device of a container is a resource of the default domain."""
    made = resources(FLAGS)
    assert made["squat.ai/video"]["devices"] == [{"path": "/dev/video0"}]
    assert made["squat.ai/kvm"]["sharing"] == {"replicas": 2}


def test_smarter_device_manager() -> None:
    """A regular expression becomes a glob; one that cannot is named."""
    made = resources(SMARTER)
    assert made["smarter-devices/rtc0"]["devices"] == [{"path": "/dev/rtc0"}]
    assert made["smarter-devices/rtc0"]["sharing"] == {"replicas": 20}
    assert made["smarter-devices/video"]["devices"] == [{"path": "/dev/video*"}]
    assert any("'^(a|b)$'" in note for note in imported(SMARTER).notes)


def test_nvidia() -> None:
    """Time slices become replicas under the names that pods use; what cannot is named."""
    made = resources(NVIDIA)
    gpu = made["nvidia.com/gpu.shared"]
    assert gpu["devices"] == [{"nvidia": {"mig": "mixed", "injection": "cdi"}}]
    assert gpu["sharing"] == {"replicas": 4}
    assert made["nvidia.com/mig-1g.5gb.shared"]["devices"] == [{"nvidia": {"injection": "cdi", "profile": "1g.5gb"}}]
    notes = "\n".join(imported(NVIDIA).notes)
    assert "failRequestsGreaterThanOne" in notes
    assert "devices ['0']" in notes


@pytest.mark.parametrize(
    "text",
    ["", "a: 1", "- 1", "kind: ConfigMap\ndata: {x: 'y: 1'}", "[", "kind: List", "devices: [{name: a, groups: 1}]"],
)
def test_other_files_are_refused(text: str) -> None:
    """A file of none of these plugins is an error that says which are known."""
    with pytest.raises(UnknownSettingsError):
        imported(text)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The file is on standard output, what has no counterpart on standard error too; an unknown file is status 2."""
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
