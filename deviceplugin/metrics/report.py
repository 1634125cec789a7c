"""What another component of the agent's process reports, such as the bridge: states of devices, and claims."""

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
    """The handover state of a device, since when (Unix seconds), and why.

    waits: what the device's move waits for, "" if the device does not move.
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
        """What the device's move waits for, or else why the device is in its state, for messages."""
        return f"waits for {self.waits}" if self.waits else self.reason


DEFAULT_LOCATION: Final = DeviceLocation()  # For devices that no provider reports.


@dataclass(frozen=True, slots=True)
class ClaimedDevice:
    """A device of a claim that is prepared on this node. pods: the pods that the claim was prepared for.

    admin: whether the claim has administrative access to the device and does not hold it.
    """

    resource: str
    device: str
    namespace: str
    claim: str
    pods: tuple[PodContainer, ...] = ()
    admin: bool = False


@dataclass(frozen=True, slots=True)
class ShareProgress:
    """The progress of a resource towards its share of devices for claims. requested: the share in words.

    devices, claimable, leaving, returning: numbers of all devices, and of those for claims, moving to claims, moving
    back.
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
    """A provider's report at one moment.

    unready: reasons why the provider is not ready. problems: other problems, the most severe first. families: metric
    families of prometheus-client. status: the provider's object in /status, of JSON values. locations: by (resource,
    device id). qualifiers: by resource, the word in the published names of its devices. shares: by resource. node: this
    node's name, "" if it is not known.
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
