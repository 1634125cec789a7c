"""The reports of other components of the agent's process, such as the bridge: states of devices, claims."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Protocol, runtime_checkable

from deviceplugin.kubelet.podresources import PodContainer
from deviceplugin.register.records import SideName, State

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric


@dataclass(frozen=True, slots=True)
class DeviceLocation:
    """The state of a device between plugin and DRA, the time of its last change (Unix seconds), and the reason.

    waits: the event for which the device's move waits, "" if the device does not move.
    """

    state: State = State.PLUGIN
    since: float = 0.0
    reason: str = ""
    waits: str = ""

    @property
    def side(self) -> SideName:
        """The side of the device: "plugin" or "dra", also during a move."""
        return self.state.side

    @property
    def why(self) -> str:
        """The event for which the device's move waits, or else why the device has its state, for messages."""
        return f"waits for {self.waits}" if self.waits else self.reason


DEFAULT_LOCATION: Final = DeviceLocation()  # The state of devices that no provider reports.


@dataclass(frozen=True, slots=True)
class ClaimedDevice:
    """A device of a claim that is prepared on this node. pods: the pods for which the claim was prepared.

    admin: whether the claim has only administrative access, and so does not hold the device.
    """

    resource: str
    device: str
    namespace: str
    claim: str
    pods: tuple[PodContainer, ...] = ()
    admin: bool = False


@dataclass(frozen=True, slots=True)
class ShareProgress:
    """The progress of a resource towards the requested share of devices for claims. requested: the share in words.

    devices: number of all devices. claimable: number of devices for claims. leaving, returning: numbers of devices that
    are moving to DRA, and from DRA back to the plugin.
    """

    requested: str
    devices: int
    claimable: int
    leaving: int = 0
    returning: int = 0


@dataclass(frozen=True, slots=True)
class Event:
    """An event that the page shows. at: when it happened (Unix seconds). bad: whether the event is a problem."""

    at: float
    resource: str
    text: str
    bad: bool = False


@dataclass(frozen=True)
class ProviderReport:
    """The report of a provider (a component of the process) at one moment.

    unready: reasons why the provider is not ready. problems: other problems, the most severe first. families: metric
    families of prometheus-client. status: the provider's object in /status, of JSON values. locations: for each
    (resource, device id), the device's state. qualifiers: for each resource, the prefix of the published names of its
    devices. shares: for each resource, the progress. node: this node's name, "" if it is not known.
    """

    families: Sequence[Metric] = ()
    status: Mapping[str, object] = field(default_factory=dict)
    unready: Sequence[str] = ()
    locations: Mapping[tuple[str, str], DeviceLocation] = field(default_factory=dict)
    claims: Sequence[ClaimedDevice] = ()
    qualifiers: Mapping[str, str] = field(default_factory=dict)
    shares: Mapping[str, ShareProgress] = field(default_factory=dict)
    problems: Sequence[str] = ()
    node: str = ""


class Provider(Protocol):
    """Another component of the agent's process that reports its state. Put it into `Agent.providers`."""

    @property
    def name(self) -> str:
        """The provider's name in /status and in messages."""

    def report(self) -> ProviderReport:
        """Return the present report. A separate thread calls this method for each view."""


@runtime_checkable
class EventSource(Protocol):
    """A provider that also reports events."""

    def events(self) -> Sequence[Event]:
        """Return the events since the last call, oldest first. The agent's loop calls this method once a second."""
