"""What is known of the resources that the kubelet is served, at one moment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from deviceplugin.inventory import Snapshot
from deviceplugin.kubelet.podresources import ClaimUse, Holder
from deviceplugin.kubelet.registration import RegistrationStatistics
from deviceplugin.kubelet.servicer import ServicerStatistics


@dataclass(frozen=True, slots=True)
class ResourceStatus:
    """One resource as of now. holders: by the kubelet's device ids. withheld: as in `Service.withheld`."""

    resource: str
    snapshot: Snapshot
    replicas: int
    registered: bool
    live: bool
    holders: Mapping[str, frozenset[Holder]]
    endpoint: ServicerStatistics
    registration: RegistrationStatistics
    source_error: str
    withheld: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Status:
    """The agent as of now. scanned_at: when holders were last scanned (monotonic seconds), None before."""

    resources: tuple[ResourceStatus, ...]
    double_allocations: int
    claims: frozenset[ClaimUse] = frozenset()
    scanned_at: float | None = None
