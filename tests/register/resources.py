"""Resources as a register sees them, without an agent; a test sets their devices and the devices' identities."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from deviceplugin import sharing
from deviceplugin.device import Device
from deviceplugin.inventory import Inventory
from deviceplugin.register.question import Use
from deviceplugin.register.register import Register, RegisterHost
from deviceplugin.register.store import Store


class ListedResource:
    """A resource with its devices. tokens: by device id, the device's tokens in one string, its identity first."""

    def __init__(self, resource: str, *devices: Device, driver: str, replicas: int = 1, **tokens: str) -> None:
        self.source = cast(
            "Any", SimpleNamespace(resource=resource, driver=driver, replicas=replicas, hooks=frozenset())
        )
        self.inventory = Inventory(resource)
        self.list(*devices, **tokens)

    def list(self, *devices: Device, **tokens: str) -> None:
        """Make the source's list consist of exactly these devices."""
        known = {name: frozenset(one.split()) for name, one in tokens.items() if one}
        named = [Device(name, identity=one.partition(" ")[0]) for name, one in tokens.items()]
        self.inventory.publish([*named, *devices], known)

    def ids_now(self, device: Device) -> tuple[str, ...]:
        return sharing.replicas_of(device.id, self.source.replicas)

    def device_of(self, device_id: str) -> str:
        return sharing.device_of(device_id, self.source.replicas)


class ListedResources(RegisterHost):
    """Resources, and who holds them. unknown: why a device's holder is unknown. foreign: uses by other agents."""

    services: dict[str, ListedResource]

    def __init__(self, store: Store, *served: ListedResource) -> None:
        self.services = {one.source.resource: one for one in served}
        self.unknown: dict[str, str] = {}
        self.foreign: tuple[Use, ...] = ()
        self.register = Register(self, store)

    def evidence_missing(self, resource: str, device: str) -> str:
        return self.unknown.get(device, "")

    def foreign_uses(self) -> tuple[Use, ...]:
        return self.foreign
