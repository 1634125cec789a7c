"""The systemd units of an agent that runs outside of pods, and the Kubernetes objects that it needs."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from deviceplugin.config import parse
from dra_bridge import cli
from dra_bridge.manifests import Deployment
from dra_bridge.units import rights, units
from tests.source import ROOT

BOTH = "{name: example.com/fpga, driver: fpga.example.com, devices: [{path: /dev/fpga*}]}"
LIMITS = "{name: example.com/fpga, devices: [{path: /dev/fpga*}]}"


def unit(resource: str = BOTH, name: str = "dra-bridge.service", **how: Any) -> dict[str, str]:
    """Return the settings of a unit; settings with several lines are joined."""
    text = units(parse(f"resources: [{resource}]"), Deployment(**how))[name]
    settings: dict[str, list[str]] = {}
    for key, value in re.findall(r"^(\w+)=(.*)$", text, re.MULTILINE):
        settings.setdefault(key, []).append(value)
    return {key: " ".join(values) for key, values in settings.items()}


def test_examples() -> None:
    """The units in examples/systemd are printed for the example with limits and claims, and for limits alone."""
    config = parse((ROOT / "examples" / "10-both-sides.yaml").read_text())
    printed = units(config, Deployment()) | units(config, Deployment(plugin_only=True))
    assert {path.name: path.read_text() for path in (ROOT / "examples" / "systemd").glob("d*")} == printed


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
@pytest.mark.parametrize("name", ["dra-bridge.service", "deviceplugin.service", "dra-bridge-token.service"])
def test_exposure(name: str) -> None:
    """`systemd-analyze security` rates the exposure of each unit below 2.5 of 10."""
    command = ["systemd-analyze", "security", "--offline=yes", str(ROOT / "examples" / "systemd" / name)]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    exposure = re.search(r"exposure level for \S+: ([\d.]+)", shown)
    assert exposure is not None
    assert float(exposure[1]) < 2.5


def test_what_the_agent_writes_to() -> None:
    """The file system is read-only except for the agent's directories, which systemd creates if possible."""
    both = unit()
    assert both["ProtectSystem"] == "strict"
    written = "kubelet/device-plugins kubelet/plugins/dra-bridge kubelet/plugins_registry"
    assert (both["StateDirectory"], both["RuntimeDirectory"]) == (written, "cdi")
    assert "ReadWritePaths" not in both
    alone = unit(LIMITS, "deviceplugin.service")
    assert alone["StateDirectory"] == "kubelet/device-plugins"
    assert alone["RuntimeDirectory"] == "cdi"
    elsewhere = unit(kubelet_root="/data/kubelet", cdi_directory="/etc/cdi")
    assert elsewhere["ReadWritePaths"] == "/data/kubelet/plugins/dra-bridge /data/kubelet/plugins_registry /etc/cdi"
    assert "--kubelet-root=/data/kubelet" in elsewhere["ExecStart"]
    adopted = unit("{name: v/x, driver: v.example.com, devices: [{plugin: {claims: true}}]}")
    assert adopted["RuntimeDirectory"] == "cdi deviceplugin/plugins"


def test_devices_of_the_host() -> None:
    """The unit may open no device, unless a health probe opens devices or the devices are NVIDIA GPUs."""
    assert unit()["DevicePolicy"] == "closed"
    probed = BOTH.replace("}]}", "}], health: {probe: open}}")
    assert "DevicePolicy" not in unit(probed)
    assert "ProtectClock" not in unit(probed), "it has a device policy of its own"
    command = BOTH.replace("}]}", "}], health: {probe: {command: [/opt/check]}}}")
    settings = unit(command)
    assert "MemoryDenyWriteExecute" not in settings
    assert "--allow-commands" in settings["ExecStart"]
    gpus = unit(BOTH.replace("{path: /dev/fpga*}", "{nvidia: {}}"))
    assert not gpus.keys() & {"DevicePolicy", "ProtectClock", "MemoryDenyWriteExecute"}


def test_a_percent_sign_is_no_specifier() -> None:
    """A percent sign and a dollar sign in a command line are escaped for systemd."""
    assert unit(BOTH.replace("/dev/fpga*", "/run/50%$x/*"))["ExecStart"].endswith("'--allow-host-path=/run/50%%$$x/*'")


def test_rights_of_agents_that_are_no_pods(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """An agent outside of pods has no DaemonSet and no ConfigMap, and may get tokens of its ServiceAccount."""
    objects = rights(parse(f"resources: [{BOTH}]"))
    assert not {"DaemonSet", "ConfigMap"} & {one["kind"] for one in objects}
    (role,) = (one for one in objects if one["kind"] == "Role" and one["metadata"]["name"] == "dra-bridge-token")
    (rule,) = role["rules"]
    assert (rule["resources"], rule["resourceNames"], rule["verbs"]) == (
        ["serviceaccounts/token"],
        ["dra-bridge"],
        ["create"],
    )
    assert "dra-bridge-own-token" in [one["metadata"]["name"] for one in objects]
    assert not rights(parse(f"resources: [{LIMITS}]"))
    (tmp_path / "config.yaml").write_text(f"resources: [{BOTH}]")
    assert cli.main(["manifests", f"--config={tmp_path / 'config.yaml'}", f"--systemd={tmp_path / 'units'}"]) == 0
    assert "kind: DaemonSet" not in capsys.readouterr().out
    assert (tmp_path / "units" / "dra-bridge.service").exists()


def test_units_that_cannot_be_written(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The error names a unit that cannot be written, and no objects are printed."""
    (tmp_path / "config.yaml").write_text(f"resources: [{BOTH}]")
    (tmp_path / "file").touch()
    assert cli.main(["manifests", f"--config={tmp_path / 'config.yaml'}", f"--systemd={tmp_path / 'file'}"]) == 2
    printed = capsys.readouterr()
    assert not printed.out
    assert f"{tmp_path / 'file' / 'dra-bridge.service'} cannot be written" in printed.err
