"""Defines the types of the reports from other components of the agent's process, such as the bridge to DRA."""

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
    """The state of a device: the device is on the plugin side or the DRA side, or moves between the two (`State`).

    since: the time of the last change of this state (Unix seconds). reason: why the state changed. waits: the event for
    which the device's move waits; "" if the device is not moving.
    """

    state: State = State.PLUGIN
    since: float = 0.0
    reason: str = ""
    waits: str = ""

    @property
    def side(self) -> SideName:
        """The side that grants the device: "plugin" or "dra", also during a move; "none" for a quarantined device."""
        return self.state.side

    @property
    def why(self) -> str:
        """The event for which the device's move waits; without a move, the reason for the state. For messages."""
        return f"waits for {self.waits}" if self.waits else self.reason


DEFAULT_LOCATION: Final = DeviceLocation()  # A device in no provider's report is on the plugin side.


@dataclass(frozen=True, slots=True)
class ClaimedDevice:
    """A device of a claim. The claim was prepared on this node. pods: the pods of the claim.

    admin: whether the claim has only administrative access to the device, and so does not hold it.
    """

    resource: str
    device: str
    namespace: str
    claim: str
    pods: tuple[PodContainer, ...] = ()
    admin: bool = False


@dataclass(frozen=True, slots=True)
class ShareProgress:
    """The progress of a resource's devices towards the configured number for claims (`dra.share`).

    requested: the setting `dra.share` in words. devices: the number of all devices. claimable: the number of devices
    that claims can get now. leaving: the number of devices that are moving from the plugin to DRA. returning: the
    number of devices that are moving from DRA to the plugin.
    """

    requested: str
    devices: int
    claimable: int
    leaving: int = 0
    returning: int = 0


@dataclass(frozen=True, slots=True)
class Event:
    """An event for the list on the agent's page.

    at: the event's time (Unix seconds). bad: whether the event is a problem.
    """

    at: float
    resource: str
    text: str
    bad: bool = False


@dataclass(frozen=True)
class ProviderReport:
    """The report of a provider (a component of the process) at one moment.

    unready: the reasons why the provider is not ready. problems: other problems, the most severe first. families: the
    metric families of prometheus_client. status: the provider's object in /status, with JSON values. locations: for
    each (resource, device id), the state of the device between plugin and DRA. qualifiers: for each resource, the
    prefix of the published names of its devices. shares: for each resource, its `ShareProgress`. node: this node's
    name, "" if unknown.
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
    """Another component of the agent's process that reports its state. `Agent.providers` lists all providers."""

    @property
    def name(self) -> str:
        """The provider's name in /status and in messages."""

    def report(self) -> ProviderReport:
        """Return the present report. This method is called once for each view (`AgentView`), in a separate thread."""


@runtime_checkable
class EventSource(Protocol):
    """A provider that also reports events."""

    def events(self) -> Sequence[Event]:
        """Return the events since the last call, oldest first. The agent's loop calls this method once a second."""
