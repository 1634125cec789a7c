"""The state of the resources that the agent serves to the kubelet, at one moment, for metrics and readiness."""

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
    """Why a device is offered to no pod and to no claim, as text.

    kind: "excluded" (a holding under another id or resource excludes it), "foreign" (a pod has it, or may have it,
    through another plugin of the same resource), "held" (processes of its former pod run), "unknown" (evidence is
    missing, or a claim of an unserved driver holds it) or "unreleased" (`released` has failed). for_pods: whether the
    device would otherwise be offered to pods by limits; False if it would be offered to claims.
    """

    kind: Literal["excluded", "foreign", "held", "unknown", "unreleased"]
    reason: str
    for_pods: bool = True


@dataclass(frozen=True, slots=True)
class VendorConnection:
    """The connection to the vendor's plugin of an adopted resource.

    since: when the plugin connected or disconnected, or when the wait for it began (Unix seconds). lists: whether the
    plugin has listed its devices since then. unanswered: when its oldest unanswered call began (Unix seconds), None if
    there is no such call.
    """

    connected: bool
    since: float
    lists: bool = True
    unanswered: float | None = None


@dataclass(frozen=True, slots=True)
class ResourceStatus:
    """The present state of one resource. holders: by the kubelet's device ids. withheld: by device id.

    held_twice: devices whose holders, under all ids, together have more than the whole device. elsewhere: by id of an
    unlisted device, the (resource, device) that it was granted as, if the plugin's answer to Allocate shows this.
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
    """The present state of the agent.

    scanned_at: when a scan for holders last read the kubelet's checkpoint (monotonic seconds), None before.
    config_error: why the config file is refused, or applied only in part; "" if the whole file is applied.
    former_config: whether the file was invalid at the start, so that an earlier version is served. kubelet_answers:
    whether the kubelet answered the last call, None if it has no socket. kubelet_silent: since when the kubelet has
    answered no call (Unix seconds). blind: which pods of the node are not visible, and the right options. unknown: by
    source of evidence, how often the source left holders unknown. unwatched: directories without file events, by cause.
    cgroup_root: the directory of the node's cgroups.
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
    """Yield the reasons why the agent's service for pods by limits is not ready."""
    if status.former_config:
        yield status.config_error
    if not status.resources:
        yield "no resource is served"
    for resource in status.resources:
        if resource.vendor is not None and not resource.vendor.connected:
            continue  # The agent has to run before that plugin can register, and it serves the other resources.
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
    """Yield what a kubelet that starts now would miss: sockets, first lists, and devices with known holders.

    Resources of adopted plugins are left out, because most of these plugins are pods, which that kubelet has to start
    first. Devices that are offered to claims are left out as well: the kubelet admits no pod by them, and only its
    checkpoint shows which of them pods hold.
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
