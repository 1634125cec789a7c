"""Finds the devices of a driver's resources, and the devices that a claim's requests get."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from deviceplugin import naming
from deviceplugin.adoption.source import AdoptedSource
from deviceplugin.device import Device, Health, in_order
from deviceplugin.inventory import GONE, Inventory, InventorySnapshot
from deviceplugin.register.records import Claim, Outlook
from deviceplugin.source import DeviceSource
from dra_bridge.driver.claims import Awaited, ClaimAllocation, ClaimError, Reason, Result, decoded_config
from dra_bridge.driver.host import DriverHost


class ServedResource(NamedTuple):
    """One resource whose devices a driver gives to claims."""

    source: DeviceSource
    inventory: Inventory


@dataclass(frozen=True, slots=True)
class RequestDevices:
    """The devices that one request of a claim gets from one source. request: the name without the subrequest."""

    request: str
    served: ServedResource
    members: tuple[tuple[Device, Result], ...]
    config: Any
    admin: bool

    @property
    def devices(self) -> tuple[Device, ...]:
        """The devices of the request in natural order, each once, even if the claim has several shares of a device."""
        devices: dict[str, Device] = {}
        for device, _ in self.members:
            devices[device.id] = device
        return tuple(in_order(devices.values()))

    @property
    def parameters(self) -> str:
        """The parameters for the source's hook `prepare`, as JSON; "" if there are none or the hook is not called."""
        if self.config is None or self.admin or "prepare" not in self.served.source.hooks:
            return ""
        return msgspec.json.encode(self.config, order="sorted").decode()


_Names = dict[str, tuple[ServedResource, Device]]
"""Devices by their published names."""


@dataclass(slots=True)
class ServedDevices:
    """The devices of a driver's resources. host: the agent that the driver belongs to."""

    driver: str
    resources: Sequence[ServedResource]
    host: DriverHost
    _named: tuple[object, Mapping[str, str], tuple[InventorySnapshot, ...], _Names] = field(
        default=(None, {}, (), {}), init=False
    )
    """The last result of `by_name`, and before it the resources, qualifiers and snapshots from which it was made."""

    def replace(self, resources: Sequence[ServedResource]) -> None:
        """Replace the driver's resources."""
        self.resources = resources

    @property
    def by_name(self) -> Mapping[str, tuple[ServedResource, Device]]:
        """The devices by their published names."""
        resources, snapshots = self.resources, dict[str, InventorySnapshot]()
        for served in resources:
            snapshots[served.source.resource] = served.inventory.snapshot
        qualifiers, now = self.host.qualifiers(list(snapshots)), tuple(snapshots.values())
        # All elements are read from one tuple, because another thread may replace the tuple.
        made_of, called, listed, names = self._named
        if made_of is not resources or qualifiers != called or any(map(operator.is_not, now, listed)):
            published = naming.published_names(qualifiers, {name: each.devices for name, each in snapshots.items()})
            by_resource = {served.source.resource: served for served in resources}
            names = {name: (by_resource[of], snapshots[of].devices[one]) for name, (of, one) in published.items()}
            self._named = resources, dict(qualifiers), now, names
        return names

    def of_claim(self, claim: Claim) -> Iterator[tuple[ServedResource, list[Device]]]:
        """Yield, for each resource, the devices that a claim holds, also devices that are unplugged now."""
        for served in self.resources:
            listed, held = served.inventory.snapshot.devices, dict[str, Device]()
            for granted in claim.devices:
                if granted.resource == served.source.resource and not granted.admin:
                    name = granted.device
                    held[name] = listed.get(name) or Device(name, health=Health.UNHEALTHY, message=GONE)
            if held:
                yield served, in_order(held.values())

    def groups(self, allocation: ClaimAllocation) -> list[RequestDevices]:
        """Return the devices that each request gets from each source, with the request's decoded parameters.

        Raises ClaimError if a device is unknown, unplugged or unhealthy, if the parameters are wrong, or if a request
        for administrative access has a device of a vendor's plugin.
        """
        by_request: dict[tuple[str, str, bool], list[tuple[Device, Result]]] = {}
        by_name = self.by_name
        for result in allocation.results:
            if result.device not in by_name:
                what = f"driver {self.driver} has no device {result.device!r} here"
                raise ClaimError(Reason.MISSING, f"request {result.request!r}: {what}")
            served, device = by_name[result.device]
            admin = bool(result.admin_access)
            if not admin:
                self._check_usable(served, device, result)
            elif isinstance(served.source, AdoptedSource):
                what = "administrative access is not possible: the vendor's plugin would allocate what others hold"
                raise ClaimError(Reason.ADMIN, f"request {result.request!r}: {served.source.resource}: {what}")
            by_request.setdefault((result.request, served.source.resource, admin), []).append((device, result))
        groups: list[RequestDevices] = []
        for (request, _, admin), members in by_request.items():
            served = by_name[members[0][1].device][0]
            config = decoded_config(served.source.config_type, allocation.config, request)
            groups.append(RequestDevices(request.partition("/")[0], served, tuple(members), config, admin))
        return groups

    def _check_usable(self, served: ServedResource, device: Device, result: Result) -> None:
        what = f"request {result.request!r}: device {result.device!r}"
        if not device.health.usable:
            accepted = {None, "", f"{self.driver}/unhealthy"}
            tolerated = any(toleration.get("key") in accepted for toleration in result.tolerations or ())
            if device.message == GONE or not tolerated:
                raise ClaimError(Reason.UNHEALTHY, f"{what} is unhealthy: {device.message or 'no reason was given'}")
        if self.host.bypassed(served.source.resource):
            why = "another plugin of its resource has registered with the kubelet instead of this agent"
            raise ClaimError(Reason.PLUGIN, f"{what}: {why}; pods with limits may be getting the device now")
        if not self.host.ready(served.source.resource, device.id):
            key = served.source.resource, device.id
            awaited = Awaited((key,), lambda: Outlook.FREE if self.host.ready(*key) else Outlook.UNKNOWN)
            text = f"{what}: its holder is not known yet: the agent has just started"
            raise ClaimError(Reason.STARTING, text, awaited)
