"""Runs an agent with device plugin and DRA as a process, for a program's own device sources or for a config file.

`deviceplugin.node.process` handles the start, the signals and the reloads.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from deviceplugin.adoption.plugins import VendorPlugins
from deviceplugin.node import process
from deviceplugin.node.options import metrics_config
from deviceplugin.source_check import check_sources
from dra_bridge.handover.share import parse_share
from dra_bridge.node.bridge import Bridge
from dra_bridge.node.share import HandoverPolicy, policies_of

if TYPE_CHECKING:
    from deviceplugin.config import Config, Lock
    from deviceplugin.source import DeviceSource
    from dra_bridge.handover.share import Drain
    from dra_bridge.node.options import BridgeOptions


class BridgeProgram(process.Program):
    """The program of the process: an agent with device plugin and DRA."""

    def __init__(self, bridge: Bridge) -> None:
        super().__init__(bridge.agent, bridge.node.name)
        self._bridge = bridge

    async def run(self) -> None:
        """Serve until the agent is stopped. Raises AgentError if a resource cannot be served on this node at all."""
        await self._bridge.run()

    async def take(self, config: Config, changed: Mapping[str, DeviceSource], unchanged: Sequence[str]) -> None:
        """Apply a new config.

        changed: for each resource with a new or changed source, this source. unchanged: the resources whose sources
        stay the same.
        """
        await self._bridge.reconfigure(changed, policies_of(config), unchanged)


def run(
    *sources: DeviceSource,
    share: str | int = "none",
    drain: Drain = "cordon",
    metrics_address: str | None = None,
    certificate: str | Path | None = None,
    key: str | Path | None = None,
    client_ca: str | Path | None = None,
    token: str | Path | None = None,
    argv: Sequence[str] | None = None,
) -> None:
    """Serve the devices of these sources to pods and claims until SIGTERM or SIGINT.

    share: the initial share of each source's devices for claims, as in a config file; the Node's annotation
    `<driver>/dra-share` overrides it. drain: when held devices leave the device plugin, as in a config file.
    metrics_address, certificate, key, client_ca, token: see `deviceplugin.run`. argv: the command line; it has the
    other options, see `--help`. Ends the process with status 1 if the agent cannot serve the node.

    Raises ShareError if the share cannot be parsed, TypeError if an argument is not a source, NamingError if a source's
    resource or driver is no valid name, ValueError if a path is not absolute or the certificate is missing.
    """
    from dra_bridge.node.options import parse_run

    check_sources(sources)
    policies = {source.resource: HandoverPolicy(parse_share(share), drain) for source in sources}
    metrics = metrics_config(certificate=certificate, key=key, client_ca=client_ca, token=token)
    options = parse_run(argv, metrics_address)

    def make() -> BridgeProgram:
        return BridgeProgram(Bridge(sources, policies, options))

    if status := process.serve(make, metrics_address=options.metrics_address, metrics=metrics):
        sys.exit(status)


def run_config(path: Path, options: BridgeOptions, lock: Lock, adopt: Path | None = None) -> int:
    """Serve a config file's resources to pods and claims until SIGTERM. Return the process's exit status.

    The agent applies changes of the file. If the file is invalid at the start, the agent uses the last version that an
    earlier agent has applied. adopt: the directory where vendors' plugins register with this agent, None for none.

    Raises ConfigError if the file is invalid at the start, or names something that `lock` forbids, and there is no
    earlier version.
    """
    kept = options.paths.kubelet_root / "plugins" / options.agent_name / "config.yaml"
    vendors = VendorPlugins(adopt) if adopt is not None else None
    file = process.ConfigFile.read(path, lock, kept, vendors)

    def make() -> BridgeProgram:
        return BridgeProgram(Bridge(file.sources(), policies_of(file.config), options, vendors))

    return process.serve(make, metrics_address=options.metrics_address, config=file)
