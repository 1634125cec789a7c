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
    """One resource as of now.

    holders: by the kubelet's device ids, as of the last scan. withheld: devices that are offered to nobody because
    something that the kubelet does not count as a holder holds them, or may; and why.
    """

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
    """The agent as of now.

    claims: what containers use through claims. scanned_at: when holders were last scanned (monotonic seconds), None
    before.
    """

    resources: tuple[ResourceStatus, ...]
    double_allocations: int
    claims: frozenset[ClaimUse] = frozenset()
    scanned_at: float | None = None
