"""How the devices of a resource are divided between pods and claims."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from deviceplugin.config import Config, ResourceConfig
from dra_bridge.handover.handover import Drain, Share, parse_share

__all__ = ["NONE", "Terms", "terms_of"]

NONE: Final = Share(0)


@dataclass(frozen=True, slots=True)
class Terms:
    """How a resource's devices are divided. unhealthy: the effect of the taint on broken devices."""

    share: Share = NONE
    drain: Drain = "cordon"
    unhealthy: str = "NoSchedule"

    @classmethod
    def of(cls, resource: ResourceConfig) -> Terms:
        """Return the terms that a config file gives a resource."""
        return cls(parse_share(resource.dra.share), resource.dra.drain, resource.dra.unhealthy)


def terms_of(config: Config) -> dict[str, Terms]:
    """Return the terms of a config file's resources."""
    return {resource.name: Terms.of(resource) for resource in config.resources}
