"""What another part of the agent's process reports of itself: the bridge to DRA, its devices' states and claims."""

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
    """The state of a device, since when (Unix seconds), and why.

    waits: what its move waits for, "" if it does not move.
    """

    state: State = State.PLUGIN
    since: float = 0.0
    reason: str = ""
    waits: str = ""

    @property
    def side(self) -> SideName:
        """The side of the device, also during a move."""
        return self.state.side

    @property
    def why(self) -> str:
        """What its move waits for, else why it is in its state, for people."""
        return f"waits for {self.waits}" if self.waits else self.reason


DEFAULT_LOCATION: Final = DeviceLocation()  # where a device is that no provider reports


@dataclass(frozen=True, slots=True)
class ClaimedDevice:
    """A device of a claim that is prepared on this node. pods: those that it was prepared for.

    admin: the claim has administrative access to the device, and does not hold it.
    """

    resource: str
    device: str
    namespace: str
    claim: str
    pods: tuple[PodContainer, ...] = ()
    admin: bool = False


@dataclass(frozen=True, slots=True)
class ShareProgress:
    """How far a resource is with the share of claims. requested: in words. Numbers of devices, by their state."""

    requested: str
    devices: int
    claimable: int
    leaving: int = 0
    returning: int = 0


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened; at: Unix seconds."""

    at: float
    resource: str
    text: str
    bad: bool = False


@dataclass(frozen=True)
class ProviderReport:
    """The report of one moment. unready: reasons, in words. problems: others, the most severe first.

    families: of prometheus-client. status: for /status, made of what JSON knows. locations: by (resource, device id).
    qualifiers: by resource, of the names under which devices are published. shares: by resource.
    node: this node's name, "" if it is not known.
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
    """Another part of the agent's process whose report is shown; put it into `Agent.providers`."""

    @property
    def name(self) -> str:
        """Its name in /status and in messages."""

    def report(self) -> ProviderReport:
        """Return what is known now; called in a thread of its own for each view."""


@runtime_checkable
class EventSource(Protocol):
    """A provider that also tells what happened."""

    def events(self) -> Sequence[Event]:
        """Return what happened since the last call, oldest first; called in the agent's loop once a second."""
