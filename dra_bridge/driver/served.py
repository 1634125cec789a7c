"""The devices that a driver serves, and those that a claim's requests get."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from deviceplugin import naming
from deviceplugin.adoption.source import AdoptedSource
from deviceplugin.device import Device, Health
from deviceplugin.inventory import GONE, Inventory
from deviceplugin.register.records import Claim, Outlook
from deviceplugin.source import DeviceSource
from dra_bridge.driver.claims import Awaited, ClaimAllocation, ClaimError, Result, decoded_config
from dra_bridge.driver.host import DriverHost


class ServedResource(NamedTuple):
    """One resource that a driver serves."""

    source: DeviceSource
    inventory: Inventory


@dataclass(frozen=True, slots=True)
class RequestDevices:
    """The devices of one request that come from one source. request: without the subrequest."""

    request: str
    served: ServedResource
    members: tuple[tuple[Device, Result], ...]
    config: Any
    admin: bool

    @property
    def parameters(self) -> str:
        """What the source's `prepare` sets the devices up with, as JSON; "" for nothing."""
        if self.config is None or self.admin or "prepare" not in self.served.source.hooks:
            return ""
        return msgspec.json.encode(self.config, order="sorted").decode()


@dataclass(slots=True)
class ServedDevices:
    """The devices of a driver's resources. host: see `Driver`."""

    driver: str
    resources: Sequence[ServedResource]
    host: DriverHost
    _names: tuple[object, dict[str, tuple[ServedResource, Device]]] = field(default=(None, {}), init=False)

    def replace(self, resources: Sequence[ServedResource]) -> None:
        """Serve other resources from now on."""
        self.resources = resources
        self._names = (None, {})

    @property
    def by_name(self) -> Mapping[str, tuple[ServedResource, Device]]:
        """The devices by the name that slices and claims use."""
        snapshots = [served.inventory.snapshot for served in self.resources]
        qualifiers = self.host.qualifiers([snapshot.resource for snapshot in snapshots])
        key = tuple((snapshot.resource, snapshot.version) for snapshot in snapshots), tuple(qualifiers.items())
        if self._names[0] != key:
            served = {resource.inventory.snapshot.resource: resource for resource in self.resources}
            ids = {snapshot.resource: snapshot.devices for snapshot in snapshots}
            names = naming.published_names(qualifiers, ids)
            self._names = key, {name: (served[of], ids[of][device_id]) for name, (of, device_id) in names.items()}
        return self._names[1]

    def of_claim(self, claim: Claim) -> Iterator[tuple[ServedResource, list[Device]]]:
        """Yield the devices that a claim holds by resource, also unplugged ones."""
        for served in self.resources:
            resource, listed = served.source.resource, served.inventory.devices
            ids = dict.fromkeys(d.device for d in claim.devices if d.resource == resource and not d.admin)
            if ids:
                yield served, [listed.get(name) or Device(name, health=Health.UNHEALTHY, message=GONE) for name in ids]

    def groups(self, allocation: ClaimAllocation) -> list[RequestDevices]:
        """Find the devices and decode the parameters of each request.

        Raises ClaimError: a device is missing, gone or unhealthy, the parameters are wrong, or a vendor's plugin is
        asked for administrative access.
        """
        by_request: dict[tuple[str, str, bool], list[tuple[Device, Result]]] = {}
        by_name = self.by_name
        for result in allocation.results:
            if result.device not in by_name:
                what = f"driver {self.driver} has no device {result.device!r} here"
                raise ClaimError("missing", f"request {result.request!r}: {what}")
            served, device = by_name[result.device]
            admin = bool(result.admin_access)
            if not admin:
                self._check_usable(served, device, result)
            elif isinstance(served.source, AdoptedSource):
                what = "administrative access is not possible: the vendor's plugin would allocate what others hold"
                raise ClaimError("admin", f"request {result.request!r}: {served.source.resource}: {what}")
            by_request.setdefault((result.request, served.source.resource, admin), []).append((device, result))
        by_resource = {served.source.resource: served for served in self.resources}
        return [
            RequestDevices(
                request.partition("/")[0],
                by_resource[resource],
                tuple(members),
                decoded_config(by_resource[resource].source.config_type, allocation.config, request),
                admin,
            )
            for (request, resource, admin), members in by_request.items()
        ]

    def _check_usable(self, served: ServedResource, device: Device, result: Result) -> None:
        what = f"request {result.request!r}: device {result.device!r}"
        if not device.health.usable:
            accepted = {None, "", f"{self.driver}/unhealthy"}
            tolerated = any(toleration.get("key") in accepted for toleration in result.tolerations or ())
            if device.message == GONE or not tolerated:
                raise ClaimError("unhealthy", f"{what} is unhealthy: {device.message or 'no reason was given'}")
        if self.host.bypassed(served.source.resource):
            why = "another plugin of its resource has registered with the kubelet instead of this agent"
            raise ClaimError("plugin", f"{what}: {why}; pods with limits may just be given the device")
        if not self.host.ready(served.source.resource, device.id):
            key = served.source.resource, device.id
            awaited = Awaited((key,), lambda: Outlook.FREE if self.host.ready(*key) else Outlook.UNKNOWN)
            text = f"{what}: its holder is not known yet: the agent has just started"
            raise ClaimError("starting", text, awaited)
