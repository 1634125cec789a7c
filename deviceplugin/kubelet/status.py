"""The state of the agent's resources at one moment, for metrics and readiness."""

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
    """The reason why a device is offered to no pod and to no claim. reason: the cause as text.

    kind: "excluded" (a holder has the same hardware under another id or resource), "foreign" (a pod has the device, or
    may have it, through another plugin of the same resource), "held" (processes of its former pod run), "unknown"
    (evidence is missing, or a claim of a driver outside this process has the device) or "unreleased" (the hook
    `released` has failed). for_pods: True if the device is on the side for pods' `limits`; False if it is on the side
    for claims.
    """

    kind: Literal["excluded", "foreign", "held", "unknown", "unreleased"]
    reason: str
    for_pods: bool = True


@dataclass(frozen=True, slots=True)
class VendorConnection:
    """The connection to the vendor's plugin of an adopted resource.

    since: the time at which the plugin connected or disconnected, or the wait for the plugin began (Unix seconds).
    lists: whether the plugin has sent a device list since it connected. unanswered: the time at which the oldest
    unanswered call to the plugin began (Unix seconds), None if there is no such call.
    """

    connected: bool
    since: float
    lists: bool = True
    unanswered: float | None = None


@dataclass(frozen=True, slots=True)
class ResourceStatus:
    """The present state of one resource. holders: the holders of each kubelet device id.

    withheld: for each device id that is not offered, the reason. held_twice: the devices whose holders, under all ids,
    together have more than the whole device. elsewhere: for each held id whose device is not listed any more, the
    (resource, device) pairs under which the granted hardware is listed now. vendor: the connection to the vendor's
    plugin; None if the resource is not adopted.
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

    scanned_at: the time at which a scan for holders last read the kubelet's checkpoint (monotonic seconds), None before
    the first scan. config_error: why the config file is refused, or applied only in part; "" if the whole file is
    applied. former_config: whether the file was invalid at the agent's start, so that an earlier version is in use.
    kubelet_answers: whether the kubelet answered the last PodResources call; None if there is no socket.
    kubelet_silent: the time since which the kubelet has answered no PodResources call (Unix seconds). blind: messages
    about pods whose cgroups are not visible, with the options to set. unknown: for each kind of evidence, how often
    the evidence did not show whether a holder had ended. unwatched: for each cause, the directories without file
    events. cgroup_root: the mount point of the node's cgroup file system. unserved: for each device that pods still
    have from a resource that is not served any more, the containers.
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
    unserved: Mapping[DeviceKey, frozenset[PodContainer]] = field(default_factory=dict)


def unready(status: AgentStatus) -> Iterable[str]:
    """Yield the reasons why the agent is not ready to give devices to pods by `limits`."""
    if status.former_config:
        yield status.config_error
    if not status.resources:
        yield "no resource is served"
    for resource in status.resources:
        if resource.vendor is not None and not resource.vendor.connected:
            continue  # A vendor's plugin must not delay readiness, because it can register only while the agent runs.
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
    """Yield a text for each resource that is not ready for a starting kubelet: no socket, device list or known holders.

    Resources of adopted plugins are left out, because most of these plugins run in pods, which the kubelet has to start
    first. Unknown holders of devices for claims are left out as well: the kubelet admits no pod with such a device by
    `limits`, and only the checkpoint of a running kubelet shows which of these devices pods hold.
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
