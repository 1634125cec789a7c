"""What is known of the resources that the kubelet is served, at one moment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from deviceplugin.inventory import Snapshot
from deviceplugin.kubelet.podresources import ClaimUse, Holder
from deviceplugin.kubelet.registration import RegistrationStatistics
from deviceplugin.kubelet.servicer import ServicerStatistics


class Withheld(NamedTuple):
    """Why a device is offered to nobody, in words for people.

    kind: "excluded" (what is held under another id, or elsewhere, excludes it), "held" (processes of its former pod
    run) or "unknown" (evidence is missing, or a claim holds it of a driver that is not served).
    """

    kind: Literal["excluded", "held", "unknown"]
    reason: str


@dataclass(frozen=True, slots=True)
class ResourceStatus:
    """One resource as of now. holders: by the kubelet's device ids. withheld: by device."""

    resource: str
    snapshot: Snapshot
    replicas: int
    registered: bool
    live: bool
    holders: Mapping[str, frozenset[Holder]]
    endpoint: ServicerStatistics
    registration: RegistrationStatistics
    source_error: str
    withheld: Mapping[str, Withheld] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Status:
    """The agent as of now. scanned_at: when holders were last scanned (monotonic seconds), None before.

    config_error: why the config file was not taken, or not all of it, when it changed; "" if it was.
    """

    resources: tuple[ResourceStatus, ...]
    double_allocations: int
    claims: frozenset[ClaimUse] = frozenset()
    scanned_at: float | None = None
    config_error: str = ""
