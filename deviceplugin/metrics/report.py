"""What other parts of an agent's process tell of themselves: the words between them and whoever looks.

The bridge tells where devices are and which claims hold them; `deviceplugin.metrics.views` puts that
together with what the agent knows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

__all__ = ["DEFAULT_LOCATION", "DeviceLocation", "Event", "PreparedClaim", "Provider", "ProviderReport"]


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened; at: Unix seconds."""

    at: float
    resource: str
    text: str
    bad: bool = False


@dataclass(frozen=True, slots=True)
class DeviceLocation:
    """Where a device is: its side (plugin or dra), the state of its handover, since when (Unix seconds)."""

    side: str = "plugin"
    state: str = "plugin"
    since: float = 0.0
    reason: str = ""


DEFAULT_LOCATION: Final = DeviceLocation()
"""Where all devices are of which nobody says otherwise."""


@dataclass(frozen=True, slots=True)
class PreparedClaim:
    """A device that a claim holds on this node."""

    resource: str
    device: str
    namespace: str
    claim: str


@dataclass(frozen=True)
class ProviderReport:
    """What a provider tells, all of it of one moment.

    families: metric families of prometheus-client. status: for /status, made of
    what JSON knows. unready: why it is not ready, in words. places: by (resource, device).
    events: what happened lately. qualifiers: in the names under which devices are published, by resource.
    """

    families: Sequence[Metric] = ()
    status: Mapping[str, object] = field(default_factory=dict)
    unready: Sequence[str] = ()
    places: Mapping[tuple[str, str], DeviceLocation] = field(default_factory=dict)
    claims: Sequence[PreparedClaim] = ()
    events: Sequence[Event] = ()
    qualifiers: Mapping[str, str] = field(default_factory=dict)


class Provider(Protocol):
    """Another part of the agent's process that wants to be seen; put it into `Agent.providers`."""

    @property
    def name(self) -> str:
        """What it is called in /status and in messages."""

    def report(self) -> ProviderReport:
        """Tell what is known now; called in a thread of its own whenever somebody looks."""
