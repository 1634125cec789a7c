"""Makes systemd units for agents outside of pods, and the cluster's objects (accounts, rights) for these agents.

`units` and `rights` are pure functions of the configuration that fill in the templates beside this module. `written`
writes the units to files.
"""

from __future__ import annotations

import shlex
from importlib import resources
from pathlib import Path
from string import Template
from typing import Final

import yaml

from deviceplugin.config import ADOPTED, Config, needed
from dra_bridge.manifests import Deployment, Manifest, arguments, bridged, filled, manifests, privileges

DURATION: Final = "720h"
"""The requested lifetime of an agent's token. If a node is off for longer, an administrator must give it a new
token."""
CONFIG: Final = "/etc/dra-bridge/config.yaml"
_MADE: Final = (("StateDirectory", "/var/lib/"), ("RuntimeDirectory", "/var/run/"), ("RuntimeDirectory", "/run/"))
"""Pairs: a setting of systemd units that creates directories, and the directory in which systemd creates these
directories."""
ACCOUNT: Final = "/etc/dra-bridge"
"""The directory with the agent's `token` and `ca.crt`, as in a pod, and with `server`, the API server's address."""


def units(config: Config, how: Deployment | None = None) -> dict[str, str]:
    """Return, for each file name, the text of the systemd unit."""
    how = how or Deployment()
    bridge = bool(bridged(config, how))
    program, root = ("dra-bridge" if bridge else "deviceplugin"), how.kubelet_root.rstrip("/")
    command = [*arguments(how, root, bridge, CONFIG, how.cgroup_root), *needed(config).arguments()]
    if bridge:
        command.insert(2, f"--service-account={ACCOUNT}")
    values = {
        "program": program,
        "root": root,
        "arguments": " ".join(map(_quoted, command)),
        "environment": f"\nEnvironmentFile={ACCOUNT}/server" if bridge else "",
        "directories": "\n".join(_directories(config, how, root, bridge=bridge)),
        "devices": "\n".join(_devices(config, how)),
        "name": how.name,
        "namespace": how.namespace,
        "duration": DURATION,
    }
    texts = {f"{program}.service": "agent.service"}
    if bridge:
        texts |= {f"{program}-token.{kind}": f"token.{kind}" for kind in ("service", "timer")}
    return {name: _template(file).substitute(values) for name, file in texts.items()}


def written(directory: Path, config: Config, how: Deployment) -> list[Path]:
    """Write the units into a directory, and return their paths. Raises ValueError if they cannot be written."""
    if how.own_command:
        raise ValueError("--systemd makes units only for an agent with a config file, not for an author's own program")
    paths = []
    for name, text in units(config, how).items():
        try:
            directory.mkdir(parents=True, exist_ok=True)
            (directory / name).write_text(text, encoding="utf-8")
        except OSError as error:
            raise ValueError(f"{directory / name} cannot be written: {error.strerror}") from error
        paths.append(directory / name)
    return paths


def rights(config: Config, how: Deployment | None = None) -> list[Manifest]:
    """Return the objects to apply, in this order, for agents outside of pods; [] if no resource names a driver."""
    how = how or Deployment()
    if not bridged(config, how):
        return []
    objects = [one for one in manifests(config, "", how) if one["kind"] != "DaemonSet"]
    token = yaml.safe_load(resources.files(__package__).joinpath("token.yaml").read_bytes())
    return [*objects, *filled(token, {"name": how.name, "namespace": how.namespace})]


def _template(file: str) -> Template:
    return Template(resources.files(__package__).joinpath(file).read_text(encoding="utf-8"))


def _quoted(argument: str) -> str:
    """Quote an argument for ExecStart=, in which % and $ have a special meaning."""
    return shlex.quote(argument).replace("%", "%%").replace("$", "$$")


def _directories(config: Config, how: Deployment, root: str, *, bridge: bool) -> list[str]:
    """Return the unit's lines about the directories to which the agent writes.

    systemd creates the directories of StateDirectory= and RuntimeDirectory= before it starts the agent. Other
    directories must exist before the start.
    """
    written = [how.device_plugin_directory]
    if bridge:
        written += [f"{root}/plugins/dra-bridge", f"{root}/plugins_registry"]
    written.append(how.cdi_directory)
    if needed(config).plugins:
        written.append(ADOPTED)
    made: dict[str, list[str]] = {"StateDirectory": [], "RuntimeDirectory": [], "ReadWritePaths": []}
    for path in (*written, *how.writable_sys):
        setting, prefix = next((each for each in _MADE if path.startswith(each[1])), ("ReadWritePaths", ""))
        made[setting].append(path.removeprefix(prefix))
    lines = [f"{setting}={' '.join(paths)}" for setting, paths in made.items() if paths]
    lines += ["StateDirectoryMode=0750"] if made["StateDirectory"] else []
    return [*lines, *(["RuntimeDirectoryPreserve=yes"] if made["RuntimeDirectory"] else [])]


def _devices(config: Config, how: Deployment) -> list[str]:
    """Return the lines of the unit about the agent's access to devices.

    The unit has no private /dev, because the agent lists the host's devices and gives them to containers. ProtectClock=
    is set only together with DevicePolicy=, because ProtectClock= restricts the access to devices as well.
    """
    nvidia = any(entry.nvidia for resource in config.resources for entry in resource.devices)
    lines = [] if privileges(config, how) or nvidia else ["DevicePolicy=closed", "ProtectClock=yes"]
    # Commands in the config, and NVIDIA's library, may need memory that is both writable and executable.
    if not (needed(config).commands or nvidia):
        lines.append("MemoryDenyWriteExecute=yes")
    return [*lines, *([] if how.writable_sys else ["ProtectKernelTunables=yes"])]
