"""What another part of the agent's process reports of itself: the bridge to DRA, its devices' states and claims."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric


@dataclass(frozen=True, slots=True)
class DeviceLocation:
    """Where a device is: its side (plugin or dra), its state in the ledger, since when (Unix seconds), and why."""

    side: str = "plugin"
    state: str = "plugin"
    since: float = 0.0
    reason: str = ""


DEFAULT_LOCATION: Final = DeviceLocation()  # where a device is that no provider reports


@dataclass(frozen=True, slots=True)
class PreparedClaim:
    """A device of a claim that is prepared on this node."""

    resource: str
    device: str
    namespace: str
    claim: str


@dataclass(frozen=True)
class ProviderReport:
    """The report of one moment.

    families: of prometheus-client. status: for /status, made of what JSON knows. unready: reasons, in words.
    locations: by (resource, device id). qualifiers: by resource, of the names under which devices are published.
    """

    families: Sequence[Metric] = ()
    status: Mapping[str, object] = field(default_factory=dict)
    unready: Sequence[str] = ()
    locations: Mapping[tuple[str, str], DeviceLocation] = field(default_factory=dict)
    claims: Sequence[PreparedClaim] = ()
    qualifiers: Mapping[str, str] = field(default_factory=dict)


class Provider(Protocol):
    """Another part of the agent's process whose report is shown; put it into `Agent.providers`."""

    @property
    def name(self) -> str:
        """Its name in /status and in messages."""

    def report(self) -> ProviderReport:
        """Return what is known now; called in a thread of its own for each view."""
