"""An agent whose state a test sets, for tests of views."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from deviceplugin.device import Device
from deviceplugin.exclusion import DeviceKey
from deviceplugin.inventory import InventorySnapshot, merged
from deviceplugin.kubelet.podresources import ClaimUse, PodContainer
from deviceplugin.kubelet.registration import RegistrationStatistics
from deviceplugin.kubelet.servicer import ServicerStatistics
from deviceplugin.kubelet.status import AgentStatus, ResourceStatus, VendorConnection
from deviceplugin.metrics.report import Provider
from deviceplugin.metrics.views import Observer
from deviceplugin.sharing import device_of
from deviceplugin.source import DeviceSource, Measured
from deviceplugin.unwatched import Unwatched

if TYPE_CHECKING:
    from deviceplugin.node.agent import Agent

RESOURCE = "example.com/gpu"


class Source(DeviceSource):
    """A source that is never watched. load: the result of `measure`, by device and quantity."""

    resource = RESOURCE

    def __init__(self, load: Mapping[str, Any] | None = None) -> None:
        self.load = load or {}

    def measure(self, devices: Sequence[Device]) -> Measured:
        return self.load


def resource(
    *devices: Device | str,
    name: str = RESOURCE,
    held: Mapping[str, Sequence[PodContainer]] | None = None,
    replicas: int = 1,
    registered: bool = True,
    source_error: str = "",
    listed: bool = True,
    vendor: VendorConnection | None = None,
    **statistics: Any,
) -> ResourceStatus:
    """Return a resource with these devices, and with holders by the kubelet's ids."""
    snapshot = InventorySnapshot(name)
    if listed:
        made = [Device(one) if isinstance(one, str) else one for one in devices]
        times = {device.id: replicas for device in made} if replicas > 1 else {}
        snapshot = merged(snapshot, made, replicas=times)
    holders = {unit: frozenset(those) for unit, those in (held or {}).items()}
    return ResourceStatus(
        name,
        snapshot,
        replicas,
        registered,
        registered,
        holders,
        ServicerStatistics(**statistics),
        RegistrationStatistics(registered=registered),
        source_error,
        vendor=vendor,
    )


class Still:
    """The parts of an agent that an Observer reads; a test sets them."""

    def __init__(self, *resources: ResourceStatus) -> None:
        self.resources = list(resources)
        self.claims: frozenset[ClaimUse] = frozenset()
        self.scanned_at: float | None = time.monotonic()
        self.double = 0
        self.config_error = ""
        self.kubelet_answers: bool | None = True
        self.kubelet_silent: float | None = None
        self.unwatched: tuple[Unwatched, ...] = ()
        self.unserved: Mapping[DeviceKey, frozenset[PodContainer]] = {}
        self.providers: list[Provider] = []
        self.sources: dict[str, DeviceSource] = {}

    def status(self) -> AgentStatus:
        return AgentStatus(
            tuple(self.resources),
            self.double,
            self.claims,
            self.scanned_at,
            self.config_error,
            kubelet_answers=self.kubelet_answers,
            kubelet_silent=self.kubelet_silent,
            unwatched=self.unwatched,
            unserved=self.unserved,
        )

    @property
    def services(self) -> Mapping[str, Any]:
        return {
            one.resource: SimpleNamespace(
                resource=one.resource,
                source=self.sources.get(one.resource, Source()),
                inventory=SimpleNamespace(snapshot=one.snapshot),
                endpoint=SimpleNamespace(ids=SimpleNamespace(device_id_of=partial(device_of, replicas=one.replicas))),
            )
            for one in self.resources
        }

    @property
    def agent(self) -> Agent:
        return cast("Agent", self)

    def observer(self, **options: Any) -> Observer:
        return Observer(self.agent, **options)

    def measured(self, **load: Any) -> Observer:
        """Return an observer that has measured the devices; load: quantities by device."""
        self.sources[RESOURCE] = Source(load)
        observer = self.observer()
        for gauge, devices in observer.due():
            asyncio.run(gauge.take(devices))
        return observer
