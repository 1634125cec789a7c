"""How the devices of a resource are divided between pods and claims."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from deviceplugin.config import Config, ResourceConfig
from dra_bridge.handover.share import Drain, Share, parse_share

NONE: Final = Share(0)


@dataclass(frozen=True, slots=True)
class HandoverPolicy:
    """How a resource's devices are divided. unhealthy: the effect of the taint on broken devices."""

    share: Share = NONE
    drain: Drain = "cordon"
    unhealthy: str = "NoSchedule"

    @classmethod
    def of(cls, resource: ResourceConfig) -> HandoverPolicy:
        """Return the terms that a config file gives a resource."""
        return cls(parse_share(resource.dra.share), resource.dra.drain, resource.dra.unhealthy)


def policies_of(config: Config) -> dict[str, HandoverPolicy]:
    """Return the terms of a config file's resources."""
    return {resource.name: HandoverPolicy.of(resource) for resource in config.resources}
