"""What is known of the resources that the kubelet is served, at one moment."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

from deviceplugin.exclusion import DeviceKey
from deviceplugin.inventory import InventorySnapshot
from deviceplugin.kubelet.holders import EvidenceSource
from deviceplugin.kubelet.podresources import ClaimUse, PodContainer
from deviceplugin.kubelet.registration import RegistrationStatistics
from deviceplugin.kubelet.servicer import ServicerStatistics
from deviceplugin.unwatched import Unwatched


class Withheld(NamedTuple):
    """Why a device is offered to nobody, in words for people.

    kind: "excluded" (what is held under another id, or elsewhere, excludes it), "foreign" (a pod has it, or may have
    it, by another plugin of the same resource), "held" (processes of its former pod run) or "unknown" (evidence is
    missing, or a claim holds it of a driver that is not served). for_pods: whether pods by limits would be offered it
    else; False on the DRA side.
    """

    kind: Literal["excluded", "foreign", "held", "unknown"]
    reason: str
    for_pods: bool = True


@dataclass(frozen=True, slots=True)
class VendorConnection:
    """The vendor's plugin of an adopted resource. since: when it connected, or went, or was first waited for (Unix).

    lists: it has listed its devices since. unanswered: when the oldest call began that it has not answered (Unix), None
    if there is none.
    """

    connected: bool
    since: float
    lists: bool = True
    unanswered: float | None = None


@dataclass(frozen=True, slots=True)
class ResourceStatus:
    """One resource as of now. holders: by the kubelet's device ids. withheld: by device.

    held_twice: devices of which holders have more than there is, whatever they call them. elsewhere: the (resource,
    device) that ids of unlisted devices stand for, as far as the answers of the plugin that gave them away say.
    vendor: None if no vendor's plugin lists the devices.
    """

    resource: str
    snapshot: InventorySnapshot
    replicas: int
    registered: bool
    live: bool
    holders: Mapping[str, frozenset[PodContainer]]
    endpoint: ServicerStatistics
    registration: RegistrationStatistics
    source_error: str
    withheld: Mapping[str, Withheld] = field(default_factory=dict)
    held_twice: frozenset[str] = frozenset()
    elsewhere: Mapping[str, frozenset[DeviceKey]] = field(default_factory=dict)
    vendor: VendorConnection | None = None


@dataclass(frozen=True, slots=True)
class AgentStatus:
    """The agent as of now.

    scanned_at: when a scan for holders last read the kubelet's checkpoint (monotonic seconds), None before.
    config_error: why the config file is refused, or not all of it, when it changed or at the start; "" if it was.
    former_config: it could not be used at the start, so that what an agent before has served is served.
    kubelet_answers: whether the kubelet answered the last call, None if it cannot be called. kubelet_silent: since when
    it has answered none (Unix). blind: what cannot be seen of the node's pods, and what to set. unknown: how often
    evidence did not tell, by its source.
    unwatched: directories without file events, by cause. cgroup_root: where the node's cgroups are.
    """

    resources: tuple[ResourceStatus, ...]
    double_allocations: int
    claims: frozenset[ClaimUse] = frozenset()
    scanned_at: float | None = None
    config_error: str = ""
    former_config: bool = False
    kubelet_answers: bool | None = None
    kubelet_silent: float | None = None
    blind: tuple[str, ...] = ()
    unknown: Mapping[EvidenceSource, int] = field(default_factory=dict)
    unwatched: tuple[Unwatched, ...] = ()
    cgroup_root: Path | None = None


def unready(status: AgentStatus) -> Iterable[str]:
    """Yield the reasons why the plugin side is not ready."""
    if status.former_config:
        yield status.config_error
    if not status.resources:
        yield "no resource is served"
    for resource in status.resources:
        if resource.vendor is not None and not resource.vendor.connected:
            continue  # the agent has to be there before a plugin can come, and serves the others
        if not resource.snapshot.listed:
            error = f" ({resource.source_error})" if resource.source_error else ""
            yield f"{resource.resource}: its source has not listed its devices{error}"
        elif not resource.registered:
            why = resource.registration.contested
            because = f"another plugin has registered it ({why})" if why else resource.registration.error
            yield f"{resource.resource}: not registered with the kubelet{because and f': {because}'}"
        elif not resource.live:
            yield f"{resource.resource}: registered, but the kubelet does not follow its list of devices"


def unserved(status: AgentStatus) -> Iterator[str]:
    """Yield what a kubelet that starts now would not find: sockets, first lists, and devices whose holders are known.

    Adopted plugins are left out: most are pods, which that kubelet has to start first. So are devices on the DRA side:
    the kubelet admits no pod by them, and what pods hold of them only its checkpoint can tell.
    """
    for resource in status.resources:
        if resource.vendor is not None:
            continue
        devices = resource.withheld.values()
        unknown = [withheld.reason for withheld in devices if withheld.kind == "unknown" and withheld.for_pods]
        if not resource.snapshot.listed:
            yield f"{resource.resource}: its source has not listed its devices"
        elif not resource.registered and not resource.registration.awaits_kubelet:
            yield f"{resource.resource}: not served yet"
        elif unknown:
            yield f"{resource.resource}: of {len(unknown)} devices it is not known who holds them: {unknown[0]}"
